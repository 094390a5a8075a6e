"""Tells which of a network's random numbers the runtime can give by sample (runtime/technique/sample_draws.py).

Model: a network is traced with two numbers of samples. A draw whose first dim grows with the samples, and no other dim,
is by sample; a draw whose shape stays is shared by all of them. The layer of a draw is the innermost module that runs.

Limits: a first dim that grows is taken to go sample by sample, as of (samples * positions, width).
"""

from __future__ import annotations

from collections.abc import Sequence
from types import FrameType
from typing import Any, NamedTuple

from torch import nn

from dslc.compiler.ir.network_facts import CodePlace
from dslc.compiler.trace.code_place import module_of, names_of, place_of
from dslc.compiler.trace.private_torch import Arguments, Operator
from dslc.compiler.trace.structures import class_name

# Operations that fill a tensor by one of the kernels that the runtime replaces.
CONTROLLED = frozenset(["bernoulli_.float", "uniform_", "normal_", "rand", "rand_like", "randn", "randn_like"])


class Draw(NamedTuple):
    """A random operation: its name, the shape that it fills, its place, and the class of the module."""

    operation: str
    shape: tuple[int, ...]
    place: CodePlace
    kind: str


def draw_at(frame: FrameType, model: nn.Module, operation: Operator, args: Arguments) -> Draw:
    """Returns the draw of an operation that a network calls in `frame`."""
    names, given = names_of(model), args[0] if args else None
    module, shape = module_of(frame, names) or model, getattr(given, "shape", given)
    return Draw(
        operation=operation.name().removeprefix("aten::"),
        shape=tuple(shape) if isinstance(shape, Sequence) else (),
        place=place_of(frame, names, model),
        kind=class_name(type(module)),
    )


def classify(small: Sequence[Draw], large: Sequence[Draw], few: int, more: int) -> dict[str, Any]:
    """Returns the facts of a network's draws (`NetworkFacts`), from passes over `few` samples and over `more`."""
    first = small[0].place if small else large[0].place if large else None
    by_sample: dict[str, None] = {}
    shared: dict[str, None] = {}
    if len(small) != len(large):
        return {"torch_draws": first, "uncontrolled_draw": first}
    for one, other in zip(small, large, strict=True):
        grows = one.shape[:1] != other.shape[:1] and one.shape[0] * more == other.shape[0] * few
        rest_stays = len(one.shape) == len(other.shape) and one.shape[1:] == other.shape[1:]
        kinds = by_sample if grows and rest_stays else shared if one.shape == other.shape else None
        opposite = shared if kinds is by_sample else by_sample
        if one.operation not in CONTROLLED or kinds is None or one.kind in opposite:
            return {"torch_draws": first, "uncontrolled_draw": one.place}
        kinds[one.kind] = None
    return {"torch_draws": first, "draws": tuple(by_sample), "shared_draws": tuple(shared)}
