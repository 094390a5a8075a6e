"""The files of the user's cache."""

from __future__ import annotations

import os
from pathlib import Path

from dslc.dsl import cache


def test_a_file_that_cannot_be_written_leaves_nothing_behind(tmp_path: Path) -> None:
    (tmp_path / "taken").mkdir()
    cache.write(str(tmp_path / "taken"), b"data")
    assert os.listdir(tmp_path) == ["taken"]
    cache.write(str(tmp_path / "free"), b"data")
    assert sorted(os.listdir(tmp_path)) == ["free", "taken"]
    assert cache.read_checked(str(tmp_path / "free")) == b"data"
