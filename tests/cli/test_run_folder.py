"""`dslc run --out`: what a folder holds already is never written over, and two runs never write into one."""

from __future__ import annotations

import os
import re
import select
import signal
import socket
import subprocess
import sys
from pathlib import Path

import pytest
from helpers.commands import dslc
from helpers.job_texts import job_text
from helpers.launcher import DSLC, Command

from dslc.python_api import functions
from dslc.runs.run_folder import FolderInUseError, claim_folder

JOB = job_text(
    data={"source": "synthetic(samples = 32, shape = [4], classes = 10)", "batch": 8},
    train={"steps": 2},
    log={"every": None},
)
# A data set whose samples wait, in a training, for as long as someone has `gate` open to write into it.
OWN = """
import os
import torch

class Samples(torch.utils.data.Dataset):
    def __len__(self):
        return 32
    def __getitem__(self, index):
        if "RANK" in os.environ and os.path.exists("gate"):
            open("gate").read()
        return torch.ones(4) * index, index % 10

def data():
    return Samples()
"""


@pytest.fixture
def job(tmp_path: Path) -> Path:
    (tmp_path / "made.plt").write_text(JOB)
    return tmp_path / "made.plt"


@pytest.mark.parametrize("settings", [(), ("--set", "checkpoint.resume=auto", "--set", "checkpoint.every=1 step")])
def test_a_folder_that_holds_other_things_is_refused(job: Path, tmp_path: Path, settings: tuple[str, ...]) -> None:
    theirs = tmp_path / "theirs"
    (theirs / "checkpoints" / "step-00000001.part").mkdir(parents=True)
    files = [theirs / "weights.safetensors", theirs / "metrics.jsonl", theirs / "checkpoints/step-00000001.part/a"]
    for file in files:
        file.write_text("theirs")
    run = dslc("run", job, "--out", "theirs", *settings, cwd=tmp_path)
    assert run.returncode == 2, run.stderr
    assert run.stderr == (
        "dslc: theirs is not a run directory and holds other files (checkpoints, metrics.jsonl, weights.safetensors), "
        "which a run could overwrite: name a new or an empty folder, as `--out theirs/run`\n"
    )
    assert all(file.read_text() == "theirs" for file in files)
    assert sorted(os.listdir(theirs)) == ["checkpoints", "metrics.jsonl", "weights.safetensors"]


@pytest.mark.slow
def test_sweeps_leave_other_things_and_earlier_runs_alone(job: Path, tmp_path: Path) -> None:
    command = ("run", job, "--out", "grid", "--set", "train.steps=1", "--set", "sweep.train.seed=[1, 2]")
    (tmp_path / "grid").mkdir()
    (tmp_path / "grid" / ".gitkeep").touch()
    assert (run := dslc(*command, cwd=tmp_path)).returncode == 0, run.stderr
    again = dslc(*command, "--set", "train.steps=2", cwd=tmp_path)
    assert again.returncode == 2
    assert again.stderr.startswith(f"dslc: {os.path.join('grid', 'seed=1')} holds a run of another job, or of this one")
    (tmp_path / "grid" / "seed=3").mkdir()
    (tmp_path / "grid" / "seed=3" / "paper.tex").touch()
    third = dslc(*command[:-1], "sweep.train.seed=[4, 3]", cwd=tmp_path)
    assert third.returncode == 2 and "holds other files (paper.tex)" in third.stderr
    assert not (tmp_path / "grid" / "seed=4").exists(), "nothing is trained where a later one is refused"


@pytest.mark.slow
def test_checkpoints_that_were_brought_along_are_gone_on_from(job: Path, tmp_path: Path) -> None:
    every = ("--set", "checkpoint.every=1 step")
    assert (run := dslc("run", job, "--out", "first", *every, cwd=tmp_path)).returncode == 0, run.stderr
    (tmp_path / "second").mkdir()
    (tmp_path / "first" / "checkpoints").rename(tmp_path / "second" / "checkpoints")
    auto = ("--set", "checkpoint.resume=auto", "--set", "train.steps=3")
    run = dslc("run", job, "--out", "second", *every, *auto, cwd=tmp_path)
    assert run.returncode == 0 and "resumes after step 2" in run.stdout, run.stdout + run.stderr


@pytest.mark.slow
def test_two_runs_never_write_into_one_folder(job: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Stops a run in the middle of its training. Everything that would write there is refused: the same run, a sweep
    over the folder, a run from Python, one into its checkpoints. When it is killed the system gives the lock back.
    """
    monkeypatch.chdir(tmp_path)
    (tmp_path / "own.py").write_text(OWN)
    job.write_text(JOB.replace("synthetic(samples = 32, shape = [4], classes = 10)", 'python("own:data")'))
    os.mkfifo("gate")
    kept = ["checkpoint.dir=kept", "checkpoint.every=1 step", "checkpoint.resume=auto"]
    command = ["run", "made.plt", *(word for setting in kept for word in ("--set", setting))]
    one = (*command, "--out", "grid/seed=1", "--set", "train.seed=1")
    with Command(tmp_path / "first", [str(DSLC), *one]) as first, open("gate", "w"):  # waits for a rank
        held = rf"process {first.process.pid} on {re.escape(socket.gethostname())}, since 20\d\d-.*; wait for it to end"
        again = dslc(*one, cwd=tmp_path)
        assert again.returncode == 2
        assert re.match(f"dslc: a run is writing into grid/seed=1 already: {held}.* --out\n", again.stderr)
        sweep = dslc("run", "made.plt", "--out", "grid", "--set", "sweep.train.seed=[1]", cwd=tmp_path)
        assert sweep.returncode == 2, sweep.stderr
        assert sweep.stderr.startswith("dslc: grid/seed=1 holds a run of another job"), sweep.stderr
        with pytest.raises(FolderInUseError, match=f"a run is writing into grid/seed=1 already: {held}"):
            functions.run("made.plt", kept, out="grid/seed=1")
        with pytest.raises(FolderInUseError, match=rf"a run is writing into kept already: {held}.* checkpoint\.dir"):
            functions.run("made.plt", kept, out="other")
        assert len(first.left()) > 1, "it is there still"
        os.kill(first.process.pid, signal.SIGKILL)
        first.wait_for_all()
    os.unlink("gate")
    gone_on = dslc(*one, cwd=tmp_path)
    assert gone_on.returncode == 0, gone_on.stderr


LEAVES_A_CHILD = """
import os, sys
from dslc.runs.run_folder import claim_folder

with claim_folder("run", None):
    child = os.fork()
    os.write(1, b"child\\n" if child == 0 else b"parent\\n")
    sys.stdin.read()
"""


def test_a_forked_child_that_stays_keeps_no_folder_locked(tmp_path: Path) -> None:
    command = [sys.executable, "-c", LEAVES_A_CHILD]
    with subprocess.Popen(command, cwd=tmp_path, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as parent:
        assert parent.stdin is not None and parent.stdout is not None
        assert {parent.stdout.readline(), parent.stdout.readline()} == {"child\n", "parent\n"}
        with pytest.raises(FolderInUseError), claim_folder(str(tmp_path / "run"), None):
            pass
        parent.kill()
        parent.wait()
        with claim_folder(str(tmp_path / "run"), None):
            pass
        assert select.select([parent.stdout], [], [], 0)[0] == [], "the child is there still"


FORKS = """
import os, sys
from dslc.runs.run_folder import claim_folder

for _ in range(20):
    with claim_folder("run", None):
        child = os.fork()
        if child == 0:
            os._exit(0)
"""


def test_the_lock_is_free_at_once_whatever_was_forked(tmp_path: Path) -> None:
    """Even if a child has not released it yet."""
    subprocess.run([sys.executable, "-c", FORKS], cwd=tmp_path, check=True)


def test_nothing_writes_into_a_folder_that_is_verified_into(
    job: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "own.py").write_text(OWN)
    job.write_text(JOB.replace("synthetic(samples = 32, shape = [4], classes = 10)", 'python("own:data")'))
    os.mkfifo(tmp_path / "gate")
    verify = ("verify", "made.plt", "--steps", "1", "--out", "kept")
    with Command(tmp_path, [str(DSLC), *verify]) as first, open(tmp_path / "gate", "w"):  # waits for a rank
        held = rf"dslc: a run is writing into kept already: process {first.process.pid} on .* --out\n"
        for command in (verify, ("run", "made.plt", "--out", "kept")):
            other = dslc(*command, cwd=tmp_path)
            assert other.returncode == 2 and re.fullmatch(held, other.stderr), other.stderr
        os.kill(first.process.pid, signal.SIGKILL)
        first.wait_for_all()
    again = dslc(*verify, cwd=tmp_path)
    assert again.returncode == 2 and again.stderr.startswith("dslc: kept is not an empty folder: ")
