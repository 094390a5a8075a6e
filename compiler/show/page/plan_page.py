"""The HTML of the page: the views of a plan as SVG, its data as JSON, and the scripts and the style beside this module.

The scripts are plain JavaScript with types in comments. They are parts of one script, in the order of `SCRIPTS` and
without `import`, because a browser loads no module of a file from another file.
"""

from __future__ import annotations

import html
import json
from importlib.resources import files

from dslc.compiler.ir.codec import to_json
from dslc.compiler.ir.plan import PlanView
from dslc.compiler.show.draw import VIEWS, draw
from dslc.compiler.show.page.subjects import SubjectTable, linked_svg
from dslc.compiler.show.page.timeline import timeline
from dslc.compiler.show.picture import svg

SCRIPTS = ("plan_model.js", "movable_view.js", "timeline_cursor.js", "plan_page.js")
_TOOLS = (("in", "+", "zoom in"), ("out", "\N{MINUS SIGN}", "zoom out"), ("all", "reset", "show all"))


def plan_page(plan: PlanView, view: str = "placement") -> str:
    """Returns the page, with `view` as the first of its views."""
    subjects = SubjectTable(plan)
    order = sorted(VIEWS, key=lambda name: name != view)
    title = html.escape(f"{plan.job}: plan {plan.hash}")
    sections = "".join(_section(plan, name, subjects) for name in order)
    return (
        '<!DOCTYPE html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n'
        '<meta name="viewport" content="width=device-width">\n'
        f"<title>{title}</title>\n<style>\n{_asset('plan_page.css')}</style>\n</head>\n<body>\n"
        f"<header><h1>{title}</h1>"
        '<search><label>search <input id="search" type="search" autocomplete="off" '
        'placeholder="rank 3, stage 1, blocks.0"></label><ul id="results" aria-label="results"></ul></search>'
        "</header>\n"
        f'<main>{sections}<p id="keys" class="keys">In a view, Tab leads to its boxes, arrows from box to box, Enter '
        "selects, Escape clears. With the view itself in focus, arrows move it, + and \N{MINUS SIGN} zoom, 0 shows all."
        '</p></main>\n<aside id="details" aria-label="the selection" aria-live="polite"></aside>\n'
        f"{_data('plan', plan.to_json())}{_data('timeline', to_json(timeline(plan)))}"
        f"<script>\n{''.join(map(_asset, SCRIPTS))}</script>\n</body>\n</html>\n"
    )


def _section(plan: PlanView, view: str, subjects: SubjectTable) -> str:
    tools = "".join(
        f'<button type="button" data-zoom="{kind}" aria-label="{label}: {view}">{text}</button>'
        for kind, text, label in _TOOLS
    )
    moment = '<div class="moment"></div>' if view == "schedule" else ""
    return (
        f'<section class="view" aria-labelledby="title-{view}"><div class="bar"><h2 id="title-{view}">{view}</h2>'
        f'<div class="tools">{tools}</div></div>'
        f'<div class="canvas" data-view="{view}" tabindex="0" role="group" aria-label="{view} view" '
        f'aria-describedby="keys">{linked_svg(svg(draw(plan, view)), view, view, subjects)}</div>{moment}</section>\n'
    )


def _data(name: str, value: object) -> str:
    # `</` would end the script element: JSON may write the slash as an escape.
    text = json.dumps(value, sort_keys=True, separators=(",", ":")).replace("</", "<\\/")
    return f'<script type="application/json" id="{name}">{text}</script>\n'


def _asset(name: str) -> str:
    return files("dslc.compiler.show.page").joinpath(name).read_text(encoding="utf-8")
