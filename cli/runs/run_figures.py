"""The measurements of a run for the page of `dslc render`: report.json as lines, metrics.jsonl as curves."""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING

from dslc.compiler.facts.untrusted_files import read_json
from dslc.compiler.ir.number_text import byte_text
from dslc.compiler.show.page.content import MetricCurve, ReportLine, RunFigures
from dslc.dsl.words import plural
from dslc.runs.report_table import merged_lines, report_lines
from dslc.runtime.process.records import PHASES, REPORT, REPORT_VERSION, Record, overview_numbers, readable_records

if TYPE_CHECKING:
    from dslc.runtime.measure.report import RankReport

MOST_POINTS = 1000  # of a curve
MOST_LINES = 300  # of a report
_MOST_BYTES = 1 << 28
Point = tuple[int, float | None]  # a step, and a value that may not be finite


def run_figures(folder: str, state: str) -> RunFigures:
    """Returns what the run in a folder has measured until now. Raises ValueError for a report that is none."""
    return RunFigures(
        folder=os.path.normpath(folder),
        state=state,
        lines=tuple(_report(os.path.join(folder, REPORT))),
        curves=tuple(curves(readable_records(folder))),
    )


def _report(path: str) -> list[ReportLine]:
    try:
        report = read_json(path, _MOST_BYTES)
    except FileNotFoundError:
        return []  # the run trains, or it failed
    except (OSError, ValueError) as error:
        raise ValueError(f"{path} cannot be read: {getattr(error, 'strerror', None) or error}") from None
    try:
        if report["version"] != REPORT_VERSION:
            raise ValueError(f"{path} is of another version of dslc")
        lines = [*report_lines(report), *merged_lines(report, _process_lines)]
    except (KeyError, TypeError, AttributeError, IndexError):
        raise ValueError(f"{path} is no report of a run") from None
    if len(lines) > MOST_LINES:
        more = ReportLine(
            ranks="",
            what=f"and {plural(len(lines) - MOST_LINES, 'line')} more",
            predicted="",
            measured="",
            difference="",
        )
        return [*lines[:MOST_LINES], more]
    return lines


def _process_lines(rank: RankReport) -> Iterable[tuple[str, str, str, str]]:
    """Yields the predicted peak, if no line of the report compares it, and the peaks of the whole process."""
    memory = rank["memory"]
    predicted = memory["predicted"]
    if predicted is not None and memory["measured"] is None:
        yield "memory: peak", byte_text(int(predicted["peak"])), "unknown without --profile", ""
    for kind, size in rank["process"].items():
        yield f"peak of the process: {kind}", "", byte_text(size), ""


def curves(records: Sequence[Record]) -> list[MetricCurve]:
    """Returns the metrics of each split over the steps, and the phases of a step, as `seconds.passes`."""
    points: dict[tuple[str, str], list[Point]] = {}
    phases = [f"seconds.{phase}" for phase in PHASES]
    for record in records:
        shown = [*overview_numbers(record), *((name, record[name]) for name in phases if name in record)]
        for name, value in shown:
            if value is None or isinstance(value, int | float):
                points.setdefault((name, record["split"]), []).append((record["step"], value))
    steps = _phase_steps({key: line for key, line in points.items() if key[0] in phases})
    return [
        MetricCurve(
            metric=name,
            split=split,
            points=tuple(point for point in line if point[0] in steps[split]) if name in phases else thinned(line),
        )
        for (name, split), line in points.items()
    ]


def _phase_steps(phases: Mapping[tuple[str, str], Sequence[Point]]) -> dict[str, set[int]]:
    """Returns the shown steps of each split: the steps of the thinned sum, as a chart stacks the phases."""
    sums: dict[str, dict[int, float]] = {}
    for (_, split), line in phases.items():
        of_split = sums.setdefault(split, {})
        for step, value in line:
            of_split[step] = of_split.get(step, 0.0) + (value or 0.0)
    return {split: {step for step, _ in thinned(sorted(of_split.items()))} for split, of_split in sums.items()}


def thinned(points: Sequence[Point]) -> tuple[Point, ...]:
    """Returns at most MOST_POINTS points: of each of equal parts the least and the greatest, so that spikes stay."""
    if len(points) <= MOST_POINTS:
        return tuple(points)
    parts = (MOST_POINTS - 2) // 2
    chosen = {0, len(points) - 1}
    for part in range(parts):
        span = range(part * len(points) // parts, (part + 1) * len(points) // parts)
        known = [n for n in span if points[n][1] is not None] or list(span[:1])
        chosen |= {min(known, key=lambda n: points[n][1] or 0.0), max(known, key=lambda n: points[n][1] or 0.0)}
    return tuple(points[n] for n in sorted(chosen))
