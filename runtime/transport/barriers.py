"""Synchronizes the launcher of a training and its ranks: before the first rank starts, and after the last is done.

Model: a gate is a pipe, made before the ranks are forked. Nothing is written to it; a waiting process reads until no
process could write any more. A process that ends thus counts like one that has spoken, and none can end holding a lock.

Contract: a rank calls `begin` first; `tell` when it has finished its work or cannot go on; and then `part`, which
returns when all have finished: others may still need to read from its connections.
"""

from __future__ import annotations

import contextlib
import os

from dslc.runtime.process.stop import RunControl


class Barrier:
    """A gate at which ranks wait until the launcher opens it or ends."""

    def __init__(self) -> None:
        self._ends: tuple[int, ...] = os.pipe()

    def approach(self) -> None:
        """Closes this rank's end for writing, so that it no longer holds the gate shut."""
        os.close(self._ends[1])

    def wait(self) -> None:
        """Waits, in a rank that has approached, until the gate is open and every rank has approached or ended."""
        reading, _ = self._ends
        os.read(reading, 1)  # nothing is written; the read returns when no process could write
        os.close(reading)

    def open(self) -> None:
        for end in self._ends:
            os.close(end)
        self._ends = ()


class StartupChannels:
    """The gates and the news pipe that the launcher and the ranks of one training share.

    The first gate opens when all ranks are forked: none starts, or fails, while the launcher still forks other ranks.
    """

    def __init__(self, board: RunControl) -> None:
        self.board = board
        self.first, self.last = Barrier(), Barrier()
        self.news, self._bell = os.pipe()  # the launcher waits at one end; a rank writes to the other
        # By these the launcher asks each rank for the details of its position.
        self._requests = {rank: os.pipe() for rank in board.ranks}

    def begin(self, rank: int) -> int:
        """Waits for the other ranks. Returns the pipe by which this rank is asked for the details of its position."""
        requests, _ = self._requests[rank]
        for reading, writing in self._requests.values():
            os.close(writing)
            if reading != requests:
                os.close(reading)
        for gate in (self.first, self.last):
            gate.approach()
        os.close(self.news)
        self.first.wait()
        return requests

    def request_details(self, rank: int) -> None:
        """Asks a rank for the details of its position (measure/position_details.py)."""
        with contextlib.suppress(BrokenPipeError):  # the rank has ended
            os.write(self._requests[rank][1], b".")

    def tell(self) -> None:
        """Tells the launcher, from a rank, that there is something new on the board."""
        os.write(self._bell, b".")

    def part(self) -> None:
        self.last.wait()

    def hear(self) -> None:
        os.read(self.news, 1 << 12)

    def close(self) -> None:
        """Closes the pipes, in the launcher, when no rank is left."""
        for gate in (self.first, self.last):
            gate.open()
        os.close(self.news)
        os.close(self._bell)
        for end in (end for pipe in self._requests.values() for end in pipe):
            os.close(end)
