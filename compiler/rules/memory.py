"""Compares the account with the device's memory and the job's promises: E0501, E0502, W0503, E0509.

If a job does not fit, the message says when and where its peak is, and the largest kind and layer in it. It lists the
changes that would make the job fit. Each such change is really made to the job, which is analysed again under all the
rules; the listed changes pass them, fit, and if possible keep the training the same. Prices come from the account:
arithmetic, bytes exchanged, and the time of a step if the catalogue has speeds. If no change is enough, pairs are
tried. So are pairs of settings if each change that is enough needs a lower precision, more devices or memory of the
host. If no pair is enough, one change of each kind is added, each time the change that leaves the lowest peak.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace
from functools import partial
from itertools import combinations, islice, takewhile
from typing import TYPE_CHECKING, Protocol

from dslc.compiler.cost.estimate import missing_figures
from dslc.compiler.ir.actions import handed_in
from dslc.compiler.ir.memory import MemoryNode
from dslc.compiler.ir.number_text import byte_text, percent_text, time_text
from dslc.compiler.ir.records import source_text
from dslc.compiler.placement.sharding import low_copy, low_precision, splits_backward
from dslc.dsl.bounds import ACTIONS
from dslc.dsl.diagnostics import Diagnostic
from dslc.dsl.language import calls as c
from dslc.dsl.language.blocks import RecomputeBudget
from dslc.dsl.language.job import JobSpec, Promise
from dslc.dsl.language.registry import AUTO, Call
from dslc.dsl.meaning.auto_fields import value_text
from dslc.dsl.record import Record, record
from dslc.dsl.remedy import Edit, Fix, join_remedies, remedy, set_field

if TYPE_CHECKING:
    from dslc.compiler.rules.analysis import Analysis

MOST_REMEDIES = 7
_TENSOR = "tensor"


class Reanalysis(Protocol):
    """Analyses a slightly different job; returns the analysis, and the codes that the rules report. The analysis is
    None if the job has none, or if it is too much work (then `all` is false).
    """

    all: bool

    def __call__(self, job: JobSpec) -> tuple[Analysis | None, frozenset[str]]: ...


# ------------------------------------------------------------------------------------------------------- the limit


def check_memory(analysis: Analysis, again: Reanalysis) -> Iterator[Diagnostic]:
    """Checks the peak against `memory.limit` or the device's memory. `again` analyses a changed job."""
    job, layout = analysis.job, analysis.layout
    yield from _check_budget(analysis, again)
    limit = job.memory.limit or layout.hardware.memory
    if not analysis.costs or limit is None or _peak(analysis) <= limit:
        return
    yield Diagnostic(
        "E0501",
        f"{_holder(analysis)} would hold {byte_text(_peak(analysis))} at its peak, over a limit of {byte_text(limit)}",
        job.memory.value_span("limit") if job.memory.is_set("limit") else job.devices.value_span("kind"),
        label=blame(_worst(analysis)),
        help=remedies(analysis, limit, again),
    )


def _check_budget(analysis: Analysis, again: Reanalysis) -> Iterator[Diagnostic]:
    """Reports a budget of recomputation that no choice of blocks meets."""
    budget = analysis.job.memory.recompute
    if not isinstance(budget, RecomputeBudget) or not analysis.costs or _peak(analysis) <= budget.peak:
        return
    if splits_backward(analysis.job):  # E0444
        return
    choices = "no choice of recomputed blocks" if budget.exact else "no choice that was compared"
    yield Diagnostic(
        "E0509",
        f"{choices} keeps {_holder(analysis)} within {byte_text(budget.peak)}: the smallest peak is "
        f"{byte_text(_peak(analysis))}",
        budget.value_span("peak"),
        label=blame(_worst(analysis)),
        help=remedies(analysis, budget.peak, again),
    )


def _worst(analysis: Analysis) -> MemoryNode:
    return max((cost.memory for cost in analysis.costs), key=lambda memory: memory.peak)


def _peak(analysis: Analysis) -> int:
    return _worst(analysis).peak


def _holder(analysis: Analysis) -> str:
    layout = analysis.layout
    if layout.world_size == 1:
        return "the device"
    pipeline = max(range(len(analysis.costs)), key=lambda p: analysis.costs[p].memory.peak)
    return f"rank {layout.ranks(pipeline)[0] + _worst(analysis).rank * layout.stride('data')}"


def blame(memory: MemoryNode) -> str:
    """Names the largest kind in the peak, its largest layer, and the moment."""
    kind, amount = max(memory.kinds.items(), key=lambda item: item[1])
    by = ""
    if kind == "activations" and memory.layers:
        by = f", of which {memory.layers[0].name} {byte_text(memory.layers[0].bytes)}"
    return f"most of it is {kind}: {byte_text(amount)}{by}, {memory.moment}"


# ---------------------------------------------------------------------------------------------------------- remedies


@record
class Change(Record):
    """A change of the job. One `what` may come in several sizes; the cheapest that is enough is shown. If `only_after`
    is the `what` of another change, it is tried only where that one is enough, as it does less of the same.

    `priority` orders changes before their price does, 0 first: 0 leaves the training as it is, 1 needs memory of the
    host and a time that is not predicted, 2 changes the precision, 3 needs more devices.
    """

    what: str
    edits: tuple[Edit, ...]
    make: Callable[[JobSpec], JobSpec]
    priority: int = 0
    only_after: str = ""
    combines: bool = True  # whether it is tried with other changes


@record
class _Remedy(Record):
    changes: tuple[Change, ...]
    found: Analysis

    @property
    def priority(self) -> int:
        return max(change.priority for change in self.changes)

    def key(self) -> tuple[float, ...]:
        """Orders remedies: by priority, a predicted time before one that is only bounded, and then by price."""
        estimate = self.found.estimate
        time, is_bound = (estimate.step_time, estimate.source == "bound") if estimate else (None, False)
        return (self.priority, is_bound, time or 0.0, _flops(self.found), _traffic(self.found))


class _ApplyChanges(Protocol):
    """Returns a job with these changes; None if two set one field, if a rule reports something new of the job, or if it
    was not analysed.
    """

    def __call__(self, *changes: Change) -> _Remedy | None: ...


def remedies(analysis: Analysis, limit: int, again: Reanalysis) -> str:
    """Returns the changes after which the peak is at most `limit`, each with its price, best first."""
    known = again(analysis.job)[1]

    def attempt(*changes: Change) -> _Remedy | None:
        paths = [edit.path for change in changes for edit in change.edits]
        if len(set(paths)) < len(paths):
            return None
        job = analysis.job
        for change in changes:
            job = change.make(job)
        found, codes = again(job)
        return _Remedy(changes=changes, found=found) if found is not None and found.costs and codes <= known else None

    kinds: dict[str, list[Change]] = {}
    for change in _changes(analysis, limit):
        kinds.setdefault(change.what, []).insert(0, change)
    fitting: list[_Remedy] = []
    lighter: list[list[Change]] = []
    for changes in kinds.values():
        needed = changes[0].only_after
        if needed and not any(fit.changes[0].what == needed for fit in fitting):
            continue
        largest = next(filter(None, map(attempt, changes)), None)
        fitting += _enough(map(attempt, changes), limit)
        if largest is not None and changes[0].combines and _peak(largest.found) < _peak(analysis):
            lighter.append(changes[changes.index(largest.changes[0]) :])
    least = min((fit.priority for fit in fitting), default=None)
    lighter = [changes for changes in lighter if least is None or changes[0].priority < least]
    settings = [changes for changes in lighter if changes[0].priority == 0]
    fitting += _fitting_pairs(settings, limit, attempt)
    # A wider tensor axis excludes more micro-batches, and costs more: the last resort.
    joined: list[_Remedy] = []
    for kinds_left in ([changes for changes in lighter if changes[0].what != _TENSOR], lighter):
        if not fitting and not _enough(joined, limit):
            joined += filter(None, [_combined_remedy(analysis, kinds_left, limit, attempt)])
    fitting += _fitting_pairs(lighter, limit, attempt)
    if not fitting:
        together = min(joined, key=lambda fit: _peak(fit.found), default=None)
        if together is None or _peak(together.found) > limit:
            return _none(together, again)
        fitting = [together]
    best = _cheapest_by_kind(sorted(fitting, key=_Remedy.key))[:MOST_REMEDIES]
    lines: list[str] = [remedy(_as_fix(fit.changes), f": {_price(analysis, fit.found)}") for fit in best]
    first = "any of these makes it fit, the cheapest first" if len(lines) > 1 else "this makes it fit"
    return join_remedies("\n", [first, *lines])


def _enough(largest_first: Iterable[_Remedy | None], limit: int) -> list[_Remedy]:
    """Returns the remedies within `limit` before the first that is above it, the smallest change first. None is a
    change that a rule refuses.
    """
    return [*takewhile(lambda fit: _peak(fit.found) <= limit, filter(None, largest_first))][::-1]


def _combined_remedy(
    analysis: Analysis, kinds: list[list[Change]], limit: int, attempt: _ApplyChanges
) -> _Remedy | None:
    """Adds changes one by one until the peak is within `limit` or no change lowers it, in the order of their priority.
    `kinds` are the changes of each kind, the largest first. In the end each change becomes the cheapest of its kind
    that is still enough, or that leaves as low a peak.
    """
    joined = None
    for priority in range(4):
        left = [largest for largest, *_ in kinds if largest.priority == priority]
        while left and not (joined and _peak(joined.found) <= limit):
            before = joined.changes if joined else ()
            tried = [fit for change in left if (fit := attempt(*before, change)) is not None]
            best = min(tried, key=lambda fit: _peak(fit.found), default=None)
            if best is None or _peak(best.found) >= _peak(joined.found if joined else analysis):
                break
            joined = best
            left.remove(best.changes[-1])
    if joined is None:
        return None
    for n in reversed(range(len(joined.changes))):
        before, change, after = joined.changes[:n], joined.changes[n], joined.changes[n + 1 :]
        (sizes,) = (changes for changes in kinds if change in changes)
        others = (attempt(*before, other, *after) for other in sizes)
        joined = min(_enough(others, max(limit, _peak(joined.found))), key=_Remedy.key)
    return joined


def _fitting_pairs(kinds: list[list[Change]], limit: int, attempt: _ApplyChanges) -> list[_Remedy]:
    """Returns the pairs of changes with a peak within `limit`. Of each two kinds the largest changes are tried first,
    and the others only if these fit, so that the work that is allowed reaches all kinds.
    """
    by_priority = sorted(kinds, key=lambda changes: changes[0].priority)
    pairs = list(combinations(by_priority, 2))
    reach = [(one, other) for one, other in pairs if _enough([attempt(one[0], other[0])], limit)]
    return [fit for one, other in reach for first in one for fit in _enough(map(partial(attempt, first), other), limit)]


def _none(best: _Remedy | None, again: Reanalysis) -> str:
    text = "no change of `parallelism`, `memory`, `precision` or of how many devices makes it fit, alone or combined"
    if not again.all:
        text = "the job is too large to try all changes, and none of those tried makes it fit"
    return f"{text}: with {_as_fix(best.changes).text} it is {byte_text(_peak(best.found))}" if best else text


def _cheapest_by_kind(remedies: list[_Remedy]) -> list[_Remedy]:
    seen: dict[tuple[str, ...], _Remedy] = {}
    for fit in remedies:
        seen.setdefault(tuple(change.what for change in fit.changes), fit)
    return list(seen.values())


def _changes(analysis: Analysis, limit: int) -> Iterator[Change]:
    """Yields single changes that may lower the peak to `limit`, from small to large of each kind."""
    job, layout = analysis.job, analysis.layout
    parallelism = job.parallelism
    if layout.sizes["data"] * layout.sizes["context"] > 1:
        for zero in range(parallelism.zero + 1, 4):
            yield Change(what="zero", edits=_edits("parallelism.zero", zero), make=_set("parallelism", zero=zero))
        if parallelism.replicas > 1:
            edits = _edits("parallelism.replicas", 1)
            yield Change(what="replicas", edits=edits, make=_set("parallelism", replicas=1))
    if layout.sizes["tensor"] > 1 and not layout.sequence and not job.model.has_user_network:
        edits = _edits("parallelism.sequence", "true")
        yield Change(what="sequence", edits=edits, make=_set("parallelism", sequence=True))
    yield from _wider_tensor_axis(analysis)
    share, pieces = analysis.workload.share, layout.microbatches
    more = range(2, min(share // pieces, ACTIONS.most) + 1)
    for count in islice((pieces * n for n in more if share % (pieces * n) == 0), 6):
        edits = _edits("parallelism.microbatches", count)
        yield Change(what="microbatches", edits=edits, make=_set("parallelism", microbatches=count))
    for recompute in _more_recompute(job):
        word = f"every({recompute.n})" if isinstance(recompute, c.EveryNthBlock) else recompute
        edits = _edits("memory.recompute", word)
        yield Change(what="recompute", edits=edits, make=_set("memory", recompute=recompute))
    if not splits_backward(job):
        budget = RecomputeBudget(peak=limit)
        edits = _edits("memory.recompute", value_text(budget))
        make = _set("memory", recompute=budget)
        yield Change(what="recompute by budget", edits=edits, make=make, only_after="recompute", combines=False)
    if isinstance(job.model.loss, c.CrossEntropy) and job.model.loss.chunks == 1:
        loss = replace(job.model.loss, chunks=AUTO)
        yield Change(what="chunks", edits=_edits("model.loss.chunks", AUTO), make=_set("model", loss=loss))
    if layout.device == "cuda":
        for moved in (("optimizer",), ("optimizer", "parameters"), ("activations",)):
            if not set(moved) <= set(job.memory.offload):
                both = tuple(dict.fromkeys((*job.memory.offload, *moved)))
                edits = _edits("memory.offload", f"[{', '.join(both)}]")
                yield Change(what=f"offload {moved[-1]}", edits=edits, make=_set("memory", offload=both), priority=1)
    if not low_precision(job):
        edits = _edits("train.precision", "bf16")
        yield Change(what="precision", edits=edits, make=_set("train", precision=c.Bf16()), priority=2)
    if not low_copy(job):
        low = c.Fp16(level="O2") if isinstance(job.train.precision, c.Fp16) else c.Bf16(level="O2")
        edits = _edits("train.precision", f"{low.word}(level = O2)")
        yield Change(what="precision", edits=edits, make=_set("train", precision=low), priority=2)
    yield from _more_devices(analysis)


def _wider_tensor_axis(analysis: Analysis) -> Iterator[Change]:
    """Yields tensor axes of more ranks of a node, which the data axis gives up, with micro-batches of as many rows."""
    job, sizes, pieces = analysis.job, analysis.layout.sizes, analysis.layout.microbatches
    for factor in (2, 4, 8):
        tensor, (data, left) = sizes["tensor"] * factor, divmod(sizes["data"], factor)
        if left or analysis.layout.processes % tensor:
            continue
        values = {"tensor": tensor, "microbatches": pieces * factor}
        values |= {} if job.parallelism.data is None else {"data": data}
        edits = tuple(edit for name, value in values.items() for edit in _edits(f"parallelism.{name}", value))
        yield Change(what=_TENSOR, edits=edits, make=_set("parallelism", **values))


def _more_recompute(job: JobSpec) -> list[str | Call]:
    order: list[str | Call] = ["none", "selective", c.EveryNthBlock(n=2), "full"]
    now = order.index(job.memory.recompute) if job.memory.recompute in order else 2
    return order[now + 1 :]


def _more_devices(analysis: Analysis) -> Iterator[Change]:
    """Yields twice and four times the data-parallel ranks, of the same nodes."""
    devices, processes = analysis.job.devices, analysis.layout.processes
    field = "cpus" if devices.gpus is None else "gpus"
    if field == "gpus" and not isinstance(devices.gpus, int):
        return
    for factor in (2, 4):
        data = analysis.layout.sizes["data"] * factor if analysis.job.parallelism.data is not None else None

        def make(job: JobSpec, count: int = factor * processes, data: int | None = data) -> JobSpec:
            more = replace(job.devices, cpus=count) if field == "cpus" else replace(job.devices, gpus=count)
            job = replace(job, devices=more)
            return job if data is None else replace(job, parallelism=replace(job.parallelism, data=data))

        edits = _edits(f"devices.{field}", factor * processes) + (_edits("parallelism.data", data) if data else ())
        yield Change(what="devices", edits=edits, make=make, priority=3)


def _edits(path: str, value: object) -> tuple[Edit, ...]:
    return (set_field(path, value, f"`{path} = {value}`"),)


def _set(block: str, **values: object) -> Callable[[JobSpec], JobSpec]:
    return lambda job: replace(job, **{block: replace(getattr(job, block), **values)})


def _as_fix(changes: tuple[Change, ...]) -> Fix:
    edits = tuple(edit for change in changes for edit in change.edits)
    *others, last = [edit.text for edit in edits]
    return Fix(edits, f"{', '.join(others)} and {last}" if others else last)


def _price(before: Analysis, after: Analysis) -> str:
    """`peak 1.2 GiB, 33% more arithmetic, 3 MiB more traffic a step, step 1.2 s instead of 1 s`."""
    parts = [f"peak {byte_text(_peak(after))}"]
    work = _flops(after) * after.layout.world_size / max(1, _flops(before) * before.layout.world_size) - 1
    if work > 0.0005:
        parts.append(f"{percent_text(work)} more arithmetic")
    traffic = _traffic(after) - _traffic(before)
    if traffic:
        parts.append(f"{byte_text(abs(traffic))} {'more' if traffic > 0 else 'less'} traffic a step")
    if after.job.memory.recompute == "selective" != before.job.memory.recompute:
        parts.append("all but matrix products and attention is computed again")
    moved = set(after.job.memory.offload) - set(before.job.memory.offload)
    if moved:
        parts.append(f"{' and '.join(sorted(moved))} go to the host and back in each step")
    parts += _time_price(before, after)
    if len(parts) == 1:
        parts.append("no more arithmetic or traffic")
    return ", ".join(parts)


def _time_price(before: Analysis, after: Analysis) -> list[str]:
    """Returns `1.2 s a step instead of 1 s`, or the new time alone where the two are not of one kind: a bound by the
    data sheet is below what runs take.
    """
    old, new = before.estimate, after.estimate
    if old is None or new is None or old.step_time is None or new.step_time is None:
        return []
    time = f"{'at best ' * (new.source == 'bound')}{time_text(new.step_time)} a step"
    if old.source != new.source:
        return [time]
    is_other = abs(new.step_time / old.step_time - 1) > 0.0005
    return [f"{time} instead of {time_text(old.step_time)}"] if is_other else []


def _flops(analysis: Analysis) -> int:
    return max(cost.flops for cost in analysis.costs)


def _traffic(analysis: Analysis) -> int:
    return max(handed_in(cost.traffic) for cost in analysis.costs)


# ---------------------------------------------------------------------------------------------------------- promises


def _bubble(analysis: Analysis) -> float | None:
    """Returns the bubble by the predicted times, else by FLOPs."""
    estimated, pipeline = analysis.estimate, analysis.pipeline
    if pipeline is None:
        return None
    return estimated.bubble if pipeline.schedule and estimated and estimated.step_time is not None else pipeline.bubble


def promise_values(analysis: Analysis) -> dict[str, int | float | None]:
    """Returns the values that `expect` can name, in base units; None for an unknown one."""
    known = bool(analysis.costs)
    estimated = analysis.estimate
    return {
        "devices": analysis.layout.world_size,
        "parameters": analysis.model.parameters if analysis.model else None,
        "peak_memory": _peak(analysis) if known else None,
        "bubble": _bubble(analysis),
        "traffic": _traffic(analysis) if known else None,
        "step_time": estimated.step_time if estimated else None,
        "mfu": estimated.mfu if estimated else None,
    }


_COMPARE = {"<": operator.lt, "<=": operator.le, "==": operator.eq, ">=": operator.ge, ">": operator.gt}
_TEXT = {
    "peak_memory": byte_text,
    "traffic": byte_text,
    "bubble": percent_text,
    "mfu": percent_text,
    "step_time": time_text,
}


def check_promises(analysis: Analysis, again: Reanalysis, *, sound: bool) -> Iterator[Diagnostic]:
    """Checks each line of `expect` against the plan. An unknown value is reported only if no error is known yet, as it
    may be unknown for a mistake.
    """
    if analysis.model is None and not analysis.job.model.has_user_network:
        return
    values = promise_values(analysis)
    for promise in analysis.job.expect:
        value = values[promise.name]
        if value is None:
            if sound:
                yield Diagnostic(
                    "W0503",
                    f"`{promise.name}` cannot be computed for this job, so the promise is not checked",
                    promise.span,
                    help=_unknown(analysis, promise),
                )
        elif not _holds(promise, value):
            text = _TEXT.get(promise.name, _number)
            yield Diagnostic(
                "E0502",
                f"`{promise.name}` is {text(value)}, and {_promised(promise, text(promise.value))} was expected",
                promise.span,
                label=_actual_text(analysis, promise, text(value)),
                help=_help(analysis, promise, again),
            )


def _unknown(analysis: Analysis, promise: Promise) -> str:
    """Says how the value of a promise would become known."""
    layout = analysis.layout
    lacks = missing_figures(layout, analysis.job.train.precision.word)
    if promise.name not in ("step_time", "mfu") or not lacks:
        return "`dslc check --trace` looks into `python(…)` models"
    if promise.name == "step_time" and analysis.estimate is not None and analysis.estimate.lacks:
        return f"the calibration lacks {analysis.estimate.lacks}"
    if promise.name == "step_time" and layout.device == "cpu" and analysis.job.devices.catalogue is None:
        return "`dslc calibrate JOB` measures it, on the machine that trains"
    figures = " and ".join(f"`{figure}`" for figure in lacks)
    if layout.hardware.kind == "gpu":
        return "name a `devices.kind` of the catalogue"
    if analysis.job.devices.catalogue is not None:
        return f"{figures} in the table `[{layout.hardware.kind}]` of the catalogue"
    return f"`devices.catalogue`, a file with a table `[{layout.hardware.kind}]` that says {figures} of one process"


def _holds(promise: Promise, value: float) -> bool:
    held: bool = _COMPARE[promise.operator](value, promise.value)
    return held


def _actual_text(analysis: Analysis, promise: Promise, value: str) -> str:
    if promise.name == "peak_memory":
        return f"found on {_holder(analysis)}; {blame(_worst(analysis))}"
    estimated = analysis.estimate
    timed = promise.name in ("step_time", "mfu") and estimated is not None
    source = source_text(estimated.source, estimated.fit, analysis.layout.hardware.kind) if timed and estimated else ""
    return f"found {value}{source}"


def _help(analysis: Analysis, promise: Promise, again: Reanalysis) -> str:
    if promise.name == "peak_memory" and promise.operator in ("<", "<="):
        limit = math.floor(promise.value) if promise.operator == "<=" else math.ceil(promise.value) - 1
        return remedies(analysis, limit, again)
    return "`dslc plan` shows how it is computed"


def _promised(promise: Promise, value: str) -> str:
    words = {"<": "less than", "<=": "at most", "==": "exactly", ">=": "at least", ">": "more than"}
    return f"{words[promise.operator]} {value}"


def _number(value: float) -> str:
    return f"{value:,}"
