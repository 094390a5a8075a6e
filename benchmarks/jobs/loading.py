"""Two data sets whose samples take longer to make than to train on, and a plain loop over each."""

from __future__ import annotations

import io
import os
import re
import time
import zlib
from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F
from PIL import Image
from torch import Tensor, nn
from torch.nn.utils.rnn import pad_sequence
from torch.utils.data import DataLoader

SAMPLES = 100_000  # more than a measurement takes: no epoch ends in it
PIXELS, CLASSES, WORDS, IGNORED = 64, 10, 4096, -100


class Images:
    """Photographs of 256 x 256, compressed as JPEG, which are decoded and scaled."""

    def __init__(self, stored: int = 64) -> None:
        random = np.random.default_rng(0)
        self._files = []
        for _ in range(stored):
            coarse = Image.fromarray(random.integers(0, 256, (32, 32, 3), np.uint8))
            file = io.BytesIO()
            coarse.resize((256, 256), Image.Resampling.BICUBIC).save(file, "JPEG", quality=90)
            self._files.append(file.getvalue())

    def __len__(self) -> int:
        return SAMPLES

    def __getitem__(self, index: int) -> tuple[Tensor, int]:
        image = Image.open(io.BytesIO(self._files[index % len(self._files)])).convert("RGB")
        pixels = np.array(image.resize((PIXELS, PIXELS), Image.Resampling.BILINEAR))
        return torch.from_numpy(pixels).permute(2, 0, 1).float() / 255, index % CLASSES


def image_network() -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(3, 8, 3, 4), nn.ReLU(), nn.AdaptiveAvgPool2d(4), nn.Flatten(), nn.Linear(128, CLASSES)
    )


class Texts:
    """Pieces of Python's standard library, cut into words whose numbers are predicted."""

    def __init__(self, length: int = 8000) -> None:
        files = sorted(Path(os.__file__).parent.glob("*.py"))
        self._text = "".join(file.read_text(encoding="utf-8", errors="replace") for file in files[:80])
        self._length = length

    def __len__(self) -> int:
        return SAMPLES

    def __getitem__(self, index: int) -> Tensor:
        start = index * 7919 % (len(self._text) - self._length)
        words = re.findall(r"\w+|[^\w\s]", self._text[start : start + self._length])
        return torch.tensor([zlib.crc32(word.encode()) % WORDS for word in words[: 64 + index % 64]])


def padded(samples: list[Tensor]) -> tuple[Tensor, Tensor]:
    inputs = pad_sequence([words[:-1] for words in samples], batch_first=True)
    return inputs, pad_sequence([words[1:] for words in samples], batch_first=True, padding_value=IGNORED)


class TextNetwork(nn.Module):
    def __init__(self, width: int = 8) -> None:
        super().__init__()
        self.embedding, self.head = nn.Embedding(WORDS, width), nn.Linear(width, 64)

    def forward(self, words: Tensor) -> Tensor:
        scores: Tensor = self.head(self.embedding(words))
        return scores


def word_losses(scores: Tensor, words: Tensor) -> tuple[Tensor, Tensor]:
    """Returns the sum of the losses of each word's group, and their number."""
    groups = torch.where(words == IGNORED, words, words % scores.shape[-1]).flatten()
    total = F.cross_entropy(scores.flatten(0, 1), groups, ignore_index=IGNORED, reduction="sum")
    return total, (groups != IGNORED).sum()


def plain(kind: str, workers: int, first: int, last: int) -> float:
    """Trains in a plain loop; returns the milliseconds of a step from `first` to `last`."""
    torch.manual_seed(0)
    torch.set_num_threads(1)
    images = kind == "images"
    model = image_network() if images else TextNetwork()
    dataset, collate = (Images(), None) if images else (Texts(), padded)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    loader: DataLoader[Tensor] = DataLoader(dataset, 32, num_workers=workers, collate_fn=collate)  # type: ignore[arg-type]
    begun = 0.0
    for step, (inputs, targets) in enumerate(loader, 1):
        output = model(inputs)
        if images:
            loss = F.cross_entropy(output, targets)
        else:
            total, number = word_losses(output, targets)
            loss = total / number
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        if step == first:
            begun = time.perf_counter()
        if step == last:
            break
    return 1000 * (time.perf_counter() - begun) / (last - first)
