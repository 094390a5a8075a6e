"""`JobSpec`: the user's job, resolved. The compiler's only input from this floor."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import field, replace
from typing import TypeVar

from dslc.dsl.language import blocks
from dslc.dsl.language.calls import PythonCall
from dslc.dsl.language.goals import Goal
from dslc.dsl.language.lr_schedules import Plateau
from dslc.dsl.language.registry import BLOCKS, Block, Call, Node, fields
from dslc.dsl.record import Record, record
from dslc.dsl.source import Source, Span

T = TypeVar("T")


@record
class Promise(Record):
    """One line of `expect`: `peak_memory < 76GiB`. The value is in base units."""

    name: str
    operator: str  # < <= == >= >
    value: int | float
    span: Span = field(compare=False, repr=False)


@record
class JobSpec(Record):
    """A whole job. Every block exists; a block that the user left out has its defaults.

    `evaluate` and `checkpoint` of a job that does not name them have defaults too: evaluation at the end if there is a
    validation split, and no checkpoints. `sweep` maps a path (`train.optimizer.lr`) to the text of its alternatives.
    """

    name: str  # of the file, without `.plt`
    folder: str  # the folder of the file, absolute: first on sys.path for `python(…)`
    source: Source = field(compare=False, repr=False)
    model: blocks.ModelSpec
    data: blocks.DataSpec
    devices: blocks.DevicesSpec
    parallelism: blocks.ParallelismSpec
    memory: blocks.MemorySpec
    train: blocks.TrainSpec
    evaluate: blocks.EvaluateSpec
    generate: blocks.GenerateSpec
    checkpoint: blocks.CheckpointSpec
    launch: blocks.LaunchSpec
    log: blocks.LogSpec
    expect: tuple[Promise, ...] = ()
    sweep: Mapping[str, tuple[str, ...]] = field(default_factory=dict)


def python_calls(job: JobSpec) -> Iterator[PythonCall]:
    for word in BLOCKS:
        block: Block = getattr(job, word)
        for declared in fields(type(block)):
            yield from values_within(getattr(block, declared.name), PythonCall)


def values_within(value: object, kind: type[T]) -> Iterator[T]:
    if isinstance(value, kind):
        yield value
    elif isinstance(value, tuple):
        for item in value:
            yield from values_within(item, kind)
    elif isinstance(value, Node):
        for declared in fields(type(value)):
            yield from values_within(getattr(value, declared.name), kind)


def goals_of(job: JobSpec) -> Iterator[tuple[str, Goal | Plateau]]:
    """Yields each call of the job that looks at a metric of the evaluations, with the field that has it."""
    if isinstance(job.train.lr_schedule, Plateau):
        yield "train.lr_schedule", job.train.lr_schedule
    for path, goal in (("train.early_stopping", job.train.early_stopping), ("checkpoint.best", job.checkpoint.best)):
        if goal is not None:
            yield path, goal


def with_calls(job: JobSpec, change: Callable[[Call], Call]) -> JobSpec:
    """Returns the job with `change` applied to each call in it, but not to those within another, as in `repeat(…)`."""

    def changed(value: object) -> object:
        if isinstance(value, tuple):
            return tuple(changed(each) for each in value)
        return change(value) if isinstance(value, Call) else value

    blocks = {word: getattr(job, word) for word in BLOCKS}
    return replace(
        job,
        **{
            word: replace(block, **{f.name: changed(getattr(block, f.name)) for f in fields(type(block))})
            for word, block in blocks.items()
        },
    )
