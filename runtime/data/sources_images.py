"""`images`: a folder with one subfolder of images per class, decoded one by one when they are asked for.

Model: classes are numbered in the order of the folders' names; the images of a class are in the order of their paths.
Pillow opens each as RGB, and it is scaled to `size` x `size` (pictures.py). Numbers are 0 … 1, channels first, as from
torchvision's Resize, CenterCrop and ToTensor.

Limits: each rank holds all paths, packed into one byte string (some 100 bytes an image). Nothing is drawn at random: no
augmentation.
"""

from __future__ import annotations

import os

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from dslc.compiler.common.images import images_in
from dslc.compiler.ir.program import DataStep
from dslc.runtime.data.pictures import decoded
from dslc.runtime.data.samples import SourceError


class ImageSamples:
    """The images below `folder`, which has a folder for each class."""

    by_process = True
    apart = False

    def __init__(self, folder: str, classes: tuple[str, ...], size: int, line: str) -> None:
        self.size, self.line = size, line
        names: list[bytes] = []
        labels: list[NDArray[np.int64]] = []
        for label, name in enumerate(classes):
            found = sorted(os.fsencode(path) for path in images_in(os.path.join(folder, name)))
            names += found
            labels.append(np.full(len(found), label))
        self.targets = torch.from_numpy(np.concatenate(labels)) if labels else torch.empty(0, dtype=torch.int64)
        self._ends = np.cumsum([len(name) for name in names], dtype=np.int64)
        self._names = b"".join(names)  # one object: a worker that is forked shares it

    def __len__(self) -> int:
        return len(self.targets)

    def path(self, index: int) -> str:
        start = int(self._ends[index - 1]) if index else 0
        return os.fsdecode(self._names[start : int(self._ends[index])])

    def batch(self, indices: Tensor, epoch: int = 0) -> tuple[Tensor, Tensor]:
        pixels = np.empty((len(indices), 3, self.size, self.size), np.float32)
        for n, index in enumerate(indices.tolist()):
            path = self.path(index)
            try:
                with open(path, "rb") as stream:
                    pixels[n] = decoded(stream, "RGB", self.size)
            except Exception as error:  # Pillow raises any exception for a damaged file
                raise SourceError(f"{self.line}: {path} cannot be decoded: {error}") from error
        return torch.from_numpy(pixels), self.targets[indices]


def images(step: DataStep) -> ImageSamples | tuple[ImageSamples, ImageSamples]:
    found = step.arguments
    train = ImageSamples(found["train"], found["classes"], found["size"], step.line)
    if not found["validation"]:
        return train
    return train, ImageSamples(found["validation"], found["classes"], found["size"], step.line)
