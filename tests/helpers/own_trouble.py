"""A hook that brings trouble to a training: faults, one after another, each once."""

from __future__ import annotations

import ctypes
import os
import signal
from pathlib import Path
from typing import Any


class Trouble:
    """Faults as `rank:step:kind`. Each comes after the ones before it, in the step that it names, over all restarts."""

    def __init__(self, faults: list[str]) -> None:
        self._faults = [fault.split(":") for fault in faults]

    def after_backward(self, context: Any) -> None:
        for n, (rank, step, kind) in enumerate(self._faults):
            mark = Path(context.folder) / f"trouble-{n}"
            if not mark.exists():
                if (int(rank), int(step)) == (context.rank, context.step):
                    mark.touch()
                    getattr(self, kind)(context)
                return

    def bug(self, context: Any) -> None:
        raise ValueError(f"a bug, in an object at {hex(id(context))}")

    def other_bug(self, context: Any) -> None:
        raise ValueError("another bug")

    def exits(self, context: Any) -> None:
        os._exit(5)

    def killed(self, context: Any) -> None:
        os.kill(os.getpid(), signal.SIGKILL)

    def crash(self, context: Any) -> None:
        ctypes.string_at(0)

    def stopped(self, context: Any) -> None:
        os.kill(os.getpid(), signal.SIGSTOP)

    def asked(self, context: Any) -> None:
        """Asks the launcher to stop, and ends."""
        os.kill(os.getppid(), signal.SIGINT)
        os.kill(os.getpid(), signal.SIGKILL)

    def damage(self, context: Any) -> None:
        newest = max((Path(context.folder) / "checkpoints").glob("step-*[0-9]"))
        with open(max(newest.glob("*.distcp")), "r+b") as file:
            file.write(b"damage")
        self.killed(context)
