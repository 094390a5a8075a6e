"""Elastic trainings: hosts come, leave and die, and the training is the one that nobody disturbed."""

from __future__ import annotations

import os
import random
import signal
from collections import Counter
from contextlib import ExitStack
from pathlib import Path

import pytest
from helpers.hosts import (
    TOOL,
    free_port,
    local_command,
    logged,
    namespaces,
    ranks_of,
    reach,
    reach_checkpoint,
    started,
    tool,
    why_none,
)
from helpers.launcher import Command, Launcher
from helpers.paths import ROOT
from helpers.trained import Trained, agree, train_job
from helpers.waiting import until
from test_faults import listening
from test_hosts import ALONE

from dslc.runs.run_folder import LOCK

STEPS = 1500  # enough for all that happens meanwhile
SHARED = ("--set", "devices.cpus=2", "--set", "devices.backend=shared_memory")
ELASTIC = (ROOT / "examples" / "elastic.plt").read_text()


def written(folder: Path, steps: int = STEPS, nodes: str = "1..3", rate: float = 0.1) -> Path:
    path = folder / "job.plt"
    text = ELASTIC.replace("steps     = 400", f"steps     = {steps}").replace("1..3", nodes)
    path.write_text(text.replace("lr = 0.1", f"lr = {rate}"))
    return path


@pytest.fixture
def job(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("OMP_WAIT_POLICY", "PASSIVE")  # threads that wait leave the cores to the other ranks
    return written(tmp_path)


@pytest.fixture
def out(job: Path) -> Path:
    return job.parent / "run"


@pytest.fixture(scope="module")
def alone(launcher: Launcher, tmp_path_factory: pytest.TempPathFactory) -> Trained:
    return train_job(launcher, written(tmp_path_factory.mktemp("alone")), *ALONE)


class Hosts:
    """Launchers of one training on this machine, which are started and ended one by one."""

    def __init__(self, job: Path, around: ExitStack, *words: str) -> None:
        self._folder, self._around, self._number = job.parent, around, 0
        command = ["run", str(job), "--out", str(job.parent / "run"), "--rendezvous", f"localhost:{free_port()}"]
        self._command = local_command([*command, *words])
        self.there: list[Command] = []
        self.ended: list[Command] = []

    def start(self) -> Command:
        self._number += 1
        folder = self._folder / f"launcher-{self._number}"
        (command,) = self._around.enter_context(started(folder, [self._command]))
        self.there.append(command)
        return command

    def train(self, launchers: int, out: Path) -> None:
        """Starts launchers. Waits until all of them train, and there is a checkpoint: one may come late."""
        for _ in range(launchers):
            self.start()
        until(lambda: all(ranks_of(each) for each in self.there), self.there)
        reach_checkpoint(out, self.there)
        reach(out, (logged(out) or [0])[-1] + 10, self.there)

    def join(self, keeper: Command) -> None:
        """Starts a launcher, and has the training wait while it starts, so that it comes before the end."""
        ranks = ranks_of(keeper)
        for rank in ranks:
            os.kill(rank, signal.SIGSTOP)
        self.start().wait_for("this host waits for a place")
        for rank in ranks:
            os.kill(rank, signal.SIGCONT)
        keeper.wait_for("stops for a host that has come")
        keeper.wait_for("goes on after step ")

    def kill(self, command: Command) -> None:
        command.process.kill()
        command.wait_for_all()
        self.there.remove(command)
        self.ended.append(command)

    @property
    def keeper(self) -> Command:
        """The launcher that others come to."""
        return next(each for each in self.there if listening(each.process.pid))

    def left(self) -> list[str]:
        return [left for each in (*self.there, *self.ended) for left in each.left()]


@pytest.mark.core
@pytest.mark.parametrize("more", [(), pytest.param(SHARED, id="shared memory", marks=pytest.mark.long)])
def test_hosts_come_and_die(job: Path, out: Path, alone: Trained, more: tuple[str, ...]) -> None:
    """Three hosts, of which one dies; another one comes; the first one dies; the last two end."""
    with ExitStack() as around:
        hosts = Hosts(job, around, *more)
        hosts.train(3, out)
        keeper = hosts.keeper
        hosts.kill(next(each for each in hosts.there if each is not keeper))
        keeper.wait_for("is gone: its connection ended; goes on with the other hosts, from the checkpoint of step ")
        keeper.wait_for("goes on after step ")
        hosts.join(keeper)
        reach(out, logged(out)[-1] + 30, hosts.there)
        hosts.kill(keeper)
        ends = [each.end() for each in hosts.there]
        assert [status for status, _ in ends] == [0, 0], ends
        assert not hosts.left()
    (kept,) = [said for _, said in ends if "weights, metrics and logs are in" in said]
    assert "goes on after step " in kept and "restart" not in kept, kept
    assert "training failed" not in "".join(said for _, said in ends), ends
    agree(alone, Trained(out))
    assert sorted(each.name for each in (out / "logs").glob("attempt-*")) == ["attempt-2", "attempt-3", "attempt-4"]


@pytest.mark.slow
def test_ctrl_c_on_a_host_that_waits_ends_it_alone(job: Path, out: Path) -> None:
    """Of two hosts one waits, as 49 samples are not shared out over 2 ranks; the other goes on until it is stopped."""
    with ExitStack() as around:
        settings = ("data.batch=49", "train.steps=100000", "devices.nodes=1..2")
        hosts = Hosts(job, around, *(word for setting in settings for word in ("--set", setting)))
        first, second = hosts.start(), hosts.start()
        reach(out, 3, hosts.there)
        keeper = hosts.keeper
        spare = second if keeper is first else first
        spare.wait_for("this host waits for a place")
        os.kill(spare.process.pid, signal.SIGINT)
        assert spare.end()[0] == 130
        reach(out, logged(out)[-1] + 10, [keeper])
        third = hosts.start()
        third.wait_for("this host waits for a place")
        os.kill(keeper.process.pid, signal.SIGINT)
        ends = [each.end() for each in (keeper, third)]
        assert [status for status, _ in ends] == [130, 130], ends
        assert "the training was stopped, after " in ends[1][1], ends
        assert not hosts.left()
    steps = logged(out)
    assert steps == list(range(1, len(steps) + 1))


@pytest.mark.long
def test_one_to_four_hosts_come_and_go_ten_times(
    launcher: Launcher, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("OMP_WAIT_POLICY", "PASSIVE")
    # In so many steps a higher rate would make more than 1e-5 of what the order of sums rounds.
    steps, rate, draw, changes = 15_000, 0.01, random.Random(3), Counter[str]()
    (tmp_path / "alone").mkdir()
    alone = train_job(launcher, written(tmp_path / "alone", steps, rate=rate), *ALONE)
    job = written(tmp_path, steps, "1..4", rate)
    out = tmp_path / "run"
    with ExitStack() as around:
        hosts = Hosts(job, around)
        hosts.start()
        while changes.total() < 10:
            reach(out, (logged(out) or [0])[-1] + 25, hosts.there)
            keeper = hosts.keeper
            if len(hosts.there) == 1 or (len(hosts.there) < 4 and draw.random() < 0.5):
                hosts.join(keeper)
                changes["came"] += 1
                continue
            one = draw.choice(hosts.there)
            hosts.kill(one)
            changes["the first was killed" if one is keeper else "killed"] += 1
            draw.choice(hosts.there).wait_for("; goes on with the other hosts")
        ends = [each.end() for each in hosts.there]
        assert not any(status for status, _ in ends), (changes, ends)
        assert not hosts.left()
    print(changes)
    agree(alone, Trained(out))


@pytest.mark.long
@pytest.mark.skipif(bool(why_none()), reason=why_none())
def test_the_first_host_is_lost_and_comes_back(job: Path, out: Path) -> None:
    """On hosts with addresses of their own: the next one keeps, and the first, started again, is sent on to it. Then
    it is cut off, which the one that keeps does without; and joins again.
    """
    run = local_command(["run", str(job), "--out", str(out), "--rendezvous", "host1", "--set", "train.steps=100000"])
    commands = [[str(TOOL), "run", str(n), *run] for n in (1, 2, 3)]
    with namespaces(3), started(job.parent, commands) as (first, second, third):
        reach(out, 30, [first, second, third])
        os.killpg(first.process.pid, signal.SIGKILL)
        reach(out, logged(out)[-1] + 60, [second, third])
        keeper, other = (second, third) if "host2" in (out / LOCK).read_text() else (third, second)
        with started(job.parent / "again", commands[:1]) as (back,):
            keeper.wait_for("stops for a host that has come")
            keeper.wait_for("goes on after step ")
            reach(out, logged(out)[-1] + 30, [keeper, other, back])
            tool("cut", "1")
            try:
                keeper.wait_for("host1 is gone: it did not answer for 10 s")
                keeper.wait_for("goes on after step ")
            finally:
                tool("mend", "1")
            keeper.wait_for("stops for a host that has come")
            keeper.wait_for("goes on after step ")
            os.killpg(other.process.pid, signal.SIGINT)
            ends = [each.end() for each in (keeper, other, back)]
            assert [status for status, _ in ends] == [130, 130, 130], ends
            assert not [left for each in (keeper, other, back) for left in each.left()]
    steps = logged(out)
    assert steps == list(range(1, len(steps) + 1))


def test_a_failing_rank_takes_a_restart_and_a_change_none(job: Path, out: Path) -> None:
    with ExitStack() as around:
        hosts = Hosts(job, around, "--set", "train.steps=100000")
        hosts.train(2, out)
        keeper = hosts.keeper
        os.kill(ranks_of(keeper)[0], signal.SIGKILL)
        keeper.wait_for("note: restart 1 of 1, from the checkpoint of step ")
        keeper.wait_for("resumes after step ")  # the hosts have met: steps before the restart may be beyond 60
        reach(out, 60, hosts.there)
        hosts.kill(next(each for each in hosts.there if each is not keeper))
        keeper.wait_for("is gone: its connection ended; goes on with the other hosts, from the checkpoint of step ")
        keeper.wait_for("resumes after step ")
        reach(out, 90, hosts.there)
        os.kill(ranks_of(keeper)[0], signal.SIGKILL)
        status, said = keeper.end()
        assert status == 3 and "not restarted: it was restarted once, the most that `launch.restarts` allows" in said
        assert not hosts.left()
    steps = logged(out)
    assert steps == list(range(1, len(steps) + 1))


@pytest.mark.parametrize("nodes", [pytest.param("1..3", marks=pytest.mark.long), "2"])
def test_all_launchers_are_lost_at_once(job: Path, out: Path, alone: Trained, nodes: str) -> None:
    """The same commands, typed again, go on in the same run directory."""
    with ExitStack() as around:
        hosts = Hosts(job, around, "--set", f"devices.nodes={nodes}")
        hosts.train(2, out)
        for each in hosts.there:
            os.killpg(each.process.pid, signal.SIGKILL)
        for each in list(hosts.there):
            hosts.kill(each)
        for _ in range(2):
            hosts.start()
        ends = [each.end() for each in hosts.there]
        assert [status for status, _ in ends] == [0, 0], ends
        assert all("resumes after step " in said and "restart" not in said for _, said in ends), ends
        assert not hosts.left()
    agree(alone, Trained(out))
