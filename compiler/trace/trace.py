"""Traces a user's own functions by calling them once: modules on the meta device, data sets for one sample.

model.py traces modules. `compiler/trace` is the only room of this floor that imports torch and runs a user's code.
`check` comes here only with `--trace`.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from dslc.compiler.ir.facts import SourceFacts
from dslc.compiler.ir.tensors import TensorFact
from dslc.compiler.trace.model import TraceError, seen, trace_model, try_low_copy, try_to_make

__all__ = ["TraceError", "trace_model", "trace_source", "try_low_copy", "try_to_make"]


TWICE = 4  # samples that are fetched twice


def trace_source(make: Callable[[], object], begin: Callable[[int], None]) -> SourceFacts:
    """Returns the facts of the result of `make()`: a map-style data set, or a pair (train, validation). Samples are
    pairs (input, target).

    `begin` seeds the random generators for a sample, by its number, as the training does.
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
    if not isinstance(sample, tuple | list) or len(sample) != 2:
        raise TraceError(f"a sample is a pair (input, target), and the first one is a `{type(sample).__name__}`")
    return SourceFacts(
        samples=len(train),
        validation_samples=None if validation is None else len(validation),
        input=_fact(sample[0], "input"),
        target=_fact(sample[1], "target"),
        changes=next((index for index in range(min(TWICE, len(train))) if _changes(train, index, begin)), None),
    )


def _changes(samples: Any, index: int, begin: Callable[[int], None]) -> bool:
    """True if a sample differs when it is fetched again, with the same random numbers."""
    import torch

    def ask() -> tuple[torch.Tensor, ...]:
        begin(index)
        return tuple(torch.as_tensor(part).nan_to_num() for part in samples[index])

    return not all(torch.equal(one, other) for one, other in zip(ask(), ask(), strict=True))


def _fact(value: object, what: str) -> TensorFact:
    import torch

    try:
        tensor = torch.as_tensor(value)
    except (TypeError, ValueError, RuntimeError) as error:
        raise TraceError(f"the {what} of a sample is a `{type(value).__name__}`, which is not a tensor") from error
    return TensorFact(shape=tuple(tensor.shape), dtype=seen(tensor.dtype))
