"""Properties of jobs. Each raises AssertionError with numbers, and the command that shows the job again."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

from dslc.compiler.ir.number_text import byte_text, percent_text, time_text
from dslc.dsl.language import units
from dslc.testing.job_variants import JobVariant

if TYPE_CHECKING:
    from dslc.runtime.checkpoint.files import Compatibility


def assert_accepted(variant: JobVariant) -> None:
    """Asserts that `dslc check` finds no mistake."""
    assert variant.analysis is not None


def assume_accepted(variant: JobVariant) -> None:
    """Has hypothesis draw another example if `dslc check` finds a mistake: the property is about accepted jobs."""
    from hypothesis import assume

    assume(not variant.errors)


def assert_same_training(variant: JobVariant, baseline: JobVariant) -> None:
    """Asserts that two plans train alike: the same global batch, seed, order of samples and number of steps."""
    wrong = _differences(variant, baseline)
    assert not wrong, f"{variant.command}\ntrains otherwise than\n{baseline.command}\n" + "\n".join(wrong)


def assert_resumable(variant: JobVariant, checkpoint: JobVariant) -> None:
    """Asserts that a job would resume from a checkpoint that another wrote: the same tensors and optimizer, the same
    samples in the same order. All else may differ.
    """
    from dslc.runtime.checkpoint.files import incompatibilities

    wrong = incompatibilities(_compatibility(checkpoint), _compatibility(variant))
    assert not wrong, f"{variant.command}\ncannot resume from a checkpoint of\n{checkpoint.command}\n" + "\n".join(
        wrong
    )


def assert_within_memory(variant: JobVariant, limit: str = "") -> None:
    """Asserts that no rank holds more than a limit such as "40GiB", or more than its device has."""
    analysis = variant.analysis
    assert analysis.costs, f"{variant.command}\nhas a network that is not traced: its memory is not known"
    most = _bytes(limit) if limit else analysis.job.memory.limit or analysis.layout.hardware.memory
    assert most is not None, f"the memory of `{analysis.layout.hardware.kind}` is not known: name a limit"
    peak = max(cost.memory.peak for cost in analysis.costs)
    assert peak <= most, f"{variant.command}\nhas a rank with {byte_text(peak)}, over {byte_text(most)}"


def assert_step_time(variant: JobVariant, baseline: JobVariant, *, slower_by: float = 0.0) -> None:
    """Asserts that a step takes no longer than a step of another plan, or longer by a share of it: 0.1 is 10%."""
    here, there = _step_time(variant), _step_time(baseline)
    more = here / there - 1
    assert more <= slower_by, (
        f"{variant.command}\ntakes {time_text(here)} a step, {percent_text(more)} more than the {time_text(there)} of\n"
        f"{baseline.command}\nand {percent_text(slower_by)} more are allowed"
    )


def _step_time(variant: JobVariant) -> float:
    estimate = variant.analysis.estimate
    time = estimate.step_time if estimate is not None else None
    assert time is not None, (
        f"{variant.command}\nhas no predicted time: `dslc calibrate` measures this machine, or name a `devices.kind` "
        "of the catalogue"
    )
    return time


def _bytes(text: str) -> int:
    match = re.fullmatch(r"(\d+(?:\.\d+)?) ?([A-Za-z]+)", text)
    quantity = units.in_base_units(float(match[1]), match[2]) if match else None
    if quantity is None or quantity.dimension != "bytes":
        raise ValueError(f"{text!r} is no number of bytes, such as '40GiB'")
    return int(quantity.value)


def _differences(variant: JobVariant, baseline: JobVariant) -> list[str]:
    """Returns what differs in the batches of two trainings, in words."""
    ours, theirs = variant.compiled.program(), baseline.compiled.program()
    rows = (
        ("global batch", ours.data.batch, theirs.data.batch),
        ("seed", ours.data.seed, theirs.data.seed),
        ("shuffling", ours.data.shuffle, theirs.data.shuffle),
        ("order of samples", ours.data.order, theirs.data.order),
        ("number of training samples", ours.data.train_samples, theirs.data.train_samples),
        ("number of steps in an epoch", ours.steps_per_epoch, theirs.steps_per_epoch),
        ("number of steps", variant.analysis.workload.steps, baseline.analysis.workload.steps),
    )
    return [f"its {what} is {one}, and not {other}" for what, one, other in rows if one != other]


def _compatibility(variant: JobVariant) -> Compatibility:
    from dslc.runs.checkpoints import tensors_of
    from dslc.runtime.checkpoint.files import fit_of

    model = variant.analysis.model
    return fit_of(variant.compiled.program(), tensors_of(model, {}) if model is not None else None)
