"""Decodes pictures into numbers."""

from __future__ import annotations

import os
from typing import IO, TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

if TYPE_CHECKING:
    from PIL import Image


def decoded(stream: str | os.PathLike[str] | IO[bytes], mode: str, size: int | None) -> NDArray[np.float32]:
    """Returns an image (a file, or its path) as numbers 0 … 1, channels first, in a mode of Pillow: `L` or `RGB`.

    `size` scales the shorter side to so many pixels (bilinear, with antialiasing) and crops the other around the
    middle; None keeps height and width. This is torchvision's Resize, CenterCrop and ToTensor.
    """
    from PIL import Image

    with Image.open(stream) as opened:
        image = opened.convert(mode)
    if size is not None:
        image = _fitted(image, size)
    pixels: NDArray[np.float32] = np.asarray(image, np.float32) / np.float32(255)
    return pixels[None] if pixels.ndim == 2 else np.ascontiguousarray(pixels.transpose(2, 0, 1))


def _fitted(image: Image.Image, size: int) -> Image.Image:
    from PIL import Image

    width, height = image.size
    shorter = min(width, height)
    if shorter != size:
        width, height = (size if side == shorter else max(size, int(size * side / shorter)) for side in (width, height))
        image = image.resize((width, height), Image.Resampling.BILINEAR)
    left, top = round((width - size) / 2), round((height - size) / 2)
    return image.crop((left, top, left + size, top + size))
