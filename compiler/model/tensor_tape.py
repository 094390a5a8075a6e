"""A layer as one rank of the tensor axis runs it: what DTensor styles make before and after a module.

Model: the layers are run with a rank's own shapes (`tape`). Between them goes the whole, a piece of the sequence, or a
share of the features; what a style gathers, or adds up, is an operation of its own, which takes memory. A gather along
any dim but the first is two: torch receives the parts one after another, and puts them together; a reduce-scatter takes
them apart first. An all-reduce leaves what it is given and makes its result beside it.

Contract: the shapes of parameters are a rank's. Sizes that ranks cannot share are rounded down; the rules refuse them.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import TypeAlias

from dslc.compiler.model.value import Value
from dslc.dsl.language.registry import Call

Operation: TypeAlias = Callable[..., Value]  # `Tape.operation`


def before(styles: Sequence[str], ranks: int, spec: Call, x: Value, operation: Operation) -> tuple[Call, Value]:
    """What a module is given, and what it is on a rank."""
    for style in styles:
        kind, _, rest = style.partition("_")
        if kind == "split":
            x = operation(x, gives=_new(x, 0, 1, ranks))
        elif rest == "of_pieces":
            x = _in_two(operation, x, _new(x, 0, ranks, 1))
        elif kind in ("column", "gathered", "scores"):
            # Forward it is the same; its gradient is added up over the ranks.
            x = operation(x, gives=x.new(*x.shape), view=True)
        if kind in ("column", "gathered", "scores"):
            spec = replace(spec, features=spec.features // ranks)  # type: ignore[attr-defined, call-arg]
    return spec, x


def after(styles: Sequence[str], ranks: int, y: Value, operation: Operation) -> Value:
    """What comes of what a module gives."""
    for style in styles:
        kind, _, rest = style.partition("_")
        if rest == "to_pieces":
            y = _in_two(operation, y, _new(y, 0, 1, ranks))
        elif kind in ("row", "vocabulary"):
            y = operation(y, gives=y.new(*y.shape), adds=True)
        elif kind == "gathered":
            y = _in_two(operation, y, _new(y, -1, ranks, 1))
        elif kind == "gather":
            y = _in_two(operation, y, _new(y, 0, ranks, 1))
    return y


def _in_two(operation: Operation, x: Value, result: Value) -> Value:
    """By way of a copy as large as the whole, in another order."""
    whole = x if x.count > result.count else result
    between = operation(x, gives=x.new(*whole.shape))
    return operation(between, gives=result)


def _new(x: Value, dim: int, more: int, less: int) -> Value:
    shape = list(x.shape)
    shape[dim] = shape[dim] * more // less
    return x.new(*shape)
