"""Evaluation, exact over a split on any number of ranks.

Model: each rank evaluates its own contiguous share, in batches, without padding; one all-reduce at the end sums the
metrics (metrics.py). If a forward pass needs all ranks (it gathers sharded parameters), a rank with fewer batches than
other ranks repeats a batch and does not count it. A loss that compares samples is taken over batches of `data.batch`
samples, in their order (`WholeEvaluation`).

Contract: every sample counts once. The model is called as it is, without DDP around it, in evaluation mode and under
the autocast of the training; the mode of each of its modules is restored. The loss is always among the results. What a
loss draws follows from the sample, and is the same in each evaluation.

Limits: gradients are switched off by `no_grad`, not by inference mode. A user's module may keep tensors (a table it
computes on first use), and could not train with tensors of inference mode.
"""

from __future__ import annotations

import contextlib
import dataclasses
import math
from collections.abc import Callable, Iterator, Mapping

import torch
import torch.distributed as dist
from torch import Tensor

from dslc.compiler.ir.program import JobProgram, LossStep, MetricStep, RankPlace
from dslc.compiler.placement.shares import largest, piece
from dslc.compiler.trace.structures import Structure, call, map_tensors
from dslc.runtime.data.batches import read_batches, split_batches
from dslc.runtime.data.sampler import largest_share, split_indices
from dslc.runtime.data.samples import Pair, Splits
from dslc.runtime.data.splits import Split, range_of, samples_of
from dslc.runtime.loop.metrics import Metrics
from dslc.runtime.loop.stateful_metrics import StatefulMetric, Value, exchange, keeps
from dslc.runtime.model.cross_sample_losses import WholeSum
from dslc.runtime.parallel.context_parallel import answer_pieces, gather_output, input_piece_of, piece_of
from dslc.runtime.parallel.engine import do_nothing
from dslc.runtime.parallel.loss_gather import gathered_samples
from dslc.runtime.parallel.mesh import mesh_of
from dslc.runtime.parallel.tensor_parallel import unshard_output
from dslc.runtime.step.assemble import TrainingComponents
from dslc.runtime.step.full_batch import concatenate
from dslc.runtime.technique.chunked_head import computes_losses
from dslc.runtime.technique.precision import autocast
from dslc.runtime.technique.sample_draws import SampleDraws

_LOSS = MetricStep(kind="loss", name="loss")


@torch.no_grad()
def evaluate(
    job: JobProgram,
    place: RankPlace,
    parts: TrainingComponents,
    splits: Splits,
    split: Split = "validation",
    after_batch: Callable[[], object] = do_nothing,
) -> dict[str, Value]:
    """Returns the metrics over the whole split, by name; the same on every rank."""
    steps = job.metrics if any(step.kind == "loss" for step in job.metrics) else (_LOSS, *job.metrics)
    draws = SampleDraws(job, place)
    full_evaluation = WholeEvaluation(job, place, parts, draws, split) if job.loss.together else None
    separable = [step for step in steps if full_evaluation is None or step.kind != "loss"]
    summed = Metrics([step for step in separable if not keeps(step)], job.loss, parts.device, answer_pieces(job))
    stateful = [StatefulMetric(step, job.loss, parts.device) for step in steps if keeps(step)]
    mesh, cut, cut_input = mesh_of(job), piece_of(job), input_piece_of(job, parts.plain)
    needs_logits = any(not _is_sum_of_losses(step, job.loss) for step in steps)
    with evaluating(parts):
        size = batch_size(job, place)
        own_samples = iter(split_indices(job.data, split, place).split(size))
        pass_batches = (
            full_evaluation.batches(splits, split, size)
            if full_evaluation
            else _batches(job, place, parts, splits, split)
        )
        for input, target, counts in pass_batches:
            own_target = cut(target)
            output = forward(job, parts, cut_input(input), None if needs_logits else own_target)
            if output is None:
                continue
            if full_evaluation is not None:
                full_evaluation.add(output, target, counts)
            if counts and full_evaluation is None:
                numbers = next(own_samples)
                with draws.in_evaluated_loss(split, int(numbers[0]), len(numbers)):
                    summed.update(output, own_target)
            elif counts:
                summed.update(output, own_target)
            if stateful:
                output = gather_output(job, output)
            for metric in stateful if counts else ():
                metric.update(output, target)
            after_batch()
    sums = summed.sums if full_evaluation is None else torch.cat((full_evaluation.sums, summed.sums))
    if job.world_size > 1:
        sums *= mesh.leads
        dist.all_reduce(sums)
    values: dict[str, Value] = {}
    if full_evaluation is not None:
        total, number = sums[:2].tolist()
        values["loss"], sums = (total / number if number else math.nan), sums[2:]
    values |= summed.results(sums)
    if stateful:
        values |= exchange(stateful, job.world_size, mesh.leads and mesh.coordinates["context"] == 0)
    return values


def _is_sum_of_losses(step: MetricStep, loss: LossStep) -> bool:
    """True if the metric follows from the losses of the targets. Perplexity is defined without label smoothing."""
    return step.kind in ("loss", "reward_margin", "reward_accuracy") or (
        step.kind == "perplexity" and not loss.arguments.get("label_smoothing")
    )


def named(by_split: Mapping[str, dict[str, Value]]) -> dict[str, Value]:
    """Returns the metrics of several splits by one name each: `loss`, or `clean.loss` of a set of that name."""
    return {
        f"{split.partition('/')[2]}.{name}".removeprefix("."): value
        for split, metrics in by_split.items()
        for name, value in metrics.items()
    }


def forward(job: JobProgram, parts: TrainingComponents, input: Structure, target: Structure | None = None) -> Structure:
    """Returns the model's output for `input`; None if another rank of a pipeline has it. With `target` a head that
    computes losses in chunks returns these in place of logits.
    """
    with computes_losses(parts.plain, job.loss, target):
        return _output(job, parts, input)


def _output(job: JobProgram, parts: TrainingComponents, input: Structure) -> Structure:
    if parts.pipeline is not None:
        output = parts.pipeline.forward(input)
    else:
        with autocast(job.precision, parts.device):
            output = call(parts.plain, parts.plain.forward, input) if job.data.structured else parts.plain(input)
    return None if output is None else unshard_output(output)


@contextlib.contextmanager
def evaluating(parts: TrainingComponents) -> Iterator[None]:
    """Puts the model into evaluation mode, with the same buffers on all ranks; restores it afterwards."""
    modes = [(module, module.training) for module in parts.plain.modules()]
    parts.engine.agree_on_buffers()
    parts.plain.eval()
    try:
        yield
    finally:
        parts.engine.let_go()
        for module, training in modes:
            module.training = training


def _batches(
    job: JobProgram, place: RankPlace, parts: TrainingComponents, splits: Splits, split: Split
) -> Iterator[tuple[object, object, bool]]:
    """Yields this rank's batches (input, target, whether they count): as many on every rank if they go in lockstep."""
    size, first_sample = batch_size(job, place), 0
    pair: Pair | None = None
    for pair in split_batches(job.data, splits, split, place, size, parts.device):
        first_sample += 1
        yield *pair, True
    if not parts.engine.lockstep:
        return
    for _ in range(most_batches(job, samples_of(job.data, split), place, size) - first_sample):
        if pair is None:
            first_place = dataclasses.replace(place, data_rank=0)
            pair = next(iter(split_batches(job.data, splits, split, first_place, size, parts.device)))
        yield *pair, False


def batch_size(job: JobProgram, place: RankPlace) -> int:
    """Returns the samples of a batch: two micro-batches of the training, as nothing is kept for a backward pass."""
    return 2 * largest(job.data.batch, place.data_ranks * job.microbatches)


def most_batches(job: JobProgram, samples: int, place: RankPlace, size: int) -> int:
    """Returns the batches of `size` of the rank with the most samples: as many passes as ranks in lockstep make."""
    return -(-largest_share(job.data, place, samples) // size)


class WholeEvaluation:
    """A loss that compares samples, over a split, on one rank: `sums` is the sum of its losses and their number, in
    float64.

    The ranks share out each batch of the training's size as in training, and its loss is computed as the loss of a
    step. So the result does not depend on the number of ranks (of nodes, if samples of one node are compared). A rank
    without samples of a batch makes an output all the same, which does not count.
    """

    def __init__(
        self, job: JobProgram, place: RankPlace, parts: TrainingComponents, draws: SampleDraws, split: Split
    ) -> None:
        assert isinstance(parts.loss, WholeSum)
        self._job, self._place, self._parts, self._loss = job, place, parts, parts.loss
        self._draws, self._split, self._begin = draws, split, range_of(job.data, split)[0]
        self.sums = torch.zeros(2, dtype=torch.float64, device=parts.device)
        gathered_samples(job, place, job.data.batch)  # all ranks make the groups now
        self._outputs: list[Pair] = []

    def batches(self, splits: Splits, split: Split, size: int) -> Iterator[tuple[Structure, Structure, bool]]:
        """Yields at most `size` samples of this rank at a time, and whether they count; `add` takes each output."""
        chunks, ends = self._chunks(split, size)
        samples, ends_ = splits.samples_of_split(split), iter(ends)
        counts, batch = next(ends_)
        for input, target in read_batches(self._job.data, samples, self._place, chunks, self._parts.device):
            yield input, target, counts
            if batch:
                self._close(batch)
            counts, batch = next(ends_, (False, 0))

    def add(self, output: Structure, target: Structure, counts: bool) -> None:
        pair = output, target
        self._outputs.append(pair if counts else map_tensors(lambda tensor: tensor[:0], pair))

    def _chunks(self, split: Split, size: int) -> tuple[list[Tensor], list[tuple[bool, int]]]:
        """Returns what is read each time; and whether it counts, and the samples of the global batch it ends, or 0."""
        split_begin, count = range_of(self._job.data, split)
        ranks, rank, global_batch = self._place.data_ranks, self._place.data_rank, self._job.data.batch
        chunks: list[Tensor] = []
        ends: list[tuple[bool, int]] = []
        for begin in range(split_begin, split_begin + count, global_batch):
            batch = min(global_batch, split_begin + count - begin)
            start, stop = piece(batch, ranks, rank)
            sample_chunks = list(torch.arange(begin + start, begin + stop).split(size)) if stop > start else []
            filler = [torch.tensor([begin + min(start, batch - 1)])]
            times = -(-largest(batch, ranks) // size) if self._parts.engine.lockstep else max(1, len(sample_chunks))
            chunks += sample_chunks + filler * (times - len(sample_chunks))
            ends += [(n < len(sample_chunks), batch if n + 1 == times else 0) for n in range(times)]
        return chunks, ends

    def _close(self, batch: int) -> None:
        output, target = (concatenate([pair[n] for pair in self._outputs]) for n in (0, 1))
        self._outputs.clear()
        start, stop = piece(batch, self._place.data_ranks, self._place.data_rank)
        gather = gathered_samples(self._job, self._place, batch)
        first = self._begin + start - gather.first
        with self._draws.in_evaluated_loss(self._split, first, gather.samples):
            self.sums[0] += self._loss.gathered_sum(output, target, gather)
        self._begin += batch
        self.sums[1] += stop - start
