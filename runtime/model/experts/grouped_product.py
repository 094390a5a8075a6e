"""Grouped matrix products that torch's compiler traces past, in any dtype.

The fake kernel of `torch.nn.functional.grouped_mm` (2.13) takes bfloat16 alone, so the compiler would refuse others.
Within compiled code the product is an operator of its own, whose kernels are those of `grouped_mm`. Elsewhere it is
`grouped_mm` itself.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor


def grouped_product(rows: Tensor, weight: Tensor, ends: Tensor) -> Tensor:
    """Returns each row (n, in) times the transposed matrix of its group, of `weight` (groups, out, in).

    `ends` (groups,) are the ends of the groups among the rows.
    """
    if torch.compiler.is_compiling():
        product: Tensor = _multiply_rows(rows, weight, ends)
        return product
    return F.grouped_mm(rows, weight.transpose(-2, -1), offs=ends)


@torch.library.custom_op("dslc::multiply_rows", mutates_args=())
def _multiply_rows(rows: Tensor, weight: Tensor, ends: Tensor) -> Tensor:
    return F.grouped_mm(rows, weight.transpose(-2, -1), offs=ends)


@torch.library.custom_op("dslc::gradient_of_rows", mutates_args=())
def _gradient_of_rows(gradient: Tensor, weight: Tensor, ends: Tensor) -> Tensor:
    return F.grouped_mm(gradient, weight, offs=ends)


@torch.library.custom_op("dslc::gradient_of_groups", mutates_args=())
def _gradient_of_groups(gradient: Tensor, rows: Tensor, ends: Tensor) -> Tensor:
    return F.grouped_mm(gradient.transpose(0, 1), rows, offs=ends)


@_multiply_rows.register_fake
def _(rows: Tensor, weight: Tensor, ends: Tensor) -> Tensor:
    return rows.new_empty(rows.shape[0], weight.shape[1])


@_gradient_of_rows.register_fake
def _(gradient: Tensor, weight: Tensor, ends: Tensor) -> Tensor:
    return gradient.new_empty(gradient.shape[0], weight.shape[2])


@_gradient_of_groups.register_fake
def _(gradient: Tensor, rows: Tensor, ends: Tensor) -> Tensor:
    return rows.new_empty(ends.shape[0], gradient.shape[1], rows.shape[1])


def _save_operands(ctx: Any, inputs: tuple[Tensor, ...], output: Tensor) -> None:
    ctx.save_for_backward(*inputs)


def _differentiate(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, Tensor | None, None]:
    rows, weight, ends = ctx.saved_tensors
    gradient = gradient.contiguous()
    of_rows = _gradient_of_rows(gradient, weight, ends) if ctx.needs_input_grad[0] else None
    of_weight = _gradient_of_groups(gradient, rows, ends) if ctx.needs_input_grad[1] else None
    return of_rows, of_weight, None


_multiply_rows.register_autograd(_differentiate, setup_context=_save_operands)
