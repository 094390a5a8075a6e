"""Environments that contradict the job: each is one message, which names the variable and the remedy."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

import pytest
from helpers.commands import dslc
from helpers.paths import EXAMPLES

from dslc.dsl.diagnostics import Report
from dslc.dsl.meaning.load import load
from dslc.jobs.check_job import check_one
from dslc.jobs.launcher_environment import world_for
from dslc.jobs.prepare_run import LaunchContext, Ready, prepare
from dslc.runtime.worker import _threads_of

TORCHRUN = {
    "TORCHELASTIC_RUN_ID": "none",
    "TORCHELASTIC_RESTART_COUNT": "0",
    "RANK": "0",
    "WORLD_SIZE": "2",
    "LOCAL_RANK": "0",
    "LOCAL_WORLD_SIZE": "2",
    "GROUP_WORLD_SIZE": "1",
}
OPEN_MPI = {
    "OMPI_COMM_WORLD_RANK": "0",
    "OMPI_COMM_WORLD_SIZE": "2",
    "OMPI_COMM_WORLD_LOCAL_RANK": "0",
    "OMPI_COMM_WORLD_LOCAL_SIZE": "2",
}
MPICH = {"PMI_RANK": "1", "PMI_SIZE": "2", "MPI_LOCALRANKID": "1", "MPI_LOCALNRANKS": "2"}
SLURM = {"SLURM_PROCID": "0", "SLURM_STEP_NUM_TASKS": "2", "SLURM_LOCALID": "0", "SLURM_STEP_NUM_NODES": "1"}
TWO = {"GROUP_WORLD_SIZE": "2"}
ON_TWO = ("devices.nodes=2", "parallelism.data=4")
HELP = {"torchrun": "torchrun --nnodes 1 --nproc-per-node 2 -m dslc run ", "mpi": "mpirun -np 2 dslc run "}
HELP["slurm"] = "srun --nodes 1 --ntasks-per-node 1 dslc run "


def reported(environ: Mapping[str, str], *settings: str) -> Report:
    _, analysis = check_one(str(EXAMPLES / "digits.plt"), ["devices.cpus=2", *settings])
    assert analysis is not None
    report = Report()
    world_for(analysis.job, analysis.layout, environ, report)
    return report


@pytest.mark.parametrize(
    "word, environ, code, said",
    [
        ("torchrun", {}, "E0809", "it has not started this process: TORCHELASTIC_RUN_ID is not set"),
        ("torchrun", {"RANK": "0", "WORLD_SIZE": "2"}, "E0809", "TORCHELASTIC_RUN_ID is not set"),
        ("torchrun", {**TORCHRUN, "WORLD_SIZE": "3"}, "E0810", "torchrun has started 3 processes (WORLD_SIZE is 3)"),
        ("torchrun", {**TORCHRUN, "WORLD_SIZE": "two"}, "E0810", "WORLD_SIZE is `two`, which is no number"),
        ("torchrun", {**TORCHRUN, "RANK": "-1"}, "E0810", "RANK is `-1`, which is no number"),
        ("torchrun", {**TORCHRUN, "RANK": "2"}, "E0810", "RANK is 2, and WORLD_SIZE is 2: ranks count from 0"),
        ("torchrun", {**TORCHRUN, "LOCAL_WORLD_SIZE": "1"}, "E0810", "LOCAL_WORLD_SIZE is 1: torchrun has started"),
        (
            "torchrun",
            {**TORCHRUN, "LOCAL_RANK": "1"},
            "E0810",
            "RANK is 0 and LOCAL_RANK is 1, and the job has",
        ),
        ("torchrun", {k: v for k, v in TORCHRUN.items() if k != "RANK"}, "E0810", "RANK is not set"),
        ("local", TORCHRUN, "E0809", "torchrun has started 2 processes (WORLD_SIZE is 2), each of which would train"),
        ("mpi", {}, "E0809", "it has not started this process: OMPI_COMM_WORLD_SIZE or PMI_SIZE is not set"),
        ("mpi", TORCHRUN, "E0809", "the job says `mpi()`, and torchrun has started 2 processes (WORLD_SIZE is 2)"),
        ("mpi", {**OPEN_MPI, "OMPI_COMM_WORLD_SIZE": "4"}, "E0810", "4 processes (OMPI_COMM_WORLD_SIZE is 4), and the"),
        ("mpi", {**OPEN_MPI, "OMPI_COMM_WORLD_LOCAL_SIZE": "1"}, "E0810", "OMPI_COMM_WORLD_LOCAL_SIZE is 1"),
        ("mpi", {**MPICH, "PMI_SIZE": "3"}, "E0810", "mpirun has started 3 processes (PMI_SIZE is 3), and the job"),
        ("mpi", {**MPICH, "MPI_LOCALRANKID": "0"}, "E0810", "PMI_RANK is 1 and MPI_LOCALRANKID is 0"),
        ("mpi", {"PMI_SIZE": "2"}, "E0810", "mpirun has started this process, whose PMI_RANK is not set"),
        ("slurm", {}, "E0809", "it has not started this process: SLURM_STEP_NUM_TASKS is not set"),
        (
            "slurm",
            {**SLURM, "SLURM_STEP_NUM_TASKS": "3"},
            "E0810",
            "srun has started 3 processes (SLURM_STEP_NUM",
        ),
        (
            "slurm",
            {**SLURM, "SLURM_STEP_NUM_NODES": "2"},
            "E0810",
            "on 2 nodes (SLURM_STEP_NUM_NODES is 2), and",
        ),
        ("slurm", {**SLURM, "SLURM_LOCALID": "1"}, "E0810", "SLURM_PROCID is 0 and SLURM_LOCALID is 1"),
        ("torchrun", MPICH, "E0809", "the job says `torchrun()`, and mpirun has started 2 processes (PMI_SIZE is 2)"),
        ("local", OPEN_MPI, "E0809", "mpirun has started 2 processes (OMPI_COMM_WORLD_SIZE is 2), each of which"),
        ("local", MPICH, "E0809", "mpirun has started 2 processes (PMI_SIZE is 2), each of which would train all"),
        ("local", {"RANK": "3"}, "E0809", "this is one of several: RANK is 3"),
        ("local", {"RANK": "0", "WORLD_SIZE": "4"}, "E0809", "this is one of several: WORLD_SIZE is 4"),
    ],
)
def test_one_message_names_the_variable_and_the_remedy(
    word: str, environ: Mapping[str, str], code: str, said: str
) -> None:
    (found,) = reported(environ, f"launch.with={word}()")
    assert found.code == code and said in found.message
    mpi = "OMPI_COMM_WORLD_SIZE" in environ or "PMI_SIZE" in environ
    other = "launch.with=mpi()" if mpi else "launch.with=torchrun()" if len(environ) > 2 else "unset RANK"
    assert found.help is not None and HELP.get(word, other) in found.help


@pytest.mark.parametrize("told", ["", "0", "2"])
def test_torchrun_restarts_as_often_as_the_job_says(told: str) -> None:
    settings = ("launch.with=torchrun()", "launch.restarts=3", "checkpoint.every=5 steps")
    environ = {**TORCHRUN, "TORCHELASTIC_MAX_RESTARTS": told} if told else TORCHRUN
    (found,) = reported(environ, *settings)
    assert found.code == "E0810" and "TORCHELASTIC_MAX_RESTARTS is " in found.message and found.help is not None
    assert "torchrun --nnodes 1 --nproc-per-node 2 --max-restarts 3 -m dslc run " in found.help
    assert not list(reported({**TORCHRUN, "TORCHELASTIC_MAX_RESTARTS": "3"}, *settings))


@pytest.mark.parametrize(
    "word, environ, settings",
    [
        ("local", {}, []),
        ("local", {"RANK": "0", "WORLD_SIZE": "1"}, []),
        ("local", {**TORCHRUN, "WORLD_SIZE": "1"}, []),
        ("torchrun", TORCHRUN, []),
        ("torchrun", {**TORCHRUN, **OPEN_MPI}, []),
        ("mpi", OPEN_MPI, []),
        ("slurm", SLURM, []),
        ("slurm", {**SLURM, "SLURM_STEP_NUM_TASKS": "1", **MPICH}, []),
        ("local", {**SLURM, "SLURM_STEP_NUM_TASKS": "1"}, []),
        ("mpi", MPICH, []),
        ("mpi", {"PMI_RANK": "3", "PMI_SIZE": "4"}, ON_TWO),
        ("torchrun", {**TORCHRUN, "RANK": "3", "LOCAL_RANK": "1", "WORLD_SIZE": "4", **TWO}, ON_TWO),
    ],
)
def test_what_fits_is_not_reported(word: str, environ: Mapping[str, str], settings: Sequence[str]) -> None:
    assert not list(reported(environ, f"launch.with={word}()", *settings))


def prepared(environ: Mapping[str, str], word: str) -> tuple[Ready | None, Report]:
    """Compiles a job that trains on 1, 2 or 4 nodes of two ranks each."""
    chosen = ("devices.nodes=1..4", "devices.cpus=2", "parallelism.data=none", "data.batch=64", "train.steps=20")
    report = Report()
    loaded = load(str(EXAMPLES / "digits.plt"), [*chosen, "checkpoint.every=10 steps", f"launch.with={word}()"])
    return prepare(loaded, report, around=LaunchContext(environ=environ)), report


@pytest.mark.parametrize(
    "word, environ, nodes",
    [
        ("torchrun", TORCHRUN, 1),
        ("torchrun", {**TORCHRUN, **TWO, "WORLD_SIZE": "4"}, 2),
        ("mpi", OPEN_MPI, 1),
        ("mpi", {**MPICH, "PMI_SIZE": "8"}, 4),
        ("slurm", {**SLURM, "SLURM_STEP_NUM_NODES": "2"}, 2),
    ],
)
def test_an_elastic_job_takes_the_nodes_that_its_launcher_has(
    word: str, environ: Mapping[str, str], nodes: int
) -> None:
    ready, report = prepared(environ, word)
    assert ready is not None, report.errors
    assert (ready.compiled.plan.topology.nodes, ready.program.world_size) == (nodes, 2 * nodes)
    assert ready.world is not None and not ready.counts


@pytest.mark.parametrize(
    "word, environ, said",
    [
        ("mpi", {**MPICH, "PMI_SIZE": "6"}, "mpirun has started processes on 3 nodes, and the job trains on 1, 2 or 4"),
        ("slurm", {**SLURM, "SLURM_STEP_NUM_NODES": "5"}, "srun has started processes on 5 nodes, and the job trains"),
        ("torchrun", {**TORCHRUN, "WORLD_SIZE": "3"}, "torchrun has started 3 processes (WORLD_SIZE is 3)"),
    ],
)
def test_nodes_on_which_an_elastic_job_does_not_train(word: str, environ: Mapping[str, str], said: str) -> None:
    ready, report = prepared(environ, word)
    assert ready is None
    (error,) = report.errors
    assert error.code == "E0810" and said in error.message


@pytest.mark.slow
@pytest.mark.parametrize(
    "environ, settings, threads",
    [({"OMP_NUM_THREADS": "3,2"}, (), 3), ({"OMP_NUM_THREADS": "3"}, ("devices.threads=5",), 5)],
)
def test_ranks_compute_with_the_threads_that_are_asked_for(
    tmp_path: Path, environ: Mapping[str, str], settings: Sequence[str], threads: int
) -> None:
    (tmp_path / "own.py").write_text(
        "import torch\n\n\nclass Tells:\n    def start(self, training):\n"
        "        print('threads', torch.get_num_threads(), flush=True)\n"
    )
    job = tmp_path / "job.plt"
    text = (EXAMPLES / "digits.plt").read_text()
    job.write_text(text)
    chosen = ("devices.cpus=1", "parallelism.data=1", "train.epochs=1", 'train.hooks=python("own:Tells")', *settings)
    words = [word for each in chosen for word in ("--set", each)]
    ended = dslc("run", job, "--out", "run", *words, cwd=tmp_path, env={**os.environ, **environ})
    assert ended.returncode == 0, ended.stderr
    assert f"threads {threads}\n" in (tmp_path / "run" / "logs" / "rank-0.log").read_text()
    assert f"threads  {threads} of each process" in dslc("plan", job, *words).stdout or not settings


def test_the_one_thread_of_torchrun_is_no_wish() -> None:
    assert _threads_of({"OMP_NUM_THREADS": "1", "TORCHELASTIC_RUN_ID": "none"}) == 0
    assert _threads_of({"OMP_NUM_THREADS": "1"}) == 1
    assert _threads_of({"OMP_NUM_THREADS": "2", "TORCHELASTIC_RUN_ID": "none"}) == 2
    assert _threads_of({"MKL_NUM_THREADS": "4"}) == 4 and _threads_of({}) == 0


LEAVES = """
from dslc.launching.hosts import wait_for_speaker
from dslc.runtime.launchers.world import World

place = {"rank": 1, "size": 2, "local_rank": 1, "local_size": 2}
wait_for_speaker(World(word="mpi", command="mpirun", names={}, speaks=False, **place))
"""


@pytest.mark.skipif(sys.platform != "linux", reason="siblings are looked for in /proc")
def test_a_process_that_speaks_and_has_ended_is_not_waited_for() -> None:
    """All processes are on this host, and none of them speaks: one that would wait is ended by the limit."""
    subprocess.run([sys.executable, "-c", LEAVES], check=True, timeout=100)
