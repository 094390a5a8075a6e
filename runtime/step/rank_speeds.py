"""Measures how fast each data rank computes, and deals the batches of a training in proportion.

Model: each rank trains its equal share of a batch by itself for some time, all ranks at once, so that they share the
machine as in a training. Samples for each second are its speed. A second round measures each rank with its share of the
first, because a step has costs that do not depend on the samples. One all-gather of each round gives all ranks the same
speeds, and so the same shares.

Contract: nothing stays of the passes: the model is another one, without an update, and random generators are restored.
Rank 0 leaves `shares.json` in the run directory. A restarted or resumed run of the directory takes the shares from it.

Limits: each rank holds the whole model, without its optimizer. A sample stands for all: lengths that differ do not
count.
"""

from __future__ import annotations

import json
import os
import time
from dataclasses import replace

import torch
import torch.distributed as dist

from dslc.compiler.facts.untrusted_files import replacing
from dslc.compiler.ir.program import GradientStep, JobProgram, RankPlace, TrainMode
from dslc.compiler.placement.shares import deal_within
from dslc.compiler.trace.structures import map_tensors, tensors
from dslc.runtime.data.samples import Splits, batch_aside
from dslc.runtime.process.random_numbers import preserve_generators
from dslc.runtime.process.records import naming, note
from dslc.runtime.step.assemble import TrainingComponents, assemble
from dslc.runtime.technique.precision import autocast

SHARES = "shares.json"
ROUNDS, WARM_UP, LEAST = 2, 2, 3  # rounds; passes that do not count, and passes that do
SECONDS = 1.0  # for which a round goes on
PARTS = 1000  # of the fastest speed, to which speeds are rounded


def with_measured_shares(
    job: JobProgram, place: RankPlace, splits: Splits, device: torch.device, run_dir: str
) -> JobProgram:
    """Returns the job with the shares of its data ranks, measured unless the run directory has them."""
    shares = _broadcast_shares(_read_shares(job, run_dir) if place.rank == 0 else [])
    if not shares:
        shares = _measure_shares(job, place, splits, device)
        if place.rank == 0:
            with naming(SHARES), replacing(os.path.join(run_dir, SHARES)) as file:
                json.dump({"batch": job.data.batch, "shares": shares}, file)
                file.write("\n")
            note(run_dir, f"shares of a batch, by the measured speed of the ranks: {', '.join(map(str, shares))}")
    return replace(job, data=replace(job.data, shares=tuple(shares)))


def _broadcast_shares(shares: list[int]) -> list[int]:
    values: list[list[int]] = [shares]
    if dist.is_initialized():
        dist.broadcast_object_list(values)
    return values[0]


def _read_shares(job: JobProgram, run_dir: str) -> list[int]:
    """Returns the shares of an earlier start of the run; none if there are none that suit the job."""
    path = os.path.join(run_dir, SHARES)
    try:
        with naming(path), open(path, encoding="utf-8") as file:
            shares = json.load(file)["shares"]
    except FileNotFoundError:
        return []
    suits = len(shares) == len(job.data.shares) and sum(shares) == job.data.batch and max(shares) <= job.data.most_share
    return list(shares) if suits else []


def _measure_shares(job: JobProgram, place: RankPlace, splits: Splits, device: torch.device) -> list[int]:
    shares = job.data.shares
    local = replace(job, gradients=GradientStep(kind="none"), sync_batch_norm=False, draws=None, mode=TrainMode())
    with preserve_generators():
        parts = assemble(local, device)
        for _ in range(ROUNDS):
            samples = shares[place.data_rank] // job.microbatches
            speeds = [0.0] * len(shares)
            dist.all_gather_object(speeds, samples / _pass_seconds(local, parts, splits, samples))
            weights = [max(1, round(PARTS * speed / max(speeds))) for speed in speeds]
            shares = deal_within(job.data.batch, weights, job.microbatches, job.data.most_share)
    del parts
    if device.type == "cuda":
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats(device)
    return list(shares)


def _pass_seconds(job: JobProgram, parts: TrainingComponents, splits: Splits, samples: int) -> float:
    """Returns the mean seconds of a pass over as many samples."""
    pair = batch_aside(splits.train, torch.arange(samples) % job.data.train_samples)
    input, target = (map_tensors(lambda tensor: tensor.to(parts.device), each) for each in pair)
    begun, passes = 0.0, -WARM_UP
    while passes < LEAST or time.perf_counter() - begun < SECONDS:
        if not passes:
            begun = _now(parts.device)
        with autocast(job.precision, parts.device):
            loss = parts.loss(parts.engine.model(input), target) / len(tensors(target)[0])
        loss.backward()
        parts.optimizer.zero_grad()
        passes += 1
    return (_now(parts.device) - begun) / passes


def _now(device: torch.device) -> float:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return time.perf_counter()
