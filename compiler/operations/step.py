"""All operations of a rank with others in a step, axis by axis.

Model: the rules of torch's engines, one file for each, and of dslc's own collectives.

Contract: kind, count and bytes equal a real step's, on any axes, which tests/training/test_collectives.py compares;
`dslc run --profile` shows both. The bytes count the input: of an all-gather a rank's own part, of a reduce-scatter the
whole. Logging, evaluation and checkpoints belong to no step. A collective of all ranks belongs to their axis, or to
`all` if they have several.

Limits: the first steps exchange more, as engines lay out buckets. In a user's own module, gradients are assumed to be
ready in the reverse order of its layers' calls.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping

from dslc.compiler.ir.records import Weights
from dslc.compiler.operations.agreement import counts_of_experts, counts_of_samples, over_all_ranks
from dslc.compiler.operations.batch_statistics import batch_statistics
from dslc.compiler.operations.coordinate import Coordinate
from dslc.compiler.operations.ddp import ddp
from dslc.compiler.operations.exchanges import local
from dslc.compiler.operations.fsdp import fsdp
from dslc.compiler.operations.layer_exchanges import capacity_counts, context_axis, expert_axis
from dslc.compiler.operations.losses import compared_outputs
from dslc.compiler.operations.moments import StepOperation
from dslc.compiler.operations.pipeline import pipeline_axis
from dslc.compiler.operations.tensor import tensor_axis
from dslc.compiler.operations.weights import weight_groups
from dslc.compiler.operations.zero1 import zero1

Engine = Callable[[Coordinate, Mapping[str, Weights]], Iterator[StepOperation]]
ENGINES: Mapping[str, Engine] = {"ddp": ddp, "zero1": zero1, "fsdp": fsdp, "local": local}


def operations(place: Coordinate) -> tuple[StepOperation, ...]:
    """Returns the operations of a rank in a step; none has a count of 0."""
    return tuple(each for each in _operations(place, weight_groups(place)) if each.count)


def _operations(place: Coordinate, weights: Mapping[str, Weights]) -> Iterator[StepOperation]:
    sizes = place.layout.sizes
    if sizes["data"] * sizes["context"] > 1:
        yield from ENGINES[place.sharding.engine](place, weights)
        yield from batch_statistics(place)
        yield from counts_of_samples(place)
        yield from counts_of_experts(place)
        yield from compared_outputs(place)
    if sizes["data"] > 1:
        yield from capacity_counts(place)
    if sizes["pipeline"] > 1:
        yield from pipeline_axis(place)
    if sizes["tensor"] > 1:
        yield from tensor_axis(place, weights)
    if sizes["context"] > 1:
        yield from context_axis(place)
    if place.sharding.experts > 1:
        yield from expert_axis(place)
    yield from over_all_ranks(place)
