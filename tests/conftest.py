"""What holds for every test: one launcher for each process of pytest, and how examples are drawn."""

from __future__ import annotations

import os
from collections.abc import Iterator

import pytest
from helpers.launcher import PRELOADED, Launcher
from hypothesis import settings

# No test has a time to keep; in CI each run draws the same examples. HYPOTHESIS_PROFILE=fresh draws others.
settings.register_profile("same", settings(deadline=None, derandomize=True))
settings.register_profile("fresh", settings(deadline=None))
settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE", "same"))


@pytest.fixture(scope="session")
def launcher() -> Iterator[Launcher]:
    made = Launcher(*PRELOADED)
    yield made
    made.close()


@pytest.fixture(scope="session")
def loaded() -> None:
    """What tracing needs is loaded, once, and not in each child that traces."""
    from helpers.trained import load_what_traces

    load_what_traces()
