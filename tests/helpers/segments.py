"""Who holds segments of shared memory (Linux): a segment has no name in any folder, and lives as long as a process
maps it or has it open.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Collection
from pathlib import Path

from dslc.runtime.transport.shared_segment import NAME


def segments_of(process: int | str = "self") -> set[int]:
    """Returns the segments that a process maps or has open, by their inodes; none of a process that has ended."""
    segments = set()
    with contextlib.suppress(OSError):
        for line in Path(f"/proc/{process}/maps").read_text().splitlines():
            if f"memfd:{NAME}" in line:
                segments.add(int(line.split()[4]))
    with contextlib.suppress(OSError):
        for file in Path(f"/proc/{process}/fd").iterdir():
            with contextlib.suppress(OSError):  # closed while others are read
                if f"memfd:{NAME}" in os.readlink(file):
                    segments.add(file.stat().st_ino)
    return segments


def holders(segments: Collection[int]) -> dict[int, set[int]]:
    """Returns the processes of this machine that hold some of these segments."""
    processes = [int(entry.name) for entry in Path("/proc").iterdir() if entry.name.isdigit()]
    held = {process: segments_of(process) & set(segments) for process in processes}
    return {process: of_process for process, of_process in held.items() if of_process}
