"""The operations of the pipeline axis: messages between stages, and gradients of weights that stages share.

A message between stages is counted at both of its ends, as `send` and as `receive`.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import pairwise
from math import prod

from dslc.compiler.ir.actions import Payload
from dslc.compiler.ir.tensors import DTYPE_BYTES, TensorFact
from dslc.compiler.operations.coordinate import Coordinate
from dslc.compiler.operations.moments import BEFORE_UPDATE, IN_SCHEDULE, RankGroup, StepOperation, operation
from dslc.compiler.operations.weights import shared_name
from dslc.compiler.placement.staging import Staging, boundary_tensors

STAGES = RankGroup(axis="pipeline", ranks=0, stride=0)


def pipeline_axis(place: Coordinate) -> Iterator[StepOperation]:
    """Yields the messages of a rank to and from the ranks of other stages."""
    yield from _activations(place)
    yield from _shared_gradients(place)


def _activations(place: Coordinate) -> Iterator[StepOperation]:
    """Yields the messages to and from stages on other ranks: outputs forward, gradients of inputs back."""
    stages, mine = place.stages, place.mine
    between = messages(place)
    forward = [i for i in mine if i + 1 < len(stages) and i + 1 not in mine]  # by the stage that sends forward
    backward = [i - 1 for i in mine if i > 0 and i - 1 not in mine]
    for kind, what, ends in (
        ("send", Payload.ACTIVATIONS, forward),
        ("receive", Payload.ACTIVATIONS, backward),
        ("send", Payload.ACTIVATION_GRADIENTS, backward),
        ("receive", Payload.ACTIVATION_GRADIENTS, forward),
    ):
        sizes: dict[str, list[int]] = {}
        for fact in (fact for i in ends for fact in between[i]):
            sizes.setdefault(fact.dtype, []).append(prod(fact.shape) * DTYPE_BYTES[fact.dtype])
        for dtype, bytes in sizes.items():
            yield operation(kind, what, STAGES, IN_SCHEDULE, bytes, dtype=dtype, times=place.layout.microbatches)


def _shared_gradients(place: Coordinate) -> Iterator[StepOperation]:
    """Yields the exchanges of gradients of shared weights: each coordinate receives the gradients of all others."""
    shared = {
        q.name: (4 * place.padded(q) // place.sharding.shards, len(place.whole.holders[q.name]) - 1)
        for layer in place.layers
        for q in layer.parameters
        if q.tied_to is None and q.name in place.whole.with_gradients and len(place.whole.holders[q.name]) > 1
    }
    sizes = [size for size, others in shared.values() for _ in range(others)]
    for kind in ("send", "receive"):
        names = map(shared_name, sorted(shared))
        yield operation(kind, Payload.SHARED_GRADIENTS, STAGES, BEFORE_UPDATE, sizes, weights=names)


def messages(staging: Staging) -> tuple[tuple[TensorFact, ...], ...]:
    """Returns the tensors of a micro-batch that a rank of each stage but the last sends on, and receives as gradients:
    its own part, if the context or the tensor axis divides it.
    """
    tensors = []
    for stage, following in pairwise(staging.stages):
        facts = []
        for fact in boundary_tensors(staging.job, staging.model, stage[-1]):
            shape = staging.cuts.local_input_shape(
                staging.model.layers[following[0]].name, fact.shape, staging.layout.sizes
            )
            facts.append(TensorFact(shape=(staging.workload.microbatch, *shape), dtype=fact.dtype))
        tensors.append(tuple(facts))
    return tuple(tensors)
