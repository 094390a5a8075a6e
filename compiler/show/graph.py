"""The actions of one step and the transfers between them: a lane for each pipeline coordinate, time to the right.

If there are few micro-batches each is drawn, every action at its place in a schedule of equal lengths. Otherwise the
forwards of a stage are one box and so are its backwards, in the order in which the first micro-batch goes through them:
through the stages forward, and back. Of many stages the first and the last are drawn. Then follow the exchange over the
data axis and the update. Dotted lines are order, others are data, with the bytes that a data rank sends.
"""

from __future__ import annotations

import itertools

from dslc.compiler.cost.schedule_cost import timeline
from dslc.compiler.ir.number_text import byte_text
from dslc.compiler.ir.plan import PlanView, RankNode, StageNode
from dslc.compiler.show.canvas import AXIS_COLOURS, FAINT, SKY, Canvas, fitted
from dslc.compiler.show.describe import (
    SAME_EXPERTS,
    axis_of,
    exchanged,
    exchanging_axes,
    members,
    reach,
    schedule_table,
    span_text,
    stage_layers,
)
from dslc.compiler.show.legend import HEADING, heading
from dslc.compiler.show.parts import WORDS, summed_text
from dslc.compiler.show.schedule import COLOURS
from dslc.dsl.words import plural

MOST_ACTIONS = 40  # actions drawn one by one, at most
MOST_STAGES = 6
NAME = 196  # width of the label at the beginning of a lane
FIRST = 150 + NAME  # x of the first column
EXCHANGE = 156  # width of an exchange
Box = tuple[float, float, float, float]


def draw_graph(plan: PlanView) -> str:
    """Returns the picture as DOT text."""
    canvas = Canvas(plan.job)
    width = _Graph(canvas, plan).draw()
    heading(canvas, plan, width)
    return canvas.text()


class _Graph:
    def __init__(self, canvas: Canvas, plan: PlanView) -> None:
        self.canvas, self.plan = canvas, plan
        self.stages = plan.stages
        self.halves = any("I" in row or "W" in row for row in plan.schedule.rows) if plan.schedule else False
        actions = 2 * max(1, len(self.stages)) * plan.data.microbatches
        self.folded = self.halves or actions > MOST_ACTIONS
        if self.folded and len(self.stages) > MOST_STAGES:
            self.stages = (*self.stages[:3], *self.stages[-2:])
        self.wide, self.gap = (134, 58) if self.folded else (58 if plan.schedule else 76, 22)  # `micro-batch 0`
        self.lanes = sorted({stage.pipeline for stage in self.stages}) or [0]
        self.boxes: dict[str, Box] = {}
        self.high = self._lane_height()

    def _node(self, pipeline: int) -> RankNode | None:
        return next((n for n in self.plan.ranks if n.pipeline == pipeline), None)

    def _lane_height(self) -> float:
        exchanges = max((len(exchanged(n, "data")) for n in self.plan.ranks), default=0)
        chips = max((len(self._within(n.pipeline)) for n in self.plan.ranks), default=0)
        actions = 54 + (42 if self.halves else 0) if self.folded else 32
        return 30 + max(actions, 36 * exchanges) + 15 * chips

    def _within(self, pipeline: int) -> list[str]:
        axis_traffic = [
            (axis, exchanged(self._node(pipeline), axis.name))
            for axis in exchanging_axes(self.plan)
            if axis.name in ("expert", "context", "tensor")
        ]
        return [f"{axis.name} x{axis.size}: {summed_text(traffic)}" for axis, traffic in axis_traffic if traffic]

    def draw(self) -> float:
        """Draws lanes, boxes and lines; returns the picture's width."""
        columns = self._folded_columns() if self.folded else self._columns()
        update_column = max(columns.values()) + 1
        width = FIRST + update_column * (self.wide + self.gap) + EXCHANGE + 106
        for number, pipeline in enumerate(self.lanes):
            self._lane(number, pipeline, width)
        for name, column in columns.items():
            self._action(name, column)
        for number, pipeline in enumerate(self.lanes):
            self._draw_update(number, pipeline, update_column)
        self._source()
        self._hand_on()
        return max(700, width)

    # ---- places

    def _folded_columns(self) -> dict[str, int]:
        """Places forwards to the right in the order of the stages, backwards after them in reverse."""
        numbers = [s.index for s in self.stages] or [0]
        skip = len(self.stages) < len(self.plan.stages)
        columns, column = {}, 0
        for kind in "FB":
            for a, b in zip(numbers, [*numbers[1:], numbers[-1]], strict=True):
                columns[f"{a}{kind}"] = column
                column += 2 if skip and abs(a - b) > 1 else 1
            numbers = numbers[::-1]
        return columns

    def _columns(self) -> dict[str, int]:
        """Places each action at its start in a step where all take equally long."""
        plan = self.plan
        if plan.schedule is None:
            return {f"0{kind}{m}": 2 * m + n for m in range(plan.data.microbatches) for n, kind in enumerate("FB")}
        time = timeline(schedule_table(plan), [1.0] * len(plan.stages), [1.0] * len(plan.stages))
        return {str(action): round(start) for row in time.spans for action, start, _ in row}

    def _lane_top(self, number: int) -> float:
        return HEADING + 10 + number * (self.high + 34)

    def _stage_of(self, name: str) -> StageNode | None:
        digits = name[: next(n for n, letter in enumerate(name) if letter.isalpha())]
        return next((s for s in self.stages if s.index == int(digits)), None)

    # ---- boxes

    def _lane(self, number: int, pipeline: int, width: float) -> None:
        plan = self.plan
        count = plan.world_size // axis_of(plan, "pipeline").size
        ranks = f"rank{'s' if count > 1 else ''} {span_text(pipeline * count, (pipeline + 1) * count - 1)}"
        y = self._lane_top(number)
        label = f"pipeline {pipeline}, {ranks}" if plan.schedule else ranks
        left = FIRST - NAME - 22
        name = self.canvas.write(f"lane {pipeline}", left, y + 4, NAME + 20, label, size=10.5, bold=True)
        members = [name]
        chips = self._within(pipeline)
        for n, text in enumerate(chips):
            colour = AXIS_COLOURS[text.split(" ")[0]]
            top = y + self.high - 15 * (len(chips) - n) - 4
            members.append(
                self.canvas.write(f"within {pipeline}.{n}", left, top, NAME + 20, text, size=9.5, ink=colour)
            )
        self.canvas.cluster(f"lane {pipeline}", left - 6, y, width - left + 6, self.high, "", members)

    def _action(self, name: str, column: int) -> None:
        stage = self._stage_of(name)
        number = self.lanes.index(stage.pipeline) if stage else 0
        x, y = FIRST + column * (self.wide + self.gap), self._lane_top(number) + 24
        kind = "F" if "F" in name else "B"
        words = {"F": "forward", "B": "backward"}
        if not self.folded:
            text = f"{words[kind]}\\n{name if self.plan.schedule else f'micro-batch {name[2:]}'}"
            self._box(name, x, y, self.wide, 32, text, COLOURS[kind][0], size=8.5)
            return
        pieces = plural(self.plan.data.microbatches, "micro-batch") if self.plan.data.microbatches > 1 else ""
        title = f"{words[kind]}" + (f", stage {stage.index}" if stage and len(self.plan.stages) > 1 else "")
        if self.halves and kind == "B":
            title = title.replace("backward", "input")
        layers = stage_layers(self.plan, stage) if stage else ""
        lines = [line for line in (title, pieces, layers if kind == "F" else "") if line]
        self._box(name, x, y, self.wide, 54, "", COLOURS[kind][0])
        self.canvas.write(f"{name} text", x + 4, y + 6, self.wide - 6, "\n".join(lines), size=9.5)
        if self.halves and kind == "B":
            weight_half = name.replace("B", "W")
            self._box(
                weight_half, x, y + 66, self.wide, 28, f"weights, stage {stage.index if stage else 0}", COLOURS["W"][0]
            )
            self.canvas.line(name, weight_half, [(x + self.wide / 2, y + 54), (x + self.wide / 2, y + 66)], arrow=True)

    def _box(self, name: str, x: float, y: float, w: float, h: float, label: str, fill: str, size: float = 9.5) -> None:
        self.canvas.box(name, x, y, w, h, label, fill=fill, line="#777777", style="filled,rounded", size=size)
        self.boxes[name] = (x, y, w, h)

    def _draw_update(self, number: int, pipeline: int, column: int) -> None:
        """Draws the exchange over the data axis and the update, after the lane's last backward; order within the
        lane.
        """
        mine = [name for name in self.boxes if self._lane_of(name) == pipeline]
        mine.sort(key=lambda name: self.boxes[name][0])
        if not self.folded:
            for a, b in itertools.pairwise(mine):
                self._across(a, b, FAINT, is_dashed=True)
        y, left = self._lane_top(number) + 24, FIRST + column * (self.wide + self.gap)
        middle = self.boxes[mine[-1]][1] + self.boxes[mine[-1]][3] / 2
        update = f"update {pipeline}"
        self._box(
            update,
            left + EXCHANGE + 16,
            middle - 17,
            70,
            34,
            f"update\\n{self.plan.training.optimizer}",
            COLOURS["update"][0],
        )
        exchanges = exchanged(self._node(pipeline), "data")
        for n, t in enumerate(exchanges):
            name = f"exchange {pipeline}.{n}"
            size = f"{byte_text(t.bytes)} in {plural(t.count, 'operation')}"
            scope = reach(self.plan, t)
            of_experts = " of experts" * (scope == SAME_EXPERTS)
            size += f", {scope} {members(self.plan, scope)}" if scope and not of_experts else ""
            label = fitted(f"{WORDS.get(t.operation, t.operation)} {t.what}{of_experts}", EXCHANGE, 8.5)
            top = middle - 17 if len(exchanges) == 1 else y + 36 * n
            self.canvas.box(
                name,
                left,
                top,
                EXCHANGE,
                32,
                f"{label}\\n{size}",
                fill="#fbeee4",
                line=AXIS_COLOURS["data"],
                style="filled,rounded",
                size=8.5,
            )
            self.boxes[name] = (left, top, EXCHANGE, 32)
            self._across(mine[-1], name, AXIS_COLOURS["data"])
            self._across(name, update, FAINT)
        if not exchanges:
            self._across(mine[-1], update, FAINT)

    def _lane_of(self, name: str) -> int | None:
        if not name[0].isdigit():
            return None
        stage = self._stage_of(name)
        return stage.pipeline if stage else 0

    # ---- lines

    def _across(self, a: str, b: str, colour: str, is_dashed: bool = False, label: str = "") -> None:
        """Draws a line from the right of one box to the left of another."""
        (ax, ay, aw, ah), (bx, by, _, bh) = self.boxes[a], self.boxes[b]
        points = [(ax + aw, ay + ah / 2), (bx, by + bh / 2)]
        self.canvas.line(a, b, points, colour=colour, arrow=True, is_dashed=is_dashed)
        if label:
            x, y = (points[0][0] + points[1][0]) / 2, (points[0][1] + points[1][1]) / 2
            if ay == by:
                self.canvas.write(f"{a} to {b}", x - 30, y - 14, 60, label, size=8.5, align="c")
            else:
                self.canvas.write(f"{a} to {b}", x + 7, y - (13 if by > ay else 0), 80, label, size=8.5)

    def _down(self, a: str, b: str, label: str) -> None:
        """Draws a line from the bottom of one box to the top of another in a lower lane, or the other way round."""
        (ax, ay, aw, ah), (bx, by, bw, bh) = self.boxes[a], self.boxes[b]
        is_below = by > ay
        points = [(ax + aw / 2, ay + ah if is_below else ay), (bx + bw / 2, by if is_below else by + bh)]
        self.canvas.line(a, b, points, arrow=True)
        if label:
            x, y = (points[0][0] + points[1][0]) / 2, (points[0][1] + points[1][1]) / 2
            self.canvas.write(f"{a} to {b}", x + 5, y - (12 if is_below else 0), 60, label, size=8)

    def _source(self) -> None:
        data = self.plan.data
        name = "0F" if self.folded else "0F0"
        _, y, _, h = self.boxes[name]
        text = f"{data.source}\\n{plural(data.batch, 'sample')}"
        self.canvas.box(
            "source", 0, y + h / 2 - 18, 100, 36, text, fill="#eaf4fb", line=SKY, style="filled,rounded", size=9.5
        )
        self.boxes["source"] = (0, y + h / 2 - 18, 100, 36)
        self._across("source", name, SKY)

    def _hand_on(self) -> None:
        """Draws the transfers between stages: outputs forward, gradients of inputs back, the loss between them."""
        plan = self.plan
        for a, b in zip(self.stages, self.stages[1:], strict=False):
            if self.folded:
                size = f"{plan.data.microbatches} x {byte_text(a.output_bytes)}"
                label = size if b.index == a.index + 1 else f"… {b.index - a.index - 1} more …"
                self._across(f"{a.index}F", f"{b.index}F", "#222222", label=label)
                self._across(f"{b.index}B", f"{a.index}B", "#222222", label=label)
                continue
            for m in range(plan.data.microbatches):
                size = "" if m else byte_text(a.output_bytes)  # the same for all: written once
                self._down(f"{a.index}F{m}", f"{b.index}F{m}", size)
                self._down(f"{b.index}B{m}", f"{a.index}B{m}", size)
        if self.folded:
            last_stage = self.stages[-1].index if self.stages else 0
            self._across(f"{last_stage}F", f"{last_stage}B", "#222222", label="loss")
