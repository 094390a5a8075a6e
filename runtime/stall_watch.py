"""Notices from the launcher that its ranks do not go on, and finds the cause from their positions.

Model: whenever the launcher wakes, it compares the positions of its ranks (process/positions.py). If none changes for
half of the limit, each rank is asked for the details of its position. At the limit the cause is shown, once for each
stall; a rank that has given no details is asked again for half of a limit. The limit is `LIMIT`, and three times the
longest pause so far. It is never longer than the job's timeout.

A rank may compute for long at one position until the second step, which compiles and connects, and where it loads or
writes a state. There the limit is `FIRST_LIMIT`, or `LIMIT` of seconds in which all ranks are idle: none computes,
reads or writes, but in a collective, and the details of none change.

Contract: `look` costs some microseconds while the ranks go on. Nothing here ends a training: a slow one goes on.

Limits: of the ranks of other hosts it knows what they have written to a run directory that it sees. Without that
directory it does not know that they are idle. A rank that waits for a network in code of the user's counts as idle.
"""

from __future__ import annotations

import contextlib
import os
import signal
import time
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from json import dumps

from dslc.compiler.ir.program import JobProgram
from dslc.runtime.process.failure import line_of_module, log_path, users_line_in_log
from dslc.runtime.process.lifetime import IdleTracker
from dslc.runtime.process.positions import (
    HostPositions,
    Phase,
    PositionDetails,
    PositionFile,
    RankPosition,
    phase_of,
    read_positions,
)
from dslc.runtime.process.stall_cause import SILENT, explain
from dslc.runtime.transport.barriers import StartupChannels

LIMIT, FIRST_LIMIT = 10.0, 60.0  # seconds
_ANSWER = 1.0  # seconds in which a rank gives the details of its position
_UNANSWERED = 1.5  # limits for which ranks are asked again that give no details, as on a machine that is short of time
_REFRESH = 5.0  # seconds after which the positions are written again for other hosts, though none has changed
_POLL = 0.02  # seconds between two looks at the answers
_LONG = (*range(Phase.SAMPLES), Phase.CHECKPOINT, Phase.END)  # phases of unknown length


@dataclass(frozen=True)
class _Stall:
    """Seconds without progress and their limit; `is_idle`: seconds in which the ranks did not even compute."""

    seconds: float
    limit: float
    is_idle: bool = False

    @property
    def share(self) -> float:
        """Part of the limit that has passed."""
        return self.seconds / self.limit


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
        self._has_other_hosts = program.world_size > len(self._board.ranks)
        self._seen: object = None
        self._at = time.monotonic()
        self._still = self._longest = 0.0  # seconds without a change, and the most of them so far
        self._activity = IdleTracker(gap)
        self._asked = self._shown = False

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
            self._activity.restart()
            return ""
        self._still += passed
        stall = self._stall(positions)
        if self._shown or (stall.share < (1.0 if self._asked else 0.5) and not self._needs_details()):
            return ""
        details = self._details()
        ranks = self.update_details().ranks
        self._activity.exclude_latest()  # to give details is no progress
        has_changed, self._asked = self._asked and self._details() != details, True
        if stall.share < 1 or self._positions() != positions:  # they have gone on while asked
            return ""
        if stall.is_idle and has_changed:
            self._activity.restart()
            return ""
        if stall.share < _UNANSWERED and any(place.state == "alive" and place.details is None for place in ranks):
            return ""
        self._shown = True
        return f"no progress for {stall.seconds:.0f} s: {'; '.join(self.explain())}"

    def _positions(self) -> list[tuple[int, int, int]]:
        return [self._board.position(rank) for rank in self._board.ranks]

    def _details(self) -> list[str]:
        return [self._board.details(rank) for rank in self._board.ranks]

    def _stall(self, positions: list[tuple[int, int, int]]) -> _Stall:
        """Returns for how long no position changed; or for how long all ranks were idle, where that is closer to its
        limit.
        """
        timeout = self._program.timeout
        limit = min(max(LIMIT, 3 * self._longest), timeout)
        if not self._is_early(positions) and all(phase_of(position) not in _LONG for _, position, _ in positions):
            if self._still >= limit / 2:
                self._activity.poll(self._processes())
            return _Stall(self._still, limit)
        idle = _Stall(self._idle_seconds(), limit, is_idle=True)
        unchanged = _Stall(self._still, min(max(FIRST_LIMIT, limit), timeout))
        return max(idle, unchanged, key=lambda stall: stall.share)

    def _idle_seconds(self) -> float:
        """Returns for how long all ranks of all hosts have been idle, or waited in a collective."""
        seconds = self._activity.poll(self._processes())
        positions = self._file.positions(self._statuses(), self._idle_ranks())
        if self._has_other_hosts and self._file.age >= _REFRESH:
            self._file.write(positions)
        live_ranks = [place for place in positions.ranks if place.state in ("alive", "suspended")]
        busy_ranks = [place for place in live_ranks if not _waits(place)] or live_ranks
        idle = min((seconds.get(self._board.process(place.rank), 0.0) for place in busy_ranks), default=0.0)
        return idle if idle < LIMIT / 2 or self._are_others_idle() else 0.0

    def _are_others_idle(self) -> bool:
        """True if the files of all other hosts are there, and none of their ranks computes or has gone on."""
        if not self._has_other_hosts:
            return True
        hosts, _ = read_positions(self._run_dir)
        others = [host for host in hosts if not any(place.rank in self._board.ranks for place in host.ranks)]
        is_complete = sum(len(host.ranks) for host in others) + len(self._board.ranks) >= self._program.world_size
        return is_complete and all(
            host.age > SILENT or place.idle or place.state != "alive" or _waits(place)
            for host in others
            for place in host.ranks
        )

    def _needs_details(self) -> bool:
        """True if some ranks are idle, and the details of the others may show that they wait for these."""
        return not self._asked and bool(self._idle_ranks(LIMIT / 2))

    def _is_early(self, positions: list[tuple[int, int, int]]) -> bool:
        """True until all ranks have done a step, which may take long: it compiles, or connects."""
        began = self._board.began
        return began is None or min(step for step, _, _ in positions) <= began[0] + 1

    def _processes(self) -> list[int]:
        return [self._board.process(rank) for rank in self._board.ranks]

    def _idle_ranks(self, seconds: float = 0.0) -> list[int]:
        """Returns the ranks that have been idle for `seconds`, at least for a quarter of the limit."""
        idle, least = self._activity.idle, max(seconds, LIMIT / 4)
        return [rank for rank in self._board.ranks if idle.get(self._board.process(rank), 0.0) >= least]

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


def _waits(place: RankPosition) -> bool:
    """True if a rank waits in a collective by its stack: on a GPU it may use a processor for this."""
    return place.details is not None and place.details.waits == "collective"


def _gradient_exchange(program: JobProgram) -> str:
    """Returns what ends a backward pass of several ranks."""
    gradients = program.gradients
    if gradients.exchange is not None:
        return f"exchange of the {gradients.exchange.agrees}"
    kinds = {"ddp": "all-reduce", "zero1": "all-reduce", "fsdp": "reduce-scatter"}
    return f"{kinds[gradients.kind]} of the gradients" if gradients.kind in kinds and program.world_size > 1 else ""
