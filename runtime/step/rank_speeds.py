"""Measures how fast each data rank computes, and deals the batches of a training in proportion.

Model: each data rank trains its equal share of a batch by itself for some time, all ranks at once, so that they share
the machine as in a training. Where several ranks have one share, as stages do, they exchange what a step needs, and
the slowest counts. Samples for each second are the speed. A second round measures each rank with its share of the
first, because a step has costs that do not depend on the samples. One all-gather of each round gives all ranks the same
speeds, and so the same shares.

Contract: nothing stays of the passes: the model is another one, without an update, and random generators are restored.
Rank 0 leaves `shares.json` in the run directory, with the machine of each rank. A restarted or resumed run of the
directory takes the shares from it if its ranks are on the same machines. Rank 0 decides this for all ranks.

Limits: each rank holds its parameters unsharded over the data axis, and no state of an optimizer. A sample stands for
all: lengths that differ do not count.
"""

from __future__ import annotations

import functools
import gc
import json
import math
import os
import socket
import time
from collections.abc import Callable, Sequence
from dataclasses import replace

import torch
import torch.distributed as dist
from torch import Tensor

from dslc.compiler.facts.untrusted_files import naming, replacing
from dslc.compiler.ir.program import GradientStep, JobProgram, RankPlace, TrainMode
from dslc.compiler.placement.shares import deal_within
from dslc.compiler.trace.structures import Structure, call, map_tensors
from dslc.runtime.data.samples import Splits, batch_aside
from dslc.runtime.parallel.context_parallel import input_piece_of, piece_of
from dslc.runtime.parallel.mesh import mesh_of
from dslc.runtime.pipeline.pipeline import ScheduleRun
from dslc.runtime.process.random_numbers import preserve_generators
from dslc.runtime.process.records import SHARES, note
from dslc.runtime.step.assemble import TrainingComponents, assemble
from dslc.runtime.step.stepper import connected
from dslc.runtime.technique.chunked_head import computes_losses, set_targets
from dslc.runtime.technique.precision import autocast

ROUNDS, WARM_UP, MIN_PASSES = 2, 2, 3  # rounds; passes that do not count, and passes that do
SECONDS = 1.0  # for which a round goes on
PARTS = 1000  # of the fastest speed, to which speeds are rounded


def with_measured_shares(
    job: JobProgram, place: RankPlace, splits: Splits, device: torch.device, run_dir: str
) -> JobProgram:
    """Returns the job with the shares of its data ranks, measured unless the run directory has them."""
    machines = [""] * job.world_size
    dist.all_gather_object(machines, _machine(device))
    decision = [read_shares(job, machines, run_dir) if place.rank == 0 else []]
    dist.broadcast_object_list(decision)
    (shares,) = decision
    if not shares:
        shares = _measure_shares(job, place, splits, device)
        if place.rank == 0:
            with naming(SHARES), replacing(os.path.join(run_dir, SHARES)) as file:
                json.dump({"batch": job.data.batch, "shares": shares, "machines": machines}, file)
                file.write("\n")
            note(run_dir, f"shares of a batch, by the measured speed of the ranks: {', '.join(map(str, shares))}")
    return replace(job, data=replace(job.data, shares=tuple(shares)))


def _machine(device: torch.device) -> str:
    """Returns the names of this host and of the rank's device."""
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else device.type
    return f"{socket.gethostname()} {name}"


def read_shares(job: JobProgram, machines: Sequence[str], run_dir: str) -> list[int]:
    """Returns the shares of an earlier start of the run; none if there are none that suit the job and the machines of
    its ranks.
    """
    path = os.path.join(run_dir, SHARES)
    try:
        with naming(path), open(path, encoding="utf-8") as file:
            content = json.load(file)
        shares, measured_machines = list(map(int, content["shares"])), content["machines"]
    except FileNotFoundError:
        return []
    except (ValueError, KeyError, TypeError) as error:
        note(run_dir, f"{SHARES} cannot be read ({error!r}): the speeds of the ranks are measured anew")
        return []
    data, fault = job.data, ""
    if measured_machines != machines:
        fault = "is of other machines"
    elif (
        len(shares) != len(data.shares)
        or sum(shares) != data.batch
        or not all(0 < share <= data.most_share and share % job.microbatches == 0 for share in shares)
    ):
        fault = "does not suit the job"
    if fault:
        note(run_dir, f"{SHARES} {fault}: the speeds of the ranks are measured anew")
    return [] if fault else shares


def _measure_shares(job: JobProgram, place: RankPlace, splits: Splits, device: torch.device) -> list[int]:
    shares = job.data.shares
    gradients = GradientStep(kind="none", unused=job.gradients.unused)
    local = replace(job, gradients=gradients, sync_batch_norm=False, draws=None, mode=TrainMode())
    with preserve_generators():
        parts = assemble(local, device, samples=splits.train)
        for _ in range(ROUNDS):
            dist.barrier()  # the other ranks compute meanwhile, as in a training
            samples = shares[place.data_rank] // job.microbatches
            make_passes = _unpipelined_pass if parts.pipeline is None else _pipelined_step
            seconds = _mean_seconds(job, make_passes(local, parts, splits, samples), device)
            measurements = [(0, 0.0)] * job.world_size
            dist.all_gather_object(measurements, (place.data_rank, seconds))
            slowest = [max(seconds for rank, seconds in measurements if rank == n) for n in range(len(shares))]
            speeds = [share / seconds for share, seconds in zip(shares, slowest, strict=True)]
            weights = [max(1, round(PARTS * speed / max(speeds))) for speed in speeds]
            shares = deal_within(job.data.batch, weights, job.microbatches, job.data.most_share)
    del parts
    gc.collect()  # a compiled module refers to itself
    if device.type == "cuda":
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats(device)
    return list(shares)


def _unpipelined_pass(job: JobProgram, parts: TrainingComponents, splits: Splits, samples: int) -> Callable[[], None]:
    """Returns the function that does the passes over one micro-batch of as many samples."""
    input, target = _microbatch(job, parts, splits, samples)
    model = parts.engine.model
    run_model = functools.partial(call, model, parts.plain.forward) if job.data.structured else model

    def run() -> None:
        with autocast(job.precision, parts.device):
            with computes_losses(parts.plain, job.loss, target):
                output = run_model(input)
            loss = parts.loss(output, target) / samples
        if loss.requires_grad:
            loss.backward()
        parts.optimizer.zero_grad()

    return run


def _pipelined_step(job: JobProgram, parts: TrainingComponents, splits: Splits, samples: int) -> Callable[[], None]:
    """Returns the function that does the passes of a step, each over a micro-batch of as many samples."""
    assert parts.pipeline is not None
    pair = _microbatch(job, parts, splits, samples)

    def loss(output: object, target: object) -> Tensor:
        with autocast(job.precision, parts.device):
            return connected(parts.loss(output, target) / samples, output)

    schedule = ScheduleRun(parts.pipeline, samples * job.loss.rows, job.microbatches, loss)

    def enter(number: int) -> None:
        set_targets(parts.plain, job.loss, pair[1])

    def run() -> None:
        schedule.run([pair] * job.microbatches, enter)
        set_targets(parts.plain, job.loss, None)
        parts.optimizer.zero_grad()

    return run


def _microbatch(
    job: JobProgram, parts: TrainingComponents, splits: Splits, samples: int
) -> tuple[Structure, Structure]:
    pair = batch_aside(splits.train, torch.arange(samples) % job.data.train_samples)
    input, target = (map_tensors(lambda tensor: tensor.to(parts.device), each) for each in pair)
    return input_piece_of(job, parts.plain)(input), piece_of(job)(target)


def _mean_seconds(job: JobProgram, run: Callable[[], None], device: torch.device) -> float:
    """Returns the mean seconds of a call, of equally many on the ranks that share the samples: these wait for one
    another.
    """
    for _ in range(WARM_UP):
        run()
    begun = _now(device)
    run()
    count = torch.tensor(max(MIN_PASSES, math.ceil(SECONDS / (_now(device) - begun))), device=device)
    for axis in ("tensor", "context", "pipeline"):
        if (group := mesh_of(job).group(axis)) is not None:
            dist.all_reduce(count, dist.ReduceOp.MAX, group)
    begun = _now(device)
    for _ in range(int(count)):
        run()
    return (_now(device) - begun) / int(count)


def _now(device: torch.device) -> float:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return time.perf_counter()
