"""Networks that make embeddings, data for them, and losses of a whole batch, for jobs of tests."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.data import TensorDataset

TRAIN, VALIDATION, WIDTH = 30, 14, 5


def data() -> tuple[TensorDataset, TensorDataset]:
    """Six numbers, and one of four classes: a pair (train, validation)."""
    random = torch.Generator().manual_seed(3)
    x = torch.randn(TRAIN + VALIDATION, 6, generator=random)
    y = torch.randint(4, (len(x),), generator=random)
    return TensorDataset(x[:TRAIN], y[:TRAIN]), TensorDataset(x[TRAIN:], y[TRAIN:])


def broken() -> tuple[TensorDataset, TensorDataset]:
    """The same, with a number in the second batch that is none."""
    train, held = data()
    train.tensors[0][20, 2] = float("nan")
    return train, held


class Net(nn.Module):
    """An embedding for each sample: of a sample whose first number is above `still`, all zeros."""

    def __init__(self, views: int = 1, still: float = 1e9) -> None:
        super().__init__()
        self.views, self.still = views, still
        self.first, self.second = nn.Linear(6, 8), nn.Linear(8, WIDTH * views, bias=False)
        with torch.no_grad():
            for n, parameter in enumerate(self.parameters()):
                parameter.copy_(torch.sin(torch.arange(parameter.numel()) * 1.3 + n).view_as(parameter) / 2)

    def forward(self, x: Tensor) -> Any:
        made: Tensor = self.second(torch.tanh(self.first(x))) * (x[:, :1] < self.still)
        return made if self.views == 1 else made.view(len(x), self.views, WIDTH)


class Pair(Net):
    """Two embeddings for each sample, as two tensors."""

    def __init__(self) -> None:
        super().__init__(views=2)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        first, second = super().forward(x).unbind(1)
        return first, second


class Noisy(Net):
    """Drops numbers, and takes statistics of a batch; appends a sum of each output to a file."""

    def __init__(self, file: str, p: float = 0.5) -> None:
        super().__init__()
        self.file, self.drop, self.norm = file, nn.Dropout(p), nn.BatchNorm1d(WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        made: Tensor = self.norm(self.drop(super().forward(x)))
        if self.training and made.device.type == "cpu":
            with Path(self.file).open("a") as file:
                file.write(f"{made.detach().double().sum().item():.9f}\n")
        return made


def spread(outputs: Tensor, targets: Tensor) -> Tensor:
    """The mean over a batch of a loss that compares each sample with each, and with the mean of all."""
    distances = (outputs[:, None] - outputs[None]).square().sum(-1)
    alike = (targets[:, None] == targets[None]).float()
    return (alike * distances + (1 - alike) / (1 + distances)).mean() + (outputs - outputs.mean(0)).square().mean()


def each(outputs: Tensor, targets: Tensor) -> Tensor:
    """A loss for each sample, by the others."""
    distances = (outputs[:, None] - outputs[None]).square().sum(-1)
    alike = (targets[:, None] == targets[None]).float()
    return (alike * distances + (1 - alike) / (1 + distances)).mean(1)


def of_pair(outputs: tuple[Tensor, Tensor], targets: Tensor) -> Tensor:
    """The loss of `each`, between two embeddings."""
    first, second = outputs
    return each(first, targets) + (first @ second.T).square().mean(1)


def neither(outputs: Tensor, targets: Tensor) -> Tensor:
    return outputs[:1].sum(0)
