"""The times of a plan's parts as `dslc calibrate` measured them; and what a calibration lacks for a plan.

Model: a stage's pass takes the sum of its layers' passes over a micro-batch, and the last stage's the loss's besides. A
collective takes its latency, and a time for each byte. An update takes a time for each parameter whose state a rank
keeps.

Limits: one host, with a core for each process. Layers cut by the tensor or the context axis, batch norms over several
ranks, compiled networks and selective recomputation have no measured times.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from math import prod

from dslc.compiler.cost.cost import RankCost
from dslc.compiler.facts.calibration import Calibration, collective_name, layer_signature, loss_signature, update_name
from dslc.compiler.ir.actions import TrafficNode
from dslc.compiler.ir.nodes import LayerNode
from dslc.compiler.placement.sharding import channels_last
from dslc.compiler.placement.staging import Staging
from dslc.dsl.words import plural


class MeasuredTimes:
    """The times of a calibration that has all that a plan needs."""

    def __init__(self, staging: Staging, calibration: Calibration) -> None:
        self._staging, self._calibration = staging, calibration
        self._arithmetic = arithmetic(staging)

    def layer(self, layer: LayerNode, samples: float) -> tuple[float, float]:
        """Returns seconds forward and backward of a pass over `samples`."""
        time = self._calibration.layers[layer_signature(layer, self._arithmetic)]
        return time.forward.seconds(samples), time.backward.seconds(samples)

    def loss(self, samples: float) -> tuple[float, float]:
        time = self._calibration.losses[_loss(self._staging)]
        return time.forward.seconds(samples), time.backward.seconds(samples)

    def collective(self, traffic: TrafficNode) -> float:
        """Returns the seconds of a step, in the mean over later steps."""
        time = self._calibration.collectives.get(_name(self._staging, traffic))
        return traffic.when.share * (time.latency * traffic.count + time.byte * traffic.bytes) if time else 0.0

    @property
    def overlap(self) -> float:
        return self._calibration.overlap

    def update(self, pipeline: int) -> float:
        """Returns the seconds of the optimizer on a rank."""
        sharding = self._staging.sharding
        numbers = sum(
            prod(parameter.shape)
            for stage in self._staging.stages_of(pipeline)
            for layer in (self._staging.model.layers[n] for n in self._staging.stages[stage])
            for parameter in layer.parameters
            if not parameter.tied_to
        )
        return self._calibration.updates[update_name(self._staging.job)] * numbers / sharding.shards

    @property
    def rest(self) -> float:
        return self._calibration.rest

    def data(self, samples: float) -> float:
        """Returns the seconds in which samples are made, where nothing hides it."""
        return 0.0 if self._staging.job.data.workers else self._calibration.data * samples


def arithmetic(staging: Staging) -> str:
    """Returns what the times of a layer depend on besides its work: the precision, and the memory order of images."""
    last = channels_last(staging.layout, staging.sharding, staging.model)
    return f"{staging.job.train.precision.word}{', channels last' if last else ''}"


def lacks(staging: Staging, costs: Iterable[RankCost]) -> str:
    """Returns what a plan needs and the calibration of its machine lacks, in words; "" if it lacks nothing."""
    return next(_lacks(staging, costs), "")


def _lacks(staging: Staging, costs: Iterable[RankCost]) -> Iterator[str]:
    job, layout, calibration = staging.job, staging.layout, staging.layout.hardware.calibration
    if calibration is None:
        yield "no calibration"
        return
    if layout.nodes > 1:
        yield "times between hosts"
    if layout.processes != calibration.processes:
        yield f"times of {layout.processes} processes at once: {calibration.processes} were measured"
    if staging.sharding.exchange is not None:
        yield f"times of `{staging.sharding.exchange.kind}`"
    if layout.device == "cpu" and layout.processes > calibration.cores:
        yield f"times of {layout.processes} processes on {plural(calibration.cores, 'core')}, which take turns"
    if staging.model.batch_norm and not staging.model.unsynced_batch_norm and layout.world_size > 1:
        yield "times of batch norms that ranks compute together"
    if job.train.compile or job.memory.recompute == "selective" or job.memory.offload:
        yield "times of a network that is compiled, recomputed in parts or offloaded"
    signatures = {layer.name: layer_signature(layer, arithmetic(staging)) for layer in staging.model.of_a_rank}
    unknown = [name for name, signature in signatures.items() if signature not in calibration.layers]
    if unknown:
        yield f"times of {plural(len(unknown), 'layer')}, of `{unknown[0]}` first"
    if _loss(staging) not in calibration.losses:
        yield f"times of the loss `{job.model.loss.word}`"
    if update_name(job) not in calibration.updates:
        yield f"times of `{update_name(job)}`"
    for cost in costs:
        for each in cost.traffic:
            name = _name(staging, each)
            if each.operation != "receive" and name not in calibration.collectives:
                yield f"times of {each.operation} among {each.ranks or 2} ranks"


def _name(staging: Staging, traffic: TrafficNode) -> str:
    """Returns the name of a collective in a calibration: `fully_shard` gathers and reduces with work of its own."""
    operation = traffic.operation
    if staging.sharding.engine == "fsdp" and traffic.axis == "data":
        operation = {"all_gather": "gather", "reduce_scatter": "reduce"}.get(operation, operation)
    return collective_name(operation, traffic.ranks)


def _loss(staging: Staging) -> str:
    return loss_signature(staging.job.model.loss.word, staging.model.output, arithmetic(staging))
