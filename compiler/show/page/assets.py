"""Scripts and styles of pages, which lie beside the modules that write the pages."""

from __future__ import annotations

from collections.abc import Iterable
from importlib.resources import files

PAGE = "dslc.compiler.show.page"


def read_assets(package: str, names: Iterable[str]) -> str:
    return "".join(files(package).joinpath(name).read_text(encoding="utf-8") for name in names)
