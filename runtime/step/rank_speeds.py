"""Measures how fast each data rank computes, and deals the batches of a training in proportion.

Model: each rank trains its equal share of a batch by itself for some time, all ranks at once, so that they share the
machine as in a training. Samples for each second are its speed. A second round measures each rank with its share of the
first, because a step has costs that do not depend on the samples. One all-gather of each round gives all ranks the same
speeds, and so the same shares.

Contract: nothing stays of the passes: the model is another one, without an update, and random generators are restored.
Rank 0 leaves `shares.json` in the run directory, with the machine of each rank. A restarted or resumed run of the
directory takes the shares from it if its ranks are on the same machines. Rank 0 decides this for all ranks.

Limits: each rank holds the whole model, without its optimizer. A sample stands for all: lengths that differ do not
count.
"""

from __future__ import annotations

import functools
import gc
import json
import os
import socket
import time
from collections.abc import Sequence
from dataclasses import replace

import torch
import torch.distributed as dist

from dslc.compiler.facts.untrusted_files import replacing
from dslc.compiler.ir.program import GradientStep, JobProgram, RankPlace, TrainMode
from dslc.compiler.placement.shares import deal_within
from dslc.compiler.trace.structures import call, map_tensors
from dslc.runtime.data.samples import Splits, batch_aside
from dslc.runtime.process.random_numbers import preserve_generators
from dslc.runtime.process.records import SHARES, naming, note
from dslc.runtime.step.assemble import TrainingComponents, assemble
from dslc.runtime.technique.chunked_head import computes_losses
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
    local = replace(job, gradients=GradientStep(kind="none"), sync_batch_norm=False, draws=None, mode=TrainMode())
    with preserve_generators():
        parts = assemble(local, device)
        for _ in range(ROUNDS):
            dist.barrier()  # the other ranks compute meanwhile, as in a training
            samples = shares[place.data_rank] // job.microbatches
            speeds = [0.0] * len(shares)
            dist.all_gather_object(speeds, samples / _pass_seconds(local, parts, splits, samples))
            weights = [max(1, round(PARTS * speed / max(speeds))) for speed in speeds]
            shares = deal_within(job.data.batch, weights, job.microbatches, job.data.most_share)
    del parts
    gc.collect()  # a compiled module refers to itself
    if device.type == "cuda":
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats(device)
    return list(shares)


def _pass_seconds(job: JobProgram, parts: TrainingComponents, splits: Splits, samples: int) -> float:
    """Returns the mean seconds of a pass over as many samples."""
    pair = batch_aside(splits.train, torch.arange(samples) % job.data.train_samples)
    input, target = (map_tensors(lambda tensor: tensor.to(parts.device), each) for each in pair)
    model = parts.engine.model
    run_model = functools.partial(call, model, parts.plain.forward) if job.data.structured else model
    begun, passes = 0.0, -WARM_UP
    while passes < MIN_PASSES or time.perf_counter() - begun < SECONDS:
        if not passes:
            begun = _now(parts.device)
        with autocast(job.precision, parts.device):
            with computes_losses(parts.plain, job.loss, target):
                output = run_model(input)
            loss = parts.loss(output, target) / samples
        if loss.requires_grad:
            loss.backward()
        parts.optimizer.zero_grad()
        passes += 1
    return (_now(parts.device) - begun) / passes


def _now(device: torch.device) -> float:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return time.perf_counter()
