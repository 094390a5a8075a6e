"""`dslc run --try`: a few steps, an evaluation, a checkpoint and a resume, of which nothing is left."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from helpers.commands import dslc
from helpers.job_texts import job_text

JOB = job_text(
    model={"network": 'python("net:network")'},
    data={"source": "digits()", "batch": 64, "validation": "10%"},
    devices={"cpus": 2},
    train={"steps": 200, "optimizer": "sgd(lr = 0.1, momentum = 0.9)"},
    checkpoint={"every": "50 steps", "dir": '"kept"'},
    log=None,
)
NET = """
from torch import nn

class Net(nn.Sequential):
    def forward(self, x):
        {body}
        return super().forward(x)

def network():
    return Net(nn.Flatten(), nn.Linear(64, 10))
"""


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "made.plt").write_text(JOB)
    (tmp_path / "temporary").mkdir()
    return tmp_path


def tried(folder: Path, body: str = "pass", *settings: str) -> tuple[int, str, str]:
    """Returns the exit status, the output, and what is in the temporary folder."""
    (folder / "net.py").write_text(NET.replace("{body}", body))
    env = os.environ | {"TMPDIR": str(folder / "temporary")}
    run = dslc("run", "made.plt", "--try", *(f"--set={each}" for each in settings), cwd=folder, env=env)
    left = [name for name in os.listdir(folder / "temporary") if name.startswith("dslc-try-")]
    return run.returncode, run.stdout + run.stderr, "".join(left)


def test_a_trial_says_what_it_tried_and_leaves_nothing(folder: Path) -> None:
    status, shown, left = tried(folder)
    assert (status, left) == (0, ""), shown
    for said in (
        "3 steps on 2 ranks",
        "an evaluation over 180 samples: loss",
        "a checkpoint: ",
        "resume from it, step 4",
    ):
        assert f"tried {said}" in shown or f"tried to {said}" in shown
    assert "the job trains, of 200 steps" in shown
    assert set(os.listdir(folder)) - {"__pycache__"} == {"made.plt", "net.py", "temporary"}


def test_what_fails_only_in_an_evaluation_is_found(folder: Path) -> None:
    status, shown, left = tried(folder, 'assert self.training, "never tried"')
    assert status == 3 and "the first steps: training failed on rank" in shown and "never tried" in shown
    assert left and f"{left}/logs/rank-" in shown


@pytest.mark.long
def test_a_job_of_one_step(folder: Path) -> None:
    status, shown, left = tried(folder, "pass", "train.steps=1", "checkpoint.every=1 step", "data.validation=0")
    assert (status, left) == (0, ""), shown
    assert "tried 1 step on 2 ranks" in shown and "the job has no further step" in shown
    assert "evaluation" not in shown


@pytest.mark.parametrize("option", ["--out=here", "--profile"])
def test_options_that_ask_for_what_a_trial_removes(folder: Path, option: str) -> None:
    found = dslc("run", "made.plt", "--try", option, cwd=folder)
    assert found.returncode == 2 and f"`{option.partition('=')[0]}`" in found.stderr


def test_ranks_of_other_hosts_are_not_tried_on_this_one(folder: Path) -> None:
    two = ["--set", "devices.nodes=2", "--set", 'launch.with=ssh(hosts = ["a", "b"])']
    (folder / "net.py").write_text(NET.replace("{body}", "pass"))
    found = dslc("run", "made.plt", "--try", *two, cwd=folder)
    assert found.returncode == 1 and "E0807" in found.stderr, found.stderr
