"""The loss of an evaluation, where it compares samples.

Model: the samples of the split are taken in batches of `data.batch`, in their order; the last may be smaller. The ranks
share out each batch as in training, and its loss is computed as the loss of a step. So the loss over the split is the
mean of the losses of its samples. It does not depend on the number of ranks (of nodes, if samples of one node are
compared).

Contract: every sample counts once. A rank without samples of a batch makes an output all the same, which does not
count. The output must have the shape of the other ranks' outputs.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from dslc.compiler.ir.program import JobProgram, RankPlace
from dslc.compiler.placement.shares import largest, piece
from dslc.compiler.trace.structures import map_tensors
from dslc.runtime.data.batches import read_batches
from dslc.runtime.data.samples import Splits
from dslc.runtime.data.splits import Split, range_of
from dslc.runtime.model.cross_sample_losses import WholeSum
from dslc.runtime.parallel.loss_gather import gathered_samples
from dslc.runtime.step.assemble import TrainingComponents
from dslc.runtime.step.full_batch import concatenate


class WholeEvaluation:
    """The loss of one pass over a split, on one rank: `sums` is the sum of its losses and their number, in float64."""

    def __init__(self, job: JobProgram, place: RankPlace, parts: TrainingComponents) -> None:
        assert isinstance(parts.loss, WholeSum)
        self._job, self._place, self._parts, self._loss = job, place, parts, parts.loss
        self.sums = torch.zeros(2, dtype=torch.float64, device=parts.device)
        gathered_samples(job, place, job.data.batch)  # all ranks make the groups now
        self._outputs: list[tuple[Any, Any]] = []

    def batches(self, splits: Splits, split: Split, size: int) -> Iterator[tuple[Any, Any, bool]]:
        """Yields at most `size` samples of this rank at a time, and whether they count; `add` takes each output."""
        chunks, ends = self._chunks(split, size)
        samples, ends_ = splits.samples_of_split(split), iter(ends)
        counts, batch = next(ends_)
        for input, target in read_batches(self._job.data, samples, self._place, chunks, self._parts.device):
            yield input, target, counts
            if batch:
                self._close(batch)
            counts, batch = next(ends_, (False, 0))

    def add(self, output: Any, target: Any, counts: bool) -> None:
        pair = output, target
        self._outputs.append(pair if counts else map_tensors(lambda tensor: tensor[:0], pair))

    def _chunks(self, split: Split, size: int) -> tuple[list[Tensor], list[tuple[bool, int]]]:
        """Returns what is read each time; and whether that counts, and the samples of the global batch it ends, or 0."""
        first, count = range_of(self._job.data, split)
        ranks, rank, each = self._place.data_ranks, self._place.data_rank, self._job.data.batch
        chunks: list[Tensor] = []
        ends: list[tuple[bool, int]] = []
        for begin in range(first, first + count, each):
            batch = min(each, first + count - begin)
            start, stop = piece(batch, ranks, rank)
            own = list(torch.arange(begin + start, begin + stop).split(size)) if stop > start else []
            filler = [torch.tensor([begin + min(start, batch - 1)])]
            times = -(-largest(batch, ranks) // size) if self._parts.engine.lockstep else max(1, len(own))
            chunks += own + filler * (times - len(own))
            ends += [(n < len(own), batch if n + 1 == times else 0) for n in range(times)]
        return chunks, ends

    def _close(self, batch: int) -> None:
        output, target = (concatenate([pair[n] for pair in self._outputs]) for n in (0, 1))
        self._outputs.clear()
        start, stop = piece(batch, self._place.data_ranks, self._place.data_rank)
        self.sums[0] += self._loss.gathered_sum(output, target, gathered_samples(self._job, self._place, batch))
        self.sums[1] += stop - start
