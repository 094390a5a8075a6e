"""Fixtures of all tests: one launcher for each process of pytest, and the settings of hypothesis."""

from __future__ import annotations

import os
from collections.abc import Iterator

import pytest
from helpers.launcher import PRELOADED, Launcher
from helpers.paths import TESTS
from hypothesis import settings

from dslc.runtime.process.vision_library import let_torchvision_load

let_torchvision_load()  # tests import libraries that import it
# No test has a deadline; in CI each run draws the same examples. HYPOTHESIS_PROFILE=fresh draws others.
settings.register_profile("same", settings(deadline=None, derandomize=True))
settings.register_profile("fresh", settings(deadline=None))
settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE", "same"))

os.environ["DSLC_TRACE_CACHE"] = "off"  # what is tested is traced; tests/cli/probe/test_kept.py has a cache of its own


FIRST = ("training", "programs", "cli")  # whose files are the longest, and would make a run wait at its end


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Puts the files of long tests before those of short ones."""

    def place(item: pytest.Item) -> int:
        room = item.path.relative_to(TESTS).parts[0]
        return FIRST.index(room) if room in FIRST else len(FIRST)

    items.sort(key=place)


@pytest.fixture(scope="session")
def launcher() -> Iterator[Launcher]:
    made = Launcher(*PRELOADED)
    yield made
    made.close()


@pytest.fixture(scope="session")
def loaded() -> None:
    """Loads the modules that tracing needs once, and not in each child that traces."""
    from helpers.trained import load_what_traces

    load_what_traces()
