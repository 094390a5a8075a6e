"""Modules of the folder in which a command is given do not replace its own; the user's own modules do run."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
from helpers.commands import dslc
from helpers.paths import TESTS
from instruments.hostile import written

EVIL = "import os\nopen(os.path.join(os.path.dirname(os.path.abspath(__file__)), 'ran'), 'a').write(__name__ + '\\n')\n"
CALLED = "import dslc; print(dslc.run({!r}, out={!r}).metrics[-1]['step'])"
OWN = """import {other}
import torch

def make():
    return torch.nn.Sequential(torch.nn.Flatten(), torch.nn.Linear(64, {width}))
"""
SHADOWS = ("json", "torch", "argparse", "dataclasses", "networkx", "dslc", "socket", "sitecustomize_of_mine")


@pytest.mark.slow
def test_modules_of_the_current_folder_do_not_run(tmp_path: Path) -> None:
    """The folder in which the command is given holds a `json.py`; the job, elsewhere, has a module of its own."""
    here, job = tmp_path / "here", tmp_path / "job"
    for folder in (here, job):
        folder.mkdir()
    for name in SHADOWS:
        (here / f"{name}.py").write_text(EVIL)
    (job / "own.py").write_text(OWN.format(width=10, other="torch"))
    (job / "job.plt").write_text(written(network='python("own:make")', steps="2") + "devices { cpus = 2 }\n")
    done = dslc("run", job / "job.plt", "--out", tmp_path / "run", cwd=here, fresh=True)
    assert done.returncode == 0, done.stderr
    assert (tmp_path / "run" / "plan.svg").exists() and not (here / "ran").exists()
    script = CALLED.format(str(job / "job.plt"), str(tmp_path / "api"))
    ran = subprocess.run(
        [sys.executable, "-P", "-c", script], cwd=here, capture_output=True, text=True, check=False
    )  # fmt: skip
    assert ran.returncode == 0 and ran.stdout.split()[-1] == "2", ran.stderr
    assert not (here / "ran").exists()


@pytest.mark.slow
def test_they_do_not_hide_that_data_depends_on_the_order_of_a_set(tmp_path: Path) -> None:
    (tmp_path / "random.py").write_text(EVIL)
    checked = dslc("check", "--trace", TESTS / "bad" / "traced" / "data_by_set.plt", cwd=tmp_path, fresh=True)
    assert "W0657" in checked.stdout + checked.stderr and not (tmp_path / "ran").exists()


@pytest.mark.slow
def test_a_notebook_finds_modules_of_the_current_folder_in_its_ranks(tmp_path: Path) -> None:
    """Modules in folders of the user's PYTHONPATH are found too."""
    here, other, job = tmp_path / "here", tmp_path / "other", tmp_path / "job"
    for folder in (here, other, job):
        folder.mkdir()
    (other / "far.py").write_text("WIDTH = 10\n")
    (here / "near.py").write_text(OWN.format(width="far.WIDTH", other="far"))
    (job / "job.plt").write_text(written(network='python("near:make")', steps="2"))
    script = CALLED.format(str(job / "job.plt"), str(tmp_path / "api"))
    ran = subprocess.run(
        [sys.executable, "-c", script], cwd=here, capture_output=True, text=True, check=False,
        env={**os.environ, "PYTHONPATH": str(other)},
    )  # fmt: skip
    assert ran.returncode == 0 and ran.stdout.split()[-1] == "2", ran.stderr
