"""Gradients in 8 bits: `bytegrad()`.

Rule: each member cuts the bucket in as many rows as there are members, compresses each row (codes.py) and sends it to
its owner. The owner takes the mean of what it has received, compresses that, and all gather it. A bucket that does not
divide is filled up with zeros.

Source: Bagua (Gan et al. 2021, arXiv:2107.01499), `ByteGrad`.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch.distributed as dist
from torch import Tensor, nn

from dslc.runtime.exchange.among import Among
from dslc.runtime.exchange.codes import compress, restore
from dslc.runtime.exchange.exchange import GradientExchange


class ByteGrad(GradientExchange):
    """Gradients as codes between minimum and maximum. A number that is not finite makes its row nan on all ranks."""

    spreads = True

    def rule(self, bucket: Tensor, index: int) -> Iterator[Any]:
        return by_codes(bucket, self.where)


def by_codes(numbers: Tensor, where: Among) -> Iterator[Any]:
    """Makes numbers the mean over the members, as codes tell it, in place."""
    far, members, count = where.far, where.members, numbers.numel()
    sent = compress(nn.functional.pad(numbers, (0, -count % members)).view(members, -1))
    received = sent.new_empty(sent.shape)
    yield dist.all_to_all_single(received, sent, group=far, async_op=True)
    agreed = compress(restore(received).mean(dim=0, keepdim=True))
    # Each row is as long as the owner's.
    yield dist.all_gather_into_tensor(received, agreed, group=far, async_op=True)
    numbers.copy_(restore(received).view(-1)[:count])
