"""Diagnostics and runs as HTML, for notebooks: pure functions of their data."""

from __future__ import annotations

import html
from collections.abc import Iterable, Mapping, Sequence

from dslc.dsl.diagnostics import Diagnostic
from dslc.dsl.plain import plain
from dslc.dsl.show import render
from dslc.runtime.process.records import Record, overview_numbers

WIDTH, HEIGHT, MARGIN = 520, 200, 44
_COLORS = ("#1f77b4", "#d62728", "#2ca02c", "#9467bd", "#ff7f0e", "#17becf")
_EDGES = {"error": "#d62728", "warning": "#e0a000", "note": "#1f77b4"}


def diagnostics_html(diagnostics: Sequence[Diagnostic]) -> str:
    """Returns each diagnostic with its line and its help, behind an edge of its severity's color."""
    if not diagnostics:
        return "<p>the job is good: no mistake, no warning</p>"
    parts = []
    for diagnostic in diagnostics:
        text = render([diagnostic], color=False).rpartition("\n\n")[0]
        style = f"border-left: 4px solid {_EDGES[diagnostic.severity]}; padding-left: 8px; margin: 6px 0"
        parts.append(f'<pre style="{style}">{html.escape(text)}</pre>')
    return "".join(parts)


def metrics_table(records: Iterable[Record]) -> str:
    """Returns a table of the last record of each split."""
    last = {record["split"]: record for record in records}
    columns = list(dict.fromkeys(name for record in last.values() for name, _ in overview_numbers(record)))
    head = "".join(f"<th>{html.escape(plain(name))}</th>" for name in ("split", "step", *columns))
    rows = []
    for split, record in last.items():
        cells = [split, str(record["step"]), *(_number(record.get(name)) for name in columns)]
        rows.append("<tr>" + "".join(f"<td>{html.escape(plain(cell))}</td>" for cell in cells) + "</tr>")
    return f"<table><thead><tr>{head}</tr></thead><tbody>{''.join(rows)}</tbody></table>"


def loss_curve(records: Iterable[Record]) -> str:
    """Returns the loss of each split over the steps as SVG; "" without two points."""
    points: dict[str, list[tuple[int, float]]] = {}
    for record in records:
        if record.get("loss") is not None:
            points.setdefault(record["split"], []).append((record["step"], record["loss"]))
    steps = [step for line in points.values() for step, _ in line]
    losses = [loss for line in points.values() for _, loss in line]
    if len(set(steps)) < 2:
        return ""
    low, high = min(losses), max(losses)
    span = high - low or 1.0

    def place(step: int, loss: float) -> str:
        x = MARGIN + (step - min(steps)) / (max(steps) - min(steps)) * (WIDTH - 2 * MARGIN)
        return f"{x:.1f},{HEIGHT - 24 - (loss - low) / span * (HEIGHT - 48):.1f}"

    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{WIDTH}" height="{HEIGHT}" role="img" aria-label="loss" '
        f'viewBox="0 0 {WIDTH} {HEIGHT}" font-family="sans-serif" font-size="11" fill="currentColor">',
        _text(MARGIN - 4, 28, f"{high:.4g}", "end"),
        _text(MARGIN - 4, HEIGHT - 24, f"{low:.4g}", "end"),
        _text(MARGIN, HEIGHT - 6, f"step {min(steps)}", "start"),
        _text(WIDTH - MARGIN, HEIGHT - 6, f"step {max(steps)}", "end"),
    ]
    for n, (split, line) in enumerate(points.items()):
        color = _COLORS[n % len(_COLORS)]
        path = " ".join(place(*point) for point in line)
        parts.append(f'<polyline points="{path}" fill="none" stroke="{color}" stroke-width="1.5"/>')
        parts += [f'<circle r="2" cx="{x}" cy="{y}" fill="{color}"/>' for x, y in _corners(path)]
        name = html.escape(plain(split))
        parts.append(f'<text x="{MARGIN + 110 * n}" y="12" style="fill: {color}">{name}: {line[-1][1]:.4g}</text>')
    return "".join([*parts, "</svg>"])


def run_html(folder: str, records: Sequence[Record]) -> str:
    """Returns the last metrics and the loss curve of a run."""
    return f"{metrics_table(records)}{loss_curve(records)}<p>in <code>{html.escape(plain(folder))}</code></p>"


def progress_html(step: int, steps: int, last: Mapping[str, Record], curve: str, notes: Sequence[str], end: str) -> str:
    """Returns a bar, the last numbers of each split, the curve and the notes of a training that goes on, or its end."""
    lines = [f"{split}: " + ", ".join(f"{name} {_number(value)}" for name, value in overview_numbers(record))
             for split, record in last.items()]  # fmt: skip
    told = html.escape(plain(" | ".join(lines)))
    below = f"<pre>{html.escape(chr(10).join(map(plain, notes)))}</pre>" if notes else ""
    bar = f'<progress value="{step}" max="{steps}" style="width: 320px"></progress>'
    return f"<div>{bar} step {step} of {steps} {html.escape(end)}<br>{told}</div>{curve}{below}"


def _text(x: float, y: float, text: str, anchor: str) -> str:
    return f'<text x="{x}" y="{y}" text-anchor="{anchor}">{text}</text>'


def _corners(path: str) -> list[list[str]]:
    """Returns the points of a short line, which dots mark: a validation may have one alone."""
    corners = [point.split(",") for point in path.split()]
    return corners if len(corners) <= 40 else []


def _number(value: object) -> str:
    return f"{value:.4g}" if isinstance(value, int | float) else "–"
