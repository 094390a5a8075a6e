"""The process in which all trials of a job's own code are forked: what it imports for them, and what if it cannot."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import pytest
from helpers.job_texts import job_text

from dslc.dsl.diagnostics import Report
from dslc.dsl.meaning.load import load
from dslc.jobs.check_job import inspect

JOB = job_text(
    model={"network": 'python("own:network")', "loss": 'python("own:loss")'},
    data={"source": 'python("own:Data")', "batch": 4},
    train={"steps": 2, "optimizer": "sgd(lr = 0.1)"},
    log=None,
)
OWN = """
import os
import torch
{before}
import importlib
import heavy
for number in range({parts}):
    importlib.import_module(f"heavy.part{{number}}")

class Data:
    def __len__(self):
        return 8
    def __getitem__(self, index):
        return torch.ones(3) * index, torch.tensor(0)

def network():
    return torch.nn.Linear(3, 3)

def loss(output, target):
    return torch.nn.functional.cross_entropy(output, target, reduction="none")
"""
PARTS = 120  # modules of a large library
# A library that writes the process and the variable that it is imported with, each time.
HEAVY = """
import os
with open({log!r}, "a+") as file:
    file.seek(0)
    imports = len(file.readlines())
    print(os.getpid(), os.environ.get("HEAVY"), file=file)
if imports == {last}:
    os._exit(7)
os.environ["SET_BY_HEAVY"] = "1"
"""


@pytest.fixture
def log(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A job whose module imports an installed library, and the library's record of its imports."""
    monkeypatch.setenv("DSLC_TRACE_CACHE", "off")
    monkeypatch.syspath_prepend(tmp_path / "site-packages")
    (tmp_path / "site-packages" / "heavy").mkdir(parents=True)
    (tmp_path / "job.plt").write_text(JOB)
    return tmp_path / "imports"


def errors(log: Path, *, before: str = "", last: int = -1, parts: int = PARTS) -> list[str]:
    """Returns the errors of a check. The library's import after `last` others ends its process."""
    folder = log.parent / "site-packages" / "heavy"
    (folder / "__init__.py").write_text(HEAVY.format(log=str(log), last=last))
    for number in range(PARTS):
        (folder / f"part{number}.py").touch()
    (log.parent / "own.py").write_text(OWN.format(before=before, parts=parts))
    report = Report()
    inspect(load(str(log.parent / "job.plt")), report, trace=True)
    assert "heavy" not in sys.modules
    return [diagnostic.message for diagnostic in report.errors]


def test_a_library_is_imported_once_for_all_trials_after_the_first(log: Path) -> None:
    assert errors(log) == []
    processes = [line.split()[0] for line in log.read_text().splitlines()]
    assert len(processes) == 2 and len(set(processes)) == 2 and str(os.getpid()) not in processes


def test_a_small_library_is_imported_by_each_trial(log: Path) -> None:
    assert errors(log, parts=1) == []
    assert len(log.read_text().splitlines()) > 4


def test_a_library_that_may_read_a_variable_of_the_users_is_imported_by_each_trial(log: Path) -> None:
    assert errors(log, before='os.environ.setdefault("HEAVY", "mine")') == []
    lines = [line.split() for line in log.read_text().splitlines()]
    assert len(lines) > 4 and {value for _, value in lines} == {"mine"}
    assert len({process for process, _ in lines}) == len(lines)


def test_trials_are_done_without_the_process_where_it_ends(log: Path) -> None:
    assert errors(log, last=1) == []
    assert len(log.read_text().splitlines()) > 4
    assert errors(log, last=len(log.read_text().splitlines())) != []
