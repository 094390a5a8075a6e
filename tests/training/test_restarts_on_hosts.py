"""`launch.restarts` on several hosts: a rank, a launcher or the first launcher is lost, and the training goes on."""

from __future__ import annotations

import os
import random
import shutil
import signal
from collections import Counter
from contextlib import ExitStack
from pathlib import Path

import numpy as np
import pytest
from helpers.hosts import namespaces, ranks_of, reach, reach_checkpoint, started, tool, why_none
from helpers.launcher import Command, Launcher
from helpers.trained import Trained, agree, train_job
from test_faults import listening
from test_hosts import ALONE, JOB, both, on_hosts

STEPS = 400
SHARED = ("--set", "devices.cpus=2", "--set", "devices.backend=shared_memory")
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


@pytest.mark.core
@pytest.mark.parametrize("more", [(), pytest.param(SHARED, id="shared memory", marks=pytest.mark.long)])
def test_ranks_and_launchers_come_back(job: Path, out: Path, alone: Trained, more: tuple[str, ...]) -> None:
    """A rank is killed, then the launcher of the other host, then that of the first; both are started again."""
    words = both(job, *more, out=out)
    with started(job.parent, words) as commands:
        reach_checkpoint(out, commands)
        keeper, other = sorted(commands, key=lambda each: not listening(each.process.pid))
        os.kill(ranks_of(other)[-1], signal.SIGKILL)
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


@pytest.mark.long
def test_a_host_too_many_leaves_and_takes_the_place_of_a_lost_one(job: Path, out: Path) -> None:
    """The same command once more is refused while both hosts are there, and taken when one is lost."""
    words = both(job, "--set", "train.steps=1000000", out=out)
    with started(job.parent, words) as commands:
        reach(out, 10, commands)
        with started(job.parent / "new", words[:1]) as (new,):
            status, said = new.end()
        assert status == 2 and said.count(" comes too late: the job takes 2 (`devices.nodes`), and trains with ") == 1
        keeper, other = sorted(commands, key=lambda each: not listening(each.process.pid))
        with started(job.parent / "newest", words[:1]) as (newest,):
            lose(other, keeper)
            keeper.wait_for("resumes after step ")
            newest.process.send_signal(signal.SIGINT)
            assert [each.end()[0] for each in (keeper, newest)] == [130, 130]


@pytest.mark.parametrize(
    "more, others",
    [
        pytest.param((), ("--out", "other"), id="another folder", marks=pytest.mark.slow),
        pytest.param((), (), id="a folder of its own", marks=pytest.mark.long),
        pytest.param(("--set", "devices.nodes=1..2"), ("--out", "other"), id="elastic", marks=pytest.mark.long),
    ],
)
def test_a_launcher_of_another_run_takes_no_place_of_a_lost_one(
    job: Path, out: Path, monkeypatch: pytest.MonkeyPatch, more: tuple[str, ...], others: tuple[str, ...]
) -> None:
    """The same job, secret and rendezvous, and another run directory: it leaves with the reason, and writes nothing."""
    monkeypatch.setenv("DSLC_RUN_TOKEN", "a secret of all runs of this user")
    words = both(job, "--set", "train.steps=1000000", *more, out=out)
    stranger = [word for word in words[0] if word not in ("--out", str(out))]
    stranger += [str(job.parent / word) if word == "other" else word for word in others]
    with started(job.parent, words) as commands:
        reach_checkpoint(out, commands)
        keeper, other = sorted(commands, key=lambda each: not listening(each.process.pid))
        lose(other, keeper)
        with started(job.parent / "strange", [["env", "-C", str(job.parent), *stranger]]) as (strange,):
            status, said = strange.end()
        assert status == 2 and "the hosts differ in --out" in said, said
        keeper.wait_for(" was not taken: ")
        assert not (job.parent / "other" / "metrics.jsonl").exists() and not list(job.parent.glob("runs/*/*"))
        with started(job.parent / "right", words[:1]) as (right,):
            keeper.wait_for("resumes after step ")
            right.process.send_signal(signal.SIGINT)
            assert [each.end()[0] for each in (keeper, right)] == [130, 130]


class Drawn:
    """Two launchers and what hits them: a rank or a launcher, which is started again, at moments that are drawn."""

    def __init__(self, draw: random.Random, command: list[str], folder: Path, around: ExitStack) -> None:
        self._draw, self._command, self._folder, self._around = draw, command, folder, around
        self.hit: list[str] = []
        self.commands = [self._start() for _ in range(2)]

    def _start(self) -> Command:
        folder = self._folder / f"launcher-{len(self.hit)}-{len(list(self._folder.iterdir()))}"
        (one,) = self._around.enter_context(started(folder, [self._command]))
        folder.mkdir()
        return one

    def strike(self, n: int) -> None:
        command, first = self.commands[n], bool(listening(self.commands[n].process.pid))
        kind, ranks = self._draw.choice(["rank", "launcher"]), ranks_of(command)
        if kind == "rank" and ranks:
            os.kill(ranks[0], signal.SIGKILL)
            self.hit.append("a rank")
        elif kind == "launcher":
            command.process.kill()
            command.end()
            command.wait_for_all()
            self.hit.append("the first launcher" if first else "another launcher")
            self.commands[n] = self._start()


@pytest.mark.long
def test_drawn_faults_on_two_hosts(job: Path, out: Path, alone: Trained) -> None:
    """Also while the ranks are started again: half of the faults follow the one before at once."""
    draw, hit = random.Random(0), list[str]()
    while len(hit) < 30:
        shutil.rmtree(out, ignore_errors=True)
        folder = job.parent / f"training-{len(hit)}"
        folder.mkdir()
        with ExitStack() as around:
            command = both(job, "--set", "launch.restarts=1000", out=out)[0]
            drawn = Drawn(draw, command, folder, around)
            for step in range(40, STEPS - 40, 60):
                reach(out, step, drawn.commands)
                n = draw.randrange(2)
                drawn.strike(n)
                if draw.random() < 0.5:  # not the other one: if all launchers are lost, nobody knows of the training
                    drawn.strike(n)
            ends = [each.end() for each in drawn.commands]
            assert [status for status, _ in ends] == [0, 0], (drawn.hit, ends)
            assert not [left for each in drawn.commands for left in each.left()]
        agree(alone, Trained(out))
        hit += drawn.hit
    print(len(hit), Counter(hit))


@pytest.mark.long
@pytest.mark.skipif(bool(why_none()), reason=why_none())
def test_a_host_that_is_cut_off_comes_back(job: Path, out: Path, alone: Trained) -> None:
    words = ("--set", "devices.nodes=3", "--set", f"train.steps={3 * STEPS}")
    with namespaces(3), started(job.parent, on_hosts(job, *words, out=out)) as commands:
        reach(out, 50, commands)
        tool("cut", "2")
        try:
            commands[0].wait_for("host2 is gone: it did not answer for 10 s")
        finally:
            tool("mend", "2")
        ends = [each.end() for each in commands]
        assert [status for status, _ in ends] == [0, 0, 0], ends
        assert not [left for each in commands for left in each.left()]
    steps = [line["step"] for line in Trained(out).lines if line["split"] == "train"]
    assert steps == list(range(1, 3 * STEPS + 1))
    losses = alone.losses()
    np.testing.assert_allclose(Trained(out).losses()[: len(losses)], losses, rtol=0, atol=1e-5)
