"""The expert axis: sends each token's rows to the ranks that hold the experts chosen for it, and their results back.

Model (Lepikhin et al. 2020, arXiv:2006.16668): ranks of the axis hold equal, contiguous parts of each layer's experts.
A rank sorts its rows by expert and tells each rank how many rows come for each of its experts (one all-to-all of
counts). One all-to-all brings the rows, the experts work on all rows that arrived, and a second all-to-all takes the
results back. The backward pass sends gradients the opposite ways. No row is dropped and none is padded.

Contract: all ranks of the group call `dispatch` equally often, in the same order, also a rank without rows. The result
has the order of the rows.

Limits: the host waits for the counts, because torch needs the sizes of the rows' all-to-alls.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

Experts = Callable[[Tensor, Tensor], Tensor]  # rows sorted by expert, and the rows of each expert held: their results


def dispatch(experts: Experts, rows: Tensor, counts: Tensor, *, group: dist.ProcessGroup) -> Tensor:
    """Returns the results of `rows` (n, width), which are sorted by expert; `counts` (experts,) sum to n.

    `experts` works on the rows of the experts that this rank holds, sorted by expert, and is given their counts.
    """
    sent = counts.view(group.size(), -1)  # (ranks, experts held by each)
    arriving = torch.empty_like(sent)
    dist.all_to_all_single(arriving, sent.contiguous(), group=group)
    sent_sizes, arriving_sizes = torch.stack((sent.sum(1), arriving.sum(1))).tolist()  # the host waits once
    arrived = _exchange(rows, sent_sizes, arriving_sizes, group)
    order = _order_by_expert(arriving)
    results = experts(arrived[order], arriving.sum(0))
    return _exchange(results[torch.argsort(order)], arriving_sizes, sent_sizes, group)


def _order_by_expert(arriving: Tensor) -> Tensor:
    """Returns the indices that sort rows by expert; they arrive by rank, and by expert within a rank."""
    ranks, held = arriving.shape
    numbers = torch.arange(held, device=arriving.device).repeat(ranks)
    return torch.argsort(numbers.repeat_interleave(arriving.flatten()), stable=True)


def _exchange(rows: Tensor, sent: list[int], arriving: list[int], group: dist.ProcessGroup) -> Tensor:
    arrived: Tensor = _RowExchange.apply(rows, sent, arriving, group)  # type: ignore[no-untyped-call]
    return arrived


class _RowExchange(torch.autograd.Function):
    """One all-to-all of `sent` rows to each rank, with `arriving` rows from each; gradients travel back."""

    @staticmethod
    def forward(ctx: Any, rows: Tensor, sent: list[int], arriving: list[int], group: dist.ProcessGroup) -> Tensor:
        ctx.sizes = sent, arriving, group
        return _send(rows, sent, arriving, group)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None, None, None]:
        sent, arriving, group = ctx.sizes
        return _send(gradients[0], arriving, sent, group), None, None, None


def _send(rows: Tensor, sent: list[int], arriving: list[int], group: dist.ProcessGroup) -> Tensor:
    arrived = rows.new_empty((sum(arriving), *rows.shape[1:]))
    dist.all_to_all_single(arrived, rows.contiguous(), arriving, sent, group=group)
    return arrived
