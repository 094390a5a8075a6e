from __future__ import annotations

from collections.abc import Iterator

import pytest
from launcher import Launcher


@pytest.fixture(scope="session")
def launcher() -> Iterator[Launcher]:
    made = Launcher()
    yield made
    made.close()
