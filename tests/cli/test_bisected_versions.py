"""`dslc bisect` of plan files, of two git revisions, and of a recording that another machine made."""

from __future__ import annotations

import importlib
import json
import os
import shutil
import subprocess
import sys
from importlib.machinery import PathFinder
from pathlib import Path
from typing import Any

import pytest
from helpers.commands import dslc
from helpers.job_texts import job_text
from helpers.paths import HELPERS

from dslc.dsl.diagnostics import Report
from dslc.jobs.revision import export_revision, load_revision
from dslc.jobs.revision_imports import ExportedRevision

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


def compare(folder: Path, *sides: str, fault: str = "", path: str = "") -> dict[str, Any]:
    """Compares one step of two sides; returns the object of `--json`."""
    environment = {**os.environ, "DSLC_FAULT": fault, **({"PYTHONPATH": path} if path else {})}
    run = dslc("bisect", *sides, "--steps=1", "--json", cwd=folder, env=environment, fresh=bool(path))
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


LIBRARY = {
    "shared/__init__.py": "",
    "shared/scale.py": "SCALE = 1.0",
    "spaces/inner/part.py": "PART = 1",
    "installed/__init__.py": "",
    "installed/later.py": "",
}


@pytest.fixture
def library(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A repository whose packages lie beside the jobs, at two revisions, of which the first lacks a module."""
    top = tmp_path / "library"
    for name, text in LIBRARY.items():
        (top / "src" / name).parent.mkdir(parents=True, exist_ok=True)
        (top / "src" / name).write_text(text)
    git(top, "init", "--quiet")
    for name in ("one", "two"):
        if name == "two":
            (top / "src/shared/scale.py").write_text("SCALE = 2.0")
            (top / "src/spaces/inner/part.py").write_text("PART = 2")
            (top / "src/shared/added.py").write_text("")
        git(top, "add", ".")
        git(top, "commit", "--quiet", "--message", name)
        git(top, "tag", name)
    (top / "venv").mkdir()
    (top / "venv" / "untracked.py").write_text("")
    monkeypatch.setattr(sys, "dont_write_bytecode", True)
    monkeypatch.syspath_prepend(str(top / "venv"))
    return top


def import_all(*names: str) -> dict[str, str]:
    """Imports modules anew; returns their places, "" of those that cannot be imported."""
    places = {}
    for name in names:
        for loaded in [each for each in sys.modules if each.partition(".")[0] == name.partition(".")[0]]:
            del sys.modules[loaded]
    for name in names:
        try:
            places[name] = str(importlib.import_module(name).__file__)
        except ModuleNotFoundError:
            places[name] = ""
    return places


@pytest.mark.parametrize("found_by", ["path", "finder"])
def test_modules_within_the_repository_are_those_of_the_revision(
    library: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, found_by: str
) -> None:
    """Both by `PYTHONPATH`, and by a finder such as that of an editable install."""
    export = tmp_path / "export"
    export.mkdir()
    export_revision(str(library), "one", str(export))
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(library / "src"), "/elsewhere"]))
    if found_by == "path":
        monkeypatch.syspath_prepend(str(library / "src"))
    else:

        class PlaceFinder:
            def find_spec(self, name: str, path: Any = None, target: Any = None) -> Any:
                return PathFinder.find_spec(name, [str(library / "src")]) if path is None else None

        monkeypatch.setattr(sys, "meta_path", [*sys.meta_path, PlaceFinder()])
    names = ("shared.scale", "spaces.inner.part", "shared.added", "untracked", "dslc.jobs.lock")
    own = importlib.import_module(names[-1])
    before = list(sys.path)
    with ExportedRevision(top=str(library), folder=str(export)).imports():
        assert import_all(*names[:-1]) == {
            "shared.scale": str(export / "src/shared/scale.py"),
            "spaces.inner.part": str(export / "src/spaces/inner/part.py"),
            "shared.added": "",
            "untracked": str(library / "venv/untracked.py"),
        }
        assert importlib.reload(own).__file__ == own.__file__
        assert os.environ["PYTHONPATH"] == os.pathsep.join([str(export / "src"), "/elsewhere"])
    assert sys.path == before and os.environ["PYTHONPATH"].startswith(str(library))
    assert import_all("shared.scale")["shared.scale"] == str(library / "src/shared/scale.py")


@pytest.mark.long
@pytest.mark.slow
def test_a_package_beside_the_jobs_is_that_of_the_revision(repository: Path) -> None:
    package = repository / "packages" / "scales.py"
    package.parent.mkdir()
    code = repository / "jobs" / "planted_faults.py"
    code.write_text(f"{code.read_text().replace('1.0001 *', 'scales.SCALE *')}\nimport scales\n")
    for name, scale in (("three", 1.0), ("four", 1.0001)):
        package.write_text(f"SCALE = {scale}\n")
        git(repository, "add", ".")
        git(repository, "commit", "--quiet", "--message", name)
        git(repository, "tag", name)
    path = str(package.parent)
    equal = compare(repository, "one:jobs/job.plt", "three:jobs/job.plt", path=path)
    assert equal["same"] and equal["compared"] == 20, equal
    parted = compare(repository, "three:jobs/job.plt", "four:jobs/job.plt", path=path)
    assert parted["at"] == "the output of `dropout`", parted
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
