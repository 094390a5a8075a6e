"""The plugin of pytest: each `.plt` file is a test that checks the job and its promises, once for each combination of
its sweep.

A file is collected below `testpaths`, or if it is named on the command line. `-p no:dslc` switches the plugin off.
This module loads nothing of dslc before a job is collected.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from dslc.dsl.diagnostics import Report


def pytest_addoption(parser: pytest.Parser) -> None:
    group = parser.getgroup("dslc", "jobs of dslc, files *.plt")
    group.addoption(
        "--dslc-locked", action="store_true", help="also check that each job's plan is the one in its .lock"
    )
    group.addoption(
        "--dslc-verify",
        action="store_true",
        help="also train some steps of each job under its plan and in one process, and compare (`dslc verify`)",
    )


def pytest_collect_file(file_path: Path, parent: pytest.Collector) -> JobFile | None:
    if file_path.suffix != ".plt":
        return None
    if not (parent.session.isinitpath(file_path) or _is_below_testpaths(file_path, parent.config)):
        return None
    return JobFile.from_parent(parent, path=file_path)


def _is_below_testpaths(path: Path, config: pytest.Config) -> bool:
    base = config.inipath.parent if config.inipath is not None else config.rootpath
    folders = (folder for pattern in config.getini("testpaths") for folder in (base / ".").glob(pattern))
    return any(path.is_relative_to(folder) for folder in folders)


class JobCheckError(Exception):
    """A job that `dslc check` rejects, or whose verification failed. The text is what the command prints."""


class JobFile(pytest.File):
    """A job: one item for each combination of its sweep, and one for `--dslc-verify`."""

    def collect(self) -> Iterator[pytest.Item]:
        from dslc.dsl.meaning.load import load_each

        _, combinations = load_each(str(self.path))
        for number, loaded in enumerate(combinations):
            settings = ", ".join(loaded.settings)
            name = f"check[{settings}]" if settings else "check"
            yield JobCheck.from_parent(self, name=name, settings=loaded.settings, locked=number == 0)
        if self.config.getoption("dslc_verify"):
            yield JobVerification.from_parent(self, name="verify")


class _JobItem(pytest.Item):
    path: Path

    @property
    def job(self) -> str:
        """Returns the path of the job as messages name it."""
        return os.path.relpath(self.path, self.config.invocation_params.dir)

    def reportinfo(self) -> tuple[Path, int | None, str]:
        return self.path, None, f"{self.job}: {self.name}"

    def repr_failure(self, excinfo: pytest.ExceptionInfo[BaseException], style: object = None) -> str:
        if isinstance(excinfo.value, JobCheckError):
            return str(excinfo.value)
        return str(super().repr_failure(excinfo))


class JobCheck(_JobItem):
    """The `dslc check` of one combination of a job's sweep."""

    def __init__(self, *, settings: tuple[str, ...], locked: bool, **arguments: object) -> None:
        super().__init__(**arguments)  # type: ignore[arg-type]
        self.settings, self.locked = list(settings), locked

    def runtest(self) -> None:
        from dslc.dsl.meaning.load import load
        from dslc.jobs.check_job import check_one

        path = os.path.relpath(self.path)
        report, analysis = check_one(path, self.settings)
        if self.locked and self.config.getoption("dslc_locked") and analysis is not None and not report.errors:
            from dslc.jobs.lock import check_lock

            check_lock(path, load(path), analysis, report)
        text = _rendered(report)
        if report.errors:
            raise JobCheckError(text)
        if text:
            self.add_report_section("call", "dslc check", text)


class JobVerification(_JobItem):
    """A training of some steps of the job, which `dslc verify` compares with one process."""

    def runtest(self) -> None:
        import subprocess
        import sys

        command = [sys.executable, "-P", "-m", "dslc", "verify", os.path.relpath(self.path)]
        run = subprocess.run(command, capture_output=True, text=True)
        if run.returncode:
            raise JobCheckError(run.stdout + run.stderr)
        self.add_report_section("call", "dslc verify", run.stdout)


def _rendered(report: Report) -> str:
    from dslc.dsl.show import render
    from dslc.jobs.check_job import presented

    return render(presented(report), color=False)
