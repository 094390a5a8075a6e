"""The operations of a loss that compares samples (runtime/model/cross_sample_losses.py).

Model: a rank sends the outputs of its share, in as many rows as the largest share has. It receives the outputs of all
ranks that it is compared with. `contrastive` sends embeddings in float32, with classes where classes tell the
positives, and receives back the gradients of its own; a loss of the user's own is sent all that an output and a target
consist of.
"""

from __future__ import annotations

from collections.abc import Iterator
from math import prod

from dslc.compiler.ir.actions import Payload
from dslc.compiler.operations.coordinate import Coordinate
from dslc.compiler.operations.moments import LAST_OUTPUT, LAST_OUTPUT_AHEAD, RankGroup, StepOperation, operation
from dslc.compiler.placement.losses import compared_ranks, has_forward_ahead
from dslc.compiler.placement.shares import largest
from dslc.compiler.placement.staging import Staging
from dslc.dsl.language.calls import Contrastive


def compared_outputs(place: Coordinate) -> Iterator[StepOperation]:
    """Yields the gathers of outputs and targets, and the return of gradients."""
    ranks = compared_ranks(place.job, place.layout)
    if ranks < 2:
        return
    rows = largest(place.workload.batch, place.layout.sizes["data"])
    own = 4 * rows * prod(place.model.output.shape)
    group = RankGroup(axis="data", ranks=ranks, stride=place.layout.stride("data"))
    moment = LAST_OUTPUT_AHEAD if has_forward_ahead(place.job, place.layout) else LAST_OUTPUT

    def exchanged(kind: str, what: Payload, dtype: str, size: int) -> StepOperation:
        return operation(kind, what, group, moment, [size], dtype=dtype)

    if not isinstance(place.job.model.loss, Contrastive):
        yield exchanged("all_gather", Payload.OUTPUTS, "uint8", own)
        yield exchanged("all_gather", Payload.TARGETS, "uint8", rows * place.workload.target)
        return
    yield exchanged("all_gather", Payload.OUTPUTS, "float32", own)
    if has_classes(place):
        yield exchanged("all_gather", Payload.TARGETS, "uint8", 8 * rows)
    yield exchanged("reduce_scatter", Payload.OUTPUT_GRADIENTS, "float32", ranks * own)


def has_classes(staging: Staging) -> bool:
    """True if an output is one embedding for each sample, whose positives are the embeddings of its class."""
    traced = staging.model.traced
    return len(staging.model.output.shape) == 1 and not (traced is not None and traced.structured)
