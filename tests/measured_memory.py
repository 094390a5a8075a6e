"""Jobs run for a few steps in real processes, and what their ranks held, beside what the account says."""

from __future__ import annotations

import tempfile
from dataclasses import dataclass
from pathlib import Path

import torch
from gang import gang

from dslc.compiler.account import MemoryNode
from dslc.compiler.program import JobProgram, RankPlace
from dslc.dsl.diagnostics import Report
from dslc.dsl.load import load
from dslc.runs import prepare
from dslc.runtime.assemble import assemble
from dslc.runtime.batches import batches
from dslc.runtime.sources import open_source
from dslc.runtime.stepper import stepper
from dslc.runtime.track_memory import Tracker

STEPS = 3
Sums = dict[str, int]


@dataclass(frozen=True, kw_only=True)
class Measured:
    """What the ranks of a job held: the highest of them, and the account's figures. Bytes."""

    predicted: MemoryNode
    rest: int
    peak: int
    at_rest: Sums  # by kind, of the rank with the highest peak
    at_peak: Sums
    when: str

    @property
    def error(self) -> float:
        """By how much the account's peak is off, as a share of what was measured."""
        return self.predicted.peak / self.peak - 1

    @property
    def error_at_rest(self) -> float:
        return self.predicted.rest / self.rest - 1


def measure(text: str) -> Measured:
    """Runs the job of that text. AssertionError where it is at fault."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "made.plt"
        path.write_text(text)
        report = Report()
        ready = prepare(load(str(path), []), report)
        assert ready is not None, [d.message for d in report.errors]
        program, places = ready.program, ready.places
        found = gang(program.world_size, _rank, program, places)
    rest, peak, when = max(found, key=lambda each: sum(each[1].values()))
    return Measured(
        predicted=ready.compiled.plan.ranks[0].memory,
        rest=max(sum(each[0].values()) for each in found),
        peak=sum(peak.values()),
        at_rest=rest,
        at_peak=peak,
        when=when,
    )


def _rank(rank: int, job: JobProgram, places: tuple[RankPlace, ...]) -> tuple[Sums, Sums, str]:
    device = torch.device("cpu")
    parts = assemble(job, device)
    step = stepper(job, places[rank], parts)
    tracker = Tracker(parts.plain, parts.optimizer, device)
    for batch in batches(job.data, open_source(job.data), places[rank], job.microbatches, 0, STEPS, device):
        with tracker.step():
            step(batch)
    return tracker.rest, tracker.peak, tracker.when
