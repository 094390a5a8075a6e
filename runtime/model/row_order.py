"""The order in which ranks hold the rows of a column in parts, such as joined queries, keys and values.

Model: of each part every rank of the tensor axis has an equal piece; one after another these pieces are its share of
the rows. Of stacked experts the second dim has these rows. DTensor knows contiguous shares alone. So the tensor is
permuted for DTensor: first the pieces of rank 0, of all parts, then the pieces of rank 1. Whatever moves numbers
between a rank and a whole tensor converts: initial values, weights of files, checkpoints, exported weights.

Contract: `begin` says which parameters of this process are permuted. They are known by their names in the plain model,
with and without adapters. Names that it does not know are in the order of the whole tensor.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from dslc.compiler.ir.parameter_names import base_name, is_of_adapter
from dslc.compiler.ir.program import TensorParallelStep
from dslc.compiler.ir.tensor_styles import CUT_OF_EXPERTS, EXPERT_STYLES

Part = tuple[slice, ...]
Run = tuple[Part, Part]  # a place in a rank's part, and the same in the whole tensor

# By parameter: the dim, and its rows in the whole tensor, in the order in which they are held.
_SEGMENTS: dict[str, tuple[int, tuple[slice, ...]]] = {}


def begin(step: TensorParallelStep | None) -> None:
    """Notes the parameters that are permuted; forgets the parameters of an earlier job."""
    _SEGMENTS.clear()
    if step is None:
        return
    experts = {f"{module}.experts" for module, style in step.styles if style in EXPERT_STYLES}
    for module, parts in step.parts:
        segments = tuple(_segments(parts, step.size))
        is_stack = base_name(module) in experts
        names = {"gate_up_proj": CUT_OF_EXPERTS["gate_up_proj"]} if is_stack else {"weight": 0, "bias": 0}
        _SEGMENTS.update({_key(f"{module}.{name}"): (dim, segments) for name, dim in names.items()})


def _key(name: str) -> str:
    return name if is_of_adapter(name) else base_name(name)


def _segments(parts: tuple[int, ...], ranks: int) -> Iterator[slice]:
    for rank in range(ranks):
        start = 0
        for size in parts:
            piece = size // ranks
            yield slice(start + rank * piece, start + (rank + 1) * piece)
            start += size


def is_permuted(name: str) -> bool:
    return _key(name) in _SEGMENTS


def as_held(name: str, unsharded: Tensor) -> Tensor:
    """Returns a whole tensor with its rows in the order in which the ranks hold them."""
    if not is_permuted(name):
        return unsharded
    dim, segments = _SEGMENTS[_key(name)]
    return torch.cat([unsharded[_along(unsharded, dim, rows)] for rows in segments], dim)


def as_named(name: str, sharded: Tensor) -> Tensor:
    """Returns a whole tensor with its rows in their own order, from the order in which the ranks hold them."""
    if not is_permuted(name):
        return sharded
    unsharded = torch.empty_like(sharded)
    for own_run, run in runs_of_part(name, tuple(slice(0, size) for size in sharded.shape)):
        unsharded[run] = sharded[own_run]
    return unsharded


def runs_of_part(name: str, part: Part) -> Iterator[Run]:
    """Yields where runs of a rank's rows lie in the whole tensor; `part` is the rank's part as it is held."""
    own_part = tuple(slice(0, interval.stop - interval.start) for interval in part)
    if not is_permuted(name) or not part:
        yield own_part, part
        return
    dim, segments = _SEGMENTS[_key(name)]
    before, held, after = part[:dim], part[dim], part[dim + 1 :]
    first = 0
    for rows in segments:
        size = rows.stop - rows.start
        begins, ends = max(held.start, first), min(held.stop, first + size)
        if begins < ends:
            start = rows.start + begins - first
            own_rows, rows_there = slice(begins - held.start, ends - held.start), slice(start, start + ends - begins)
            yield (*own_part[:dim], own_rows, *own_part[dim + 1 :]), (*before, rows_there, *after)
        first += size


def _along(tensor: Tensor, dim: int, rows: slice) -> Part:
    """Returns the place of rows along a dim."""
    return tuple(rows if number == dim else slice(0, size) for number, size in enumerate(tensor.shape))
