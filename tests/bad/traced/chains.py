"""Networks that no pipeline can be made of, each for a reason of its own."""

from __future__ import annotations

import torch
from torch import Tensor, nn


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(64, 64)

    def forward(self, x: Tensor) -> Tensor:
        return self.linear(x).tanh()


class Chain(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.enter, self.middle, self.leave = Block(), Block(), nn.Linear(64, 10)

    def forward(self, x: Tensor) -> Tensor:
        return self.leave(self.middle(self.enter(x.flatten(1))))


class Halves(Chain):
    """Computes with a size that is not a multiple of the number of samples."""

    def forward(self, x: Tensor) -> Tensor:
        x = self.enter(x.flatten(1))
        half = (len(x) + 1) // 2
        return self.leave(self.middle(torch.cat([x[half:], x[:half]])))


class Around(Chain):
    """Calls its first block a second time at the end."""

    def forward(self, x: Tensor) -> Tensor:
        return self.leave(self.enter(self.middle(self.enter(x.flatten(1)))))


class Twice(Chain):
    """Calls a block of its second stage again after another block."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(64, 64), nn.Linear(64, 64)

    def forward(self, x: Tensor) -> Tensor:
        return self.leave(self.last(self.enter(self.middle(self.enter(self.first(x.flatten(1)))))))


class Chosen(Chain):
    """Chooses the numbers to pass on in one block, and uses the choice in another."""

    def forward(self, x: Tensor) -> Tensor:
        x = self.enter(x.flatten(1))
        chosen = x > 0
        return self.leave(self.middle(x) * chosen)


class Tempered(Chain):
    """One of its parameters is a number."""

    def __init__(self) -> None:
        super().__init__()
        self.temperature = nn.Parameter(torch.tensor(1.0))

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) * self.temperature


class Normed(nn.Module):
    """Batch statistics of one number of each sample."""

    def __init__(self) -> None:
        super().__init__()
        self.into, self.norm, self.out = nn.Linear(64, 8), nn.BatchNorm1d(8), nn.Linear(8, 10)

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.out(self.norm(self.into(x.flatten(1))))
        return y


class Shifted(nn.Module):
    """Adds a buffer, which stays in float32."""

    def __init__(self) -> None:
        super().__init__()
        self.into, self.out = nn.Linear(64, 8), nn.Linear(8, 10)
        self.register_buffer("shift", torch.zeros(8))

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.out(self.into(x.flatten(1)) + self.shift)
        return y


class Counting(nn.Module):
    """Counts its forward passes, overwrites a mean of its input, and leaves a third buffer as it is."""

    calls: Tensor
    mean: Tensor
    shift: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.into, self.norm, self.out = nn.Linear(64, 8), nn.BatchNorm1d(8), nn.Linear(8, 10)
        self.register_buffer("calls", torch.zeros(()))
        self.register_buffer("mean", torch.zeros(8))
        self.register_buffer("shift", torch.zeros(8))

    def forward(self, x: Tensor) -> Tensor:
        x = self.norm(self.into(x.flatten(1)))
        self.calls += 1
        self.mean = 0.9 * self.mean + 0.1 * x.detach().mean(0)
        y: Tensor = self.out(x + self.shift) / (1 + self.calls)
        return y
