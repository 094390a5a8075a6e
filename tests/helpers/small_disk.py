"""A disk that can be full."""

from __future__ import annotations

import contextlib
import errno
import os
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest


@contextlib.contextmanager
def small_disk(folder: Path, size: str) -> Iterator[Path]:
    """Mounts a file system of its own at `folder` during the test; skips the test if that is not allowed."""
    folder.mkdir()
    made = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", f"size={size}", "tmpfs", str(folder)],
        capture_output=True,
        text=True,
        check=False,
    )
    if made.returncode:
        pytest.skip(f"no file system can be mounted here: {made.stderr.strip()}")
    try:
        yield folder
    finally:
        subprocess.run(["umount", "--lazy", str(folder)], check=True)


def fill(folder: Path) -> Path:
    """Fills the disk of `folder`; returns the file that does."""
    path = folder / "filling"
    with open(path, "ab", buffering=0) as file:
        for piece in (1 << 20, 1 << 12, 1):
            with contextlib.suppress(_Full):
                while True:
                    _write(file.fileno(), bytes(piece))
    return path


class _Full(Exception):
    pass


def _write(file: int, content: bytes) -> None:
    try:
        os.write(file, content)
    except OSError as error:
        if error.errno != errno.ENOSPC:
            raise
        raise _Full from None
