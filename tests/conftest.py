"""Fixtures of all tests: one launcher for each process of pytest, their tiers, and the settings of hypothesis."""

from __future__ import annotations

import atexit
import gc
import os
import shutil
import signal
import sys
import tempfile
from collections import defaultdict
from pathlib import Path

import pytest
from helpers.launcher import Launcher, shared_launcher
from helpers.paths import TESTS
from hypothesis import settings
from instruments.durations import DurationRecorder
from instruments.shared_memory.sitecustomize import VARIABLE

from dslc.runtime.process.vision_library import let_torchvision_load

let_torchvision_load()  # tests import libraries that import it
gc.freeze()  # what has been imported stays: no collection has to go through it
gc.set_threshold(50_000, 20, 20)
# Whoever runs the tests in the background ignores these, and every process that a test starts and interrupts would too.
for number, handler in (
    (signal.SIGINT, signal.default_int_handler),
    (signal.SIGHUP, signal.SIG_DFL),
    (signal.SIGQUIT, signal.SIG_DFL),
):
    if signal.getsignal(number) is signal.SIG_IGN:
        signal.signal(number, handler)
# No test has a deadline; in CI each run draws the same examples. HYPOTHESIS_PROFILE=fresh draws others.
settings.register_profile("same", settings(deadline=None, derandomize=True))
settings.register_profile("fresh", settings(deadline=None))
settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE", "same"))

os.environ["DSLC_TRACE_CACHE"] = (
    "off"  # what is tested is traced; tests/cli/probe/test_trace_cache.py has a cache of its own
)


# What plans predict does not depend on calibrations of whoever runs the tests.
os.environ["XDG_CONFIG_HOME"] = tempfile.mkdtemp(prefix="dslc-configuration-")
atexit.register(shutil.rmtree, os.environ["XDG_CONFIG_HOME"], ignore_errors=True)

FIRST = ("training", "programs", "cli")  # whose files are the longest, and would make a run wait at its end
ONE_CASE = ("training", "runtime")  # of whose tests `make rest` takes one slow case, if no mark says otherwise
STARTS = ("os.fork", "os.forkpty", "os.posix_spawn", "subprocess.Popen")  # the events by which Python starts a process


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--no-processes", action="store_true", help="end each process that a test starts with an error")


def pytest_configure(config: pytest.Config) -> None:
    if not hasattr(config, "workerinput"):  # the process that hears of all tests
        config.pluginmanager.register(DurationRecorder())


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """Says how many groups over shared memory ranks have opened, if it was counted."""
    if counts := os.environ.get(VARIABLE):
        groups = Path(counts).stat().st_size if Path(counts).exists() else 0
        terminalreporter.write_line(f"ranks opened {groups:,} groups over shared memory")


@pytest.hookimpl(tryfirst=True)  # before -m selects
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Puts the files of long tests before those of short ones, and each test into its tier."""

    def place(item: pytest.Item) -> int:
        room = item.path.relative_to(TESTS).parts[0]
        return FIRST.index(room) if room in FIRST else len(FIRST)

    items.sort(key=place)
    assign_tiers(items)


def assign_tiers(items: list[pytest.Item]) -> None:
    """Leaves of the tests that launch ranks only the first case of those that are `core` to `make test`, and to `make
    rest` as many slow cases of a test as its mark `cases` says, evenly spread, or one in the rooms `ONE_CASE`.
    """
    functions: set[str] = set()
    for item in items:
        if "launcher" in getattr(item, "fixturenames", ()):
            function = item.nodeid.partition("[")[0]
            if function in functions or item.get_closest_marker("core") is None:
                item.add_marker("slow")
            if item.get_closest_marker("long") is None:
                functions.add(function)
        elif item.get_closest_marker("core"):
            raise pytest.UsageError(f"{item.nodeid} is `core`, but takes no `launcher`")
    slow_cases: dict[str, list[pytest.Item]] = defaultdict(list)
    for item in items:
        is_limited = item.get_closest_marker("cases") or item.path.relative_to(TESTS).parts[0] in ONE_CASE
        if is_limited and item.get_closest_marker("slow") and not item.get_closest_marker("long"):
            slow_cases[item.nodeid.partition("[")[0]].append(item)
    for cases in slow_cases.values():
        mark = cases[0].get_closest_marker("cases")
        count = mark.args[0] if mark is not None else 1
        kept = {round(n * (len(cases) - 1) / max(count - 1, 1)) for n in range(count)}
        for n in set(range(len(cases))) - kept:
            cases[n].add_marker("long")


@pytest.fixture(scope="session", autouse=True)
def _no_processes(request: pytest.FixtureRequest) -> None:
    def refuse(event: str, _: object) -> None:
        if event in STARTS:
            raise RuntimeError("a test without the mark `processes` starts one")

    if request.config.getoption("--no-processes"):
        sys.addaudithook(refuse)


@pytest.fixture(scope="session")
def launcher() -> Launcher:
    return shared_launcher()


@pytest.fixture(scope="session")
def loaded() -> None:
    """Loads the modules that tracing needs once, and not in each child that traces."""
    from helpers.trained import load_what_traces

    load_what_traces()
