"""Averages in the background: no step waits for another rank.

Rule: a round begins with a copy c_i of each member's weights, which a thread sums over the members. It ends with x_i <-
x_i + (mean of c - c_i), between two steps of the member. The next round begins at the first such moment at least
`interval` after this one began. So the mean over the members stays the same, whatever steps they have done. In the
first `warmup` steps gradients are summed exactly. Later steps divide by a rank's own number of targets times the number
of ranks.

Source: Bagua (Gan et al. 2021, arXiv:2107.01499), `AsyncModelAverageAlgorithm`.

Model: each round takes place on all members, on process groups that only the threads use. A member that is late to
begin a round holds up the rounds, never a step. The ranks of a node agree in each step on whether all of them end, or
begin, a round. On GPUs the thread sums on a stream of its own, and all ranks meet on the host first (over gloo): a
kernel of NCCL that waited for a late member would take a part of the GPU from the steps.

Contract: an error in the thread is raised in the training, before the next step. A training that fails tells the thread
to end; within a round it ends with the process, at the latest.

Limits: sums that are under way when a process fails are lost, with their round. A resumed training begins with a new
round.
"""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Sequence
from concurrent.futures import Future

import torch
import torch.distributed as dist
from torch import Tensor, nn

from dslc.compiler.ir.program import ExchangeStep, JobProgram
from dslc.runtime.exchange.base import WeightExchange
from dslc.runtime.exchange.exchange_groups import group_of, group_of_node


class AsyncAverage(WeightExchange):
    def __init__(self, job: JobProgram, step: ExchangeStep, model: nn.Module) -> None:
        super().__init__(job, step, model)
        self._interval, self._began, self._rounds = float(step.arguments["interval"]), 0.0, 0
        pieces = [self.piece(bucket.numbers) for bucket in self.buckets]
        self._copies = [torch.empty_like(piece) for piece in pieces]
        # Each has one more number: whether the member is done.
        self._messages = [piece.new_empty(piece.numel() + 1) for piece in pieces]
        self.held = [*self._copies, *self._messages]
        # Not of `where`, in which the training has collectives of its own.
        self._group = group_of(job) if self.where.near is None else self.where.far
        self._near, self._meeting = self.where.near, None  # where members agree, and meet, on the host
        if job.device == "cuda":
            self._meeting = group_of(job, backend="gloo")
            if self._near is not None:
                self._near = group_of_node(job, step.pieces, backend="gloo")
            for message in self._messages[:1]:
                dist.all_reduce(message.zero_(), group=self._group)  # NCCL connects in a first collective
        self._thread: _Averaging | None = None
        self._round: Future[bool] | None = None

    @property
    def waits_never(self) -> bool:
        return not self.sums_exactly

    @torch.no_grad()
    def begin(self) -> None:
        super().begin()
        if self.sums_exactly or not self.buckets:
            return
        if self._thread is None:
            members = self.where.members
            self._thread = _Averaging(self._group, self._meeting, members, self._copies, self._messages)
            self._began = time.monotonic()
        ended = self._round is not None and self._round.done()
        begins = (ended or self._round is None) and time.monotonic() - self._began >= self._interval
        if self._near is not None:
            agreed = torch.tensor([ended, begins], dtype=torch.float32)
            dist.all_reduce(agreed, dist.ReduceOp.MIN, group=self._near)
            ended, begins = (bool(each) for each in agreed.tolist())
        if ended:
            self._end_round()
        if begins:
            self._begin_round()

    def _begin_round(self, *, done: bool = False) -> None:
        assert self._thread is not None
        for bucket, copy in zip(self.buckets, self._copies, strict=True):
            copy.copy_(self.piece(bucket.numbers))
        self._began, self._rounds = time.monotonic(), self._rounds + 1
        self._round = self._thread.begin(done)

    def _end_round(self) -> bool:
        """Waits for the round, and adds what it has found. Returns True if all members are done."""
        assert self._round is not None
        round_, self._round = self._round, None
        done = round_.result()
        near = self.where.near
        for bucket, message in zip(self.buckets, self._messages, strict=True):
            moved = message[:-1]
            if near is not None:
                whole = torch.empty_like(bucket.numbers)
                dist.all_gather_single(whole, moved.contiguous(), group=near)
                moved = whole
            bucket.numbers.add_(moved)
        return done

    @torch.no_grad()
    def settle(self) -> None:
        if self._thread is None:
            return
        most = torch.tensor(float(self._rounds), device=self._copies[0].device)
        dist.all_reduce(most, dist.ReduceOp.MAX, group=self.where.everyone)
        while self._round is not None or self._rounds < most:
            if self._round is None:
                self._begin_round()
            self._end_round()

    @torch.no_grad()
    def close(self) -> None:
        if self._thread is None:
            return
        done = False
        while not done:
            if self._round is None:
                self._begin_round(done=True)
            done = self._end_round()
        self._thread.end()
        self._thread.join()
        self._thread = None

    def abandon(self) -> None:
        if self._thread is not None:
            self._thread.end()


class _Averaging(threading.Thread):
    """Sums copies over the members, a round at a time: `messages` are then the changes that a member adds."""

    def __init__(
        self,
        group: dist.ProcessGroup,
        meeting: dist.ProcessGroup | None,
        members: int,
        copies: Sequence[Tensor],
        messages: Sequence[Tensor],
    ) -> None:
        super().__init__(name="dslc-average", daemon=True)
        self._group, self._meeting, self._members = group, meeting, members
        self._copies, self._messages = copies, messages
        self._asked: queue.SimpleQueue[tuple[bool, Future[bool], torch.cuda.Event | None] | None] = queue.SimpleQueue()
        self._device = copies[0].device
        self.start()

    def begin(self, done: bool) -> Future[bool]:
        """Begins a round with the copies; `done`: this member has no more steps. The result is whether none has."""
        made = None
        if self._device.type == "cuda":
            made = torch.cuda.Event()
            made.record()
        told: Future[bool] = Future()
        self._asked.put((done, told, made))
        return told

    def end(self) -> None:
        self._asked.put(None)

    def run(self) -> None:
        if self._device.type == "cuda":
            torch.cuda.set_device(self._device)
            with torch.cuda.stream(torch.cuda.Stream()):  # beside the steps
                self._work()
        else:
            self._work()

    def _work(self) -> None:
        while (asked := self._asked.get()) is not None:
            done, told, made = asked
            try:
                if made is not None:
                    torch.cuda.current_stream().wait_event(made)
                told.set_result(self._average(done))
            except BaseException as error:
                told.set_exception(error)

    @torch.no_grad()
    def _average(self, done: bool) -> bool:
        if self._meeting is not None:
            dist.barrier(self._meeting)
        count = 0.0
        for copy, message in zip(self._copies, self._messages, strict=True):
            message[:-1].copy_(copy)
            message[-1] = float(done)
            dist.all_reduce(message, group=self._group)
            message[:-1].div_(self._members).sub_(copy)
            count = float(message[-1])  # waits for the device, too
        return count == self._members
