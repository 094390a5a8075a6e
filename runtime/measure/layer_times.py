"""Times the layers of a model, its loss, its update and its collectives, for `dslc calibrate`.

Model: each rank trains the whole model by itself for some steps, all ranks at once, so that they share the machine's
memory and caches as in a training. A layer's forward pass lasts from the end of the layer before it to its own end. Its
backward pass lasts from the gradient of its output to the gradient of its input. On a GPU the marks are events, which
the host reads after the step. Then the ranks train together as the job says, for the time of a whole step.

Contract: rank 0 leaves `times.json`: the medians of the slowest rank. The model is left as it came to be.

Limits: every process holds the whole model. A layer that a network does not call takes no time.
"""

from __future__ import annotations

import json
import os
import statistics
import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import cache, partial
from itertools import islice, pairwise

import torch
import torch.distributed as dist
from torch import Tensor, nn

from dslc.compiler.facts.calibration import TIMES, CollectiveMeasurement, RankMeasurement
from dslc.compiler.facts.untrusted_files import naming
from dslc.compiler.ir.codec import from_json, to_json
from dslc.compiler.ir.program import CalibrateMode, GradientStep, JobProgram, RankPlace, RecomputeStep, TrainMode
from dslc.compiler.trace.structures import Structure, map_tensors, tensors
from dslc.runtime.data.batches import batches
from dslc.runtime.data.samples import Splits
from dslc.runtime.measure.device_clock import DeviceClock, Mark
from dslc.runtime.parallel import context_parallel
from dslc.runtime.parallel.mesh import mesh_of
from dslc.runtime.process.records import note
from dslc.runtime.process.stop import RunControl
from dslc.runtime.step.assemble import assemble
from dslc.runtime.step.stepper import clipped, cut_off
from dslc.runtime.technique.precision import autocast

WARM_UP, LEAST, MOST = 3, 6, 300  # steps
SECONDS = 1.5  # for which the steps of one size go on, between LEAST and MOST of them
FEW_BYTES = 4096  # the size of a collective that takes its latency alone
COLLECTIVES = 12
TRAINING_SECONDS, LEAST_STEPS = 3.0, 20  # of the training that follows, of MOST steps at most
BATCHES = 8  # made to measure the making of samples


class _PassMarks:
    """The marks of one step: the end of each layer's forward pass, and the beginning of its backward pass."""

    def __init__(self, clock: DeviceClock) -> None:
        self._clock = clock
        self.forward: list[tuple[str, Mark]] = []
        self.backward: list[tuple[str, Mark]] = []

    @contextmanager
    def attached(self, model: nn.Module, names: tuple[str, ...]) -> Iterator[None]:
        hooks = [model.get_submodule(name).register_forward_hook(partial(self._mark_forward, name)) for name in names]
        try:
            yield
        finally:
            for hook in hooks:
                hook.remove()

    def _mark_forward(self, name: str, module: nn.Module, inputs: object, output: object) -> None:
        self.forward.append((name, self._clock.mark()))
        for tensor in tensors(output):
            if tensor.requires_grad:
                tensor.register_hook(partial(self._mark_backward, name))
                break

    def _mark_backward(self, name: str, gradient: Tensor) -> None:
        self.backward.append((name, self._clock.mark()))

    def times(self, begin: Mark, output: Mark, loss: Mark, end: Mark) -> dict[str, tuple[float, float]]:
        """Returns seconds forward and backward by layer, with the loss under ""."""
        forward: dict[str, float] = defaultdict(float)
        for (_, before), (name, now) in pairwise([("", begin), *self.forward]):
            forward[name] += self._clock.seconds_between(before, now)
        forward[""] += self._clock.seconds_between(self.forward[-1][1] if self.forward else output, loss)
        backward: dict[str, float] = defaultdict(float)
        for (name, now), (_, after) in pairwise([("", loss), *self.backward, ("", end)]):
            backward[name] += self._clock.seconds_between(now, after)
        return {name: (forward[name], backward[name]) for name in {**forward, **backward}}


class MeasurementStoppedError(Exception):
    """A user asks the ranks to stop measuring."""


class _Stages:
    """Reports each stage of the measurements to the launcher, and ends them all at a stage if a user asks for it."""

    def __init__(self, run_dir: str, place: RankPlace, board: RunControl, device: torch.device) -> None:
        self._run_dir, self._rank, self._board, self._device = run_dir, place.rank, board, device

    def begin(self, text: str) -> None:
        """Begins a stage, which all ranks call at once. Raises MeasurementStoppedError."""
        stops = torch.tensor(float(self._board.stop_requested), device=self._device)
        if dist.is_initialized():
            dist.all_reduce(stops, dist.ReduceOp.MAX)
        if stops.item():
            raise MeasurementStoppedError
        if self._rank == 0:
            note(self._run_dir, f"measuring {text}")


def stage_count(mode: CalibrateMode) -> int:
    """Returns the number of stages that `measure_times` reports."""
    groups = {axis for _, axis, _ in mode.exchanges if axis.isdigit()}
    return len(mode.samples) + len(mode.exchanges) + (2 + len(groups)) * bool(mode.exchanges) + 1


def measure_times(
    job: JobProgram, place: RankPlace, splits: Splits, device: torch.device, run_dir: str, board: RunControl
) -> JobProgram | None:
    """Measures the parts of a step on this rank, and leaves them in `run_dir` (rank 0). Returns the training that
    follows, for the time of a whole step; None if a user stops the measurements.
    """
    assert isinstance(job.mode, CalibrateMode)
    if job.mode.step is not None:
        return _measured_training(job, job.mode.step)
    try:
        measured = _measure(job, place, splits, device, _Stages(run_dir, place, board, device))
    except MeasurementStoppedError:
        return None
    ranks = [to_json(measured)] * job.world_size
    if job.world_size > 1:
        dist.all_gather_object(ranks, to_json(measured))
    if place.rank == 0:
        path = os.path.join(run_dir, TIMES)
        with naming(path), open(path, "w", encoding="utf-8") as file:
            json.dump(ranks, file)
    measurements = [from_json(RankMeasurement, each) for each in ranks]
    passes = max(sum(map(sum, rank.passes[0][1].values())) for rank in measurements)
    return _measured_training(job, job.microbatches * passes)


def _measure(
    job: JobProgram, place: RankPlace, splits: Splits, device: torch.device, stages: _Stages
) -> RankMeasurement:
    mode = job.mode
    assert isinstance(mode, CalibrateMode)
    stages.begin("the making of samples")
    training = _LocalTraining(job, device)
    made = batches(job.data, splits, place, 1, 0, BATCHES, device)
    begun = time.perf_counter()
    pairs = [batch.micro[0] for batch in islice(made, BATCHES)]
    spent = time.perf_counter() - begun
    samples = sum(len(tensors(input)[0]) for input, _ in pairs)
    passes = []
    for count in mode.samples:
        stages.begin(f"passes over {count} samples")
        passes.append((count, training.passes(_resized(pairs[0], count))))
    overlap = 0.0
    if mode.exchanges:
        stages.begin("exchanges beside passes")
        overlap = training.overlap(pairs[0])
    update, parameters = training.update_seconds, training.parameters
    del training  # before the job's own is made
    collectives = []
    for operation, axis, size in mode.exchanges:
        stages.begin(f"{operation} over {size} bytes")
        collectives.append(_collective(job, device, operation, axis, size))
    if mode.exchanges:
        for ranks in sorted({int(axis) for _, axis, _ in mode.exchanges if axis.isdigit()} | {job.world_size}):
            stages.begin(f"units of fully_shard over {ranks} ranks")
            collectives += _units(job, device, ranks, max(size for _, _, size in mode.exchanges))
    return RankMeasurement(
        passes=tuple(passes),
        update=update,
        parameters=parameters,
        data=spent / max(1, samples),
        collectives=tuple(collectives),
        overlap=overlap,
    )


def _measured_training(job: JobProgram, step: float) -> JobProgram:
    """Returns the training of the job for some seconds, without evaluations and the user's hooks and loggers.

    `step` is what a step takes, roughly.
    """
    steps = round(min(max(TRAINING_SECONDS / step, LEAST_STEPS), MOST))
    return replace(
        job,
        mode=TrainMode(timed=True),
        steps=steps,
        log_every=steps // 5,
        data=replace(job.data, validation_samples=0, test_samples=0),
        evaluate_start=False,
        evaluate_training=False,
        generate=None,
        early_stopping=None,
        on_spike=None,
        tensorboard=False,
        hooks=(),
        loggers=(),
        restarts=0,
    )


def _resized(pair: tuple[Structure, Structure], samples: int) -> tuple[Structure, Structure]:
    """Returns a batch of `samples`, which repeats the samples of a smaller batch."""

    def resize(tensor: Tensor) -> Tensor:
        return tensor[torch.arange(samples, device=tensor.device) % len(tensor)]

    return map_tensors(resize, pair[0]), map_tensors(resize, pair[1])


class _LocalTraining:
    """A training of each rank by itself: the data axis and the pipeline are left out. Axes that cut layers, and batch
    norms that ranks compute together, keep their transfers, which are part of the layers' times.
    """

    def __init__(self, job: JobProgram, device: torch.device) -> None:
        mode = job.mode
        assert isinstance(mode, CalibrateMode)
        recompute = job.recompute if job.recompute.kind == "selective" else RecomputeStep()
        local = replace(job, gradients=GradientStep(kind="none"), pipeline=None, recompute=recompute)
        components = assemble(local, device)
        self._job, self._device, self._names = job, device, mode.layers
        self._model, self._engine, self._loss = components.plain, components.engine, components.loss
        self._optimizer, self._piece = components.optimizer, context_parallel.piece_of(job)
        self._input_piece = context_parallel.input_piece_of(job, components.plain)
        self._clock = DeviceClock(device)
        self._updates: list[float] = []

    @property
    def update_seconds(self) -> float:
        return statistics.median(self._updates)

    @property
    def parameters(self) -> int:
        """The numbers that an update changes on this rank."""
        own = (each for each in self._model.parameters() if each.requires_grad)
        return sum((each.to_local() if hasattr(each, "to_local") else each).numel() for each in own)

    def passes(self, pair: tuple[Structure, Structure]) -> dict[str, tuple[float, float]]:
        """Returns the median seconds of each layer's passes over a micro-batch, and of the loss's under ""."""
        times: dict[str, list[tuple[float, float]]] = defaultdict(list)
        if self._job.world_size > 1:
            dist.barrier()
        for _ in range(WARM_UP):
            begun = time.monotonic()
            self._train_step(*pair)
        for _ in range(self._agreed_steps(time.monotonic() - begun)):
            for name, each in self._train_step(*pair).items():
                times[name].append(each)
        medians = {
            name: (statistics.median(f for f, _ in each), statistics.median(b for _, b in each))
            for name, each in times.items()
        }
        # An interruption hits one layer of a step: the medians of layers leave out what most steps have somewhere.
        whole = statistics.median(map(sum, zip(*([f + b for f, b in each] for each in times.values()), strict=True)))
        more = whole / sum(f + b for f, b in medians.values())
        return {name: (more * f, more * b) for name, (f, b) in medians.items()}

    def _agreed_steps(self, seconds: float) -> int:
        """Returns how many steps of `seconds` are measured: on all ranks as many, since layers may exchange."""
        longest = torch.tensor(seconds, device=self._device)
        if self._job.world_size > 1:
            dist.all_reduce(longest, dist.ReduceOp.MAX)
        return round(min(max(SECONDS / longest.item(), LEAST), MOST - WARM_UP))

    def _train_step(self, input: Structure, target: Structure) -> dict[str, tuple[float, float]]:
        clock, marks = self._clock, _PassMarks(self._clock)
        with marks.attached(self._model, self._names):
            begin = clock.mark()
            with autocast(self._job.precision, self._device):
                output = self._model(self._input_piece(input))
                made = clock.mark()
                loss = self._loss(output, self._piece(target)) / len(tensors(target)[0])
            ready = clock.mark()
            loss.backward()
            end = clock.mark()
        self._engine.complete()
        self._clip()
        self._optimizer.step()
        self._optimizer.zero_grad()
        updated = clock.mark()
        clock.wait()
        self._updates.append(clock.seconds_between(end, updated))
        return marks.times(begin, made, ready, end)

    def _clip(self) -> None:
        parameters = [each for each in self._model.parameters() if each.grad is not None]
        if self._job.clip is not None:
            clipped(parameters, [True] * len(parameters), self._job.clip, self._engine.shards)
        if self._job.clip_value is not None:
            cut_off(parameters, self._job.clip_value)

    def overlap(self, pair: tuple[Structure, Structure]) -> float:
        """Returns the share of a gradient exchange that the step of a batch hides which runs at the same time."""
        step = partial(self._train_step, *pair)
        numbers = torch.zeros(sum(each.numel() for each in self._model.parameters()), device=self._device)
        alone = _median(step, self._clock)
        exchange = _median(lambda: _wait(dist.all_reduce(numbers, async_op=True)), self._clock)

        def both() -> None:
            going = dist.all_reduce(numbers, async_op=True)
            step()
            _wait(going)

        together = _median(both, self._clock)
        return min(1.0, max(0.0, (alone + exchange - together) / min(alone, exchange)))


def _wait(work: dist.Work | None) -> None:
    if work is not None:
        work.wait()


def _median(function: Callable[[], object], clock: DeviceClock) -> float:
    """Returns the median seconds of a function that all ranks call at once."""
    seconds = []
    for _ in range(COLLECTIVES):
        dist.barrier()
        begin = clock.mark()
        function()
        end = clock.mark()
        clock.wait()
        seconds.append(clock.seconds_between(begin, end))
    return statistics.median(seconds[2:])


def _collective(job: JobProgram, device: torch.device, operation: str, axis: str, size: int) -> CollectiveMeasurement:
    """Returns the seconds of a collective with few bytes and with `size` bytes of input on each rank."""
    group = _group_of(job, axis)
    ranks = dist.get_world_size(group)
    clock = DeviceClock(device)
    many = max(size, 2 * FEW_BYTES)

    def seconds(bytes: int) -> float:
        numbers = torch.zeros(max(ranks, bytes // 4 // ranks * ranks), device=device)
        return _median(partial(_exchange, operation, numbers, ranks, group), clock)

    return CollectiveMeasurement(
        operation=operation,
        ranks=0 if operation == "send" else ranks,
        bytes=(FEW_BYTES, many),
        seconds=(seconds(FEW_BYTES), seconds(many)),
        across=_is_across(job, dist.get_process_group_ranks(group)[: 2 if operation == "send" else ranks]),
    )


@cache
def _subgroups(ranks: int) -> dist.ProcessGroup | None:
    """Returns the group of this rank among groups of `ranks` consecutive ranks."""
    group: dist.ProcessGroup | None = dist.new_subgroups(ranks)[0]
    return group


def _group_of(job: JobProgram, axis: str) -> dist.ProcessGroup | None:
    """Returns a group of ranks: of an axis, of `all` axes, or of a number of consecutive ranks."""
    if axis.isdigit():
        return _subgroups(int(axis))
    return mesh_of(job).group(*job.axes) if axis == "all" else mesh_of(job).group(axis)


def _is_across(job: JobProgram, ranks: Sequence[int]) -> bool:
    """True if ranks are on several hosts."""
    return len({rank // job.processes for rank in ranks}) > 1


class _Weight(nn.Module):
    """A parameter of any size, whose passes take little time."""

    def __init__(self, numbers: int, device: torch.device) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(numbers, device=device))

    def forward(self, x: Tensor) -> Tensor:
        return x * self.weight[0]


def _units(job: JobProgram, device: torch.device, ranks: int, size: int) -> Iterator[CollectiveMeasurement]:
    """Yields the seconds that `fully_shard` adds to a forward pass, in which it gathers a unit of parameters, and to a
    backward pass for their gradients: with few bytes, and with `size` bytes of parameters.
    """
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard  # here: it loads sympy, which no training without it needs

    clock = DeviceClock(device)
    mesh = init_device_mesh(device.type, (job.world_size // ranks, ranks), mesh_dim_names=("copies", "shards"))
    sizes = (FEW_BYTES, max(size, 2 * FEW_BYTES))
    added = []
    for bytes in sizes:
        plain, sharded = (_Weight(bytes // 4 // ranks * ranks, device) for _ in range(2))
        fully_shard(sharded, mesh=mesh["shards"])
        (ahead, back), (more_ahead, more_back) = (_weight_passes(module, clock) for module in (plain, sharded))
        added.append((max(0.0, more_ahead - ahead), max(0.0, more_back - back)))
    gathered, reduced = zip(*added, strict=True)
    own = (sizes[0] // ranks, sizes[1] // ranks)  # a gather's input is a rank's own part
    across = _is_across(job, range(ranks))
    yield CollectiveMeasurement(operation="gather", ranks=ranks, bytes=own, seconds=gathered, across=across)
    yield CollectiveMeasurement(operation="reduce", ranks=ranks, bytes=sizes, seconds=reduced, across=across)


def _weight_passes(module: nn.Module, clock: DeviceClock) -> tuple[float, float]:
    """Returns the median seconds of a forward and of a backward pass."""
    x = torch.ones(1, device=next(module.parameters()).device, requires_grad=True)
    forward, backward = [], []
    for _ in range(COLLECTIVES):
        dist.barrier()
        begin = clock.mark()
        y = module(x)
        middle = clock.mark()
        y.backward()
        end = clock.mark()
        clock.wait()
        forward.append(clock.seconds_between(begin, middle))
        backward.append(clock.seconds_between(middle, end))
        module.zero_grad()
    return statistics.median(forward[2:]), statistics.median(backward[2:])


def _exchange(operation: str, numbers: Tensor, ranks: int, group: dist.ProcessGroup | None) -> None:
    match operation:
        case "all_reduce":
            dist.all_reduce(numbers, group=group)
        case "all_gather":
            dist.all_gather_single(numbers.new_empty(len(numbers) * ranks), numbers, group=group)
        case "reduce_scatter":
            dist.reduce_scatter_single(numbers.new_empty(len(numbers) // ranks), numbers, group=group)
        case "broadcast":
            dist.broadcast(numbers, dist.get_global_rank(group, 0) if group is not None else 0, group=group)
        case "send":
            _send_on(numbers, group)
        case _:
            raise AssertionError(f"no measurement of {operation}")


def _send_on(numbers: Tensor, group: dist.ProcessGroup | None) -> None:
    """Sends from each even rank of a group to the next one."""
    rank, ranks = dist.get_rank(group), dist.get_world_size(group)
    if rank % 2 == 0 and rank + 1 < ranks:
        dist.send(numbers, group=group, group_dst=rank + 1)
    elif rank % 2:
        dist.recv(numbers, group=group, group_src=rank - 1)
