"""Makes samples that are structures of tensors a batch: stacked, or by a function of the user's."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, TypeAlias

import numpy as np
import torch
from torch import Tensor

from dslc.compiler.ir.program import PythonFunction
from dslc.compiler.trace.structures import flatten, paths, unflatten
from dslc.runtime.process.job_line import at
from dslc.runtime.process.user_code import load_function

Collate: TypeAlias = Callable[[list[Any]], Any]


class UnevenSamples(ValueError):
    """Samples that do not stack; the text says which part of them."""


def collate(function: PythonFunction | None) -> Collate:
    """Returns the function that makes a list of samples a batch."""
    if function is None:
        return stacked
    own, here = _made(function), at(function.line)

    def called(samples: list[Any]) -> Any:
        with here:
            return own(samples)

    return called


def _made(function: PythonFunction) -> Collate:
    """Returns a user's function, or an object of a user's class, made with the job's arguments."""
    found: Any = load_function(function)
    kind = getattr(found, "func", found)
    return found() if isinstance(kind, type) else found


def stacked(samples: list[Any]) -> Any:
    """Stacks each tensor of equal structures along a new first dim. Arrays and numbers become tensors, integers of 64
    bits and floats of 32; anything else becomes a list. Raises UnevenSamples.
    """
    first, form = flatten(samples[0])
    rows = [first]
    for sample in samples[1:]:
        leaves, other = flatten(sample)
        if other != form:
            raise UnevenSamples("their structures differ")
        rows.append(leaves)
    return unflatten([_stack(column, samples[0], n) for n, column in enumerate(zip(*rows, strict=True))], form)


def _stack(values: Sequence[Any], sample: Any, number: int) -> Any:
    if not isinstance(values[0], Tensor | np.ndarray | np.generic | float | int):
        return list(values)
    tensors = [_tensor(value) for value in values]
    shapes = {tuple(tensor.shape) for tensor in tensors}
    if len(shapes) > 1:
        one, other, *_ = sorted(shapes)
        raise UnevenSamples(f"{paths(sample)[number] or 'they'} has shapes {one} and {other}")
    return torch.stack(tensors)


def _tensor(value: Any) -> Tensor:
    return torch.tensor(value, dtype=torch.float32) if isinstance(value, float) else torch.as_tensor(value)
