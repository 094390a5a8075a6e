"""The memory of a loss that compares samples (runtime/model/cross_sample_losses.py).

Limits: of a user's own loss it is assumed that it compares each sample of the batch with each, in a few matrices.
"""

from __future__ import annotations

from math import prod

from dslc.compiler.placement.cross_sample_losses import compared_ranks, compares
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
