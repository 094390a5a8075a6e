"""Exchanges of momenta: `qadam` in 8 bits, `onebit_adam` as signs. The optimizer is in compressed_adam.py.

Rule of `qadam`: momenta go through the exchange of `bytegrad()`, row by row.

Rule of `onebit_adam`: a member adds the error of its last message to its momentum, and cuts the sum in as many chunks
as there are members. It sends each chunk to its owner as signs and the mean of its absolute values; the rest is the
next error. The owner takes the mean of what it has received, adds its own last error, and all gather that in the same
form.

Source: Bagua (Gan et al. 2021, arXiv:2107.01499), `QAdam`; Tang et al. 2021, arXiv:2102.02888, algorithm 1. The mean of
absolute values, as in Seide et al. 2014, makes the error least; the paper's scale keeps the length of the vector.

Contract: a number that is not finite makes its row or chunk not finite on all ranks, before a weight is changed.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping

import torch
import torch.distributed as dist
from torch import Tensor, nn

from dslc.compiler.ir.program import ExchangeStep, JobProgram
from dslc.runtime.exchange import sign_compression
from dslc.runtime.exchange.base import Bucket, LocalExchange, has_non_finite
from dslc.runtime.exchange.bytegrad import by_codes
from dslc.runtime.exchange.exchange_groups import PendingWork, between_nodes


class MomentumExchange(LocalExchange, ABC):
    """An exchange of momenta, by the rule of a subclass. The optimizer sets `updates`, and calls `agree`. All ranks
    call `found` alike, before any weight changes, if what they agreed on is not finite; None: nobody looks.
    """

    def __init__(self, job: JobProgram, step: ExchangeStep, model: nn.Module) -> None:
        super().__init__(job, step, model)
        self.updates: Callable[[], int] = lambda: 0
        self.found: Callable[[], object] | None = None
        self._unsound = False

    @property
    def sums_exactly(self) -> bool:
        return self.updates() < self.how.alone

    @abstractmethod
    def rule(self, numbers: Tensor, index: int) -> Iterator[PendingWork]:
        """Makes the numbers of a bucket, or of a piece of it, what all members agree on, in place."""

    @torch.no_grad()
    def agree(self, momenta: Mapping[Tensor, Tensor]) -> None:
        """Makes momenta, by parameter, what all ranks agree on, in place."""
        self._unsound = False
        for index, bucket in enumerate(self.buckets):
            self.going.begin(self.through(bucket, index, momenta))
        self.going.finish()
        if self._unsound and self.found is not None:
            self.found()

    def through(self, bucket: Bucket, index: int, momenta: Mapping[Tensor, Tensor]) -> Iterator[PendingWork]:
        numbers = torch.zeros_like(bucket.numbers)
        parts = [
            (momenta[parameter], part)
            for parameter, part in zip(bucket.parameters, bucket.cut(numbers), strict=True)
            if parameter in momenta
        ]
        for momentum, part in parts:
            part.copy_(momentum)
        yield from between_nodes(self.rule, self.where, alike=True)(numbers, index)
        for momentum, part in parts:
            momentum.copy_(part)
        if self.found is not None:
            self._unsound |= has_non_finite(numbers)


class QAdamExchange(MomentumExchange):
    """Momenta as codes between minimum and maximum."""

    def rule(self, numbers: Tensor, index: int) -> Iterator[PendingWork]:
        return by_codes(numbers, self.where)


class OnebitAdamExchange(MomentumExchange):
    """Momenta as signs, with error feedback on both sides."""

    def __init__(self, job: JobProgram, step: ExchangeStep, model: nn.Module) -> None:
        super().__init__(job, step, model)
        where = self.where
        self._real = list[Tensor]()  # of each chunk of a bucket's piece, the numbers that are no filling
        self._counts = list[tuple[int, int]]()  # their sum, and those of this member's chunk
        for index, bucket in enumerate(self.buckets):
            size = bucket.numbers.numel() // where.pieces
            chunk = sign_compression.chunk_of(size, where.members)
            total = sum(parameter.numel() for parameter in bucket.parameters) - where.piece * size
            firsts = chunk * torch.arange(where.members, device=bucket.numbers.device)
            real = (min(total, size) - firsts).clamp(0, chunk)
            self._real.append(real)
            self._counts.append((int(real.sum()), int(real[where.member])))
            self.own[f"worker_error.{index}"] = bucket.numbers.new_zeros(where.members * chunk)
            self.own[f"server_error.{index}"] = bucket.numbers.new_zeros(chunk)

    def rule(self, numbers: Tensor, index: int) -> Iterator[PendingWork]:
        where, real = self.where, self._real[index]
        mine, own = real[where.member : where.member + 1], self.own[f"server_error.{index}"].view(1, -1)
        all_of_them, of_mine = self._counts[index]
        worker = self.own[f"worker_error.{index}"]
        worker[: numbers.numel()] += numbers
        chunks = worker.view(where.members, -1)
        sent = sign_compression.compress(chunks, real)
        sign_compression.subtract(chunks, sent, all_of_them)
        received = torch.empty_like(sent)
        yield dist.all_to_all_single(received, sent, group=where.far, async_op=True)
        own += sign_compression.restore(received).mean(dim=0, keepdim=True)
        sign_compression.clear(own, of_mine)
        agreed = sign_compression.compress(own, mine)
        sign_compression.subtract(own, agreed, of_mine)
        yield dist.all_gather_single(received, agreed, group=where.far, async_op=True)
        numbers.copy_(sign_compression.restore(received).view(-1)[: numbers.numel()])
