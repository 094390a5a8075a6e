"""Streams of a user's own, for tests: `python("own_streams:…")`. A sample of class `c` is near unit vector `c`."""

from __future__ import annotations

import random
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor
from torch.utils.data import Dataset, IterableDataset, get_worker_info

Sample = tuple[Tensor, int]


def sample(number: int, noise: float = 0.0) -> Sample:
    drawn = torch.randn(6, generator=torch.Generator().manual_seed(number))
    return drawn + 3 * torch.eye(6)[number % 3] + noise, number % 3


class Plain(IterableDataset[Sample]):
    """One stream, which deals itself out among the workers of a DataLoader as torch's documentation shows."""

    def __init__(self, size: int) -> None:
        self.size = size

    def __iter__(self) -> Iterator[Sample]:
        info = get_worker_info()
        first, by = (info.id, info.num_workers) if info else (0, 1)
        return (sample(n) for n in range(first, self.size, by))


class Parts:
    """Shards of unequal lengths; each sample has noise from Python's generator."""

    def __init__(self, shards: int = 4, size: int = 10, noise: float = 0.1) -> None:
        self.shards, self.size, self.noise = shards, size, noise

    def shard(self, number: int) -> Iterator[Sample]:
        for n in range(self.size + number):
            yield sample(100 * number + n, self.noise * random.random())


class Cursor(Iterator[Sample]):
    """An iterator with a state, which counts how many samples it has made."""

    made = 0

    def __init__(self, number: int, size: int) -> None:
        self.number, self.size, self.at = number, size, 0

    def __next__(self) -> Sample:
        if self.at == self.size:
            raise StopIteration
        Cursor.made += 1
        self.at += 1
        return sample(100 * self.number + self.at)

    def state_dict(self) -> dict[str, Any]:
        return {"at": self.at}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.at = state["at"]


class Stateful(Parts):
    def shard(self, number: int) -> Cursor:
        return Cursor(number, self.size + number)


class Broken(Parts):
    def shard(self, number: int) -> Iterator[Sample]:
        for n, each in enumerate(super().shard(number)):
            if number == 3 and n == 5:
                raise OSError("0003.tar is cut off")
            yield each


class Empty(Parts):
    def shard(self, number: int) -> Iterator[Sample]:
        return iter(()) if number == 1 else super().shard(number)


class Ends(IterableDataset[Sample]):
    """A stream that gives fewer samples each time."""

    def __init__(self) -> None:
        self.left = 60

    def __iter__(self) -> Iterator[Sample]:
        self.left -= 20
        return (sample(n) for n in range(self.left))


class Whole(Dataset[Sample]):
    def __len__(self) -> int:
        return 20

    def __getitem__(self, index: int) -> Sample:
        return sample(index)


def plain(size: int = 50) -> Plain:
    return Plain(size)


def parts(**given: Any) -> Parts:
    return Parts(**given)


def stateful(**given: Any) -> Stateful:
    return Stateful(**given)


def broken() -> Broken:
    return Broken()


def empty() -> Empty:
    return Empty()


def ends() -> Ends:
    return Ends()


def pair(**given: Any) -> tuple[Parts, Parts]:
    """Two streams, of which the second is finite, for validation."""
    return Parts(**given), Parts(shards=3, size=5, noise=0)


def beside_a_set() -> tuple[Parts, Whole]:
    return Parts(), Whole()


def triple() -> tuple[Parts, Whole, Whole]:
    return Parts(), Whole(), Whole()


class Far(Whole):
    """Fewer samples, all of them noisy."""

    def __len__(self) -> int:
        return 7

    def __getitem__(self, index: int) -> Sample:
        return sample(index, noise=1.5)


def sets() -> tuple[Whole, dict[str, Whole]]:
    """Two validation sets, by name."""
    return Whole(), {"clean": Whole(), "far": Far()}


def once() -> Iterator[Sample]:
    return (sample(n) for n in range(20))
