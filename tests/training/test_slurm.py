"""Trainings whose processes SLURM starts, on a real one of two nodes on this machine."""

from __future__ import annotations

import os
import re
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from helpers.commands import dslc
from helpers.hosts import logged, reach, started
from helpers.job_texts import job_text
from helpers.launcher import Launcher
from helpers.paths import ROOT
from helpers.trained import Trained, agree, train_job, write_job_with_helper
from helpers.waiting import until

from dslc.compiler.plan_file import read_plan
from dslc.launching.run_state import RunState, run_states, runs_in
from dslc.runtime.launchers.slurm import first_host
from dslc.runtime.process.records import read_metrics

TOOL = ROOT.parent / "shared" / "tools" / "slurm-cluster"
JOB = job_text(
    model={"network": "[flatten(), linear(16), relu(), linear(10)]"},
    data={"source": "digits()", "batch": 48, "validation": "10%"},
    devices={"nodes": 2, "cpus": 1},
    train={"steps": 12, "optimizer": "sgd(lr = 0.05, momentum = 0.9)", "scale_lr": "linear(base_batch = 24)"},
    checkpoint={"every": "4 steps"},
    launch={"with": "slurm(time = 1h)"},
)
ALONE = ("launch.with=local()", "devices.nodes=1", "devices.cpus=1")


@pytest.fixture
def job(tmp_path: Path) -> Path:
    path = tmp_path / "job.plt"
    path.write_text(JOB)
    return path


@pytest.fixture(scope="module", autouse=True)
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """A SLURM of three nodes: one that is up already, or one of its own."""
    if not TOOL.exists():
        pytest.skip(f"there is no {TOOL}")
    if os.geteuid() != 0 or shutil.which("slurmctld") is None or shutil.which("munged") is None:
        pytest.skip("a SLURM needs root and Debian's slurm-wlm and munge")
    with pytest.MonkeyPatch.context() as patch:
        folder = Path(os.environ.get("SLURM_CLUSTER_DIR") or "/tmp/slurm-cluster")
        patch.setenv("SLURM_CONF", str(folder / "slurm.conf"))
        up = (folder / "slurm.conf").exists() and subprocess.run(["sinfo", "-h"], capture_output=True).returncode == 0
        if not up:
            patch.setenv("SLURM_CLUSTER_DIR", str(folder))
            subprocess.run([TOOL, "up", "3"], check=True, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        yield
        if not up:
            until(lambda: not steps_left(folder), between=0.2)
            subprocess.run(["scontrol", "shutdown"], check=True)
            until(lambda: not list(folder.glob("*.pid")))  # its daemons write into the folder until they are gone
            subprocess.run([TOOL, "down"], check=True)


def steps_left(folder: Path) -> list[str]:
    """Returns the processes of a cluster that stand for its steps. One that is not done yet tells the next cluster on
    this port for minutes that its job is complete, and that cluster has another job of the same number.
    """
    of = f"SLURM_CONF={folder}/slurm.conf"
    listed = subprocess.run(["ps", "-C", "slurmstepd", "ewwo", "args="], capture_output=True, text=True).stdout
    return [each for each in listed.splitlines() if of in each.split()]


@pytest.fixture
def urgent() -> Iterator[None]:
    """Adds a partition `urgent`, whose jobs put those of `main` back into the queue, 60 seconds after a SIGTERM."""
    path = Path(os.environ["SLURM_CONF"])
    text = path.read_text()
    (main,) = re.findall(r"^PartitionName=main .*$", text, re.MULTILINE)
    lower = f"{main} PriorityTier=1 PreemptMode=REQUEUE GraceTime=60"
    higher = main.replace("PartitionName=main", "PartitionName=urgent").replace("Default=YES", "PriorityTier=10")
    mode = "PreemptType=preempt/partition_prio\nPreemptMode=REQUEUE\n"
    control(text.replace(main, f"{mode}{lower}\n{higher}"))
    yield
    control(text)


def control(text: str) -> None:
    """Starts slurmctld again, with this configuration; jobs stay."""
    path = Path(os.environ["SLURM_CONF"])
    kept = path.parent / "ctld.pid"
    process = Path("/proc", kept.read_text().strip())
    os.kill(int(process.name), signal.SIGTERM)
    until(lambda: not process.exists() or "(zombie)" in (process / "status").read_text())
    path.write_text(text)
    subprocess.run(["slurmctld", "-f", str(path)], check=True)
    until(lambda: subprocess.run(["sinfo", "-h"], capture_output=True).returncode == 0, between=0.2)


def srun(job: Path, *chosen: str, tasks: int = 2, nodes: int = 2) -> list[str]:
    words = [word for setting in chosen for word in ("--set", setting)]
    command = [sys.executable, "-m", "dslc", "run", str(job), "--out", str(job.parent / "run"), *words]
    return ["srun", "--nodes", str(nodes), "--ntasks", str(tasks), "--job-name", job.parent.name, *command]


@pytest.mark.parametrize(
    "nodes, tasks, chosen",
    [
        pytest.param(2, 2, ("devices.cpus=2", "parallelism.zero=3"), id="a task a node"),
        pytest.param(2, 4, ("devices.cpus=2", "parallelism.zero=1"), id="a task a rank", marks=pytest.mark.long),
        pytest.param(
            *(2, 4, ("devices.cpus=2", "devices.backend=shared_memory", "parallelism.zero=3")),
            id="shared memory",
            marks=pytest.mark.long,
        ),
        pytest.param(2, 2, (), id="both", marks=pytest.mark.long),
        pytest.param(3, 3, ("devices.nodes=3",), id="three nodes", marks=pytest.mark.long),
    ],
)
def test_srun_trains_as_one_process(
    launcher: Launcher, job: Path, nodes: int, tasks: int, chosen: tuple[str, ...]
) -> None:
    with started(job.parent, [srun(job, *chosen, tasks=tasks, nodes=nodes)]) as (running,):
        status, said = running.end()
        assert status == 0, said
        assert not running.left()
    assert said.count("validation: ") == 1
    rates = [record["lr"] for record in read_metrics(str(job.parent / "run")) if "lr" in record]
    assert rates == pytest.approx([0.1] * 12), "it follows the global batch, on any number of ranks"
    agree(train_job(launcher, job, *ALONE), Trained(job.parent / "run"))


@pytest.mark.long
def test_ranks_of_srun_are_started_again_and_the_same_command_goes_on(launcher: Launcher, job: Path) -> None:
    """A rank is killed, then a task; SLURM would leave the others alone, which end by themselves."""
    out = job.parent / "run"
    hook = 'hooks = [python("own_trouble:Trouble", faults = ["1:150:killed"], ranks = all)]'
    job = write_job_with_helper("own_trouble.py", job.parent, JOB.replace("train {\n", f"train {{\n  {hook}\n"))
    chosen = ("train.steps=600", "checkpoint.every=50 steps")
    command = srun(job, "launch.restarts=1", *chosen)
    with started(job.parent, [command]) as (running,):
        reach(out, 300, [running])
        os.kill(next(process for process in running.processes() if is_task(process, 1)), signal.SIGKILL)
        status, said = running.end()
        assert not running.left()
    assert status != 0 and said.count("note: restart 1 of 1, from the checkpoint of step ") == 1
    assert said.count("note: srun does not start it again: the same command goes on, typed again with `--out ") == 1
    with started(job.parent, [command]) as (again,):
        status, said = again.end()
        assert status == 0, said
        assert not again.left()
    agree(train_job(launcher, job, *ALONE, *chosen), Trained(out))


def is_task(process: int, number: int) -> bool:
    """True for the process that srun has started, which is not the rank that it has forked."""
    parent = (Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split())[1]
    here, there = (Path(f"/proc/{each}/cmdline").read_bytes() for each in (process, parent))
    return here != there and b"SLURM_PROCID=%d" % number in Path(f"/proc/{process}/environ").read_bytes().split(b"\0")


@pytest.mark.long
def test_a_cancelled_job_stops_after_one_step(job: Path) -> None:
    out = job.parent / "run"
    with started(job.parent, [srun(job, "train.steps=100000")]) as (running,):
        reach(out, 3, [running])
        subprocess.run(["scancel", "--name", job.parent.name], check=True)
        status, said = running.end()
        assert not running.left()
    last = logged(out)[-1]
    assert status == 130 and said.count(f"stopped after {last} steps of 100000") == 1
    assert (out / "checkpoints" / f"step-{last:08}").exists()
    assert "to resume:  srun --nodes 2 --ntasks-per-node 1 dslc run " in said


@pytest.mark.long
def test_a_requeued_job_goes_on_where_it_was(launcher: Launcher, job: Path) -> None:
    """SLURM ends the job and starts it again; the second attempt finds the run directory of the first."""
    command = [*srun(job, "train.steps=600", "checkpoint.every=50 steps")]
    del command[command.index("--out") : command.index("--out") + 2]
    script = job.parent / "submit.sh"
    script.write_text(f"#!/bin/bash\n{subprocess.list2cmdline(command)}\n")
    words = ["sbatch", "--parsable", "--wait", "--requeue", "--nodes=2", "--ntasks=2", "--open-mode=append"]
    words += [f"--job-name={job.parent.name}", f"--output={job.parent}/said", f"--chdir={job.parent}", str(script)]
    runs, name = job.parent / "runs" / "job", job.parent.name
    with started(job.parent, [words]) as (waiting,):
        until(lambda: any(runs.glob("*/checkpoints/step-*0")), [waiting])
        number = subprocess.run(["squeue", "-h", "-n", name, "-o", "%i"], capture_output=True, text=True).stdout.strip()
        subprocess.run(["scontrol", "requeue", number], check=True)
        start_again(number)
        status, _ = waiting.end()
    said = (job.parent / "said").read_text()
    assert status == 0, said
    (out,) = runs.iterdir()
    assert "resumes after step " in said
    assert logged(out)[-1] == 600 and set(logged(out)) == set(range(1, 601))
    agree(train_job(launcher, job, *ALONE, "train.steps=600", "checkpoint.every=600 steps"), Trained(out))


def submit(job: Path, *settings: str) -> str:
    """Hands a job over, and returns SLURM's number of it."""
    words = [word for setting in settings for word in ("--set", setting)]
    told = dslc("submit", job, "--out", job.parent / "run", *words, cwd=job.parent)
    assert told.returncode == 0, told.stderr
    return re.findall(r"^job (\d+): ", told.stdout, re.MULTILINE)[0]


def shown(job: Path) -> list[RunState]:
    return run_states(runs_in(str(job.parent / "run")))


def said_of(job: Path) -> str:
    return "".join(path.read_text() for path in (job.parent / "run").glob("slurm*.out"))


def wait_for(job: Path, *states: str, step: int = 0) -> None:
    """Waits until a submitted job stands so, and has logged a step."""

    def stands() -> bool:
        (found, *_) = shown(job)
        assert found.state in states or not found.has_ended, (found, said_of(job))
        return found.state in states and [0, *logged(job.parent / "run")][-1] >= step

    until(stands, between=0.2)


def has_step(number: str) -> bool:
    return bool(subprocess.check_output(["squeue", "--noheader", "--steps", f"--jobs={number}"], text=True).strip())


def start_again(number: str) -> None:
    """Waits until a requeued job is started again, in two seconds instead of two minutes.

    Not in the second of its end: the credential of that start, which knows no smaller times, would count as revoked.
    """

    def told() -> set[str]:
        return {*subprocess.run(["scontrol", "show", "job", number], capture_output=True, text=True).stdout.split()}

    until(lambda: {"Restarts=1", "JobState=PENDING"} <= told(), between=0.2)  # its nodes have done with its end
    subprocess.run(["scontrol", "update", f"JobId={number}", "StartTime=now+2"], check=True)
    until(lambda: not told() & {"JobState=PENDING", "JobState=COMPLETING"}, between=0.2)


def wait_for_the_end(job: Path) -> None:
    dslc("status", job.parent / "run", "--follow")


def every_step_once(job: Path, steps: int) -> bool:
    trained = [record["step"] for record in read_metrics(str(job.parent / "run")) if record["split"] == "train"]
    return trained == list(range(1, steps + 1))


LONG = ("train.steps=200", "checkpoint.every=50 steps")


@pytest.mark.parametrize("nodes", [1, pytest.param(2, marks=pytest.mark.long)])
def test_a_submitted_job_that_is_warned_goes_on_by_itself(launcher: Launcher, job: Path, nodes: int) -> None:
    """The warning is that of a time limit, before its time. Until the job is requeued, steps wait for this test."""
    pipe = job.parent / "pipe"
    os.mkfifo(pipe)
    writer = os.open(pipe, os.O_RDWR | os.O_NONBLOCK)
    hook = f'hooks = [python("own_hooks:Paced", pipe = "{pipe}", first = 20)]'
    job = write_job_with_helper("own_hooks.py", job.parent, JOB.replace("train {\n", f"train {{\n  {hook}\n"))
    number = submit(job, *LONG, f"devices.nodes={nodes}", "train.steps=600")
    wait_for(job, "running", step=15)
    subprocess.run(["scancel", "--signal=USR1", number], check=True)

    def is_requeued() -> bool:
        os.write(writer, b".")
        return f"requeued as job {number}" in said_of(job)

    until(is_requeued, between=0.2)
    pipe.unlink()
    pipe.touch()
    os.close(writer)
    start_again(number)
    wait_for_the_end(job)
    assert shown(job)[0].state == "done" and "resumes after step " in said_of(job), said_of(job)
    assert every_step_once(job, 600), said_of(job)
    agree(train_job(launcher, job, *ALONE, "train.steps=600"), Trained(job.parent / "run"))


@pytest.mark.long
def test_a_time_limit_is_warned_of_and_followed_by_a_requeue(job: Path) -> None:
    """The warning comes 40 to 100 s after the start: SLURM may send it a minute earlier than the script asks."""
    job.write_text(JOB.replace("slurm(time = 1h)", 'slurm(time = 10min, options = ["--signal=USR1@500"])'))
    number = submit(job, "train.steps=40000", "checkpoint.every=500 steps", "log.every=100 steps")
    wait_for(job, "running", step=10)
    wait_for(job, "waiting")
    assert f"requeued as job {number}" in said_of(job)
    stopped = dslc("stop", job.parent / "run")
    assert stopped.returncode == 0 and shown(job)[0].state == "stopped", stopped.stderr


@pytest.mark.long
@pytest.mark.usefixtures("urgent")
def test_a_preempted_job_stops_with_a_checkpoint_and_goes_on(launcher: Launcher, job: Path) -> None:
    number = submit(job, *LONG, "train.steps=600", "checkpoint.every=500 steps")
    wait_for(job, "running", step=15)
    more = [
        "sbatch",
        "--parsable",
        "--partition=urgent",
        "--nodes=3",
        "--exclusive",
        "--wrap=true",
        "--output=/dev/null",
    ]
    subprocess.run(more, check=True, stdout=subprocess.DEVNULL)
    start_again(number)
    assert f"requeued as job {number}" in said_of(job), said_of(job)
    wait_for_the_end(job)
    (stopped,) = re.findall(r"resumes after step (\d+)", said_of(job))
    assert int(stopped) % 500, "from the checkpoint of the step after which it stopped"
    assert shown(job)[0].state == "done" and every_step_once(job, 600), said_of(job)
    agree(train_job(launcher, job, *ALONE, "train.steps=600"), Trained(job.parent / "run"))


@pytest.mark.long
def test_an_elastic_job_goes_on_with_the_nodes_that_are_left(launcher: Launcher, job: Path) -> None:
    number = submit(job, *LONG, "train.steps=1500", "devices.nodes=1..3")
    wait_for(job, "running", step=15)
    node = {"NodeName": "n3", "State": "DRAIN", "Reason": "test"}
    subprocess.run(["scontrol", "update", *(f"{name}={value}" for name, value in node.items())], check=True)
    try:
        subprocess.run(["scancel", "--signal=USR1", number], check=True)
        start_again(number)
        wait_for_the_end(job)
    finally:
        subprocess.run(["scontrol", "update", "NodeName=n3", "State=RESUME"], check=True)
    assert shown(job)[0].state == "done" and every_step_once(job, 1500), said_of(job)
    plan = read_plan((job.parent / "run" / "plan.json").read_text()).plan
    assert plan.topology.nodes == 2 and (job.parent / "run" / "logs" / "rank-2.log").exists()
    agree(train_job(launcher, job, *ALONE, "train.steps=1500"), Trained(job.parent / "run"))


@pytest.mark.long
def test_a_failed_training_is_started_again_in_the_same_job(launcher: Launcher, job: Path) -> None:
    submit(job, *LONG, "launch.restarts=2")
    out = job.parent / "run"
    wait_for(job, "running", step=15)
    killed = int(re.findall(r'"process": (\d+)', (out / "status.json").read_text())[0])
    os.kill(killed, signal.SIGKILL)
    wait_for_the_end(job)
    assert shown(job)[0].state == "done" and "restart 1 of 2" in said_of(job), said_of(job)
    assert every_step_once(job, 200)
    agree(train_job(launcher, job, *ALONE, "train.steps=200"), Trained(out))


@pytest.mark.long
def test_a_job_that_is_warned_before_its_first_step_again_and_again_ends(job: Path) -> None:
    number = submit(job, *LONG)
    for start in range(2):
        until(lambda: has_step(number), between=0.2)
        subprocess.run(["scancel", "--signal=USR1", number], check=True)
        if start == 0:
            start_again(number)
    wait_for(job, "failed")
    assert said_of(job).count(f"requeued as job {number}") == 1 and not logged(job.parent / "run"), said_of(job)
    assert "not requeued: no step was done in 1 start, and `launch.restarts` is 0" in said_of(job), said_of(job)


@pytest.mark.long
def test_a_job_that_is_cancelled_by_slurm_is_not_requeued(job: Path) -> None:
    number = submit(job, *LONG, "train.steps=100000", "launch.restarts=2")
    wait_for(job, "running", step=20)
    subprocess.run(["scancel", number], check=True)
    wait_for(job, "stopped", "waiting", "gone")
    assert shown(job)[0].state == "stopped" and "requeued" not in said_of(job), said_of(job)


def test_a_sweep_is_one_array_and_a_waiting_job_is_cancelled(job: Path) -> None:
    sweep = "sweep {\n  train.optimizer.lr = [0.1, 0.05]\n}\n"
    job.write_text(JOB.replace("nodes = 2", "nodes = 1") + sweep)
    submit(job)
    folders = [job.parent / "run" / name for name in ("lr=0.05", "lr=0.1")]
    assert [Path(each.folder) for each in shown(job)] == folders
    wait_for_the_end(job)
    assert [each.state for each in shown(job)] == ["done", "done"], said_of(job)
    assert all(logged(folder)[-1] == 12 for folder in folders)
    table = dslc("status", job.parent / "run")
    assert table.returncode == 0 and re.search(r"lr +state +train loss .*\n0\.1 +done ", table.stdout), table.stdout
    assert (job.parent / "run" / "sweep.csv").read_text().startswith("train.optimizer.lr,state,step,steps,train loss")
    waits = job.parent / "waits"
    later = 'launch.with=slurm(options = ["--begin=now+1hour"])'
    told = dslc("submit", job, "--out", waits, "--set", later)
    assert told.returncode == 0, told.stderr
    queued = re.findall(r"^job (\d+): ", told.stdout, re.MULTILINE)[0]
    assert "waiting in SLURM as job " in dslc("status", waits / "lr=0.1").stdout
    stopped = dslc("stop", waits)
    assert stopped.returncode == 0, stopped.stderr
    assert [each.state for each in run_states(runs_in(str(waits)))] == ["stopped", "stopped"]
    assert queued not in subprocess.check_output(["squeue", "--noheader", "--states=PENDING"], text=True)


@pytest.mark.long
@pytest.mark.slow
def test_a_number_of_tasks_that_fits_neither_way_is_said_once(job: Path) -> None:
    with started(job.parent, [srun(job, "devices.cpus=2", tasks=3)]) as (running,):
        status, said = running.end()
        assert not running.left()
    assert status == 1 and said.count("error[E0810]: srun has started 3 processes (SLURM_STEP_NUM_TASKS is 3)") == 1
    assert "the job takes 4 ranks: 2 on each of 2 nodes" in said and not (job.parent / "run").exists()


@pytest.mark.long
@pytest.mark.slow
def test_srun_of_a_local_job_is_said_once(job: Path) -> None:
    with started(job.parent, [srun(job, "launch.with=local()", "devices.nodes=1", "devices.cpus=2")]) as (running,):
        status, said = running.end()
        assert not running.left()
    assert status == 1 and said.count("error[E0809]") == said.count("1 error") == 1
    assert "srun has started 2 processes (SLURM_STEP_NUM_TASKS is 2)" in said and "`--set launch.with=slurm()`" in said
    assert not (job.parent / "run").exists()


@pytest.mark.parametrize(
    "nodes, first", [("n1", "n1"), ("n[1-2]", "n1"), ("a[07-09,12],b3", "a07"), ("x,y", "x"), ("r1[2,4]n5", "r12n5")]
)
def test_the_first_host_of_a_list(nodes: str, first: str) -> None:
    assert first_host(nodes) == first
