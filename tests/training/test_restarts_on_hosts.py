"""`launch.restarts` on several hosts: a rank, a launcher or the first launcher is lost, and the training goes on."""

from __future__ import annotations

import os
import signal
from pathlib import Path

import pytest
from helpers.hosts import ranks_of, reach, started
from helpers.launcher import Command, Launcher
from helpers.trained import Trained, agree, train_job
from test_faults import listening
from test_hosts import ALONE, JOB, both

STEPS = 400
MORE = """
checkpoint {
  every = 20 steps
}
launch {
  restarts = 3
  timeout  = 60s
}
"""


@pytest.fixture
def job(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("OMP_WAIT_POLICY", "PASSIVE")  # threads that wait leave the cores to the other ranks
    path = tmp_path / "job.plt"
    path.write_text(JOB.replace("steps     = 12", f"steps     = {STEPS}") + MORE)
    return path


@pytest.fixture
def out(job: Path) -> Path:
    return job.parent / "run"


@pytest.fixture(scope="module")
def alone(launcher: Launcher, tmp_path_factory: pytest.TempPathFactory) -> Trained:
    path = tmp_path_factory.mktemp("alone") / "job.plt"
    path.write_text(JOB.replace("steps     = 12", f"steps     = {STEPS}"))
    return train_job(launcher, path, *ALONE)


def lose(command: Command, survivor: Command) -> None:
    """Kills a launcher, and waits until the other one has noticed."""
    command.process.kill()
    survivor.wait_for("is gone: its connection ended")


def test_ranks_and_launchers_come_back(job: Path, out: Path, alone: Trained) -> None:
    """A rank is killed, then the launcher of the other host, then that of the first; both are started again."""
    words = both(job, out=out)
    with started(job.parent, words) as commands:
        reach(out, 50, commands)
        keeper, other = sorted(commands, key=lambda each: not listening(each.process.pid))
        (rank,) = ranks_of(other)
        os.kill(rank, signal.SIGKILL)
        keeper.wait_for("note: restart 1 of 3, from the checkpoint of step ")
        reach(out, 150, commands)
        lose(other, keeper)
        with started(job.parent / "again", words[:1]) as (back,):
            reach(out, 250, [keeper, back])
            lose(keeper, back)
            with started(job.parent / "once more", words[:1]) as (keeper_again,):
                ends = [each.end() for each in (back, keeper_again)]
                assert [status for status, _ in ends] == [0, 0], ends
                assert not [left for each in (*commands, back, keeper_again) for left in each.left()]
    assert "(node 0) to come back, up to 60 s (`launch.timeout`)" in ends[0][1], ends
    agree(alone, Trained(out))
    assert sorted(each.name for each in (out / "logs").glob("attempt-*")) == ["attempt-2", "attempt-3", "attempt-4"]
