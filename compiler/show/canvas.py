"""A canvas for pictures with computed positions: boxes, text, bars and lines, as a graph of graphviz.

Every node has its position, so Graphviz draws (`layout=nop2`) and decides nothing: a picture is the same with any
version of it. Coordinates are in points (72 to the inch), x to the right, y down. Plain labels alone, no HTML: the
WebAssembly build of Graphviz has no parser for it.

The palette is Okabe and Ito's (2008), told apart with any colour vision.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Literal

from graphviz import Digraph, nohtml

from dslc.dsl.plain import plain
from dslc.dsl.sums import float_sum

FONT = "Helvetica"
INK, FAINT, PAPER, GROUND = "#222222", "#8a8a8a", "#ffffff", "#f4f4f2"
BLUE, ORANGE, GREEN, YELLOW = "#0072b2", "#e69f00", "#009e73", "#f0e442"
SKY, RED, PINK, GREY = "#56b4e9", "#d55e00", "#cc79a7", "#b8b8b8"

MEMORY_COLOURS = {
    "parameters": BLUE,
    "gradients": ORANGE,
    "optimizer": GREEN,
    "activations": SKY,
    "buffers": YELLOW,
    "communication": PINK,
    "framework": GREY,
}
AXIS_COLOURS = {"pipeline": INK, "data": RED, "expert": PINK, "context": GREEN, "tensor": BLUE}
Point = tuple[float, float]


def escape(text: str) -> str:
    """Escapes a user's name, so that its backslashes, line ends and control characters are shown."""
    return plain(text.replace("\n", " ")).replace("\\", "\\\\")


def fitted(text: str, width: float, size: float) -> str:
    """Returns the text, cut with `…` if it is too wide in a broad sans-serif font (DejaVu Sans)."""
    room, wide = width / size, 0.0
    ends = [0.0, *(wide := wide + _WIDTHS.get(letter, 0.62) for letter in text)]
    if ends[-1] <= room:
        return text
    length = max((n for n, end in enumerate(ends) if end + _WIDTHS["…"] <= room), default=0)
    return text[:length].rstrip() + "…"


# Widths of letters relative to their height, where they differ from the usual.
_WIDTHS = {**dict.fromkeys("fijlrtI .,:;'|!()[]/-", 0.36), **dict.fromkeys("mwMW@%…", 0.95), "_": 0.5}


class Canvas:
    """Collects what is drawn; `text` writes it. Nodes are drawn in the order of their making, lines over them.

    Labels are DOT's: only `\\l`, `\\r` and `\\n` that callers write as ends of lines have a meaning (`escape`).
    """

    def __init__(self, name: str) -> None:
        self._name = name
        self._clusters: list[Digraph] = []
        self._nodes: dict[str, dict[str, str]] = {}
        self._edges: list[tuple[str, str, dict[str, str]]] = []

    def cluster(self, name: str, x: float, y: float, w: float, h: float, label: str, members: Sequence[str]) -> None:
        """A group with a heading; the members are nodes by name."""
        attributes = {
            "bb": f"{_n(x)},{_n(-y - h)},{_n(x + w)},{_n(-y)}",
            "label": nohtml(label),
            "lp": f"{_n(x + w / 2)},{_n(-y - 12)}",
            "fontsize": "11",
            "style": "filled,rounded",
            "fillcolor": GROUND,
            "color": GREY,
        }
        group = Digraph(f"cluster {name}", graph_attr=attributes)
        for member in members:
            group.node(nohtml(member))
        self._clusters.append(group)

    def box(
        self,
        name: str,
        x: float,
        y: float,
        w: float,
        h: float,
        label: str = "",
        *,
        fill: str = PAPER,
        line: str = INK,
        size: float = 10,
        ink: str = INK,
        bold: bool = False,
        style: str = "filled",
        pen: float = 1,
        tip: str = "",
    ) -> str:
        """Draws a rectangle by its upper left corner; returns its name."""
        assert name not in self._nodes, f"two nodes are called {name}"
        self._nodes[name] = {
            "pos": f"{_n(x + w / 2)},{_n(-y - h / 2)}",
            "width": _n(w / 72, 4),
            "height": _n(h / 72, 4),
            "label": nohtml(label),
            "style": style,
            "fillcolor": fill,
            "color": line,
            "fontsize": _n(size),
            **({"fontcolor": ink} if ink != INK else {}),
            **({"fontname": f"{FONT}-Bold"} if bold else {}),
            **({"penwidth": _n(pen)} if pen != 1 else {}),
            **({"tooltip": nohtml(tip)} if tip else {}),
        }
        return name

    def write(
        self,
        name: str,
        x: float,
        y: float,
        w: float,
        text: str,
        *,
        size: float = 10,
        align: Literal["l", "r", "c"] = "l",
        ink: str = INK,
        bold: bool = False,
    ) -> str:
        """Draws lines of text, the first at height y, cut if too wide."""
        lines = [fitted(escape(line), w, size) for line in text.split("\n")]
        end = {"l": "\\l", "r": "\\r", "c": "\\n"}[align]
        h = 1.25 * size * len(lines)
        label = end.join(lines) + (end if align != "c" else "")
        return self.box(name, x, y, w, h, label, size=size, ink=ink, bold=bold, fill="none", line="none", style="solid")

    def bar(
        self, name: str, x: float, y: float, w: float, h: float, parts: Sequence[tuple[str, float]], tip: str = ""
    ) -> str:
        """Draws a bar of colours side by side, each with its fraction of the width; the rest is paper."""
        parts_shown = [(colour, share) for colour, share in parts if share > 0.0005]
        remainder = 1 - float_sum(share for _, share in parts_shown)
        if remainder > 0.0005:
            parts_shown.append((PAPER, remainder))
        fill = ":".join(f"{colour};{_n(share, 4)}" for colour, share in parts_shown)
        if len(parts_shown) < 2:
            return self.box(name, x, y, w, h, fill=parts_shown[0][0], line=FAINT, pen=0.6, tip=tip)
        return self.box(name, x, y, w, h, fill=fill, line=FAINT, style="striped", pen=0.6, tip=tip)

    def line(
        self,
        tail: str,
        head: str,
        points: Sequence[Point],
        *,
        colour: str = INK,
        arrow: bool = False,
        tip_at_start: bool = False,
        pen: float = 1.2,
        is_dashed: bool = False,
        tip: str = "",
    ) -> None:
        """Draws a polyline between two nodes. `arrow` puts a tip at its end, `tip_at_start` at its beginning."""
        corners = [(x, -y) for x, y in points]
        end = ""
        if tip_at_start:
            end += f"s,{_n(corners[0][0])},{_n(corners[0][1])} "
            corners[0] = _short(corners[1], corners[0])
        if arrow:
            end += f"e,{_n(corners[-1][0])},{_n(corners[-1][1])} "
            corners[-1] = _short(corners[-2], corners[-1])
        control = [corners[0]]
        for (ax, ay), (bx, by) in itertools.pairwise(corners):
            control += [(ax + (bx - ax) / 3, ay + (by - ay) / 3), (bx - (bx - ax) / 3, by - (by - ay) / 3), (bx, by)]
        position = end + " ".join(f"{_n(x)},{_n(y)}" for x, y in control)
        attributes = {
            "pos": position,
            "color": colour,
            "penwidth": _n(pen),
            **({"arrowsize": "0.7"} if arrow else {"arrowhead": "none"}),
            **({"dir": "both"} if tip_at_start else {}),
            **({"style": "dashed"} if is_dashed else {}),
            **({"tooltip": nohtml(tip)} if tip else {}),
        }
        self._edges.append((tail, head, attributes))

    def text(self) -> str:
        """Returns the DOT source."""
        sheet = Digraph(nohtml(escape(self._name)))
        sheet.attr("graph", layout="nop2", outputorder="nodesfirst", splines="true", fontname=FONT, bgcolor=PAPER)
        sheet.attr("node", shape="box", fixedsize="true", margin="0.04", fontname=FONT, fontcolor=INK)
        sheet.attr("edge", fontname=FONT)
        for group in self._clusters:
            sheet.subgraph(group)
        for name, attributes in self._nodes.items():
            sheet.node(nohtml(name), **attributes)
        for tail, head, attributes in self._edges:
            assert ":" not in tail + head, "graphviz takes what follows for the side of a box"
            sheet.edge(tail, head, **attributes)
        source: str = sheet.source
        return source


def _short(a: Point, b: Point, tip: float = 7) -> Point:
    """Returns the end of a line from a to b that leaves room for its arrow's tip at b."""
    length = max(1e-6, ((b[0] - a[0]) ** 2 + (b[1] - a[1]) ** 2) ** 0.5)
    return b[0] - tip * (b[0] - a[0]) / length, b[1] - tip * (b[1] - a[1]) / length


def _n(value: float, places: int = 2) -> str:
    """Formats a number in few digits, the same on every machine."""
    text = f"{value:.{places}f}".rstrip("0").rstrip(".")
    return "0" if text in ("", "-0") else text
