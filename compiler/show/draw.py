"""A plan as a picture: DOT text for `picture.write`.

    placement   machines, devices, their layers, samples and memory, and the exchanges (`draw_placement`)
    graph       the actions of one step and the transfers between them (`draw_graph`)
    schedule    the step over time, a row for each pipeline coordinate (`draw_schedule`)

The text depends on the plan alone, and is the same every time. Up to sixteen devices have a box each; more are folded
by symmetry, so that a thousand are a few boxes.
"""

from __future__ import annotations

from dslc.compiler.ir.plan import PlanView
from dslc.compiler.show.canvas import Canvas
from dslc.compiler.show.graph import draw_graph
from dslc.compiler.show.grid import Grid
from dslc.compiler.show.legend import HEADING, TRAFFIC_WIDTH, heading, legend
from dslc.compiler.show.schedule import draw_schedule
from dslc.compiler.show.symmetry_view import Folded

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


MOST_BOXES = 16  # devices drawn one by one
LEAST_WIDTH = 860
BESIDE = 40 + TRAFFIC_WIDTH  # a legend beside a narrow picture


def draw_placement(plan: PlanView) -> str:
    """Returns the picture as DOT text."""
    canvas = Canvas(plan.job)
    extent = Grid(canvas, plan).draw() if plan.world_size <= MOST_BOXES else Folded(canvas, plan).draw()
    width = max(LEAST_WIDTH, extent.width)
    if extent.width + BESIDE <= LEAST_WIDTH + 226:
        width = max(width, extent.width + BESIDE)
        legend(canvas, plan, extent.width + 40, HEADING + 10, 0)
    else:
        legend(canvas, plan, 0, extent.height + 24, width)
    heading(canvas, plan, width)
    return canvas.text()
