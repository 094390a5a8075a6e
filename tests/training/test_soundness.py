"""Every accepted job runs: jobs drawn at random from a fixed seed, trained and compared with one process."""

from __future__ import annotations

import multiprocessing
import os
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path

import pytest
from instruments.jobs_drawn import draw
from instruments.soundness import Forced, Result, Tally, Trainer

FIRST = 20_000


@pytest.fixture(scope="module")
def trainer(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Trainer]:
    made = Trainer(tmp_path_factory.mktemp("soundness"))
    yield made
    made.close()


def test_a_job_is_a_pure_function_of_its_seed() -> None:
    assert [draw(seed) for seed in range(50)] == [draw(seed) for seed in range(50)]
    assert len({draw(seed).text for seed in range(50)}) == 50


@pytest.mark.cases(3)
@pytest.mark.slow
@pytest.mark.parametrize("seed", range(FIRST, FIRST + 24))
def test_what_is_accepted_trains_as_one_process(trainer: Trainer, seed: int) -> None:
    result = trainer.take(draw(seed))
    assert result.said in ("agrees", "rejected"), f"{result.why}\n{draw(seed).text}"


@pytest.mark.slow
@pytest.mark.parametrize("seed", [110_154, 110_238, 112_309, 127_757])
def test_experts_train_as_in_one_process(trainer: Trainer, seed: int) -> None:
    drawn = draw(seed, own=0.0, odd=0.0, experts=1.0)
    assert "expert = " in drawn.text
    result = trainer.take(drawn)
    assert result.said == "agrees", f"{result.why}\n{drawn.text}"


@pytest.mark.long
def test_a_thousand_jobs(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """`DSLC_SEED=…` draws others, and `DSLC_JOBS=…` more or fewer. `DSLC_SHARES=…` are shares of what is drawn, as
    `"own=0 odd=0 dropout=1"`. Two processes train them, each its half.
    """
    first, jobs = int(os.environ.get("DSLC_SEED", FIRST)), int(os.environ.get("DSLC_JOBS", 1000))
    tally, forced = Tally(), Forced()
    halves = [(tmp_path / str(half), range(first + half, first + jobs, 2)) for half in range(2)]
    with ProcessPoolExecutor(2, multiprocessing.get_context("spawn")) as workers:
        for results, of_forced, resumed in workers.map(_all, *zip(*halves, strict=True)):
            tally.results += results
            forced.results += of_forced
            tally.resumed += resumed
    with capsys.disabled():
        print(f"\n{tally.text()}\n{forced.text()}")
    assert not tally.failed, tally.text()


def _all(folder: Path, seeds: range) -> tuple[list[Result], list[Result], int]:
    """Returns the results of the jobs, of those that were forced, and how many were resumed under another plan."""
    folder.mkdir()
    trainer, results, forced = Trainer(folder), list[Result](), Forced()
    pairs = (pair.split("=") for pair in os.environ.get("DSLC_SHARES", "").split())
    shares = {name: float(share) for name, share in pairs}
    for seed in seeds:
        drawn = draw(seed, **{"compile": 0.02} | shares)
        results.append(trainer.take(drawn))
        if forced.wants(results[-1]):
            forced.results.append(trainer.forced(drawn, results[-1]))
    trainer.close()
    return results, forced.results, trainer.resumed


@pytest.mark.long
@pytest.mark.parametrize("seed", range(30_000, 30_025))
def test_what_is_drawn_is_verified_or_refused(trainer: Trainer, seed: int) -> None:
    """`dslc verify` on jobs of one's own."""
    drawn = draw(seed, own=1.0, odd=0.0)
    said = trainer.verified(drawn)
    assert not said, f"{said}\n{drawn.text}"
