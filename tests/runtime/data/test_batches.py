"""Each rank's batches, step by step: in line, by a thread and by worker processes they are the same."""

from __future__ import annotations

import asyncio
import dataclasses
import threading
from typing import Any

import pytest
import torch
from helpers.gang import gang

from dslc.compiler.ir.program import DataStep, RankPlace
from dslc.runtime.data import batches as module
from dslc.runtime.data.batches import StepBatch, WorkerError, batches, split_batches
from dslc.runtime.data.sampler import micro_batches, steps_per_epoch
from dslc.runtime.data.samples import FetchedSamples, Part, Splits, TensorSamples
from dslc.runtime.process.job_line import during

CPU = torch.device("cpu")
STEP = DataStep(
    source="arrays",
    train_samples=53,
    validation_samples=10,
    split="tail",
    seed=3,
    shuffle=True,
    batch=16,
    last=5,
    workers=0,
)


class Squares:
    """A user's data set: `size` samples, of which one may be broken. It cannot be pickled."""

    def __init__(self, size: int, broken: int = -1, ending: type[BaseException] = ZeroDivisionError) -> None:
        self.size, self.broken, self.ending = size, broken, ending
        self.square = lambda number: number * number

    def __len__(self) -> int:
        return self.size

    def __getitem__(self, index: int) -> tuple[torch.Tensor, int]:
        if index == self.broken:
            raise self.ending(f"sample {index}")
        return torch.full((2,), float(index)), self.square(index)


class SamplesOfArrays(FetchedSamples):
    """Refuses indices in shared memory, which tensors are that come to a worker, and arrays are not."""

    def batch(self, indices: torch.Tensor, epoch: int = 0) -> Any:
        assert not indices.is_shared()
        return super().batch(indices, epoch)


def splits(*, fetched: bool, broken: int = -1, ending: type[BaseException] = ZeroDivisionError) -> Splits:
    numbers, squares = torch.arange(63), Squares(63, broken, ending)
    whole = SamplesOfArrays(squares, "") if fetched else TensorSamples(numbers.float()[:, None], numbers**2)
    return Splits(Part(whole, start=0, length=53), Part(whole, start=53, length=10, split="validation"))


def place(rank: int, ranks: int) -> RankPlace:
    return RankPlace(rank=rank, node=0, local_rank=rank, coordinates={}, data_rank=rank, data_ranks=ranks)


def found(batch: StepBatch) -> tuple[list[list[int]], int, int]:
    for inputs, targets in batch.micro:
        assert torch.equal(inputs[:, 0].long() ** 2, targets)
    return [inputs[:, 0].long().tolist() for inputs, _ in batch.micro], batch.samples, batch.epoch


def seen(workers: int, fetched: bool, rank: int, ranks: int, first: int) -> list[Any]:
    step = dataclasses.replace(STEP, workers=workers)
    return [found(batch) for batch in batches(step, splits(fetched=fetched), place(rank, ranks), 3, first, 10, CPU)]


def expected(rank: int, ranks: int, first: int) -> list[Any]:
    made = []
    for number in range(first, 10):
        epoch, k = divmod(number, steps_per_epoch(STEP))
        pieces = micro_batches(STEP, place(rank, ranks), 3, epoch, k)
        made.append(([piece.tolist() for piece in pieces], 16 if k < 3 else 5, epoch))
    return made


@pytest.mark.parametrize("gathered", [1, 300, 1 << 20])
@pytest.mark.parametrize(("workers", "fetched"), [(0, False), (1, False), (0, True)])
@pytest.mark.parametrize(("rank", "ranks", "first"), [(0, 1, 0), (1, 2, 0), (2, 3, 6)])
def test_steps_are_those_of_the_sampler(
    monkeypatch: pytest.MonkeyPatch, gathered: int, workers: int, fetched: bool, rank: int, ranks: int, first: int
) -> None:
    monkeypatch.setattr(module, "GATHERED", gathered)
    assert seen(workers, fetched, rank, ranks, first) == expected(rank, ranks, first)


ENDINGS = (ZeroDivisionError, SystemExit, KeyboardInterrupt, asyncio.CancelledError)


def by_workers(rank: int) -> Any:
    """Both passes with two worker processes; it runs in a process that has run no parallel operation of torch."""
    step = dataclasses.replace(STEP, workers=2)
    validation: list[Any] = []
    failures: list[str] = []
    for ending in ENDINGS:
        held = splits(fetched=True, broken=60, ending=ending)
        validation = []
        try:
            for inputs, _ in split_batches(step, held, "validation", place(0, 1), 4, CPU):
                validation.append(inputs[:, 0].tolist())
        except WorkerError as error:
            failures.append(f"{error} in {during(error)}")
    return seen(2, True, rank, 2, 3), validation, failures


def test_worker_processes_give_the_same_and_their_failures_come_through() -> None:
    said = (
        "ZeroDivisionError: sample 60",
        "the user's code left by sys.exit('sample 60')",
        "KeyboardInterrupt: sample 60",
        "asyncio.exceptions.CancelledError: sample 60",
    )
    for rank, (steps, validation, failures) in enumerate(gang(2, by_workers)):
        assert steps == expected(rank, 2, 3) and validation == [[53, 54, 55, 56]]
        assert failures == [f"{each} in `dataset[60]`, sample 7 of the validation data" for each in said]


@pytest.mark.parametrize("workers", [0, 1])
@pytest.mark.parametrize("ranks", [1, 3, 12])
def test_validation_is_seen_once(workers: int, ranks: int) -> None:
    step, held = dataclasses.replace(STEP, workers=workers), splits(fetched=False)
    shares = [list(split_batches(step, held, "validation", place(rank, ranks), 4, CPU)) for rank in range(ranks)]
    assert [x for share in shares for inputs, _ in share for x in inputs[:, 0].tolist()] == list(range(53, 63))
    assert all(len(inputs) <= 4 for share in shares for inputs, _ in share)


def test_a_failure_in_the_thread_comes_through() -> None:
    held = Splits(TensorSamples(torch.zeros(9), torch.zeros(9)), splits(fetched=False).validation)
    step = dataclasses.replace(STEP, workers=1)
    with pytest.raises(IndexError):
        list(batches(step, held, place(0, 1), 1, 0, 3, CPU))


def test_the_thread_ends_when_the_training_does() -> None:
    made = batches(dataclasses.replace(STEP, workers=1), splits(fetched=False), place(0, 1), 1, 0, 10**6, CPU)
    next(made)
    (thread,) = [thread for thread in threading.enumerate() if thread.name == "dslc-batches"]
    made.close()  # type: ignore[attr-defined]
    thread.join(10)
    assert not thread.is_alive()
