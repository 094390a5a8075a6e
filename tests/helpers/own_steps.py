"""Steps of a user's own, with networks of two parts, for tests."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn


class Points:
    def __len__(self) -> int:
        return 32

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        random = torch.Generator().manual_seed(index)
        return torch.randn(6, generator=random), torch.tensor(index % 4)


class Pair(nn.Module):
    """A body with batch norm, a head in a list, a scale outside of both; `spare` is used where a batch says so."""

    def __init__(self, norm: bool = True) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.Linear(6, 10), nn.BatchNorm1d(10) if norm else nn.Identity(), nn.Tanh())
        self.heads = nn.ModuleList([Head()])
        self.scale = nn.Parameter(torch.ones(()))


class Head(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.scores, self.spare, self.never = nn.Linear(10, 1), nn.Linear(10, 1), nn.Linear(10, 1)

    def forward(self, hidden: Tensor, rows: Tensor) -> Tensor:
        scores: Tensor = self.scores(hidden)[:, 0]
        if rows.any():  # a rank may have none of these
            scores = scores.index_add(0, rows.nonzero()[:, 0], self.spare(hidden[rows])[:, 0].to(scores.dtype))
        return scores


def step(training: Any, batch: tuple[Tensor, Tensor]) -> Any:
    """One update of the head and the scale, then one of all; both losses go through the body."""
    points, kinds = batch
    model, wanted = training.model, batch[0][:, :3].sum(1)

    def losses() -> Tensor:
        scores: Tensor = model.heads[0](model.body(points), kinds == 0) * model.scale
        return (scores.float() - wanted).square()

    first = losses()
    training.update(first, "heads", "scale")
    second = losses()
    training.update((second.sum(), torch.tensor(len(points))))
    return first, {"second": second}


def some_ranks(training: Any, batch: tuple[Tensor, Tensor]) -> Tensor:
    """Takes what the head gives on the first rank alone."""
    hidden = training.model.body(batch[0])
    scores, losses = training.model.heads[0](hidden, batch[1] == 0), hidden.square().sum(1)
    if training.rank == 0 and training.ranks > 1:
        losses = losses + scores
    training.update(losses)
    return losses
