"""What trials of a job's own code told is kept, and taken only where everything that they looked at is the same."""

from __future__ import annotations

import contextlib
import glob
import importlib.util
import json
import os
import py_compile
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable
from importlib.machinery import EXTENSION_SUFFIXES
from pathlib import Path
from types import ModuleType

import numpy
import pytest
import torch

from dslc.compiler.ir.facts import Facts, SourceFacts
from dslc.dsl.meaning.load import load_text
from dslc.probe import dependency_recorder, trial_cache
from dslc.probe.child import in_child
from dslc.probe.dependency_recorder import (
    Dependencies,
    DependencyRecorder,
    combine,
    digest_of,
    digest_of_names,
    is_unchanged,
)
from dslc.probe.trial_cache import TrialCache

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
    both = {"files": {"a": "1", "b": "2"}, "folders": {"c": "3"}, "packages": {}, "environment": {"V": None}}
    assert combine(some, more) == both
    assert combine(some, {"files": {"a": "2"}}) is None
    assert combine(some, {"environment": {"V": "x"}}) is None


def looked_at(work: Callable[[], object], work_folder: str = "") -> Dependencies | None:
    def run_watched() -> object:
        # Libraries that other tests have loaded here are not the work's.
        libraries = {name.partition(".")[0] for name in sys.modules}
        dependency_recorder._OPEN_BY_PYTHON |= libraries
        for name in dependency_recorder._FILE_READERS:
            sys.modules.pop(name, None)
        recorder = DependencyRecorder(work_folder, reads_data=True)
        work()
        return recorder.dependencies()

    answer = in_child(run_watched)
    assert "made" in answer, answer
    dependencies: Dependencies | None = answer["made"]
    return dependencies


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

    def load_library() -> None:
        library = ModuleType("library")  # safetensors, say, which other tests may have loaded here
        library.__file__ = str(tmp_path / f"library{EXTENSION_SUFFIXES[0]}")
        sys.modules["library"] = library

    assert looked_at(load_library) is None


def test_files_in_memory_count_and_devices_do_not() -> None:
    with tempfile.NamedTemporaryFile(dir="/dev/shm") as file:
        file.write(b"1")
        file.flush()

        def work() -> None:
            for path in (file.name, "/dev/null"):
                Path(path).read_bytes()

        dependencies = looked_at(work)
        assert dependencies is not None
        assert dependencies["files"][file.name] == digest_of(file.name) and "/dev/null" not in dependencies["files"]


def test_variables_that_python_reads_for_the_user_count(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DATA_ROOT", "/data")

    def work() -> None:
        os.path.expandvars("$DATA_ROOT/numbers")
        os.path.expanduser("~/numbers")
        shutil.get_terminal_size()
        os.environb.get(b"DATA_PART")
        eval("os.getenv('DATA_SPLIT')")

    dependencies = looked_at(work)
    assert dependencies is not None
    assert dependencies["environment"].keys() == {
        "DATA_ROOT",
        "HOME",
        "COLUMNS",
        "LINES",
        "DATA_PART",
        "DATA_SPLIT",
    }


def load_script() -> None:
    with contextlib.suppress(RuntimeError):  # which reads the file before it finds no script there
        torch.jit.load("labels")


@pytest.mark.parametrize(
    "work",
    [
        lambda: dict(os.environ),  # to which a variable may come
        lambda: glob.glob("*/labels.txt"),
        lambda: list(Path().glob("*/labels.txt")),
        lambda: glob.glob("labels.txt"),
        lambda: os.open("pipe", os.O_RDONLY | os.O_NONBLOCK),
        lambda: torch.from_file("labels", size=1),
        lambda: torch.UntypedStorage.from_file("labels", False, 4),
        load_script,
        lambda: importlib.import_module("PIL._imagingft"),
    ],
)
def test_what_cannot_be_compared_is_not_kept(
    work: Callable[[], object], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "labels").write_bytes(bytes(4))
    os.mkfifo(tmp_path / "pipe")
    assert looked_at(work) is None


def test_a_file_that_torch_maps_after_python_opened_it_counts(tmp_path: Path) -> None:
    file = tmp_path / "weights.pt"
    torch.save({"weight": torch.ones(2)}, file)
    dependencies = looked_at(lambda: torch.load(file, mmap=True))
    assert dependencies is not None
    assert dependencies["files"][str(file)] == digest_of(str(file))


def test_the_source_of_compiled_modules_counts(tmp_path: Path) -> None:
    source = tmp_path / "scale.py"
    source.write_text("SCALE = 1")
    compiled = py_compile.compile(str(source))

    def work() -> None:
        spec = importlib.util.spec_from_file_location("scale", compiled)
        assert spec is not None and spec.loader is not None
        spec.loader.exec_module(importlib.util.module_from_spec(spec))

    dependencies = looked_at(work)
    assert dependencies is not None
    assert dependencies["files"][str(source)] == digest_of(str(source))


@pytest.mark.parametrize("name", ["package/local_settings.py", "local_settings.py"])
def test_a_module_that_could_not_be_imported_counts(tmp_path: Path, name: str) -> None:
    (tmp_path / "package").mkdir()
    attempt = "try:\n    from {} import {}\nexcept ImportError:\n    pass\n"
    text = attempt.format(".", "local_settings") + attempt.format("local_settings", "WIDTH")
    (tmp_path / "package" / "__init__.py").write_text(text)

    def work() -> None:
        sys.path.insert(0, str(tmp_path))
        importlib.import_module("package")

    dependencies = looked_at(work)
    assert dependencies is not None
    (tmp_path / "package" / "__pycache__").mkdir()
    (tmp_path / "run").mkdir()
    assert is_unchanged(dependencies)
    (tmp_path / name).write_text("")
    assert not is_unchanged(dependencies)


def test_files_of_weights_are_part_of_the_key(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(folder)
    monkeypatch.setattr(trial_cache, "users_modules", lambda: iter(()))  # of which the modules of tests are
    job = load_text(JOB.replace("  loss ", '  weights = "w.pt"\n  loss ')).job
    assert job is not None
    source, weights = SourceFacts(), folder / "w.pt"

    def is_found() -> bool:
        return TrialCache(job, source, str(folder), run=False).load() is not None

    TrialCache(job, source, str(folder), run=False).store(Facts(source=source))
    assert is_found()
    weights.write_text("1")
    assert not is_found()
    TrialCache(job, source, str(folder), run=False).store(Facts(source=source))
    assert is_found()
    os.utime(weights, (1, 1))
    assert not is_found()


def test_a_librarys_first_draws_are_seeded() -> None:
    """Also where it is not imported yet."""
    code = (
        "from dslc.probe.trial_cache import _seed_generators as seed; seed(); import numpy; print(numpy.random.rand())"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, check=True)
    assert float(done.stdout) == numpy.random.RandomState(0).rand()
