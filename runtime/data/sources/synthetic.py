"""Synthetic samples: a pure function of the seed and the sample's number, the same on any machine.

Model: every number is SplitMix64 (Steele, Lea and Flood 2014, doi:10.1145/2660193.2660195) of its position. So a sample
does not depend on the other samples made with it. Real numbers are sums of four 16-bit parts of such a word: near to
normal, with mean 0 and variance 1, and exact in integers. Targets follow from the sample: the sample is folded into at
most 256 sums, and a fixed random matrix of -1 and +1 is applied; the class is the place of the largest result, real
targets are the results scaled to variance 1. The results are whole numbers below 2^53: float64 holds them exactly, and
no order of summation changes them. Tokens rise by a step of 1 to 4 that the sequence keeps, modulo the vocabulary. One
token in sixteen is replaced by a random one.

Limits: a set of at most `KEPT` bytes is made once; a larger one is made again for each batch, at some 20 ns a number.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TypeAlias

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from dslc.compiler.ir.program import DataStep
from dslc.runtime.data.samples import StoredSamples

KEPT = 1 << 28  # bytes
FEATURES = 256

Words: TypeAlias = NDArray[np.uint64]

_AT_ONCE = 1 << 15  # words that fit into the cache: three times as fast as all of a large batch at once
_GOLDEN = 0x9E3779B97F4A7C15
_LOW = np.uint64(0x0000FFFF0000FFFF)
_DEVIATION = math.sqrt((2**32 - 1) / 3)  # standard deviation of the sum of four independent uniform numbers 0 … 65535


def words(seed: int, stream: int, positions: Words) -> Words:
    """Returns a random 64-bit word for each position, from one of the streams of a seed."""
    # The hash of zero is zero: no stream may start there.
    start = np.array([(seed * 0x2545F4914F6CDD1D + stream * 0xD1342543DE82EF95 + _GOLDEN) % 2**64], np.uint64)
    return _mix(_mix(start) + positions * np.uint64(_GOLDEN))


def _mix(z: Words) -> Words:
    z = (z ^ (z >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    z = (z ^ (z >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    mixed: Words = z ^ (z >> np.uint64(31))
    return mixed


def whole_normals(seed: int, stream: int, positions: Words) -> NDArray[np.int32]:
    """Returns whole numbers, nearly normal, with mean 0 and standard deviation `_DEVIATION`."""
    made = np.empty(positions.shape, np.int32)
    flat, places = made.reshape(-1), positions.reshape(-1)
    for at in range(0, len(flat), _AT_ONCE):
        drawn = words(seed, stream, places[at : at + _AT_ONCE])
        pairs = (drawn & _LOW) + ((drawn >> np.uint64(16)) & _LOW)
        flat[at : at + _AT_ONCE] = (pairs & np.uint64(0xFFFFFFFF)) + (pairs >> np.uint64(32))
    made -= 2 * 65535
    return made


@dataclass(frozen=True)
class Numbers(StoredSamples):
    """Samples of real numbers of a shape, with a class each (`classes`), or with real targets of a shape."""

    seed: int
    samples: int
    shape: tuple[int, ...]
    classes: int | None
    targets: tuple[int, ...]

    def __len__(self) -> int:
        return self.samples

    def batch(self, indices: Tensor, epoch: int = 0) -> tuple[Tensor, Tensor]:
        size = math.prod(self.shape)
        numbers: Words = indices.numpy().astype(np.uint64)[:, None]
        positions: Words = np.add(numbers * np.uint64(size), np.arange(size, dtype=np.uint64))
        whole = whole_normals(self.seed, 0, positions)
        inputs = torch.from_numpy(whole).to(torch.float32).mul_(1 / _DEVIATION)
        return inputs.view(-1, *self.shape), self._targets(whole)

    def _targets(self, whole: NDArray[np.int32]) -> Tensor:
        rows, size = whole.shape
        folded = -(-size // FEATURES)
        padded = np.pad(whole, ((0, 0), (0, -size % folded))).reshape(rows, -1, folded).sum(2, dtype=np.int64)
        features = padded.shape[1]
        results = self.classes or math.prod(self.targets)
        signs = words(self.seed, 1, np.arange(results * features, dtype=np.uint64)) >> np.uint64(63)
        teacher = (signs.astype(np.float64) * 2 - 1).reshape(results, features)
        scores = torch.from_numpy(padded.astype(np.float64)) @ torch.from_numpy(teacher).T
        if self.classes:
            return scores.argmax(1)
        return (scores / (_DEVIATION * math.sqrt(size))).to(torch.float32).view(rows, *self.targets)


@dataclass(frozen=True)
class Tokens(StoredSamples):
    """Sequences of tokens 0 <= t < vocab of a length, and the tokens that follow; both int64."""

    seed: int
    samples: int
    vocab: int
    context: int

    def __len__(self) -> int:
        return self.samples

    def batch(self, indices: Tensor, epoch: int = 0) -> tuple[Tensor, Tensor]:
        numbers: Words = indices.numpy().astype(np.uint64)[:, None]
        vocab, length = np.uint64(self.vocab), self.context + 1
        start = words(self.seed, 0, numbers)
        places = np.arange(length, dtype=np.uint64)
        stride = np.uint64(1) + (start >> np.uint64(62))
        rising = (start % vocab + stride * places) % vocab
        drawn = words(self.seed, 1, numbers * np.uint64(length) + places)
        replaced = drawn >> np.uint64(60) == 0
        tokens = torch.from_numpy(np.where(replaced, drawn % vocab, rising).astype(np.int64))
        return tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous()


def synthetic_samples(step: DataStep) -> Numbers | Tokens | tuple[Tensor, Tensor]:
    """Returns the samples of a `synthetic` source: two tensors, or, if large, an object that makes them on demand."""
    arguments = step.arguments
    samples = arguments["samples"]
    made: Numbers | Tokens
    if arguments.get("vocab"):
        made = Tokens(step.seed, samples, arguments["vocab"], arguments["context"])
        size = 16 * arguments["context"]
    else:
        shape, targets = tuple(arguments["shape"]), tuple(arguments.get("targets") or ())
        made = Numbers(step.seed, samples, shape, arguments.get("classes"), targets)
        size = 4 * math.prod(shape)
    if samples * size > KEPT:
        return made
    pieces = [made.batch(piece) for piece in torch.arange(samples).split(max(1, (1 << 24) // size))]
    return torch.cat([piece[0] for piece in pieces]), torch.cat([piece[1] for piece in pieces])
