"""Trainings whose steps are observed: their programs, their launch, and the reasons why they may differ."""

from __future__ import annotations

import sys
from collections.abc import Iterable
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from dslc.compiler.ir.program import CheckpointStep, JobProgram
from dslc.dsl.diagnostics import Diagnostic
from dslc.jobs.prepare_run import Ready, launch_quietly, show_failure

if TYPE_CHECKING:
    from dslc.runtime.measure.observe import Observation

# Warnings of `check` for differences between a plan and one process that are expected.
EXPECTED = {
    "W0606": "batch statistics are taken over each micro-batch (W0606)",
    "W0625": "the loss of a sample depends on the others of its batch (W0625)",
    "W0630": "the ranks agree otherwise than by exact sums of gradients (W0630)",
    "W0626": "each node compares the samples that it has itself (W0626)",
    "W0607": "batch statistics are taken on each rank alone (W0607)",
    "W0641": "each rank draws host random numbers of its own (W0641)",
    "W0642": "the network mixes the samples of a batch (W0642)",
}


def expected_differences(report: Iterable[Diagnostic]) -> list[str]:
    return [EXPECTED[diagnostic.code] for diagnostic in report if diagnostic.code in EXPECTED]


def observed_program(program: JobProgram, steps: int, checkpoint: CheckpointStep | None = None) -> JobProgram:
    return replace(
        program,
        steps=steps,
        log_every=steps,
        tensorboard=False,
        hooks=(),
        loggers=(),
        checkpoint=checkpoint or CheckpointStep(),
    )


def with_observation(program: JobProgram, **changes: Any) -> JobProgram:
    """Returns a program that is observed in another way."""
    assert program.observation is not None
    return replace(program, mode=replace(program.observation, **changes))


def train_observed(
    ready: Ready, program: JobProgram, folder: str, description: str, *, quiet: bool = False
) -> Observation | None:
    """Returns the observations of its ranks; None if the training failed, which is shown unless `quiet`."""
    from dslc.runtime.measure.observe import Observation

    if sys.stderr.isatty():
        print(f"trains {description} …", file=sys.stderr)
    outcome = launch_quietly(program, ready.places, folder)
    if outcome.failure is None:
        return Observation(folder, program.world_size)
    if not quiet:
        show_failure(outcome, before=f"{description}: ")
    return None


def layout_text(ready: Ready) -> str:
    job = ready.compiled.analysis.job
    ranks, parallelism, sizes = ready.program.world_size, job.parallelism, ready.compiled.analysis.layout.sizes
    parts = [f"{ranks} rank{'s' if ranks > 1 else ''}"]
    parts += [f"{axis} {sizes[axis]}" for axis in ("pipeline", "tensor", "context") if sizes[axis] > 1]
    parts.append(f"zero {parallelism.zero}")
    if parallelism.expert > 1:
        parts.append(f"expert {parallelism.expert}")
    if parallelism.replicas > 1:
        parts.append(f"{parallelism.replicas} replicas")
    if ready.program.microbatches > 1:
        parts.append(f"{ready.program.microbatches} micro-batches")
    if ready.program.recompute.kind != "none":
        parts.append(f"recompute {ready.program.recompute.kind}")
    if ready.program.offload:
        parts.append(f"offload {', '.join(ready.program.offload)}")
    if ready.program.compiled:
        parts.append("compiled")
    return ", ".join([*parts, job.train.precision.word])
