"""The launcher's watch before the second step: ranks that are idle are reported early, ranks that compute are not."""

from __future__ import annotations

import json
import math
import multiprocessing.connection
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from pathlib import Path

import pytest
from helpers.made_programs import images, program

from dslc.runtime import stall_watch
from dslc.runtime.process import lifetime
from dslc.runtime.process.failure import log_path
from dslc.runtime.process.positions import Phase, PositionDetails, PositionFile
from dslc.runtime.process.stop import RunControl
from dslc.runtime.stall_watch import StallWatch
from dslc.runtime.transport.barriers import StartupChannels

# A rank that computes, or that waits for a child which does, until SIGUSR2; then it waits.
COMPUTES = """
import signal
works = True
def rest(*_):
    global works
    works = False
signal.signal(signal.SIGUSR1, lambda *_: None)
signal.signal(signal.SIGUSR2, rest)
print("ready", flush=True)
while works:
    pass
print("rests", flush=True)
while True:
    signal.pause()
"""
BY_A_CHILD = f"""
import signal, subprocess, sys
with subprocess.Popen([sys.executable, "-c", {COMPUTES!r}]) as child:
    signal.signal(signal.SIGUSR2, lambda *_: child.send_signal(signal.SIGUSR2))
    child.wait()
"""
WAITS = COMPUTES.replace("works = True", "works = False", 1)


@pytest.fixture(autouse=True)
def short_limits(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(stall_watch, "LIMIT", 0.4)
    monkeypatch.setattr(stall_watch, "FIRST_LIMIT", 3600.0)
    monkeypatch.setattr(stall_watch, "_ANSWER", 0.05)
    monkeypatch.setattr(lifetime, "_PERIOD", 0.02)


class Rank:
    """A process in the place of a rank."""

    def __init__(self, code: str) -> None:
        # In a session of its own: its child ends with it.
        command = [sys.executable, "-c", code]
        self._process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True, start_new_session=True)
        self.pid = self._process.pid
        self.wait_for("ready")

    def wait_for(self, text: str) -> None:
        assert self._process.stdout is not None
        assert any(line.strip() == text for line in self._process.stdout)

    def rest(self) -> None:
        self._process.send_signal(signal.SIGUSR2)
        self.wait_for("rests")

    def end(self) -> None:
        os.killpg(self.pid, signal.SIGKILL)
        self._process.communicate()


@contextmanager
def ranks_of(*codes: str) -> Iterator[tuple[list[Rank], RunControl]]:
    """Starts a process for each rank; all build their model."""
    with ExitStack() as stack:
        board, ranks = RunControl(len(codes)), [Rank(code) for code in codes]
        for number, rank in enumerate(ranks):
            stack.callback(rank.end)
            with pytest.MonkeyPatch.context() as patch:
                patch.setattr(os, "getpid", lambda pid=rank.pid: pid)
                board.arrive(number)
            board.position_writer(number)(Phase.MODEL)
        yield ranks, board


def watch_of(board: RunControl, folder: Path, world: int, channels: StartupChannels | None = None) -> StallWatch:
    alive, channels = dict.fromkeys(board.ranks), channels or StartupChannels(board)
    return StallWatch(program(world, images(folder)), str(folder), channels, lambda: alive, gap=2.0)


def look_until(watch: StallWatch, is_reached: Callable[[], bool]) -> str:
    """Returns the first message of a watch, or "" if the condition is met before."""
    while not is_reached():
        if message := watch.look():
            return message
        multiprocessing.connection.wait([watch._channels.news], timeout=0.01)  # as the launcher does
    return ""


def never() -> bool:
    return False


def is_idle_for(watch: StallWatch, rank: Rank, limits: float) -> Callable[[], bool]:
    return lambda: watch._activity.idle.get(rank.pid, 0.0) >= limits * stall_watch.LIMIT


@pytest.mark.parametrize("code", [COMPUTES, BY_A_CHILD], ids=["itself", "by a child"])
def test_a_stall_is_named_before_the_first_step_but_no_rank_that_computes(tmp_path: Path, code: str) -> None:
    with ranks_of(WAITS, code) as ((waiting, computing), board):
        watch = watch_of(board, tmp_path, 2)
        assert look_until(watch, is_idle_for(watch, waiting, 3)) == ""
        computing.rest()
        message = look_until(watch, never)
        assert message.startswith("no progress for ") and "building the model" in message
        assert watch.look() == "", "a stall is shown once"


class LateAnswers(StartupChannels):
    """Ranks that give details of their positions at the third request: at the limit of a stall there are none."""

    requests = 0

    def request_details(self, rank: int) -> None:
        self.requests += 1
        if self.requests >= 3:
            details = PositionDetails(since=self.board.position(rank)[2], line="job.plt:7")
            self.board.add_details(rank, json.dumps(vars(details)))


def test_a_rank_that_answers_late_is_asked_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(stall_watch, "_UNANSWERED", math.inf)
    with ranks_of(WAITS) as (_, board):
        message = look_until(watch_of(board, tmp_path, 1, LateAnswers(board)), never)
        assert "rank 0 is building the model (job.plt:7)" in message


def test_a_rank_that_waits_in_a_collective_may_use_a_processor(tmp_path: Path) -> None:
    with ranks_of(WAITS, COMPUTES) as (ranks, board):
        (tmp_path / "logs").mkdir()
        for number in range(len(ranks)):
            Path(log_path(str(tmp_path), board, number)).touch()
        waits = PositionDetails(since=board.position(1)[2], waits="collective", operation="the broadcast")
        board.add_details(1, json.dumps(vars(waits)))
        watch = watch_of(board, tmp_path, 2)
        message = look_until(watch, never)
        assert "rank 1 is waiting in the broadcast, building the model" in message


def test_a_rank_that_has_finished_delays_no_report(tmp_path: Path) -> None:
    with ranks_of(WAITS, COMPUTES) as ((waiting, _), board):
        board.say(1, "done", done=True)
        watch = watch_of(board, tmp_path, 2)
        assert "building the model" in look_until(watch, is_idle_for(watch, waiting, 4))


def test_a_checkpoint_may_wait_as_long_as_one_before(tmp_path: Path) -> None:
    with ranks_of(WAITS) as ((waiting,), board):
        board.begin(0)
        board.enter(0, 2)
        board.position_writer(0)(Phase.CHECKPOINT)
        watch = watch_of(board, tmp_path, 1)
        watch._longest = stall_watch.LIMIT  # as after a checkpoint that took so long
        assert look_until(watch, is_idle_for(watch, waiting, 2)) == ""
        assert "writing a checkpoint" in look_until(watch, never)


def test_children_of_all_threads_are_found() -> None:
    with ThreadPoolExecutor(1) as pool:
        rank = pool.submit(Rank, WAITS).result()
        try:
            for children in (lifetime._children_of_threads, lifetime._children_in_table()):
                assert rank.pid in children(os.getpid())
        finally:
            rank.end()


def test_ranks_of_other_hosts_may_compute(tmp_path: Path) -> None:
    with ranks_of(WAITS) as ((waiting,), board):
        watch, others = watch_of(board, tmp_path, 2), RunControl(1, first=1)
        assert look_until(watch, is_idle_for(watch, waiting, 3)) == "", "nothing is known of the other host"
        others.position_writer(1)(Phase.MODEL)
        other_file = PositionFile(str(tmp_path), others, 2, {})
        other_file.write(other_file.positions({}))
        assert look_until(watch, is_idle_for(watch, waiting, 6)) == "", "a rank of the other host computes"
        other_file.write(other_file.positions({}, idle=[1]))
        assert "building the model" in look_until(watch, never)


def test_reading_and_writing_are_no_idleness(tmp_path: Path) -> None:
    before = lifetime.usage_by_process([os.getpid()])[os.getpid()]
    (tmp_path / "file").write_bytes(bytes(1 << 20))
    after = lifetime.usage_by_process([os.getpid()])[os.getpid()]
    assert after.transferred - before.transferred >= 1 << 20
    rests = lifetime.ProcessUsage(seconds=before.seconds, transferred=before.transferred)
    reads = lifetime.ProcessUsage(seconds=before.seconds, transferred=after.transferred)
    computes = lifetime.ProcessUsage(seconds=before.seconds + 0.2, transferred=before.transferred)
    assert [lifetime._is_idle(rests, later, 1.0) for later in (rests, reads, computes)] == [True, False, False]
    assert lifetime.usage_by_process([0]) == {}, "no process has this number"
