"""Boxes of the views, linked to what they stand for: `data-rank`, `data-pipeline`, `data-stage`, `data-exchange`."""

from __future__ import annotations

import html
import re
from collections.abc import Iterator, Mapping

from dslc.compiler.ir.plan import PlanView
from dslc.compiler.show.describe import axis_of
from dslc.compiler.show.schedule import NAMES, pass_rows

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
