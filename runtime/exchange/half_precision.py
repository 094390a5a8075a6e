"""Gradients in 16 bits: `fp16()` and `bf16()`.

Rule: each rank's gradient is cast and the sum taken in 16 bits; the result is cast back. For half precision, gradients
are first multiplied by a power of two, which follows from the largest number of any rank: no sum over the ranks
overflows, and small numbers keep their bits. parallel/rounded_sums.py sums sharded gradients likewise.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
import torch.distributed as dist
from torch import Tensor

from dslc.runtime.exchange.base import GradientExchange
from dslc.runtime.exchange.exchange_groups import PendingWork
from dslc.runtime.parallel.rounded_sums import largest_of, scale_of


class Bf16(GradientExchange):
    """Gradients in bfloat16."""

    def rule(self, bucket: Tensor, index: int) -> Iterator[PendingWork]:
        low = bucket.div(self.where.members).to(torch.bfloat16)
        yield dist.all_reduce(low, group=self.where.far, async_op=True)
        bucket.copy_(low)


class Fp16(GradientExchange):
    """Gradients in half precision, scaled."""

    def rule(self, bucket: Tensor, index: int) -> Iterator[PendingWork]:
        largest = largest_of(bucket)
        yield dist.all_reduce(largest, dist.ReduceOp.MAX, group=self.where.far, async_op=True)
        scale = scale_of(largest)
        low = (bucket * (scale / self.where.members)).half()
        yield dist.all_reduce(low, group=self.where.far, async_op=True)
        torch.div(low, scale, out=bucket)
