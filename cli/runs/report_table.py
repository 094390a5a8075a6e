"""report.json as a table: predicted and measured figures, and the difference."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import TYPE_CHECKING, TextIO, TypeVar

from dslc.compiler.ir.number_text import byte_text, time_text
from dslc.compiler.show.page.content import ReportLine
from dslc.terminal.tables import console

if TYPE_CHECKING:
    from dslc.runtime.measure.report import RankReport, RunReport

Figure = TypeVar("Figure", int, float)


def show_report(report: RunReport, screen: TextIO | None = None) -> None:
    """Prints predicted beside measured figures; ranks with equal figures share a line."""
    from rich.table import Table

    from dslc.runtime.measure.collectives import FIRST_STEP  # which loads torch

    table = Table("ranks", "what", box=None, pad_edge=False)
    for column in ("predicted", "measured", "difference"):
        table.add_column(column, justify="right")
    for line in [*merged_lines(report, _lines), *_step_lines(report)]:
        table.add_row(line.ranks, line.what, line.predicted, line.measured, line.difference)
    shown = console(screen)
    shown.print(table)
    if not report["ranks"][0]["recorded"]:
        shown.print(f"collectives are recorded from step {FIRST_STEP} on, and there were fewer")


def report_lines(report: RunReport) -> list[ReportLine]:
    """Returns the lines of a report: first a step's, then the ranks'."""
    return [*_step_lines(report), *merged_lines(report, _lines)]


def merged_lines(
    report: RunReport, lines_of: Callable[[RankReport], Iterable[tuple[str, str, str, str]]]
) -> list[ReportLine]:
    """Returns the lines of all ranks, each once with the ranks that have it."""
    ranks: dict[tuple[str, str, str, str], list[int]] = {}
    for rank in report["ranks"]:
        for line in lines_of(rank):
            ranks.setdefault(line, []).append(rank["rank"])
    return [
        ReportLine(ranks=_span(numbers), what=what, predicted=predicted, measured=measured, difference=difference)
        for (what, predicted, measured, difference), numbers in sorted(ranks.items(), key=lambda item: item[1])
    ]


def _step_lines(report: RunReport) -> Iterator[ReportLine]:
    times = report["step_time"]
    source = f" ({times['source']})" if times.get("source") not in (None, "measured") else ""
    yield _step_line(f"time of a step{source}", times["predicted"], times["measured"])
    for phase, figures in report["ranks"][0]["phases"].items():
        seconds = [rank["phases"][phase]["measured"] for rank in report["ranks"]]
        known = [second for second in seconds if second is not None]
        measured = statistics.median(known) if len(known) == len(seconds) else None
        yield _step_line(f"of it {phase}, at the median", figures["predicted"], measured)
    routing = report.get("experts")  # not in reports of earlier versions
    if routing is not None and routing["measured"] is not None:
        where = f"rows of layer {routing['layer']} on rank {routing['rank']}, over an even share"
        where += ", more than stated" if routing["exceeded"] else ", at most"
        ours, theirs, difference = _pair(routing["stated"], routing["measured"], lambda skew: f"{skew:.3g}")
        yield ReportLine(ranks=str(routing["rank"]), what=where, predicted=ours, measured=theirs, difference=difference)


def _step_line(what: str, predicted: float | None, measured: float | None) -> ReportLine:
    ours, theirs, difference = _pair(predicted, measured, time_text)
    return ReportLine(ranks="all", what=what, predicted=ours, measured=theirs, difference=difference)


def _lines(rank: RankReport) -> Iterator[tuple[str, str, str, str]]:
    memory = rank["memory"]
    if memory["measured"] is not None:
        predictions = memory["predicted"] or {}
        for kind, size in memory["measured"].items():
            predicted = predictions.get(kind)
            if isinstance(size, int) and (size or predicted):  # `when` is text
                yield f"memory: {kind}", *_pair(predicted if isinstance(predicted, int) else None, size, byte_text)
    for each in rank["collectives"] if rank["recorded"] else ():
        ours, theirs = each["predicted"], each["measured"]
        counts = [total["count"] if total else None for total in (ours, theirs)]
        sizes = [total["bytes"] if total else None for total in (ours, theirs)]
        yield f"{each['operation']}: count in a step", *_pair(counts[0], counts[1], str)
        yield f"{each['operation']}: bytes in a step", *_pair(sizes[0], sizes[1], byte_text)


def _pair(predicted: Figure | None, measured: Figure | None, tell: Callable[[Figure], str]) -> tuple[str, str, str]:
    if predicted is None or measured is None:
        difference = ""
    elif predicted == measured:
        difference = "none"
    else:
        difference = f"{100 * (measured / predicted - 1):+.1f}%" if predicted else tell(measured)
    return (
        "unknown" if predicted is None else tell(predicted),
        "unknown" if measured is None else tell(measured),
        difference,
    )


def _span(ranks: Sequence[int]) -> str:
    if len(ranks) > 2 and ranks[-1] - ranks[0] == len(ranks) - 1:
        return f"{ranks[0]}-{ranks[-1]}"
    return ", ".join(map(str, ranks))
