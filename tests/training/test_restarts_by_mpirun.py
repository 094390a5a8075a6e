"""`launch.restarts` under mpirun: ranks that fail are started again by the processes that mpirun has started, and the
command goes on when it is typed again.
"""

from __future__ import annotations

import os
import signal
from pathlib import Path

import pytest
from helpers.hosts import reach_checkpoint, started
from helpers.launcher import Command, Launcher
from helpers.trained import Trained, agree, train_job, write_job_with_helper
from test_launchers import ALONE, JOB, a_rank, children, mpirun, of_mpi, over_hosts

__all__ = ["mpirun", "over_hosts"]  # fixtures
MORE = ("launch.with=mpi()", "launch.restarts=3", "launch.timeout=60s", "train.steps=400", "checkpoint.every=20 steps")
_HOOKS = 'hooks = [python("own_trouble:Trouble", faults = FAULTS, ranks = all)]'


def written(folder: Path, faults: str = "") -> Path:
    hooks = f"  {_HOOKS.replace('FAULTS', faults)}\n" if faults else ""
    return write_job_with_helper("own_trouble.py", folder, JOB.replace("train {\n", f"train {{\n{hooks}"))


@pytest.fixture(scope="module")
def alone(launcher: Launcher, tmp_path_factory: pytest.TempPathFactory) -> Trained:
    return train_job(launcher, written(tmp_path_factory.mktemp("alone")), *ALONE, "train.steps=400")


def started_by_mpirun(command: Command, rank: int) -> int:
    """Returns the process of this rank that mpirun has started, which is not that of the rank itself."""
    waiting = children(command.process.pid)
    while True:
        process = waiting.pop(0)
        environment = Path(f"/proc/{process}/environ").read_bytes().split(b"\0")
        if any(b"%s=%d" % (name, rank) in environment for name in (b"OMPI_COMM_WORLD_RANK", b"PMI_RANK")):
            return process
        waiting += children(process)


@pytest.mark.parametrize("mpirun", ["open mpi", pytest.param("mpich", marks=pytest.mark.long)], indirect=True)
def test_a_killed_rank_is_started_again(mpirun: list[str], tmp_path: Path, alone: Trained) -> None:
    job = written(tmp_path)
    with started(tmp_path, [of_mpi(mpirun, job, *MORE)]) as (running,):
        reach_checkpoint(tmp_path / "run", [running])
        os.kill(a_rank(running), signal.SIGKILL)
        status, said = running.end()
        assert status == 0, said
        assert not running.left()
    assert said.count("the process was ended by SIGKILL") == said.count("note: restart 1 of 3, from the checkp") == 1
    assert said.count("resumes after step ") == said.count(", after 1 restart: ") == 1
    agree(alone, Trained(tmp_path / "run"))


@pytest.mark.long
def test_ranks_that_crash_leave_and_are_stopped_are_started_again(
    mpirun: list[str], tmp_path: Path, alone: Trained
) -> None:
    job = written(tmp_path, '["0:50:crash", "1:150:exits", "1:250:stopped"]')
    with started(tmp_path, [of_mpi(mpirun, job, *MORE, "launch.timeout=5s")]) as (running,):
        status, said = running.end()
        assert status == 0, said
        assert not running.left()
    for words in ("was ended by SIGSEGV", "left with exit status 5", "the process is stopped", ", after 3 restarts: "):
        assert said.count(words) == 1, said
    agree(alone, Trained(tmp_path / "run"))


@pytest.mark.long
def test_a_killed_rank_on_another_host_is_started_again(over_hosts: list[str], tmp_path: Path, alone: Trained) -> None:
    job = written(tmp_path, '["1:150:killed"]')
    chosen = (*MORE, "devices.nodes=2", "devices.cpus=1")
    with started(tmp_path, [of_mpi([*over_hosts, "host1:1,host2:1"], job, *chosen)]) as (running,):
        status, said = running.end()
        assert status == 0, said
        assert not running.left()
    assert "training failed on rank 1 (host2) at step 150" in said and ", after 1 restart: " in said
    agree(alone, Trained(tmp_path / "run"))


@pytest.mark.parametrize("mpirun", ["mpich", pytest.param("open mpi", marks=pytest.mark.long)], indirect=True)
def test_the_same_exception_in_the_same_step_ends_it(mpirun: list[str], tmp_path: Path) -> None:
    job = written(tmp_path, '["1:6:bug", "1:6:bug"]')
    with started(tmp_path, [of_mpi(mpirun, job, "launch.restarts=3")]) as (running,):
        status, said = running.end()
        assert not running.left()
    assert status == 3 and said.count("note: restart 1 of 3, ") == 1
    assert said.count("note: not restarted: the same exception ended the same step before") == 1


@pytest.mark.long
@pytest.mark.parametrize(
    "mpirun, rank",
    [
        ("open mpi", 1),
        pytest.param("open mpi", 0, marks=pytest.mark.long),
        pytest.param("mpich", 0, marks=pytest.mark.long),
        pytest.param("mpich", 1, marks=pytest.mark.long),
    ],
    indirect=["mpirun"],
)
def test_the_same_command_goes_on_when_mpirun_has_ended_all(
    mpirun: list[str], tmp_path: Path, alone: Trained, rank: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """mpirun ends all when a process of its own is killed: MPICH at once, Open MPI after a second, which is enough to
    say how the training goes on. A loaded machine gets more.
    """
    monkeypatch.setenv("OMPI_MCA_odls_base_sigkill_timeout", "6")
    command = of_mpi(mpirun, written(tmp_path), *MORE)
    with started(tmp_path, [command]) as (running,):
        reach_checkpoint(tmp_path / "run", [running])
        os.kill(started_by_mpirun(running, rank), signal.SIGKILL)
        status, said = running.end()
        running.wait_for_all()
    assert status != 0
    if "openmpi" in mpirun[0]:
        assert said.count("training failed") == said.count(f"  rank {rank} is gone: its connection ended") == 1
        assert (
            said.count("note: mpirun does not start it again: the same command goes on, typed again with `--out ") == 1
        )
        assert "to resume:" not in said
    with started(tmp_path, [command]) as (again,):
        status, said = again.end()
        assert status == 0, said
        assert not again.left()
    assert said.count("resumes after step ") == 1
    agree(alone, Trained(tmp_path / "run"))
    assert not [path.name for path in tmp_path.iterdir() if path.name.startswith(".")]
