"""report.json as a table: predicted and measured figures, and the difference."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, TextIO

from dslc.compiler.ir.number_text import byte_text, time_text
from dslc.compiler.show.page.content import ReportLine
from dslc.terminal.tables import console


def show_report(report: Mapping[str, Any], screen: TextIO | None = None) -> None:
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


def report_lines(report: Mapping[str, Any]) -> list[ReportLine]:
    """Returns the lines of a report: first a step's, then the ranks'."""
    return [*_step_lines(report), *merged_lines(report, _lines)]


def merged_lines(
    report: Mapping[str, Any], lines_of: Callable[[Mapping[str, Any]], Iterable[tuple[str, str, str, str]]]
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


def _step_lines(report: Mapping[str, Any]) -> Iterator[ReportLine]:
    times = report["step_time"]
    source = f" ({times['source']})" if times.get("source") not in (None, "measured") else ""
    yield _step_line(f"time of a step{source}", times["predicted"], times["measured"])
    for phase, figures in report["ranks"][0]["phases"].items():
        seconds = [rank["phases"][phase]["measured"] for rank in report["ranks"]]
        measured = statistics.median(seconds) if None not in seconds else None
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


def _lines(rank: Mapping[str, Any]) -> Iterator[tuple[str, str, str, str]]:
    memory = rank["memory"]
    if memory["measured"] is not None:
        for kind, measured in memory["measured"].items():
            if kind != "when" and (measured or (memory["predicted"] or {}).get(kind)):
                predicted = memory["predicted"] and memory["predicted"][kind]
                yield f"memory: {kind}", *_pair(predicted, measured, byte_text)
    for each in rank["collectives"] if rank["recorded"] else ():
        predicted, measured = each["predicted"], each["measured"]
        for what, tell in (("count", str), ("bytes", byte_text)):
            ours = predicted and predicted[what]
            yield f"{each['operation']}: {what} in a step", *_pair(ours, measured[what], tell)


def _pair(predicted: float | None, measured: float | None, tell: Callable[[Any], str]) -> tuple[str, str, str]:
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
