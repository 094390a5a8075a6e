"""Sums of gradients in 16 bits within `fully_shard`: `gradients = fp16()` and `bf16()` of sharded parameters.

Model: torch copies the gradients of a unit into one float32 tensor and calls `reduce_scatter` with it. `Rounded` casts
that tensor, lets the ranks sum in 16 bits, and casts the result back, so that only what is sent is rounded: sums over
micro-batches stay float32. Half precision is scaled by a power of two, which the ranks agree on first.

Limits: over replicas torch sums by a collective of its own, in the dtype that it reduces in. `dtype_of_sums` is that
dtype; sums over micro-batches are then kept in it too. It has no room for a scale, so that `fp16()` and replicas are
excluded (rules/exchange.py).
"""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import Tensor

from dslc.compiler.ir.program import GradientStep

_MOST = 2.0**15  # a half of the largest power of two in half precision, as sums are rounded


def scale_of(largest: Tensor, terms: int = 1) -> Tensor:
    """Returns the power of two by which numbers up to `largest` are multiplied, so that a sum of so many fits half
    precision; 1 if a number is not finite. Of zeros alone any scale is right.
    """
    scale = torch.exp2(torch.floor(torch.log2(_MOST / (terms * largest).clamp(min=2.0**-100))))
    return torch.where(largest.isfinite(), scale, torch.ones_like(scale))


def dtype_of_sums(step: GradientStep) -> torch.dtype | None:
    """Returns the dtype in which torch itself is to sum; None if it is that of the gradients."""
    return torch.bfloat16 if step.exchange is not None and step.replicas > 1 else None


def rounded(step: GradientStep) -> Rounded | None:
    """Returns the function that sums over shards in place of torch's; None if torch's is right."""
    if step.exchange is None or step.replicas > 1:
        return None
    return Rounded(torch.float16 if step.exchange.kind == "fp16" else torch.bfloat16)


class Rounded:
    """A reduce-scatter in 16 bits, for `FSDPModule.set_custom_reduce_scatter`."""

    def __init__(self, dtype: torch.dtype) -> None:
        self._dtype = dtype

    def allocate(self, size: tuple[int, ...], *, dtype: torch.dtype, device: torch.device) -> Tensor:
        return torch.empty(*size, dtype=dtype, device=device)

    def __call__(
        self,
        output_tensor: Tensor,
        input_tensor: Tensor,
        group: dist.ProcessGroup,
        op: dist.ReduceOp.RedOpType,
        async_op: bool = False,
    ) -> None:
        scale: Tensor | None = None
        if self._dtype == torch.float16:
            largest = input_tensor.abs().max()
            dist.all_reduce(largest, dist.ReduceOp.MAX, group=group)
            scale = scale_of(largest, group.size())
            input_tensor.mul_(scale)
        low = output_tensor.new_empty(output_tensor.shape, dtype=self._dtype)
        dist.reduce_scatter_tensor(low, input_tensor.to(self._dtype), op=op, group=group)
        output_tensor.copy_(low)
        if scale is not None:
            output_tensor.div_(scale)
