"""Golden files: expected texts, kept beside the tests. `UPDATE_GOLDEN=1` writes them anew; look at the change."""

from __future__ import annotations

import os
from pathlib import Path


def hold(text: str, path: Path) -> None:
    """Asserts that the text is that of the file."""
    if os.environ.get("UPDATE_GOLDEN"):
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text, encoding="utf-8")
    assert text == path.read_text(encoding="utf-8"), f"{path.name} differs; UPDATE_GOLDEN=1 writes it anew"
