"""Seeds and states of the random generators of a rank and of a sample: torch's, Python's and numpy's."""

from __future__ import annotations

import random
from collections import Counter
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


class DrawingSamples:
    """Samples that draw by `draw` if `draws` says so; `made` counts how often each was made."""

    def __init__(self, draw: Callable[[], float], draws: Callable[[int], bool]) -> None:
        self.draw, self.draws = draw, draws
        self.made: Counter[int] = Counter()

    def __getitem__(self, index: int) -> float:
        self.made[index] += 1
        return self.draw() if self.draws(index) else 0.0


@pytest.mark.parametrize("first", [0, 3, 6])
def test_a_sample_of_a_batch_draws_its_own_numbers_whichever_is_the_first_to_draw(
    draw: Callable[[], float], first: int
) -> None:
    samples = DrawingSamples(draw, lambda index: index >= first and index % 2 == first % 2)
    seeds, drawn = random_numbers.SampleSeeds(), []
    for batch in ((0, 1, 2, 3), (4, 5, 6, 7, 8)):
        seeds.begin_batch()
        drawn += [seeds.make(samples, 1, "train", 0, index) for index in batch]
        seeds.end_batch(1, "train", 0, batch[-1])
        left = draw()  # by a function that makes the batch
        random_numbers.begin_sample(1, "train", 0, batch[-1])
        if samples.draws(batch[-1]):
            draw()
        assert left == draw()
    for index, number in enumerate(drawn):
        random_numbers.begin_sample(1, "train", 0, index)
        assert number == (draw() if samples.draws(index) else 0.0), index
    again = [index for index, count in samples.made.items() if count > 1]
    is_watched = first and draw is not GENERATORS["torch"]  # torch's generator is seeded for each sample
    assert again == ([first] if is_watched else [])
    assert max(samples.made.values()) <= 2


def test_a_sample_that_draws_and_fails_fails_by_its_own_numbers(draw: Callable[[], float]) -> None:
    class Failing(DrawingSamples):
        def __getitem__(self, index: int) -> float:
            raise LookupError(super().__getitem__(index))

    seeds = random_numbers.SampleSeeds()
    seeds.begin_batch()
    assert seeds.make([0.0], 1, "train", 0, 0) == 0.0
    with pytest.raises(LookupError) as found:
        seeds.make(Failing(draw, lambda index: True), 1, "train", 0, 4)
    random_numbers.begin_sample(1, "train", 0, 4)
    assert found.value.args == (draw(),)
