"""The files of a folder that are images: the compiler counts them, and the runtime reads them."""

from __future__ import annotations

import os
from collections.abc import Iterator

SUFFIXES = (".bmp", ".jpeg", ".jpg", ".pgm", ".png", ".ppm", ".tif", ".tiff", ".webp")
FOLDERS = 20_000  # folders below one class


class FolderError(OSError):
    """A folder of images leads to itself by a link, holds too many folders, or an image that is no file."""


def images_in(folder: str) -> Iterator[str]:
    """Yields the paths of the images in a folder and its subfolders, in no order. Raises OSError, also FolderError."""
    above = {_identity(parent) for parent in _parents(os.path.realpath(folder))}
    yield from _images_in(folder, above, [FOLDERS])


def _images_in(folder: str, above: set[tuple[int, int]], budget: list[int]) -> Iterator[str]:
    budget[0] -= 1
    if budget[0] < 0:
        raise FolderError(f"more than {FOLDERS:,} folders of images for one class")
    inside = above | {_identity(folder)}
    with os.scandir(folder) as entries:
        for entry in entries:
            if entry.name.lower().endswith(SUFFIXES):
                if not entry.is_file():
                    raise FolderError(f"{entry.path} has the name of an image, and is no file")
                yield entry.path
            elif entry.is_dir():
                if entry.is_symlink() and _identity(entry.path) in inside:
                    raise FolderError(f"{entry.path} is a link to a folder that it is in")
                yield from _images_in(entry.path, inside, budget)


def _parents(folder: str) -> Iterator[str]:
    while folder != (parent := os.path.dirname(folder)):
        yield folder
        folder = parent
    yield folder


def _identity(folder: str) -> tuple[int, int]:
    found = os.stat(folder)
    return found.st_dev, found.st_ino
