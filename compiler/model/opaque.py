"""Makes a `ModelGraph` of a traced module, a user's or a library's, layer by layer.

Such a model is made by running a function, so the graph has no modules to build and no initial values. Usually it is
made whole, once under the seed, and broadcast. If the ranks shard its parameters because none can hold them all,
`reset_parameters` gives each module its numbers instead, and a warning says so.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from math import prod
from typing import TYPE_CHECKING

from dslc.compiler.ir.facts import SourceFacts
from dslc.compiler.ir.nodes import BufferNode, LayerNode, ModelGraph, ModulePart, ParameterNode
from dslc.compiler.ir.number_text import byte_text
from dslc.compiler.ir.parameter_names import STACKS
from dslc.compiler.ir.tensors import TensorFact
from dslc.compiler.model.outputs import check_output
from dslc.compiler.model.value import entry
from dslc.compiler.placement.layout import Layout
from dslc.compiler.placement.sharding import sharding_of
from dslc.dsl.diagnostics import Diagnostic, Findings, passes
from dslc.dsl.language.blocks import ModelSpec
from dslc.dsl.language.calls import PythonLoss
from dslc.dsl.language.job import JobSpec
from dslc.dsl.language.registry import Call
from dslc.dsl.source import Span

if TYPE_CHECKING:
    from dslc.compiler.ir.module_facts import ExpertFacts, ModelFacts


def opaque(facts: ModelFacts, model: ModelSpec, source: SourceFacts) -> Findings[ModelGraph | None]:
    """Returns the graph of a traced module; None if it does not fit the data."""
    span = model.network_span
    if source.structures is not None:
        fact = source.structures[0].flat
    else:
        fact = source.input or TensorFact(shape=(), dtype="float32")
    layers = _layers(facts, fact, span)
    sound = yield from passes(_check_vocab(facts, model, source))
    if sound and source.structures is None and not facts.structured:
        last_layer = layers[-1] if layers else None
        sound = yield from passes(check_output(model, last_layer, entry(facts.output), source, []))
    if not sound:
        return None
    # A loss of the user's own may leave out a part of a structure, or look at numbers before it takes it.
    # Over a pipeline (`seams`) that is an error of the step.
    varies = bool(facts.looks) or (facts.structured and isinstance(model.loss, PythonLoss) and not facts.seams)
    varies = varies or (facts.network is not None and facts.network.varies)
    quantized = {weight.name: weight.shape for weight in facts.quantized}
    return ModelGraph(
        layers=layers,
        root=None,
        inits=(),
        ties=facts.ties,
        input=fact,
        output=facts.output,
        batch_norm=facts.batch_norm,
        batch_norm_values=facts.batch_norm_values,
        unsynced_batch_norm=False,
        noise=facts.noise,
        parameters=sum(prod(quantized.get(name, shape)) for name, shape, _ in facts.parameters),
        unused=() if varies else facts.unused,
        varies=varies,
        adapted=model.adapter is not None,
        traced=facts,
    )


def made_by_parts(job: JobSpec, layout: Layout, facts: ModelFacts, memory: int | None) -> Findings[bool]:
    """True if the module is never made whole: its float32 parameters exceed `memory`, and the ranks shard them.

    Reports W0701, and E0804 for a module that cannot make its parameters alone.
    """
    limit = min((m for m in (job.memory.limit, layout.hardware.memory, memory) if m is not None), default=None)
    quantized = {weight.name for weight in facts.quantized}
    all_bytes = sum((1 if name in quantized else 4) * prod(shape) for name, shape, _ in facts.parameters)
    parts = sharding_of(job, layout).shards * layout.sizes["tensor"]
    if limit is None or all_bytes <= limit or parts == 1:
        return False
    span = job.model.network_span
    if facts.without_reset:
        yield Diagnostic(
            "E0804",
            f"the parameters, {byte_text(all_bytes)}, do not fit into {byte_text(limit)}, and "
            f"`{facts.without_reset[0]}` cannot make its own",
            span,
            label=f"{len(facts.without_reset)} such modules" if len(facts.without_reset) > 1 else "",
            help="give its class a method `reset_parameters`",
        )
        return True
    yield Diagnostic(
        "W0701",
        f"the parameters, {byte_text(all_bytes)}, do not fit into {byte_text(limit)}, so each module makes its own by "
        "`reset_parameters`: they differ from those of one process",
        span,
    )
    return True


def _layers(facts: ModelFacts, input: TensorFact, span: Span | None) -> tuple[LayerNode, ...]:
    ties = dict(facts.ties)
    shapes = {name: shape for name, shape, _ in facts.parameters}
    trains = {name: trains for name, _, trains in facts.parameters}
    unsaved = frozenset(facts.unsaved)
    quantized = {weight.name: weight for weight in facts.quantized}
    experts = {f"{stack.module}.{name}": stack.experts for stack in facts.experts for name in STACKS}
    buffers = {
        name: BufferNode(name=name, shape=shape, dtype=dtype, saved=name not in unsaved)
        for name, shape, dtype in facts.buffers
    }

    def nodes(names: Sequence[str]) -> tuple[ParameterNode, ...]:
        return tuple(
            ParameterNode(
                name=name,
                shape=shapes[ties.get(name, name)],
                tied_to=ties.get(name),
                trains=trains[ties.get(name, name)],
                quantized=quantized.get(name),
                experts=experts.get(name, 0),
            )
            for name in names
        )

    layers, previous = [], input
    for layer in facts.layers:
        output = layer.output or previous
        layers.append(
            LayerNode(
                name=layer.name,
                kind=layer.kind,
                span=span,
                input=layer.input or previous,
                output=output,
                parameters=nodes(layer.parameters),
                buffers=tuple(buffers[name] for name in layer.buffers),
                forward_flops=layer.forward_flops,
                backward_flops=layer.backward_flops,
                float32=layer.float32,
                autocast=layer.autocast,
                recomputable=layer.block,
                multiplies=layer.multiplies,
                operations=layer.operations,
                parts=tuple(_part(stack) for stack in facts.experts if stack.module.startswith(f"{layer.name}.")),
            )
        )
        previous = output
    return tuple(layers)


def _part(stack: ExpertFacts) -> ModulePart:
    """Returns experts as a part of a layer; under autocast rows travel in 16 bits."""
    rows = stack.rows, stack.width
    return ModulePart(stack.module, "experts", takes=rows, gives=rows, takes_low=True, gives_low=True)


def _check_vocab(facts: ModelFacts, model: ModelSpec, source: SourceFacts) -> Iterator[Diagnostic]:
    if facts.vocab is not None and source.vocab is not None and facts.vocab < source.vocab:
        network = model.network
        argument = next((n for n in ("vocab_size", "vocab") if isinstance(network, Call) and network.is_set(n)), "")
        yield Diagnostic(
            "E0208",
            f"a vocabulary of {facts.vocab} does not hold the data's {source.vocab} tokens",
            network.value_span(argument) if argument and isinstance(network, Call) else model.network_span,
            label=f"{facts.vocab} < {source.vocab}",
            help=f"an embedding of {source.vocab} rows",
        )
