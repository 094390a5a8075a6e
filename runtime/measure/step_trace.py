"""Records some steps of one rank by torch's profiler, for `dslc run --profile=trace`.

Model: ranges of the profiler have, after `TRACE_MARK`, the names that the actions have in the plan: `0F1` and `0B1` are
the passes of micro-batch 1 at stage 0, `update 0` is the update at pipeline coordinate 0. Around them are `step 4` and
`samples`, the wait for a batch. Over a pipeline the passes and messages are named by torch's schedule runtime, in the
same words. Collectives are found in the recording by their own operators (cli/runs/trace_file.py). Those over shared
memory have none, and may end in a thread that the profiler does not see: the rank notes them beside the recording.

Before the first recorded step all ranks meet `ROUNDS` times in an all-reduce, which they leave at nearly the same
moment. The readings of their clocks there tell by how much the clocks of hosts differ.

Contract: a rank leaves `logs/rank-N.trace.json`, `logs/rank-N.clock.json` and, if it has exchanged anything over shared
memory, `logs/rank-N.collectives.json`. On a GPU it also leaves `logs/rank-N.memory.pickle`, the allocator's history of
the same steps, which https://pytorch.org/memory_viz draws. A training without a trace has no recorder.

Limits: in a large world only the ranks that the program names are recorded. The first steps are not recorded, as long
as `STEPS` come after them. A `train.step` of the user's and an optimizer with a closure have no ranges of passes. Where
the whole network is compiled, the forward pass of a later micro-batch is part of the range of the backward pass before
it.
"""

from __future__ import annotations

import contextlib
import json
import os
import socket
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import TypeVar

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.autograd.profiler import record_function
from torch.nn.parallel import DistributedDataParallel
from torch.profiler import ProfilerActivity, profile

from dslc.compiler.facts.untrusted_files import naming, replacing
from dslc.compiler.ir.program import JobProgram, RankPlace, TrainMode
from dslc.compiler.trace.private_torch import dump_memory_snapshot, record_memory_history
from dslc.runtime.data.batches import StepBatch
from dslc.runtime.process.records import LOGGED_VALUES, SHARED_MEMORY_MARK, TRACE_MARK
from dslc.runtime.step.assemble import TrainingComponents
from dslc.runtime.step.stepper import StepCallbacks
from dslc.runtime.transport.shared_memory import OBSERVERS

WARM_UP, STEPS = 3, 3  # steps that are not recorded, and that are
ROUNDS = 9
MEMORY_EVENTS = 1_000_000  # of the allocator, that its history holds

Item = TypeVar("Item")
Result = TypeVar("Result")


class SharedMemoryTimes:
    """The collectives over shared memory in a recording, from their issue to their end, which may be in other threads;
    times in nanoseconds.
    """

    def __init__(self) -> None:
        self.events: list[dict[str, object]] = []

    @contextmanager
    def observe(self, operation: str, ranks: int, tensors: Sequence[Tensor]) -> Iterator[None]:
        begin, elements = time.time_ns(), sum(tensor.numel() for tensor in tensors)
        try:
            yield
        finally:
            name = f"{SHARED_MEMORY_MARK}{operation} {elements}"
            self.events.append({"name": name, "ts": begin, "dur": time.time_ns() - begin})


class _Ranges:
    """The ranges of a rank's main thread, one inside another."""

    def __init__(self) -> None:
        self._open: list[record_function] = []

    def begin(self, name: str) -> None:
        self._open.append(record_function(TRACE_MARK + name))
        self._open[-1].__enter__()

    def end(self, depth: int) -> None:
        """Ends all ranges inside the first `depth`."""
        while len(self._open) > depth:
            self._open.pop().__exit__(None, None, None)


def first_traced_step(steps_before: int, steps: int) -> int:
    """Returns the first step that is recorded: in a training that is long enough, order_check.py compares none of the
    recorded ones, as that delays a step.
    """
    first = steps_before + WARM_UP + 1
    while any(step & (step - 1) == 0 for step in range(first, first + STEPS)):
        first += 1
    return max(steps_before + 1, min(first, steps - STEPS + 1))


class StepTrace:
    """Records the steps of one rank. `steps_before` steps were done by earlier processes of the training."""

    def __init__(
        self, job: JobProgram, place: RankPlace, parts: TrainingComponents, steps_before: int, run_dir: str
    ) -> None:
        self._job, self._place, self._device, self._step = job, place, parts.device, steps_before
        self._path = os.path.join(run_dir, "logs", f"rank-{place.rank}")
        traced = job.mode.traced if isinstance(job.mode, TrainMode) else ()
        self._is_recorded = not traced or place.rank in traced
        self._first = first_traced_step(steps_before, job.steps)
        self._ranges, self._collectives = _Ranges(), SharedMemoryTimes()
        self._profile: profile | None = None
        self._microbatch = self._ahead = 0
        self._names_passes = job.pipeline is None and job.own_step is None and not job.optimizer.closure
        model = parts.engine.model
        # A hook inside a compiled network would be compiled too.
        self._hooked = self._names_passes and ("" not in job.compiled or isinstance(model, DistributedDataParallel))
        if self._hooked:
            model.register_forward_pre_hook(self._enter_forward)
            model.register_forward_hook(self._leave_forward)

    def batches(self, items: Iterable[Item]) -> Iterator[Item]:
        """Yields the same items, and records from the wait for the first recorded step to the end of the last one."""
        iterator = iter(items)
        try:
            while True:
                if self._step + 1 == self._first:
                    self._start()
                if self._profile is not None and self._step + 1 == self._first + STEPS:
                    self.leave()
                self._begin("samples")
                item = next(iterator, None)
                self._ranges.end(0)
                if item is None:
                    return
                yield item
        finally:
            self.leave()

    def callbacks(self, callbacks: StepCallbacks) -> StepCallbacks:
        """Returns the callbacks of a step with ranges for its passes and its update."""
        seen, between = callbacks.loss, callbacks.between

        def loss(value: Tensor) -> None:
            seen(value)
            if self._names_passes:
                self._ranges.end(1)
                later = "" if self._hooked or self._is_last_microbatch else f", 0F{self._microbatch + 1}"
                self._begin(f"0B{self._microbatch}{later}")
                self._microbatch += 1

        def after_passes(batch: StepBatch, total: Tensor, number: int | Tensor) -> None:
            self._ranges.end(1)
            self._begin(LOGGED_VALUES)
            between(batch, total, number)
            self._ranges.end(1)
            if self._job.own_step is None and not self._job.optimizer.closure:
                self._begin(f"update {self._place.coordinates['pipeline']}")

        return replace(callbacks, loss=loss, between=after_passes)

    def wrap(self, work: Callable[[StepBatch], Result]) -> Callable[[StepBatch], Result]:
        """Returns `work`, which does one step, with a range around it."""

        def traced(batch: StepBatch) -> Result:
            self._step += 1
            self._microbatch = self._ahead = 0
            self._begin(f"step {self._step}")
            if self._names_passes and not self._hooked:
                self._begin("0F0")
            try:
                return work(batch)
            finally:
                self._ranges.end(0)

        return traced

    def leave(self) -> None:
        """Ends the recording, and writes it."""
        if self._profile is None:
            return
        profiler, self._profile = self._profile, None
        OBSERVERS.remove(self._collectives.observe)
        profiler.stop()
        for kind in ("trace", "collectives"):
            with contextlib.suppress(FileNotFoundError):  # an earlier attempt left it
                os.unlink(f"{self._path}.{kind}.json")
        with naming(f"{self._path}.trace.json"):
            profiler.export_chrome_trace(f"{self._path}.trace.json")
        if self._collectives.events:
            with replacing(f"{self._path}.collectives.json") as file:
                json.dump(self._collectives.events, file)
        if self._device.type == "cuda":
            dump_memory_snapshot(f"{self._path}.memory.pickle")
            record_memory_history(enabled=None)

    # ----------------------------------------------------------------------------------------------------- private

    def _start(self) -> None:
        readings = self._read_clock()  # all ranks take part
        if not self._is_recorded:
            return
        facts = {"machine": _machine(), "readings": readings}
        with replacing(f"{self._path}.clock.json") as file:
            json.dump(facts, file)
        activities = [ProfilerActivity.CPU]
        if self._device.type == "cuda":
            activities.append(ProfilerActivity.CUDA)
            record_memory_history(max_entries=MEMORY_EVENTS)
        self._profile = profile(activities=activities, record_shapes=True)
        OBSERVERS.append(self._collectives.observe)
        self._profile.start()

    def _read_clock(self) -> list[int]:
        """Returns this rank's clock after each of `ROUNDS` all-reduces, in nanoseconds."""
        number, readings = torch.zeros(1, device=self._device), []
        for _ in range(ROUNDS):
            if dist.is_initialized():
                dist.all_reduce(number)
                number.item()  # on a GPU the host waits for it
            readings.append(time.time_ns())
        return readings

    @property
    def _is_last_microbatch(self) -> bool:
        return self._microbatch + 1 == self._job.microbatches

    def _begin(self, name: str) -> None:
        if self._profile is not None:
            self._ranges.begin(name)

    def _enter_forward(self, module: nn.Module, inputs: object) -> None:
        if not module.training:
            return
        self._ranges.end(1)
        if torch.is_grad_enabled():
            self._begin(f"0F{self._microbatch}")
        else:
            self._begin(f"0E{self._ahead}")
            self._ahead += 1

    def _leave_forward(self, module: nn.Module, inputs: object, output: object) -> None:
        if not torch.is_grad_enabled():
            self._ranges.end(1)


def _machine() -> str:
    """Returns a name of the machine that its containers and network namespaces share, as they share its clock."""
    try:
        with open("/proc/sys/kernel/random/boot_id", encoding="ascii") as file:
            return file.read().strip()
    except OSError:
        return socket.gethostname()
