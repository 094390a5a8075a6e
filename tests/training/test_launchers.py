"""Trainings whose processes someone else starts, torchrun or mpirun, on real processes."""

from __future__ import annotations

import os
import shutil
import signal
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from helpers.hosts import TOOL, free_port, is_rank, logged, namespaces, reach, reach_checkpoint, started, why_none
from helpers.job_texts import job_text
from helpers.launcher import Command, Launcher
from helpers.trained import Trained, agree, train_job
from helpers.waiting import until

from dslc.compiler.plan_file import read_plan
from dslc.runtime.process.records import read_metrics

JOB = job_text(
    model={"network": "[flatten(), linear(16), relu(), linear(10)]"},
    data={"source": "digits()", "batch": 48, "validation": "10%"},
    devices={"cpus": 2},
    train={"steps": 12, "optimizer": "sgd(lr = 0.05, momentum = 0.9)", "scale_lr": "linear(base_batch = 24)"},
    checkpoint={"every": "4 steps"},
    launch={"with": "torchrun()"},
)
ALONE = ("launch.with=local()", "devices.cpus=1")


@pytest.fixture
def job(tmp_path: Path) -> Path:
    path = tmp_path / "job.plt"
    path.write_text(JOB)
    return path


def torchrun(job: Path, *words: str, how: tuple[str, ...] = ("--nproc-per-node", "2")) -> list[str]:
    return [sys.executable, "-m", "torch.distributed.run", *how, "-m", "dslc", "run", str(job), *words]


def settings(*chosen: str) -> list[str]:
    return [word for setting in chosen for word in ("--set", setting)]


def children(process: int) -> list[int]:
    return [int(child) for child in Path(f"/proc/{process}/task/{process}/children").read_text().split()]


def a_rank(command: Command) -> int:
    """Returns the process of a rank, below whatever has started its launcher."""
    waiting = children(command.process.pid)[::-1]
    while True:
        process = waiting.pop(0)
        is_launcher = b"\0run\0" in Path(f"/proc/{process}/cmdline").read_bytes()
        for child in children(process):
            if is_launcher and is_rank(child, process):
                return child
            waiting.append(child)


@pytest.mark.core
@pytest.mark.parametrize(
    "chosen",
    [
        (),
        pytest.param(("parallelism.zero=1",), marks=pytest.mark.long),
        pytest.param(("parallelism.zero=2",), marks=pytest.mark.long),
        pytest.param(("parallelism.pipeline=2", "parallelism.microbatches=2"), marks=pytest.mark.long),
        pytest.param(("parallelism.tensor=2",), marks=pytest.mark.long),
    ],
    ids=" ".join,
)
def test_two_torchruns_train_as_one_process(launcher: Launcher, job: Path, chosen: tuple[str, ...]) -> None:
    out, meet = job.parent / "run", f"--rdzv-endpoint=localhost:{free_port()}"
    how = ("--nnodes", "2", "--nproc-per-node", "1", "--rdzv-backend", "c10d", meet)
    words = ["--out", str(out), *settings("devices.nodes=2", "devices.cpus=1", *chosen)]
    with started(job.parent, [torchrun(job, *words, how=how)] * 2) as commands:
        ends = [each.end() for each in commands]
        assert [status for status, _ in ends] == [0, 0], ends
        assert not [left for each in commands for left in each.left()]
    assert sum("validation: " in said for _, said in ends) == 1
    agree(train_job(launcher, job, *ALONE), Trained(out))


@pytest.mark.long
def test_an_elastic_job_takes_the_hosts_that_torchrun_has(launcher: Launcher, job: Path) -> None:
    meet = ("--rdzv-backend", "c10d", f"--rdzv-endpoint=localhost:{free_port()}", "--rdzv-conf", "last_call_timeout=1")
    words = ["--out", str(job.parent / "run"), *settings("devices.nodes=1..2")]
    command = torchrun(job, *words, how=("--nnodes", "1:2", "--nproc-per-node", "2", *meet))
    with started(job.parent, [command]) as (running,):
        status, said = running.end()
        assert status == 0, said
    topology = read_plan((job.parent / "run" / "plan.json").read_text()).plan.topology
    assert topology.nodes == 1 and topology.node_counts == (1, 2)
    agree(train_job(launcher, job, *ALONE), Trained(job.parent / "run"))


def test_torchrun_starts_a_killed_training_again_and_it_goes_on(launcher: Launcher, job: Path) -> None:
    chosen = ("train.steps=300", "checkpoint.every=20 steps")
    how = ("--nproc-per-node", "2", "--max-restarts", "1")
    command = torchrun(job, *settings("parallelism.zero=3", "launch.restarts=1", *chosen), how=how)
    with started(job.parent, [["env", "-C", str(job.parent), *command]]) as (running,):
        runs = job.parent / "runs" / "job"
        until(lambda: runs.exists() and any(runs.iterdir()), [running])
        (out,) = runs.iterdir()
        reach_checkpoint(out, [running])
        os.kill(a_rank(running), signal.SIGKILL)
        status, said = running.end()
        assert status == 0, said
        assert not running.left()
    assert said.count("training failed on rank 1") == said.count("the process was ended by SIGKILL") == 1
    assert list(runs.iterdir()) == [out] and "resumes after step " in said
    assert sorted(set(logged(out))) == list(range(1, 301))
    agree(train_job(launcher, job, *ALONE, *chosen), Trained(out))


@pytest.mark.long
def test_sigterm_to_torchrun_stops_all_after_one_step(job: Path) -> None:
    out = job.parent / "run"
    command = torchrun(job, "--out", str(out), *settings("train.steps=100000"))
    with started(job.parent, [command]) as (running,):
        reach(out, 3, [running])
        running.process.terminate()
        status, said = running.end()
        assert not running.left()
    last = logged(out)[-1]
    assert status != 0 and f"stopped after {last} steps of 100000" in said
    assert (out / "checkpoints" / f"step-{last:08}").exists()
    assert f"to resume:  torchrun --nnodes 1 --nproc-per-node 2 -m dslc run {os.path.relpath(job)}" in said


@pytest.mark.long
def test_a_wrong_number_of_processes_is_said_once(job: Path) -> None:
    out = job.parent / "run"
    how = ("--nproc-per-node", "3")
    with started(job.parent, [torchrun(job, "--out", str(out), how=how)]) as (running,):
        status, said = running.end()
        assert not running.left()
    assert status == 1 and said.count("error[E0810]") == 1
    assert "torchrun has started 3 processes (WORLD_SIZE is 3), and the job takes 2 ranks" in said
    assert not out.exists()


# ------------------------------------------------------------------------------------------------------------ mpirun

MPI = {"open mpi": ["mpirun.openmpi", "--allow-run-as-root", "--oversubscribe"], "mpich": ["mpirun.mpich"]}


@pytest.fixture(params=MPI)
def mpirun(request: pytest.FixtureRequest) -> list[str]:
    """Returns the beginning of the command."""
    words = MPI[request.param]
    if shutil.which(words[0]) is None:
        pytest.skip(f"there is no {words[0]}: Debian's openmpi-bin and mpich bring both")
    return words


def of_mpi(mpirun: list[str], job: Path, *chosen: str, ranks: int = 2) -> list[str]:
    words = ["run", str(job), "--out", str(job.parent / "run"), *settings("launch.with=mpi()", *chosen)]
    return [*mpirun, "-np", str(ranks), sys.executable, "-m", "dslc", *words]


@pytest.mark.parametrize(
    "mpirun, chosen",
    [
        ("open mpi", ("parallelism.zero=3",)),
        pytest.param("mpich", ("parallelism.zero=3",), marks=pytest.mark.long),
        pytest.param("open mpi", (), marks=pytest.mark.long),
        pytest.param("mpich", ("parallelism.zero=1",), marks=pytest.mark.long),
        pytest.param("open mpi", ("parallelism.pipeline=2", "parallelism.microbatches=2"), marks=pytest.mark.long),
        pytest.param("mpich", ("parallelism.tensor=2",), marks=pytest.mark.long),
    ],
    indirect=["mpirun"],
)
def test_mpirun_trains_as_one_process(
    launcher: Launcher, mpirun: list[str], job: Path, chosen: tuple[str, ...]
) -> None:
    with started(job.parent, [of_mpi(mpirun, job, *chosen)]) as (running,):
        status, said = running.end()
        assert status == 0, said
        assert not running.left()
    assert said.count("validation: ") == 1
    assert not [path.name for path in job.parent.iterdir() if path.name.startswith(".")]
    told = read_metrics(str(job.parent / "run"))
    rates = [record["lr"] for record in told if "lr" in record]
    assert rates == pytest.approx([0.1] * 12), "it follows the global batch, on any number of ranks"
    agree(train_job(launcher, job, *ALONE), Trained(job.parent / "run"))


@pytest.mark.long
def test_a_rank_of_mpirun_that_is_killed_is_one_message(mpirun: list[str], job: Path) -> None:
    with started(job.parent, [of_mpi(mpirun, job, "train.steps=100000")]) as (running,):
        reach(job.parent / "run", 3, [running])
        os.kill(a_rank(running), signal.SIGKILL)
        status, said = running.end()
        assert not running.left()
    assert status == 3 and said.count("training failed on rank") == said.count("was ended by SIGKILL") == 1


@pytest.mark.slow
@pytest.mark.parametrize("mpirun", [pytest.param("open mpi", marks=pytest.mark.long), "mpich"], indirect=True)
def test_sigusr1_to_mpirun_stops_all_after_one_step(mpirun: list[str], job: Path) -> None:
    out = job.parent / "run"
    with started(job.parent, [of_mpi(mpirun, job, "train.steps=100000")]) as (running,):
        reach(out, 3, [running])
        running.process.send_signal(signal.SIGUSR1)
        status, said = running.end()
        assert not running.left()
    last = logged(out)[-1]
    assert status == 130 and said.count(f"stopped after {last} steps of 100000") == 1
    assert (out / "checkpoints" / f"step-{last:08}").exists()
    assert "to resume:  mpirun -np 2 dslc run " in said


@pytest.mark.slow
@pytest.mark.parametrize(
    "chosen, ranks, said",
    [
        pytest.param(("launch.with=local()",), 2, "error[E0809]", id="not asked for"),
        pytest.param((), 3, "error[E0810]", id="too many", marks=pytest.mark.long),
        pytest.param(("train.stepz=1",), 2, "error[E0107]", id="a mistake", marks=pytest.mark.long),
    ],
)
def test_mpirun_around_another_job_is_said_once(
    mpirun: list[str], job: Path, chosen: tuple[str, ...], ranks: int, said: str
) -> None:
    with started(job.parent, [of_mpi(mpirun, job, *chosen, ranks=ranks)]) as (running,):
        status, told = running.end()
        assert not running.left()
    assert status == 1 and told.count(said) == told.count("1 error") == 1
    assert not (job.parent / "run").exists()


# ----------------------------------------------------------------------------------------- processes that say nothing

# Holds the process of rank 0 until something is written to the pipe PIPE.
HELD = 'if [ "${LOCAL_RANK:-${OMPI_COMM_WORLD_RANK:-$PMI_RANK}}" = 0 ]; then read -r < PIPE; fi; exec "$@"'
OF_TORCHRUN = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2", "--no-python"]
ELASTIC = ["--nnodes", "1:2", "--rdzv-backend", "c10d", "--rdzv-conf", "last_call_timeout=1"]
SWEEP = "sweep.train.seed=[0, 1]"


@pytest.mark.parametrize(
    "command, chosen, said",
    [
        pytest.param(OF_TORCHRUN, ("launch.with=local()",), "error[E0809]", id="torchrun"),
        pytest.param([*MPI["open mpi"], "-np", "2"], ("launch.with=mpi()", SWEEP), "a sweep runs on one", id="mpirun"),
        pytest.param(
            [*OF_TORCHRUN[:-1], *ELASTIC, "--no-python"],
            ("devices.nodes=2..4",),
            "error[E0810]",
            id="elastic torchrun",
            marks=pytest.mark.long,
        ),
        pytest.param(
            [*MPI["mpich"], "-np", "2"],
            ("launch.with=local()",),
            "error[E0809]",
            id="mpich",
            marks=pytest.mark.long,
        ),
        pytest.param(OF_TORCHRUN, (SWEEP,), "a sweep runs on one", id="torchrun, a sweep", marks=pytest.mark.long),
    ],
)
def test_the_process_that_speaks_is_waited_for(
    job: Path, command: list[str], chosen: tuple[str, ...], said: str
) -> None:
    """torchrun and mpirun end all others as soon as one has left with an error. The speaker begins when the other one
    waits for it.
    """
    if shutil.which(command[0]) is None:
        pytest.skip(f"there is no {command[0]}")
    pipe = job.parent / "pipe"
    os.mkfifo(pipe)
    dslc = [sys.executable, "-m", "dslc", "run", str(job), "--out", str(job.parent / "run"), *settings(*chosen)]
    held = ["bash", "-c", HELD.replace("PIPE", str(pipe)), "held", *dslc]
    with started(job.parent, [[*command, *held]]) as (running,):
        until(lambda: any(map(waits_for_a_process, dslc_processes(running))), [running])
        with open(os.open(pipe, os.O_WRONLY | os.O_NONBLOCK), "w") as opened:
            opened.write("\n")
        status, told = running.end()
        assert not running.left()
    assert status != 0 and told.count(said) == 1, told


def dslc_processes(command: Command) -> list[int]:
    """Returns the processes of a launcher that run dslc."""
    named = {process: Path(f"/proc/{process}/cmdline") for process in command.processes()}
    return [process for process, words in named.items() if words.exists() and b"-m\0dslc\0run" in words.read_bytes()]


def waits_for_a_process(process: int) -> bool:
    """True if a process has a descriptor of another one."""
    try:
        return any("Pid:" in each.read_text() for each in Path(f"/proc/{process}/fdinfo").iterdir())
    except OSError:
        return False  # it has ended


# ----------------------------------------------------------------------------------------- hosts of their own addresses


@pytest.mark.long
@pytest.mark.skipif(bool(why_none()), reason=why_none() or "hosts can be made")
@pytest.mark.parametrize("count", [2, 3])
def test_torchruns_on_hosts_train_as_one_process(launcher: Launcher, job: Path, count: int) -> None:
    out = job.parent / "run"
    how = ("--nnodes", str(count), "--nproc-per-node", "1", "--rdzv-backend", "c10d", "--rdzv-endpoint=host1:29400")
    words = ["--out", str(out), *settings(f"devices.nodes={count}", "devices.cpus=1")]
    commands = [[str(TOOL), "run", str(n), *torchrun(job, *words, how=how)] for n in range(1, count + 1)]
    with namespaces(count), started(job.parent, commands) as running:
        ends = [each.end() for each in running]
        assert [status for status, _ in ends] == [0] * count, ends
    assert sum("validation: " in said for _, said in ends) == 1
    agree(train_job(launcher, job, *ALONE), Trained(out))


# An `ssh` for mpirun: `HOST COMMAND…`, with options before them.
_SSH = f"""#!/bin/bash
while [[ $1 == -* ]]; do shift; done
host=$1; shift
exec {TOOL} run "${{host#host}}" bash -c "$*"
"""


@pytest.fixture
def over_hosts(mpirun: list[str], tmp_path: Path) -> Iterator[list[str]]:
    """Yields the beginning of an mpirun command over three hosts with addresses of their own."""
    if why := why_none():
        pytest.skip(why)
    ssh = tmp_path / "ssh"
    ssh.write_text(_SSH)
    ssh.chmod(0o755)
    if "mpich" in mpirun[0]:
        how = ["-launcher", "ssh", "-launcher-exec", str(ssh), "-hosts"]
    else:
        how = ["-mca", "plm_rsh_agent", str(ssh), "-mca", "oob_tcp_if_include", "eth0", "-x", "PATH", "--host"]
    with namespaces(3):
        yield [str(TOOL), "run", "1", *mpirun, *how]


def train_over_hosts(launcher: Launcher, over_hosts: list[str], job: Path, count: int, *chosen: str) -> None:
    """Trains with two ranks on each of `count` hosts, and asserts that it is as in one process."""
    places = ",".join(f"host{n}:2" for n in range(1, count + 1))
    command = of_mpi(
        [*over_hosts, places], job, f"devices.nodes={count}", "parallelism.zero=3", *chosen, ranks=2 * count
    )
    with started(job.parent, [command]) as (running,):
        status, said = running.end()
        assert status == 0, said
        assert not running.left()
    assert "their collectives go over gloo" not in said
    agree(train_job(launcher, job, *ALONE), Trained(job.parent / "run"))


@pytest.mark.long
@pytest.mark.parametrize("count", [2, 3])
def test_mpirun_over_hosts_trains_as_one_process(
    launcher: Launcher, over_hosts: list[str], job: Path, count: int
) -> None:
    train_over_hosts(launcher, over_hosts, job, count)


@pytest.mark.parametrize("mpirun", ["open mpi", pytest.param("mpich", marks=pytest.mark.long)], indirect=True)
def test_ranks_of_mpirun_share_the_memory_of_their_host(launcher: Launcher, over_hosts: list[str], job: Path) -> None:
    train_over_hosts(launcher, over_hosts, job, 2, "devices.backend=shared_memory")


@pytest.mark.long
@pytest.mark.parametrize("mpirun", ["mpich"], indirect=True)
def test_two_runs_of_one_job_at_once_do_not_meet(launcher: Launcher, over_hosts: list[str], job: Path) -> None:
    command = of_mpi([*over_hosts, "host1:1,host2:1"], job, "devices.nodes=2", "devices.cpus=1")
    outs = [job.parent / "run", job.parent / "other"]
    other = [str(outs[1]) if word == str(outs[0]) else word for word in command]
    with started(job.parent, [command, other]) as both:
        ends = [each.end() for each in both]
        assert [status for status, _ in ends] == [0, 0], ends
    alone = train_job(launcher, job, *ALONE)
    for out in outs:
        agree(alone, Trained(out))


@pytest.mark.long
@pytest.mark.parametrize("mpirun", ["mpich"], indirect=True)
def test_ranks_of_a_node_on_two_hosts_are_said_once(over_hosts: list[str], job: Path) -> None:
    command = of_mpi([*over_hosts, "host1:1,host2:1"], job, "devices.nodes=2", ranks=4)
    with started(job.parent, [command]) as (running,):
        status, said = running.end()
        assert not running.left()
    assert status != 0 and said.count("error[E0810]: PMI_RANK is 1 and MPI_LOCALRANKID is 0") == 1
    assert "host2: " in said and not (job.parent / "run").exists()
