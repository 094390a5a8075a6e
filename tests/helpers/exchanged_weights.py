"""Exchanges of weights by the book, in numpy."""

from __future__ import annotations

import numpy as np

from helpers.exchanges import Array, Weights, flat, mean_of, shares, unflatten


def averaged(before: list[Weights], exchanges: int, pairs: bool) -> list[Weights]:
    """Returns the averages of weights in the exchange after so many: over all, or of pairs."""
    members = len(before)
    if not pairs:
        return [mean_of(before)] * members
    half, found = members // 2, list(before)
    for member in range(half):
        other = half + (exchanges + member) % half
        found[member] = found[other] = mean_of([before[member], before[other]])
    return found


class Outer:
    """Outer weights, with Nesterov's momentum."""

    def __init__(self, weights: Weights, lr: float = 0.7, momentum: float = 0.9) -> None:
        self.like, self.names = weights, tuple(sorted(weights))
        self.lr, self.factor = np.float32(lr), np.float32(momentum)
        self.weights: Array = flat(weights, self.names)
        self.momentum: Array = np.zeros_like(self.weights)

    def step(self, taken: list[Weights]) -> Weights:
        parts = [self.weights - flat(each, self.names) for each in taken]
        difference: Array = np.asarray(np.mean(parts, axis=0, dtype=np.float32))
        self.momentum = np.asarray(self.factor * self.momentum + difference)
        self.weights = np.asarray(self.weights - self.lr * (difference + self.factor * self.momentum))
        return unflatten(self.weights, self.like, self.names)


def through_codes(numbers: Array) -> Array:
    """Returns numbers after they were sent as MinMaxUInt8."""
    low, high = np.float64(numbers.min()), np.float64(numbers.max())
    scale = 255 / (high - low + 1e-7)
    base = np.round(high * scale) - 255
    codes = np.clip(np.round(numbers * scale) - base, 0, 255)
    return ((codes + base) / scale).astype(np.float32)


class Ring:
    """Replicas of each member's weights: its own (1), and those of the members before (0) and after it (2)."""

    def __init__(self, start: Array, members: int) -> None:
        self.members = members
        self.replicas = [[start.copy() for _ in range(3)] for _ in range(members)]

    def exchange(self, taken: list[Array]) -> list[Array]:
        """Returns the weights of the members after an exchange of those after their steps."""
        sent = []
        for weights, (before, own, after) in zip(taken, self.replicas, strict=True):
            sent.append(through_codes(weights + before / 3 + after / 3 - own * np.float32(5 / 3)))
        for member, replicas in enumerate(self.replicas):
            for place in range(3):
                replicas[place] = replicas[place] + sent[(member + place - 1) % self.members]
        return [own.copy() for _, own, _ in self.replicas]


def alone(gradients: list[Weights], count: int) -> list[Weights]:
    """Returns the gradients of a step of so many samples, each of the mean over the rank's own."""
    sizes = [stop - start for start, stop in shares(count, len(gradients))]
    factors = [np.float32(count / (len(gradients) * size)) for size in sizes]
    return [{n: f * g for n, g in each.items()} for each, f in zip(gradients, factors, strict=True)]
