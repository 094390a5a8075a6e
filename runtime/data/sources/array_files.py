"""Sources that are files of numbers in a known layout, mapped into memory: `tokens`, `mnist`, `cifar10`.

Contract: only the pages that a sample needs are read; the ranks of a machine share them. Pixels stay bytes until they
are batched, and then become 0 … 1.

Limits: gzipped MNIST files cannot be mapped; each rank holds them unpacked, a byte a pixel. The same goes for a batch
of CIFAR-10's python version whose pixels do not lie contiguously in the file.
"""

from __future__ import annotations

import gzip
import mmap
import os
import pickle
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from dslc.compiler.facts.untrusted_files import open_file
from dslc.compiler.ir.program import DataStep
from dslc.runtime.data.samples import ConcatenatedSamples, SourceError, StoredSamples
from dslc.runtime.data.sources.token_files import MAGIC

if TYPE_CHECKING:
    from PIL import Image

# ------------------------------------------------------------------------------------------------------- tokens


@dataclass(frozen=True)
class TokenSamples(StoredSamples):
    """One file as (n - 1) // context sequences without overlap; targets are the tokens that follow."""

    stream: NDArray[np.generic]
    context: int

    def __len__(self) -> int:
        return max(0, len(self.stream) - 1) // self.context

    def batch(self, indices: Tensor, epoch: int = 0) -> tuple[Tensor, Tensor]:
        used, rows = len(self) * self.context, indices.numpy()
        halves = (self.stream[at : used + at].reshape(-1, self.context)[rows] for at in (0, 1))
        inputs, targets = (torch.from_numpy(half.astype(np.int64)) for half in halves)
        return inputs, targets


class TokenFiles(ConcatenatedSamples):
    """All files, in the order of their names; no sequence crosses from one into the next."""

    def __init__(self, step: DataStep) -> None:
        found, context = step.arguments, step.arguments["context"]
        self.files = found["files"]

        def opened(n: int) -> TokenSamples:
            return TokenSamples(
                token_stream(self.files[n], found["item"], found["offset"], found["tokens"][n], step.line), context
            )

        super().__init__([max(0, held - 1) // context for held in found["tokens"]], opened, keep=None)

    def place(self, indices: Tensor) -> list[str]:
        return [self.files[part] for part in self.part_of(indices).tolist()]


def tokens(step: DataStep) -> TokenFiles:
    found = step.arguments
    for file, held in zip(found["files"], found["tokens"], strict=True):
        _hold_size(step, file, found["offset"] + held * np.dtype(found["item"]).itemsize)
    return TokenFiles(step)


def token_stream(file: str, item: str, offset: int, held: int, line: str) -> NDArray[np.generic]:
    """Returns the tokens of a file, mapped. Raises SourceError if the header differs from the plan's."""
    if offset:
        with open_file(file) as stream:
            head = np.frombuffer(stream.read(12), "<i4").tolist()
        if head != [*MAGIC[item], held]:
            raise SourceError(f"{line}: {file} is not the file of {held} {item} tokens that the plan was made for")
    if not held:
        return np.empty(0, item)
    return np.memmap(file, np.dtype(item).newbyteorder("<"), "r", offset, (held,))


def _hold_size(step: DataStep, file: str, planned: int) -> None:
    size = os.stat(file).st_size
    if size != planned:
        raise SourceError(f"{step.line}: {file} has a size of {size}, and the plan was made for {planned} bytes")


# ------------------------------------------------------------------------------------------- MNIST and CIFAR-10


@dataclass(frozen=True)
class PixelSamples(StoredSamples):
    """Images (n, channels, height, width) and labels (n,) in bytes; batches have pixels 0 … 1 and classes."""

    images: NDArray[np.uint8]
    labels: NDArray[np.uint8]

    def __len__(self) -> int:
        return len(self.images)

    def batch(self, indices: Tensor, epoch: int = 0) -> tuple[Tensor, Tensor]:
        rows = indices.numpy()
        pixels = torch.from_numpy(self.images[rows]).to(torch.float32).div_(255)
        return pixels, torch.from_numpy(self.labels[rows].astype(np.int64))

    def picture(self, index: int) -> tuple[Image.Image, Tensor]:
        from PIL import Image

        pixels = self.images[index]
        made = Image.fromarray(np.ascontiguousarray(pixels[0] if len(pixels) == 1 else pixels.transpose(1, 2, 0)))
        return made, torch.tensor(int(self.labels[index]))


def mnist(step: DataStep) -> tuple[PixelSamples, PixelSamples]:
    """Returns the training and the test set."""
    train, validation = (
        PixelSamples(_idx(images)[:, None], _idx(labels))
        for images, labels in (step.arguments["train"], step.arguments["validation"])
    )
    return train, validation


def _idx(file: str) -> NDArray[np.uint8]:
    """Returns the bytes of an IDX file in the shape of its header: big-endian 32-bit numbers after the magic."""
    packed = file.endswith(".gz")
    with gzip.open(file) if packed else open_file(file) as stream:
        dims = stream.read(4)[3]
        shape = tuple(np.frombuffer(stream.read(4 * dims), ">u4").tolist())
        if packed:
            return np.frombuffer(stream.read(), np.uint8).reshape(shape)
    return np.memmap(file, np.uint8, "r", 4 + 4 * dims, shape)


def cifar10(step: DataStep) -> tuple[ConcatenatedSamples, ConcatenatedSamples]:
    """Returns the five training batches, and the test batch."""

    def join_batches(files: tuple[str, ...]) -> ConcatenatedSamples:
        parts = [_cifar_batch(file, step.line) for file in files]
        return ConcatenatedSamples([len(part) for part in parts], parts.__getitem__, keep=None)

    return join_batches(step.arguments["train"]), join_batches(step.arguments["validation"])


def _cifar_batch(file: str, line: str) -> PixelSamples:
    """Returns a batch of the binary version (label and pixels, 3073 bytes an image) or of the python version."""
    if file.endswith(".bin"):
        rows = np.memmap(file, np.uint8, "r").reshape(-1, 3073)
        return PixelSamples(rows[:, 1:].reshape(-1, 3, 32, 32), rows[:, 0])
    try:
        with open_file(file) as stream:
            made = _ArrayUnpickler(stream, encoding="bytes").load()
        pixels = np.ascontiguousarray(_pickle_entry(made, "data"), np.uint8)
        labels = np.asarray(_pickle_entry(made, "labels"), np.uint8)
    except (pickle.UnpicklingError, KeyError, TypeError, ValueError, EOFError) as error:
        raise SourceError(f"{line}: {file} is not a batch of CIFAR-10: {error}") from error
    if pixels.ndim != 2 or pixels.shape != (len(labels), 3072):
        raise SourceError(f"{line}: {file} holds pixels of shape {pixels.shape} and labels of shape {labels.shape}")
    return PixelSamples(_mapped(file, pixels).reshape(-1, 3, 32, 32), labels)


def _pickle_entry(made: dict[object, object], name: str) -> object:
    """Returns an entry, whether Python 2 or Python 3 wrote the pickle."""
    return made[name.encode()] if name.encode() in made else made[name]


def _mapped(file: str, pixels: NDArray[np.uint8]) -> NDArray[np.uint8]:
    """Returns the same pixels mapped from their place in the file; unchanged if they are not in the file."""
    with open_file(file) as stream, mmap.mmap(stream.fileno(), 0, access=mmap.ACCESS_READ) as whole:
        at = whole.find(pixels.data if pixels.flags.c_contiguous else pixels.tobytes())
    return pixels if at < 0 else np.memmap(file, np.uint8, "r", at, pixels.shape)


class _ArrayUnpickler(pickle.Unpickler):
    """Builds arrays and plain values, and calls nothing else that a pickle may name."""

    def find_class(self, module: str, name: str) -> object:
        if module.removeprefix("numpy.").removeprefix("_core.").removeprefix("core.") == "multiarray":
            if name == "_reconstruct":
                return _empty_array
        elif (module, name) in (("numpy", "ndarray"), ("numpy", "dtype")):
            return getattr(np, name)
        elif (module, name) == ("_codecs", "encode"):
            return _encode
        raise pickle.UnpicklingError(f"it names {module}.{name}")


def _empty_array(kind: object, shape: object, code: object) -> NDArray[np.generic]:
    """Stands in for numpy's own `_reconstruct`: returns an array whose state comes next."""
    return np.ndarray.__new__(np.ndarray, (0,), "b")


def _encode(text: str, encoding: str) -> bytes:
    return text.encode("latin1")
