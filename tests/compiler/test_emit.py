"""The compiler's programs for the runtime."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Iterator
from pathlib import Path

import pytest
from helpers import made_plans
from helpers.golden import hold
from helpers.paths import EXAMPLES, ROOT, TESTS
from helpers.planning import compiled

import dslc
from dslc.compiler.compile import Compiled
from dslc.compiler.emit import expected_phases
from dslc.compiler.ir import program as p
from dslc.compiler.ir.codec import to_json
from dslc.compiler.ir.facts import Facts, SourceFacts
from dslc.compiler.ir.records import TimeSource
from dslc.compiler.ir.tensors import TensorFact
from dslc.compiler.model.job_steps import locate_paths

GPT2 = ROOT / "benchmarks" / "jobs" / "gpt2.plt"
BLOCKS = tuple(f"blocks.{n}" for n in range(12))


@pytest.mark.parametrize(
    ("settings", "modules"),
    [
        ((), ("",)),
        (("train.compile=false",), ()),
        (("devices.gpus=2",), BLOCKS),  # gradients of a block are exchanged as soon as it is done
        (("memory.recompute=full",), BLOCKS),
        (("parallelism.zero=3", "memory.offload=[optimizer, parameters]"), BLOCKS),
        (("devices.gpus=none", "devices.cpus=1"), BLOCKS),
        (("train.compile=blocks",), BLOCKS),
    ],
)
def test_what_torch_compiles_one_by_one(settings: tuple[str, ...], modules: tuple[str, ...]) -> None:
    assert compiled(GPT2, *settings).program().compiled == modules


@pytest.mark.parametrize(
    ("settings", "spared"),
    [((), 8), (("memory.recompute=full",), 8), (("devices.gpus=2", "parallelism.tensor=2"), 0)],
)
def test_a_compiled_loss_makes_no_scores_in_float32(settings: tuple[str, ...], spared: int) -> None:
    # Bytes for each score at the peak: log-probabilities and their gradient. The tensor axis cuts the scores.
    with_it, without = compiled(GPT2, *settings), compiled(GPT2, "train.compile=false", *settings)
    assert (with_it.program().loss.compiled, without.program().loss.compiled) == (spared > 0, False)
    assert (
        with_it.plan.training.compiled.endswith(" and the loss") == (spared > 0) and not without.plan.training.compiled
    )
    peak, plain = (each.plan.ranks[0].memory.peak for each in (with_it, without))
    assert plain - peak == spared * 16 * 1024 * 50_304


@pytest.mark.parametrize(
    ("devices", "shortcut", "last"),
    [
        ("cpus = 2", "conv2d(4, kernel = 1, stride = 2)", False),  # torch would write past the memory of its output
        ("cpus = 1", "conv2d(4, kernel = 1, stride = 2)", False),
        ("cpus = 2", "conv2d(4, kernel = 3, stride = 2, padding = 1)", True),
        ("cpus = 2", "conv2d(16, kernel = 1), conv2d(4, kernel = 1, stride = 2)", True),
        ("gpus = 1", "conv2d(4, kernel = 1, stride = 2)", True),
    ],
)
def test_channels_are_last_but_for_what_crashes(tmp_path: Path, devices: str, shortcut: str, last: bool) -> None:
    job = tmp_path / "job.plt"
    job.write_text(
        f"""
model {{
  network = [residual([conv2d(4, stride = 2, padding = 1)], shortcut = [{shortcut}]), flatten(), linear(2)]
  loss    = cross_entropy()
}}
data {{
  source = synthetic(shape = [2, 8, 6], classes = 2)
  batch  = 8
}}
devices {{ {devices} }}
train {{
  optimizer = sgd()
  steps     = 2
}}
"""
    )
    assert compiled(job).program().model.channels_last == last


def test_each_function_of_ones_own_is_in_the_folder_of_its_job() -> None:
    own = p.PythonFunction(function="mine:function", folder=".")
    program = compiled(EXAMPLES / "digits.plt").program()
    program = dataclasses.replace(
        program,
        data=dataclasses.replace(
            program.data, python=own, collate=own, pictures=p.PictureStep(shape=(1, 8, 8), transform=own)
        ),
        own_step=own,
        model=dataclasses.replace(program.model, python=own),
        loss=dataclasses.replace(program.loss, python=own),
        optimizer=dataclasses.replace(program.optimizer, python=own),
        learning_rate=dataclasses.replace(program.learning_rate, python=own),
        metrics=(p.MetricStep(kind="python", name="mine", python=own),),
        hooks=(p.HookStep(python=own),),
        loggers=(own,),
    )
    found = list(functions_in(locate_paths(program, "/jobs")))
    assert len(found) == 11
    assert {function.folder for function in found} == {"/jobs"}


def functions_in(value: object) -> Iterator[p.PythonFunction]:
    if isinstance(value, p.PythonFunction):
        yield value
    elif isinstance(value, tuple):
        for each in value:
            yield from functions_in(each)
    elif dataclasses.is_dataclass(value):
        for field in dataclasses.fields(value):
            yield from functions_in(getattr(value, field.name))


def tokens(context: int, vocab: int) -> SourceFacts:
    sequence = TensorFact(shape=(context,), dtype="int64")
    return SourceFacts(samples=10_000, input=sequence, target=sequence, vocab=vocab, stream=True)


# Data that is missing, or differs on another machine.
DATA = {
    "chat": dataclasses.replace(tokens(128, 384), stream=False, found={"filler": 0, "digest": "of the tokens"}),
    "cluster": tokens(4096, 65_536),
    "dpo": dataclasses.replace(tokens(128, 384), stream=False, found={"filler": 0, "digest": "of the tokens"}),
    "gpt_cpu": tokens(128, 256),
    "lstm": tokens(64, 256),
    "mnist": SourceFacts(
        samples=60_000,
        validation_samples=10_000,
        input=TensorFact(shape=(1, 28, 28), dtype="float32"),
        target=TensorFact(shape=(), dtype="int64"),
        classes=10,
    ),
    "pipeline": tokens(128, 256),
    "tokens": tokens(64, 256),
}


def plan_of(example: str) -> Compiled:
    path = EXAMPLES / f"{example}.plt"
    if example == "own/own":
        return dslc.compile(str(path), trace=True)
    return compiled(path, facts=Facts(source=DATA.get(example)))


EVERY = sorted(path.relative_to(EXAMPLES).with_suffix("").as_posix() for path in EXAMPLES.rglob("*.plt"))


@pytest.mark.processes
@pytest.mark.parametrize("example", EVERY)
def test_the_program_of_an_example(example: str) -> None:
    """Returns the part that all ranks share, and the places of the first four."""
    plan = plan_of(example)
    told = {"job": to_json(plan.program()), "places": to_json(plan.places()[:4])}
    text = json.dumps(told, sort_keys=True, indent=1).replace(str(ROOT), "<root>") + "\n"
    hold(text, TESTS / "compiler" / "golden" / f"{example.replace('/', '_')}.json")


@pytest.mark.parametrize(
    ("source", "known"), [("measured", True), ("estimated", True), ("published", False), ("bound", False)]
)
def test_a_run_expects_only_times_of_its_own_machine(source: TimeSource, known: bool) -> None:
    expected = expected_phases(dataclasses.replace(made_plans.STEP, source=source))
    assert (expected is not None) == known
    assert expected is None or expected.total == pytest.approx(1.25)
