"""Tells which of a network's random numbers the runtime can give by sample (runtime/technique/sample_draws.py).

Model: a network is traced with two numbers of samples. A draw is by sample if one of its dims grows with the samples; a
draw whose shape stays is shared by all of them. The layer of a draw is the innermost module whose `forward` runs: a
helper method of another module, or a hook, draws for the module that calls it.

Limits: where a dim grows by several rows for each sample, as the first of (samples * positions, width), their order is
open here. Following the samples tells it (sharding/sample_order.py), or a trial (runtime/step/draw_layout.py).
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from types import FrameType
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from dslc.compiler.ir.network_facts import CodePlace
from dslc.compiler.ir.steps import SHARED, WIDEST_RANGE, DrawDims
from dslc.compiler.trace.code_place import HostDraws, line_at, names_of
from dslc.compiler.trace.private_torch import Arguments, OperationMode, Operator, Options
from dslc.compiler.trace.run import tensors_of
from dslc.compiler.trace.structures import class_name

PERMUTATION, CHOICE = "randperm", "multinomial"
_NORMAL = ("normal.float_Tensor", "normal.Tensor_float", "normal.Tensor_Tensor")
_LIMITS = {  # where operations that draw integers have their limits
    "randint": slice(0, 1),
    "randint.low": slice(0, 2),
    "randint_like": slice(1, 2),
    "randint_like.low_dtype": slice(1, 3),
    "random_.from": slice(1, 3),
    "random_.to": slice(1, 2),
}

# Operations that fill a tensor by one of the kernels that the runtime replaces.
CONTROLLED = frozenset(
    ["bernoulli", "bernoulli.p", "bernoulli_.float", "bernoulli_.Tensor", "exponential_", CHOICE]
    + ["normal_", "normal.float_float", *_NORMAL]
    + ["rand", "rand_like", "randn", "randn_like", "uniform_", PERMUTATION, *_LIMITS]
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


def is_draw(func: Operator) -> bool:
    """True for a random operation; attention does others, if it drops weights."""
    return torch.Tag.nondeterministic_seeded in func.tags and "attention" not in str(func)


@contextmanager
def running_modules(model: nn.Module) -> Iterator[list[nn.Module]]:
    """Yields the modules whose `forward` runs, the innermost last, as the runtime knows them."""
    running: list[nn.Module] = []
    with ExitStack() as stack:
        for module in model.modules():
            attributes = vars(module)
            stack.callback(_restore, attributes, attributes.get("forward"))
            attributes["forward"] = _followed(module, running)
        yield running


def _restore(attributes: dict[str, object], forward: object) -> None:
    del attributes["forward"]
    if forward is not None:
        attributes["forward"] = forward


def _followed(module: nn.Module, running: list[nn.Module]) -> Callable[..., object]:
    forward = module.forward

    @functools.wraps(forward)
    def run(*args: object, **named: object) -> object:
        running.append(module)
        try:
            return forward(*args, **named)
        finally:
            running.pop()

    return run


def draw_at(
    frame: FrameType,
    model: nn.Module,
    running: Sequence[nn.Module],
    operation: Operator,
    args: Arguments,
    named: Options,
    result: object,
    *,
    outside: str = "",
) -> Draw:
    """Returns the draw of an operation that a network calls in `frame`, while the `forward` of some modules runs.
    `outside` names the layer of what a user's function draws outside of them; "" for none.
    """
    name, tensors = operation.name().removeprefix("aten::"), tensors_of(result)
    module = running[-1] if running else model
    layer = "" if running else outside
    dtype = tensors[0].dtype if tensors else None
    if name == CHOICE:  # draws a number for each chance
        tensors = tensors_of(args[:1])
    return Draw(
        operation=name,
        shape=tuple(tensors[0].shape) if tensors else (),
        place=CodePlace(
            module=layer or names_of(model).get(id(module), ""),
            kind=type(module).__name__,
            line=line_at(frame),
        ),
        kind=layer or class_name(type(module)),
        fault=_fault(name, args, named, dtype) if running or layer else "it draws outside of the network's `forward`",
    )


def line_of_draw(run: Callable[[], object]) -> str | None:
    """Returns the line at which a user's function first draws random numbers, of torch, Python or numpy; "" for an
    unknown line, None if it draws none.
    """
    lines: list[str] = []

    def run_operation(func: Operator, args: Arguments, kwargs: Options) -> object:
        if is_draw(func):
            lines.append(line_at(sys._getframe(1)))
        return func(*args, **kwargs)

    host_draws = HostDraws(nn.Identity())
    with host_draws.watch(), OperationMode(run_operation):
        run()
    if lines or not host_draws.source:
        return lines[0] if lines else None
    with host_draws.line_of() as places:
        run()
    return places[0].line if places else ""


def _fault(name: str, args: Arguments, named: Options, dtype: torch.dtype | None) -> str:
    if named.get("generator") is not None or "generator" in name:
        return "it draws from a generator of the network's own"
    draws_many = isinstance(args[1], int) and args[1] > 1 if len(args) > 1 else False
    if name == CHOICE and draws_many and (args[2] if len(args) > 2 else named.get("replacement", False)):
        return "`multinomial` draws several with replacement in a kernel of torch's, which knows no samples"
    if name in _LIMITS:
        return _fault_of_integers(name.partition(".")[0], (0, *args[_LIMITS[name]])[-2:], dtype)
    if name in _NORMAL and dtype is not None and dtype.is_complex:
        return "`normal` of a complex mean draws in a kernel of torch's, which knows no samples"
    return (
        "" if name in CONTROLLED else f"`{name.partition('.')[0]}` draws in a kernel of torch's, which knows no samples"
    )


def _fault_of_integers(name: str, limits: Sequence[object], dtype: torch.dtype | None) -> str:
    low, high = limits
    if any(isinstance(limit, Tensor) for limit in limits):
        return f"the limits of `{name}` are tensors"
    if low is None or high is None:
        return f"`{name}` has no upper limit"
    if dtype == torch.bool:
        return f"`{name}` draws integers as `torch.bool`"
    is_wide = isinstance(low, int) and isinstance(high, int) and high - low > WIDEST_RANGE
    return f"`{name}` draws integers of a range above 2**53" if is_wide else ""


def classify(small: Sequence[Draw], large: Sequence[Draw], few: int, more: int) -> dict[str, Any]:
    """Returns the facts of a network's draws (`NetworkFacts`), from passes over `few` samples and over `more`."""
    first = small[0].place if small else large[0].place if large else None
    if len(small) != len(large):
        reason = f"a pass over {few} samples draws {len(small)} times, one over {more} samples {len(large)} times"
        return {"torch_draws": first, "uncontrolled_draw": first, "uncontrolled_because": reason}
    dims: dict[str, list[int]] = {}  # by module
    rows: dict[str, list[int]] = {}
    kinds: dict[str, set[int]] = {}
    joined: CodePlace | None = None
    for one, other in zip(small, large, strict=True):
        dim, fault = _sample_dim(one, other, few, more)
        if fault:
            return {"torch_draws": first, "uncontrolled_draw": one.place, "uncontrolled_because": fault}
        dims.setdefault(one.place.module, []).append(dim)
        rows.setdefault(one.place.module, []).append(1 if dim == SHARED else one.shape[dim] // few)
        if rows[one.place.module][-1] > 1:
            joined = joined or one.place
        kinds.setdefault(one.kind, set()).add(dim)
    of_module = {one.place.module: one.kind for one in small}
    return {
        "torch_draws": first,
        "joined_draw": joined,
        "doubtful_draw": joined,
        "draws": tuple(kind for kind, kind_dims in kinds.items() if kind_dims != {SHARED}),
        "shared_draws": tuple(kind for kind, kind_dims in kinds.items() if kind_dims == {SHARED}),
        "draw_dims": tuple(
            DrawDims(module=name, dims=tuple(module_dims), rows=tuple(rows[name]))
            for name, module_dims in dims.items()
            if kinds[of_module[name]] != {0} or max(rows[name]) > 1
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
    growing_dims = [dim for dim, sizes in enumerate(zip(one.shape, other.shape, strict=False)) if len(set(sizes)) > 1]
    if len(one.shape) != len(other.shape) or len(growing_dims) != 1:
        return SHARED, f"its shape {_shape_text(one)} grows to {_shape_text(other)} with {more} samples for {few}"
    size = one.shape[growing_dims[0]]
    if size * more != other.shape[growing_dims[0]] * few:
        return SHARED, f"its shape {_shape_text(one)} does not grow as the number of samples"
    if size % few:
        return SHARED, f"its shape {_shape_text(one)} is of a part of {few} samples"
    return growing_dims[0], ""


def _shape_text(draw: Draw) -> str:
    return f"({', '.join(map(str, draw.shape))})"
