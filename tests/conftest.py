"""Fixtures of all tests: one launcher for each process of pytest, and the settings of hypothesis."""

from __future__ import annotations

import os
from collections.abc import Iterator

import pytest
from helpers.launcher import PRELOADED, Launcher
from hypothesis import settings

from dslc.runtime.process.vision_library import let_torchvision_load

let_torchvision_load()  # tests import libraries that import it
# No test has a deadline; in CI each run draws the same examples. HYPOTHESIS_PROFILE=fresh draws others.
settings.register_profile("same", settings(deadline=None, derandomize=True))
settings.register_profile("fresh", settings(deadline=None))
settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE", "same"))

os.environ["DSLC_TRACE_CACHE"] = "off"  # what is tested is traced; tests/cli/probe/test_kept.py has a cache of its own


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
