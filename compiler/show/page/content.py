"""The content of a page: a plan, the figures of its run, and how it differs from another plan."""

from __future__ import annotations

from dslc.compiler.ir.plan import PlanView
from dslc.compiler.show.page.memory_moments import MemoryMoments
from dslc.dsl.record import Record, record


@record
class ReportLine(Record):
    """One figure of a run as text, predicted beside measured; `ranks` are those it is of, or `all`."""

    ranks: str
    what: str
    predicted: str
    measured: str
    difference: str


@record
class MetricCurve(Record):
    """The values of a metric over the steps, in one split; None for a number that was not finite."""

    metric: str
    split: str
    points: tuple[tuple[int, float | None], ...]


@record
class RunFigures(Record):
    """The measurements of a run. `state` is a sentence; `curves` may lack points between the least and the greatest."""

    folder: str
    state: str
    lines: tuple[ReportLine, ...]
    curves: tuple[MetricCurve, ...]


@record
class PageSide(Record):
    """A plan of the page under its name, with the run that followed it; `moments` of an analysed job, by coordinate."""

    name: str
    plan: PlanView
    run: RunFigures | None = None
    moments: tuple[MemoryMoments, ...] = ()


@record
class ComparedSection(Record):
    """Differences of one kind: (what, before, after, change in percent)."""

    title: str
    rows: tuple[tuple[str, str, str, str], ...]


@record
class PlanComparison(Record):
    """How two plans differ, as `dslc diff` says it."""

    summary: str
    checkpoints: str
    sections: tuple[ComparedSection, ...]
