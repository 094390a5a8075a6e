"""Compares two observed trainings of a job, under its plan and in one process.

Model: four invariants of the language, each checked on the ranks' observations (runtime/measure/observe.py): the
samples of each step, by number and by content; the initial values; losses, their count and the norm of the gradient,
step by step; the parameters after the last step. The last includes a third training, in one process, that resumes from
the plan's checkpoint. If samples or initial values differ, the consequences are shown and not judged.

Tolerances, the largest accepted difference (`Tolerance`), relative to one or to the number itself, whichever is more;
of a norm to itself. In fp32: a loss 1e-5, a norm 1e-4, parameters 1e-5 with SGD; 0.05 x the sum of the learning rates
with Adam and AdamW, whose division amplifies rounding where gradients vanish; half that sum with Adagrad and RMSprop,
which have nothing to damp it; twice that sum for the bias of an attention's keys (`KEYS`) with any of these, which has
no gradient but rounding. In bf16 and fp16: a loss 2e-2, a norm 5e-2, all parameters together 0.2 of the distance that
they moved, root mean squares.

A fifth finding compares the one process with a loop that uses torch alone (runtime/loop/plain_loop.py). It finds faults
in code that both share (optimizer, decay, schedule, clipping). If the model allows it both are trained in float64, and
must agree to `EXACT`, as there is no rounding to allow for; else as above.

If this fails in fp32, both are trained again in float64, if the model can be and the plan has no pipeline. They must
agree to `EXACT`: rounding cannot lead them apart there, and a fault does. Else the one process is trained again, in
float64 if its model allows it, and with the samples of each batch in other orders. That measures the rounding of
float32, and `ROUNDING_FACTOR` times as much is accepted. Deep networks with batch statistics over few numbers need the
comparison in float64; Adam needs the other orders if a gradient is a sum that cancels, as of `l1`.

Dropout that is drawn by sample stays on: all trainings draw the same. Elsewhere it is off, or kept on by `--noise`,
where no two ranks draw the same. The difference of trainings in one process with other orders of samples, and so other
noise, times `NOISE_FACTOR`, is accepted: a coarse comparison, which finds noise of another size. The
plain loop draws what the one process draws.

A network with parameters in 16 bits is compared as above first. If the numbers differ, and it cannot be trained in
float64 or rounds there too, the tolerances of bf16 and fp16 hold. A note names the parameters.

Limits: noise that remains when dropout is off, statistics per rank or per micro-batch, and steps that fp16 skips in one
training alone, differ by nature: results that depend on them are shown, with the reason, and not judged.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from typing import TYPE_CHECKING, Literal

from dslc.compiler.ir.program import JobProgram
from dslc.dsl.language.optimizers import PythonOptimizer, torch_optimizer
from dslc.dsl.words import plural, shorten_list

if TYPE_CHECKING:
    from dslc.runtime.measure.observe import Observation, StepObservation

Status = Literal["holds", "broken", "not compared"]
TITLES = ("same samples", "same start", "same scale", "same state")
PLAIN = "plain torch"  # the fifth finding
ROUNDING_FACTOR, NOISE_FACTOR = 10.0, 4.0
# Softmax ignores a constant added to all scores of a query: this bias has no effect.
KEYS = ("qkv.bias", "k_proj.bias", "c_attn.bias")
_NAMED = 3  # names of differing items in a message, at most


@dataclass(frozen=True, kw_only=True)
class Tolerance:
    loss: float
    norm: float
    parameter: float | None  # per number; None if they are measured together
    way: float | None = None  # the difference of all parameters over the distance that they moved
    keys: float = 0.0  # per number of the parameters in `KEYS`

    def for_parameter(self, name: str) -> float:
        """Returns the tolerance for each number of a parameter, if they are not measured together."""
        assert self.parameter is not None
        return max(self.parameter, self.keys) if name.endswith(KEYS) else self.parameter


@dataclass(frozen=True, kw_only=True)
class StepComparison:
    step: int
    samples: int
    losses: tuple[float, float]
    norms: tuple[float, float]


@dataclass
class Finding:
    status: Status = "holds"
    texts: list[str] = field(default_factory=list)

    @property
    def has_violation(self) -> bool:
        return self.status == "broken"

    def breaks(self, text: str) -> None:
        if not self.has_violation:
            self.status, self.texts = "broken", []
        self.texts.append(text)


@dataclass
class Verdict:
    """The steps side by side, the four invariants in order, the plain loop, and further notes."""

    rows: list[StepComparison] = field(default_factory=list)
    findings: tuple[Finding, Finding, Finding, Finding] = field(
        default_factory=lambda: (Finding(), Finding(), Finding(), Finding())
    )
    plain: Finding = field(default_factory=Finding)
    shares: RoundingShares | None = None
    notes: list[str] = field(default_factory=list)

    @property
    def only_numbers(self) -> bool:
        """True if the broken invariants may be a matter of rounding."""
        return bool(self.broken_invariants) and not (self.findings[0].has_violation or self.findings[1].has_violation)

    @property
    def broken_invariants(self) -> list[str]:
        return [title for title, finding in zip(TITLES, self.findings, strict=True) if finding.has_violation]


@dataclass(frozen=True)
class Rounding:
    """Differences between trainings in one process that differ in float32's rounding, or in their noise: up to each
    step, of each tensor. A multiple, `times`, of the difference is accepted.
    """

    losses: Sequence[float] = ()
    norms: Sequence[float] = ()
    parameters: Mapping[str, float] = field(default_factory=dict)
    times: float = ROUNDING_FACTOR

    def loss(self, step: int) -> float:
        return self.times * max(self.losses[:step], default=0.0)

    def norm(self, step: int) -> float:
        return self.times * max(self.norms[:step], default=0.0)

    def parameter(self, name: str) -> float:
        return self.times * self.parameters.get(name, 0.0)


def rounding_of(one: Observation, others: Sequence[Observation], times: float = ROUNDING_FACTOR) -> Rounding:
    """Measures it: `others` are the training of `one` in float64, or in other orders of its samples."""
    rows = [_rows(one, other) for other in others]
    parameters: dict[str, float] = {}
    for each in (each for other in others for each in _differences(one, other, "end", Finding())):
        parameters[each.name] = max(each.excess, parameters.get(each.name, 0.0))

    def largest(apart: Callable[[StepComparison], float]) -> list[float]:
        return [max(map(apart, step)) for step in zip(*rows, strict=True)]

    return Rounding(
        largest(lambda row: _relative_difference(*row.losses, 1.0)),
        largest(lambda row: _relative_difference(*row.norms, 0.0)),
        parameters,
        times,
    )


@dataclass(frozen=True, kw_only=True)
class RoundingShares:
    """A plan's differences as shares of rounding: each step's loss and norm, and the largest of a named parameter."""

    losses: Sequence[float]
    norms: Sequence[float]
    parameter: float
    name: str


# Half a unit in the last place, relative.
HALF_LAST_PLACE = {"float32": 2.0**-24, "bfloat16": 2.0**-9, "float16": 2.0**-12}


def shares_of_rounding(plan: Observation, one: Observation, measured: Rounding) -> RoundingShares:
    """Returns the differences of the plan from the one process as shares of `measured`, which is not multiplied."""
    rows, least = _rows(plan, one), HALF_LAST_PLACE["float32"]
    losses = [_relative_difference(*row.losses, 1.0) / max(least, *measured.losses[: row.step]) for row in rows]
    norms = [_relative_difference(*row.norms, 0.0) / max(least, *measured.norms[: row.step]) for row in rows]
    parameters = {
        each.name: each.excess / max(least, measured.parameter(each.name))
        for each in _differences(plan, one, "end", Finding())
    }
    name = max(parameters, key=lambda each: order_share(parameters[each]), default="")
    return RoundingShares(losses=losses, norms=norms, parameter=parameters.get(name, 0.0), name=name)


def order_share(share: float) -> tuple[bool, float]:
    """Returns a key by which nan is the largest."""
    return math.isnan(share), share


def rounding_share_text(share: float) -> str:
    """Returns a share of rounding as a percentage, or as a multiple where it is large."""
    if not math.isfinite(share):
        return "not finite"
    return f"{share:,.0f}x" if share >= 10 else f"{share:.0%}"


def share_sentence(what: str, share: float) -> str:
    if not math.isfinite(share):
        return f"the difference of {what} is not finite"
    return f"{what} differs by at most {rounding_share_text(share)} of what rounding explains"


EXACT = Tolerance(loss=1e-9, norm=1e-9, parameter=1e-9)  # for two trainings in float64


def tolerance_of(job: JobProgram, rates: Sequence[float], *, low: bool = False) -> Tolerance:
    """Returns the tolerance of the table above; `rates` are the learning rates of the steps, `low`: as of 16 bits."""
    if job.precision.float8 is not None:  # 3 bits of a number, where bfloat16 has 7
        return Tolerance(loss=5e-2, norm=0.15, parameter=None, way=0.4)
    if job.precision.dtype != "float32" or low:
        return Tolerance(loss=2e-2, norm=5e-2, parameter=None, way=0.2)
    declared = PythonOptimizer if job.optimizer.python else torch_optimizer(job.optimizer.kind)
    # Rounding may choose the next code.
    rounding, way = declared.rounding * (10 if job.optimizer.codes else 1), sum(rates)
    if not rounding:
        return Tolerance(loss=1e-5, norm=1e-4, parameter=1e-5)
    keys = 2 * way / (1 - float(job.optimizer.arguments.get("momentum", 0.0)))
    return Tolerance(loss=1e-5, norm=1e-4, parameter=max(rounding * way, 1e-6), keys=keys)


def compare(
    job: JobProgram,
    plan: Observation,
    one: Observation,
    by_nature: Sequence[str],
    rounding: Rounding = Rounding(),
    *,
    exact: bool = False,
    low: bool = False,
) -> Verdict:
    """Compares the two trainings. `job` is the plan's program; `by_nature` are known reasons for differences; `exact`:
    both are in float64; `low`: the network computes in 16 bits.
    """
    verdict = Verdict(rows=_rows(plan, one), notes=list(by_nature))
    samples, start, scale, state = verdict.findings
    _samples(plan, one, samples)
    _start(plan, one, start)
    if noisy(plan) or noisy(one):
        if job.observation is None or not job.observation.noise:
            verdict.notes.append("the model draws random numbers of its own, and no two ranks draw the same")
        elif job.precision.dtype != "float32":
            verdict.notes.append("noise is kept on, and in low precision cannot be told from rounding")
    reason = ""
    if samples.has_violation or start.has_violation:
        reason = "the inputs of the steps differ"
    elif verdict.notes:
        reason = "it is expected to differ: see below"
    tolerance = EXACT if exact else tolerance_of(job, [seen.lr for seen in one.ranks[0]], low=low)
    _count(plan, one, scale)
    if reason:
        _leave(scale, reason)
        _leave(state, reason)
        return verdict
    _scale(plan, verdict.rows, tolerance, rounding, scale, verdict.notes)
    if scale.status == "holds":
        _state(plan, one, tolerance, rounding, state, "")
    else:
        _leave(state, "the steps that lead there differ")
    return verdict


def noisy(seen: Observation) -> bool:
    return any(each.noise for steps in seen.ranks for each in steps)


def compare_plain(job: JobProgram, one: Observation, plain: Observation, *, exact: bool, low: bool = False) -> Finding:
    """Compares the training of one process with the plain loop's; `exact`: both in float64; `low`: in 16 bits. In the
    first step both begin alike, so the first difference names the fault: the rate, the loss, the norm of the gradient
    or, if these agree, the update.
    """
    finding = Finding()
    _start(one, plain, finding)
    tolerance = EXACT if exact else tolerance_of(job, [seen.lr for seen in plain.ranks[0]], low=low)
    for ours, theirs in zip(one.ranks[0], plain.ranks[0], strict=True):
        _step_of_plain(job, ours, theirs, tolerance, finding)
        if exact and not finding.has_violation and ours.step == 1:
            _update_of_plain(job, one, plain, finding)
        if finding.has_violation:
            return finding
    finding.texts = []
    _state(one, plain, tolerance, Rounding(), finding, "")
    if not finding.has_violation:
        how = "both in float64: " if exact else "as the network rounds to 16 bits: " if low else ""
        finding.texts.insert(
            0, f"{how}learning rates, losses and norms of {plural(len(one.ranks[0]), 'step')} are the plain loop's"
        )
    return finding


def _step_of_plain(
    job: JobProgram, ours: StepObservation, theirs: StepObservation, tolerance: Tolerance, finding: Finding
) -> None:
    said = "in one process", "in the plain loop"
    if (ours.samples, ours.digests) != (theirs.samples, theirs.digests):
        finding.breaks(f"step {ours.step}: the samples are not those of the plain loop")
    if abs(ours.lr - theirs.lr) > 1e-9 * job.optimizer.lr:
        pair = f"{ours.lr:.9g} {said[0]} and {theirs.lr:.9g} {said[1]}"
        finding.breaks(f"step {ours.step}: the learning rate is {pair} (`train.lr_schedule`)")
    if finding.has_violation:
        return
    losses = _loss([ours]), _loss([theirs])
    if not _is_close(*losses, tolerance.loss, 1.0):
        finding.breaks(f"step {ours.step}: the loss is {_against(losses, tolerance.loss, *said)}")
    elif not _is_close(ours.norm, theirs.norm, tolerance.norm, 0.0):
        shown = _against((ours.norm, theirs.norm), tolerance.norm, *said)
        finding.breaks(f"step {ours.step}: the norm of the gradient is {shown}")


def _update_of_plain(job: JobProgram, one: Observation, plain: Observation, finding: Finding) -> None:
    found = list(_differences(one, plain, "first", finding))
    wrong = [each for each in found if not each.excess <= EXACT.for_parameter(each.name)]
    for each in _worst(wrong):
        finding.breaks(
            f"step 1: the gradient agrees, and its update does not: `{each.name}` is {each.largest:.3g} away"
        )
    patterns = job.optimizer.no_decay
    if patterns and wrong and all(any(fnmatchcase(each.name, p) for p in patterns) for each in wrong):
        finding.breaks("all of these are parameters that `train.no_decay` names")


def compare_resumed(
    job: JobProgram,
    resumed: Observation,
    one: Observation,
    step: int,
    verdict: Verdict,
    rounding: Rounding = Rounding(),
    *,
    exact: bool = False,
    low: bool = False,
) -> None:
    """Adds to the fourth invariant the result of resuming in one process from the plan's checkpoint of `step`."""
    finding = verdict.findings[3]
    later = [seen for seen in one.ranks[0] if seen.step > step]
    if [seen.samples for seen in resumed.ranks[0]] != [seen.samples for seen in later]:
        finding.breaks(f"resumed from the checkpoint of step {step}, the samples are not the next ones")
        return
    tolerance = EXACT if exact else tolerance_of(job, [seen.lr for seen in one.ranks[0]], low=low)
    for theirs, ours in zip(resumed.ranks[0], later, strict=True):
        losses = theirs.total / max(1.0, theirs.number), ours.total / max(1.0, ours.number)
        allowed = max(tolerance.loss, rounding.loss(ours.step))
        if not _is_close(*losses, allowed, 1.0):
            shown = _against(losses, allowed)
            finding.breaks(f"resumed from the checkpoint of step {step}, the loss of step {ours.step} is {shown}")
            return
    _state(resumed, one, tolerance, rounding, finding, f"resumed from the checkpoint of step {step}: ")


def _leave(finding: Finding, reason: str) -> None:
    if finding.status == "holds":
        finding.status, finding.texts = "not compared", [reason]


# ------------------------------------------------------------------------------------------------------ the samples


def _samples(plan: Observation, one: Observation, finding: Finding) -> None:
    taken = 0
    for number, ours in enumerate(one.ranks[0]):
        theirs = [steps[number] for steps in plan.ranks]
        wanted = Counter(ours.samples)
        there = Counter(sample for seen in theirs for sample in seen.samples)
        who = {sample: rank for rank, seen in enumerate(theirs) for sample in seen.samples}
        lost, over = list((wanted - there).elements()), list((there - wanted).elements())
        if lost:
            finding.breaks(f"step {ours.step}: no rank takes {_numbers(lost)}")
        if over:
            ranks = _ranks(who[sample] for sample in over)
            finding.breaks(f"step {ours.step}: {ranks} takes {_numbers(over)} once more than one process does")
        _content(ours, theirs, finding)
        if finding.has_violation:
            return
        taken += len(ours.samples)
    seen = all(digest for step in one.ranks[0] for digest in step.digests)
    numbers = "with the numbers it has in one process" if seen else "as parts of other batches than in one process"
    finding.texts.append(f"{taken:,} in {plural(len(one.ranks[0]), 'step')}, each once, {numbers}")


def _content(ours: StepObservation, theirs: Sequence[StepObservation], finding: Finding) -> None:
    known = dict(zip(ours.samples, ours.digests, strict=False))
    for rank, seen in enumerate(theirs):
        if len(seen.digests) != len(seen.samples):
            finding.breaks(
                f"step {seen.step}: rank {rank} was given {plural(len(seen.digests), 'sample')} in the place of "
                f"{len(seen.samples)}"
            )
            continue
        pairs = zip(seen.samples, seen.digests, strict=True)
        other = [sample for sample, digest in pairs if sample in known and known[sample] != digest]
        if other:
            finding.breaks(
                f"step {seen.step}: on rank {rank} {_numbers(other)} {'holds' if len(other) == 1 else 'hold'} other "
                "numbers than in one process (a data set has to give the same for an index, in any process, every time)"
            )


def _numbers(samples: Sequence[int]) -> str:
    return f"sample{'s' if len(samples) > 1 else ''} {shorten_list(list(map(str, sorted(samples))), _NAMED)}"


def _ranks(ranks: Iterable[int]) -> str:
    found = sorted(set(ranks))
    return f"rank{'s' if len(found) > 1 else ''} {', '.join(map(str, found))}"


# --------------------------------------------------------------------------------------------- tensors: start, state


@dataclass(frozen=True, kw_only=True)
class _TensorDifference:
    name: str
    rank: int
    largest: float  # nan if only one of the two is a number
    excess: float  # the largest, relative to one or to the number itself
    squares: float  # the sum of them
    way: float  # the same of what one process has changed since the start


def _differences(plan: Observation, one: Observation, when: str, finding: Finding) -> Iterator[_TensorDifference]:
    """Yields the difference of each tensor on each rank from the one process's. A missing tensor is a break."""
    import numpy as np

    whole, before = one.tensors(when, 0), one.tensors("start", 0)
    of_ranks = [plan.tensors(when, rank) for rank in range(len(plan.ranks))]
    for name in {name for held in of_ranks for name in held} ^ whole.keys():  # a rank has only its own stages
        where = "in one process alone" if name in whole else "under the plan alone"
        finding.breaks(f"`{name}` is there {where}")
    for rank, held in enumerate(of_ranks):
        for name in held.keys() & whole.keys():
            part, theirs, parameter = held[name]
            ours = whole[name][1][part] if part else whole[name][1]
            if not ours.size or not (parameter or np.issubdtype(ours.dtype, np.floating)):
                continue
            way = ours.astype(np.float64) - (before[name][1][part] if part else before[name][1])
            alike = np.isnan(theirs) & np.isnan(ours) | (theirs == ours)
            apart = np.where(alike, 0.0, np.abs(theirs.astype(np.float64) - ours))  # also for a number without dims
            relative = apart / np.maximum(1.0, np.abs(ours))
            yield _TensorDifference(
                name=name,
                rank=rank,
                largest=float(apart.max()),
                excess=float(relative.max()),
                squares=float(np.square(apart).sum()),
                way=float(np.square(way).sum()),
            )


def _start(plan: Observation, one: Observation, finding: Finding) -> None:
    found = list(_differences(plan, one, "start", finding))
    wrong = [each for each in found if each.largest != 0]
    for each in _worst(wrong):
        where = _rank_of(each, wrong)
        finding.breaks(f"`{each.name}` begins {where} with values that differ by up to {each.largest:.3g}")
    if finding.status == "holds":
        finding.texts.append(f"{len({each.name for each in found})} tensors begin with the same values on every rank")


def _state(
    plan: Observation, one: Observation, tolerance: Tolerance, rounding: Rounding, finding: Finding, what: str
) -> None:
    found = list(_differences(plan, one, "end", finding))
    if tolerance.parameter is None:
        assert tolerance.way is not None
        _compare_all_numbers(found, tolerance.way, finding, what)
        return
    allowed = {each.name: max(tolerance.for_parameter(each.name), rounding.parameter(each.name)) for each in found}
    wrong = [each for each in found if not each.excess <= allowed[each.name]]
    for each in _worst(wrong):
        where = _rank_of(each, wrong)
        limit = allowed[each.name]
        finding.breaks(f"{what}`{each.name}` ends {where} {each.largest:.3g} away ({limit:.2g} is allowed)")
    if finding.status == "holds":
        most = max(found, key=lambda each: each.excess)
        limit = allowed[most.name]
        finding.texts.append(f"{what}parameters differ by at most {most.excess:.2g} ({limit:.2g} is allowed)")


def _compare_all_numbers(found: Sequence[_TensorDifference], allowed: float, finding: Finding, what: str) -> None:
    """Compares all numbers of all ranks at once: their distance, over the distance that they moved in one process."""
    apart, went = sum(each.squares for each in found), sum(each.way for each in found)
    ratio = math.sqrt(apart / went) if went else (0.0 if apart == 0 else math.inf)
    shown = f"{what}parameters are {ratio:.2g} of the way that they went apart ({allowed} is allowed)"
    if ratio <= allowed:
        finding.texts.append(shown)
    else:
        finding.breaks(shown)


def _worst(found: Sequence[_TensorDifference]) -> list[_TensorDifference]:
    """Returns the worst difference of each tensor, and of these the first few."""
    by_name: dict[str, _TensorDifference] = {}
    for each in found:
        known = by_name.get(each.name)
        if known is None or not each.largest <= known.largest:
            by_name[each.name] = each
    return sorted(by_name.values(), key=lambda each: (not math.isnan(each.largest), -each.largest))[:_NAMED]


def _rank_of(one: _TensorDifference, found: Sequence[_TensorDifference]) -> str:
    return f"on {_ranks(each.rank for each in found if each.name == one.name)}"


# ------------------------------------------------------------------------------------------------------- the scale


def _rows(plan: Observation, one: Observation) -> list[StepComparison]:
    return [
        StepComparison(
            step=ours.step,
            samples=len(ours.samples),
            losses=(_loss([steps[number] for steps in plan.ranks]), _loss([ours])),
            norms=(plan.ranks[0][number].norm, ours.norm),
        )
        for number, ours in enumerate(one.ranks[0])
    ]


def _loss(seen: Sequence[StepObservation]) -> float:
    return sum(each.total for each in seen) / max(1.0, seen[0].number)


def _count(plan: Observation, one: Observation, finding: Finding) -> None:
    for number, ours in enumerate(one.ranks[0]):
        for rank, steps in enumerate(plan.ranks):
            if steps[number].number != ours.number:
                finding.breaks(
                    f"step {ours.step}: rank {rank} divides by {steps[number].number:,.0f}, one process by "
                    f"{ours.number:,.0f}"
                )
                return


def _scale(
    plan: Observation,
    rows: Sequence[StepComparison],
    tolerance: Tolerance,
    rounding: Rounding,
    finding: Finding,
    notes: list[str],
) -> None:
    if finding.has_violation:
        return
    for number, row in enumerate(rows):
        if math.isfinite(row.norms[0]) != math.isfinite(row.norms[1]) and tolerance.parameter is None:
            where = "under the plan" if math.isfinite(row.norms[1]) else "in one process"
            notes.append(f"fp16: the gradient of step {row.step} overflows {where} alone, which skips the step")
            _leave(finding, "a step was skipped in one of the two trainings")
            return
        loss = max(tolerance.loss, rounding.loss(row.step))
        norm = max(tolerance.norm, rounding.norm(row.step))
        if not _is_close(*row.losses, loss, 1.0):
            before = "; the steps before agree" if number else ""
            finding.breaks(f"step {row.step}: the loss is {_against(row.losses, loss)}{before}")
        if not _is_close(*row.norms, norm, 0.0):
            finding.breaks(f"step {row.step}: the norm of the gradient is {_against(row.norms, norm)}")
        for rank, steps in enumerate(plan.ranks):
            if not _is_close(steps[number].norm, row.norms[0], tolerance.norm, 0.0):
                finding.breaks(
                    f"step {row.step}: the norm of the gradient is {steps[number].norm:.6g} on rank {rank}, and "
                    f"{row.norms[0]:.6g} on rank 0"
                )
        if finding.has_violation:
            return
    losses = max(_relative_difference(*row.losses, 1.0) for row in rows)
    norms = max(_relative_difference(*row.norms, 0.0) for row in rows)
    finding.texts.append(
        f"losses differ by at most {losses:.2g} ({loss:.0e} is allowed), norms by {norms:.2g} of themselves "
        f"({norm:.0e})"
    )
    if not all(math.isfinite(number) for row in rows for number in (*row.losses, *row.norms)):
        notes.append("the training itself diverges: losses or gradients are not finite, with the plan and without it")


def _relative_difference(a: float, b: float, least: float) -> float:
    if a == b or (math.isnan(a) and math.isnan(b)):
        return 0.0
    return abs(a - b) / max(least, abs(b), 1e-6)


def _is_close(a: float, b: float, allowed: float, least: float) -> bool:
    return _relative_difference(a, b, least) <= allowed


def _against(
    pair: tuple[float, float], allowed: float, one: str = "under the plan", other: str = "in one process"
) -> str:
    return f"{pair[0]:.7g} {one} and {pair[1]:.7g} {other} ({allowed:.0e} is allowed)"
