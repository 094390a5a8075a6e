"""The files of a folder that are images: the compiler counts them, and the runtime reads them."""

from __future__ import annotations

import os
from collections.abc import Iterator

SUFFIXES = (".bmp", ".jpeg", ".jpg", ".pgm", ".png", ".ppm", ".tif", ".tiff", ".webp")


def images_in(folder: str) -> Iterator[str]:
    """Yields the paths of the images in a folder and its subfolders, in no order."""
    with os.scandir(folder) as entries:
        for entry in entries:
            if entry.name.lower().endswith(SUFFIXES):
                yield entry.path
            elif entry.is_dir():
                yield from images_in(entry.path)
