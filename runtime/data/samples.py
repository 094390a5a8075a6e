"""Samples: the interface of a data source to the training, and its few implementations.

Contract: floats become float32, integers of any width and booleans int64, but in structures, whose tensors keep their
dtypes. A batch depends on its indices alone and, if the data set draws random numbers, on the epoch: not on the process
that makes it, or on the batches made before. It leaves the host's random generators anywhere, unless it is made by
`batch_aside`. Evaluations and predictions use epoch 0. `by_process` says that a sample needs computing (a picture is
decoded, a user's code runs), so that workers are processes; other samples are gathered by a thread. `is_structure` says
that a batch is a structure of tensors, which is not cut: each micro-batch is made by itself.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from types import NoneType
from typing import Any, ClassVar, NoReturn, Protocol, TypeAlias, runtime_checkable

import torch
from torch import Tensor

from dslc.compiler.trace.structures import Structure
from dslc.runtime.data.collating import Collate, UnevenSamples, stacked, unstackable
from dslc.runtime.process.job_line import mark_during
from dslc.runtime.process.random_numbers import SampleSeeds, begin_sample, preserve_generators
from dslc.runtime.process.user_code import UserObject

Pair: TypeAlias = tuple[Structure, Structure]  # input and target: tensors, or structures of them
Marks: TypeAlias = Mapping[str, Mapping[str, UserObject]]  # of a stream: the place in each lane, by its number in text
Tell: TypeAlias = Callable[[str], None]


class SourceError(RuntimeError):
    """Raised if the data differs from the data that the plan was made for; the message names the line of the job."""


_SAMPLE = "_dslc_sample"  # on an exception: the number of its sample in the source


def name_sample(error: BaseException, number: int, place: str = "") -> None:
    """Marks an exception with its sample of a data set, for messages, and with its place in a split, if it is known."""
    with contextlib.suppress(Exception):  # a user's own class may refuse the attribute
        setattr(error, _SAMPLE, number)
    mark_during(error, f"`dataset[{number}]`{place}")


class Samples(Protocol):
    """Samples numbered from 0. `batch` takes int64 indices of shape (n,) and returns tensors (n, …) on the CPU, as they
    are in `epoch` (from 0); two structures of tensors where `is_structure`.
    """

    @property
    def by_process(self) -> bool: ...

    @property
    def is_structure(self) -> bool: ...

    def __len__(self) -> int: ...

    def batch(self, indices: Tensor, epoch: int = 0) -> Pair: ...


@runtime_checkable
class Streamed(Samples, Protocol):
    """A stream: `marks` returns how far it has been read, and `go_to` begins there and tells if that takes long.

    `items` yields samples as the stream gives them.
    """

    def marks(self) -> Marks: ...

    def items(self, numbers: Sequence[int]) -> Iterator[Structure]: ...

    def go_to(self, marks: Marks, tell: Tell) -> None: ...


@dataclass(frozen=True)
class Splits:
    """The samples of each split. `validation` may be empty; `stream` is what `train` reads, if it is one."""

    train: Samples
    validation: Samples
    stream: Streamed | None = None
    test: Samples | None = None
    plain_train: Samples | None = None  # those for training as an evaluation sees them, not augmented

    def samples_of_split(self, split: str) -> Samples:
        """Returns the samples of a split that is evaluated."""
        samples = {"test": self.test, "training": self.plain_train}.get(split, self.validation)
        assert samples is not None
        return samples


class StoredSamples:
    """Samples of plain tensors that need no computing worth a worker."""

    by_process = is_structure = False


@dataclass(frozen=True)
class TensorSamples(StoredSamples):
    """Samples stored as rows of two tensors, in memory or mapped into it."""

    inputs: Tensor
    targets: Tensor

    def __len__(self) -> int:
        return self.inputs.shape[0]

    def batch(self, indices: Tensor, epoch: int = 0) -> tuple[Tensor, Tensor]:
        return as_seen(self.inputs.index_select(0, indices)), as_seen(self.targets.index_select(0, indices))


@dataclass(frozen=True)
class FetchedSamples:
    """Samples of a user's data set, fetched one by one, each with its own random numbers. They are pairs of tensors,
    which are stacked; or, with `collate`, anything that it makes a pair of structures or, with `whole`, one.
    """

    dataset: UserObject
    line: str
    seed: int = 0
    part: str = "train"
    collate: Collate | None = None
    whole: bool = False
    seeds: SampleSeeds = field(default_factory=SampleSeeds, compare=False)
    by_process: ClassVar[bool] = True

    @property
    def is_structure(self) -> bool:
        return self.collate is not None

    def __len__(self) -> int:
        return len(self.dataset)

    def batch(self, indices: Tensor, epoch: int = 0) -> Pair:
        numbers = indices.tolist()
        return self.make_batch(self._fetch(epoch, numbers), numbers)

    def _fetch(self, epoch: int, numbers: list[int]) -> list[Structure]:
        """Returns the samples of a batch, and leaves the generators to `collate` as the last one left them."""
        seeds, samples, index = self.seeds, [], 0
        seeds.begin_batch()
        try:
            for index in numbers:
                samples.append(seeds.make(self.dataset, self.seed, self.part, epoch, index))
        except BaseException as error:  # any kind, that of `sys.exit` too: the user's code runs
            name_sample(error, index)
            raise
        if numbers and self.collate not in (None, stacked):
            seeds.end_batch(self.seed, self.part, epoch, index)
        return samples

    def make_batch(self, samples: list[Structure], numbers: Sequence[int] = ()) -> Pair:
        """Returns the batch of some samples, which have these numbers in the data set, if they have some."""
        if self.collate is not None:
            if self.collate is stacked and NoneType in map(type, samples):
                self._refuse(samples, numbers, [sample is None for sample in samples], "a structure of tensors")
            return self.collated(samples, numbers)
        if set(map(type, samples)) != {tuple} or set(map(len, samples)) != {2}:
            wrong = [not isinstance(pair, Sequence) or len(pair) != 2 for pair in samples]
            self._refuse(samples, numbers, wrong, "a pair (input, target)")
        inputs, targets = ([pair[part] for pair in samples] for part in (0, 1))
        return self._stack(inputs, numbers, "input"), self._stack(targets, numbers, "target")

    def sample(self, epoch: int, index: int) -> Structure:
        """Returns one sample as the data set gives it, drawn with its own random numbers."""
        begin_sample(self.seed, self.part, epoch, index)
        try:
            return self.dataset[index]
        except BaseException as error:  # any kind, that of `sys.exit` too: the user's code runs
            name_sample(error, index)
            raise

    def _refuse(self, samples: list[Structure], numbers: Sequence[int], wrong: list[bool], wanted: str) -> None:
        """Raises SourceError for the first sample that is `wrong`."""
        if not any(wrong):
            return
        first = wrong.index(True)
        sample = samples[first]
        size = f" of {len(sample)}" if isinstance(sample, Sequence) else ""
        kind = "None" if sample is None else f"a {type(sample).__name__}{size}"
        error = SourceError(f"{self.line}: a sample of the data set has to be {wanted}, and this one is {kind}")
        if numbers:
            name_sample(error, numbers[first])
        raise error

    def collated(self, samples: list[Structure], numbers: Sequence[int] = ()) -> Pair:
        """Returns a batch of samples as the data set gives them."""
        assert self.collate is not None
        try:
            batch = self.collate(samples)
        except UnevenSamples as error:
            self._refuse_stacking(error, numbers, "; `data.collate` puts samples of unequal size together")
        except Exception as error:  # any kind: the user's code runs
            missing = [number for number, sample in zip(numbers, samples, strict=False) if sample is None]
            if missing:
                name_sample(error, missing[0], ", which is None")
            raise
        if self.whole:
            return batch, batch
        if not isinstance(batch, Sequence) or len(batch) != 2:
            raise SourceError(f"{self.line}: a batch of the data set has to be a pair (input, target)")
        return batch[0], batch[1]

    def _stack(self, items: list[Structure], numbers: Sequence[int], part: str) -> Tensor:
        if not items:
            return torch.empty(0)
        try:
            is_plain = set(map(type, items)) == {Tensor}
            return as_seen(torch.stack(items if is_plain else [torch.as_tensor(item) for item in items]))
        except (TypeError, RuntimeError, ValueError) as error:
            self._refuse_stacking(unstackable(items, f"the {part}", error), numbers)

    def _refuse_stacking(self, error: UnevenSamples, numbers: Sequence[int], remedy: str = "") -> NoReturn:
        """Raises SourceError for samples that do not stack, with the number of the first that is unlike the rest."""
        refusal = SourceError(f"{self.line}: samples of the data set do not stack to a batch: {error}{remedy}")
        if numbers and error.index is not None:
            name_sample(refusal, numbers[error.index])
        raise refusal from error


@dataclass(frozen=True)
class DerivedSamples:
    """Samples made of other samples; by default as many, and made by the same kind of worker."""

    samples: Samples

    @property
    def by_process(self) -> bool:
        return self.samples.by_process

    @property
    def is_structure(self) -> bool:
        return self.samples.is_structure

    @property
    def place(self) -> Callable[[Tensor], list[str]] | None:
        """Returns the function that names the files of some samples, if the source has one."""
        return getattr(self.samples, "place", None)

    @property
    def targets(self) -> Tensor | None:
        return getattr(self.samples, "targets", None)

    def __len__(self) -> int:
        return len(self.samples)


@dataclass(frozen=True)
class Part(DerivedSamples):
    """Some of the samples, which are a split: the samples at `chosen`, or `length` samples from `start` on."""

    chosen: Tensor | None = None
    start: int = 0
    length: int = 0
    split: str = ""  # training, validation or test

    def __len__(self) -> int:
        return self.length if self.chosen is None else self.chosen.shape[0]

    def inner(self, indices: Tensor) -> Tensor:
        """Returns the numbers of these samples in `samples`."""
        if self.chosen is not None:
            return self.chosen[indices]
        return indices + self.start if self.start else indices

    def batch(self, indices: Tensor, epoch: int = 0) -> Pair:
        inner = self.inner(indices)
        try:
            return self.samples.batch(inner, epoch)
        except BaseException as error:  # any kind, that of `sys.exit` too: the user's code runs
            numbers = indices[inner == getattr(error, _SAMPLE, -1)].tolist()
            if numbers and self.split:
                name_sample(error, getattr(error, _SAMPLE), f", sample {numbers[0]} of the {self.split} data")
            raise


class ConcatenatedSamples:
    """Samples of several parts, one after another; part `n` has `counts[n]` of them, and `opened(n)` opens it.

    The `keep` parts used last stay open (None: all).
    """

    def __init__(
        self, counts: Sequence[int], opened: Callable[[int], Samples], *, keep: int | None, by_process: bool = False
    ) -> None:
        self.by_process, self.is_structure = by_process, False
        self._starts = torch.tensor([0, *counts], dtype=torch.int64).cumsum(0)
        self._opened = lru_cache(maxsize=keep)(opened)

    def __len__(self) -> int:
        return int(self._starts[-1])

    def part_of(self, indices: Tensor) -> Tensor:
        """Returns the part that holds each of these samples."""
        return torch.searchsorted(self._starts, indices, right=True) - 1

    def picture(self, index: int) -> object:
        """Returns a picture and its target; for parts that have some."""
        part = int(self.part_of(torch.tensor(index)))
        opened: Any = self._opened(part)
        return opened.picture(index - int(self._starts[part]))

    def batch(self, indices: Tensor, epoch: int = 0) -> Pair:
        if not indices.numel():
            return torch.empty(0), torch.empty(0)
        parts = self.part_of(indices)
        made: tuple[Tensor, Tensor] | None = None
        for part in dict.fromkeys(parts.tolist()):  # in the order of their first use: a part that is open comes first
            rows = (parts == part).nonzero().squeeze(1)
            pair = self._opened(part).batch(indices[rows] - self._starts[part], epoch)
            if len(rows) == len(indices):
                return pair
            if made is None:
                made = tuple(t.new_empty((len(indices), *t.shape[1:])) for t in pair)
            assert made is not None
            for whole, piece in zip(made, pair, strict=True):
                whole[rows] = piece
        assert made is not None
        return made


class Structures:
    """Samples of several data sets of a user's, one after another, which one function puts together to a batch.

    A batch may have samples of several parts: structures cannot be joined once they are batches, but samples can.
    """

    by_process, is_structure = True, True

    def __init__(self, parts: Sequence[Samples]) -> None:
        self._parts = parts
        self._starts = torch.tensor([0, *map(len, parts)]).cumsum(0)
        self.maker = _maker(parts[0])

    def __len__(self) -> int:
        return int(self._starts[-1])

    def items(self, indices: Tensor, epoch: int = 0) -> Iterator[object]:
        """Yields these samples as the data sets give them."""
        for index, part in zip(indices, torch.searchsorted(self._starts, indices, right=True) - 1, strict=True):
            yield from items(self._parts[part], (index - self._starts[part]).view(1), epoch)

    def batch(self, indices: Tensor, epoch: int = 0) -> Pair:
        return self.maker.collated(list(self.items(indices, epoch)))


def _maker(samples: Samples) -> FetchedSamples:
    while isinstance(samples, Part | Checked):
        samples = samples.samples
    if isinstance(samples, Structures):
        return samples.maker
    if not isinstance(samples, FetchedSamples):
        raise SourceError("only data sets of a user's own give samples that are structures")
    return samples


def concatenate_samples(parts: Sequence[Samples], structured: bool) -> Samples:
    """Returns the samples of several parts, one after another; `structured` if batches are structures of tensors."""
    parts = [part for part in parts if len(part)] or parts
    if structured:
        return Structures(parts)
    by_process = any(part.by_process for part in parts)
    return ConcatenatedSamples([len(part) for part in parts], parts.__getitem__, keep=None, by_process=by_process)


@dataclass(frozen=True)
class Checked(DerivedSamples):
    """Checks the numbers of samples against the network: on a GPU a wrong index would end the process."""

    line: str
    vocab: int | None  # inputs are 0 <= n < vocab
    classes: int | None  # targets are 0 <= n < classes, or `ignore`
    ignore: int
    files: Callable[[Tensor], list[str]]  # of some samples
    part: str = ""  # the word before `sample` in messages, if there are two data sets

    def batch(self, indices: Tensor, epoch: int = 0) -> Pair:
        inputs, targets = self.samples.batch(indices, epoch)
        if self.vocab is not None and isinstance(inputs, Tensor):
            said = "the token", f"the network has a vocabulary of {self.vocab}: 0 to {self.vocab - 1}"
            self._hold(indices, first_out_of_range(inputs, self.vocab), said)
        if self.classes is not None and isinstance(targets, Tensor):
            said = "the target", f"the network gives {self.classes} numbers: classes are 0 to {self.classes - 1}"
            self._hold(indices, first_out_of_range(targets, self.classes, self.ignore), said)
        return inputs, targets

    def _hold(self, indices: Tensor, wrong: tuple[int, int] | None, said: tuple[str, str]) -> None:
        if wrong is None:
            return
        at, number = wrong
        (file,), (what, why) = self.files(indices[at : at + 1]), said
        error = SourceError(f"{self.line}: {self.part}sample {indices[at]} of {file} has {what} {number}, and {why}")
        name_sample(error, int(indices[at]))
        raise error


def first_out_of_range(seen: Tensor, limit: int, ignore: int | None = None) -> tuple[int, int] | None:
    """Returns the first number that is neither 0 <= n < limit nor `ignore`, and its row; or None."""
    if not seen.numel() or seen.is_floating_point():
        return None
    low, high = torch.aminmax(seen)
    if low >= 0 and high < limit:
        return None
    wrong = (seen < 0) | (seen >= limit)
    if ignore is not None:
        wrong &= seen != ignore
    if not wrong.any():
        return None
    at = int(wrong.flatten(1).any(1).nonzero()[0]) if wrong.dim() > 1 else int(wrong.nonzero()[0])
    return at, int(seen[at][wrong[at]].flatten()[0])


@dataclass(frozen=True)
class Padded(DerivedSamples):
    """Samples whose sequences are padded with `pad`: targets that are `pad`, or whose input is, become `ignore`.
    Targets of another shape, such as one class for a sequence, stay.
    """

    pad: int
    ignore: int

    def batch(self, indices: Tensor, epoch: int = 0) -> tuple[Tensor, Tensor]:
        inputs, targets = self.samples.batch(indices, epoch)
        if targets.shape != inputs.shape or targets.is_floating_point():
            return inputs, targets
        return inputs, targets.masked_fill((inputs == self.pad) | (targets == self.pad), self.ignore)


@dataclass(frozen=True)
class BoundaryMaskedSamples(DerivedSamples):
    """Sequences of several documents: the target after `token`, which ends one, is of another and becomes `ignore`."""

    token: int
    ignore: int

    def batch(self, indices: Tensor, epoch: int = 0) -> tuple[Tensor, Tensor]:
        inputs, targets = self.samples.batch(indices, epoch)
        return inputs, targets.masked_fill(inputs == self.token, self.ignore)


def batch_aside(samples: Samples, indices: Tensor) -> Pair:
    """Returns a batch of an evaluation, which leaves the host's random generators as they were."""
    if not samples.by_process:
        return samples.batch(indices)
    with preserve_generators():
        return samples.batch(indices)


def items(samples: Samples, indices: Tensor, epoch: int = 0) -> Iterator[Structure]:
    """Yields these samples as they are in `epoch`: as a user's data set gives them, others as pairs of tensors."""
    match samples:
        case Part():
            yield from items(samples.samples, samples.inner(indices), epoch)
        case Checked():
            yield from items(samples.samples, indices, epoch)
        case Structures():
            yield from samples.items(indices, epoch)
        case _ if isinstance(samples, Streamed):
            yield from samples.items(indices.tolist())
        case FetchedSamples():
            for index in indices.tolist():
                yield samples.sample(epoch, index)
        case _:
            inputs, targets = samples.batch(indices, epoch)
            if len(inputs) > len(indices):  # a pair of answers is two rows
                targets = targets[0] if isinstance(targets, tuple) else targets
                inputs, targets = (rows.reshape(len(indices), -1) for rows in (inputs, targets))
            yield from zip(inputs, targets, strict=True)


def as_seen(tensor: Tensor) -> Tensor:
    """Converts floats to float32 and everything else to int64, as models take them; no copy if it is so already."""
    return tensor.to(torch.float32 if tensor.dtype.is_floating_point else torch.int64)
