"""Hooks that bring trouble to a training: faults and flipped bits, one after another, each once."""

from __future__ import annotations

import ctypes
import os
import signal
from pathlib import Path
from typing import Any

import torch


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


class BitFlips:
    """Flips bits of parameters as `rank:step:parameter:number:bit`, one in each start; the first one in all if it is
    `lasting`.
    """

    def __init__(self, flips: list[str], lasting: bool = False) -> None:
        self._flips = [tuple(map(int, flip.split(":"))) for flip in flips]
        self._lasting, self._number = lasting, 0

    def start(self, context: Any) -> None:
        self._number = 0 if self._lasting else len(list(Path(context.folder).glob("flip-*")))

    def after_step(self, context: Any) -> None:
        if self._number >= len(self._flips):
            return
        rank, step, parameter, number, bit = self._flips[self._number]
        if (rank, step) == (context.rank, context.step):
            (Path(context.folder) / f"flip-{self._number}").touch()
            tensor = list(context.model.parameters())[parameter]
            bits = getattr(tensor, "_local_tensor", tensor).data.view(-1).view(torch.int32)
            bits[number % len(bits)] ^= 1 << bit if bit < 31 else -(1 << 31)
