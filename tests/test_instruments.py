"""The instruments: statements that processes run are recorded in whatever way they end, slow tests are listed, and a
command in a fork is one in a fresh interpreter.
"""

import inspect
import os
import subprocess
import sys
from pathlib import Path

import pytest
from helpers.commands import dslc
from helpers.launcher import READ_LATER, shared_launcher
from helpers.paths import ROOT, TESTS
from instruments import covered, durations
from instruments.coverage.sitecustomize import VARIABLE, offsets
from instruments.shared_memory import sitecustomize as shared_memory

from dslc.dsl import words

# A rank that is killed after its work, as a fork of a process that has loaded dslc.
KILLED = """
import os, signal
from dslc.dsl import words
if os.fork() == 0:
    {work}
    os.kill(os.getpid(), signal.SIGKILL)
os.wait()
"""
WORDS = ROOT / "dsl" / "words.py"


def lines_of_killed(work: str, shared: Path) -> set[int]:
    """Returns the lines of dsl/words.py in the shared file after a killed process."""
    path = os.pathsep.join([str(TESTS / "instruments" / "coverage"), os.environ.get("PYTHONPATH", "")])
    env = {**os.environ, VARIABLE: str(shared), "PYTHONPATH": path}
    subprocess.run([sys.executable, "-c", KILLED.format(work=work)], env=env, check=True)
    table, _ = offsets()
    return {place - table[str(WORDS)] for place in covered.executed(shared)}


def test_a_killed_process_has_recorded_its_statements(tmp_path: Path) -> None:
    before = lines_of_killed("pass", tmp_path / "before")
    after = lines_of_killed("words.quoted('text')", tmp_path / "after")
    source, first = inspect.getsourcelines(words.quoted)
    assert first in before and after - before == set(range(first + 1, first + len(source)))


@pytest.mark.slow
def test_jobs_take_shared_memory_where_it_is_asked_for(tmp_path: Path) -> None:
    """Of jobs that name no backend, in all processes; the groups that ranks open are counted."""
    folder, counts = TESTS / "instruments" / "shared_memory", tmp_path / "counts"
    env = {**os.environ, shared_memory.VARIABLE: str(counts), "PYTHONPATH": str(folder)}
    job = ROOT / "examples" / "digits.plt"
    settings = ("--set", "devices.cpus=2", "--set", "train.steps=1", "--set", "train.epochs=none")
    assert "shared_memory on cpu" in dslc("plan", job, env=env).stdout
    result = dslc("run", job, *settings, "--out", tmp_path / "run", env=env)
    assert result.returncode == 0, result
    assert counts.read_bytes() == b".."


def test_the_slowest_tests_are_listed() -> None:
    seconds = {f"tests/test_a.py::test_{n}": float(n) for n in range(30)}
    listed = durations.table(seconds).splitlines()
    assert sum("::" in line for line in listed) == durations.LISTED
    assert listed[4:6] == ["| 29 | `tests/test_a.py::test_29` |", "| 28 | `tests/test_a.py::test_28` |"]


def test_make_test_has_the_first_case_of_a_core_test_and_what_launches_no_rank() -> None:
    file = "tests/exchange/test_low_precision.py"
    command = [sys.executable, "-m", "pytest", "--collect-only", "--quiet", file, "-m"]
    plain = {name: value for name, value in os.environ.items() if name != "PYTEST_ADDOPTS"}
    core, rest = (
        {line.removeprefix(f"{file}::test_") for line in listed.splitlines() if line.startswith(file)}
        for marks in ("not slow and not long", "slow and not long")
        for listed in [subprocess.run([*command, marks], cwd=ROOT, env=plain, capture_output=True, text=True).stdout]
    )
    alone = {f"the_rule_of_the_test_brings_members_together[{members}]" for members in (2, 3, 4)}
    assert core == {"replicas_advance_by_what_was_sent[2-1]"} | alone
    others = {f"replicas_advance_by_what_was_sent[{case}]" for case in ("3-1", "4-1", "4-2")}
    assert rest == {"nodes_sum_exactly_and_are_members_of_the_ring"} | others


# Shows the folders of modules, the folder, the arguments and two variables that a network of a user's sees.
SEES = """
import os, sys
def make():
    raise ValueError([os.environ["SEEN"], os.environ["TORCHINDUCTOR_CACHE_DIR"], os.getcwd(), sys.argv, sys.path])
"""


@pytest.mark.parametrize(
    ("words", "input", "status"),
    [
        (("fmt", "-"), "a{b=1}", 0),
        (("fmt", "-"), "a{b=", 1),
        (("nonsense",), None, 2),
        (("check", "job.plt", "--trace"), None, 1),
    ],
)
def test_a_forked_command_is_a_fresh_one(
    words: tuple[str, ...], input: str | None, status: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "own.py").write_text(SEES)
    (tmp_path / "job.plt").write_text(
        'model { network = python("own:make"), loss = cross_entropy() }\ndata { source = digits(), batch = 8 }\n'
        "train { steps = 1, optimizer = sgd(lr = 0.1) }\n"
    )
    monkeypatch.setenv("SEEN", "seen by both")
    shared_launcher()  # which has another value of the next one
    monkeypatch.setenv(READ_LATER, str(tmp_path))
    fresh = dslc(*words, cwd=tmp_path, input=input, fresh=True)
    monkeypatch.setattr(subprocess, "run", None)  # of what is not forked
    forked = dslc(*words, cwd=tmp_path, input=input)
    assert (forked.returncode, forked.stdout, forked.stderr) == (fresh.returncode, fresh.stdout, fresh.stderr)
    assert fresh.returncode == status and ("seen by both" in fresh.stderr) == ("--trace" in words)
