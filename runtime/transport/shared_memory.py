"""`devices.backend = shared_memory`: collectives of the ranks on one host through memory that they share.

Model: a process group of torch. A collective goes piece by piece: each rank lays its piece into a slot of its segment
(shared_segment.py), waits until the others have done so, and reads theirs, while the next piece is laid into the other
slot. A sum is taken by every rank in the order of the ranks. A message is copied into the sender's room, from which the
receiver takes it.

Contract: a sum is the same on every rank and in every run, and with two ranks it is gloo's to the bit. A collective is
complete when its call returns; only a receive is completed by its `wait`.

Limits: dense tensors of the CPU. Nothing receives from an unnamed rank.
"""

from __future__ import annotations

import datetime
import threading
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, ExitStack
from typing import Any, TypeAlias

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ReduceOp, Work
from torch.futures import Future

from dslc.compiler.facts.hardware import SLOT_BYTES, SLOTS
from dslc.runtime.transport.shared_messages import Inbox, MessageStore, Outbox
from dslc.runtime.transport.shared_segment import (
    Segment,
    Word,
    wait_for,
    wake,
    word_value,
)

NAME = "shared_memory"

Options: TypeAlias = Any  # torch's own, a class for each collective
Slots: TypeAlias = Sequence[Tensor]  # a slot of each rank, in bytes
Observer: TypeAlias = Callable[[str, int, Sequence[Tensor]], AbstractContextManager[object]]

# Entered around each collective, with its kind, the ranks of its group and this rank's input. An observer of one that
# goes on in a thread of its group is left there, when it ends.
OBSERVERS: list[Observer] = []

_INSIDE = -1  # the tag of the messages of a collective
_SUMS: dict[object, Callable[..., Tensor]] = {
    ReduceOp.SUM: torch.add,
    ReduceOp.AVG: torch.add,
    ReduceOp.PRODUCT: torch.mul,
    ReduceOp.MIN: torch.minimum,
    ReduceOp.MAX: torch.maximum,
    ReduceOp.BAND: torch.bitwise_and,
    ReduceOp.BOR: torch.bitwise_or,
    ReduceOp.BXOR: torch.bitwise_xor,
}


class FinishedWork(Work):
    """A collective that is complete."""

    def __init__(self, tensors: list[Any]) -> None:
        super().__init__()
        self._tensors = tensors

    def wait(self, timeout: object = None) -> bool:
        return True

    def is_completed(self) -> bool:
        return True

    def result(self) -> list[Any]:
        return self._tensors

    def get_future(self) -> Future[list[Any]]:
        future: Future[list[Any]] = Future()
        future.set_result(self._tensors)
        return future


class _PendingMessage(Work):
    """A message that is sent or received when it is waited for."""

    def __init__(self, finish: Callable[[], None], tensors: list[Tensor]) -> None:
        super().__init__()
        self._finish: Callable[[], None] | None = finish
        self._tensors = tensors

    def wait(self, timeout: object = None) -> bool:
        if self._finish is not None:
            self._finish()
            self._finish = None
        return True

    def is_completed(self) -> bool:
        return self._finish is None

    def result(self) -> list[Tensor]:
        return self._tensors

    def get_future(self) -> Future[list[Tensor]]:
        self.wait()
        return FinishedWork(self._tensors).get_future()


class PythonGroup(dist.ProcessGroup):
    """A group whose collectives are written in Python. It keeps its name, as it has none of torch's backends, which
    would do so.
    """

    def __init__(self, rank: int, ranks: int) -> None:
        super().__init__(rank, ranks)  # type: ignore[call-arg]
        self._rank, self._ranks = rank, ranks
        self._name = self._description = ""

    def getBackendName(self) -> str:
        return NAME

    def getGroupName(self) -> str:
        return self._name

    def setGroupName(self, name: str) -> None:
        self._name = name

    def getGroupDesc(self) -> str:
        return self._description

    def setGroupDesc(self, description: str) -> None:
        self._description = description

    def rank(self) -> int:
        return self._rank

    def size(self) -> int:
        return self._ranks

    def shutdown(self) -> None:
        """A no-op: memory and connections go with the processes."""

    abort = shutdown

    def observed(self, kind: str, tensors: list[Tensor]) -> ExitStack:
        """Returns the observers of a collective, entered."""
        stack = ExitStack()
        for observer in OBSERVERS:
            stack.enter_context(observer(kind, self._ranks, tensors))
        return stack


class SharedMemoryGroup(PythonGroup):
    """The ranks of a group that is on one host. Of the two forms that torch's stubs know of some collectives, these are
    those that torch calls.
    """

    def __init__(self, segments: list[Segment], rank: int, timeout: float) -> None:
        super().__init__(rank, len(segments))
        self._segments, self._own, self._timeout = segments, segments[rank], timeout
        self._pieces = 0  # laid into slots so far, by each rank
        store = MessageStore(self._own)
        self._outbox = [Outbox(self._own, receiver, store) for receiver in range(self._ranks)]
        self._inbox = [Inbox(segment, rank, self._wait) for segment in segments]
        self._lock = threading.RLock()  # the passes run in threads of their own

    def set_timeout(self, timeout: datetime.timedelta) -> None:
        self._timeout = timeout.total_seconds()

    # ------------------------------------------------------------------------------------------------ one to all

    def allreduce(self, tensors: list[Tensor], opts: Options = None) -> Work:  # type: ignore[override]
        with self._collective("all_reduce", tensors):
            for tensor in tensors:
                (self._reduce if self._ranks <= 2 else self._reduce_in_shares)(flat_values(tensor), operation_of(opts))
        return FinishedWork(tensors)

    def allreduce_coalesced(self, tensors: list[Tensor], opts: Options = None) -> Work:
        return self.allreduce(tensors, opts)

    def reduce(self, tensors: list[Tensor], opts: Options) -> Work:  # type: ignore[override]
        with self._collective("reduce", tensors):
            for tensor in tensors:
                self._reduce(flat_values(tensor), operation_of(opts), opts.rootRank)
        return FinishedWork(tensors)

    def _reduce(self, values: Tensor, operation: ReduceOp.RedOpType, root: int | None = None) -> None:
        """Sums every piece on each rank, or on `root` alone."""
        step = SLOT_BYTES // values.element_size()

        def lay(at: int, slot: Tensor) -> None:
            _fill(slot, values[at * step : (at + 1) * step])

        def receive(at: int, slots: Slots) -> None:
            if root in (None, self._rank):
                _combine_slots(values[at * step : (at + 1) * step], slots, operation)

        self._exchange(-(-values.numel() // step), lay, receive)

    def _reduce_in_shares(self, values: Tensor, operation: ReduceOp.RedOpType) -> None:
        """Sums a share of every piece on each rank, and gathers the shares."""
        step = SLOT_BYTES // values.element_size()

        def lay(at: int, slot: Tensor) -> None:
            piece = values[at // 2 * step : (at // 2 + 1) * step]
            if at % 2 == 0:
                _fill(slot, piece)
                return
            own = share(piece, self._rank, self._ranks)
            begin = own.storage_offset() - piece.storage_offset()
            shares = [other[begin * piece.element_size() :] for other in self._slots_of(self._pieces - 2)]
            _combine_slots(own, shares, operation)
            _fill(slot, own)

        def receive(at: int, slots: Slots) -> None:
            if at % 2:
                piece = values[at // 2 * step : (at // 2 + 1) * step]
                for rank, slot in enumerate(slots):
                    if rank != self._rank:
                        _take(slot, share(piece, rank, self._ranks))

        self._exchange(2 * -(-values.numel() // step), lay, receive)

    def broadcast(self, tensors: list[Tensor], opts: Options) -> Work:  # type: ignore[override]
        with self._collective("broadcast", tensors):
            for tensor in tensors:
                self.spread(flat_values(tensor), opts.rootRank)
        return FinishedWork(tensors)

    def spread(self, values: Tensor, root: int) -> None:
        """Copies the values of `root` to each rank."""
        step = SLOT_BYTES // values.element_size()

        def lay(at: int, slot: Tensor) -> None:
            if self._rank == root:
                _fill(slot, values[at * step : (at + 1) * step])

        def receive(at: int, slots: Slots) -> None:
            if self._rank != root:
                _take(slots[root], values[at * step : (at + 1) * step])

        self._exchange(-(-values.numel() // step), lay, receive)

    def barrier(self, opts: Options = None) -> Work:
        with self._collective("barrier", []):
            self._exchange(1, lambda at, slot: None, lambda at, slots: None)
        return FinishedWork([])

    def monitored_barrier(self, timeout: object = None, wait_all_ranks: bool = False) -> None:
        self.barrier()

    # ------------------------------------------------------------------------------------------------ gathering

    def all_gather_single(self, output: Tensor, input: Tensor, opts: Options = None) -> Work:
        with self._collective("all_gather", [input]):
            self.gather_parts(list(flat_values(output).view(self._ranks, -1)), flat_values(input))
        return FinishedWork([output])

    def all_gather_single_coalesced(self, outputs: list[Tensor], inputs: list[Tensor], opts: Options = None) -> Work:
        with self._collective("all_gather", inputs):
            for output, input in zip(outputs, inputs, strict=True):
                self.gather_parts(list(flat_values(output).view(self._ranks, -1)), flat_values(input))
        return FinishedWork(outputs)

    def allgather(self, outputs: list[list[Tensor]], inputs: list[Tensor], opts: Options = None) -> Work:  # type: ignore[override]
        with self._collective("all_gather", inputs):
            for parts, input in zip(outputs, inputs, strict=True):
                self.gather_parts([flat_values(part) for part in parts], flat_values(input))
        return FinishedWork(outputs)

    def allgather_coalesced(self, outputs: list[list[Tensor]], inputs: list[Tensor], opts: Options = None) -> Work:
        with self._collective("all_gather", inputs):
            for n, input in enumerate(inputs):
                self.gather_parts([flat_values(parts[n]) for parts in outputs], flat_values(input))
        return FinishedWork(outputs)

    def gather(self, outputs: list[list[Tensor]], inputs: list[Tensor], opts: Options) -> Work:  # type: ignore[override]
        with self._collective("gather", inputs):
            parts = [flat_values(part) for part in outputs[0]] if self._rank == opts.rootRank else None
            self.gather_parts(parts, flat_values(inputs[0]))
        return FinishedWork(outputs)

    def gather_parts(self, parts: list[Tensor] | None, own: Tensor) -> None:
        """Gathers `own` of all ranks into `parts`, None on a rank that receives nothing."""
        if parts is not None and any(part.numel() != own.numel() for part in parts):
            raise ValueError("the tensors of an all-gather differ in size")
        self._gather(parts, own, own.numel())

    def gather_shares(self, values: Tensor) -> None:
        """Gathers the share of `values` that each rank has."""
        shares = [share(values, rank, self._ranks) for rank in range(self._ranks)]
        self._gather(shares, shares[self._rank], shares[0].numel())

    def _gather(self, parts: list[Tensor] | None, own: Tensor, length: int) -> None:
        """Gathers parts of at most `length` values."""
        step = SLOT_BYTES // own.element_size()

        def lay(at: int, slot: Tensor) -> None:
            _fill(slot, own[at * step : (at + 1) * step])

        def receive(at: int, slots: Slots) -> None:
            for slot, part in zip(slots, parts or (), strict=False):
                _take(slot, part[at * step : (at + 1) * step])

        self._exchange(-(-length // step), lay, receive)

    # ------------------------------------------------------------------------------------------------ scattering

    def reduce_scatter_single(self, output: Tensor, input: Tensor, opts: Options = None) -> Work:
        with self._collective("reduce_scatter", [input]):
            self.reduce_parts(flat_values(output), list(flat_values(input).view(self._ranks, -1)), operation_of(opts))
        return FinishedWork([output])

    def reduce_scatter_single_coalesced(
        self, outputs: list[Tensor], inputs: list[Tensor], opts: Options = None
    ) -> Work:
        with self._collective("reduce_scatter", inputs):
            for output, input in zip(outputs, inputs, strict=True):
                self.reduce_parts(
                    flat_values(output), list(flat_values(input).view(self._ranks, -1)), operation_of(opts)
                )
        return FinishedWork(outputs)

    def reduce_scatter(self, outputs: list[Tensor], inputs: list[list[Tensor]], opts: Options = None) -> Work:  # type: ignore[override]
        with self._collective("reduce_scatter", [part for parts in inputs for part in parts]):
            for output, parts in zip(outputs, inputs, strict=True):
                self.reduce_parts(flat_values(output), [flat_values(part) for part in parts], operation_of(opts))
        return FinishedWork(outputs)

    def reduce_parts(self, output: Tensor, parts: Sequence[Tensor], operation: ReduceOp.RedOpType) -> None:
        """Puts the sum of this rank's part into `output`."""
        self._exchange_parts(
            parts, output, lambda values, slots: _combine_slots(values, slots, operation), output.numel()
        )

    def reduce_share(self, values: Tensor, operation: ReduceOp.RedOpType) -> Tensor:
        """Puts the sum into this rank's share of `values`, and returns the share."""
        shares = [share(values, rank, self._ranks) for rank in range(self._ranks)]
        own = shares[self._rank]
        self._exchange_parts(shares, own, lambda sums, slots: _combine_slots(sums, slots, operation), shares[0].numel())
        return own

    def scatter(self, outputs: list[Tensor], inputs: list[list[Tensor]], opts: Options) -> Work:  # type: ignore[override]
        with self._collective("scatter", [part for parts in inputs for part in parts]):
            output, root = flat_values(outputs[0]), opts.rootRank
            parts = [flat_values(part) for part in inputs[0]] if self._rank == root else None
            self._exchange_parts(parts, output, lambda values, slots: _take(slots[root], values), output.numel())
        return FinishedWork(outputs)

    def all_to_all_single(
        self, output: Tensor, input: Tensor, output_sizes: list[int], input_sizes: list[int], opts: Options = None
    ) -> Work:
        parts = list(input.split(input_sizes)) if input_sizes else list(input.chunk(self._ranks))
        arriving = list(output.split(output_sizes)) if output_sizes else list(output.chunk(self._ranks))
        return self.alltoall(arriving, parts)

    def alltoall(self, outputs: list[Tensor], inputs: list[Tensor], opts: Options = None) -> Work:
        """Exchanges parts of any sizes, as messages: what this rank sends does not wait for what it receives."""
        with self._collective("all_to_all", inputs):
            for receiver, part in enumerate(inputs):
                if receiver != self._rank:
                    self._outbox[receiver].send(part, _INSIDE)
            outputs[self._rank].data.copy_(inputs[self._rank].data)
            for sender, part in enumerate(outputs):
                if sender != self._rank:
                    inbox = self._inbox[sender]
                    inbox.take(part, _INSIDE, inbox.expect(_INSIDE))
            for receiver in range(self._ranks):
                self._send_rest(receiver)
        return FinishedWork(outputs)

    # ------------------------------------------------------------------------------------------------ messages

    def send(self, tensors: list[Tensor], receiver: int, tag: int) -> Work:
        with self._collective("send", tensors):
            for tensor in tensors:
                self._outbox[receiver].send(tensor, tag)
            is_pending = self._outbox[receiver].advance()
        return _PendingMessage(lambda: self._send_rest(receiver), tensors) if is_pending else FinishedWork(tensors)

    def recv(self, tensors: list[Tensor], sender: int, tag: int) -> Work:
        def take() -> None:
            with self._lock:
                inbox.take(tensors[0], tag, place)

        with self._collective("receive", tensors):
            inbox = self._inbox[sender]
            place = inbox.expect(tag)
        return _PendingMessage(take, tensors)

    # ------------------------------------------------------------------------------------------------ pieces

    def _exchange(self, count: int, lay: Callable[[int, Tensor], None], receive: Callable[[int, Slots], None]) -> None:
        """Exchanges `count` pieces: each rank lays piece 0, 1, … into a slot, and reads the slots of all."""
        first = self._pieces
        for at in range(count + 1):
            if at < count:
                self._lay(lambda slot, at=at: lay(at, slot))  # type: ignore[misc]
            if at:
                self._receive(first + at - 1, lambda slots, at=at: receive(at - 1, slots))  # type: ignore[misc]

    def _exchange_parts(
        self, parts: Sequence[Tensor] | None, output: Tensor, receive: Callable[[Tensor, Slots], None], length: int
    ) -> None:
        """Exchanges a part of `length` for each rank; `receive` sees this rank's; `parts` None sends nothing."""
        size = output.element_size()
        step = max(1, SLOT_BYTES // size // self._ranks)

        def lay(at: int, slot: Tensor) -> None:
            width = min(step, length - at * step) * size
            for n, part in enumerate(parts or ()):
                _fill(slot[n * width :], part[at * step : (at + 1) * step])

        def receive_part(at: int, slots: Slots) -> None:
            width = min(step, length - at * step) * size
            receive(output[at * step : (at + 1) * step], [slot[self._rank * width :] for slot in slots])

        self._exchange(-(-length // step), lay, receive_part)

    def _lay(self, fill: Callable[[Tensor], None]) -> None:
        piece = self._pieces
        self._pieces += 1
        if piece >= SLOTS:
            for segment in self._segments:
                self._wait(segment.pieces_read, piece - SLOTS + 1, segment)
        fill(self._own.slots[piece % SLOTS])
        self._own.pieces_laid.value = word_value(piece + 1)
        wake(self._own.pieces_laid)

    def _slots_of(self, piece: int) -> list[Tensor]:
        """Waits until every rank has laid a piece; returns the slots that hold it."""
        for segment in self._segments:
            self._wait(segment.pieces_laid, piece + 1, segment)
        return [segment.slots[piece % SLOTS] for segment in self._segments]

    def _receive(self, piece: int, receive: Callable[[Slots], None]) -> None:
        receive(self._slots_of(piece))
        self._own.pieces_read.value = word_value(piece + 1)
        wake(self._own.pieces_read)

    def _wait(self, word: Word, value: int, owner: Segment) -> None:
        wait_for(word, value, owner, self._timeout, self._advance)

    def _send_rest(self, receiver: int) -> None:
        """Waits until all messages to a rank have a descriptor."""
        with self._lock:
            outbox = self._outbox[receiver]
            while outbox.advance():
                self._wait(outbox.next_descriptor.is_taken, 1, self._segments[receiver])

    def _advance(self) -> bool:
        """Sends what was kept back, and makes place for what peers keep back; returns True if there was any."""
        steps = [*(outbox.advance() for outbox in self._outbox), *(inbox.relieve() for inbox in self._inbox)]
        return any(steps)

    def _collective(self, kind: str, tensors: list[Tensor]) -> AbstractContextManager[object]:
        stack = self.observed(kind, tensors)
        stack.enter_context(self._lock)
        return stack


def share(values: Tensor, rank: int, ranks: int) -> Tensor:
    """Returns a rank's share of values in one dimension: all are equal, only the last ones are shorter."""
    width = -(-values.numel() // ranks)
    return values[rank * width : (rank + 1) * width]


def flat_values(tensor: Tensor) -> Tensor:
    """Returns a dense tensor's values in one dimension, as a view that autograd does not see.

    Raises ValueError for a tensor that is not contiguous.
    """
    if not tensor.is_contiguous():
        raise ValueError("tensors of a collective must be contiguous")
    return tensor.data.view(-1)


def _fill(slot: Tensor, values: Tensor) -> None:
    slot[: values.numel() * values.element_size()].view(values.dtype).copy_(values)


def _take(slot: Tensor, values: Tensor) -> None:
    values.copy_(slot[: values.numel() * values.element_size()].view(values.dtype))


def operation_of(opts: Options) -> ReduceOp.RedOpType:
    """Returns what a reduction does; SUM by default.

    Raises ValueError for one that shared memory lacks.
    """
    operation = ReduceOp.SUM if opts is None else opts.reduceOp.op
    if operation not in _SUMS:
        raise ValueError(f"shared memory has no reduction {operation.name}")
    return operation


def _combine_slots(values: Tensor, slots: Slots, operation: ReduceOp.RedOpType) -> None:
    size = values.numel() * values.element_size()
    combine(values, [slot[:size].view(values.dtype) for slot in slots], operation)


def combine(values: Tensor, pieces: Sequence[Tensor], operation: ReduceOp.RedOpType) -> None:
    """Puts the sum of pieces, in their order, into `values`."""
    add = _SUMS[operation]
    if len(pieces) == 1:
        values.copy_(pieces[0])
    else:
        add(pieces[0], pieces[1], out=values)
    for piece in pieces[2:]:
        add(values, piece, out=values)
    if operation == ReduceOp.AVG:
        values.div_(len(pieces))
