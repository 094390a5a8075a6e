"""The progress of a training in a notebook: one output that is replaced as records come."""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Callable
from typing import Any

from dslc.python_api.html_views import loss_curve, progress_html
from dslc.runtime.process.records import NOTES, Follower, Record

EVERY = 0.5  # seconds between two updates
Update = Callable[[str], None]


def notebook_output() -> Update | None:
    """Returns what shows HTML in the present cell of a notebook, in place of what it showed before; None elsewhere."""
    ipython: Any = sys.modules.get("IPython")
    shell = ipython.get_ipython() if ipython is not None else None
    if not hasattr(shell, "kernel"):
        return None
    handle = ipython.display.display(ipython.display.HTML(""), display_id=True)
    return lambda page: handle.update(ipython.display.HTML(page))


class LiveProgress:
    """Shows the records of a training, at most every `EVERY` seconds, and its notes."""

    def __init__(self, update: Update, steps: int, folder: str) -> None:
        self._update, self._steps = update, steps
        self._notes, self._shown_notes = Follower(os.path.join(folder, NOTES)), list[str]()
        self._records: list[Record] = []
        self._at = -EVERY

    def record(self, record: Record) -> None:
        """Takes a record, and shows it unless another was shown a moment ago."""
        self._records.append(record)
        if time.monotonic() - self._at >= EVERY:
            self._show("")

    def close(self, end: str) -> None:
        """Shows how the training ended."""
        self._show(end)

    def _show(self, end: str) -> None:
        self._at = time.monotonic()
        self._shown_notes += [line.rstrip() for line in self._notes.new()]
        last = {record["split"]: record for record in self._records}
        step = max((record["step"] for record in last.values()), default=0)
        curve = loss_curve(self._records)
        self._update(progress_html(step, self._steps, last, curve, self._shown_notes, end))
