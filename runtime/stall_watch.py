"""Notices from the launcher that its ranks do not go on, and finds the cause from their positions.

Model: whenever the launcher wakes, it compares the positions of its ranks (process/positions.py). If none changes for
half of the limit, each rank is asked for the details of its position. At the limit the cause is shown, once for each
stall. The limit is `LIMIT`, and three times the longest pause so far. Until the second step, and where a state is
loaded or written, it is `FIRST_LIMIT`. It is never longer than the job's timeout.

Contract: `look` costs some microseconds while the ranks go on. Nothing here ends a training: a slow one goes on.

Limits: of the ranks of other hosts it knows what they have written to a run directory that it sees.
"""

from __future__ import annotations

import contextlib
import os
import signal
import time
from collections.abc import Callable, Mapping
from dataclasses import asdict
from json import dumps

from dslc.compiler.ir.program import JobProgram
from dslc.runtime.process.failure import line_of_module, log_path, users_line_in_log
from dslc.runtime.process.lifetime import processor_seconds
from dslc.runtime.process.positions import HostPositions, Phase, PositionDetails, PositionFile, phase_of, read_positions
from dslc.runtime.process.stall_cause import explain
from dslc.runtime.transport.barriers import StartupChannels

LIMIT, FIRST_LIMIT = 10.0, 60.0  # seconds
_ANSWER = 1.0  # seconds in which a rank gives the details of its position
_IDLE = 0.05  # share of a processor that a process uses which only waits, at most
_POLL = 0.02  # seconds between two looks at the answers
_LONG = (*range(Phase.SAMPLES), Phase.CHECKPOINT, Phase.END)  # phases of unknown length


class StallWatch:
    """Watches the ranks of one start. `statuses` returns the exit statuses of the processes by rank."""

    def __init__(
        self,
        program: JobProgram,
        run_dir: str,
        channels: StartupChannels,
        statuses: Callable[[], Mapping[int, int | None]],
        gap: float,
    ) -> None:
        lines = {"model": line_of_module(program, ""), "data": program.data.line, "optimizer": program.optimizer.line}
        self._program, self._run_dir, self._channels, self._board = program, run_dir, channels, channels.board
        self._statuses, self._gap = statuses, gap
        self._file = PositionFile(run_dir, self._board, program.world_size, lines, _gradient_exchange(program))
        self._seen: object = None
        self._at = time.monotonic()
        self._still = self._longest = 0.0  # seconds without a change, and the most of them so far
        self._asked = self._shown = False
        self._used: dict[int, float] = {}  # seconds of a processor, by rank, when details were asked for

    def look(self) -> str:
        """Returns the cause of a stall when it reaches the limit; else ""."""
        self._file.update()
        now = time.monotonic()
        passed, self._at = min(now - self._at, self._gap), now
        positions = self._positions()
        if positions != self._seen:
            if not self._is_early(positions):
                self._longest = max(self._longest, self._still)
            self._seen, self._still, self._asked, self._shown = positions, 0.0, False, False
            return ""
        self._still += passed
        limit = self._limit(positions)
        if self._still < limit / 2 or self._shown or (self._asked and self._still < limit):
            return ""
        if not self._asked:
            self._used = {rank: processor_seconds(self._board.process(rank)) for rank in self._board.ranks}
        self.update_details()
        self._asked = True
        self._shown = self._still >= limit and self._positions() == positions  # else they have gone on while asked
        return f"no progress for {self._still:.0f} s: {'; '.join(self.explain())}" if self._shown else ""

    def _positions(self) -> list[tuple[int, int, int]]:
        return [self._board.position(rank) for rank in self._board.ranks]

    def _limit(self, positions: list[tuple[int, int, int]]) -> float:
        slow = self._is_early(positions) or any(phase_of(position) in _LONG for _, position, _ in positions)
        return min(max(FIRST_LIMIT if slow else LIMIT, 3 * self._longest), self._program.timeout)

    def _is_early(self, positions: list[tuple[int, int, int]]) -> bool:
        """True until all ranks have done a step, which may take long: it compiles, or connects."""
        began = self._board.began
        return began is None or min(step for step, _, _ in positions) <= began[0] + 1

    def update_details(self) -> HostPositions:
        """Asks the ranks for the details of their positions, and writes these. Returns them."""
        board, until = self._board, time.monotonic() + _ANSWER
        statuses = self._statuses()
        ended = [rank for rank in board.ranks if board.has_finished(rank) or board.failing(rank)]
        asked = [rank for rank in board.ranks if statuses.get(rank) is None and rank not in ended]
        before = {rank: board.details(rank) for rank in asked}
        for rank in asked:
            board.add_details(rank, "")
            self._channels.request_details(rank)
        while asked and time.monotonic() < until:
            time.sleep(_POLL)
            statuses = self._statuses()
            asked = [rank for rank in asked if not board.details(rank) and statuses.get(rank) is None]
        self._read_stacks(asked, before)
        positions = self._file.positions(statuses, self._idle_ranks())
        self._file.write(positions)
        return positions

    def _idle_ranks(self) -> list[int]:
        """Returns the ranks that have used no processor while nothing changed."""
        if not self._asked:
            return []
        used = {rank: processor_seconds(self._board.process(rank)) - before for rank, before in self._used.items()}
        return [rank for rank, seconds in used.items() if seconds < _IDLE * self._still]

    def _read_stacks(self, ranks: list[int], before: Mapping[int, str]) -> None:
        """Reads the lines of ranks that give no details, as Python's lock is held, from the stacks in their logs."""
        for rank in ranks:
            board, path = self._board, log_path(self._run_dir, self._board, rank)
            _, _, since = board.position(rank)
            with contextlib.suppress(OSError):
                size = os.path.getsize(path)
                os.kill(board.process(rank), signal.SIGUSR1)
                time.sleep(_ANSWER / 5)
                python = users_line_in_log(path, size)
                details = PositionDetails(since=since, python=python)
                board.add_details(rank, dumps(asdict(details)) if python else before[rank])

    def explain(self, *, live: bool = True) -> list[str]:
        """Returns the cause from the positions of all hosts whose files are there."""
        hosts, _ = read_positions(self._run_dir)
        return explain(hosts or [self._file.positions(self._statuses())], live=live)


def _gradient_exchange(program: JobProgram) -> str:
    """Returns what ends a backward pass of several ranks."""
    gradients = program.gradients
    if gradients.exchange is not None:
        return f"exchange of the {gradients.exchange.agrees}"
    kinds = {"ddp": "all-reduce", "zero1": "all-reduce", "fsdp": "reduce-scatter"}
    return f"{kinds[gradients.kind]} of the gradients" if gradients.kind in kinds and program.world_size > 1 else ""
