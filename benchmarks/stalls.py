"""Scripted stalls and ends of small trainings: how many causes are right; and what positions cost.

The cases are those of tests/instruments/stall_cases.py.
"""

from __future__ import annotations

import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent.parent / "tests"))

from instruments.stall_cases import EARLY, KINDS, LATER, Case, drawn_cases, run_case

SIDE_BY_SIDE = 2


def nanoseconds_of_a_step(steps: int = 20_000) -> float:
    """Returns what the positions of a step of one micro-batch cost, with the calls that only they need."""
    from dslc.runtime.process.positions import Phase, position_number
    from dslc.runtime.process.stop import RunControl

    enter = RunControl(1).position_writer(0)

    def loss() -> None:
        enter(position_number(Phase.BACKWARD, 1))

    def between() -> None:
        enter(Phase.UPDATE)

    begin = time.process_time_ns()
    for _ in range(steps):
        enter(Phase.BEGIN)
        enter(Phase.FORWARD)
        loss()
        between()
        enter(Phase.RECORD)
        enter(Phase.SAMPLES)
    with_positions = time.process_time_ns() - begin
    begin = time.process_time_ns()
    for _ in range(steps):
        pass
    return (with_positions - (time.process_time_ns() - begin)) / steps


def compare(most: int) -> None:
    """Prints how each of the first `most` cases is judged, the counts, and the overhead."""
    cases = drawn_cases()[:most]
    counts: Counter[tuple[str, str]] = Counter()
    with tempfile.TemporaryDirectory() as name:
        for case, (verdict, said) in _side_by_side(cases, Path(name)):
            counts[case.kind, verdict] += 1
            print(f"{verdict}: {case}", flush=True)
            if verdict != "right":
                print("    " + "\n    ".join(said.splitlines()[-14:]), flush=True)
    for kind in KINDS | EARLY | LATER:
        print(f"{kind}: " + ", ".join(f"{n} {verdict}" for (k, verdict), n in counts.items() if k == kind))
    for verdict in ("right", "open", "wrong"):
        print(f"{verdict}: {sum(n for (_, v), n in counts.items() if v == verdict)} of {len(cases)}")
    cost = min(nanoseconds_of_a_step() for _ in range(20))
    print(f"the positions of a step cost {cost / 1000:.2f} us, {cost / 5e6:.3%} of a step of 5 ms")


def _side_by_side(cases: list[Case], folder: Path) -> Iterator[tuple[Case, tuple[str, str]]]:
    with ThreadPoolExecutor(SIDE_BY_SIDE) as pool:
        yield from zip(cases, pool.map(lambda case: run_case(case, folder), cases), strict=True)
