"""`dslc bisect` of plan files, of two git revisions, and of a recording that another machine made."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest
from helpers.commands import dslc
from helpers.job_texts import job_text
from helpers.paths import HELPERS

from dslc.dsl.diagnostics import Report
from dslc.jobs.revision import load_revision

JOB = job_text(
    model={"network": 'python("planted_faults:net")'},
    data={"source": 'python("planted_faults:data")', "batch": 24},
    devices={"cpus": 2},
    train={"steps": 10, "optimizer": "adamw(lr = 1e-2)"},
    log=None,
)


def write_job(folder: Path) -> Path:
    """Writes a job and its code to a new folder."""
    folder.mkdir(parents=True)
    shutil.copy(HELPERS / "planted_faults.py", folder)
    (folder / "job.plt").write_text(JOB)
    return folder


def compare(folder: Path, *sides: str, fault: str = "") -> dict[str, Any]:
    """Compares one step of two sides; returns the object of `--json`."""
    run = dslc("bisect", *sides, "--steps=1", "--json", cwd=folder, env={**os.environ, "DSLC_FAULT": fault})
    assert run.stdout, run.stderr
    result: dict[str, Any] = json.loads(run.stdout)
    return result


@pytest.mark.slow
def test_two_plan_files_of_a_job(tmp_path: Path) -> None:
    """The fault is planted on the ranks of the second plan alone, which are two."""
    folder = write_job(tmp_path / "job")
    for name, setting in (("three", "devices.cpus=3"), ("two", "parallelism.zero=3")):
        run = dslc("plan", "job.plt", "--set", setting, "--trace", "--json", cwd=folder)
        assert run.returncode == 0, run.stderr
        (folder / f"{name}.json").write_text(run.stdout)
    equal = compare(folder, "three.json", "two.json")
    assert equal["same"] and (equal["compared"], equal["missing"]) == (20, 0), equal
    assert (equal["a"]["plan"], equal["b"]["plan"]) == ("3 ranks, zero 0, fp32", "2 ranks, zero 3, fp32")
    parted = compare(folder, "three.json", "two.json", fault="another activation")
    assert (parted["at"], parted["step"]) == ("the output of `activation`", 1), parted
    assert parted["details"][1].endswith("B is the one that differs"), parted


def git(folder: Path, *arguments: str) -> None:
    person = ("-c", "user.name=a", "-c", "user.email=a@example.org")
    subprocess.run(["git", *person, *arguments], cwd=folder, check=True, capture_output=True)


@pytest.fixture
def repository(tmp_path: Path) -> Path:
    """A repository with a job in a folder, whose code has another formula in the second of two revisions."""
    top = tmp_path / "repository"
    code = write_job(top / "jobs") / "planted_faults.py"
    git(top, "init", "--quiet")
    for name, scale in (("one", ""), ("two", "1.0001 * ")):
        code.write_text(code.read_text().replace("self.dropout(self.", f"self.dropout({scale}self."))
        git(top, "add", ".")
        git(top, "commit", "--quiet", "--message", name)
        git(top, "tag", name)
    return top


def test_a_revision_is_written_with_links_to_what_git_does_not_track(repository: Path, tmp_path: Path) -> None:
    for name in ("jobs/__pycache__/a.pyc", "data/a.txt", "jobs/data.txt"):
        (repository / name).parent.mkdir(exist_ok=True)
        (repository / name).write_text("here")
    export, report = tmp_path / "export", Report()
    export.mkdir()
    before = Path.cwd()
    os.chdir(repository)
    try:
        loaded = load_revision("one:jobs/job.plt", [], report, str(export))
        again = load_revision("one:jobs/job.plt", [], report)
        absent = load_revision("three:jobs/job.plt", [], report, str(tmp_path))
    finally:
        os.chdir(before)
    assert loaded is not None and loaded.job is not None and again is not None and again.job is not None
    assert loaded.job.folder == str(export / "jobs") and again.job.folder == str(repository / "jobs")
    assert "1.0001" not in (export / "jobs" / "planted_faults.py").read_text()
    assert "1.0001" in (repository / "jobs" / "planted_faults.py").read_text()
    assert sorted(os.listdir(export)) == ["data", "jobs"]
    assert sorted(os.listdir(export / "jobs")) == ["data.txt", "job.plt", "planted_faults.py"]
    assert os.readlink(export / "data") == str(repository / "data")
    assert absent is None and len(report.errors) == 1


@pytest.mark.slow
def test_two_revisions_are_trained_with_their_own_code(repository: Path) -> None:
    equal = compare(repository, "one:jobs/job.plt", "one:jobs/job.plt", "--set", "parallelism.zero=1")
    assert equal["same"] and equal["compared"] == 20, equal
    parted = compare(repository, "one:jobs/job.plt", "two:jobs/job.plt")
    assert (parted["at"], parted["line"]) == ("the output of `dropout`", "job.plt:3:13"), parted
    assert parted["details"][1].endswith("B is the one that differs"), parted


@pytest.mark.slow
def test_a_recording_of_another_machine(tmp_path: Path) -> None:
    """The other machine has the job at another place, by another name."""
    there = write_job(tmp_path / "there")
    run = dslc("bisect", "job.plt", "--steps=1", "--record", "there.recording", cwd=there)
    assert run.returncode == 0, run.stderr
    here = write_job(tmp_path / "here" / "elsewhere")
    shutil.move(there / "there.recording", here)
    shutil.move(here / "job.plt", here / "local.plt")
    shutil.rmtree(there)
    equal = compare(here, "there.recording", "local.plt")
    assert equal["same"] and (equal["compared"], equal["missing"]) == (20, 0), equal
    assert equal["a"] == {"name": "there.recording", "plan": "2 ranks, zero 0, fp32 (job.plt)"}
    parted = compare(here, "there.recording", "local.plt", fault="another epsilon")
    assert (parted["at"], parted["line"]) == ("the output of `norm`", "job.plt:3:13"), parted
