"""The table of a sweep, from what lies in its folder: the values of each training, its metrics, its time, its folder.

Contract: a training that has not begun, that still runs or that failed has a row as any other; what is not known of it
is empty.
"""

from __future__ import annotations

import csv
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TextIO

from dslc.compiler.facts.untrusted_files import replacing
from dslc.compiler.ir.number_text import path_text, time_text
from dslc.launching.run_state import RunState, run_states, runs_in
from dslc.runs.metric_summary import MetricSummary
from dslc.runs.sweep_file import Sweep, read_sweep
from dslc.runtime.process.records import readable_records
from dslc.terminal.tables import console

CSV = "sweep.csv"


@dataclass(frozen=True, kw_only=True)
class SweepRow:
    """One training of a sweep. `last` and `best` are by name, as `validation loss`; `best` are pairs (value, step)."""

    values: tuple[str, ...]
    folder: str  # within that of the sweep
    standing: RunState
    last: Mapping[str, float | None]
    best: Mapping[str, tuple[float, int]]
    seconds: float | None


def rows_of(folder: str, sweep: Sweep) -> list[SweepRow]:
    places = [os.path.join(folder, name) for name, _ in sweep.runs]
    begun = [place for place in places if os.path.isdir(place) and runs_in(place) == [place]]
    stands = dict(zip(begun, run_states(begun), strict=True))
    return [
        _row(place, name, values, stands.get(place, RunState(folder=place, state="waiting")), sweep)
        for place, (name, values) in zip(places, sweep.runs, strict=True)
    ]


def _row(place: str, name: str, values: tuple[str, ...], standing: RunState, sweep: Sweep) -> SweepRow:
    summary = MetricSummary(sweep.highest)
    for record in readable_records(place):
        summary.add(record)
    return SweepRow(
        values=values,
        folder=name,
        standing=standing,
        last=summary.last,
        best=summary.best,
        seconds=summary.seconds,
    )


def _names(found: Sequence[Mapping[str, object]]) -> list[str]:
    return list(dict.fromkeys(name for each in found for name in each))


def write_csv(folder: str) -> str:
    """Writes `sweep.csv` beside `sweep.json`, with all digits, and returns its path; "" where there is no sweep."""
    sweep = read_sweep(folder)
    if sweep is None:
        return ""
    rows = rows_of(folder, sweep)
    last, best = _names([row.last for row in rows]), _names([row.best for row in rows])
    head = [*sweep.paths, "state", "step", "steps", *last]
    for name in best:
        head += [f"best {name}", f"best {name}: step"]
    path = os.path.join(folder, CSV)
    with replacing(path, newline="") as file:
        writer = csv.writer(file)
        writer.writerow([*head, "seconds", "folder"])
        for row in rows:
            cells: list[object] = [*row.values, row.standing.state, row.standing.step, row.standing.steps or None]
            cells += [row.last.get(name) for name in last]
            for name in best:
                cells += row.best.get(name, (None, None))
            writer.writerow([*cells, row.seconds, row.folder])
    return path


def show_sweep(folder: str, screen: TextIO | None = None) -> bool:
    """Prints the table of the sweep in `folder`, and below it why trainings failed; returns False without a sweep."""
    from rich.table import Table
    from rich.text import Text

    sweep = read_sweep(folder)
    if sweep is None:
        return False
    rows = rows_of(folder, sweep)
    last, best = _names([row.last for row in rows]), _names([row.best for row in rows])
    table = Table(*_headings(sweep.paths), "state", box=None, pad_edge=False)
    for name in [*last, *(f"best {name}" for name in best), "time"]:
        table.add_column(name, justify="right")
    table.add_column("folder", no_wrap=True)
    for row in rows:
        cells = [*row.values, _state(row.standing)]
        cells += [_number(row.last[name]) if name in row.last else "" for name in last]
        cells += [f"{_number(row.best[name][0])} at {row.best[name][1]}" if name in row.best else "" for name in best]
        cells += [time_text(row.seconds) if row.seconds else "", row.folder]
        table.add_row(*map(Text, cells))
    shown = console(screen)
    shown.print(Text(path_text(os.path.abspath(folder))))
    shown.print(table)
    for row in rows:
        if row.standing.state in ("failed", "gone"):
            shown.print(Text(f"{row.folder}: {row.standing.line()}"))
    return True


def _headings(paths: Sequence[str]) -> list[str]:
    """Returns the last word of each path, or all of it if two end alike."""
    short = [path.rpartition(".")[2] for path in paths]
    return short if len(set(short)) == len(short) else list(paths)


def _state(standing: RunState) -> str:
    at = f"{standing.step}/{standing.steps}"
    match standing.state:
        case "done":
            return "done"
        case "running" | "restarting" | "stopped" | "failed":
            return f"{standing.state} at {at}"
        case "gone":
            return f"killed at {at}"
    return standing.state


def _number(value: float | None) -> str:
    return "not finite" if value is None else f"{value:.4g}"
