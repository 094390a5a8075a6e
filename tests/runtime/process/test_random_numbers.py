"""Seeds and states of the random generators of a rank and of a sample: torch's, Python's and numpy's."""

from __future__ import annotations

import random
from collections.abc import Callable

import numpy as np
import pytest
import torch

from dslc.runtime.process import random_numbers

GENERATORS: dict[str, Callable[[], float]] = {
    "python": random.random,
    "numpy": np.random.random_sample,
    "torch": lambda: torch.rand((), dtype=torch.float64).item(),
}
RANKS = {"first": (1, 2, 3), "of another seed": (2, 2, 3), "of another rank": (1, 3, 3), "at another step": (1, 2, 4)}
SAMPLES = {
    "first": (1, "train", 2, 3),
    "of another seed": (2, "train", 2, 3),
    "of another part": (1, "validation", 2, 3),
    "in another epoch": (1, "train", 3, 3),
    "another": (1, "train", 2, 4),
}


@pytest.fixture(autouse=True, params=GENERATORS)
def draw(request: pytest.FixtureRequest) -> Callable[[], float]:
    generator: Callable[[], float] = GENERATORS[request.param]
    return generator


def test_a_rank_begins_it_by_seed_rank_and_step(draw: Callable[[], float]) -> None:
    drawn = {}
    for name, where in RANKS.items():
        random_numbers.begin(*where)
        drawn[name] = draw()
        random_numbers.begin(*where)
        assert draw() == drawn[name], name
    assert len(set(drawn.values())) == len(RANKS), drawn


def test_a_sample_begins_it_by_seed_part_epoch_and_index(draw: Callable[[], float]) -> None:
    drawn = {}
    for name, where in SAMPLES.items():
        random_numbers.begin_sample(*where)
        drawn[name] = draw()
        random_numbers.begin_sample(*where)
        assert draw() == drawn[name], name
    assert len(set(drawn.values())) == len(SAMPLES), drawn


def test_what_is_drawn_aside_does_not_move_it(draw: Callable[[], float]) -> None:
    random_numbers.begin(1, 2, 3)
    expected = [draw(), draw()]
    random_numbers.begin(1, 2, 3)
    first = draw()
    with random_numbers.preserve_generators():
        random_numbers.begin_sample(1, "train", 2, 3)
        draw()
    assert [first, draw()] == expected


def test_it_goes_on_from_the_state_that_was_kept(draw: Callable[[], float]) -> None:
    cpu = torch.device("cpu")
    random_numbers.begin(1, 2, 3)
    draw()
    kept = random_numbers.state(cpu)
    expected = [draw(), draw()]
    random_numbers.begin(4, 5, 6)
    random_numbers.restore(kept, cpu)
    assert [draw(), draw()] == expected


def test_torch_and_numpy_do_not_draw_alike_for_a_sample() -> None:
    """Both are the Mersenne Twister, which goes on alike from one number; torch may leave out some of what it draws."""
    random_numbers.begin_sample(1, "train", 2, 3)
    torchs = torch.randint(2**32, (8,)).tolist()
    assert not set(torchs) & set(np.random.randint(2**32, size=16, dtype=np.uint32).tolist())
