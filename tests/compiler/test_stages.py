"""The cut into stages, against every cut there is."""

from __future__ import annotations

import itertools

from hypothesis import given
from hypothesis import strategies as st

from dslc.compiler.stages import balance


@given(costs=st.lists(st.integers(0, 20), min_size=1, max_size=9), stages=st.integers(1, 9))
def test_no_cut_has_a_faster_slowest_stage(costs: list[int], stages: int) -> None:
    stages = min(stages, len(costs))
    found = balance(costs, stages)
    assert [n for stage in found for n in stage] == list(range(len(costs)))
    assert len(found) == stages
    assert all(found)

    def slowest(cuts: tuple[int, ...]) -> int:
        return max(sum(costs[a:b]) for a, b in zip((0, *cuts), (*cuts, len(costs)), strict=True))

    best = min(slowest(cuts) for cuts in itertools.combinations(range(1, len(costs)), stages - 1))
    assert max(sum(costs[n] for n in stage) for stage in found) == best
