"""docs/ci.md, followed to the letter: a repository made from nothing with three jobs, pytest, pre-commit and the steps
of the workflow. A job broken on purpose is caught by each of them.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml
from helpers.job_texts import mlp_job_text
from helpers.paths import ROOT

PAGE = (ROOT / "docs" / "ci.md").read_text(encoding="utf-8")
FILES = dict(re.findall(r'```\w+ title="([^"]+)"\n(.*?)```', PAGE, flags=re.S))
PROMISES = re.findall(r"```\n(expect \{.*?)```", PAGE, flags=re.S)[0]
BIN = Path(sys.executable).parent

SMALL = mlp_job_text("32")
NETWORK = "from torch import nn\n\n\ndef make():\n    return nn.Linear(8, 4)\n"

pytestmark = pytest.mark.slow


@pytest.fixture
def repository(tmp_path: Path) -> Path:
    """The repository of the page, committed on `main`, which is also its remote."""
    jobs = {
        "small": SMALL,
        "cluster": SMALL.replace("cpus = 2", "nodes = 2\n  gpus  = 4\n  kind  = h100") + f"\n{PROMISES}",
        "finetune": SMALL.replace("mlp(widths = [32])", 'python("networks:make")'),
    }
    files = {f"jobs/{name}.plt": text for name, text in jobs.items()} | {"jobs/networks.py": NETWORK} | FILES
    for name, text in files.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text)
    for job in jobs:
        called(tmp_path, f"dslc fmt jobs/{job}.plt")
    called(tmp_path, "git init -q -b main && git add . && git -c user.name=a -c user.email=a@b commit -qm jobs")
    called(tmp_path, "git remote add origin . && git fetch -q origin")
    return tmp_path


def called(folder: Path, command: str, *, fails: bool = False) -> str:
    """Returns what a command prints; asserts that it fails or not."""
    surroundings = {name: value for name, value in os.environ.items() if not name.startswith(("PYTEST", "GIT_"))}
    surroundings |= {"PATH": f"{BIN}{os.pathsep}{os.environ['PATH']}", "GITHUB_BASE_REF": "main"}
    surroundings |= {"PRE_COMMIT_HOME": str(folder / ".cache"), "GIT_CONFIG_GLOBAL": os.devnull}
    run = subprocess.run(["bash", "-ec", command], cwd=folder, capture_output=True, text=True, env=surroundings)
    assert (run.returncode != 0) == fails, f"{command}\n{run.stdout}{run.stderr}"
    return run.stdout + run.stderr


def steps() -> dict[str, str]:
    """Returns the commands of the workflow by the names of their steps."""
    workflow: Any = yaml.safe_load(FILES[".github/workflows/jobs.yml"])
    return {step["name"]: step["run"] for step in workflow["jobs"]["check"]["steps"] if "name" in step}


@pytest.mark.long
def test_the_repository_of_the_page_is_green(repository: Path) -> None:
    passed = re.search(r"(\d+) passed", called(repository, "pytest -q"))
    assert passed is not None and int(passed[1]) == 3 + FILES["tests/test_plans.py"].count("def test_")
    assert called(repository, "pre-commit run --all-files").count("Passed") == 2
    commands = steps()
    assert set(commands) == {"check", "sarif", "test", "diff", "comment"}
    assert "::error" not in called(repository, commands["check"])
    called(repository, commands["sarif"])
    assert '"version": "2.1.0"' in (repository / "dslc.sarif").read_text()
    called(repository, commands["diff"])
    assert (repository / "diff.md").read_text() == ""


def test_a_broken_job_is_caught_by_each(repository: Path) -> None:
    job = repository / "jobs" / "small.plt"
    job.write_text(job.read_text().replace("cpus = 2", "cpus = 5"))
    shown = "a global batch of 64 cannot be shared out over 5 data-parallel ranks"
    said = called(repository, "pytest -q jobs", fails=True)
    assert shown in said and "1 failed, 2 passed" in said
    said = called(repository, "git add . && pre-commit run", fails=True)
    assert shown in said and "dslc check" in said and "Failed" in said
    said = called(repository, steps()["check"], fails=True)
    assert "::error file=jobs/small.plt,line=" in said and shown in said
    called(repository, steps()["sarif"])
    assert shown in (repository / "dslc.sarif").read_text()


def test_a_pull_request_says_what_changes(repository: Path) -> None:
    job = repository / "jobs" / "small.plt"
    job.write_text(job.read_text().replace("cpus = 2", "cpus = 4"))
    called(repository, steps()["diff"])
    comment = (repository / "diff.md").read_text()
    assert comment.startswith("### jobs/small.plt\n") and "|" in comment and "cluster" not in comment


def test_a_plan_that_breaks_a_property_is_shown_small(repository: Path) -> None:
    tests = repository / "tests" / "test_plans.py"
    tests.write_text(FILES["tests/test_plans.py"].replace("[1, 2, 4, 8]", "range(1, 65)"))
    said = called(repository, "pytest -q tests", fails=True)
    assert "AssertionError: dslc check jobs/small.plt --set devices.cpus=3 --set data.batch=64\n" in said
