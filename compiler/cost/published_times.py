"""The times of a plan's parts on a GPU as fitted to published runs; and which plans the fit does not cover.

Model, at the shares of the data sheet's figures that `PublishedFit` has:

- A product takes its FLOPs at a share of the peak, and the bytes of its three matrices at a share of the memory's
  bandwidth. So its efficiency depends on its shape. The operations between products move bytes in proportion to
  these, and are part of that share.
- Attention takes its FLOPs at a share of the peak, and its scores' bytes if it stores them.
- A head that computes the loss in chunks reads its weight for each, and multiplies once more in the backward pass.
- The loss reads the logits in float32 once forward and twice backward. The update moves `UPDATE_BYTES` a parameter.
- A collective has a latency that grows with the logarithm of its ranks, and a share of the links' bandwidth.
- The host starts kernels beside: a pass of a stage takes no less than that.

Limits: one fit covers one software. It does not know what `torch.compile` fuses, links that other traffic uses, and
delays of single ranks.
"""

from __future__ import annotations

from math import log2, prod
from typing import NamedTuple, Protocol

from dslc.compiler.facts.hardware import Hardware, PublishedFit
from dslc.compiler.ir.actions import TrafficNode
from dslc.compiler.ir.nodes import LayerNode
from dslc.compiler.placement.staging import Staging
from dslc.dsl.record import Record, record

UPDATE_BYTES = 28  # AdamW in float32 reads the parameter, the gradient and two moments, and writes three of them


class _LinkTraffic(Protocol):
    def moved(self, traffic: TrafficNode) -> tuple[float, float]:
        """Returns the bytes over the link of a rank, and over its network port."""


class LayerWork(NamedTuple):
    """The work of a layer's forward pass over one sample: FLOPs and bytes of products, FLOPs of attention."""

    product_flops: float
    row_bytes: float  # operands and results, in 16 bits
    weight_bytes: float  # the same for any number of samples
    attention_flops: float
    products: int


def layer_work(layer: LayerNode, positions: int) -> LayerWork:
    """Returns the work of a layer whose matrices multiply each of the `positions` of a sample."""
    matrices = [q.shape for q in layer.parameters if len(q.shape) == 2] if layer.forward_flops else []
    flops = min(layer.forward_flops, sum(2 * positions * prod(shape) for shape in matrices))
    return LayerWork(
        product_flops=flops,
        row_bytes=sum(2 * positions * sum(shape) for shape in matrices),
        weight_bytes=sum(2 * prod(shape) for shape in matrices),
        attention_flops=layer.forward_flops - flops,
        products=len(matrices),
    )


def _positions(layer: LayerNode) -> int:
    """Returns the positions of a sample in a layer of the whole model."""
    return prod(layer.input.shape[:-1])


@record
class _Rates(Record):
    """Rates that the parts of a step reach: FLOP/s and bytes/s."""

    products: float
    attention: float
    memory: float
    scores: float | None
    loss: float
    update: float

    @staticmethod
    def from_fit(fit: PublishedFit, hardware: Hardware, precision: str) -> _Rates:
        peak, bandwidth = hardware.flops(precision), hardware.bandwidth
        assert peak is not None and bandwidth is not None, "is_covered says so"
        return _Rates(
            products=fit.products * peak,
            attention=fit.attention * peak,
            memory=fit.memory * bandwidth,
            scores=fit.scores * bandwidth or None,
            loss=fit.loss * bandwidth,
            update=fit.update * bandwidth,
        )


class PublishedTimes:
    """The times of a plan's parts by a fit that covers it."""

    crowd = 1.0  # each rank has a device of its own

    def __init__(self, staging: Staging, fit: PublishedFit, links: _LinkTraffic) -> None:
        hardware = staging.layout.hardware
        self._staging, self._fit, self._links = staging, fit, links
        self._rates = _Rates.from_fit(fit, hardware, staging.job.train.precision.word)
        self._link, self._network = hardware.link or 1.0, hardware.network or 1.0
        self._pieces = staging.layout.sizes["context"]
        self._positions = {layer.name: _positions(layer) for layer in staging.model.layers}
        heads = getattr(staging.job.model.network, "heads", 0)
        self._heads = heads / staging.layout.sizes["tensor"] if isinstance(heads, int) else 0.0

    @property
    def overlap(self) -> float:
        return self._fit.overlap

    @property
    def rest(self) -> float:
        return self._fit.rest

    def layer(self, layer: LayerNode, samples: float) -> tuple[float, float]:
        """Returns seconds forward and backward of a pass over `samples`."""
        work, rates = self._work(layer), self._rates
        if not work.products:
            return 0.0, 0.0
        share = samples / self._pieces
        seconds = share * (work.product_flops / rates.products + work.attention_flops / rates.attention)
        head = self._staging.chunked_head
        times = head.chunks if head is not None and head.module == layer.name else 1  # that a pass reads the weight
        seconds += (share * work.row_bytes + times * work.weight_bytes) / rates.memory
        if rates.scores and work.attention_flops:
            seconds += 2 * share * self._heads * self._positions[layer.name] ** 2 / rates.scores
        return seconds, seconds * layer.backward_flops / layer.forward_flops

    def loss(self, samples: float) -> tuple[float, float]:
        model = self._staging.model
        seconds = 4 * samples * prod(model.shared_output or model.output.shape) / self._pieces / self._rates.loss
        return seconds, 2 * seconds

    def launches(self, layer: LayerNode) -> tuple[float, float]:
        """Returns seconds in which the host starts the kernels of a layer, forward and backward."""
        seconds = self._work(layer).products * self._fit.launch
        return seconds, seconds / 2

    def _work(self, layer: LayerNode) -> LayerWork:
        return layer_work(layer, self._positions[layer.name])

    def collective(self, traffic: TrafficNode) -> float:
        """Returns the seconds of a step, in the mean over later steps."""
        fit, (over_link, over_network) = self._fit, self._links.moved(traffic)
        wait = traffic.count * fit.latency * log2(max(2, traffic.ranks)) if over_link or over_network else 0.0
        return traffic.when.share * (wait + max(over_link / self._link, over_network / self._network) / fit.links)

    def update(self, pipeline: int) -> float:
        """Returns the seconds of the optimizer on a rank."""
        return UPDATE_BYTES * self._staging.updated_numbers(pipeline) / self._rates.update

    def data(self, samples: float) -> float:
        """Returns 0: workers make the samples meanwhile."""
        return 0.0


def is_covered(staging: Staging, fit: PublishedFit) -> bool:
    """True if a fit tells the time of a plan: the runs were trainings of transformers in 16 bits, all on GPUs."""
    job, layers = staging.job, staging.model.layers
    peaks = {"bf16": staging.layout.hardware.flops_bf16, "fp16": staging.layout.hardware.flops_fp16}
    lean = job.memory.offload or staging.model.has_quantized_weights or job.train.optimizer.fallback is not None
    plain = staging.sharding.exchange is None and not lean
    blocks = [layer for layer in layers if layer_work(layer, _positions(layer)).attention_flops]
    shapes = {layer.input.shape for layer in blocks}
    return (
        peaks.get(job.train.precision.word) is not None
        and plain
        and bool(blocks)
        and all(len(q.shape) <= 2 for layer in layers for q in layer.parameters)
        and all(len(shape) == 2 and _lies_near(fit, *shape) for shape in shapes)
    )


def _lies_near(fit: PublishedFit, length: int, width: int) -> bool:
    """True of shapes within the range of the runs, or beyond it by a factor of two at most."""
    pairs = ((length, fit.length), (width, fit.width))
    return all(least / 2 <= value <= 2 * most for value, (least, most) in pairs)
