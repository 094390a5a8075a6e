"""Sums of gradients in 16 bits within `fully_shard`: `gradients = fp16()` and `bf16()` of sharded parameters.

Model: torch copies the gradients of a unit into one float32 tensor, and a function that can be replaced sums it over
the shards. torch keeps the sum of the micro-batches so far in float32, and at the last micro-batch sums it over the
replicas. Here both sums are taken in 16 bits and cast back, so that only what is sent is rounded. Half precision is
scaled by a power of two, which the ranks of a sum agree on first.

torch's own sum over replicas has no place for a scale: it is given a group of this rank alone, and a hook, which torch
calls next, sums over the replicas instead.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist
from torch import Tensor

from dslc.compiler.trace.private_torch import sum_over_replicas_in

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh
    from torch.distributed.fsdp import FSDPModule

_MOST = 2.0**15  # a half of the largest power of two in half precision, as sums are rounded


def largest_of(numbers: Tensor) -> Tensor:
    """Returns the largest absolute value; nan if a number is."""
    return torch.maximum(numbers.amax(), -numbers.amin())


def scale_of(largest: Tensor, terms: int = 1) -> Tensor:
    """Returns the power of two by which a sum of `terms` numbers up to `largest` fits half precision; else 1."""
    scale = torch.exp2(torch.floor(torch.log2(_MOST / (terms * largest).clamp(min=2.0**-100))))
    return torch.where(largest.isfinite(), scale, torch.ones_like(scale))


def round_sums(kind: str, mesh: DeviceMesh, units: Sequence[FSDPModule]) -> None:
    """Makes the units that are sharded over a mesh, of (replicas x) shards, sum gradients as `fp16` or `bf16` does."""
    dtype = torch.float16 if kind == "fp16" else torch.bfloat16
    if mesh.size(mesh.ndim - 1) > 1:
        scatter = _Scatter(dtype)
        for unit in units:
            unit.set_custom_reduce_scatter(scatter)  # type: ignore[arg-type]
    if mesh.ndim > 1:
        alone = dist.new_group([dist.get_rank()], use_local_synchronization=True)
        over_replicas = partial(_sum_over, mesh.get_group("replicas"), dtype)
        for unit in units:
            sum_over_replicas_in(unit, alone)
            unit.set_all_reduce_hook(over_replicas)


class _Scatter:
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
        def summed(low: Tensor) -> Tensor:
            scattered = low.new_empty(output_tensor.shape)
            dist.reduce_scatter_single(scattered, low, op=op, group=group)
            return scattered

        _in_16_bits(summed, input_tensor, output_tensor, self._dtype, group)


def _sum_over(group: dist.ProcessGroup, dtype: torch.dtype, sums: Tensor) -> None:
    def summed(low: Tensor) -> Tensor:
        dist.all_reduce(low, group=group)
        return low

    _in_16_bits(summed, sums, sums, dtype, group)


def _in_16_bits(
    summed: Callable[[Tensor], Tensor], given: Tensor, out: Tensor, dtype: torch.dtype, group: dist.ProcessGroup
) -> None:
    """Writes to `out` what `summed` makes of `given` in 16 bits. `given` is overwritten."""
    if dtype != torch.float16:
        out.copy_(summed(given.to(dtype)))
        return
    largest = largest_of(given)
    dist.all_reduce(largest, dist.ReduceOp.MAX, group=group)
    scale = scale_of(largest, group.size())
    torch.div(summed(given.mul_(scale).to(dtype)), scale, out=out)
