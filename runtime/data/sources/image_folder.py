"""`images`: a folder with one subfolder of images per class, decoded one by one when they are asked for.

Model: classes are numbered in the order of the folders' names; the images of a class are in the order of their paths.
Pillow opens each as RGB, and it is scaled to `size` x `size` (images.py). Numbers are 0 … 1, channels first, as from
torchvision's Resize, CenterCrop and ToTensor.

Limits: each rank holds all paths, packed into one byte string (some 100 bytes an image).
"""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import IO, TYPE_CHECKING, TypeVar

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from dslc.compiler.facts.image_files import images_in
from dslc.compiler.facts.untrusted_files import open_file
from dslc.compiler.ir.program import DataStep
from dslc.runtime.data.images import decoded, opened
from dslc.runtime.data.samples import SourceError

if TYPE_CHECKING:
    from PIL import Image

T = TypeVar("T")


class ImageSamples:
    """The images below `folder`, which has a folder for each class."""

    by_process = True
    is_structure = False

    def __init__(self, folder: str, classes: tuple[str, ...], size: int, line: str, resize: int | None = None) -> None:
        self.size, self.resize, self.line = size, resize, line
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
            pixels[n] = self._read_image(index, lambda stream: decoded(stream, "RGB", self.size, self.resize))
        return torch.from_numpy(pixels), self.targets[indices]

    def picture(self, index: int) -> tuple[Image.Image, Tensor]:
        return self._read_image(index, lambda stream: opened(stream, "RGB")), self.targets[index]

    def place(self, indices: Tensor) -> list[str]:
        return [self.path(index) for index in indices.tolist()]

    def _read_image(self, index: int, read: Callable[[IO[bytes]], T]) -> T:
        path = self.path(index)
        try:
            with open_file(path) as stream:
                return read(stream)
        except Exception as error:  # Pillow raises any exception for a damaged file
            raise SourceError(f"{self.line}: {path} cannot be decoded: {error}") from error


def images(step: DataStep) -> ImageSamples | tuple[ImageSamples, ImageSamples]:
    found = step.arguments
    how = found["classes"], found["size"], step.line, found["resize"]
    train = ImageSamples(found["train"], *how)
    if not found["validation"]:
        return train
    return train, ImageSamples(found["validation"], *how)
