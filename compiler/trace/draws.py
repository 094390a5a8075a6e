"""Tells which of a network's random numbers the runtime can give by sample (runtime/technique/sample_draws.py).

Model: a network is traced with two numbers of samples. A draw of which one dim grows with the samples is by sample; a
draw whose shape stays is shared by all of them. The layer of a draw is the innermost module that runs.

Limits: a first dim that grows is taken to go sample by sample, as of (samples * positions, width).
"""

from __future__ import annotations

from collections.abc import Sequence
from types import FrameType
from typing import Any, NamedTuple

from torch import Tensor, nn

from dslc.compiler.ir.network_facts import CodePlace
from dslc.compiler.ir.steps import SHARED, DrawDims
from dslc.compiler.trace.code_place import module_of, names_of, place_of
from dslc.compiler.trace.private_torch import Arguments, Operator, Options
from dslc.compiler.trace.run import tensors_of
from dslc.compiler.trace.structures import class_name

PERMUTATION, CHOICE = "randperm", "multinomial"

# Operations that fill a tensor by one of the kernels that the runtime replaces.
CONTROLLED = frozenset(
    ["bernoulli", "bernoulli.p", "bernoulli_.float", "bernoulli_.Tensor", "exponential_", CHOICE]
    + ["normal_", "normal.float_float", "normal.float_Tensor", "normal.Tensor_float", "normal.Tensor_Tensor"]
    + ["rand", "rand_like", "randn", "randn_like", "uniform_", PERMUTATION]
    + ["randint", "randint.low", "randint_like", "randint_like.low_dtype", "random_.from", "random_.to"]
)


class Draw(NamedTuple):
    """A random operation: its name, the shape that it fills, its place, and the class of the module. `fault`: the
    reason why no other kernel can fill it, in words; "" for none.
    """

    operation: str
    shape: tuple[int, ...]
    place: CodePlace
    kind: str
    fault: str = ""


def draw_at(
    frame: FrameType, model: nn.Module, operation: Operator, args: Arguments, named: Options, result: object
) -> Draw:
    """Returns the draw of an operation that a network calls in `frame`."""
    names, name = names_of(model), operation.name().removeprefix("aten::")
    module, made = module_of(frame, names) or model, tensors_of(result)
    if name == CHOICE:  # draws a number for each chance
        made = tensors_of(args[:1])
    return Draw(
        operation=name,
        shape=tuple(made[0].shape) if made else (),
        place=place_of(frame, names, model),
        kind=class_name(type(module)),
        fault=_fault(name, args, named),
    )


def _fault(name: str, args: Arguments, named: Options) -> str:
    if named.get("generator") is not None or "generator" in name:
        return "it draws from a generator of the network's own"
    several = isinstance(args[1], int) and args[1] > 1 if len(args) > 1 else False
    if name == CHOICE and several and (args[2] if len(args) > 2 else named.get("replacement", False)):
        return "`multinomial` draws several with replacement in a kernel of torch's, which knows no samples"
    if name in ("random_.from", "random_.to") and any(isinstance(each, Tensor) for each in args[1:]):
        return "the limits of `random_` are tensors"
    return (
        "" if name in CONTROLLED else f"`{name.partition('.')[0]}` draws in a kernel of torch's, which knows no samples"
    )


def classify(small: Sequence[Draw], large: Sequence[Draw], few: int, more: int) -> dict[str, Any]:
    """Returns the facts of a network's draws (`NetworkFacts`), from passes over `few` samples and over `more`."""
    first = small[0].place if small else large[0].place if large else None
    if len(small) != len(large):
        reason = f"a pass over {few} samples draws {len(small)} times, one over {more} samples {len(large)} times"
        return {"torch_draws": first, "uncontrolled_draw": first, "uncontrolled_because": reason}
    dims: dict[str, list[int]] = {}  # by module
    kinds: dict[str, set[int]] = {}
    for one, other in zip(small, large, strict=True):
        dim, fault = _sample_dim(one, other, few, more)
        if fault:
            return {"torch_draws": first, "uncontrolled_draw": one.place, "uncontrolled_because": fault}
        dims.setdefault(one.place.module, []).append(dim)
        kinds.setdefault(one.kind, set()).add(dim)
    of_module = {one.place.module: one.kind for one in small}
    return {
        "torch_draws": first,
        "draws": tuple(kind for kind, found in kinds.items() if found != {SHARED}),
        "shared_draws": tuple(kind for kind, found in kinds.items() if found == {SHARED}),
        "draw_dims": tuple(
            DrawDims(module=name, dims=tuple(found)) for name, found in dims.items() if kinds[of_module[name]] != {0}
        ),
    }


def _sample_dim(one: Draw, other: Draw, few: int, more: int) -> tuple[int, str]:
    """Returns the dim of a draw that grows with the samples, or `SHARED`; and the reason why there is none, or ""."""
    if one.fault or other.fault:
        return SHARED, one.fault or other.fault
    if one.shape == other.shape:
        return SHARED, ""
    if one.operation == PERMUTATION:
        return SHARED, "it orders the samples of a batch, of which no rank and no micro-batch has all"
    grown = [dim for dim, sizes in enumerate(zip(one.shape, other.shape, strict=False)) if len(set(sizes)) > 1]
    if len(one.shape) != len(other.shape) or len(grown) != 1:
        return SHARED, f"its shape {_shape_text(one)} grows to {_shape_text(other)} with {more} samples for {few}"
    if one.shape[grown[0]] * more != other.shape[grown[0]] * few:
        return SHARED, f"its shape {_shape_text(one)} does not grow as the number of samples"
    return grown[0], ""


def _shape_text(draw: Draw) -> str:
    return f"({', '.join(map(str, draw.shape))})"
