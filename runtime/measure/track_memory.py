"""Measures the memory of a rank's tensors during its steps: at rest, at the peak, and by kind.

Model: on a CPU torch's allocator reports each allocation and release to the profiler, exact to the byte. A dispatch
mode would not see allocations in C++ (the buckets of DistributedDataParallel, kernels' scratch tensors), nor storages
resized in place (gathers of `fully_shard`). The reports are replayed over the storages from before the first step. On a
GPU the allocator's own figures are used, which have no kinds.

Kinds: `parameters`, `gradients`, `optimizer` and `buffers` are the storages of these tensors, `optimizer` also the
storages of `averages` of the weights; `communication` is memory allocated while something was gathered, scattered or
reduced; `activations` is all else. On a GPU all but parameters, optimizer and buffers are `others`, cuBLAS's workspaces
among them.

Contract: `tracker.step()` is around each of the first few steps, the update and `zero_grad` included; two are enough.
Then `rest` and `peak` are bytes by kind: between two steps, after the last that was measured, and at the highest;
`when` is the part of the step with the peak. `received` are lasting buffers that other ranks send into. A step takes a
few times as long while it is measured.

Limits: the step's batch was allocated before, and is not counted. Releases by other threads are not reported. Gloo's
threads hold exchanged tensors for a moment longer, which is ignored: exchanges that Python calls and waits for return
when the threads have let go. Memory that a library allocates outside torch (oneDNN's scratch pads, gloo's buffers) is
not seen, nor the allocator's own overhead on a CPU. On a GPU the batch is counted, and `when` is not known.
"""

from __future__ import annotations

import contextlib
import functools
import time
from collections.abc import Callable, Iterable, Iterator
from typing import Any, NamedTuple, ParamSpec, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.autograd.profiler import profile, record_function

from dslc.compiler.trace.private_torch import holders, is_allocation, local_part, tree_leaves
from dslc.runtime.exchange.base import MARK

P = ParamSpec("P")
T = TypeVar("T")
KINDS = ("parameters", "gradients", "optimizer", "buffers", "activations", "communication")
_STATE = ("parameters", "optimizer", "buffers")
_UPDATED = "dslc: updated"  # marks, in the recording, the moment when gradients were looked up
# Phases of `fully_shard`: forward, gathered memory is freed with the next gather or the end of the pass; backward, when
# it is copied out.
_GATHERED, _TAKEN_APART = "FSDP::all_gather", "FSDP::all_gather_copy_out"
_EXCHANGES = ("all_to_all_single", "all_gather_single", "reduce_scatter_single", "all_reduce")  # that Python calls
_LONGEST_HOLD = 1.0  # seconds after an exchange
_EXCHANGE = ("FSDP::", MARK, "c10d::", "record_param_comms", "gloo:", "nccl:", "fsdp::", "_c10d_functional::")


class _Event(NamedTuple):
    """An allocation, a release (size below 0), or a mark (no address); `until` ends the collective around it."""

    time: int
    address: int | None
    size: int
    around: str
    until: int | None
    phase: str

    @property
    def backward(self) -> bool:
        return self.around.startswith("autograd::")


class _MemoryBlock:
    """Memory that was allocated in the step; another thread releases it at `until`."""

    __slots__ = ("around", "end", "kind", "phase", "size", "start", "until")

    def __init__(self, event: _Event) -> None:
        self.start, self.size, self.around, self.until = event.time, event.size, event.around, event.until
        self.end: int | None = None
        self.phase = event.phase
        self.kind = "communication" if any(name in event.around for name in _EXCHANGE) else "activations"


class Tracker:
    """Measures the steps of one rank; see the module's docstring."""

    def __init__(
        self,
        model: nn.Module,
        optimizer: torch.optim.Optimizer,
        device: torch.device,
        received: Callable[[], Iterable[Tensor]] = tuple,
        averages: Iterable[Tensor] = (),
    ) -> None:
        self._model, self._optimizer, self._device, self._received = model, optimizer, device, received
        self._averages = averages
        self._live: dict[int, tuple[int, str]] = {}  # address of a storage: its bytes and kind
        self._gradients: dict[int, int] = {}
        self.rest: dict[str, int] = {}
        self.peak: dict[str, int] = {}
        self.when = ""

    @contextlib.contextmanager
    def step(self) -> Iterator[None]:
        """Measures the step inside."""
        if self._device.type == "cuda":
            with self._gpu_step():
                yield
            return
        self._live = self._at_rest()
        with self._gradients_noted(), _exchanges_let_go(), profile(profile_memory=True) as recorded:
            yield
        assert recorded.kineto_results is not None
        events: list[_Event] = []
        for event in recorded.kineto_results.experimental_event_tree():
            _flatten(event, "", None, "", events)
        events.sort(key=lambda event: event.time)
        self._play(events)
        self.rest = self._sums(self._at_rest())

    # --------------------------------------------------------------------------------------------------- private

    def _at_rest(self) -> dict[int, tuple[int, str]]:
        """Returns the storages that are reached from model and optimizer, and gradients' that outlive their step."""
        resting: dict[int, tuple[int, str]] = {}

        def add(tensor: object, kind: str) -> None:
            if isinstance(tensor, Tensor):
                local = local_part(tensor)
                if local.device.type == self._device.type and local.untyped_storage().nbytes():
                    resting.setdefault(local.untyped_storage().data_ptr(), (local.untyped_storage().nbytes(), kind))

        for parameter in self._model.parameters():
            add(parameter, "parameters")
        for buffer in self._model.buffers():
            add(buffer, "buffers")
        for owner in (self._optimizer, getattr(self._optimizer, "optim", None)):
            for state in getattr(owner, "state", {}).values():
                for value in tree_leaves(state) if isinstance(state, dict) else ():
                    add(value, "optimizer")
        for average in self._averages:
            add(average, "optimizer")
        for buffer in self._received():
            add(buffer, "communication")
        for address, size in self._gradients.items():
            resting.setdefault(address, (size, "gradients"))
        return resting

    @contextlib.contextmanager
    def _gradients_noted(self) -> Iterator[None]:
        """Looks the gradients up when they are about to be freed."""
        zero_grad = self._optimizer.zero_grad

        def noted(*arguments: bool, **named: bool) -> None:
            self._gradients = {}
            for parameter in self._model.parameters():
                if parameter.grad is not None:
                    local = local_part(parameter.grad)
                    self._gradients[local.untyped_storage().data_ptr()] = local.untyped_storage().nbytes()
            with record_function(_UPDATED):
                pass
            zero_grad(*arguments, **named)

        self._optimizer.zero_grad = noted  # type: ignore[method-assign]
        try:
            yield
        finally:
            del self._optimizer.zero_grad

    def _play(self, events: list[_Event]) -> None:  # noqa: C901 - its steps share six collections
        """Replays the allocations of a step in order: records the peak, and the gradients still there after it."""
        blocks: list[_MemoryBlock] = []
        open_blocks: dict[int, _MemoryBlock] = {}  # by address
        released: list[tuple[int, int]] = []  # (time, address) of what was there before the step
        phases: dict[tuple[str, bool], list[_MemoryBlock]] = {}  # memory made in the last phase of its kind
        early = dict(self._gradients)  # gradients in storages that were there before the step
        for event in events:
            if event.address is None and event.phase != _UPDATED:
                phases_done = [(event.phase, event.backward)]
                if event.backward:
                    phases_done += [(_GATHERED, False), *([(_GATHERED, True)] if event.phase == _TAKEN_APART else [])]
                for block in (block for phase in phases_done for block in phases.pop(phase, [])):
                    block.until = block.until or event.time
                continue
            if event.address is None:
                early = {address: size for address, size in early.items() if address not in open_blocks}
                for address in self._gradients:
                    if address in open_blocks:
                        open_blocks[address].kind = "gradients"
                continue
            allocation = open_blocks.pop(event.address, None)
            if allocation is not None:  # a new one begins there, so another thread has released it
                allocation.end = event.time if event.size < 0 else min(event.time, allocation.until or event.time)
            else:
                released.append((event.time, event.address))
            if event.size > 0:
                blocks.append(_MemoryBlock(event))
                open_blocks[event.address] = blocks[-1]
                if event.phase:
                    phases.setdefault((event.phase, event.backward), []).append(blocks[-1])
        states = self._at_rest()
        for address, block in open_blocks.items():
            if address in states:
                block.kind = states[address][1]
            else:
                block.end = block.until

        tracked = self._live | {address: (size, "gradients") for address, size in early.items()}
        # Buckets of the step before that are laid out anew are freed, unseen, before the new ones are made.
        old = [address for address, (_, kind) in tracked.items() if kind == "gradients" and address not in early]
        anew = min((b.start for b in blocks if b.kind == "gradients" and b.end is None), default=None)
        if anew is not None:
            released.extend((anew, address) for address in old)
        live = self._sums(tracked)
        changes = [(time, 0, *tracked.pop(address), "") for time, address in sorted(released) if address in tracked]
        self._note(live, sum(live.values()), "before the step")
        moves = [(time, order, -size, kind, "") for time, order, size, kind, _ in changes]
        moves += [(b.start, 1, b.size, b.kind, b.around) for b in blocks]
        moves += [(b.end, 0, -b.size, b.kind, "") for b in blocks if b.end is not None]
        now = sum(live.values())
        for _, _, size, kind, module in sorted(moves, key=lambda move: move[:2]):
            live[kind] += size
            now += size
            if size > 0:
                self._note(live, now, module)
        addresses = tracked.keys() | open_blocks.keys()
        self._gradients = {address: size for address, size in self._gradients.items() if address in addresses}

    def _note(self, live: dict[str, int], total: int, moment: str) -> None:
        if total > sum(self.peak.values()):
            self.peak, self.when = dict(live), moment

    def _sums(self, storages: dict[int, tuple[int, str]]) -> dict[str, int]:
        sums = dict.fromkeys(KINDS, 0)
        for size, kind in storages.values():
            sums[kind] += size
        return sums

    @contextlib.contextmanager
    def _gpu_step(self) -> Iterator[None]:
        torch.cuda.synchronize(self._device)
        torch.cuda.reset_peak_memory_stats(self._device)
        yield
        torch.cuda.synchronize(self._device)
        sums = self._sums(self._at_rest())
        state = {kind: sums[kind] for kind in _STATE}
        allocated, most = torch.cuda.memory_allocated(self._device), torch.cuda.max_memory_allocated(self._device)
        self.rest = state | {"others": allocated - sum(state.values())}
        if most > sum(self.peak.values()):
            self.peak = state | {"others": most - sum(state.values())}


@contextlib.contextmanager
def _exchanges_let_go() -> Iterator[None]:
    """Makes exchanges return when no thread of gloo's holds their tensors. Whether such a thread or the caller lets go
    of them last is chance, and the profiler does not see the thread's releases.
    """
    exchanges = {name: getattr(dist, name) for name in _EXCHANGES}
    for name, exchange in exchanges.items():
        setattr(dist, name, functools.partial(_until_let_go, exchange))
    try:
        yield
    finally:
        for name, exchange in exchanges.items():
            setattr(dist, name, exchange)


def _until_let_go(exchange: Callable[P, T], *arguments: P.args, **named: P.kwargs) -> T:
    tensors = [value for value in (*arguments, *named.values()) if isinstance(value, Tensor)]
    before = [holders(tensor) for tensor in tensors]
    work = exchange(*arguments, **named)
    end = time.monotonic() + _LONGEST_HOLD
    while work is None and time.monotonic() < end:
        if all(holders(tensor) <= count for tensor, count in zip(tensors, before, strict=True)):
            break
        time.sleep(0.0)
    return work


def _flatten(event: Any, module: str, until: int | None, phase: str, into: list[_Event]) -> None:
    """Collects the allocations and marks of an event tree, each with the events around it."""
    if is_allocation(event):
        fields = event.extra_fields
        into.append(_Event(event.start_time_ns, fields.ptr, fields.alloc_size, module, until, phase))
        return
    name = event.name
    if name.startswith("FSDP::"):
        phase = name.partition(" (")[0]
    if name == _UPDATED or name.startswith("FSDP::"):
        mark = _UPDATED if name == _UPDATED else phase
        time = event.start_time_ns + (event.duration_time_ns if mark == _TAKEN_APART else 0)
        into.append(_Event(time, None, 0, module, None, mark))
    if name.startswith("c10d::"):
        until = event.start_time_ns + event.duration_time_ns
    within = f"{module} > {name}" if module else name
    for child, end_of_child in zip(event.children, _until_told(event), strict=True):
        _flatten(child, within, until or end_of_child, phase, into)


def _until_told(event: Any) -> list[int | None]:
    """Returns for each part of an event the end of the broadcast that it makes a tensor for. When
    DistributedDataParallel lays out its buckets anew it broadcasts the layout in two tensors, which a thread of gloo's
    may free.
    """
    ends: list[int | None] = [None] * len(event.children)
    if event.name == "DistributedDataParallel.forward":
        end = None
        for position, child in reversed(list(enumerate(event.children))):
            if child.name == "c10d::broadcast_":
                end = child.start_time_ns + child.duration_time_ns
            elif child.name == "aten::empty":
                ends[position] = end
    return ends
