"""The blocks of pages that benchmarks write: each is between two comments, and the first of them names the command."""

from __future__ import annotations

import re
from pathlib import Path


def read_block(page: str | Path, name: str) -> str:
    return _split(page, name)[1]


def write_block(page: str | Path, name: str, text: str) -> None:
    """Replaces a block; the rest of the page stays."""
    before, _, after = _split(page, name)
    Path(page).write_text(before + text + after, encoding="utf-8")


def _split(page: str | Path, name: str) -> tuple[str, str, str]:
    """Returns a page up to a block, the block, and the rest. The comments are in the first and the last."""
    pattern, text = re.escape(name), Path(page).read_text(encoding="utf-8")
    begin, end = f"<!-- {pattern}, written by `[^`]*` -->\n", f"<!-- end of {pattern} -->"
    found = re.fullmatch(f"(.*{begin})(.*?)({end}.*)", text, re.DOTALL)
    assert found is not None, f"{page} has no block `{name}`"
    return found[1], found[2], found[3]
