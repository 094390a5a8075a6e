"""Networks, losses and data for bad jobs: samples that are structures, and a network that looks at numbers."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn


class Pairs:
    """Samples ({left, right}, target), all alike."""

    def __len__(self) -> int:
        return 32

    def __getitem__(self, index: int) -> tuple[dict[str, Tensor], Tensor]:
        return {"left": torch.ones(4), "right": torch.ones(4)}, torch.tensor(index % 2)


class Wholes(Pairs):
    """Samples that are no pairs."""

    def __getitem__(self, index: int) -> dict[str, Tensor]:  # type: ignore[override]
        return super().__getitem__(index)[0]


class Uneven(Pairs):
    def __getitem__(self, index: int) -> tuple[dict[str, Tensor], Tensor]:
        return {"left": torch.ones(4 + index), "right": torch.ones(4)}, torch.tensor(0)


class Beside(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.tower = nn.Linear(4, 2)

    def forward(self, left: Tensor, right: Tensor) -> Tensor:
        scores: Tensor = self.tower(left) - self.tower(right)
        return scores


class Looking(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Flatten(), nn.Linear(64, 10))

    def forward(self, pictures: Tensor) -> Tensor:
        scores: Tensor = self.layers(pictures)
        return scores if pictures.max() > 0 else -scores


def mean(scores: Tensor, target: Tensor) -> Tensor:
    return nn.functional.cross_entropy(scores, target)


class Both(Beside):
    def forward(self, left: Tensor, right: Tensor) -> dict[str, Tensor]:  # type: ignore[override]
        return {"scores": super().forward(left, right)}


def noisy(samples: list[tuple[dict[str, Tensor], Tensor]]) -> tuple[dict[str, Tensor], Tensor]:
    """Draws its own numbers."""
    inputs = {name: torch.stack([given[name] for given, _ in samples]) for name in ("left", "right")}
    return {**inputs, "left": inputs["left"] + torch.randn(len(samples), 4)}, torch.stack([t for _, t in samples])


def distance(output: Tensor, target: Tensor) -> Tensor:
    return (output.sum(1) - target).abs()


def stacked(samples: list[tuple[dict[str, Tensor], Tensor]]) -> tuple[dict[str, Tensor], Tensor]:
    inputs = {name: torch.stack([given[name] for given, _ in samples]) for name in ("left", "right")}
    return inputs, torch.stack([target for _, target in samples])


class Long(Beside):
    """An output that could be longer for some batches than for others."""

    def forward(self, left: Tensor, right: Tensor) -> Tensor:
        return super().forward(left, right)[:, None].repeat(1, 3, 1)


def mean_distance(outputs: Tensor, targets: Tensor) -> Tensor:
    return (outputs.sum((1, 2)) - targets).abs().mean()


def per_batch(samples: list[tuple[dict[str, Tensor], Tensor]]) -> tuple[dict[str, Tensor], Tensor]:
    """Has one row for a whole batch."""
    inputs, targets = stacked(samples)
    return {**inputs, "right": inputs["right"].sum(0)}, targets


def errors() -> Any:
    import torchmetrics

    return torchmetrics.MeanSquaredError()


def summed(output: dict[str, Tensor], target: Tensor) -> Tensor:
    return sum(each.sum(1) for each in output.values()) - target
