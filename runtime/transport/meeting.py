"""Where the launcher of a training and its ranks meet: before the first does anything, after the last has done all.

Model: pipes, made before the ranks are forked. Nothing is written to a gate; who waits at it reads until no one could
write, so that the end of a process counts as well as its word, and no process can end holding a lock.

Contract: a rank calls `begin` first; when it has done all it had to do, or can go on no more, it calls `tell`; and
`part`, which returns when all have done theirs. A rank that left before would close its connections while another may
still have to read from them.
"""

from __future__ import annotations

import os

from dslc.runtime.process.stop import Board


class Gate:
    """Where ranks wait until the launcher opens it, or ends."""

    def __init__(self) -> None:
        self._ends: tuple[int, ...] = os.pipe()

    def approach(self) -> None:
        """In a rank: it is no longer one that could hold the gate shut."""
        os.close(self._ends[1])

    def wait(self) -> None:
        """In a rank that has approached: until it is open, and all ranks have approached, or are at their end."""
        reading, _ = self._ends
        os.read(reading, 1)  # nothing is written; it ends when no one could
        os.close(reading)

    def open(self) -> None:
        """In the launcher."""
        for end in self._ends:
            os.close(end)
        self._ends = ()


class Meeting:
    """What the launcher and the ranks of one training share.

    The first gate is open when all ranks are forked: none works, or fails, while the launcher still forks others.
    """

    def __init__(self, board: Board) -> None:
        self.board = board
        self.first, self.last = Gate(), Gate()
        self.news, self._bell = os.pipe()  # the launcher waits at the one, and a rank rings the other

    def begin(self) -> None:
        """In a rank: until all are forked."""
        for gate in (self.first, self.last):
            gate.approach()
        os.close(self.news)
        self.first.wait()

    def tell(self) -> None:
        """In a rank: there is something new on the board."""
        os.write(self._bell, b".")

    def part(self) -> None:
        """In a rank: until all have done what they had to do."""
        self.last.wait()

    def hear(self) -> None:
        """In the launcher, when there was news."""
        os.read(self.news, 1 << 12)

    def close(self) -> None:
        """In the launcher, when no rank is left."""
        for gate in (self.first, self.last):
            gate.open()
        os.close(self.news)
        os.close(self._bell)
