"""The HTML of the page: the views of a plan as SVG, its data as JSON, and the scripts and the style beside this module.

The scripts are plain JavaScript with types in comments. They are parts of one script, in the order of `SCRIPTS` and
without `import`, because a browser loads no module of a file from another file.

A page of two plans has each view twice, side by side. What belongs to the second plan has `data-side="1"`, and its data
are in script elements whose names end in `-2`.

A cursor in the schedule shows what each drawn row does and holds at a moment. A plan has the memory of a rank between
two steps (`MemoryNode.rest`). As the strips of the picture, it also has the activations that a rank keeps at a moment
for the backward pass (`StageNode.kept`). Where the job was analysed, each pass also has the most that the rank holds
during it (memory_moments.py): with what layers work in, gradients made in the step and gathered parameters. A plan
alone does not have that.
"""

from __future__ import annotations

import html
import json
import re
from collections.abc import Iterator, Mapping, Sequence

from dslc.compiler.ir.codec import to_json
from dslc.compiler.ir.plan import PlanView
from dslc.compiler.show.describe import axis_of
from dslc.compiler.show.draw import VIEWS, draw
from dslc.compiler.show.page.assets import PAGE, read_assets
from dslc.compiler.show.page.content import ComparedSection, PageSide, PlanComparison, ReportLine, RunFigures
from dslc.compiler.show.page.memory_moments import MemoryMoments
from dslc.compiler.show.picture import svg
from dslc.compiler.show.schedule import NAMES, ScheduleBox, known_times, pass_rows, schedule_layout
from dslc.dsl.plain import plain
from dslc.dsl.record import Record, record


@record
class TimelineRow(Record):
    """A drawn row of the schedule: ranks `first` to `last` at one pipeline coordinate.

    `passes` are (kind, stage, micro-batch, start, end, most bytes), the last None where it is not known; `held` are
    (start, end, micro-batches, bytes of activations). `rest` is the memory between two steps, and `peak` the highest,
    at `moment`, of the ranks that hold most; None where the plan does not know.
    """

    pipeline: int
    first: int
    last: int
    rest: int | None
    peak: int | None
    moment: str
    passes: tuple[tuple[str, int, str, float, float, int | None], ...]
    held: tuple[tuple[float, float, int, int], ...]


@record
class PageTimeline(Record):
    """`spans` are the parts of a row that show times: their ends from the row's left edge, and the times there. Times
    are seconds where `timed`, else in units of the mean forward pass.
    """

    timed: bool
    total: float
    spans: tuple[tuple[float, float, float, float], ...]
    rows: tuple[TimelineRow, ...]


def timeline(plan: PlanView, moments: Sequence[MemoryMoments] = ()) -> PageTimeline:
    """Returns the step as the schedule view draws it, with the memory of its moments by pipeline coordinate."""
    layout = schedule_layout(plan)
    ranks_of_row = plan.world_size // axis_of(plan, "pipeline").size
    rows = []
    for number in layout.visible_rows:
        if number is None:
            continue
        nodes = [node.memory for node in plan.ranks if node.pipeline == number]
        memory = max(nodes, key=lambda node: node.peak, default=None)
        memories = moments[number] if moments else None
        rows.append(
            TimelineRow(
                pipeline=number,
                first=number * ranks_of_row,
                last=(number + 1) * ranks_of_row - 1,
                rest=memory.rest if memory else None,
                peak=memory.peak if memory else None,
                moment=memory.moment if memory else "",
                passes=tuple(
                    (box.kind, box.stage, box.text, _short(box.start), _short(box.end), _most_bytes(box, memories))
                    for box in layout.rows[number]
                ),
                held=tuple((_short(h.start), _short(h.end), h.pieces, h.bytes) for h in layout.held[number]),
            )
        )
    return PageTimeline(
        timed=known_times(plan) is not None,
        total=_short(layout.window.total),
        spans=tuple((_short(a), _short(b), _short(c), _short(d)) for a, b, c, d in layout.window.spans),
        rows=tuple(rows),
    )


def _most_bytes(box: ScheduleBox, moments: MemoryMoments | None) -> int | None:
    if moments is None:
        return None
    if box.kind == "E":
        return moments.ahead
    if len(box.kind) > 1:  # the exchange, the update and the rest of the step
        return moments.end
    return moments.actions.get((box.kind, box.stage, int(box.text)))


def _short(value: float) -> float:
    """Returns the number to seven digits, which keep the page small."""
    return float(f"{value:.7g}")


Subject = Mapping[str, int]
_NODE = re.compile(r'<g id="(\w+)" class="(node|edge|cluster)">\s*<title>(.*?)</title>')
_NUMBERED = re.compile(r"(rank|pipeline|lane|update|exchange|within|row|held) (\d+)(?:\.(\d+))?(?:\.\d+)?( [\w ]+)?")
_ACTION = re.compile(r"(\d+)([FBIW])\d*( text)?")
_ROW = re.compile(r"row (\d+)")
_TEXT = re.compile(
    r" (text|name|device|holds|bar|memory|ranks|idle|gap|where|sent|behind \d)$"
)  # names of what stands inside a box


class SubjectTable:
    """The objects of the plan that the boxes of the views stand for, by the names of the boxes."""

    def __init__(self, plan: PlanView) -> None:
        self._ranks_of_stage = plan.world_size // axis_of(plan, "pipeline").size
        self._pipelines = {stage.index: stage.pipeline for stage in plan.stages}
        self._rows = pass_rows(plan) if plan.stages else []

    def subject(self, view: str, name: str) -> Subject:
        """Returns the numbers of the rank, pipeline coordinate, stage and exchange of a box; {} for a decoration."""
        if action := _ACTION.fullmatch(name):
            stage = int(action[1])
            return {"stage": stage, "pipeline": self._pipelines.get(stage, 0)}
        numbered = _NUMBERED.fullmatch(name)
        if numbered is None:
            return {}
        kind, number = numbered[1], int(numbered[2])
        if kind == "rank":
            return {"rank": number, "pipeline": number // self._ranks_of_stage}
        subject = {"pipeline": number}
        if numbered[3] is not None and kind == "exchange":
            subject["exchange"] = int(numbered[3])
        if numbered[3] is not None and kind == "row" and number < len(self._rows):
            pieces = self._rows[number]
            if int(numbered[3]) < len(pieces):  # else the exchange or the update, which belong to the whole rank
                subject["stage"] = pieces[int(numbered[3])].stage
        return subject

    def label(self, name: str, subject: Subject) -> str:
        """Returns what a screen reader says of a box: `forward of micro-batch 3, stage 0, pipeline 0`."""
        words = [f"{kind} {number}" for kind, number in subject.items()]
        if action := _ACTION.fullmatch(name):
            return ", ".join([NAMES[action[2]], *words])
        numbered = _NUMBERED.fullmatch(name)
        if "stage" in subject and numbered is not None and numbered[1] == "row":
            piece = self._rows[int(numbered[2])][int(numbered[3])]
            return ", ".join([f"{NAMES[piece.kind]} of micro-batch {piece.text}", *words])
        return ", ".join(words)


def linked_svg(picture: str, view: str, prefix: str, subjects: SubjectTable) -> str:
    """Returns the SVG of a view for the page: its ids begin with `prefix`, and its boxes say what they stand for.

    A box that can be selected is a button, which plan_page.js puts into the tab order. The names that Graphviz gives as
    titles are left out: a browser would show them under the pointer.
    """

    def mark(match: re.Match[str]) -> str:
        name = html.unescape(match[3])
        attributes = "".join(_attributes(subjects, view, name))
        return f'<g id="{prefix}-{match[1]}" class="{match[2]}"{attributes}>'

    picture = _NODE.sub(mark, picture[picture.index("<svg") :].rstrip())
    picture = re.sub(r"<!--.*?-->\n?", "", picture)
    picture = re.sub(r' id="a_\w+"| id="graph0"| xml:space="preserve"', "", picture)
    picture = re.sub(r"(<g class=\"graph\"[^>]*>)\s*<title>.*?</title>", r"\1", picture, count=1, flags=re.DOTALL)
    return re.sub(r'<svg width="\S+" height="\S+"', "<svg", picture, count=1)


def _attributes(subjects: SubjectTable, view: str, name: str) -> Iterator[str]:
    subject = subjects.subject(view, name)
    for kind, number in subject.items():
        yield f' data-{kind}="{number}"'
    if row := _ROW.fullmatch(name):
        yield f' data-row="{row[1]}"'
    if subject and not _TEXT.search(name) and not name.startswith("held "):
        yield f' tabindex="-1" role="button" aria-label="{html.escape(subjects.label(name, subject))}"'


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
