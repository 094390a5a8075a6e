"""A layer as one rank of the tensor axis runs it: the operations of DTensor styles before and after a module.

Model: the layers are run with a rank's own shapes (tape.py). Values between them are whole, a piece of the sequence, or
a share of the features. A style's gather or sum is an operation of its own, which takes memory. A gather along any dim
but the first is two operations: torch receives the parts one after another, and joins them; a reduce-scatter splits
them first. A reduce-scatter runs beside the tensor that it has split, and over gloo beside a copy of the parts; the
backward pass of a gather is one. An all-reduce keeps its input and makes its result beside it.

Contract: the shapes of parameters are a rank's. Sizes that ranks cannot share are rounded down; the rules refuse them.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import TypeAlias, assert_never

from dslc.compiler.ir.tensor_styles import TensorStyle
from dslc.compiler.model.value import Value
from dslc.dsl.language.registry import Call

Operation: TypeAlias = Callable[..., Value]  # `Tape.operation`


def shard_input(
    styles: Sequence[TensorStyle], ranks: int, spec: Call, x: Value, operation: Operation, on_cpu: bool
) -> tuple[Call, Value]:
    """Returns a module's declaration as on one rank, and its input."""
    for style in styles:
        match style:
            case TensorStyle.SPLIT:
                x = operation(x, gives=_new(x, 0, 1, ranks))
            case TensorStyle.COLUMN_OF_PIECES | TensorStyle.GATHERED_OF_PIECES | TensorStyle.SCORES_OF_PIECES:
                x, spec = _in_two(operation, x, _new(x, 0, ranks, 1), on_cpu), _narrowed(spec, ranks)
            case TensorStyle.COLUMN | TensorStyle.GATHERED | TensorStyle.SCORES:
                # Unchanged forward; its gradient is summed over the ranks.
                x, spec = operation(x, gives=x.new(*x.shape), view=True), _narrowed(spec, ranks)
            case TensorStyle.ROW | TensorStyle.ROW_TO_PIECES | TensorStyle.ROW_OF_WHOLE | TensorStyle.VOCABULARY:
                pass
            case TensorStyle.SEQUENCE | TensorStyle.SUMMED | TensorStyle.GATHER:
                pass
            case TensorStyle.EXPERTS | TensorStyle.EXPERTS_OF_PIECES:
                pass  # the mixture exchanges within (expert_layers.py)
            case _:
                assert_never(style)
    return spec, x


def exchange_output(styles: Sequence[TensorStyle], ranks: int, y: Value, operation: Operation, on_cpu: bool) -> Value:
    for style in styles:
        match style:
            case TensorStyle.ROW_TO_PIECES:
                y = _in_two(operation, y, _new(y, 0, 1, ranks), on_cpu)
            case TensorStyle.ROW | TensorStyle.ROW_OF_WHOLE | TensorStyle.VOCABULARY:
                y = operation(y, gives=y.new(*y.shape), adds=True)
            case TensorStyle.GATHERED | TensorStyle.GATHERED_OF_PIECES:
                y = _in_two(operation, y, _new(y, -1, ranks, 1), None)
            case TensorStyle.GATHER:
                y = _in_two(operation, y, _new(y, 0, ranks, 1), None)
            case TensorStyle.COLUMN | TensorStyle.COLUMN_OF_PIECES | TensorStyle.SCORES | TensorStyle.SCORES_OF_PIECES:
                pass
            case TensorStyle.SEQUENCE | TensorStyle.SUMMED | TensorStyle.SPLIT:
                pass
            case TensorStyle.EXPERTS | TensorStyle.EXPERTS_OF_PIECES:
                pass
            case _:
                assert_never(style)
    return y


def tokens_of_experts(styles: Sequence[TensorStyle], ranks: int, x: Value, operation: Operation, on_cpu: bool) -> Value:
    """Returns all tokens that come into a mixture of experts, which the ranks may have in pieces."""
    if TensorStyle.EXPERTS_OF_PIECES in styles:
        return _in_two(operation, x, _new(x, 0, ranks, 1), on_cpu)
    return operation(x, gives=x.new(*x.shape), view=True) if TensorStyle.EXPERTS in styles else x


def sum_of_experts(styles: Sequence[TensorStyle], ranks: int, y: Value, operation: Operation, on_cpu: bool) -> Value:
    """Returns the sum of what the ranks' parts of the experts give, or a piece of the sum."""
    if TensorStyle.EXPERTS_OF_PIECES in styles:
        return _in_two(operation, y, _new(y, 0, 1, ranks), on_cpu)
    return operation(y, gives=y.new(*y.shape), adds=True) if TensorStyle.EXPERTS in styles else y


def _narrowed(spec: Call, ranks: int) -> Call:
    """Returns a dense layer with a rank's share of its features."""
    return replace(spec, features=spec.features // ranks)  # type: ignore[attr-defined, call-arg]


def _in_two(operation: Operation, x: Value, result: Value, on_cpu: bool | None) -> Value:
    """Goes through a copy as large as the whole, in another order. `on_cpu` is None if neither pass sums the parts."""
    splits = x.count > result.count
    full_value = x if splits else result
    copies = 0 if on_cpu is None else 1 + on_cpu
    scratch = (copies * full_value.float32.bytes, copies * full_value.autocast.bytes)
    intermediate = operation(x, gives=x.new(*full_value.shape), scratch=(0, 0) if splits else scratch)
    return operation(intermediate, gives=result, passing=scratch if splits else (0, 0))


def _new(x: Value, dim: int, more: int, less: int) -> Value:
    shape = list(x.shape)
    shape[dim] = shape[dim] * more // less
    return x.new(*shape)
