from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn


class Pairs:
    def __len__(self) -> int:
        return 16

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        return torch.full((4,), float(index)), torch.zeros(4)


class Duel(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.one, self.two = nn.Sequential(nn.Linear(4, 4), nn.Tanh()), nn.Linear(4, 1)

    def forward(self, given: Tensor, _: Tensor) -> Tensor:
        scores: Tensor = self.two(self.one(given))[:, 0]
        return scores


def inside(training: Any, batch: tuple[Tensor, Tensor]) -> Tensor:
    losses: Tensor = training.model.one[0](batch[0]).square().sum(1)
    training.update(losses, "one")
    return losses


def draws(training: Any, batch: tuple[Tensor, Tensor]) -> Tensor:
    losses: Tensor = training.model.one(batch[0][torch.randperm(len(batch[0]))]).square().sum(1)
    training.update(losses, "one")
    return losses


class Rows(Pairs):
    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        return torch.full((4,), float(index)), torch.tensor(0)


class Scores(nn.Linear):
    def __init__(self) -> None:
        super().__init__(4, 3)


def against_others(scores: Tensor, _: Tensor) -> Tensor:
    return nn.functional.cross_entropy(scores @ scores.T, torch.arange(len(scores)), reduction="none")


def of_noisy(scores: Tensor, target: Tensor) -> Tensor:
    noisy = scores + 0.1 * torch.poisson(torch.ones_like(scores))
    return nn.functional.cross_entropy(noisy, target, reduction="none")
