"""Paints the SVG that Graphviz writes as a PNG, with Pillow.

It knows only the SVG that Graphviz uses: one shift of the whole, polygons, polylines, ellipses, paths of `M` and `C`,
dashes, and lines of text. Text is set from the left, the middle or the right. Shapes are painted at twice the size and
then shrunk, which smooths their edges.

Letters come from a common sans-serif font of the system, or else from the one inside Pillow, so that there is text on
any machine.
"""

from __future__ import annotations

import io
import itertools
import re
from collections.abc import Iterator, Sequence
from functools import lru_cache
from typing import TYPE_CHECKING
from xml.etree import ElementTree

if TYPE_CHECKING:
    from PIL.ImageDraw import ImageDraw
    from PIL.ImageFont import FreeTypeFont, ImageFont

SCALE = 2.0  # pixels of the result to a point
SMOOTH = 2  # painted so many times larger, then shrunk
MOST_PIXELS = 60_000_000
REGULAR = ("LiberationSans-Regular.ttf", "Arial.ttf", "arial.ttf", "DejaVuSans.ttf")
BOLD = ("LiberationSans-Bold.ttf", "Arial Bold.ttf", "arialbd.ttf", "DejaVuSans-Bold.ttf")
PLAINER = str.maketrans({"–": "-", "×": "x", "→": ">", "·": "."})  # letters that Pillow's own font lacks
NONE = ("none", "transparent", None)
Point = tuple[float, float]


def paint(svg: str) -> bytes:
    """Returns the picture as PNG."""
    from PIL import Image, ImageDraw

    root = ElementTree.fromstring(svg)
    _, _, width, height = (float(part) for part in root.attrib["viewBox"].split())
    scale = min(SCALE, (MOST_PIXELS / max(1.0, width * height)) ** 0.5 / SMOOTH)
    fine = scale * SMOOTH
    sheet = Image.new("RGB", (max(1, round(width * fine)), max(1, round(height * fine))), "white")
    painter = _Painter(ImageDraw.Draw(sheet), fine, _shift(root))
    for element in root.iter():
        painter.element(element)
    small = sheet.resize((max(1, round(width * scale)), max(1, round(height * scale))), Image.Resampling.LANCZOS)
    kept = io.BytesIO()
    small.save(kept, "PNG", optimize=True)
    return kept.getvalue()


def _shift(root: ElementTree.Element) -> Point:
    """Returns Graphviz's `translate` of the whole; the viewBox begins at zero."""
    for element in root.iter():
        found = re.search(r"translate\(([-\d.e]+)[ ,]+([-\d.e]+)\)", element.get("transform", ""))
        if found:
            return float(found.group(1)), float(found.group(2))
    return 0.0, 0.0


class _Painter:
    def __init__(self, draw: ImageDraw, scale: float, shift: Point) -> None:
        self._draw = draw
        self._scale = scale
        self._shift = shift

    def element(self, element: ElementTree.Element) -> None:
        """Paints one element, not those inside it."""
        match element.tag.rpartition("}")[2]:
            case "polygon" | "polyline":
                pairs = (pair.split(",") for pair in element.attrib["points"].split())
                self._shape(element, [(float(x), float(y)) for x, y in pairs])
            case "path":
                self._shape(element, list(_path(element.attrib["d"])))
            case "ellipse":
                self._ellipse(element)
            case "text":
                self._text(element)

    def _to_pixels(self, point: Point) -> Point:
        return (point[0] + self._shift[0]) * self._scale, (point[1] + self._shift[1]) * self._scale

    def _pen(self, element: ElementTree.Element) -> int:
        return max(1, round(float(element.get("stroke-width", "1")) * self._scale))

    def _shape(self, element: ElementTree.Element, points: Sequence[Point]) -> None:
        places = [self._to_pixels(point) for point in points]
        fill, stroke = element.get("fill"), element.get("stroke")
        if fill not in NONE and len(places) > 2:
            self._draw.polygon(places, fill=fill)
        if stroke in NONE:
            return
        dashes = [float(n) * self._scale for n in re.findall(r"[\d.]+", element.get("stroke-dasharray", ""))]
        for piece in _dashed(places, dashes) if dashes else [places]:
            self._draw.line(piece, fill=stroke, width=self._pen(element), joint="curve")

    def _ellipse(self, element: ElementTree.Element) -> None:
        cx, cy, rx, ry = (float(element.attrib[name]) for name in ("cx", "cy", "rx", "ry"))
        (left, top), (right, bottom) = self._to_pixels((cx - rx, cy - ry)), self._to_pixels((cx + rx, cy + ry))
        fill, stroke = element.get("fill"), element.get("stroke")
        self._draw.ellipse(
            (left, top, right, bottom),
            fill=None if fill in NONE else fill,
            outline=None if stroke in NONE else stroke,
            width=self._pen(element),
        )

    def _text(self, element: ElementTree.Element) -> None:
        size = float(element.get("font-size", "14"))
        font, own = _font(round(size * self._scale), element.get("font-weight") == "bold")
        text = element.text or ""
        anchor = {"start": "ls", "middle": "ms", "end": "rs"}[element.get("text-anchor", "start")]
        place = self._to_pixels((float(element.attrib["x"]), float(element.attrib["y"])))
        self._draw.text(
            place, text.translate(PLAINER) if own else text, fill=element.get("fill", "black"), font=font, anchor=anchor
        )


@lru_cache(maxsize=64)
def _font(pixels: int, bold: bool) -> tuple[FreeTypeFont | ImageFont, bool]:
    """Returns a font of that height, and true if it is Pillow's own."""
    from PIL import ImageFont

    for name in BOLD if bold else REGULAR:
        try:
            return ImageFont.truetype(name, pixels), False
        except OSError:
            continue
    return ImageFont.load_default(pixels), True


def _path(d: str) -> Iterator[Point]:
    """Yields the points of `M x,y C x,y x,y x,y …`, curves as sixteen straight pieces."""
    numbers = [float(n) for n in re.findall(r"-?[\d.]+(?:e-?\d+)?", d)]
    points = list(zip(numbers[::2], numbers[1::2], strict=True))
    yield points[0]
    for n in range(0, len(points) - 3, 3):
        a, b, c, e = points[n : n + 4]
        for step in range(1, 17):
            t = step / 16
            u = 1 - t
            weights = (u * u * u, 3 * u * u * t, 3 * u * t * t, t * t * t)
            yield (
                sum(w * p[0] for w, p in zip(weights, (a, b, c, e), strict=True)),
                sum(w * p[1] for w, p in zip(weights, (a, b, c, e), strict=True)),
            )


def _dashed(points: Sequence[Point], dashes: Sequence[float]) -> Iterator[list[Point]]:
    """Cuts a line into dashes: on, off, on, … along its length."""
    number, left, piece = 0, dashes[0], [points[0]]
    for (ax, ay), (bx, by) in itertools.pairwise(points):
        length, done = ((bx - ax) ** 2 + (by - ay) ** 2) ** 0.5, 0.0
        while length - done > left:
            done += left
            at = (ax + (bx - ax) * done / length, ay + (by - ay) * done / length)
            if number % 2 == 0:
                yield [*piece, at]
            number, piece = number + 1, [at]
            left = dashes[number % len(dashes)]
        left -= length - done
        piece.append((bx, by))
    if number % 2 == 0 and len(piece) > 1:
        yield piece
