"""A network with two heads, and metrics of the user's own over their outputs: for tests of every sharding.

Samples and outputs are dicts: the classes of the cells of a picture, and a sequence of words. The metrics keep counts:
a mean intersection over union, a macro F1, and a BLEU of clipped n-grams.
"""

from __future__ import annotations

from collections import Counter
from typing import Any

import torch
from torch import Tensor, nn

CLASSES, WORDS, LENGTH, ORDERS = 4, 7, 6, 3


class Samples:
    """43 samples; a word and a class follow from the numbers."""

    def __len__(self) -> int:
        return 43

    def __getitem__(self, index: int) -> tuple[dict[str, Tensor], dict[str, Any]]:
        random = torch.Generator().manual_seed(index)
        cells, words = torch.randn(3, 5, 5, generator=random), torch.randn(LENGTH, 8, generator=random)
        labels = (cells.sum(0) * 1.2).add(2).clamp(0, CLASSES - 1).long()
        wanted = (words[:, :2].sum(1) * 2).add(3).clamp(0, WORDS - 1).long()
        return {"cells": cells, "words": words}, {"labels": labels, "text": {"words": wanted}}


class Two(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.picture = nn.Sequential(nn.Conv2d(3, 8, 3, padding=1), nn.ReLU(), nn.Conv2d(8, CLASSES, 1))
        self.words = nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, WORDS))

    def forward(self, cells: Tensor, words: Tensor) -> dict[str, Any]:
        return {"out": self.picture(cells), "text": (self.words(words),)}


def loss(output: dict[str, Any], target: dict[str, Any]) -> tuple[Tensor, dict[str, Tensor]]:
    """One number for each sample."""
    cells = nn.functional.cross_entropy(output["out"], target["labels"], reduction="none").mean((1, 2))
    scores = output["text"][0].flatten(0, 1)
    words = nn.functional.cross_entropy(scores, target["text"]["words"].flatten(), reduction="none")
    words = words.view(len(cells), -1).mean(1)
    return cells + words, {"words": words}


class _Counts:
    """Keeps the cells of each class that are right, found, and wanted."""

    states = {"right": "sum", "found": "sum", "wanted": "sum"}  # noqa: RUF012

    def __init__(self) -> None:
        self.right, self.found, self.wanted = (torch.zeros(CLASSES, dtype=torch.int64) for _ in range(3))

    def update(self, output: dict[str, Any], target: dict[str, Any]) -> None:
        found, wanted = output["out"].argmax(1).flatten(), target["labels"].flatten()
        self.right = self.right + found[found == wanted].bincount(minlength=CLASSES)
        self.found = self.found + found.bincount(minlength=CLASSES)
        self.wanted = self.wanted + wanted.bincount(minlength=CLASSES)


class MeanIoU(_Counts):
    def compute(self) -> dict[str, Any]:
        union = self.found + self.wanted - self.right
        each = self.right / union.clamp(min=1)
        return {"mean": each[union > 0].mean(), "each": each}


class F1(_Counts):
    def compute(self) -> Tensor:
        return (2 * self.right / (self.found + self.wanted).clamp(min=1)).mean()


class Bleu:
    """The geometric mean of the shares of n-grams that are in the reference. All sequences are of one length, so that
    there is no brevity penalty.
    """

    states = {"matched": "sum", "total": "sum"}  # noqa: RUF012

    def __init__(self) -> None:
        self.matched, self.total = torch.zeros(ORDERS, dtype=torch.int64), torch.zeros(ORDERS, dtype=torch.int64)

    def update(self, output: dict[str, Any], target: dict[str, Any]) -> None:
        for found, wanted in zip(output["text"][0].argmax(2).tolist(), target["text"]["words"].tolist(), strict=True):
            for n in range(1, ORDERS + 1):
                ours, theirs = grams(found, n), grams(wanted, n)
                self.matched[n - 1] += sum((ours & theirs).values())
                self.total[n - 1] += sum(ours.values())

    def compute(self) -> float:
        return float((self.matched / self.total.clamp(min=1)).clamp(min=1e-9).log().mean().exp())


def grams(words: list[int], n: int) -> Counter[tuple[int, ...]]:
    return Counter(tuple(words[at : at + n]) for at in range(len(words) - n + 1))
