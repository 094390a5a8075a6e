"""Records where the time of each step goes, by phases.

Model: the clock marks the begin of a step, the last gradient of its backward pass, the begin and the end of what
happens between passes and update, and the end. On a GPU the marks are events, which the host reads when the device has
come past them; it never waits for one. `host` is the wall time that no other phase accounts for. On a GPU the wait for
samples counts as far as the device idles meanwhile.

What a phase holds depends on the engine:

    ddp, zero1   `exposed` lasts from the last gradient of this rank until all buckets are exchanged. Under zero1 the
                 broadcast of updated parameters is part of `update`.
    fsdp,        Exchanges are part of `passes`: the engine waits within them, and no mark can tell the waits from the
    pipeline,    work without synchronising. The same holds for a compiled network, and for one whose steps find out
    tensor       which parameters they use. What layers exchange on the context axis always is.
    local        Exchanges of momenta or weights are part of `update`.

Of a `train.step` of the user's, and of an optimizer with a closure, `passes` holds the updates too.

Contract: a step takes six readings of the clock more, and one call of a hook: 3 us. Ranks exchange phases where they
exchange the loss of a logged step, in the same all-reduce.

Limits: evaluations and checkpoints count for no phase.
"""

from __future__ import annotations

import contextlib
import socket
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Literal, NamedTuple, TypeVar

import torch.distributed as dist
from torch import Tensor
from torch.nn.parallel import DistributedDataParallel

from dslc.compiler.ir.program import JobProgram, RankPlace, StepPhases
from dslc.runtime.data.batches import StepBatch
from dslc.runtime.measure.device_clock import DeviceClock, Mark
from dslc.runtime.process.records import PHASES
from dslc.runtime.step.assemble import TrainingComponents
from dslc.runtime.step.stepper import Between

NAMES = (*PHASES, "rank_wait")
LAPS = 1000  # logged steps whose phases a rank keeps for the report

Item = TypeVar("Item")
Result = TypeVar("Result")


class _StepMarks(NamedTuple):
    """The marks of one step; `ready`, of its last gradient, where the engine shows it."""

    begin: Mark
    ready: Mark | None
    passed: Mark
    resumed: Mark
    end: Mark


class _LastGradient:
    """Marks the moment at which the last gradient of a backward pass is computed.

    The first step marks each gradient, and shows which comes last; later steps mark that one alone.
    """

    def __init__(self, parameters: Iterable[Tensor], clock: DeviceClock) -> None:
        self._clock = clock
        self._mark: Mark | None = None
        self._newest: Tensor | None = None
        self._handles = {
            parameter: parameter.register_post_accumulate_grad_hook(self._note) for parameter in parameters
        }

    def _note(self, parameter: Tensor) -> None:
        self._newest, self._mark = parameter, self._clock.mark()

    def take(self) -> Mark | None:
        mark, self._mark = self._mark, None
        if len(self._handles) > 1 and self._newest is not None:
            self._handles = {parameter: handle for parameter, handle in self._handles.items() if self._keep(parameter)}
        return mark

    def _keep(self, parameter: Tensor) -> bool:
        if parameter is not self._newest:
            self._handles[parameter].remove()
        return parameter is self._newest


class PhaseClock:
    """Measures the phases of one rank's steps. `laps` are the means between logged steps, the newest last.

    `gradients` are marked to tell the backward pass from the exchange behind it. `by_user`: the user's own code updates
    within a step.
    """

    def __init__(
        self, rank: int, ranks: int, clock: DeviceClock, gradients: Iterable[Tensor] = (), *, by_user: bool = False
    ) -> None:
        self._rank, self._ranks, self._clock, self._by_user = rank, ranks, clock, by_user
        self._gradients = _LastGradient(gradients, clock)
        self.laps: deque[StepPhases] = deque(maxlen=LAPS)
        self._pending: deque[_StepMarks] = deque()
        self._ready: Mark | None = None
        self._passed = self._resumed = self._clock.mark()
        self._wait = 0.0  # for the samples of the step that begins
        self._since = self._until = time.perf_counter()
        self._data = self._passes = self._exposed = self._update = self._rank_wait = self._pause = 0.0
        self._steps = self._read = 0

    # ------------------------------------------------------------------------------------------------------- a step

    def batches(self, items: Iterable[Item]) -> Iterator[Item]:
        """Yields the same items, and measures the wait for each."""
        iterator = iter(items)
        self._since = self._until = time.perf_counter()
        self._pause = 0.0
        while True:
            begin = time.perf_counter()
            try:
                item = next(iterator)
            except StopIteration:
                return
            self._wait += time.perf_counter() - begin
            yield item

    def wrap(self, work: Callable[[StepBatch], Result]) -> Callable[[StepBatch], Result]:
        """Returns `work`, which does one step, with marks at its ends."""
        mark = self._clock.mark

        def marked(batch: StepBatch) -> Result:
            begin = mark()
            result = work(batch)
            end = mark()
            passed, resumed = (end, end) if self._by_user else (self._passed, self._resumed)
            self._pending.append(_StepMarks(begin, self._ready, passed, resumed, end))
            self._steps += 1
            self._data, self._wait = self._data + self._wait, 0.0
            self._until = time.perf_counter()
            self._read_marks()
            return result

        return self._wrap_on_host(work) if self._clock.is_host else marked

    def _wrap_on_host(self, work: Callable[[StepBatch], Result]) -> Callable[[StepBatch], Result]:
        """Returns the same on the host's clock, whose marks are numbers that are read at once."""
        clock, by_user = time.perf_counter, self._by_user

        def marked(batch: StepBatch) -> Result:
            passed: float
            resumed: float
            begin = clock()
            result = work(batch)
            end = self._until = clock()
            passed, resumed = (end, end) if by_user else (self._passed, self._resumed)  # type: ignore[assignment]
            ready: float = passed if self._ready is None else self._ready  # type: ignore[assignment]
            self._passes += ready - begin
            self._exposed += passed - ready
            self._update += end - resumed
            self._data += self._wait
            self._wait = 0.0
            self._steps += 1
            self._read += 1
            return result

        return marked

    def wrap_between(self, work: Between) -> Between:
        """Returns `work`, which is called between passes and update, with marks around it."""
        mark = time.perf_counter if self._clock.is_host else self._clock.mark

        def marked(batch: StepBatch, total: Tensor, number: int | Tensor) -> None:
            self._passed = mark()
            self._ready = self._gradients.take()
            work(batch, total, number)
            self._resumed = mark()

        return marked

    @contextlib.contextmanager
    def pause(self) -> Iterator[None]:
        """Leaves out what is no part of a step: evaluations and checkpoints."""
        begin = time.perf_counter()
        try:
            yield
        finally:
            self._pause += time.perf_counter() - begin

    @contextlib.contextmanager
    def rank_wait(self) -> Iterator[None]:
        """Measures the wait for other ranks where a loss is logged."""
        begin = time.perf_counter()
        try:
            yield
        finally:
            self._rank_wait += time.perf_counter() - begin

    def _read_marks(self) -> None:
        seconds_between = self._clock.seconds_between
        while self._pending and self._clock.is_past(self._pending[0].end):
            marks = self._pending.popleft()
            ready = marks.passed if marks.ready is None else marks.ready
            self._passes += seconds_between(marks.begin, ready)
            self._exposed += seconds_between(ready, marks.passed)
            self._update += seconds_between(marks.resumed, marks.end)
            self._read += 1

    # -------------------------------------------------------------------------------------------------- logged steps

    def finish_lap(self) -> StepPhases | None:
        """Returns the mean phases of the steps that ended since the last call; None if there are none."""
        self._read_marks()
        if not self._steps or not self._read:
            return None
        steps, read_steps = self._steps, self._read
        total = max(0.0, self._until - self._since - self._pause) / steps
        passes, exposed, update = self._passes / read_steps, self._exposed / read_steps, self._update / read_steps
        data = min(self._data / steps, max(0.0, total - passes - exposed - update))
        lap = StepPhases(
            data=data,
            passes=passes,
            exposed=exposed,
            update=update,
            host=max(0.0, total - data - passes - exposed - update),
            rank_wait=self._rank_wait / steps,
        )
        self.laps.append(lap)
        self._since = self._until
        self._data = self._passes = self._exposed = self._update = self._rank_wait = self._pause = 0.0
        self._steps = self._read = 0
        return lap

    def share(self, lap: StepPhases | None, like: Tensor) -> Tensor:
        """Returns this rank's phases in its place of a vector of zeros, which an all-reduce fills."""
        numbers = like.new_zeros(self._ranks * len(NAMES))
        if lap is not None:
            begin = self._rank * len(NAMES)
            numbers[begin : begin + len(NAMES)] = like.new_tensor([getattr(lap, name) for name in NAMES])
        return numbers


def phase_clock(job: JobProgram, place: RankPlace, parts: TrainingComponents) -> PhaseClock:
    overlaps = shows_exposed(job) and isinstance(parts.engine.model, DistributedDataParallel)
    return PhaseClock(
        place.rank,
        job.world_size,
        DeviceClock(parts.device),
        [parameter for parameter in parts.plain.parameters() if parameter.requires_grad] if overlaps else (),
        by_user=job.own_step is not None or job.optimizer.closure,
    )


def phases_of_ranks(numbers: Sequence[float]) -> list[StepPhases]:
    """Returns the phases by rank from a vector of `PhaseClock.share`; [] if a rank has none."""
    width = len(NAMES)
    ranks = [numbers[begin : begin + width] for begin in range(0, len(numbers), width)]
    laps = [StepPhases(**dict(zip(NAMES, values, strict=True))) for values in ranks]
    return laps if all(lap.total for lap in laps) else []


def shows_exposed(job: JobProgram) -> bool:
    """True if the wait for gradients can be told from the backward pass without synchronising."""
    found_out = job.gradients.search or job.own_step is not None or job.optimizer.closure
    return job.gradients.kind in ("ddp", "zero1") and job.pipeline is None and not job.compiled and not found_out


def exposed_within(job: JobProgram) -> Literal["", "passes", "update"]:
    """Returns the phase that holds what the plan predicts as `exposed`; "" where it is a phase of its own."""
    if job.gradients.kind in ("zero1", "local"):
        return "update"
    return "" if shows_exposed(job) or job.world_size == 1 else "passes"


def comparisons(job: JobProgram) -> tuple[bool, ...]:
    """Returns how ranks are compared: with their passes (true), without (false), or both ways.

    A rank that waits for others within its passes looks as slow as they are. So passes say nothing where they hold the
    exchange of gradients. Where they hold other waits alone, such as for the count of targets, a difference is real.
    """
    if not shows_exposed(job):
        return (False,)
    waits = job.axes["context"] > 1 or job.loss.counts == "kept" or bool(job.loss.together) or job.sync_batch_norm
    return (True, False) if waits else (True,)


def host_names(job: JobProgram) -> list[str]:
    """Returns the name of each rank's host. All ranks call it."""
    hostname = socket.gethostname()
    if job.world_size == job.processes:
        return [hostname] * job.world_size
    names = [""] * job.world_size
    dist.all_gather_object(names, hostname)
    return names
