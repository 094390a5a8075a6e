"""Trainings that `ssh` starts on several hosts, each with a sshd of its own."""

from __future__ import annotations

import os
import signal
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest
from helpers.commands import dslc
from helpers.hosts import local_command, logged, namespaces, reach, reach_checkpoint, started, tool
from helpers.job_texts import job_text
from helpers.launcher import Launcher
from helpers.sshd import served, why_none
from helpers.trained import Trained, agree, train_job
from helpers.waiting import until

from dslc.runtime.process.records import read_metrics

pytestmark = pytest.mark.skipif(bool(why_none()), reason=why_none() or "hosts can be made")

JOB = job_text(
    model={"network": "[flatten(), linear(16), relu(), linear(10)]"},
    data={"source": "digits()", "batch": 48, "validation": "10%"},
    devices={"nodes": 2, "cpus": 1},
    train={"steps": 12, "optimizer": "sgd(lr = 0.05, momentum = 0.9)", "scale_lr": "linear(base_batch = 24)"},
    checkpoint={"every": "6 steps"},
    launch={"with": 'ssh(hosts = ["host1", "host2"], options = ["-F", "CONFIG"])'},
)
ALONE = ("launch.with=local()", "devices.nodes=1", "devices.cpus=1")
ENDLESS = ("train.steps=100000", "checkpoint.every=50000 steps")


@pytest.fixture(scope="module")
def config(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    with namespaces(3) as names, served(tmp_path_factory.mktemp("ssh") / "sshd", names) as found:
        yield found


@pytest.fixture
def job(tmp_path: Path, config: Path) -> Path:
    path = tmp_path / "job.plt"
    path.write_text(JOB.replace("CONFIG", str(config)))
    return path


def words(job: Path, *settings: str) -> list[str]:
    chosen = [word for setting in settings for word in ("--set", setting)]
    return ["run", str(job), "--out", str(job.parent / "run"), *chosen]


def command_of(process: int | str) -> bytes:
    """Returns the words of a process; none if it has ended."""
    try:
        return Path(f"/proc/{process}/cmdline").read_bytes()
    except OSError:
        return b""


def is_launcher(process: int) -> bool:
    """True for the command that ssh_agent.py has started."""
    try:
        parent = Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()[1]
    except OSError:
        return False  # it has ended
    return b"dslc.launching.ssh_agent" in command_of(parent).split(b"\0")


def of_run(out: Path) -> list[int]:
    """Returns the processes on any host whose command names the run directory."""
    found = []
    for process in os.listdir("/proc"):
        said = command_of(process) if process.isdigit() else b""
        if str(out).encode() in said and b"dslc" in said and b"render" not in said:  # it draws, and ends by itself
            found.append(int(process))
    return found


def test_one_command_trains_on_two_hosts_as_one_process(launcher: Launcher, job: Path) -> None:
    run = dslc(*words(job), cwd=job.parent)
    assert run.returncode == 0, run.stdout + run.stderr
    lines = run.stdout.splitlines()
    assert all(line.startswith(("host1: ", "host2: ")) for line in lines)
    assert sum("validation: " in line for line in lines) == 1 and not any("host2: step " in line for line in lines)
    assert any(line.startswith("host2: trained 12 steps; metrics and weights are on ") for line in lines)
    assert not of_run(job.parent / "run")
    rates = [record["lr"] for record in read_metrics(str(job.parent / "run")) if "lr" in record]
    assert rates == pytest.approx([0.1] * 12), "it follows the global batch, on any number of ranks"
    agree(train_job(launcher, job, *ALONE), Trained(job.parent / "run"))


def test_a_plan_trains_on_the_hosts_of_its_job(job: Path) -> None:
    plan = job.with_name("plan.json")
    plan.write_text(dslc("plan", str(job), "--json", "--trace", cwd=job.parent).stdout)
    run = dslc("run", str(plan), "--out", str(job.parent / "run"), cwd=job.parent)
    assert run.returncode == 0 and "host1: trained 12 steps" in run.stdout, run.stderr
    assert read_metrics(str(job.parent / "run"))[-1]["step"] == 12


@pytest.mark.parametrize("number", [signal.SIGINT, pytest.param(signal.SIGKILL, marks=pytest.mark.slow)])
def test_the_end_of_the_command_is_the_end_on_all_hosts(job: Path, number: int) -> None:
    out = job.parent / "run"
    with started(job.parent, [local_command(words(job, *ENDLESS))]) as (running,):
        reach(out, 5, [running])
        os.kill(running.process.pid, number)
        status, said = running.end()
        until(lambda: not of_run(out))
    if number == signal.SIGINT:
        last = logged(out)[-1]
        assert status == 130 and f"host1: stopped after {last} steps of 100000" in said, said
        assert f"host2: stopped after {last} steps" in said
        assert "--set checkpoint.resume=auto" in said and "--rendezvous" not in said


def test_a_launcher_that_is_killed_is_started_again(launcher: Launcher, job: Path) -> None:
    out, long = job.parent / "run", ("train.steps=300", "checkpoint.every=20 steps")
    with started(job.parent, [local_command(words(job, *long, "launch.restarts=1"))]) as (running,):
        reach_checkpoint(out, [running])
        killed = next(each for each in of_run(out) if is_launcher(each))
        os.kill(killed, signal.SIGKILL)
        status, said = running.end()
        assert status == 0, said
        until(lambda: not of_run(out))
    assert "SIGKILL has ended the launcher of host" in said and "started again (1 of 1, `launch.restarts`)" in said
    assert "is gone: its connection ended" in said, said
    assert sorted(set(logged(out))) == list(range(1, 301))
    agree(train_job(launcher, job, *ALONE, *long), Trained(out))


def test_a_failed_rank_is_one_message(job: Path) -> None:
    run = dslc(*words(job, "train.optimizer.lr=3e38", "train.on_nonfinite=stop"), cwd=job.parent)
    assert run.returncode == 3, run.stdout + run.stderr
    assert run.stdout.count("training failed on rank") == 1 and not of_run(job.parent / "run")


@pytest.mark.long
def test_three_hosts_and_one_that_is_cut_off(launcher: Launcher, job: Path) -> None:
    three = ("devices.nodes=3", 'launch.with.hosts=["host1", "host2", "host3"]')
    run = dslc(*words(job, *three), cwd=job.parent)
    assert run.returncode == 0, run.stdout + run.stderr
    agree(train_job(launcher, job, *ALONE), Trained(job.parent / "run"))
    out = job.parent / "second"
    command = local_command([*words(job, *three, *ENDLESS), "--out", str(out)])
    with started(job.parent, [command]) as (running,):
        reach(out, 5, [running])
        tool("cut", "3")
        try:
            status, said = running.end()
            assert status == 3 and "host3" in said, said
            until(lambda: not of_run(out))
        finally:
            tool("mend", "3")


@pytest.mark.long
def test_hosts_of_an_elastic_job_come_and_go(launcher: Launcher, job: Path, config: Path) -> None:
    """The first cannot be reached at the beginning, and joins; the second is cut off, and comes back; the launcher of
    the third is killed, and is given up. The training goes on all the while.
    """
    out, right = job.parent / "run", config.read_text()
    three = ("devices.nodes=1..3", 'launch.with.hosts=["host1", "host2", "host3"]')
    own = job.parent / "config"
    own.write_text(right.replace("Port 2222", "Port 2223", 1))
    settings = (*three, *ENDLESS[:1], f'launch.with.options=["-F", "{own}"]')
    with started(job.parent, [local_command(words(job, *settings))]) as (running,):
        running.wait_for("host1 cannot be reached by ssh")
        reach(out, 10, [running])
        own.write_text(right)
        running.wait_for("host1: the training goes on with host2 and host3; this host waits for a place")
        running.wait_for("goes on after step ")
        tool("cut", "2")
        try:
            running.wait_for("goes on with the other hosts, from the checkpoint of step ")
            running.wait_for("the connection to host2 was lost (Timeout, server")
        finally:
            tool("mend", "2")
        running.wait_for("host2: the training goes on with ")
        running.wait_for("goes on after step ")
        os.kill(launcher_on("host3", out), signal.SIGKILL)
        running.wait_for("host3 takes no part any more (exit status 137)")
        reach(out, logged(out)[-1] + 30, [running])
        os.kill(running.process.pid, signal.SIGINT)
        status, said = running.end()
        assert status == 130 and "stopped after " in said, said
        until(lambda: not of_run(out))
    assert sorted(set(logged(out))) == list(range(1, logged(out)[-1] + 1))
    alone = train_job(launcher, job, *ALONE, "train.steps=60").losses()
    found = [record["loss"] for record in read_metrics(str(out)) if record["split"] == "train"]
    assert found[: len(alone)] == pytest.approx(alone, abs=1e-5)


def launcher_on(host: str, out: Path) -> int:
    """Returns the launcher of the run on a host."""
    there = set(map(int, subprocess.check_output(["ip", "netns", "pids", host]).split()))
    return next(each for each in of_run(out) if each in there and is_launcher(each))


@pytest.mark.parametrize(
    "wrong, instead, said",
    [
        (
            "Port 2222",
            "Port 2223",
            "cannot be reached by ssh (ssh: connect to host 10.77.0.1 port 2223: Connection ref",
        ),
        ("HostName 10.77.0.1", "HostName nowhere.invalid", "cannot be reached by ssh (ssh: Could not resolve hostname"),
        ("user_key", "host_key", "refuses the key"),
        ("known_hosts", "known_nowhere", "is not known here, or has changed"),
    ],
    ids=["port", "name", "key", "known hosts"],
)
def test_a_host_on_which_nothing_starts_is_named(job: Path, config: Path, wrong: str, instead: str, said: str) -> None:
    other = job.parent / "config"
    other.write_text(config.read_text().replace(wrong, instead, 1))
    run = dslc(*words(job, f'launch.with.options=["-F", "{other}"]'), cwd=job.parent)
    assert run.returncode == 2 and "host1" in run.stderr and said in run.stderr, run.stderr
    assert len(run.stderr.splitlines()) == 1 and not (job.parent / "run").exists()
    until(lambda: not of_run(job.parent / "run"))


@pytest.mark.parametrize(
    "settings, said",
    [
        (("devices.nodes=3",), "`ssh` reaches 2 hosts, and the job takes 3 nodes"),
        (('launch.with.hosts=["host1", "host1"]',), "`host1` is named twice, and a host is one node"),
        (('launch.with.hosts=["host1", "-oProxyCommand=x"]',), "`-oProxyCommand=x` is no host"),
    ],
)
def test_hosts_that_are_no_nodes_of_the_job_are_refused(job: Path, settings: tuple[str, ...], said: str) -> None:
    run = dslc(*words(job, *settings), cwd=job.parent)
    assert run.returncode == 1 and "error[E0823]" in run.stderr and said in run.stderr, run.stderr
