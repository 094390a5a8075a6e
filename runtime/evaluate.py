"""Evaluation, exact over the validation split on any number of ranks.

Model: each rank works through its own contiguous share, in batches, without padding and without any exchange; the sums
of all metrics are one float64 vector, added over the ranks at the end by one all-reduce.

Contract: every sample counts once. The model is called as it is, without DDP around it, in evaluation mode and under
the autocast of the training; what mode each of its modules was in is restored. The loss is always among the results.

Limits: gradients are switched off by `no_grad`, not by inference mode, whose tensors a user's module may keep (a table
it computes on first use) and then not train with.
"""

from __future__ import annotations

import torch
import torch.distributed as dist

from dslc.compiler.program import JobProgram, MetricStep, RankPlace
from dslc.runtime.assemble import Parts
from dslc.runtime.batches import validation_batches
from dslc.runtime.ddp import agree_on_buffers
from dslc.runtime.metrics import Metrics
from dslc.runtime.precision import autocast
from dslc.runtime.sources import Splits

_LOSS = MetricStep(kind="loss", name="loss")


@torch.no_grad()
def evaluate(job: JobProgram, place: RankPlace, parts: Parts, splits: Splits) -> dict[str, float]:
    """The metrics over the whole validation split, by name; the same on every rank."""
    steps = job.metrics if any(step.name == "loss" for step in job.metrics) else (_LOSS, *job.metrics)
    metrics = Metrics(steps, job.loss, parts.device)
    modes = [(module, module.training) for module in parts.plain.modules()]
    agree_on_buffers(parts.model)
    parts.plain.eval()
    try:
        for input, target in validation_batches(job.data, splits, place, _size(job, place), parts.device):
            with autocast(job.precision, parts.device):
                output = parts.plain(input)
            metrics.update(output, target)
    finally:
        for module, training in modes:
            module.training = training
    if place.data_ranks > 1:
        dist.all_reduce(metrics.sums)
    return metrics.results()


def _size(job: JobProgram, place: RankPlace) -> int:
    """Samples at once: two micro-batches of the training, since nothing is kept for a backward pass."""
    return 2 * -(-job.data.batch // (place.data_ranks * job.microbatches))
