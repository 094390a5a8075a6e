"""Bad jobs, each with the codes it deserves beside the offending line (`#! E0301`) and its whole message in a file.

`UPDATE_GOLDEN=1 pytest tests/cli/test_bad_jobs.py` writes the messages anew; read the difference before you commit it.
The mistakes in `bad/traced` show only when the user's own functions are called.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
from helpers.paths import TESTS

from dslc.dsl.codes import explain
from dslc.dsl.show import render
from dslc.jobs.check_job import check_one, presented

FOLDER = TESTS / "bad"
JOBS = sorted(FOLDER.glob("*.plt"))
TRACED = sorted((FOLDER / "traced").glob("*.plt"))


def deserved(text: str) -> set[tuple[int, str]]:
    """(line, code) of every `#! CODE …` in a job."""
    return {
        (number, code)
        for number, line in enumerate(text.splitlines(), 1)
        for codes in re.findall(r"#!(( [EWN]\d{4})+)", line)
        for code in codes[0].split()
    }


@pytest.mark.parametrize("job", JOBS, ids=lambda path: path.stem)
def test_a_bad_job_gets_the_diagnostics_it_deserves(job: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(job.parent)
    report, _ = check_one(job.name, [], trace=job in TRACED)
    shown = presented(report)
    found = {
        (d.span.source.position(d.span.start)[0], d.code) for d in shown if d.span and d.span.source.name == job.name
    }
    assert found == deserved(job.read_text())
    text = render(shown, color=False).rstrip().replace(str(job.parent), "<folder>") + "\n"
    golden = job.with_suffix(".txt")
    if os.environ.get("UPDATE_GOLDEN"):
        golden.write_text(text)
    assert text == golden.read_text()
    assert all(explain(d.code) for d in shown), "every code has its long form"


@pytest.mark.parametrize("job", TRACED, ids=lambda path: path.stem)
@pytest.mark.usefixtures("loaded")
def test_a_bad_job_that_was_traced(job: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    test_a_bad_job_gets_the_diagnostics_it_deserves(job, monkeypatch)


def test_there_are_forty_bad_jobs() -> None:
    assert len(JOBS) >= 40


AUDIT = """
import sys
seen = []
sys.addaudithook(lambda event, args: seen.append((event, args)) if event in FORBIDDEN else None)
FORBIDDEN = {"subprocess.Popen", "os.fork", "os.forkpty", "os.posix_spawn", "os.exec", "os.system", "os.spawn"}
from dslc.jobs.check_job import check_one
for path in sys.argv[1:]:
    check_one(path, [])
assert not seen, seen
assert not {"torch", "networkx", "numpy"} & set(sys.modules)
assert not any(getattr(m, "__file__", None) and "/bad/" in m.__file__ for m in list(sys.modules.values()))
print(len(sys.argv) - 1)
"""


def test_checking_bad_jobs_starts_no_process_and_imports_nothing() -> None:
    run = subprocess.run(
        [sys.executable, "-c", AUDIT, *(path.name for path in JOBS)], cwd=FOLDER, capture_output=True, text=True
    )
    assert run.returncode == 0, run.stderr
    assert run.stdout.strip() == str(len(JOBS))
