"""A plan as a picture: DOT text for `picture.write`.

    placement   machines, devices, their layers, samples and memory, and the exchanges (`draw_placement`)
    graph       the actions of one step and the transfers between them (`draw_graph`)
    schedule    the step over time, a row for each pipeline coordinate (`draw_schedule`)

The text depends on the plan alone, and is the same every time. Up to sixteen devices have a box each; more are folded
by symmetry, so that a thousand are a few boxes.
"""

from __future__ import annotations

from dslc.compiler.ir.plan import PlanView
from dslc.compiler.show.graph import draw_graph
from dslc.compiler.show.placement import draw_placement
from dslc.compiler.show.schedule import draw_schedule

VIEWS = ("placement", "graph", "schedule")


def draw(plan: PlanView, view: str = "placement") -> str:
    """Returns the DOT text of one view. Raises ValueError for an unknown view."""
    match view:
        case "placement":
            return draw_placement(plan)
        case "graph":
            return draw_graph(plan)
        case "schedule":
            return draw_schedule(plan)
    raise ValueError(f"there is no view {view!r}: one of {', '.join(VIEWS)}")
