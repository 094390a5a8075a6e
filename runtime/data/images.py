"""Decodes pictures into numbers."""

from __future__ import annotations

import os
from typing import IO, TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

if TYPE_CHECKING:
    from PIL import Image


def decoded(
    stream: str | os.PathLike[str] | IO[bytes], mode: str, size: int | None, resize: int | None = None
) -> NDArray[np.float32]:
    """Returns an image (a file, or its path) as numbers 0 … 1, channels first, in a mode of Pillow: `L` or `RGB`.

    The shorter side is scaled to `size` pixels, or to `resize` (bilinear, with antialiasing), and `size` is cropped out
    of the middle; `size` None keeps height and width. This is torchvision's Resize, CenterCrop and ToTensor.
    """
    image = opened(stream, mode)
    return pixels_of(image if size is None else fitted(image, size, resize))


def opened(stream: str | os.PathLike[str] | IO[bytes], mode: str) -> Image.Image:
    """Returns an image, decoded, in a mode of Pillow."""
    from PIL import Image

    with Image.open(stream) as image:
        return image.convert(mode)


def pixels_of(image: Image.Image) -> NDArray[np.float32]:
    """Returns the numbers 0 … 1 of an image of 8 bits, channels first."""
    pixels: NDArray[np.float32] = np.asarray(image, np.float32) / np.float32(255)
    return pixels[None] if pixels.ndim == 2 else np.ascontiguousarray(pixels.transpose(2, 0, 1))


def fitted(image: Image.Image, size: int, resize: int | None = None) -> Image.Image:
    """Scales the shorter side to `resize`, by default `size`, and crops `size` x `size` out of the middle."""
    from PIL import Image

    width, height = image.size
    shorter, wanted = min(width, height), resize or size
    if shorter != wanted:
        width, height = (
            wanted if side == shorter else max(wanted, int(wanted * side / shorter)) for side in (width, height)
        )
        image = image.resize((width, height), Image.Resampling.BILINEAR)
    left, top = round((width - size) / 2), round((height - size) / 2)
    return image.crop((left, top, left + size, top + size))
