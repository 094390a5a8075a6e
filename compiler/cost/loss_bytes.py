"""The memory of a loss that compares samples (runtime/model/cross_sample_losses.py), and of a head that computes the
losses in chunks (runtime/technique/chunked_head.py).

Limits: of a user's own loss it is assumed that it compares each sample of the batch with each, in a few matrices.
"""

from __future__ import annotations

from dataclasses import replace
from math import prod

from dslc.compiler.cost.layer_bytes import LayerBytes
from dslc.compiler.ir.memory import Halves, WorkingSet
from dslc.compiler.ir.nodes import LayerNode
from dslc.compiler.placement.losses import compared_ranks, compares
from dslc.compiler.placement.sharding import autocasts, low_copy, low_precision
from dslc.compiler.placement.staging import Staging
from dslc.dsl.language.calls import Contrastive
from dslc.dsl.record import Record, record

MATRICES = 4  # of a number for each pair of samples, that exist at once: similarities, losses, gradients of them


@record
class LossBytes(Record):
    """Bytes of a rank at the loss.

    `outputs` are the outputs of all micro-batches, if they are made ahead; `forward` and `backward` the most beside
    them; `gradients` wait afterwards for the passes of the micro-batches.
    """

    outputs: int
    forward: int
    backward: int
    gradients: int


def whole_loss_bytes(staging: Staging) -> LossBytes | None:
    """Returns the bytes of a rank at the loss; None for another loss."""
    job, layout = staging.job, staging.layout
    if not compares(job.model.loss):
        return None
    ranks, shape = compared_ranks(job, layout), staging.model.output.shape
    share = staging.workload.share
    own_outputs, samples = 4 * share * prod(shape), share * ranks
    is_early = layout.microbatches > 1
    outputs = 2 * own_outputs if is_early else 0  # of each micro-batch, and joined
    if not isinstance(job.model.loss, Contrastive):
        all_outputs = 4 * samples * prod(shape) if ranks > 1 else 0
        pairs = 4 * samples * samples
        return LossBytes(
            outputs=outputs,
            forward=own_outputs + 2 * all_outputs + MATRICES * pairs,
            backward=own_outputs + all_outputs + MATRICES * pairs,
            gradients=own_outputs if is_early else 0,
        )
    views = shape[0] if len(shape) > 1 else 1
    pairs = 4 * share * views * samples * views
    all_outputs = ranks * own_outputs if ranks > 1 else 0
    return LossBytes(
        outputs=outputs,
        forward=2 * own_outputs + 2 * all_outputs + MATRICES * pairs + pairs // 2,
        backward=2 * own_outputs + 2 * all_outputs + (MATRICES + 1) * pairs + pairs // 2,
        gradients=own_outputs if is_early else 0,
    )


def chunked_bytes(staging: Staging, layer: LayerNode, plain: LayerBytes) -> LayerBytes:
    """Returns the bytes of a head that computes losses in chunks; `plain` are those of one that gives logits.

    A chunk's logits exist as products, and for the softmax in float32. Of each token the head keeps the logarithm of
    the sum of its exponentials. Weights and gradients of weights of 16 bits are copied: products of the chunks are
    added in float32, for which a CPU widens them first.
    """
    chunked, job = staging.chunked_head, staging.job
    assert chunked is not None
    low, on_cpu = low_precision(job), staging.layout.device == "cpu"
    numbers = prod(layer.parameters[0].shape)
    classes, width = layer.parameters[0].shape
    logits = chunked.chunk_tokens * classes * (6 if low else 4)
    copied = 2 * numbers if autocasts(job) else 0
    losses = 4 * chunked.tokens
    hidden = chunked.tokens * width
    kept = plain.kept + losses
    rounded = 2 * hidden if autocasts(job) and plain.input > 2 * hidden else 0  # a copy of the input in 16 bits
    moments: list[WorkingSet] = []
    if plain.backward:
        most = max(plain.backward, key=lambda moment: moment.made)
        if not most.made:  # a frozen dense layer keeps no input, and this one computes logits again
            kept += (2 if low else 4) * hidden
        of_input = (2 if low else 4) * hidden * bool(plain.input)
        added = numbers * (6 if on_cpu else 2) if low and most.made else 0
        working = kept + losses + of_input + logits + copied
        made = replace(most, bytes=0, copies=0)
        if low_copy(job):  # a sum in float32, and the gradient in 16 bits
            summed = 4 * most.made
            moments.append(WorkingSet(working + summed + added, 0, 0, 0))
            moments.append(replace(made, bytes=working + summed))
        else:
            moments.append(replace(made, bytes=working + added))
        if autocasts(job):
            moments.append(replace(made, bytes=losses + of_input + 4 * hidden))
    return replace(
        plain,
        kept=kept if plain.backward else 0,
        forward=plain.input + rounded + logits + copied + 2 * losses,
        backward=tuple(moments),
        copies=0,
        output=losses,
    )


def chunked_halves(staging: Staging, sizes: LayerBytes) -> Halves:
    """Returns the bytes of such a head, which has these in one pass, where a schedule splits its backward pass. Each
    half computes the logits again; between them it keeps what it kept, and the gradients of the losses.
    """
    assert staging.chunked_head is not None
    losses = 4 * staging.chunked_head.tokens
    working = max((moment.bytes for moment in sizes.backward), default=sizes.kept) - sizes.kept
    return Halves(
        gradients=losses,
        most=0,
        left=0,
        copied=0,
        first=working,
        passed=losses,
        tail=0,
        freed=sizes.kept + losses,
        moments=tuple(replace(moment, bytes=sizes.kept - moment.bytes) for moment in sizes.backward),
    )
