"""Losses that compare the samples of a batch: the contrastive loss, and a user's own of a whole batch.

Model: a rank has the outputs of its own samples, and `GatheredSamples` bring the outputs of other ranks. The value is
the sum of the losses of the rank's own samples. So the sum of the values of all ranks, divided by the samples, is the
loss of the step, as for any loss.

`contrastive`: each rank computes the losses of its own samples, against the embeddings of all. Their gradient goes back
to the ranks that made them. Chen et al. 2020 (arXiv:2002.05709), and with classes Khosla et al. 2020 (arXiv:2004.11362,
the loss `out`). Of an anchor z with the positives P(z), among all embeddings but itself, A(z):

    - 1 / |P(z)| * sum over p in P(z) of (z.p / t - log sum over a in A(z) of exp(z.a / t))

`python`: each rank computes the whole loss, and only its own part of the outputs has a gradient. It is the gradient of
the whole loss with respect to this part, so nothing is sent back. The value is divided by the ranks that compute it.

Contract: sums in float32 at least, under autocast or not. An embedding of length 0 stays 0, without a gradient. A loss
of no samples is 0.

Limits: a tensor of an output or a target has a row for each sample, as long for all.
"""

from __future__ import annotations

from typing import Protocol

import torch
from torch import Tensor

from dslc.compiler.ir.program import LossStep
from dslc.compiler.trace.structures import Structure, map_tensors, tensors
from dslc.runtime.model.custom_losses import in_float32, samples_of, wide
from dslc.runtime.model.errors import LossError
from dslc.runtime.model.loss_state import load_loss
from dslc.runtime.process.job_line import mark_errors

SHORTEST = 1e-12  # the length of an embedding below which it has no direction


class GatheredSamples(Protocol):
    """The samples of `ranks` ranks, `samples` in all, this rank's from `first` on. All ranks call the same methods."""

    ranks: int
    samples: int
    first: int

    def gathered(self, own_tensor: Tensor) -> Tensor:
        """Returns the rows of all ranks; a gradient goes back to the ranks that they came from."""
        ...

    def fixed(self, own_structure: Structure) -> Structure:
        """Returns a structure with the rows of all ranks in each tensor. Only this rank's own rows have a gradient."""
        ...


class LocalSamples:
    """No others: a rank that has all samples itself."""

    ranks, first = 1, 0

    def __init__(self, samples: int) -> None:
        self.samples = samples

    def gathered(self, own_tensor: Tensor) -> Tensor:
        return own_tensor

    def fixed(self, own_structure: Structure) -> Structure:
        return own_structure


class WholeSum:
    """The sum of the losses of a rank's own samples, a scalar, differentiable in its outputs."""

    def __init__(self, step: LossStep) -> None:
        self._step = step
        self._own = load_loss(step.python) if step.python is not None else None

    def __call__(self, output: object, target: object) -> Tensor:
        return self.gathered_sum(output, target, LocalSamples(samples_of(output, 0)))

    def gathered_sum(self, output: object, target: object, sample_gather: GatheredSamples) -> Tensor:
        """Returns the sum where there are other ranks. Raises LossError."""
        with mark_errors(self._step.line):
            if self._own is None:
                return contrastive(output, target, float(self._step.arguments["temperature"]), sample_gather)
            return self._of_all(output, target, sample_gather)

    def _of_all(self, output: object, target: object, sample_gather: GatheredSamples) -> Tensor:
        assert self._own is not None and self._step.python is not None
        outputs, targets = sample_gather.fixed(map_tensors(wide, output)), sample_gather.fixed(target)
        if not sample_gather.samples:
            return _zero_of(output)
        loss = self._own(outputs, targets)
        if not isinstance(loss, Tensor) or loss.numel() not in (1, sample_gather.samples):
            got = f"{loss.numel()}" if isinstance(loss, Tensor) else f"a {type(loss).__name__}"
            raise LossError(
                f"{self._step.line or self._step.python.line}: `{self._step.python.function}` is given a whole batch, "
                f"and has to give its mean, or one loss for each sample ({sample_gather.samples}), and it gave {got}"
            )
        total = in_float32(loss).sum() * (sample_gather.samples / loss.numel())
        # Every one of the ranks has it, and it is to count once; its gradient is of this rank's part alone.
        return total if sample_gather.ranks == 1 else total + (total / sample_gather.ranks - total).detach()


def contrastive(output: object, target: object, temperature: float, sample_gather: GatheredSamples) -> Tensor:
    """Returns the sum of the contrastive losses of a rank's own samples. Raises LossError."""
    views = _views(output)
    with torch.autocast(views.device.type, enabled=False):
        own_views = _of_length_1(wide(views))
        all_views = sample_gather.gathered(own_views)
        samples, views_of_sample = own_views.shape[:2]
        groups = _groups(target, samples, views_of_sample, sample_gather, own_views.device)
        similar = own_views.flatten(0, 1) @ all_views.flatten(0, 1).T / temperature
        rows_ = torch.arange(samples * views_of_sample, device=own_views.device)
        columns = torch.arange(sample_gather.samples * views_of_sample, device=own_views.device)
        itself = columns == (rows_ + sample_gather.first * views_of_sample)[:, None]
        positive = groups.repeat_interleave(views_of_sample) == groups[
            sample_gather.first : sample_gather.first + samples
        ].repeat_interleave(views_of_sample).unsqueeze(1)
        positive &= ~itself
        # Not minus infinity, which would make a gradient of nan where there is nothing else.
        over_all = similar.masked_fill(itself, torch.finfo(similar.dtype).min).logsumexp(1, keepdim=True)
        losses = torch.where(positive, over_all - similar, 0).sum(1) / positive.sum(1).clamp(min=1)
        return losses.sum() / views_of_sample


def _groups(
    target: Structure, samples: int, views: int, sample_gather: GatheredSamples, device: torch.device
) -> Tensor:
    """Returns for each of all samples a number that it shares with its positives: its own, or its class."""
    if views > 1:
        return torch.arange(sample_gather.samples, device=device)
    if not isinstance(target, Tensor) or target.is_floating_point() or target.numel() != samples:
        shape = tuple(target.shape) if isinstance(target, Tensor) else type(target).__name__
        raise LossError(
            f"one embedding for each sample needs a class for each as its target, to tell its positives, and the "
            f"targets are {shape}"
        )
    groups: Tensor = sample_gather.fixed(target.reshape(samples).long())
    return groups


def _views(output: object) -> Tensor:
    """Returns embeddings as (samples, views, width)."""
    if isinstance(output, Tensor) and output.dim() == 2:
        return output.unsqueeze(1)
    if isinstance(output, Tensor) and output.dim() == 3 and output.shape[1] > 1:
        return output
    outputs = tensors(output)
    are_views = all(view.dim() == 2 and view.shape == outputs[0].shape for view in outputs)
    if not isinstance(output, Tensor) and len(outputs) > 1 and are_views:
        return torch.stack(outputs, dim=1)
    shapes_text = " and ".join(str(tuple(view.shape)) for view in outputs) or type(output).__name__
    raise LossError(
        "embeddings are (samples, width), or (samples, views, width) with several views, or several tensors (samples, "
        f"width), and the output is {shapes_text}"
    )


def _of_length_1(embeddings: Tensor) -> Tensor:
    length: Tensor = embeddings.norm(dim=-1, keepdim=True)
    return (embeddings / length.clamp(min=SHORTEST)).masked_fill(length <= SHORTEST, 0)


def _zero_of(output: object) -> Tensor:
    """Returns 0, which depends on the output where that has a gradient."""
    outputs = [tensor for tensor in tensors(output) if tensor.is_floating_point()]
    return outputs[0].sum(dtype=torch.float32) if outputs else torch.zeros(())
