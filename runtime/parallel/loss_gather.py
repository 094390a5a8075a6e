"""The data ranks over whose samples a loss is, and the exchange of their outputs.

Model: a group is all ranks of the data axis, or its ranks on a node. Each sends as many rows as the largest share has.
Forward, an all-gather brings the rows of all; backward, a reduce-scatter sums the gradients of each rank's rows. A
structure of tensors is sent as the bytes of its rows, by one all-gather, and has no way back.

Contract: all ranks make the groups, and call the methods in the same order. A rank may have no rows.

Limits: tensors have rows of one shape on all ranks.
"""

from __future__ import annotations

import datetime
from collections.abc import Sequence
from math import prod

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd.function import FunctionCtx

from dslc.compiler.ir.program import JobProgram, RankPlace
from dslc.compiler.placement.shares import largest, pieces
from dslc.compiler.trace.structures import flatten, unflatten
from dslc.runtime.model.cross_sample_losses import GatheredSamples, LocalSamples
from dslc.runtime.model.errors import LossError
from dslc.runtime.parallel.mesh import mesh_of

_MADE: dict[tuple[int, int, int], dist.ProcessGroup | None] = {}  # of this process: groups are never closed


def gathered_samples(job: JobProgram, place: RankPlace, samples: int) -> GatheredSamples:
    """Returns the samples of a batch, over all data ranks, that this rank's are compared with."""
    together, ranks = job.loss.together, place.data_ranks
    assert together > 0 and ranks % together == 0
    if together == 1:
        start, stop = pieces(samples, ranks)[place.data_rank]
        return LocalSamples(stop - start)
    begin = place.data_rank // together * together
    sizes = [stop - start for start, stop in pieces(samples, ranks)[begin : begin + together]]
    return Neighbours(_group(job), sizes, place.data_rank - begin, largest(samples, ranks))


def _group(job: JobProgram) -> dist.ProcessGroup | None:
    """Returns the group of this rank's neighbours, which all ranks make at the first call."""
    data, tensor, together = job.axes["data"], job.axes["tensor"], job.loss.together
    if together == data:
        return mesh_of(job).group("data")
    assert data * tensor == job.world_size, "the compiler sees to it that there is no other axis"
    if (data, tensor, together) not in _MADE:
        timeout = datetime.timedelta(seconds=job.timeout)
        for first in range(0, data, together):
            for piece in range(tensor):
                members = [(first + n) * tensor + piece for n in range(together)]
                made = dist.new_group(members, timeout=timeout)
                if dist.get_rank() in members:
                    _MADE[data, tensor, together] = made
    return _MADE[data, tensor, together]


class Neighbours:
    """The samples of a group of ranks: each rank's number is in `sizes`, and each sends `most` rows."""

    def __init__(self, group: dist.ProcessGroup | None, sizes: Sequence[int], number: int, most: int) -> None:
        self._group, self._sizes, self._number, self._most = group, sizes, number, most
        self.ranks, self.samples, self.first = len(sizes), sum(sizes), sum(sizes[:number])

    def gathered(self, own: Tensor) -> Tensor:
        found: Tensor = _Gather.apply(own, self)  # type: ignore[no-untyped-call]
        return found

    def fixed(self, own: object) -> object:
        leaves, form = flatten(own)
        rows = {n: leaf for n, leaf in enumerate(leaves) if isinstance(leaf, Tensor)}
        for leaf in rows.values():
            if leaf.shape[:1] != (self._sizes[self._number],):
                raise LossError(
                    f"a loss over a whole batch needs tensors with a row for each sample, {self._sizes[self._number]} "
                    f"here, and got one of shape {tuple(leaf.shape)}"
                )
        sizes = {n: prod(leaf.shape[1:]) * leaf.element_size() for n, leaf in rows.items()}
        with torch.no_grad():
            sent = [leaf.detach().contiguous().reshape(len(leaf), prod(leaf.shape[1:])) for leaf in rows.values()]
            together = torch.cat([each.view(torch.uint8) for each in sent], dim=1)
            parts = self.of_all(together).split(list(sizes.values()), dim=1)
        before, after = self.first, self.first + self._sizes[self._number]
        for (n, leaf), part in zip(rows.items(), parts, strict=True):
            whole = (
                part.clone(memory_format=torch.contiguous_format)
                .view(leaf.dtype)
                .reshape(self.samples, *leaf.shape[1:])
            )
            leaves[n] = torch.cat((whole[:before], leaf, whole[after:])) if leaf.requires_grad else whole
        return unflatten(leaves, form)

    def of_all(self, own: Tensor) -> Tensor:
        """Returns the rows of all ranks, in their order."""
        sent = own.new_zeros((self._most, *own.shape[1:]))
        sent[: len(own)] = own
        found = own.new_empty((self.ranks * self._most, *own.shape[1:]))
        dist.all_gather_single(found, sent, group=self._group)
        return torch.cat([part[:size] for part, size in zip(found.split(self._most), self._sizes, strict=True)])

    def sums_of_own(self, gradient: Tensor) -> Tensor:
        """Returns the sum over the ranks of the gradients of this rank's rows."""
        sent = gradient.new_zeros((self.ranks * self._most, *gradient.shape[1:]))
        for part, rows in zip(sent.split(self._most), gradient.split(list(self._sizes)), strict=True):
            part[: len(rows)] = rows
        found = gradient.new_empty((self._most, *gradient.shape[1:]))
        dist.reduce_scatter_single(found, sent, group=self._group)
        return found[: self._sizes[self._number]]


class _GatherContext(FunctionCtx):
    neighbours: Neighbours


class _Gather(torch.autograd.Function):
    """The rows of all ranks; backward the sums of the gradients of this rank's."""

    @staticmethod
    def forward(ctx: _GatherContext, own: Tensor, neighbours: Neighbours) -> Tensor:
        ctx.neighbours = neighbours
        return neighbours.of_all(own)

    @staticmethod
    def backward(ctx: _GatherContext, gradient: Tensor) -> tuple[Tensor, None]:
        return ctx.neighbours.sums_of_own(gradient), None
