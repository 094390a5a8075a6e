"""Decides which phase, and which rank, makes the steps of a run slow.

Model: a run is slow if its step takes `SLOW` times the predicted one or more, by the median of each phase over logged
steps. The phase at fault is the one with the largest excess. A rank is slow if its own work takes longer than the
median of the other ranks by `BEHIND` of a step, in most of the logged steps. Its own work is a step without waits for
other ranks. The first steps of a process do not count. Where a rank is slow, its phases stand for the run's.

Contract: each is reported once in a run, in one line, with figures and a remedy.
"""

from __future__ import annotations

import statistics
from collections import Counter, deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from dslc.compiler.ir.number_text import percent_text, time_text
from dslc.compiler.ir.program import JobProgram, StepPhases
from dslc.runtime.measure.phases import NAMES, comparisons, exposed_within, host_names, shows_exposed
from dslc.runtime.process.records import PHASES

SLOW = 1.2
BEHIND = 0.2
DIFFERENT = 0.05  # of a step: a rank that is slower by less is not recorded
LEAST = 0.005  # seconds of a step that a slow rank takes longer: less is the system's scheduling
WARM_UP = 3  # steps of a process that count for nothing
STEPS, ROWS = 20, 2  # steps and logged steps that a decision takes
WINDOW = 50  # logged steps that a decision looks back on

_TITLES = {
    "data": "data loading",
    "passes": "the forward and backward pass",
    "exposed": "waiting for gradients",
    "update": "the optimizer",
    "host": "the host's own work (hooks, logging)",
}
_REMEDIES = {
    "data": "raise data.workers",
    "passes": "look what else runs on these devices",
    "exposed": "look at the links between the ranks",
    "update": "look what else runs on these devices",
    "host": "raise log.every, or let hooks do less",
}


@dataclass(frozen=True, kw_only=True)
class SlowRank:
    """A rank that is slower than the median of the others by `behind` seconds of a step, and in `phase` most: it takes
    `seconds`, and `others` at their median.
    """

    rank: int
    behind: float
    phase: str
    seconds: float
    others: float


def folded(phases: StepPhases, within: str) -> StepPhases:
    """Returns phases whose `exposed` counts for the phase `within`; "": they stay as they are."""
    if not within:
        return phases
    return replace(phases, exposed=0.0, **{within: getattr(phases, within) + phases.exposed})


def median_phases(laps: Sequence[StepPhases]) -> StepPhases:
    return StepPhases(**{name: statistics.median(getattr(lap, name) for lap in laps) for name in NAMES})


def phase_at_fault(actual: StepPhases, expected: StepPhases) -> str | None:
    """Returns the phase that makes a step slower than expected; None if it is not slow."""
    if actual.total < SLOW * expected.total:
        return None
    return max(PHASES, key=lambda phase: getattr(actual, phase) - getattr(expected, phase))


def slow_step_text(actual: StepPhases, expected: StepPhases, calibrate: str) -> str:
    """Returns the line that names the phase at fault; "" if a step is not slow. `calibrate` is a command."""
    phase = phase_at_fault(actual, expected)
    if phase is None:
        return ""
    share, usual = (getattr(phases, phase) / phases.total for phases in (actual, expected))
    remedy = _REMEDIES[phase] + ("" if phase in ("data", "host") else f", or measure anew with `{calibrate}`")
    return (
        f"slower than expected, {time_text(actual.total)} a step for {time_text(expected.total)}: "
        f"{_TITLES[phase]} takes {percent_text(round(share, 2))} of a step; expected {percent_text(round(usual, 2))}: "
        f"{remedy}"
    )


def own_phases(phases: StepPhases, *, passes: bool) -> dict[str, float]:
    """Returns the phases in which a rank does its own work; `passes`: they do not hold the exchange."""
    rank_phases = {"data": phases.data, "update": phases.update, "host": max(0.0, phases.host - phases.rank_wait)}
    return {**rank_phases, "passes": phases.passes} if passes else rank_phases


def slowest_rank(ranks: Sequence[StepPhases], ways: Sequence[bool]) -> SlowRank | None:
    """Returns the rank whose own work takes longest; `ways` as `phases.comparisons` says. None of one rank."""
    slow_ranks = [_slowest_rank([own_phases(phases, passes=passes) for phases in ranks]) for passes in ways]
    return max(slow_ranks, key=lambda slow: slow.behind) if len(ranks) > 1 else None


def _slowest_rank(rank_phases: Sequence[Mapping[str, float]]) -> SlowRank:
    slowest = max(range(len(rank_phases)), key=lambda rank: sum(rank_phases[rank].values()))
    other_ranks = [*rank_phases[:slowest], *rank_phases[slowest + 1 :]] or rank_phases
    usual = {phase: statistics.median(phases[phase] for phases in other_ranks) for phase in rank_phases[slowest]}
    phase = max(usual, key=lambda phase: rank_phases[slowest][phase] - usual[phase])
    behind = sum(rank_phases[slowest].values()) - statistics.median(sum(phases.values()) for phases in other_ranks)
    return SlowRank(rank=slowest, behind=behind, phase=phase, seconds=rank_phases[slowest][phase], others=usual[phase])


def find_slow_rank(ranks: Sequence[StepPhases], ways: Sequence[bool]) -> SlowRank | None:
    """Returns the rank that the others wait for; None if none is slower by more than the limits."""
    slowest = slowest_rank(ranks, ways)
    if slowest is None or slowest.behind < max(LEAST, BEHIND * ranks[slowest.rank].total):
        return None
    return slowest


def compared_phases(job: JobProgram, actual: Mapping[str, float] | None) -> dict[str, dict[str, float | None]]:
    """Returns each phase of a step, predicted and measured; `actual` as a rank has left it."""
    within = exposed_within(job)
    sides = job.expected, StepPhases(**actual) if actual is not None else None
    predicted, folded_actual = (folded(phases, within) if phases is not None else None for phases in sides)
    names = [phase for phase in PHASES if phase != "exposed" or not within]
    return {
        phase: {"predicted": getattr(predicted, phase, None), "measured": getattr(folded_actual, phase, None)}
        for phase in names
    }


def phase_numbers(job: JobProgram, ranks: Sequence[StepPhases]) -> dict[str, float]:
    """Returns the phases of rank 0, and where ranks differ the phases of the slowest, as a record has them."""
    if not ranks:
        return {}
    names = [phase for phase in PHASES if phase != "exposed" or (job.world_size > 1 and shows_exposed(job))]
    numbers = {f"seconds.{phase}": getattr(ranks[0], phase) for phase in names}
    slowest = slowest_rank(ranks, comparisons(job))
    if slowest is not None and slowest.behind > DIFFERENT * ranks[slowest.rank].total:
        numbers["slowest.rank"] = slowest.rank
        numbers |= {f"slowest.{phase}": getattr(ranks[slowest.rank], phase) for phase in names}
    return numbers


def slow_rank_text(slow: SlowRank, host: str) -> str:
    host_text = f" on {host}" if host else ""
    remedy = "look what else runs there" if slow.phase in ("passes", "update") else _REMEDIES[slow.phase]
    return (
        f"rank {slow.rank}{host_text} is slower than the others: {_TITLES[slow.phase]} takes {time_text(slow.seconds)} "
        f"of its step, {time_text(slow.others)} at the median of the others: {remedy}"
    )


class SlowStepWatch:
    """Follows the phases of the logged steps of a run, on rank 0, and says once what makes it slow."""

    def __init__(
        self, expected: StepPhases | None, *, within: str, ways: Sequence[bool], hosts: Sequence[str], calibrate: str
    ) -> None:
        self._expected, self._within, self._ways = expected, within, ways
        self._hosts, self._calibrate = hosts, calibrate
        self._laps: deque[StepPhases] = deque(maxlen=WINDOW)  # of the slow rank, or else of rank 0
        self._slow: deque[SlowRank | None] = deque(maxlen=WINDOW)
        self._named: set[str] = set()

    def follow(self, steps: int, ranks: Sequence[StepPhases]) -> list[str]:
        """Takes the phases of all ranks after `steps` steps of this process; returns the lines to be shown."""
        if steps <= WARM_UP or not ranks:
            return []
        slow = find_slow_rank(ranks, self._ways)
        self._slow.append(slow)
        self._laps.append(ranks[slow.rank if slow is not None else 0])
        if steps < STEPS or len(self._laps) < ROWS:
            return []
        return [line for line in (self._slow_rank(), self._slow_step()) if line]

    def _slow_step(self) -> str:
        if self._expected is None or "step" in self._named:
            return ""
        actual, expected = (folded(phases, self._within) for phases in (median_phases(self._laps), self._expected))
        line = slow_step_text(actual, expected, self._calibrate)
        self._named |= {"step"} if line else set()
        return line

    def _slow_rank(self) -> str:
        """Names a rank that is the slow one in most of the logged steps."""
        slow = usual_slow_rank(self._slow)
        if slow is None or "rank" in self._named:
            return ""
        self._named.add("rank")
        return slow_rank_text(slow, self._hosts[slow.rank])


def usual_slow_rank(rows: Sequence[SlowRank | None]) -> SlowRank | None:
    """Returns the rank and the phase that are slow in more than half of the logged steps; None if there are none."""
    counts = Counter((row.rank, row.phase) for row in rows if row is not None)
    (usual, count), *_ = counts.most_common(1) or [((0, ""), 0)]
    if 2 * count <= len(rows):
        return None
    same = [row for row in rows if row is not None and (row.rank, row.phase) == usual]
    medians = {name: statistics.median(getattr(row, name) for row in same) for name in ("behind", "seconds", "others")}
    return SlowRank(rank=usual[0], phase=usual[1], **medians)


def slow_step_watch(job: JobProgram) -> SlowStepWatch:
    """Returns the watch of a run. All ranks call it."""
    return SlowStepWatch(
        job.expected,
        within=exposed_within(job),
        ways=comparisons(job),
        hosts=host_names(job),
        calibrate=job.calibrate,
    )
