"""The times of a plan's parts as `dslc calibrate` measured them; and what a calibration lacks for a plan.

Model: a stage's pass takes the sum of its layers' passes over a micro-batch, and the last stage's the loss's besides. A
collective takes its latency, and a time for each byte. An update takes a time for each parameter whose state a rank
keeps.

The tensor and the context axis, batch norms over several ranks and selective recomputation make other layers, which are
measured with their transfers.

Limits: compiled networks have no measured times.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from itertools import chain

from dslc.compiler.cost.cost import RankCost
from dslc.compiler.facts.calibration import (
    Calibration,
    collective_name,
    data_signature,
    layer_signature,
    loss_signature,
    network_signature,
    update_name,
)
from dslc.compiler.ir.actions import TrafficNode
from dslc.compiler.ir.nodes import LayerNode
from dslc.compiler.placement.sharding import channels_last
from dslc.compiler.placement.staging import Staging
from dslc.dsl.words import plural

CUTTING = ("tensor", "context", "expert")  # axes whose transfers are a part of the layers' times


class MeasuredTimes:
    """The times of a plan's parts in a calibration, if that `lacks` nothing."""

    def __init__(self, staging: Staging, calibration: Calibration) -> None:
        self._staging, self._calibration = staging, calibration
        kind = arithmetic(staging)
        self._layers = {layer.name: layer_signature(layer, kind) for layer in staging.model.of_a_rank}
        self._loss = loss_signature(staging.job.model.loss.word, staging.model.output, kind)
        self._network, self._source = network_of(staging), source_of(staging)

    def layer(self, layer: LayerNode, samples: float) -> tuple[float, float]:
        """Returns seconds forward and backward of a pass over `samples`."""
        time = self._calibration.layers[self._layers[layer.name]]
        return time.forward.seconds(samples), time.backward.seconds(samples)

    def loss(self, samples: float) -> tuple[float, float]:
        time = self._calibration.losses[self._loss]
        return time.forward.seconds(samples), time.backward.seconds(samples)

    def launches(self, layer: LayerNode) -> tuple[float, float]:
        """Returns 0: measured times have them."""
        return 0.0, 0.0

    def collective(self, traffic: TrafficNode) -> float:
        """Returns the seconds of a step, in the mean over later steps."""
        if traffic.axis in CUTTING:
            return 0.0  # a part of the layers' times
        time = self._calibration.collectives.get(_name(self._staging, traffic))
        return traffic.when.share * (time.latency * traffic.count + time.byte * traffic.bytes) if time else 0.0

    @property
    def overlap(self) -> float:
        """The share of an exchange that is hidden; for an unknown network, the median of the known ones."""
        from statistics import median  # here, as most checks have no measurements

        shares = self._calibration.overlap
        return shares.get(self._network, median(shares.values()) if shares else 0.0)

    def update(self, pipeline: int) -> float:
        """Returns the seconds of the optimizer on a rank."""
        return self._calibration.updates[update_of(self._staging)] * self._staging.updated_numbers(pipeline)

    @property
    def crowd(self) -> float:
        """The processes that take turns on a core."""
        layout = self._staging.layout
        return max(1.0, layout.processes / self._calibration.cores) if layout.device == "cpu" else 1.0

    @property
    def rest(self) -> float:
        """The seconds of a step beside its parts: of its engines, or of other ones that exchange between stages, or of
        the network alone.
        """
        rests, network = self._calibration.rest, self._network
        stages = (f"{network} pipeline fsdp", f"{network} pipeline") if "pipeline" in engines_of(self._staging) else ()
        time = next((rests[name] for name in (rest_of(self._staging), *stages, network) if name in rests), None)
        return time.seconds_with(self._staging.layout.microbatches) if time is not None else 0.0

    def data(self, samples: float) -> float:
        """Returns the seconds in which samples are made, where nothing hides it."""
        return 0.0 if self._staging.job.data.workers else self._calibration.data[self._source] * samples

    def lacks(self, costs: Iterable[RankCost]) -> str:
        """Returns what the plan needs and the calibration lacks, in words; "" if it lacks nothing."""
        return next(chain(_unmeasurable(self._staging, self._calibration), self._lacking_times(costs)), "")

    def _lacking_times(self, costs: Iterable[RankCost]) -> Iterator[str]:
        calibration, job = self._calibration, self._staging.job
        unknown = [name for name, signature in self._layers.items() if signature not in calibration.layers]
        if unknown:
            yield f"times of {plural(len(unknown), 'layer')}, of `{unknown[0]}` first"
        if self._loss not in calibration.losses:
            yield f"times of the loss `{job.model.loss.word}`"
        if not job.data.workers and self._source not in calibration.data:
            yield f"times of the samples of `{job.data.source.word}`"
        if update_of(self._staging) not in calibration.updates:
            yield f"times of `{update_of(self._staging)}`"
        for traffic_node in (traffic for cost in costs for traffic in cost.traffic if traffic.axis not in CUTTING):
            if (
                traffic_node.operation != "receive"
                and _name(self._staging, traffic_node) not in calibration.collectives
            ):
                shared = " over shared memory" * (self._staging.layout.backend == "shared_memory")
                across = " across hosts" * _is_across(self._staging, traffic_node)
                yield f"times of {traffic_node.operation} among {traffic_node.ranks or 2} ranks{across}{shared}"


def arithmetic(staging: Staging) -> str:
    """Returns what the times of a layer depend on besides its work: the precision, the memory order of images, the axes
    that cut it, whose transfers are a part of its times, batch norms over several ranks, what is recomputed within it.
    """
    job, sizes = staging.job, staging.layout.sizes
    conditions = {
        "channels last": channels_last(staging.layout, staging.sharding, staging.model),
        f"tensor {sizes['tensor']}{' sequence' * staging.layout.sequence}": sizes["tensor"] > 1,
        f"context {sizes['context']}": sizes["context"] > 1,
        f"expert {staging.sharding.experts}": staging.sharding.experts > 1,
        f"synchronised {_sharing_ranks(staging)}": _sharing_ranks(staging) > 1,
        "selective": job.memory.recompute == "selective",
    }
    return ", ".join([job.train.precision.word, *(name for name, holds in conditions.items() if holds)])


def update_of(staging: Staging) -> str:
    """Returns the name of a job's update in a calibration: of parameters that the tensor axis cuts it takes longer."""
    return f"{update_name(staging.job)}{' of cut parameters' * (staging.layout.sizes['tensor'] > 1)}"


def _sharing_ranks(staging: Staging) -> int:
    """Returns the number of ranks that compute batch norms together."""
    model, sizes = staging.model, staging.layout.sizes
    return sizes["data"] * sizes["context"] if model.batch_norm and not model.unsynced_batch_norm else 1


def network_of(staging: Staging) -> str:
    """Returns the name of a job's network in a calibration."""
    kind, model = arithmetic(staging), staging.model
    layers = [layer_signature(layer, kind) for layer in model.of_a_rank]
    exchange = staging.sharding.exchange.kind if staging.sharding.exchange is not None else ""
    return network_signature(layers, loss_signature(staging.job.model.loss.word, model.output, kind), exchange)


def rest_of(staging: Staging) -> str:
    """Returns the name of the rest of a step in a calibration: of a network, and the engines that ranks run it in."""
    return " ".join([network_of(staging), *engines_of(staging)])


def engines_of(staging: Staging) -> list[str]:
    """Returns the engines of a plan that take more of a step than its parts do."""
    engine = staging.sharding.engine
    stages = ["pipeline"] if staging.layout.sizes["pipeline"] > 1 else []
    return [*stages, *([engine] if engine in ("zero1", "fsdp") else [])]


def source_of(staging: Staging) -> str:
    """Returns the name of the making of a job's samples in a calibration."""
    return data_signature(staging.job, [layer.input for layer in staging.model.layers[:1]])


def _unmeasurable(staging: Staging, calibration: Calibration) -> Iterator[str]:
    """Yields what no calibration, or not one with as many processes, has for a plan."""
    job, layout = staging.job, staging.layout
    if layout.processes != calibration.processes:
        yield f"times of {layout.processes} processes at once: {calibration.processes} were measured"
    if staging.sharding.exchange is not None and rest_of(staging) not in calibration.rest:
        yield f"times of `{staging.sharding.exchange.kind}`"
    if job.train.compile or job.memory.offload:
        yield "times of a network that is compiled or offloaded"


def _name(staging: Staging, traffic: TrafficNode) -> str:
    """Returns the name of a collective in a calibration: `fully_shard` gathers and reduces with work of its own."""
    operation = traffic.operation
    if staging.sharding.engine == "fsdp" and traffic.axis == "data":
        operation = {"all_gather": "gather", "reduce_scatter": "reduce"}.get(operation, operation)
    return collective_name(operation, traffic.ranks, staging.layout.backend, across=_is_across(staging, traffic))


def _is_across(staging: Staging, traffic: TrafficNode) -> bool:
    """True if a collective, or a message, goes from host to host."""
    layout = staging.layout
    if layout.nodes == 1 or traffic.among == "node":
        return False
    if traffic.ranks:
        return traffic.ranks * max(1, traffic.stride) > layout.processes
    return layout.crosses_nodes("pipeline" if traffic.axis == "all" else traffic.axis)
