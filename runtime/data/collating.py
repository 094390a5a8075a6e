"""Makes samples that are structures of tensors a batch: stacked, or by a function of the user's."""

from __future__ import annotations

import dataclasses
from collections import Counter
from collections.abc import Callable, Sequence
from functools import lru_cache
from types import NoneType
from typing import TypeAlias, cast

import numpy as np
import torch
from torch import Tensor

from dslc.compiler.ir.program import PythonFunction
from dslc.compiler.trace.structures import Structure, flatten, paths, unflatten
from dslc.runtime.process.job_line import mark_errors
from dslc.runtime.process.user_code import load_function

Collate: TypeAlias = Callable[[list[Structure]], Structure]


class UnevenSamples(ValueError):
    """Samples that do not stack. The text says which part of them; `index` is the first sample that differs."""

    def __init__(self, text: str, index: int | None = None) -> None:
        super().__init__(text)
        self.index = index


def collate(function: PythonFunction | None) -> Collate:
    """Returns the function that makes a list of samples a batch."""
    if function is None:
        return stacked
    own, here = _make_collate(function), mark_errors(function.line)

    def called(samples: list[object]) -> object:
        with here:
            return own(samples)

    return called


def _make_collate(function: PythonFunction) -> Collate:
    """Returns a user's function, or an object of a user's class, made with the job's arguments."""
    found = load_function(function)
    collate: Collate = found() if isinstance(getattr(found, "func", found), type) else found
    return collate


_LEAVES = (Tensor, np.ndarray, int, float, bool, str)


def stacked(samples: list[Structure], path: str = "") -> Structure:
    """Stacks each tensor of equal structures along a new first dim. Arrays and numbers become tensors, integers of 64
    bits and floats of 32; anything else becomes a list. `path` is the place of the `samples` in larger ones.

    Raises UnevenSamples.
    """
    first, kind = samples[0], type(samples[0])
    if len(set(map(type, samples))) > 1:
        return _flattened(samples, path)
    # What most samples are, part by part: torch's pytrees take 40 us for each sample.
    if kind in _LEAVES:
        return _stack(samples, path)
    if (kind is tuple or kind is list) and len(set(map(len, samples))) == 1:
        return kind([stacked([*column], f"{path}[{n}]") for n, column in enumerate(zip(*samples, strict=True))])
    if kind is dict and all(each.keys() == first.keys() for each in samples):
        return {key: stacked([each[key] for each in samples], f"{path}[{key!r}]") for key in first}
    if dataclasses.is_dataclass(kind) and (names := _init_fields(kind)) is not None:
        columns = {name: [getattr(each, name) for each in samples] for name in names}
        if not any(NoneType in map(type, column) for column in columns.values()):
            return kind(**{name: stacked(column, f"{path}.{name}") for name, column in columns.items()})
    return _flattened(samples, path)


@lru_cache(maxsize=16)
def _init_fields(kind: type) -> tuple[str, ...] | None:
    """Returns the fields of a dataclass, None if its objects are not made of all of them."""
    fields = dataclasses.fields(kind)
    return tuple(field.name for field in fields) if all(field.init for field in fields) else None


def _flattened(samples: list[object], path: str) -> object:
    first, form = flatten(samples[0])
    rows = [first]
    for index, sample in enumerate(samples[1:], 1):
        leaves, other = flatten(sample)
        if other != form:
            raise UnevenSamples(f"the structures of {path} differ" if path else "their structures differ", index)
        rows.append(leaves)
    columns = zip(*rows, strict=True)
    places = [path + place for place in paths(samples[0])]
    return unflatten([_stack(*each) for each in zip(columns, places, strict=True)], form)


def _stack(values: Sequence[object], path: str) -> object:
    if not isinstance(values[0], Tensor | np.ndarray | np.number | np.bool_ | float | int):
        return list(values)
    try:
        is_plain = set(map(type, values)) == {Tensor}
        return torch.stack(cast("list[Tensor]", list(values)) if is_plain else [_tensor(value) for value in values])
    except (TypeError, RuntimeError, ValueError) as error:
        raise unstackable(values, path or "one", error) from error


def unstackable(values: Sequence[object], path: str, error: Exception) -> UnevenSamples:
    """Returns the exception for values that do not stack, which names the first one that is unlike the rest."""
    shapes: list[tuple[int, ...]] = []
    for index, value in enumerate(values):
        try:
            shapes.append(tuple(_tensor(value).shape))
        except (TypeError, RuntimeError, ValueError) as reason:
            kind = "None" if value is None else f"a `{type(value).__name__}`"
            return UnevenSamples(f"{path} is {kind}, and no tensor: {reason}", index)
    usual = Counter(shapes).most_common(1)[0][0]
    unusual = [index for index, shape in enumerate(shapes) if shape != usual]
    if not unusual:
        return UnevenSamples(str(error))
    return UnevenSamples(f"{path} has shape {shapes[unusual[0]]}, and others {usual}", unusual[0])


def _tensor(value: object) -> Tensor:
    return torch.tensor(value, dtype=torch.float32) if isinstance(value, float) else torch.as_tensor(value)
