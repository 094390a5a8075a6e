"""Reads samples for `dslc data`: their shapes, lengths and classes, and digests by which copies are found.

Model: `read_records` reads up to a limit of the samples of a split, spread evenly, as an evaluation sees them. A sample
has a digest of its input and one of input and target. Two samples are copies if all their tensors, numbers and texts
are equal, with their dtypes and shapes; other objects are compared by what pickle writes of them.

Limits: copies that were changed (another crop, one token more) have other digests. Objects that cannot be pickled are
compared by their class alone with the objects at the same place, so that a sample of such objects equals no other.
"""

from __future__ import annotations

import hashlib
import pickle
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field

import numpy as np
import torch
from torch import Tensor

from dslc.compiler.ir.program import DataStep
from dslc.compiler.trace.structures import Structure, flatten
from dslc.runtime.data.sample_keys import CHUNK, first_shape
from dslc.runtime.data.samples import Samples, Splits, items
from dslc.runtime.process.random_numbers import preserve_generators
from dslc.runtime.process.user_code import load_function

Shape = tuple[int, ...]


@dataclass
class SampleRecords:
    """The samples of a split that were read. `numbers` are theirs in the split, ascending; `classes` has None for a
    target that is no whole number.
    """

    split: str
    samples: int  # of the split
    numbers: list[int] = field(default_factory=list)
    shapes: list[Shape] = field(default_factory=list)  # of the first tensor of the input
    lengths: list[float] = field(default_factory=list)
    inputs: list[bytes] = field(default_factory=list)  # digests
    contents: list[bytes] = field(default_factory=list)  # digests of input and target
    classes: list[int | None] = field(default_factory=list)

    @property
    def shape(self) -> Shape | None:
        """Returns the shape of all samples; None if they differ."""
        return self.shapes[0] if len(set(self.shapes)) == 1 else None

    @property
    def all_read(self) -> bool:
        return len(self.numbers) == self.samples


@dataclass(frozen=True)
class Copy:
    """A sample that equals an earlier one, in the same split or in another, both by their numbers there."""

    number: int
    original: int


def spread(samples: int, limit: int) -> list[int]:
    """Returns the numbers of up to `limit` samples, spread evenly."""
    count = min(samples, limit)
    return [n * samples // count for n in range(count)]


@preserve_generators()  # samples of a user's code are made
def read_records(
    step: DataStep, splits: Splits, split: str, limit: int, advance: Callable[[int], None]
) -> SampleRecords:
    """Reads up to `limit` samples of `training`, `validation` or `test`, of a stream the first ones. Calls `advance`
    with the samples read since its last call.
    """
    samples, numbers, readings = _readings(step, splits, split, limit)
    records = SampleRecords(split, samples, numbers)
    sampler = step.sampler
    by_function = sampler is not None and sampler.kind == "by_length" and sampler.python is not None
    length = load_function(sampler.python) if by_function and sampler is not None else None  # type: ignore[arg-type]
    unread = 0
    for sample in readings:
        _add(records, sample, whole=step.whole, length=length)
        unread += 1
        if unread == _ADVANCE_EVERY:
            advance(unread)
            unread = 0
    advance(unread)
    if length is None:
        records.lengths = [float(size) for size in sample_lengths(records.shapes)]
    return records


_ADVANCE_EVERY = 64  # samples between two calls of `advance`


def samples_in(step: DataStep, split: str) -> int:
    """Returns the number of samples of a split."""
    by_split = {"training": step.train_samples, "validation": step.validation_samples, "test": step.test_samples}
    return by_split[split]


def _readings(step: DataStep, splits: Splits, split: str, limit: int) -> tuple[int, list[int], Iterator[Structure]]:
    count = samples_in(step, split)
    if split == "training" and splits.stream is not None:
        numbers = list(range(min(count, limit)))
        return count, numbers, _in_chunks(splits.stream, numbers)
    numbers = spread(count, limit)
    return count, numbers, _in_chunks(splits.samples_of_split(split), numbers)


def _in_chunks(samples: Samples, numbers: Sequence[int]) -> Iterator[Structure]:
    for first in range(0, len(numbers), CHUNK):
        yield from items(samples, torch.tensor(numbers[first : first + CHUNK]))


def sample_lengths(shapes: Sequence[Shape]) -> list[int]:
    """Returns the length of samples: the first dimension, or all numbers where only other dimensions differ."""
    firsts = [shape[0] if shape else 1 for shape in shapes]
    if len(set(firsts)) > 1 or len(set(shapes)) <= 1:
        return firsts
    return [numbers_in(shape) for shape in shapes]


def numbers_in(shape: Shape) -> int:
    """Returns the count of numbers in a tensor."""
    return int(np.prod(shape, dtype=np.int64))


def _add(
    records: SampleRecords, sample: Structure, *, whole: bool, length: Callable[[Structure], object] | None
) -> None:
    paired = not whole and isinstance(sample, tuple | list) and len(sample) == 2
    input, target = (sample[0], sample[1]) if paired else (sample, None)
    records.shapes.append(first_shape(sample))
    if length is not None:
        records.lengths.append(float(length(sample)))  # type: ignore[arg-type]
    of_input = _digest(input)
    records.inputs.append(of_input)
    records.contents.append(of_input + _digest(target) if paired else of_input)
    records.classes.append(_class_of(target) if paired else None)


def _class_of(target: object) -> int | None:
    """Returns a target that is one whole number."""
    if isinstance(target, Tensor | np.ndarray | np.generic):
        whole = not np.prod(target.shape) > 1 and not target.ndim
        is_integer = (
            not target.dtype.is_floating_point
            if isinstance(target, Tensor)
            else np.issubdtype(target.dtype, np.integer)
        )
        return int(target) if whole and is_integer else None
    return target if isinstance(target, int) and not isinstance(target, bool) else None


# ------------------------------------------------------------------------------------------------------------ copies


def _digest(value: Structure) -> bytes:
    """Returns the BLAKE2b of all that a structure holds."""
    leaves, form = ([value], "") if isinstance(value, Tensor) else flatten(value)
    hashed = hashlib.blake2b(str(form).encode(), digest_size=16)
    for leaf in leaves:
        hashed.update(_content(leaf))
    return hashed.digest()


def _content(leaf: object) -> bytes:
    if isinstance(leaf, Tensor):
        plain = leaf.detach().cpu().contiguous()
        return f"{plain.dtype}{tuple(plain.shape)}".encode() + plain.reshape(-1).view(torch.uint8).numpy().tobytes()
    if isinstance(leaf, np.ndarray | np.generic) and not leaf.dtype.hasobject:
        return f"{leaf.dtype}{leaf.shape}".encode() + leaf.tobytes()
    if isinstance(leaf, str | bytes | int | float | complex | None):
        return f"{type(leaf).__name__}{leaf!r}".encode()
    try:
        return pickle.dumps(leaf, protocol=5)
    except Exception:  # any kind: a class of the user's may refuse
        return f"{type(leaf)}{id(leaf)}".encode()


def find_copies(numbers: Sequence[int], digests: Sequence[bytes]) -> list[Copy]:
    """Returns the samples that equal an earlier one."""
    firsts: dict[bytes, int] = {}
    copies = []
    for number, digest in zip(numbers, digests, strict=True):
        original = firsts.setdefault(digest, number)
        if original != number:
            copies.append(Copy(number, original))
    return copies


def find_conflicts(records: SampleRecords) -> list[Copy]:
    """Returns the samples with the input of an earlier one and another target."""
    contents: dict[bytes, dict[bytes, int]] = defaultdict(dict)
    conflicts = []
    for number, input, content in zip(records.numbers, records.inputs, records.contents, strict=True):
        known = contents[input]
        if known and content not in known:
            conflicts.append(Copy(number, next(iter(known.values()))))
        known.setdefault(content, number)
    return conflicts


def find_overlap(training: SampleRecords, records: SampleRecords) -> list[Copy]:
    """Returns the samples of a split whose input equals a training sample's; `original` is of the training data."""
    known: dict[bytes, int] = {}
    for number, input in zip(training.numbers, training.inputs, strict=True):
        known.setdefault(input, number)
    pairs = zip(records.numbers, records.inputs, strict=True)
    return [Copy(number, known[input]) for number, input in pairs if input in known]
