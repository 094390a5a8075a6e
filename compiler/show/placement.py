"""The placement picture: machines, devices, layers, samples, memory, and exchanges.

Up to sixteen devices are drawn one by one (grid.py), more are folded (symmetry_view.py); the tables are the same.
"""

from __future__ import annotations

from dslc.compiler.ir.plan import PlanView
from dslc.compiler.show.canvas import Canvas
from dslc.compiler.show.grid import Grid
from dslc.compiler.show.legend import HEADING, TRAFFIC_WIDTH, heading, legend
from dslc.compiler.show.symmetry_view import Folded

MOST_BOXES = 16  # devices drawn one by one
LEAST_WIDTH = 860
BESIDE = 40 + TRAFFIC_WIDTH  # a legend beside a narrow picture


def draw_placement(plan: PlanView) -> str:
    """Returns the picture as DOT text."""
    canvas = Canvas(plan.job)
    drawn = Grid(canvas, plan).draw() if plan.world_size <= MOST_BOXES else Folded(canvas, plan).draw()
    width = max(LEAST_WIDTH, drawn.width)
    if drawn.width + BESIDE <= LEAST_WIDTH + 226:
        width = max(width, drawn.width + BESIDE)
        legend(canvas, plan, drawn.width + 40, HEADING + 10, 0)
    else:
        legend(canvas, plan, 0, drawn.height + 24, width)
    heading(canvas, plan, width)
    return canvas.text()
