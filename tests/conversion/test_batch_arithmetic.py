"""The global batch is micro-batch x accumulation x ranks, whichever of them a configuration states."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dslc.conversion.batch_size import BatchSize

SIZES = st.integers(1, 64)


@given(SIZES, SIZES, SIZES, st.sets(st.sampled_from(["micro", "accumulation", "total", "ranks"])))
def test_what_is_not_stated_follows(micro: int, accumulation: int, ranks: int, stated: set[str]) -> None:
    full = {"micro": micro, "accumulation": accumulation, "ranks": ranks, "total": micro * accumulation * ranks}
    sizes = BatchSize(**{name: size for name, size in full.items() if name in stated})
    resolved = sizes.resolved()
    for name in stated:
        assert getattr(resolved, name) == full[name]
    if resolved.total and resolved.micro and resolved.accumulation and resolved.ranks:
        assert resolved.total == resolved.micro * resolved.accumulation * resolved.ranks
    if len(stated) >= 3:
        assert resolved == BatchSize(**full)


@pytest.mark.parametrize(
    "stated, ranks, resolved",
    [  # as DeepSpeed 0.19.8 resolves them
        ({"total": 64, "micro": 4}, 8, (64, 4, 2)),
        ({"total": 64, "accumulation": 4}, 8, (64, 2, 4)),
        ({"micro": 4, "accumulation": 2}, 8, (64, 4, 2)),
        ({"total": 64}, 8, (64, 8, 1)),
        ({"micro": 4}, 8, (32, 4, 1)),
    ],
)
def test_deepspeed_resolves_the_same(stated: dict[str, int], ranks: int, resolved: tuple[int, int, int]) -> None:
    batch = BatchSize(**stated, ranks=ranks).resolved()
    assert (batch.total, batch.micro, batch.accumulation) == resolved


@pytest.mark.parametrize(
    "stated",
    [
        {"total": 64, "micro": 3, "ranks": 8},
        {"total": 64, "micro": 4, "accumulation": 4, "ranks": 8},
        {"total": 64, "micro": 128},
        {"total": 63, "ranks": 8},
        {"total": 64, "micro": 4, "accumulation": 3},
    ],
)
def test_a_contradiction_is_refused(stated: dict[str, int]) -> None:
    with pytest.raises(ValueError, match="global batch"):
        BatchSize(**stated).resolved()
