"""Records how long each test takes; `python -m instruments.durations` writes the slowest into CONTRIBUTING.md."""

from __future__ import annotations

import json
from collections import defaultdict

import pytest
from helpers.paths import ROOT

FILE = ROOT / "build" / "durations.json"
PAGE = ROOT / "CONTRIBUTING.md"
BEGIN, END = "<!-- slowest tests, written by `make slowest` -->\n", "<!-- end of the slowest tests -->\n"
LISTED = 20


class DurationRecorder:
    """A plugin of pytest that adds the seconds of each test, with its fixtures, to those of earlier runs in FILE."""

    def __init__(self) -> None:
        self._seconds: dict[str, float] = defaultdict(float)

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        self._seconds[report.nodeid] += report.duration

    def pytest_sessionfinish(self) -> None:
        if self._seconds:
            FILE.parent.mkdir(exist_ok=True)
            FILE.write_text(json.dumps({**recorded(), **self._seconds}, indent=0))


def recorded() -> dict[str, float]:
    return dict(json.loads(FILE.read_text())) if FILE.exists() else {}


def table(seconds: dict[str, float]) -> str:
    slowest = sorted(seconds.items(), key=lambda item: -item[1])[:LISTED]
    rows = "".join(f"| {duration:.0f} | `{name}` |\n" for name, duration in slowest)
    return f"{BEGIN}\n| seconds | test |\n| ---: | --- |\n{rows}{END}"


def main() -> None:
    """Writes the table into the page."""
    before, _, rest = PAGE.read_text(encoding="utf-8").partition(BEGIN)
    _, _, after = rest.partition(END)
    PAGE.write_text(before + table(recorded()) + after, encoding="utf-8")


if __name__ == "__main__":
    main()
