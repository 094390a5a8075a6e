"""Data of unequal lengths, and the numbers by which samplers order it, as users write them."""

from __future__ import annotations

import torch
from torch import Tensor, nn


def weights(samples: int) -> list[float]:
    """A weight for each sample."""
    return [1.0 + n % 5 for n in range(samples)]


class Ragged:
    """Sequences of 1 to 40 numbers, whose target is the class of their sum."""

    def __len__(self) -> int:
        return 48

    def __getitem__(self, index: int) -> tuple[Tensor, int]:
        made = torch.Generator().manual_seed(index)
        values = torch.randn(1 + index * 7 % 40, generator=made)
        return values, int(values.sum() > 0)


def length(sample: tuple[Tensor, int]) -> int:
    return len(sample[0])


def padded(samples: list[tuple[Tensor, int]]) -> tuple[dict[str, Tensor], Tensor]:
    lengths = torch.tensor([len(values) for values, _ in samples])
    values = nn.utils.rnn.pad_sequence([values for values, _ in samples], batch_first=True)
    return {"values": values, "lengths": lengths}, torch.tensor([target for _, target in samples])


class Pooled(nn.Module):
    """The class of a sequence, by the mean of its numbers, beside how much of its row is padding."""

    def __init__(self) -> None:
        super().__init__()
        self.hidden, self.head = nn.Linear(1, 8), nn.Linear(8, 2)

    def forward(self, values: Tensor, lengths: Tensor) -> tuple[Tensor, Tensor]:
        there = torch.arange(values.shape[1]) < lengths[:, None]
        hidden = torch.tanh(self.hidden(values[:, :, None])) * there[:, :, None]
        return self.head(hidden.sum(1) / lengths[:, None]), (~there).sum(1).float()


def pooled_loss(output: tuple[Tensor, Tensor], target: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
    return nn.functional.cross_entropy(output[0], target, reduction="none"), {"padding": output[1].mean()}
