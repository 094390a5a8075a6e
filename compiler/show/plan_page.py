"""One HTML page with all views of a plan, which works offline: pan, zoom, search, and a selection that all views share.

The page holds the views as SVG, the plan as JSON (`PlanView.to_json`), plan_page.js and plan_page.css. Each box says by
attributes what it stands for: `data-rank`, `data-pipeline`, `data-stage`, `data-exchange`.
"""

from __future__ import annotations

import html
import json
import re
from collections.abc import Iterator, Mapping
from importlib.resources import files

from dslc.compiler.ir.plan import PlanView
from dslc.compiler.show.describe import axis_of
from dslc.compiler.show.draw import VIEWS, draw
from dslc.compiler.show.picture import svg
from dslc.compiler.show.schedule import NAMES, pass_rows

Subject = Mapping[str, int]
_NODE = re.compile(r'<g id="(\w+)" class="(node|edge|cluster)">\s*<title>(.*?)</title>')
_NUMBERED = re.compile(r"(rank|pipeline|lane|update|exchange|within|row|held) (\d+)(?:\.(\d+))?(?:\.\d+)?( [\w ]+)?")
_ACTION = re.compile(r"(\d+)([FBIW])\d*( text)?")
_TEXT = re.compile(
    r" (text|name|device|holds|bar|memory|ranks|idle|gap|where|sent|behind \d)$"
)  # names of what stands inside a box


def plan_page(plan: PlanView, view: str = "placement") -> str:
    """Returns the page, with `view` as the first of its views."""
    subjects = SubjectTable(plan)
    order = sorted(VIEWS, key=lambda name: name != view)
    sections = "".join(
        f'<section class="view" aria-labelledby="title-{name}"><h2 id="title-{name}">{name}</h2>'
        f'<div class="canvas" tabindex="0" aria-label="{name}: drag or arrows move, wheel or + and - zoom, 0 resets">'
        f"{_linked(svg(draw(plan, name)), name, subjects)}</div></section>"
        for name in order
    )
    # `</` would end the script element: JSON may write the slash as an escape.
    data = json.dumps(plan.to_json(), sort_keys=True).replace("</", "<\\/")
    title = html.escape(f"{plan.job}: plan {plan.hash}")
    return (
        '<!DOCTYPE html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n'
        '<meta name="viewport" content="width=device-width">\n'
        f"<title>{title}</title>\n<style>\n{_asset('plan_page.css')}</style>\n</head>\n<body>\n"
        f"<header><h1>{title}</h1>"
        '<label>search <input id="search" type="search" autocomplete="off" '
        'placeholder="rank 3, stage 1, blocks.0"></label><ul id="results"></ul></header>\n'
        f'<main>{sections}</main>\n<aside id="details" aria-live="polite"></aside>\n'
        f'<script type="application/json" id="plan">{data}</script>\n'
        f"<script>\n{_asset('plan_page.js')}</script>\n</body>\n</html>\n"
    )


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


def _linked(picture: str, view: str, subjects: SubjectTable) -> str:
    """Returns the SVG for the page: its ids are the view's own, and its boxes say what they stand for."""

    def mark(match: re.Match[str]) -> str:
        name = html.unescape(match[3])
        attributes = "".join(_attributes(subjects.subject(view, name), name))
        return f'<g id="{view}-{match[1]}" class="{match[2]}"{attributes}>'

    picture = _NODE.sub(mark, picture[picture.index("<svg") :].rstrip())
    picture = re.sub(r"<!--.*?-->\n?", "", picture)
    return re.sub(r'<svg width="\S+" height="\S+"', "<svg", re.sub(r' id="a_\w+"| id="graph0"', "", picture), count=1)


def _attributes(subject: Subject, name: str) -> Iterator[str]:
    for kind, number in subject.items():
        yield f' data-{kind}="{number}"'
    if subject and not _TEXT.search(name):
        label = ", ".join(f"{kind} {number}" for kind, number in subject.items())
        action = _ACTION.fullmatch(name)
        words = f"{NAMES[action[2]]}, " if action else ""
        yield f' tabindex="0" role="button" aria-label="{words}{label}"'


def _asset(name: str) -> str:
    return files("dslc.compiler.show").joinpath(name).read_text(encoding="utf-8")
