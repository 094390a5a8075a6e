"""Compares the curves of a tool and a job, and says what scales what differently.

Both start from the same weights and take the same samples, so the first number that differs names the cause: a loss of
step 1 is scaled differently; a norm of step 1, the gradient; a rate, the schedule; the loss of a later step after equal
rates and norms, the update. Where rates differ, the job is trained again at the tool's rates, which shows what the
schedule alone changes.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

from dslc.proof.runners.proof_files import Curve

LOSS, NORM, RATE = 1e-4, 1e-3, 1e-6  # accepted relative differences in fp32, after some steps


def compare_curves(tool: Curve, job: Curve, at_tool_rates: Curve | None, factors: Mapping[str, int]) -> list[str]:
    """Returns what differs, in words. `factors` are sizes that may scale a number, by their names."""
    findings = [*_loss_scale(tool, job, factors), *_norm_scale(tool, job, factors), _rate_finding(tool, job, factors)]
    apart = largest_difference(tool.losses, job.losses)
    step = first_difference(tool.losses, job.losses, LOSS)
    if step is None:
        return [*findings, f"losses differ by at most {apart:.1e}: the curves are the same"]
    findings.append(f"losses part at step {step}, and differ by at most {apart:.1e}")
    if at_tool_rates is None:
        norms = first_difference(finite_norms(tool.norms), finite_norms(job.norms), NORM) if has_norms(tool) else None
        same = "rates and norms are" if has_norms(tool) else "rates are"
        if step > 1 and (norms is None or norms >= step):
            findings.append(f"{same} the same up to there: the update itself differs (optimizer, decay or clipping)")
        return findings
    rest = largest_difference(tool.losses, at_tool_rates.losses)
    if rest <= LOSS:
        findings.append(f"at the tool's rates the job differs by at most {rest:.1e}: the schedule is all that differs")
    else:
        findings.append(f"at the tool's rates the job still differs by {rest:.1e}: more than the schedule differs")
    return findings


def rates_differ(tool: Curve, job: Curve) -> bool:
    return _rate_step(tool, job) is not None


def has_norms(curve: Curve) -> bool:
    return bool(curve.norms) and None not in curve.norms


def finite_norms(norms: Sequence[float | None]) -> list[float]:
    return [norm for norm in norms if norm is not None]


def largest_difference(first: Sequence[float], second: Sequence[float]) -> float:
    """Returns the largest difference, relative to the second number, or to 1 below it."""
    return max((_difference(a, b) for a, b in zip(first, second, strict=True)), default=0.0)


def first_difference(first: Sequence[float], second: Sequence[float], tolerance: float) -> int | None:
    """Returns the step, from 1, of the first difference above the tolerance."""
    pairs = enumerate(zip(first, second, strict=True), 1)
    return next((step for step, pair in pairs if not _difference(*pair) <= tolerance), None)


def _difference(a: float, b: float) -> float:
    return abs(a - b) / max(1.0, abs(b))


def _loss_scale(tool: Curve, job: Curve, factors: Mapping[str, int]) -> list[str]:
    ratio = _ratio(tool.losses[0], job.losses[0])
    if abs(ratio - 1) <= LOSS / 10:
        return ["the losses of step 1 are the same: same weights, same samples, same mean"]
    if tool.targets[0] != tool.targets[1]:
        least, most = tool.targets
        return [
            f"the loss of step 1 is {ratio:.5g} times the job's: the tool averages the means of micro-batches, which "
            f"have {least} to {most} targets, and the job all targets"
        ]
    return [f"the loss of step 1 is {_times(ratio, factors)}"]


def _norm_scale(tool: Curve, job: Curve, factors: Mapping[str, int]) -> list[str]:
    if not has_norms(tool):
        return [f"{tool.name} reports no norm of the gradient"]
    ratio = _ratio(finite_norms(tool.norms)[0], finite_norms(job.norms)[0])
    if abs(ratio - 1) <= NORM:
        return ["the norms of the gradient of step 1 are the same: ranks and micro-batches are averaged alike"]
    return [f"the norm of the gradient of step 1 is {_times(ratio, factors)}"]


def _ratio(a: float, b: float) -> float:
    return a / b if b else float("inf")


def _times(ratio: float, factors: Mapping[str, int]) -> str:
    for factor in sorted(set(factors.values()) - {1}):
        names = " or ".join(f"each {name}" for name, size in factors.items() if size == factor)
        for power, text in ((factor, f"{factor} times"), (1 / factor, f"1/{factor} of")):
            if abs(ratio / power - 1) < NORM:
                return f"{text} the job's: {names} counts"
    return f"{ratio:.5g} times the job's"


def _rate_step(tool: Curve, job: Curve) -> int | None:
    scale = max(*tool.rates, *job.rates) or 1.0
    pairs = enumerate(zip(tool.rates, job.rates, strict=True), 1)
    return next((step for step, (a, b) in pairs if abs(a - b) > RATE * scale), None)


def _rate_finding(tool: Curve, job: Curve, factors: Mapping[str, int]) -> str:
    step = _rate_step(tool, job)
    if step is None:
        return "the learning rates are the same"
    scale = max(*tool.rates, *job.rates)
    for late in (1, 2):
        shifted = zip(tool.rates[late:], job.rates[:-late], strict=True)
        if len(tool.rates) > late + 1 and all(abs(a - b) <= 1e-4 * scale for a, b in shifted):
            behind = "1 step" if late == 1 else f"{late} steps"
            return f"the tool's schedule is {behind} behind: its rate of a step is the job's of {behind} before"
    for factor in sorted(set(factors.values()) - {1}):
        faster = list(zip(tool.rates, job.rates[::factor], strict=False))
        if len(faster) > 2 and all(abs(a - b) <= 1e-4 * scale for a, b in faster):
            names = " or ".join(name for name, size in factors.items() if size == factor)
            return f"the tool's schedule moves {factor} times in a step: once for each {names}"
    if _is_logarithmic(tool.rates):
        return "the tool's warm-up rises along a logarithm, and stays at the lowest rate for two steps"
    peaks = tool.rates.index(max(tool.rates)) + 1, job.rates.index(max(job.rates)) + 1
    if peaks[0] != peaks[1] and abs(max(tool.rates) - max(job.rates)) <= RATE * scale:
        return f"the rate peaks at step {peaks[0]} in the tool, and at step {peaks[1]} in the job: the warm-ups differ"
    pair = f"{tool.rates[step - 1]:.6g} and {job.rates[step - 1]:.6g} in the job"
    return f"the learning rates differ from step {step} on: {pair}"


def _is_logarithmic(rates: Sequence[float]) -> bool:
    """True for DeepSpeed's default warm-up, whose step k, from 3, has log(k - 1) shares of the highest rate."""
    rise = [rate for rate in rates[2:] if rate > 0]
    shares = [math.log(k) for k in range(2, 2 + len(rise))]
    end = next((k for k in range(1, len(rise)) if rise[k] <= rise[k - 1]), len(rise))
    return end > 2 and all(abs(rise[k] * shares[0] - rise[0] * shares[k]) <= 1e-3 * rise[k] for k in range(1, end - 1))
