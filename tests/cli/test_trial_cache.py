"""What trials of a job's own code told is kept, and taken only where everything that they looked at is the same."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from dslc.probe.child import in_child
from dslc.probe.dependency_recorder import Dependencies, DependencyRecorder, combine, digest_of_names

JOB = """
model {
  network = mlp(widths = [4], classes = 3)
  loss    = python("losses:squares")
}

data {
  source = python("samples:Numbers")
  batch  = 4
}

train {
  steps     = 3
  optimizer = sgd(lr = 0.1)
}
"""
SAMPLES = """
import os, random
import torch
from scale import SCALE
class Numbers:
    def __init__(self):
        self.numbers = [float(open(os.path.join("numbers", name)).read()) for name in sorted(os.listdir("numbers"))]
    def __len__(self):
        return 8
    def __getitem__(self, index):
        return torch.tensor([SCALE * self.numbers[0] + random.random()] * 3), torch.zeros(3)
"""
LOSSES = """
def squares(output, target):
    return (output - target).square().sum(1)
"""
NETWORK = "import torch\ndef make():\n    return torch.nn.Linear(3, 3)\n"
# Runs checks in one process, with a change of a file before each, and prints how often each forked.
CHECKS = """
import contextlib, io, json, os, sys
from dslc.main import main
forks, fork = [], os.fork
def counted():
    forks.append(None)
    return fork()
os.fork = counted
counts = []
for path, text, settings in json.loads(sys.argv[1]):
    if path:
        with open(path, "w") as file:
            file.write(text)
    forks.clear()
    with contextlib.redirect_stdout(io.StringIO()) as output:
        assert main(["check", "job.plt", "--trace", *settings]) == 0
    counts.append([len(forks), output.getvalue()])
print(json.dumps(counts))
"""
Check = tuple[str, str, list[str]]  # a file and its text, or none; settings of the job
SAME: Check = ("", "", [])


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.delenv("DSLC_TRACE_CACHE")
    monkeypatch.delenv("PYTHONPATH", raising=False)  # with it statements are recorded, and nothing is kept
    (tmp_path / "numbers").mkdir()
    (tmp_path / "numbers" / "a.txt").write_text("1")
    for name, text in (("samples", SAMPLES), ("losses", LOSSES), ("scale", "SCALE = 1"), ("network", NETWORK)):
        (tmp_path / f"{name}.py").write_text(text)
    (tmp_path / "job.plt").write_text(JOB)
    return tmp_path


def run_checks(folder: Path, *checks: Check) -> list[tuple[bool, str]]:
    """Returns of each check whether it tried anything, and what it printed."""
    command = [sys.executable, "-c", CHECKS, json.dumps(checks)]
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return [(forks > 0, output) for forks, output in json.loads(done.stdout)]


def test_trials_are_kept_until_a_file_that_they_read_changes(folder: Path) -> None:
    checks = run_checks(
        folder,
        SAME,
        SAME,
        ("scale.py", "SCALE = 2", []),
        SAME,
        ("numbers/a.txt", "3", []),
        SAME,
    )
    assert [tried for tried, _ in checks] == [True, False, True, False, True, False]
    assert len({output for _, output in checks}) == 1


@pytest.mark.slow
def test_another_job_folder_or_module_is_tried(folder: Path) -> None:
    checks = run_checks(
        folder,
        SAME,
        ("", "", ["--set", "data.batch=8"]),
        ("", "", ["--set", 'model.network=python("network:make")']),
        ("", "", ["--set", 'model.network=python("network:make")']),
        ("numbers/b.txt", "1", []),
        ("losses.py", LOSSES.replace("sum(1)", "mean(1)"), []),
        ("torch_extras.py", "", []),  # a module that could be imported
        SAME,
    )
    assert [tried for tried, _ in checks] == [True, True, True, False, True, True, True, False]


@pytest.mark.slow
@pytest.mark.parametrize("line", ["print('made')", "import sqlite3; sqlite3.connect(':memory:')"])
def test_trials_that_do_more_than_compute_are_done_each_time(folder: Path, line: str) -> None:
    checks = run_checks(folder, ("scale.py", f"SCALE = 1\n{line}", []), SAME)
    assert [tried for tried, _ in checks] == [True, True]


def test_what_two_trials_looked_at_is_combined_unless_it_changed() -> None:
    some: Dependencies = {"files": {"a": "1"}, "environment": {"V": None}}
    more: Dependencies = {"files": {"a": "1", "b": "2"}, "folders": {"c": "3"}}
    assert combine(some, more) == {"files": {"a": "1", "b": "2"}, "folders": {"c": "3"}, "environment": {"V": None}}
    assert combine(some, {"files": {"a": "2"}}) is None
    assert combine(some, {"environment": {"V": "x"}}) is None


def looked_at(work: Callable[[], object], own: str = "") -> Dependencies | None:
    def watched() -> object:
        recorder = DependencyRecorder(own, reads_data=True)
        work()
        return recorder.dependencies()

    return in_child(watched)["made"]


@pytest.mark.slow
def test_folders_count_by_their_names_and_compiled_libraries_are_not_trusted(tmp_path: Path) -> None:
    (tmp_path / "data").mkdir()
    (tmp_path / "data" / "a").write_text("1")
    (tmp_path / "own").mkdir()
    (tmp_path / "own" / "batch").write_text("1")

    def work() -> None:
        list((tmp_path / "data").glob("*"))
        (tmp_path / "own" / "batch").read_text()

    dependencies = looked_at(work, str(tmp_path / "own"))
    assert dependencies is not None
    assert dependencies["folders"] == {str(tmp_path / "data"): digest_of_names(str(tmp_path / "data"))}
    assert str(tmp_path / "own" / "batch") not in dependencies["files"]
    (tmp_path / "data" / "b").write_text("1")
    assert dependencies["folders"] != {str(tmp_path / "data"): digest_of_names(str(tmp_path / "data"))}
    assert looked_at(lambda: __import__("safetensors.torch")) is None
