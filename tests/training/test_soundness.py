"""Every accepted job runs: jobs drawn at random from a fixed seed, trained and compared with one process."""

from __future__ import annotations

import os
from collections.abc import Iterator

import pytest
from helpers.jobs_drawn import draw
from helpers.soundness import Forced, Tally, Trainer

FIRST = 20_000


@pytest.fixture(scope="module")
def trainer(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Trainer]:
    made = Trainer(tmp_path_factory.mktemp("soundness"))
    yield made
    made.close()


def test_a_job_is_a_pure_function_of_its_seed() -> None:
    assert [draw(seed) for seed in range(50)] == [draw(seed) for seed in range(50)]
    assert len({draw(seed).text for seed in range(50)}) == 50


@pytest.mark.parametrize("seed", range(FIRST, FIRST + 30))
def test_what_is_accepted_trains_as_one_process(trainer: Trainer, seed: int) -> None:
    result = trainer.take(draw(seed))
    assert result.said in ("agrees", "rejected"), f"{result.why}\n{draw(seed).text}"


@pytest.mark.long
def test_a_thousand_jobs(trainer: Trainer, capsys: pytest.CaptureFixture[str]) -> None:
    """`DSLC_SEED=…` draws others."""
    first = int(os.environ.get("DSLC_SEED", FIRST))
    tally, forced = Tally(), Forced()
    for seed in range(first, first + 1000):
        drawn = draw(seed, compile=0.02)
        result = trainer.take(drawn)
        tally.results.append(result)
        if forced.wants(result):
            forced.results.append(trainer.forced(drawn, result))
    with capsys.disabled():
        print(f"\n{tally.text()}\n{forced.text()}")
    assert not tally.failed, tally.text()
