"""Data of unequal lengths, and the numbers by which samplers order it, as users write them."""

from __future__ import annotations

import torch
from torch import Tensor, nn


def weights(samples: int) -> list[float]:
    """A weight for each sample."""
    return [1.0 + n % 5 for n in range(samples)]


class Ragged:
    """Sequences of 1 to 40 numbers, whose target is the class of their sum."""

    def __init__(self, more: int = 0) -> None:
        self.more = more

    def __len__(self) -> int:
        return 48 + self.more

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


# ------------------------------------------------------------------------------------------------- masks in a batch


class Tagged:
    """Sequences of 2 to 13 words, of which few have a tag: in every second sample one, in the others nearly all."""

    def __len__(self) -> int:
        return 64

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        made = torch.Generator().manual_seed(index)
        words = torch.randint(0, 11, (2 + index * 5 % 12,), generator=made)
        kept = torch.rand(len(words), generator=made) < (0.05 if index % 2 else 0.9)
        kept[0] = True
        return words, torch.where(kept, words % 3, -100)


def together(samples: list[tuple[Tensor, Tensor]]) -> tuple[dict[str, Tensor], Tensor]:
    words = nn.utils.rnn.pad_sequence([words for words, _ in samples], batch_first=True)
    tags = nn.utils.rnn.pad_sequence([tags for _, tags in samples], batch_first=True, padding_value=-100)
    return {"words": words, "mask": (tags != -100)}, tags


class Tagger(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embedding, self.head = nn.Embedding(11, 6), nn.Linear(6, 3)

    def forward(self, words: Tensor, mask: Tensor) -> Tensor:
        scores: Tensor = self.head(torch.tanh(self.embedding(words)))
        return scores


def masked(output: Tensor, target: Tensor) -> tuple[Tensor, Tensor]:
    """The sum over what is kept, and how many that is."""
    kept = target != -100
    return nn.functional.cross_entropy(output[kept], target[kept], reduction="sum"), kept.sum()
