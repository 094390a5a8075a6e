"""Exchanges of momenta by the book, with their optimizer, in numpy."""

from __future__ import annotations

import numpy as np

from helpers.exchanged_gradients import coded
from helpers.exchanges import Array, Weights, buckets_of, flat, unflatten

ALONE = 2  # updates of plain Adam
RATE, BETAS, EPS = np.float32(0.01), (np.float32(0.9), np.float32(0.999)), np.float32(1e-8)


def signed(row: Array, real: int) -> Array:
    """Returns a row, of whose numbers the first `real` are no filling, as signs and the mean of absolute values."""
    size = np.abs(row[:real]).mean(dtype=np.float32) if real else np.float32(0)
    return np.where(row >= 0, size, -size)


class Momenta:
    """The exchange of one piece of a bucket, of which the first `real` numbers are no filling."""

    def __init__(self, kind: str, members: int, size: int, real: int) -> None:
        unit = 8 if kind == "onebit_adam" else 1
        chunk = -(-size // (members * unit)) * unit
        self.kind, self.size, self.members, self.chunk = kind, size, members, chunk
        self.real = [min(max(real - n * chunk, 0), chunk) for n in range(members)]
        self.worker = np.zeros((members, members, chunk), np.float32)
        self.server = np.zeros((members, chunk), np.float32)

    def agree(self, momenta: list[Array]) -> Array:
        left = self.members * self.chunk - self.size
        rows = np.stack([np.pad(m, (0, left)).reshape(-1, self.chunk) for m in momenta])
        if self.kind == "qadam":
            found = [
                coded(np.asarray(np.mean([coded(row) for row in rows[:, n]], axis=0, dtype=np.float32)))
                for n in self.owners
            ]
            return np.concatenate(found)[: self.size]
        rows += self.worker
        sent = np.stack([[signed(row, real) for row, real in zip(each, self.real, strict=True)] for each in rows])
        self.worker = self._error(rows - sent)
        mean = sent.mean(axis=0, dtype=np.float32) + self.server
        agreed = np.stack([signed(mean[n], self.real[n]) for n in self.owners])
        self.server = self._error(mean - agreed)
        return agreed.reshape(-1)[: self.size]

    @property
    def owners(self) -> range:
        return range(self.members)

    def _error(self, left: Array) -> Array:
        for n in self.owners:
            left[..., n, self.real[n] :] = 0
        return left


class Adam:
    """The optimizer of all ranks, which have the same weights; `rate` and `decay` may be a number for each of these."""

    def __init__(
        self,
        start: Weights,
        ranks: int,
        kind: str,
        *,
        pieces: int = 1,
        rate: Array | np.float32 = RATE,
        decay: Array | float = 0.0,
        alone: int = ALONE,
        eps: np.float32 = EPS,
    ) -> None:
        self.like, self.names, self.pieces, self.alone = start, tuple(sorted(start)), pieces, alone
        self.rate, self.decay, self.eps = rate, np.asarray(decay, np.float32), eps
        self.x = flat(start, self.names)
        self.m, self.v = np.zeros_like(self.x), np.zeros_like(self.x)
        self.updates = 0
        self.buckets = [sum(start[name].size for name in names) for names in buckets_of(start, self.names)]
        self.exchanges = [self._pieces(kind, ranks // pieces, size) for size in self.buckets]

    def _pieces(self, kind: str, members: int, size: int) -> list[Momenta]:
        piece = -(-size // self.pieces)
        return [Momenta(kind, members, piece, min(size - n * piece, piece)) for n in range(self.pieces)]

    def step(self, gradients: list[Weights]) -> Weights:
        """Returns the weights after an update by the gradients of all ranks."""
        flats = [flat(each, self.names) for each in gradients]
        t = self.updates = self.updates + 1
        one, two = (np.float32(1) - beta for beta in BETAS)
        if t <= self.alone:
            g = np.mean(flats, axis=0, dtype=np.float32) + self.decay * self.x
            self.m = self.m + one * (g - self.m)
            self.v = BETAS[1] * self.v + two * g * g
        else:
            of_nodes = [flats[n : n + self.pieces] for n in range(0, len(flats), self.pieces)]
            nodes = [np.mean(each, axis=0, dtype=np.float32) + self.decay * self.x for each in of_nodes]
            self.m = self._exchange_momenta([self.m + one * (g - self.m) for g in nodes])
            self.m = np.where(self.v == 0, np.float32(0), self.m)
        first = 1 - 0.9**t
        second = 1 - 0.999 ** min(t, self.alone)
        root = np.sqrt(self.v) / np.float32(second**0.5) + self.eps
        self.x = self.x - self.rate * self.m / np.float32(first) / root
        return unflatten(self.x, self.like, self.names)

    def _exchange_momenta(self, momenta: list[Array]) -> Array:
        if len(momenta) == 1 == self.pieces:
            return momenta[0]
        found, start = list[Array](), 0
        for size, exchanges in zip(self.buckets, self.exchanges, strict=True):
            padded = [np.pad(m[start : start + size], (0, -size % self.pieces)) for m in momenta]
            cut = [each.reshape(self.pieces, -1) for each in padded]
            agreed = [each.agree([m[n] for m in cut]) for n, each in enumerate(exchanges)]
            found.append(np.concatenate(agreed)[:size])
            start += size
        return np.concatenate(found)
