"""Makes a `ModelGraph` of a network in the job: shapes, parameters, FLOPs and memory of every layer.

`build` is arithmetic for layer lists and library networks; nothing of torch is loaded. opaque.py handles models made by
a function.

Modules of a list are named as `nn.Sequential` names them, `0`, `1`, …, with `repeat` unrolled. The parts of a residual
are `N.layers.i` and `N.shortcut.i`; library networks have descriptive names (`blocks.3.attention.qkv.weight`).

Layers before all parameters that train, by `freeze`, keep nothing and have no backward pass.

Limits: memory follows torch's kernels on CPUs (tape.py); LSTMs, which have a workspace of their own, are within a
quarter.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from itertools import count, groupby

from dslc.compiler.ir.facts import SourceFacts
from dslc.compiler.ir.memory import Halves, LayerMemory, Working, WorkingSet
from dslc.compiler.ir.nodes import BufferNode, LayerNode, ModelGraph, ParameterNode
from dslc.compiler.ir.parameter_names import base_name
from dslc.compiler.ir.steps import ModuleStep
from dslc.compiler.ir.tensor_styles import TensorStyle
from dslc.compiler.ir.tensors import TensorFact
from dslc.compiler.model.expert_layers import with_more_rows
from dslc.compiler.model.networks import Expansion, expand
from dslc.compiler.model.outputs import check_output
from dslc.compiler.model.pieces import gathers_by_layer, with_gathers
from dslc.compiler.model.tape import LayerInputError, Surroundings, record, too_many, unroll
from dslc.compiler.model.value import Value, entry, say
from dslc.compiler.placement.tensor_plan import TensorPlan, calls_by_layer, shape_on_a_rank
from dslc.dsl.bounds import LAYERS
from dslc.dsl.diagnostics import Diagnostic, Findings, Note, Report, passes
from dslc.dsl.language import layers as s
from dslc.dsl.language.blocks import ModelSpec
from dslc.dsl.language.calls import Fp8
from dslc.dsl.language.registry import Call
from dslc.dsl.words import plural

__all__ = ["BufferNode", "LayerNode", "ModelGraph", "ParameterNode", "build"]


def build(
    model: ModelSpec, source: SourceFacts, context: int | None, float8: Fp8 | None = None
) -> Findings[ModelGraph | None]:
    """Returns the graph of a layer list or library network; None if the input is unknown, or with the reason in the
    report.

    Reports E0201 to E0232 and W0201 to W0203; of the mistakes along the chain of layers only the first, as the shapes
    after it are unknown. `context` is the length of a sequence if the data's own is not known. `float8`:
    products of dense layers are in 8 bits.
    """
    network = model.network
    if isinstance(network, s.PythonNetwork | s.TransformersNetwork):
        return None
    fact = source.input
    if fact is None and context is not None and (source.vocab is not None or isinstance(network, s.GPT | s.Llama)):
        fact = TensorFact(shape=(context,), dtype="int64")
    if fact is None:
        return None
    graph = yield from _graph(model, source, fact, frozenset(), float8)
    if graph is None or not model.freeze:
        return graph
    # Which names a pattern matches is known with the ties of the whole network.
    return Report().collect(_graph(model, source, fact, _frozen(graph, model), float8))


def _frozen(graph: ModelGraph, model: ModelSpec) -> frozenset[str]:
    """Returns all names of the parameters that `freeze` matches."""
    return frozenset(n for first_name in graph.names.matching(model.freeze) for n in graph.names.all_names(first_name))


def _graph(
    model: ModelSpec, source: SourceFacts, fact: TensorFact, frozen: frozenset[str], float8: Fp8 | None
) -> Findings[ModelGraph | None]:
    """Returns the graph of a network with these parameters frozen; None if it yields an error."""
    network = model.network
    assert not isinstance(network, s.PythonNetwork | s.TransformersNetwork)
    surroundings = Surroundings(
        source=source,
        network=network if isinstance(network, Call) else None,
        frozen=frozen,
        float8=float8,
        adapter=model.adapter,
    )
    expansion = Expansion(layers=())
    try:
        if isinstance(network, Call):
            expansion = expand(network, source)
            surroundings.initialise = expansion.initialise
            output = _run_named(expansion.layers, entry(fact), surroundings)
        else:
            output = _run_list(network, entry(fact), surroundings)
            expansion = Expansion(layers=(), ties=_ties(surroundings))
    except LayerInputError as misfit:
        yield misfit.diagnostic
        return None
    if not surroundings.inits:
        yield Diagnostic(
            "E0217",
            "the network has no parameters: there is nothing to train",
            network.span if isinstance(network, Call) else model.value_span("network"),
            help="add a layer that learns, such as `linear(10)`",
        )
        return None
    if not (yield from passes(check_output(model, surroundings.nodes[-1], output, source, surroundings.suspects))):
        return None
    yield from surroundings.warnings
    stored_names = {base_name(init.parameter): init.parameter for init in surroundings.inits}
    tie_pairs = tuple((stored_names[name], stored_names[whose]) for name, whose in expansion.ties)
    ties = dict(tie_pairs)
    nodes = [_tied(node, ties) for node in surroundings.nodes] if ties else surroundings.nodes
    return ModelGraph(
        layers=tuple(nodes),
        root=ModuleStep(name="", kind="Sequential", children=_tree(surroundings.steps)),
        inits=tuple(init for init in surroundings.inits if init.parameter not in ties),
        ties=tie_pairs,
        input=fact,
        output=output.fact,
        batch_norm=bool(surroundings.batch_norm_sync),
        unsynced_batch_norm=False in surroundings.batch_norm_sync,
        batch_norm_values=surroundings.batch_norm_values,
        noise=surroundings.noise,
        adapted=model.adapter is not None,
        parameters=sum(parameter.count for node in nodes for parameter in node.parameters),
    )


def share_out(
    graph: ModelGraph,
    model: ModelSpec,
    source: SourceFacts,
    styles: Sequence[tuple[str, TensorStyle]],
    ranks: int,
    pieces: int,
    *,
    experts: int = 1,
    skew: float | None = None,
    on_cpu: bool,
    float8: Fp8 | None = None,
) -> ModelGraph:
    """Returns `graph` with its layers as on one rank: of a tensor axis, with `styles` by module, of a context axis of
    `pieces` ranks, and of an expert axis of `experts`: the busiest of these gets `skew` times its even share of rows.
    `on_cpu`: ranks exchange tensors over gloo.
    """
    if skew is not None:
        even = share_out(graph, model, source, styles, ranks, pieces, experts=experts, on_cpu=on_cpu, float8=float8)
        graph = replace(graph, even=even.shared)
    network, styles_by_layer = model.network, dict[str, list[TensorStyle]]()
    assert not isinstance(network, s.PythonNetwork | s.TransformersNetwork)
    for name, style in styles:
        styles_by_layer.setdefault(name, []).append(style)
    frozen = _frozen(graph, model)
    surroundings = Surroundings(
        source=source,
        ranks=ranks,
        styles=styles_by_layer,
        on_cpu=on_cpu,
        pieces=pieces,
        expert_ranks=experts,
        expert_skew=skew or 1.0,
        frozen=frozen,
        float8=float8,
        adapter=model.adapter,
    )
    try:
        if isinstance(network, Call):
            output = _run_named(expand(network, source).layers, entry(graph.input), surroundings)
        else:
            output = _run_list(network, entry(graph.input), surroundings)
    except LayerInputError:
        return graph  # sizes that cannot be shared: the rules report them
    ties = dict(graph.ties)
    return replace(graph, shared=tuple(_tied(node, ties) for node in surroundings.nodes), shared_output=output.shape)


def share_out_traced(
    graph: ModelGraph, plan: TensorPlan, ranks: int, pieces: int, experts: int = 1, skew: float | None = None
) -> ModelGraph:
    """Returns the same for a network that a function makes, by arithmetic: activations and working memory between a
    column and a row are divided by the ranks, and all else is whole. An upper bound. FLOPs come from tracing; the
    backward pass is taken to be divided like the forward pass. Sizes cover all pieces of a context axis together,
    because keys and values are gathered along it. `experts` are the ranks of an expert axis: the busiest gets
    `skew` times its even share of rows.
    """
    shape, calls = shape_on_a_rank(plan, ranks, experts), calls_by_layer(graph)
    shares = graph.traced.shares if graph.traced else None
    work = dict(shares.work if shares else ())
    kinds = {name: style for name, style in plan.styles if style in (TensorStyle.COLUMN, TensorStyle.ROW)}
    layers = []
    for layer in graph.layers:
        unshared = [
            call.output if kinds[call.module] is TensorStyle.COLUMN else call.input
            for call in calls.get(layer.name, ())
            if call.module in kinds
        ]
        less = sum(fact.numbers for fact in unshared) * 4 * (ranks - 1) // ranks
        parameters = tuple(replace(q, shape=shape(q)) for q in layer.parameters)
        count, all_numbers = sum(q.count for q in parameters), sum(q.count for q in layer.parameters)
        forward = work.get(layer.name, layer.forward_flops)
        kept_share, weights = max(1 / ranks, 1 - less / max(1, layer.float32.saved)), count / max(1, all_numbers)
        layers.append(
            replace(
                layer,
                float32=_scaled(layer.float32, kept_share, weights),
                autocast=_scaled(layer.autocast, kept_share, weights),
                parameters=parameters,
                forward_flops=forward,
                backward_flops=layer.backward_flops * forward // max(1, layer.forward_flops),
            )
        )
    if pieces > 1:
        gathers = gathers_by_layer(graph)
        layers = [with_gathers(layer, gathers.get(layer.name, ()), pieces) for layer in layers]
    output = graph.output.shape
    even = tuple(layers) if skew is not None else ()
    if skew is not None:
        layers = [with_more_rows(layer, min(skew, experts) - 1) for layer in layers]
    return replace(
        graph,
        shared=tuple(layers),
        even=even,
        shared_output=(*output[:-1], output[-1] // ranks) if plan.loss_parallel or plan.chunked_loss else output,
    )


def _scaled(memory: LayerMemory, kept_share: float, weights: float) -> LayerMemory:
    working = memory.working and _scaled_working(memory.working, kept_share, weights)
    return replace(
        memory, saved=int(kept_share * memory.saved), saved_input=int(kept_share * memory.saved_input), working=working
    )


def _scaled_working(working: Working, kept_share: float, weights: float) -> Working:
    return Working(
        forward=int(kept_share * working.forward),
        dropping=int(kept_share * working.dropping),
        copied=int(weights * working.copied),
        backward=_scaled_moments(working.backward, kept_share, weights),
        halves=working.halves and _scaled_halves(working.halves, kept_share, weights),
        cast=int(weights * working.cast),
        rearranged=int(weights * working.rearranged),
    )


def _scaled_halves(halves: Halves, kept_share: float, weights: float) -> Halves:
    return Halves(
        gradients=int(kept_share * halves.gradients),
        most=int(kept_share * halves.most),
        left=int(kept_share * halves.left),
        copied=int(weights * halves.copied),
        first=int(kept_share * halves.first),
        passed=int(kept_share * halves.passed),
        tail=int(kept_share * halves.tail),
        freed=int(kept_share * halves.freed),
        moments=_scaled_moments(halves.moments, kept_share, weights),
    )


def _scaled_moments(moments: tuple[WorkingSet, ...], kept_share: float, weights: float) -> tuple[WorkingSet, ...]:
    return tuple(
        WorkingSet(int(kept_share * m.bytes), *(int(weights * n) for n in (m.weights, m.copies, m.made)))
        for m in moments
    )


# -------------------------------------------------------------------------------------------------------- private


def _run_list(network: Sequence[Call], x: Value, surroundings: Surroundings) -> Value:
    numbers = count()
    return unroll(surroundings, network, x, lambda spec, y: record(surroundings, str(next(numbers)), spec, y))


def _ties(surroundings: Surroundings) -> tuple[tuple[str, str], ...]:
    """Returns the weight of the last layer, and the weight of the embedding that it shares. Raises LayerInputError."""
    tables = [node for node in surroundings.nodes if node.kind == "embedding"]
    for name, shape, spec in surroundings.tied:
        if name != f"{surroundings.nodes[-1].name}.weight" or len(tables) != 1:
            fault = "only the last layer can share the weight of an embedding"
            if len(tables) != 1:
                fault = f"the network has {plural(len(tables), 'embedding')}, and `tie` needs one"
            raise LayerInputError(
                Diagnostic(
                    code="E0226",
                    message=fault,
                    span=spec.value_span("tie"),
                    help="one `embedding` in the list, and `tie = true` in the last layer",
                )
            )
        table = tables[0].parameters[0]
        if table.shape != shape:
            raise LayerInputError(
                Diagnostic(
                    code="E0226",
                    message=f"a weight of {say(shape)} cannot be that of the embedding, {say(table.shape)}",
                    span=spec.value_span("tie"),
                    notes=(Note("the embedding", tables[0].span),),
                    help="as many features as tokens, and an input as wide as the embedding",
                )
            )
    return tuple((name, tables[0].parameters[0].name) for name, _, _ in surroundings.tied)


def _run_named(layers: Sequence[tuple[str, Call]], x: Value, surroundings: Surroundings) -> Value:
    for name, spec in layers[: LAYERS.most]:
        x = record(surroundings, name, spec, x)
    if len(layers) > LAYERS.most:
        raise LayerInputError(too_many(layers[0][1].span))
    return x


def _tree(steps: Sequence[tuple[str, ModuleStep]]) -> tuple[ModuleStep, ...]:
    """Returns modules under their full names as nested modules: `blocks.0` is the part `0` of a Sequential `blocks`."""
    tree: list[ModuleStep] = []
    for head, group in groupby(steps, key=lambda item: item[0].partition(".")[0]):
        parts = list(group)
        if parts[0][0] == head:
            tree.append(parts[0][1])
        else:
            inner = [(name.partition(".")[2], step) for name, step in parts]
            tree.append(ModuleStep(name=head, kind="Sequential", children=_tree(inner)))
    return tuple(tree)


def _tied(node: LayerNode, ties: dict[str, str]) -> LayerNode:
    if not any(parameter.name in ties for parameter in node.parameters):
        return node
    return replace(
        node,
        parameters=tuple(
            replace(parameter, tied_to=ties[parameter.name], init=None) if parameter.name in ties else parameter
            for parameter in node.parameters
        ),
    )
