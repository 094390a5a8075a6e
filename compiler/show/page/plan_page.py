"""The HTML of the page: the views of a plan as SVG, its data as JSON, and the scripts and the style beside this module.

The scripts are plain JavaScript with types in comments. They are parts of one script, in the order of `SCRIPTS` and
without `import`, because a browser loads no module of a file from another file.

A page of two plans has each view twice, side by side. What belongs to the second plan has `data-side="1"`, and its data
are in script elements whose names end in `-2`.
"""

from __future__ import annotations

import html
import json
from collections.abc import Sequence

from dslc.compiler.ir.codec import to_json
from dslc.compiler.ir.plan import PlanView
from dslc.compiler.show.draw import VIEWS, draw
from dslc.compiler.show.page.assets import PAGE, read_assets
from dslc.compiler.show.page.content import ComparedSection, PageSide, PlanComparison, ReportLine, RunFigures
from dslc.compiler.show.page.memory_moments import MemoryMoments
from dslc.compiler.show.page.subjects import SubjectTable, linked_svg
from dslc.compiler.show.page.timeline import timeline
from dslc.compiler.show.picture import svg
from dslc.dsl.plain import plain

SCRIPTS = ("plan_model.js", "movable_view.js", "timeline_cursor.js", "curves.js", "plan_page.js")
STYLES = ("base.css", "plan_page.css")
LETTERS = ("A", "B")
_TOOLS = (("in", "+", "zoom in"), ("out", "\N{MINUS SIGN}", "zoom out"), ("all", "reset", "show all"))
_KEYS = (
    "In a view, Tab leads to its boxes, arrows from box to box, Enter selects, Escape clears. With the view itself in "
    "focus, arrows move it, + and \N{MINUS SIGN} zoom, 0 shows all."
)


def plan_page(plan: PlanView, view: str = "placement", moments: Sequence[MemoryMoments] = ()) -> str:
    return page([PageSide(name=plan.job, plan=plan, moments=tuple(moments))], view)


def page(sides: Sequence[PageSide], view: str = "placement", comparison: PlanComparison | None = None) -> str:
    """Returns the page of a plan and its run, or of two, with `view` as the first of the views."""
    subjects = [SubjectTable(side.plan) for side in sides]
    order = sorted(VIEWS, key=lambda name: name != view)
    title = _title(sides)
    parts = [
        *([_comparison(sides, comparison)] if comparison else []),
        *([_runs(sides)] if any(side.run for side in sides) else []),
        *(_section(sides, name, subjects) for name in order),
    ]
    data = []
    for n, side in enumerate(sides):
        suffix = f"-{n + 1}" if n else ""
        data += [
            _data(f"plan{suffix}", side.plan.to_json()),
            _data(f"timeline{suffix}", to_json(timeline(side.plan, side.moments))),
        ]
        data += [_data(f"curves{suffix}", to_json(side.run.curves))] if side.run else []
    return (
        '<!DOCTYPE html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n'
        '<meta name="viewport" content="width=device-width">\n'
        f"<title>{title}</title>\n<style>\n{read_assets(PAGE, STYLES)}</style>\n</head>\n<body>\n"
        f"<header><h1>{title}</h1>"
        '<search><label>search <input id="search" type="search" autocomplete="off" '
        'placeholder="rank 3, stage 1, blocks.0"></label><ul id="results" aria-label="results"></ul></search>'
        f'</header>\n<main>{"".join(parts)}<p id="keys" class="note">{_KEYS}</p></main>\n'
        '<aside id="details" aria-label="the selection" aria-live="polite"></aside>\n'
        f"{''.join(data)}<script>\n{read_assets(PAGE, SCRIPTS)}</script>\n</body>\n</html>\n"
    )


def _title(sides: Sequence[PageSide]) -> str:
    if len(sides) > 1:
        return _text(" and ".join(map(_name, range(len(sides)), sides)))
    run = sides[0].run
    words = f"{sides[0].plan.job}: plan {sides[0].plan.hash}"
    return _text(f"{words}, run {run.folder}" if run else words)


def _name(n: int, side: PageSide) -> str:
    return f"{LETTERS[n]}: {side.name}"


def _section(sides: Sequence[PageSide], view: str, subjects: Sequence[SubjectTable]) -> str:
    if len(sides) == 1:
        heading = f'<h2 id="title-{view}">{view}</h2>'
        content = _side(sides[0], view, view, subjects[0], heading, 0)
    else:
        content = f'<h2 id="title-{view}">{view}</h2><div class="sides">'
        for n, (side, table) in enumerate(zip(sides, subjects, strict=True)):
            content += _side(side, view, f"{view}-{n + 1}", table, f"<h3>{_text(_name(n, side))}</h3>", n)
        content += "</div>"
    return f'<section class="view" aria-labelledby="title-{view}">{content}</section>\n'


def _side(side: PageSide, view: str, prefix: str, subjects: SubjectTable, heading: str, n: int) -> str:
    tools = "".join(
        f'<button type="button" data-zoom="{kind}" aria-label="{label}: {view}">{text}</button>'
        for kind, text, label in _TOOLS
    )
    moment = '<div class="moment"></div>' if view == "schedule" else ""
    picture = linked_svg(svg(draw(side.plan, view)), view, prefix, subjects)
    return (
        f'<div class="side" data-side="{n}"><div class="bar">{heading}<div class="tools">{tools}</div></div>'
        f'<div class="canvas" data-view="{view}" tabindex="0" role="group" aria-label="{view} view" '
        f'aria-describedby="keys">{picture}</div>{moment}</div>'
    )


# -------------------------------------------------------------------------------------------------- runs, differences


def _runs(sides: Sequence[PageSide]) -> str:
    """Returns measured beside predicted figures of each run; curves.js adds the curves of all."""
    blocks = "".join(
        _run(side.run, f"{LETTERS[n]}: " if len(sides) > 1 else "") for n, side in enumerate(sides) if side.run
    )
    heading = '<h2 id="title-run">run</h2>'
    return f'<section class="run" aria-labelledby="title-run">{heading}<div class="tables">{blocks}</div></section>\n'


def _run(run: RunFigures, letter: str) -> str:
    head = _head("ranks", "figure", "predicted", "measured", "difference")
    rows = "".join(map(_report_row, run.lines))
    table = f'<div class="wide"><table class="figures">{head}<tbody>{rows}</tbody></table></div>' if run.lines else ""
    return f"<div><p>{_text(f'{letter}{run.folder}: {run.state}')}</p>{table}</div>"


def _report_row(line: ReportLine) -> str:
    cells = "".join(f"<td>{_text(text)}</td>" for text in (line.predicted, line.measured, line.difference))
    return f'<tr><td>{_text(line.ranks)}</td><th scope="row">{_text(line.what)}</th>{cells}</tr>'


def _comparison(sides: Sequence[PageSide], comparison: PlanComparison) -> str:
    names = "".join(f"<p>{_text(_name(n, side))}, plan {side.plan.hash}</p>" for n, side in enumerate(sides))
    checkpoints = f"<p>checkpoints: {_text(comparison.checkpoints)}</p>" if comparison.checkpoints else ""
    tables = "".join(map(_compared_section, comparison.sections))
    return (
        f'<section class="comparison" aria-labelledby="title-comparison"><h2 id="title-comparison">'
        f"{_text(comparison.summary)}</h2>{names}{checkpoints}<div class='tables'>{tables}</div></section>\n"
    )


def _compared_section(section: ComparedSection) -> str:
    rows = "".join(
        f'<tr><th scope="row">{_text(what)}</th>' + "".join(f"<td>{_text(cell)}</td>" for cell in cells) + "</tr>"
        for what, *cells in section.rows
    )
    head = _head(section.title, *LETTERS, "change")
    return f'<div class="wide"><table class="figures">{head}<tbody>{rows}</tbody></table></div>'


def _head(*titles: str) -> str:
    return "<thead><tr>" + "".join(f'<th scope="col">{_text(title)}</th>' for title in titles) + "</tr></thead>"


def _text(text: str) -> str:
    return html.escape(plain(text))


def _data(name: str, value: object) -> str:
    # `</script` would end the script element, and `<!--<script` would keep it open: JSON may write `<` as an escape.
    text = json.dumps(value, sort_keys=True, separators=(",", ":")).replace("<", "\\u003c")
    return f'<script type="application/json" id="{name}">{text}</script>\n'
