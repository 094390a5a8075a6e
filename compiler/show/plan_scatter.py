"""Plans of a job as points: the time of a step to the right, the memory of a device upward, both by their logarithms.

A line joins the plans that no other beats in both. The chosen one is named, and plans that do not fit are grey. At most
`MOST_POINTS` plans are drawn besides these: every n-th.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from math import exp, log

from dslc.compiler.ir.number_text import byte_text, time_text
from dslc.compiler.rules.choice.plan_choice import PlanChoice
from dslc.compiler.show.canvas import BLUE, FAINT, GREY, INK, RED, SKY, Canvas
from dslc.dsl.record import Record, record

WIDTH, HEIGHT, LEFT, TOP = 640, 380, 90, 44
MOST_POINTS = 600
TICKS = 5


@record
class PlanPoint(Record):
    """One plan. `fits` is false if its memory does not suffice; `rank` is "chosen", "front" or "" for the rest."""

    time: float
    memory: int
    text: str
    fits: bool
    rank: str = ""


def plan_points(choice: PlanChoice) -> list[PlanPoint]:
    """Returns the plans of a choice that have a known time."""
    front = {id(plan) for plan in choice.front}
    return [
        PlanPoint(
            time=plan.step_time,
            memory=plan.peak,
            text=plan.text(),
            fits=plan.fits,
            rank="chosen" if plan is choice.plan else "front" if id(plan) in front else "",
        )
        for plan in choice.plans
        if not plan.code and plan.step_time
    ]


class _Scale:
    """Maps positive numbers to a length, by their logarithms."""

    def __init__(self, values: Sequence[float], length: float) -> None:
        low, high = log(min(values)), log(max(values))
        room = max(0.05, (high - low) * 0.06)
        self._low, self._span, self._length = low - room, high - low + 2 * room, length

    def place(self, value: float) -> float:
        return (log(value) - self._low) / self._span * self._length

    def value(self, share: float) -> float:
        return exp(self._low + share * self._span)


def draw_choice(name: str, choice: PlanChoice) -> str:
    """Returns the picture of a choice for the job of this name. Raises ValueError if no plan has a time."""
    return draw_plans(f"{name}: {len(choice.plans):,} plans", plan_points(choice))


def draw_plans(title: str, points: Sequence[PlanPoint]) -> str:
    """Returns the picture as DOT text. Raises ValueError if no plan has a time."""
    if not points:
        raise ValueError("no plan has a known time")
    canvas = Canvas(title)
    times = _Scale([point.time for point in points], WIDTH)
    sizes = _Scale([max(1, point.memory) for point in points], HEIGHT)
    canvas.write("title", LEFT, 8, WIDTH, title, size=13, bold=True)
    canvas.box("frame", LEFT, TOP, WIDTH, HEIGHT, line=GREY)
    for n in range(TICKS):
        share = (n + 0.5) / TICKS
        canvas.write(
            f"x{n}", LEFT + share * WIDTH - 50, TOP + HEIGHT + 6, 100, time_text(times.value(share)), align="c"
        )
        height = TOP + HEIGHT * (1 - share) - 6
        canvas.write(f"y{n}", 0, height, LEFT - 8, byte_text(sizes.value(share)), align="r")
    canvas.write("time", LEFT, TOP + HEIGHT + 22, WIDTH, "time of a step", align="c", ink=FAINT)
    canvas.write("memory", 0, TOP - 16, LEFT + 60, "memory of a device", ink=FAINT)
    dominated = [point for point in points if not point.rank]
    front = sorted((point for point in points if point.rank), key=lambda point: (point.time, point.memory))
    points_drawn = [*dominated[:: max(1, -(-len(dominated) // MOST_POINTS))], *front]
    names: dict[int, str] = {}
    places: dict[int, tuple[float, float]] = {}
    for n, point in enumerate(points_drawn):
        x, y = LEFT + times.place(point.time), TOP + HEIGHT - sizes.place(max(1, point.memory))
        colour = {"chosen": RED, "front": BLUE}.get(point.rank, SKY if point.fits else GREY)
        radius = 5 if point.rank == "chosen" else 3.5 if point.rank else 2
        tip = f"{point.text}: {time_text(point.time)}, {byte_text(point.memory)}"
        places[id(point)] = (x, y)
        box = canvas.box(f"p{n}", x - radius, y - radius, 2 * radius, 2 * radius, fill=colour, line=colour, tip=tip)
        names[id(point)] = box
    lowest = [point for n, point in enumerate(front) if all(point.memory < faster.memory for faster in front[:n])]
    for a, b in pairwise(lowest):
        canvas.line(names[id(a)], names[id(b)], [places[id(a)], places[id(b)]], colour=BLUE, pen=0.8)
    for point in front:
        if point.rank == "chosen":
            canvas.write("chosen", LEFT, TOP + HEIGHT + 40, WIDTH, f"chosen: {point.text}", size=11, ink=RED)
    canvas.write("legend", LEFT, TOP + HEIGHT + 58, WIDTH,
                 "dark: no other plan beats it in both; light: the rest; grey: does not fit", ink=INK)  # fmt: skip
    return canvas.text()
