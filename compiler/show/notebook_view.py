"""A plan as a notebook shows it: its diagram, and below it the text of `dslc plan`."""

from __future__ import annotations

import html

from dslc.compiler.ir.plan import PlanView
from dslc.compiler.show.draw import draw
from dslc.compiler.show.explain import explain
from dslc.compiler.show.picture import svg

WIDTH = 110  # columns of the text


def plan_bundle(plan: PlanView) -> dict[str, str]:
    """Returns the plan by MIME type, as `_repr_mimebundle_` of IPython has it."""
    picture, text = svg(draw(plan)), explain(plan, WIDTH)
    diagram = picture[picture.index("<svg") :].rstrip()
    page = (
        f'<div style="overflow-x: auto; background: white">{diagram}</div>'
        f"<details><summary>the plan in full</summary><pre>{html.escape(text)}</pre></details>"
    )
    return {"text/html": page, "text/plain": text}
