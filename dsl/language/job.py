"""`JobSpec`: the user's job, resolved. The compiler's only input from this floor."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import field

from dslc.dsl.language.blocks import (
    CheckpointSpec,
    DataSpec,
    DevicesSpec,
    EvaluateSpec,
    LaunchSpec,
    LogSpec,
    MemorySpec,
    ModelSpec,
    ParallelismSpec,
    TrainSpec,
)
from dslc.dsl.record import Record, record
from dslc.dsl.source import Source, Span


@record
class Promise(Record):
    """One line of `expect`: `peak_memory < 76GiB`. The value is in base units."""

    name: str
    operator: str  # < <= == >= >
    value: int | float
    span: Span = field(compare=False, repr=False)


@record
class JobSpec(Record):
    """A whole job. Every block exists; one that the user left out has its defaults.

    `evaluate` and `checkpoint` of a job that does not name them have defaults too: evaluation at the end if there is a
    validation split, and no checkpoints. `sweep` maps a path (`train.optimizer.lr`) to the text of its alternatives.
    """

    name: str  # of the file, without `.plt`
    folder: str  # the folder of the file, absolute: first on sys.path for `python(…)`
    source: Source = field(compare=False, repr=False)
    model: ModelSpec
    data: DataSpec
    devices: DevicesSpec
    parallelism: ParallelismSpec
    memory: MemorySpec
    train: TrainSpec
    evaluate: EvaluateSpec
    checkpoint: CheckpointSpec
    launch: LaunchSpec
    log: LogSpec
    expect: tuple[Promise, ...] = ()
    sweep: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
