"""Traces a user's data set by fetching some samples, and making batches of them."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from itertools import count, islice
from pathlib import Path

import torch

from dslc.compiler.ir.facts import SourceFacts
from dslc.compiler.ir.tensors import TensorFact, TreeFact
from dslc.compiler.trace.batch import LARGE, SMALL, grown
from dslc.compiler.trace.instantiate import TraceError
from dslc.compiler.trace.sources.stream_protocol import Shards, StreamError, is_stream
from dslc.compiler.trace.structures import UserValue, count_numbers, flatten, paths, save, tensors
from dslc.compiler.trace.trace_model import model_dtype

TWICE = 4  # samples that are fetched twice
REAL = 3  # samples that a network is tried with
LOOKED_AT = 16  # samples among which the largest is looked for

Collate = Callable[[list["UserValue"]], "UserValue"]


def trace_source(
    make: Callable[[], object],
    begin: Callable[[int], None],
    *,
    collate: Collate,
    stacked: bool = True,
    unsplit: bool = False,
    example: str = "",
    real: str = "",
    longest: int | None = None,
) -> SourceFacts:
    """Returns the facts of the result of `make()`: a map-style data set, a stream, or a pair (train, validation) of
    them. A stream for validation is read whole, to be counted. Samples are
    pairs (input, target), or anything if the network takes them whole (`unsplit`).

    `begin` seeds the random generators for a sample, by its number, as the training does. `collate` makes samples a
    batch; `stacked`: as one stacks tensors. Batches that are structures are written to the file `example`, and a batch
    of the first samples to `real`. `longest` is the sample that batches are made of; None: the largest of the first.
    """
    user_object = make()
    if isinstance(user_object, tuple) and len(user_object) == 2 and all(hasattr(part, "shape") for part in user_object):
        user_object = list(zip(*user_object, strict=True))  # a pair of arrays is one data set
    train, validation, test = (*splits_of(user_object), None, None)[:3]
    if test is not None and not (hasattr(test, "__len__") and hasattr(test, "__getitem__")):
        raise TraceError(f"the third of a triple is a data set for the test, and `{type(test).__name__}` is none")
    facts = SourceFacts()
    if is_stream(train):
        train, facts = _of_stream(train, begin)
    if not hasattr(train, "__len__") or not hasattr(train, "__getitem__"):
        raise TraceError(f"it gives a `{type(train).__name__}`, which has no `len` and indexing and is no stream")
    if len(train) == 0:
        raise TraceError("the data set is empty")
    sample = train[0]
    if not unsplit and stacked and (not isinstance(sample, tuple | list) or len(sample) != 2):
        raise TraceError(
            f"a sample is a pair (input, target), and the first one is a `{type(sample).__name__}`",
            remedy="give pairs; or `model.loss = own()`, for a network that takes a whole sample and returns its loss",
        )
    if facts.shards is None:
        changes = (index for index in range(min(TWICE, len(train))) if _changes(train, index, begin))
        facts = SourceFacts(samples=len(train), changes=next(changes, None))
    if validation is not None:
        facts = _with_validation(facts, validation, begin)
    if test is not None:
        facts = replace(facts, test_samples=len(test))
    if real:
        _write_real(train, begin, collate, unsplit, real)
    if stacked and not unsplit and all(map(_is_array, sample)):
        return replace(facts, input=_fact(sample[0], "input"), target=_fact(sample[1], "target"))
    structures, draws, uneven = _structures(train, begin, collate, unsplit, example, longest)
    return replace(facts, structures=structures, collate_draws=draws, uneven=uneven)


def _write_real(train: UserValue, begin: Callable[[int], None], collate: Collate, unsplit: bool, path: str) -> None:
    """Writes input and target of the first samples, by which a network is tried; none if they make no batch of pairs,
    which ends a training, where it is reported with the samples' numbers.
    """

    samples = []
    for index in range(min(REAL, len(train))):
        begin(index)
        samples.append(train[index])
    try:
        batch = collate(samples)
        save((batch, batch) if unsplit else (batch[0], batch[1]), path)
    except Exception:  # any kind: samples of several sizes, or objects that cannot be written
        Path(path).unlink(missing_ok=True)


def splits_of(user_object: UserValue) -> tuple[UserValue, ...]:
    """Returns the data sets that a source gives: a pair, a triple, or a list of these as `random_split` gives it."""

    several = isinstance(user_object, tuple) or (
        isinstance(user_object, list) and all(isinstance(part, torch.utils.data.Dataset) for part in user_object)
    )
    return tuple(user_object) if several and len(user_object) in (2, 3) else (user_object,)


def _of_stream(user_object: UserValue, begin: Callable[[int], None]) -> tuple[list[UserValue], SourceFacts]:
    """Returns the first samples of a stream, and the facts of the whole."""
    shards = _shards(user_object)
    samples, repeated = (list(islice(_samples(shards, begin), LOOKED_AT)) for _ in range(2))
    if samples and not repeated:
        raise TraceError("the stream gives no samples when it is read again", remedy="let `__iter__` begin anew")
    changed = (n for n, pair in enumerate(zip(samples, repeated, strict=False)) if not _same(*pair))
    return samples, SourceFacts(samples=shards.length, shards=shards.count, changes=next(changed, None))


def _with_validation(facts: SourceFacts, user_object: UserValue, begin: Callable[[int], None]) -> SourceFacts:
    """Returns the facts with the number of samples of a validation set; a stream is read whole."""
    if isinstance(user_object, dict):
        sets = tuple((name, _samples_of_set(name, samples)) for name, samples in user_object.items())
        count = sum(samples for _, samples in sets)
        return replace(facts, validation_samples=count, found={"validation_sets": sets})
    if not is_stream(user_object):
        return replace(facts, validation_samples=len(user_object))
    shards = _shards(user_object)
    counts = tuple(sum(1 for _ in _of_shard(shards, n, begin)) for n in range(shards.count))
    if not any(counts):
        raise TraceError("the validation stream is empty")
    if facts.shards is None:
        raise TraceError("the validation set is a stream, and the training set is not", remedy="give two streams")
    return replace(facts, validation_samples=sum(counts), held_shards=counts)


def _samples_of_set(name: object, user_object: UserValue) -> int:
    """Returns the number of samples of one of several validation sets."""
    if not isinstance(name, str) or not name.isidentifier():
        raise TraceError(f"the name of a validation set is {name!r}", remedy="letters, digits and `_`")
    if not (hasattr(user_object, "__len__") and hasattr(user_object, "__getitem__")) or not len(user_object):
        raise TraceError(
            f"the validation set `{name}` is a `{type(user_object).__name__}`", remedy="a data set with samples"
        )
    return len(user_object)


def _shards(user_object: UserValue) -> Shards:
    try:
        return Shards(user_object)
    except StreamError as error:
        raise TraceError(str(error)) from error


def _samples(shards: Shards, begin: Callable[[int], None]) -> Iterator[UserValue]:
    for number in range(shards.count):
        yield from _of_shard(shards, number, begin)


def _of_shard(shards: Shards, number: int, begin: Callable[[int], None]) -> Iterator[UserValue]:
    begin(0)
    shard = shards.open(number, 0)
    for index in count(1):
        begin(index)
        try:
            sample = next(shard)
        except StopIteration:
            return
        yield sample


def _is_array(part: object) -> bool:
    """True for what has always been one tensor: a tensor, an array, a number, or a list of numbers."""

    if isinstance(part, dict) or (
        isinstance(part, tuple | list) and any(isinstance(item, torch.Tensor) for item in part)
    ):
        return False
    try:
        torch.as_tensor(part)
    except (TypeError, ValueError, RuntimeError):
        return False
    return True


def _structures(
    train: UserValue,
    begin: Callable[[int], None],
    collate: Collate,
    unsplit: bool,
    example: str,
    longest: int | None,
) -> tuple[tuple[TreeFact, TreeFact], bool, tuple[str, tuple[int, ...], tuple[int, ...]] | None]:
    """Returns the facts of input and target, from two batches of the largest sample among the first, and whether
    `collate` draws random numbers. Also returns a place of the input where a batch of the smallest sample has another
    shape.
    """

    def sample(index: int) -> UserValue:
        begin(index)
        return train[index]

    def batch(samples: int, seed: int = 0, index: int | None = None) -> UserValue:
        samples_made = [sample(largest if index is None else index) for _ in range(samples)]
        begin(seed)
        return collate(samples_made)

    sizes = {n: count_numbers(sample(n)) for n in range(min(LOOKED_AT, len(train)))}
    if longest is not None:
        sizes[longest] = count_numbers(sample(longest))
    largest, smallest = (choose(sizes, key=sizes.__getitem__) for choose in (max, min))
    largest = largest if longest is None else longest
    batches = [batch(samples) for samples in (SMALL, LARGE)]
    if not unsplit and any(not isinstance(batch, tuple | list) or len(batch) != 2 for batch in batches):
        raise TraceError(
            f"a batch is a pair (input, target), and the first one is a `{type(batches[0]).__name__}`",
            remedy="give pairs; or `model.loss = own()`, for a network that takes a whole batch and returns its loss",
        )
    pairs = [(batch, batch) if unsplit else tuple(batch) for batch in batches]
    save(pairs, example)
    input, target = (grown(*(pair[n] for pair in pairs)) for n in (0, 1))
    repeated = [tensors(pair) for pair in (batches[0], batch(SMALL), batch(SMALL, 1))]
    same, differing = (
        [torch.equal(*pair) for pair in zip(repeated[0], repetition, strict=True)] for repetition in repeated[1:]
    )
    smallest_batch = batch(SMALL, index=smallest)
    uneven = (
        _other_shape(pairs[0][0], smallest_batch if unsplit else smallest_batch[0])
        if sizes[smallest] < sizes[largest]
        else None
    )
    return (input, target), all(same) and not all(differing), uneven


def _other_shape(large: object, small: object) -> tuple[str, tuple[int, ...], tuple[int, ...]] | None:
    """Returns the first place where one of two structures has a tensor of another shape, and both shapes."""

    shapes = [
        {
            place: tuple(leaf.shape)
            for place, leaf in zip(paths(structure), flatten(structure)[0], strict=True)
            if isinstance(leaf, torch.Tensor)
        }
        for structure in (large, small)
    ]
    shape_pairs = ((place, shape, shapes[1].get(place, ())) for place, shape in shapes[0].items())
    return next((shape_pair for shape_pair in shape_pairs if shape_pair[1] != shape_pair[2]), None)


def _changes(samples: UserValue, index: int, begin: Callable[[int], None]) -> bool:
    """True if a sample differs when it is fetched again, with the same random numbers."""

    def ask() -> UserValue:
        begin(index)
        return samples[index]

    return not _same(ask(), ask())


def _same(one: UserValue, another: UserValue) -> bool:
    """True if two samples have equal numbers, and equal texts and other objects beside them."""
    import numpy as np

    def number(leaf: UserValue) -> UserValue:
        try:
            return torch.as_tensor(leaf).nan_to_num()
        except (TypeError, ValueError, RuntimeError):  # a text, also of numpy's, or an object of any other class
            return leaf

    def is_equal(one: UserValue, another: UserValue) -> bool:
        if type(one) is not type(another):
            return False
        if isinstance(one, torch.Tensor):
            return torch.equal(one, another)
        return np.array_equal(one, another) if isinstance(one, np.ndarray) else bool(one == another)

    these, other_parts = ([number(leaf) for leaf in flatten(sample)[0]] for sample in (one, another))
    return len(these) == len(other_parts) and all(map(is_equal, these, other_parts))


def _fact(value: object, what: str) -> TensorFact:
    try:
        tensor = torch.as_tensor(value)
    except (TypeError, ValueError, RuntimeError) as error:
        raise TraceError(f"the {what} of a sample is a `{type(value).__name__}`, which is not a tensor") from error
    return TensorFact(shape=tuple(tensor.shape), dtype=model_dtype(tensor.dtype))
