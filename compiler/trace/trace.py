"""Traces a user's own functions by calling them once: modules on the meta device, data sets for one sample.

model.py traces modules. `compiler/trace` is the only room of this floor that imports torch and runs a user's code.
`check` comes here only with `--trace`.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from dslc.compiler.ir.facts import SourceFacts
from dslc.compiler.ir.tensors import TensorFact, TreeFact
from dslc.compiler.trace.batch import LARGE, SMALL, grown
from dslc.compiler.trace.model import TraceError, seen, trace_model, try_low_copy, try_to_make

__all__ = ["TraceError", "trace_model", "trace_source", "try_low_copy", "try_to_make"]


TWICE = 4  # samples that are fetched twice
LOOKED_AT = 16  # samples among which the largest is looked for

Collate = Callable[[list[Any]], Any]


def trace_source(
    make: Callable[[], object],
    begin: Callable[[int], None],
    *,
    collate: Collate,
    stacked: bool = True,
    whole: bool = False,
    example: str = "",
) -> SourceFacts:
    """Returns the facts of the result of `make()`: a map-style data set, or a pair (train, validation). Samples are
    pairs (input, target), or anything if the network takes them `whole`.

    `begin` seeds the random generators for a sample, by its number, as the training does. `collate` makes samples a
    batch; `stacked`: as one stacks tensors. Batches that are structures are written to the file `example`.
    """
    made = make()
    if isinstance(made, tuple) and len(made) == 2 and all(hasattr(part, "shape") for part in made):
        made = list(zip(*made, strict=True))  # a pair of arrays is one data set
    train, validation = made if isinstance(made, tuple) and len(made) == 2 else (made, None)
    if not hasattr(train, "__len__") or not hasattr(train, "__getitem__"):
        raise TraceError(f"a data set has `len` and indexing, and `{type(train).__name__}` lacks them")
    if len(train) == 0:
        raise TraceError("the data set is empty")
    sample = train[0]
    if not whole and stacked and (not isinstance(sample, tuple | list) or len(sample) != 2):
        raise TraceError(
            f"a sample is a pair (input, target), and the first one is a `{type(sample).__name__}`",
            remedy="give pairs; or `model.loss = own()`, for a network that takes a whole sample and returns its loss",
        )
    common: dict[str, Any] = {
        "samples": len(train),
        "validation_samples": None if validation is None else len(validation),
        "changes": next((index for index in range(min(TWICE, len(train))) if _changes(train, index, begin)), None),
    }
    if stacked and not whole and all(map(_is_array, sample)):
        return SourceFacts(input=_fact(sample[0], "input"), target=_fact(sample[1], "target"), **common)
    return SourceFacts(structures=_structures(train, begin, collate, whole, example), **common)


def _is_array(part: object) -> bool:
    """True for what has always been one tensor: a tensor, an array, a number, or a list of numbers."""
    import torch

    if isinstance(part, dict) or (
        isinstance(part, tuple | list) and any(isinstance(each, torch.Tensor) for each in part)
    ):
        return False
    try:
        torch.as_tensor(part)
    except (TypeError, ValueError, RuntimeError):
        return False
    return True


def _structures(
    train: Any, begin: Callable[[int], None], collate: Collate, whole: bool, example: str
) -> tuple[TreeFact, TreeFact]:
    """Returns the facts of input and target, from two batches of the largest sample among the first."""
    import torch

    from dslc.compiler.trace.structures import tensors

    def sample(index: int) -> Any:
        begin(index)
        return train[index]

    sizes = [sum(t.numel() for t in tensors(_arrays_as_tensors(sample(n)))) for n in range(min(LOOKED_AT, len(train)))]
    largest = max(range(len(sizes)), key=sizes.__getitem__)
    batches = [collate([sample(largest) for _ in range(samples)]) for samples in (SMALL, LARGE)]
    if not whole and any(not isinstance(batch, tuple | list) or len(batch) != 2 for batch in batches):
        raise TraceError(
            f"a batch is a pair (input, target), and the first one is a `{type(batches[0]).__name__}`",
            remedy="give pairs; or `model.loss = own()`, for a network that takes a whole batch and returns its loss",
        )
    pairs = [(batch, batch) if whole else tuple(batch) for batch in batches]
    torch.save(pairs, example)
    input, target = (grown(*(pair[n] for pair in pairs)) for n in (0, 1))
    return input, target


def _arrays_as_tensors(value: object) -> object:
    """Returns a sample with its numpy arrays as tensors, for counting their numbers."""
    import numpy as np
    import torch

    from dslc.compiler.trace.structures import flatten

    return [torch.as_tensor(leaf) if isinstance(leaf, np.ndarray) else leaf for leaf in flatten(value)[0]]


def _changes(samples: Any, index: int, begin: Callable[[int], None]) -> bool:
    """True if a sample differs when it is fetched again, with the same random numbers."""
    import numpy as np
    import torch

    from dslc.compiler.trace.structures import flatten

    def ask() -> list[Any]:
        begin(index)
        leaves = flatten(samples[index])[0]
        numbers = (torch.Tensor, np.ndarray, np.generic, float, int)
        return [torch.as_tensor(leaf).nan_to_num() if isinstance(leaf, numbers) else leaf for leaf in leaves]

    def same(one: Any, other: Any) -> bool:
        return torch.equal(one, other) if isinstance(one, torch.Tensor) else bool(one == other)

    one, other = ask(), ask()
    return len(one) != len(other) or not all(map(same, one, other))


def _fact(value: object, what: str) -> TensorFact:
    import torch

    try:
        tensor = torch.as_tensor(value)
    except (TypeError, ValueError, RuntimeError) as error:
        raise TraceError(f"the {what} of a sample is a `{type(value).__name__}`, which is not a tensor") from error
    return TensorFact(shape=tuple(tensor.shape), dtype=seen(tensor.dtype))
