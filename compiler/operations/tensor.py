"""The collectives of the tensor axis that torch's DTensor styles issue, module by module.

Model: a style changes the layout of a module's input or output, and autograd reverts it for the gradient. With n ranks,
by style (runtime/parallel/tensor_parallel.py), where T is the module's whole input and G its whole output:

    column, gathered, scores        backward, all-reduce of T
      … of_pieces                   forward, all-gather of T / n; backward, reduce-scatter of T
    gathered                        besides, forward, all-gather of G / n
    row, vocabulary                 forward, all-reduce of G
    row_to_pieces                   forward, reduce-scatter of G; backward, all-gather of G / n
    row_of_whole                    as a row; backward, all-gather of T / n
    split                           backward, all-gather of T / n
    gather                          forward, all-gather of G / n
    sequence                        an all-reduce of each gradient, once the gradients of a step (ZeRO-2 and -3: of a
                                    micro-batch) are complete
    summed                          backward, for each call, an all-reduce of the gradient of each of its own parameters
    experts                         forward, all-reduce of G; backward, all-reduce of T, and of the gradients of the
                                    weights that the router gives, W in float32
    experts_of_pieces               forward, all-gather of T / n and reduce-scatter of G; backward, reduce-scatter of T,
                                    all-gather of G / n, and the all-reduce of W

A product in 8 bits takes its input in 16 bits. It has besides, for the largest numbers of what a cut crosses
(runtime/parallel/float8_tensor_parallel.py), with N rows of T and G, and K and M numbers in a row of them, of float32:

    tensorwise                      column: backward and forward, an all-reduce of 1; row: forward, of 2
    rowwise                         column: backward, an all-reduce of N + K; row: forward, of N + M

There is no backward exchange if nothing before the module trains. The loss over shares of the classes has three
all-reduces of one float32 for each target: the largest score, the sum, and the score of the target. A loss in chunks
has these of each chunk, and with label smoothing one of the sum of all scores. If a block is recomputed, so are its
collectives, up to the last module that saves something: there torch stops.

Contract: kind, count and bytes equal torch 2.13's, which tests/training/test_collectives.py checks.

Limits: in a user's own module under autocast, the input of a cut module is counted in float32. A recomputed block is
assumed to have no module after the last module that is cut. If a schedule splits the backward pass (`zero_bubble`,
`zbv`, `dualpipev`), torch recomputes a layer for each part of it; these collectives are counted once.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from math import prod
from typing import NamedTuple, assert_never

from dslc.compiler.ir.actions import Payload
from dslc.compiler.ir.nodes import LayerNode
from dslc.compiler.ir.records import Weights
from dslc.compiler.ir.tensor_styles import EXPERT_STYLES, TensorStyle
from dslc.compiler.ir.tensors import DTYPE_BYTES
from dslc.compiler.model.float8 import DenseLayer, dense_layers, float8_step
from dslc.compiler.operations.coordinate import Coordinate
from dslc.compiler.operations.moments import BACKWARD, FORWARD, WEIGHT_GRADIENTS, Moment, StepOperation, operation
from dslc.compiler.placement.losses import HeadChunks, has_forward_ahead
from dslc.compiler.placement.sharding import low_copy, low_dtype, low_precision, recomputed
from dslc.compiler.placement.shares import piece
from dslc.compiler.placement.tensor_plan import calls_by_layer
from dslc.dsl.language.calls import CrossEntropy
from dslc.dsl.record import Record, record

_KEEP_NOTHING = (
    "flatten",
    "last_step",
    "mean_steps",
    "positional_embedding",
    "attention",
    "gated_mlp",
    "moe",
)  # itself


# Modules of one parent that take the same input: no gradient goes from one to another.
_SIDE_BY_SIDE = (("q_proj", "k_proj", "v_proj"), ("gate_proj", "up_proj"), ("gate", "experts", "shared_experts"))


def _stands_beside(parameter: str, module: str) -> bool:
    """True if a parameter is of a module that takes the same input as `module`, or as the module that this is in."""
    for one, other in zip(parameter.split("."), module.split("."), strict=False):
        if one != other:
            return any(one in names and other in names for names in _SIDE_BY_SIDE)
    return False


class _TensorCollective(NamedTuple):
    """One collective: its content, its dtype, and the bytes of a rank's input."""

    operation: str
    what: Payload
    dtype: str
    bytes: int


@record
class _StyledCall(Record):
    """A call of a module with a style: numbers of its input and output per sample, and the bytes of each; of a mixture
    of experts, also the weights of the router.
    """

    name: str
    takes: int
    gives: int
    takes_low: bool
    gives_low: bool
    repeated: bool  # if the layer is recomputed, this comes before it stops
    weights: int = 0


def tensor_axis(place: Coordinate, weights: Mapping[str, Weights]) -> Iterator[StepOperation]:
    """Yields the collectives within the passes, and the collectives of gradients that are complete as partial sums."""
    axis, group = _TensorAxis(place), place.along("tensor")
    last = len(place.stages) - 1
    found: list[_TensorCollective] = []
    for stage, layers in zip(place.mine, place.held, strict=True):
        found += axis.passes(layers, place.workload.share, begins=stage == 0, ends=stage == last)
    if has_forward_ahead(place.job, place.layout):
        # A loss in chunks is a part of the network. A loss over shares of whole logits runs after it, and once.
        runs_ahead = {Payload.ACTIVATIONS, Payload.SCALES} | ({Payload.LOSS_PARTS} if axis.has_chunked_loss else set())
        found += [each for each in found if each.what in runs_ahead]
    sizes: dict[tuple[str, Payload, str], list[int]] = {}  # each of all micro-batches together
    for each in found:
        sizes.setdefault((each.operation, each.what, each.dtype), []).append(each.bytes)
    for (kind, what, dtype), bytes in sizes.items():
        loss = last if what is Payload.LOSS_PARTS else None
        total = operation(kind, what, group, _MOMENTS[what], bytes, dtype=dtype, stage=loss)
        yield replace(total, count=place.layout.microbatches * total.count)
    times = 1 if place.sharding.accumulate else place.layout.microbatches
    for stage, layers in zip(place.mine, place.held, strict=True):
        names = [name for name, each in weights.items() if each.stage == stage and each.pieces]
        yield operation(
            "all_reduce",
            Payload.PARTIAL_GRADIENTS,
            group,
            place.complete,
            axis.partial_gradients(layers),
            dtype=axis.kept_in,
            times=times,
            stage=stage,
            weights=names,
        )


class _TensorAxis:
    """The collectives of a rank, for its own layers."""

    def __init__(self, place: Coordinate) -> None:
        job, layout, sharding, model = place.job, place.layout, place.sharding, place.model
        self._model, self._plan, self._names = model, place.cuts, place.whole.with_gradients
        self._ranks, self._context = layout.sizes["tensor"], layout.sizes["context"]
        self._microbatches = layout.microbatches
        self._chunked = place.whole.chunked_head if self._plan.chunked_loss else None
        self._smooths = isinstance(job.model.loss, CrossEntropy) and job.model.loss.label_smoothing > 0
        self._low = low_precision(job)
        self._half = low_copy(job)
        self._word = low_dtype(job)
        self._again = set(recomputed(job, model))
        # `fully_shard` accumulates in float32; a gradient that is complete at once is not accumulated before.
        direct = layout.sizes["pipeline"] == 1 and not (sharding.accumulate and layout.microbatches > 1)
        self.kept_in = self._word if self._half and direct else "float32"
        self._styles = self._plan.by_module
        step = float8_step(job, model)
        self._tensorwise = step is not None and step.recipe == "tensorwise"
        in_8_bits = frozenset(step.layers or () if step is not None else ())
        self._float8 = {layer.name: layer for layer in dense_layers(model) if layer.name in in_8_bits}
        self._calls_of = calls_by_layer(model)
        shares = model.traced.shares if model.traced is not None else None
        summed = shares.summed if shares is not None else self._plan.by_style(TensorStyle.SUMMED) if model.root else ()
        self._summed = Counter(summed)

    @property
    def has_chunked_loss(self) -> bool:
        return self._chunked is not None

    # ---------------------------------------------------------------------------------------------------- the passes

    def passes(
        self, layers: Sequence[LayerNode], samples: int, *, begins: bool, ends: bool
    ) -> Iterator[_TensorCollective]:
        """Yields the exchanges of each micro-batch in a stage, with the bytes of all, which have `samples` together.
        `begins` and `ends` say if the stage is the model's first or last.
        """
        flows = not begins  # the input has a gradient
        for layer in layers:
            trains = [n for n, q in enumerate(layer.parameters) if q.first_name in self._names]
            for call in self._calls(layer):
                own = [n for n, q in enumerate(layer.parameters) if q.name.startswith(f"{call.name}.")]
                ahead = (layer.parameters[n].name for n in trains if n < min(own, default=0))
                before = flows or any(not _stands_beside(name, call.name) for name in ahead)
                after = before or any(n in own for n in trains)
                again = layer.name in self._again and call.repeated and (flows or bool(trains))
                for style in self._styles[call.name]:
                    yield from self._of_style(style, call, samples, before, after, again)
                    if style in EXPERT_STYLES:
                        recomputes = layer.name in self._again and (flows or bool(trains))
                        routes = before or any(layer.parameters[n].name == f"{call.name}.gate.weight" for n in trains)
                        yield from self._of_experts(style, call, samples, (before, routes, after), recomputes)
                    if call.name in self._float8:
                        runs_again = layer.name in self._again and (flows or bool(trains))
                        yield from self._scales(self._float8[call.name], style, call, samples, runs_again)
            for q in (layer.parameters[n] for n in trains):
                for _ in range(self._summed[q.name.rpartition(".")[0]]):  # each call by itself
                    yield self._collective("all_reduce", Payload.PARTIAL_GRADIENTS, self._microbatches * q.count, False)
            flows = flows or bool(trains)
        if ends and self._chunked is not None:
            yield from self._loss_of_chunks(self._chunked)
        if ends and self._plan.loss_parallel:
            targets = samples * prod(self._model.output.shape[:-1]) // self._context
            for _ in ("the largest score", "the sum", "the target's score"):
                yield _TensorCollective("all_reduce", Payload.LOSS_PARTS, "float32", 4 * targets)

    def _loss_of_chunks(self, head: HeadChunks) -> Iterator[_TensorCollective]:
        """Yields a chunk's all-reduces: largest score, sum, target's score, and the scores' sum for smoothed labels."""
        for chunk in range(head.chunks):
            start, stop = piece(head.tokens, head.chunks, chunk)
            for _ in range(4 if self._smooths else 3):
                size = 4 * self._microbatches * (stop - start)
                yield _TensorCollective("all_reduce", Payload.LOSS_PARTS, "float32", size)

    def _of_style(
        self, style: TensorStyle, call: _StyledCall, samples: int, before: bool, after: bool, again: bool
    ) -> Iterator[_TensorCollective]:
        """Yields a style's exchanges. `before`, `after`: the module's input, output has a gradient."""
        n = self._ranks
        takes, gives = (samples * size // self._context for size in (call.takes, call.gives))
        forward: list[tuple[str, int, bool]] = []
        backward: list[tuple[str, int, bool]] = []
        match style:
            case TensorStyle.COLUMN | TensorStyle.SCORES | TensorStyle.GATHERED:
                backward.append(("all_reduce", takes, call.takes_low))
            case TensorStyle.COLUMN_OF_PIECES | TensorStyle.SCORES_OF_PIECES | TensorStyle.GATHERED_OF_PIECES:
                forward.append(("all_gather", takes // n, call.takes_low))
                backward.append(("reduce_scatter", takes, call.takes_low))
            case TensorStyle.ROW | TensorStyle.ROW_OF_WHOLE | TensorStyle.VOCABULARY:
                forward.append(("all_reduce", gives, call.gives_low))
            case TensorStyle.ROW_TO_PIECES:
                forward.append(("reduce_scatter", gives, call.gives_low))
            case TensorStyle.GATHER:
                forward.append(("all_gather", gives // n, call.gives_low))
            case TensorStyle.SPLIT | TensorStyle.SEQUENCE | TensorStyle.SUMMED:
                pass
            case TensorStyle.EXPERTS | TensorStyle.EXPERTS_OF_PIECES:
                pass  # `_of_experts`
            case _:
                assert_never(style)
        if style in (TensorStyle.GATHERED, TensorStyle.GATHERED_OF_PIECES):
            forward.append(("all_gather", gives // n, call.gives_low))
        if style in (TensorStyle.ROW_OF_WHOLE, TensorStyle.SPLIT):
            backward.append(("all_gather", takes // n, call.takes_low))
        for kind, size, low in forward:
            yield self._collective(kind, Payload.ACTIVATIONS, size, low)
            if again:
                yield self._collective(kind, Payload.ACTIVATIONS_AGAIN, size, low)
        for kind, size, low in backward if before else ():
            yield self._collective(kind, Payload.ACTIVATION_GRADIENTS, size, low)
        if style is TensorStyle.ROW_TO_PIECES and after:
            yield self._collective("all_gather", Payload.ACTIVATION_GRADIENTS, gives // n, call.gives_low)

    def _of_experts(
        self, style: TensorStyle, call: _StyledCall, samples: int, gradients: tuple[bool, bool, bool], recomputes: bool
    ) -> Iterator[_TensorCollective]:
        """Yields the exchanges of a mixture. `gradients`: its input, the router's weights and its output have some."""
        of_input, of_weights, of_output = gradients
        takes, gives, weights = (samples * size // self._context for size in (call.takes, call.gives, call.weights))
        again = recomputes and call.repeated  # the experts' sum; the tokens come before all that is saved
        if style is TensorStyle.EXPERTS:
            yield self._collective("all_reduce", Payload.ACTIVATIONS, gives, True)
            if again:
                yield self._collective("all_reduce", Payload.ACTIVATIONS_AGAIN, gives, True)
            if of_input:
                yield self._collective("all_reduce", Payload.ACTIVATION_GRADIENTS, takes, True)
        else:
            yield self._collective("all_gather", Payload.ACTIVATIONS, takes // self._ranks, True)
            yield self._collective("reduce_scatter", Payload.ACTIVATIONS, gives, True)
            if recomputes:
                yield self._collective("all_gather", Payload.ACTIVATIONS_AGAIN, takes // self._ranks, True)
            if again:
                yield self._collective("reduce_scatter", Payload.ACTIVATIONS_AGAIN, gives, True)
            if of_input:
                yield self._collective("reduce_scatter", Payload.ACTIVATION_GRADIENTS, takes, True)
            if of_output:
                yield self._collective("all_gather", Payload.ACTIVATION_GRADIENTS, gives // self._ranks, True)
        if of_weights:
            yield _TensorCollective("all_reduce", Payload.ACTIVATION_GRADIENTS, "float32", 4 * weights)

    def _scales(
        self, layer: DenseLayer, style: TensorStyle, call: _StyledCall, samples: int, again: bool
    ) -> Iterator[_TensorCollective]:
        """Yields the all-reduces of largest numbers for a product in 8 bits. `again`: the product is recomputed, even
        if it is the last of its layer.
        """
        times, rows = self._microbatches, samples * call.takes // self._context // layer.columns
        if style.cut == 0:
            backward, forward = (times, times) if self._tensorwise else (rows + times * layer.columns, 0)
        else:
            backward, forward = 0, 2 * times if self._tensorwise else rows + times * layer.rows
        counts = {Payload.SCALES: forward, Payload.SCALES_AGAIN: again * forward, Payload.GRADIENT_SCALES: backward}
        for what, numbers in counts.items():
            if numbers:
                yield _TensorCollective("all_reduce", what, "float32", 4 * numbers)

    def _collective(self, operation: str, what: Payload, numbers: int, low: bool) -> _TensorCollective:
        short = self._half or (self._low and low)
        return _TensorCollective(operation, what, self._word if short else "float32", (2 if short else 4) * numbers)

    def _calls(self, layer: LayerNode) -> Iterator[_StyledCall]:
        """Yields the modules of a layer that have a style, in the order of their calls."""
        calls = self._calls_of.get(layer.name, [])
        for n, call in enumerate(calls):
            yield _StyledCall(
                name=call.module,
                takes=prod(call.input.shape),
                gives=prod(call.output.shape),
                takes_low=call.module in self._float8,
                gives_low=TensorStyle.VOCABULARY not in self._styles[call.module],  # autocast leaves a table as it is
                repeated=n + 1 < len(calls),
            )
        if layer.parts and layer.name in self._styles and all(part.name != layer.name for part in layer.parts):
            yield _StyledCall(  # `split` and `gather` apply to whole layers
                name=layer.name,
                takes=prod(layer.input.shape),
                gives=prod(layer.output.shape),
                takes_low=layer.parts[0].takes_low,
                gives_low=layer.low,
                repeated=False,
            )
        last = max((n for n, part in enumerate(layer.parts) if part.kind not in _KEEP_NOTHING), default=0)
        for n, part in enumerate(layer.parts):
            if part.name in self._styles:
                yield _StyledCall(
                    name=part.name,
                    takes=prod(part.takes),
                    gives=prod(part.gives),
                    takes_low=part.takes_low or part.name in self._float8,
                    gives_low=part.gives_low,
                    repeated=n < last if part.kind != "moe" else self._has_shared_experts(layer, part.name),
                    weights=next((prod(p.gives) for p in layer.parts if p.name == f"{part.name}.gate"), 0),
                )

    def _has_shared_experts(self, layer: LayerNode, mixture: str) -> bool:
        """True if a mixture has a network that every token goes through, which runs after its experts."""
        return any(part.name == f"{mixture}.shared_experts" for part in layer.parts)

    def partial_gradients(self, layers: Sequence[LayerNode]) -> Iterator[int]:
        """Yields the bytes of replicated parameters whose gradients are partial sums over pieces."""
        for layer in layers:
            for q in layer.parameters:
                if TensorStyle.SEQUENCE in self._styles.get(q.name.rpartition(".")[0], ()) and q.name in self._names:
                    yield DTYPE_BYTES[self.kept_in] * q.count


_MOMENTS: Mapping[Payload, Moment] = {
    Payload.ACTIVATIONS: FORWARD,
    Payload.LOSS_PARTS: FORWARD,
    Payload.ACTIVATIONS_AGAIN: BACKWARD,
    Payload.ACTIVATION_GRADIENTS: BACKWARD,
    Payload.SCALES: FORWARD,
    Payload.SCALES_AGAIN: BACKWARD,
    Payload.GRADIENT_SCALES: BACKWARD,
    Payload.PARTIAL_GRADIENTS: WEIGHT_GRADIENTS,
}
