"""The passes of a step whose loss compares the samples of all its micro-batches, and of other ranks.

Model: with one micro-batch the loss is a function of its output, and of those that other ranks bring. With several
there are two rounds (GradCache: Gao et al. 2021, arXiv:2101.06983). The first makes the outputs of all micro-batches,
without autograd, and of these the loss and its gradient with respect to each output. In the second each micro-batch
goes forward again, and backward with the gradient of its output: so the activations of one micro-batch exist at a time.

Contract: the gradient equals the gradient of the whole batch at once. The value of a micro-batch's loss is its share of
the rank's sum, by samples.
"""

from __future__ import annotations

import torch
from torch import Tensor

from dslc.compiler.ir.program import JobProgram, RankPlace
from dslc.compiler.trace.structures import flatten, tensors, unflatten
from dslc.runtime.data.batches import StepBatch
from dslc.runtime.model.cross_sample_losses import WholeSum
from dslc.runtime.model.custom_losses import samples_of
from dslc.runtime.parallel.loss_gather import gathered_samples
from dslc.runtime.step.assemble import TrainingComponents
from dslc.runtime.step.forward_ahead import PassesAhead
from dslc.runtime.technique.precision import autocast
from dslc.runtime.technique.sample_draws import SampleDraws


class WholeBatch:
    """The loss of the micro-batches of a step: `begin` takes each batch, then `loss` each output."""

    def __init__(
        self, job: JobProgram, place: RankPlace, parts: TrainingComponents, passes: PassesAhead, draws: SampleDraws
    ) -> None:
        assert isinstance(parts.loss, WholeSum)
        self._job, self._place, self._sum = job, place, parts.loss
        self._device, self._passes, self._draws = parts.device, passes, draws
        gathered_samples(job, place, job.data.batch)  # all ranks make the groups now
        self._ahead: list[tuple[list[Tensor | None], Tensor]] = []  # by micro-batch: gradients of its output, its loss

    def begin(self, batch: StepBatch) -> None:
        """Takes up a batch; all ranks do, with as many micro-batches."""
        self._others = gathered_samples(self._job, self._place, batch.samples)
        self._ahead = []
        if len(batch.micro) > 1:
            self._make_ahead(batch)

    def loss(self, output: object, target: object) -> Tensor:
        """Returns the sum of the losses of a micro-batch, differentiable in its output."""
        if not self._ahead:
            return self._gathered_sum(output, target)
        gradients, value = self._ahead.pop(0)
        found = zip(_differentiable(output), gradients, strict=True)
        parts = [(each.to(given.dtype) * given).sum() for each, given in found if given is not None]
        total = torch.stack(parts).sum() if parts else torch.zeros((), device=self._device)
        return total + (value - total).detach()

    def _gathered_sum(self, output: object, target: object) -> Tensor:
        with self._draws.in_gathered_loss(self._others.first, self._others.samples):
            return self._sum.gathered_sum(output, target, self._others)

    def _make_ahead(self, batch: StepBatch) -> None:
        outputs: list[object] = []
        self._passes.run(batch, outputs.append)
        sizes = [samples_of(output, 0) for output in outputs]
        output, target = concatenate(outputs), concatenate([target for _, target in batch.micro])
        del outputs
        leaves, form = flatten(output)
        leaves = [each.requires_grad_() if _has_gradient(each) else each for each in leaves]
        with autocast(self._job.precision, self._device):
            total = self._gathered_sum(unflatten(leaves, form), target)
        found = [each for each in leaves if _has_gradient(each)]
        made = torch.autograd.grad(total, found, allow_unused=True) if total.requires_grad else [None] * len(found)
        value = total.detach()
        cut = [each.split(sizes) if each is not None else [None] * len(sizes) for each in made]
        for n, size in enumerate(sizes):
            self._ahead.append(([each[n] for each in cut], value * (size / max(1, sum(sizes)))))


def _has_gradient(leaf: object) -> bool:
    return isinstance(leaf, Tensor) and leaf.is_floating_point()


def _differentiable(output: object) -> list[Tensor]:
    return [each for each in tensors(output) if _has_gradient(each)]


def concatenate(parts: list[object]) -> object:
    """Returns structures of equal form as one, whose tensors have the rows of all."""
    leaves, form = flatten(parts[0])
    each = [flatten(part)[0] for part in parts]
    return unflatten(
        [torch.cat([one[n] for one in each]) if isinstance(leaf, Tensor) else leaf for n, leaf in enumerate(leaves)],
        form,
    )
