"""Scripted stalls and ends of real trainings: the cause that is named is right, and never another rank."""

from __future__ import annotations

import os
from collections import Counter
from pathlib import Path

import pytest
from instruments import stall_cases as stalls

CASES = [case for case in stalls.drawn_cases() if case.kind not in stalls.CUTS or os.geteuid() == 0]
FIRST = {
    **{case.kind: case for case in reversed(CASES)},
    "sleep before the second step": next(case for case in CASES if case.kind == "sleep" and case.step == 1),
}


@pytest.mark.slow
@pytest.mark.cases(1)
@pytest.mark.parametrize("kind", FIRST)
def test_the_first_case_of_each_kind(tmp_path: Path, kind: str) -> None:
    verdict, said = stalls.run_case(FIRST[kind], tmp_path)
    assert verdict == "right", f"{FIRST[kind]}\n{said}"
    assert kind != "worker" or "trained 40 steps" in said, f"asking for a stack ended a process of the user's\n{said}"


@pytest.mark.long
def test_all_cases(tmp_path: Path) -> None:
    verdicts = {case: stalls.run_case(case, tmp_path) for case in CASES}
    counts = Counter(verdict for verdict, _ in verdicts.values())
    missed = [f"{verdict}: {case}\n{said}" for case, (verdict, said) in verdicts.items() if verdict != "right"]
    assert counts["right"] >= 0.95 * len(CASES) and not counts["wrong"], "\n".join(missed)
