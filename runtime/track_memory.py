"""What a rank's tensors take during its steps, measured: at rest, at the peak, and by kind.

Model: on a CPU torch's allocator reports each allocation and release to the profiler, exact to the byte and also where
C++ made it (the buckets of DistributedDataParallel, kernels' scratch tensors) or where a storage is resized in place
(what `fully_shard` gathers), which a dispatch mode does not see. They are played back over what was there before the
first step. On a GPU the allocator's own peak is taken.

Kinds: `parameters`, `gradients`, `optimizer` and `buffers` are the storages that these tensors are found in;
`communication` is what was made while something was gathered, scattered or agreed; `activations` all else.

Contract: `tracker = Tracker(model, optimizer, device)` after the parts are assembled, `with tracker.step(): …` around
each of the first few steps, the update and `zero_grad` included; two are enough. Then `tracker.rest` and `tracker.peak`
are bytes by kind, `tracker.when` says in which part of the step the peak was. `rest` is between two steps, after the
last that was measured; `peak` is the highest of all. A step takes a few times as long while it is measured.

Limits: the batch that the step is given was there before, and is not counted. What another thread releases (gloo's)
is noticed at the end of the step only. What a library allocates beside torch (oneDNN's scratch pads, gloo's buffers) is
not seen, nor the allocator's own loss on a CPU; on a GPU the peak's own `activations` hold all that is neither state
nor gradients.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torch._C._profiler import _EventType
from torch.autograd.profiler import profile, record_function

KINDS = ("parameters", "gradients", "optimizer", "buffers", "activations", "communication")
_UPDATED = "dslc: updated"  # marks, among what is recorded, where gradients were looked up
_EXCHANGE = ("FSDP::", "c10d::", "record_param_comms", "gloo:", "nccl:", "fsdp::", "_c10d_functional::")


class Tracker:
    """Measures the steps of one rank; see above."""

    def __init__(self, model: nn.Module, optimizer: torch.optim.Optimizer, device: torch.device) -> None:
        self._model, self._optimizer, self._device = model, optimizer, device
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
        with self._gradients_noted(), profile(profile_memory=True) as recorded:
            yield
        assert recorded.kineto_results is not None
        events: list[Any] = []
        for event in recorded.kineto_results.experimental_event_tree():
            _flatten(event, (), events)
        events.sort(key=lambda item: int(item[0].start_time_ns))
        self._play(events)
        self.rest = self._sums(self._at_rest())

    # --------------------------------------------------------------------------------------------------- private

    def _at_rest(self) -> dict[int, tuple[int, str]]:
        """The storages that are reached from model and optimizer, and gradients' that outlive their step."""
        found: dict[int, tuple[int, str]] = {}

        def add(tensor: object, kind: str) -> None:
            if isinstance(tensor, Tensor):
                local = getattr(tensor, "_local_tensor", tensor)
                if local.device.type == self._device.type and local.untyped_storage().nbytes():
                    found.setdefault(local.untyped_storage().data_ptr(), (local.untyped_storage().nbytes(), kind))

        for parameter in self._model.parameters():
            add(parameter, "parameters")
        for buffer in self._model.buffers():
            add(buffer, "buffers")
        for owner in (self._optimizer, getattr(self._optimizer, "optim", None)):
            for state in getattr(owner, "state", {}).values():
                for value in state.values() if isinstance(state, dict) else ():
                    add(value, "optimizer")
        for address, size in self._gradients.items():
            found.setdefault(address, (size, "gradients"))
        return found

    @contextlib.contextmanager
    def _gradients_noted(self) -> Iterator[None]:
        """Looks the gradients up when they are about to be let go."""
        whole = self._optimizer.zero_grad

        def noted(*arguments: Any, **named: Any) -> None:
            self._gradients = {}
            for parameter in self._model.parameters():
                if parameter.grad is not None:
                    local: Tensor = getattr(parameter.grad, "_local_tensor", parameter.grad)
                    self._gradients[local.untyped_storage().data_ptr()] = local.untyped_storage().nbytes()
            with record_function(_UPDATED):
                pass
            whole(*arguments, **named)

        self._optimizer.zero_grad = noted  # type: ignore[method-assign]
        try:
            yield
        finally:
            del self._optimizer.zero_grad

    def _play(self, events: list[tuple[Any, tuple[str, ...]]]) -> None:
        """The allocations of a step in order: notes the peak, and which gradients are still there after it."""
        order: list[tuple[int, int, tuple[str, ...]]] = []  # (address, bytes, in what)
        kinds: dict[int, str] = {}  # by position in `order`
        born: dict[int, int] = {}  # what is there and was made in this step: address to position
        early = dict(self._gradients)  # gradients in storages that were there before the step
        for event, around in events:
            if event.tag != _EventType.Allocation:
                if event.name == _UPDATED:
                    early = {address: size for address, size in early.items() if address not in born}
                    kinds |= {born[address]: "gradients" for address in self._gradients if address in born}
                continue
            address, size = event.extra_fields.ptr, event.extra_fields.alloc_size
            if address in born:  # released; where a new one begins there, by another thread
                kinds.setdefault(born[address], _kind(order[born.pop(address)][2]))
            if size > 0:
                born[address] = len(order)
            order.append((address, size, around))
        states = self._at_rest()
        for address, position in born.items():  # still there at the end
            kinds.setdefault(position, states[address][1] if address in states else _kind(order[position][2]))

        known = self._live | {address: (size, "gradients") for address, size in early.items()}
        # Buckets of the step before that are laid out anew: they go, unseen, before the new ones are made.
        old = {address for address, (_, kind) in known.items() if kind == "gradients"} - set(early)
        live = self._sums(known)
        now = sum(live.values())
        self._note(live, now, ("before the step",))
        for position, (address, size, around) in enumerate(order):
            released = [address]  # for a new one, what another thread released unseen
            if size > 0 and kinds[position] == "gradients" and born.get(address) == position:
                released.extend(old)
            for one in released:
                gone, kind = known.pop(one, (0, KINDS[0]))
                live[kind] -= gone
                now -= gone
            if size > 0:
                kind = kinds[position]
                known[address] = size, kind
                live[kind] += size
                now += size
                self._note(live, now, around)
        self._gradients = {address: size for address, size in self._gradients.items() if address in known}

    def _note(self, live: dict[str, int], total: int, around: tuple[str, ...]) -> None:
        if total > sum(self.peak.values()):
            self.peak = {kind: live.get(kind, 0) for kind in KINDS}
            self.when = " > ".join(around)

    def _sums(self, storages: dict[int, tuple[int, str]]) -> dict[str, int]:
        sums = dict.fromkeys(KINDS, 0)
        for size, kind in storages.values():
            sums[kind] += size
        return sums

    @contextlib.contextmanager
    def _gpu_step(self) -> Iterator[None]:
        torch.cuda.synchronize(self._device)
        torch.cuda.reset_peak_memory_stats(self._device)
        with self._gradients_noted():
            yield
        torch.cuda.synchronize(self._device)
        gradients = sum(self._gradients.values())
        self._gradients = {}  # their storages may be gone; what is left of them is the rest below
        state = self._sums(self._at_rest())
        held, most = torch.cuda.memory_allocated(self._device), torch.cuda.max_memory_allocated(self._device)
        self.rest = state | {"gradients": max(0, held - sum(state.values()))}
        if most > sum(self.peak.values()):
            known = sum(state.values()) + gradients
            self.peak = state | {"gradients": gradients, "activations": max(0, most - known)}


def _kind(around: tuple[str, ...]) -> str:
    exchanged = any(name.startswith(_EXCHANGE) for name in around)
    return "communication" if exchanged else "activations"


def _flatten(event: Any, around: tuple[str, ...], into: list[Any]) -> None:
    """The tree as a list of (event, names of what it happened inside)."""
    into.append((event, around))
    inside = (*around, event.name) if event.children else around
    for child in event.children:
        _flatten(child, inside, into)
