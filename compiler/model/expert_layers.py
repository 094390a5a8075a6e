"""The arithmetic of mixtures of experts: the router, the experts' grouped products, and the layer made of them.

Each token takes `top_k` rows, whatever experts it goes to: on ranks that hold all experts, memory and FLOPs of a layer
do not depend on the routing. The axis of experts changes that (compiler/placement). torch's FLOP counter leaves grouped
products out, and they are counted here like other products.
"""

from __future__ import annotations

from dataclasses import replace
from math import ceil, sqrt

from dslc.compiler.ir.nodes import LayerNode
from dslc.compiler.ir.parameter_names import BASE, FIRST, SECOND, is_of_adapter
from dslc.compiler.ir.tensor_styles import TensorStyle
from dslc.compiler.model.layers import added, wants_numbers
from dslc.compiler.model.pieces import with_more_bytes
from dslc.compiler.model.tape import Tape, argument_spans, layer
from dslc.compiler.model.tensor_tape import sum_of_experts, tokens_of_experts
from dslc.compiler.model.value import Value
from dslc.compiler.placement.tensor_plan import EXPERT_WIDTH as WIDTH_STEP
from dslc.dsl.language import layers as s
from dslc.dsl.language.registry import Call
from dslc.dsl.record import record
from dslc.dsl.remedy import join_remedies, remedy, set_argument

_INDEX = 8  # bytes of an int64


@record
class ExpertRouter(Call):
    """The router of a mixture: `top_k` experts of each token, and their weights."""

    word = "router"
    spec: s.MixtureOfExperts


@record
class GroupedExperts(Call):
    """The experts of a mixture, on rows that are sorted by expert."""

    word = "experts"
    spec: s.MixtureOfExperts


@layer(s.MixtureOfExperts, s.BlockExperts, recomputable=True)
def mixture_of_experts(spec: s.MixtureOfExperts, x: Value, t: Tape) -> Value:
    wants_numbers(spec, x, t)
    if not x.shape:
        t.fail("E0201", "`moe` works on the last dim, and one number without dims comes in", spec)
    _check(spec, x, t)
    width, spans = x.shape[-1], argument_spans(spec)
    t.module(".MixtureOfExperts")
    styles, ranks, on_cpu = t.styles, t.around.ranks, t.around.on_cpu
    has_pieces = TensorStyle.EXPERTS_OF_PIECES in styles
    tokens = _cast_tokens(x, t) if has_pieces else x
    if has_pieces:
        tokens = tokens_of_experts(styles, ranks, tokens, t.operation, on_cpu)
    pairs = tokens.count // width * spec.top_k
    weights = t.child("gate", ExpertRouter(spec=spec, **spans), tokens)
    operand = _cast_tokens(tokens, t)
    if styles and not has_pieces:
        operand = tokens_of_experts(styles, ranks, operand, t.operation, on_cpu)
    if styles:  # the gradients of the weights are summed
        weights = t.operation(weights, gives=weights.new(*weights.shape), view=True)
    if x.grad:
        t.keep_bytes(_INDEX * pairs, _INDEX * pairs)  # the place of each pair among the sorted rows
    rows = t.operation(operand, gives=operand.new(pairs, width, sequence=True))
    if spec.capacity is not None:
        rows = _kept_rows(rows, t)
    of_rank = replace(spec, hidden=spec.hidden // ranks) if styles else spec
    arrived = _arrived_rows(rows, spec, t)
    results = t.child("experts", GroupedExperts(spec=of_rank, **spans), arrived)
    results = _returned_rows(results, rows, t)
    if results.grad:
        t.keep_bytes(_INDEX * pairs, _INDEX * pairs)  # the pair of each sorted row
    if spec.capacity is not None:  # zeros in the places of dropped rows
        results = t.operation(results, gives=results.new(pairs, width))
    results = t.operation(results, gives=results.new(pairs, width))
    y = sum_of_experts(styles, ranks, _weighted(weights, results, tokens, x, t), t.operation, on_cpu)
    if not spec.shared:
        return y
    z = t.child("shared_experts", s.GatedMLP(hidden=spec.shared * spec.hidden, **spans), x)
    return t.operation(y, z, gives=added(y, z), adds=True)


def _arrived_rows(rows: Value, spec: s.MixtureOfExperts, t: Tape) -> Value:
    """Returns the rows that a rank of an expert axis works on, sorted by expert: as many as it sends if the routing is
    even, and more at a stated skew.
    """
    if t.around.expert_ranks == 1:
        return rows
    count = ceil(rows.shape[0] * min(t.around.expert_skew, largest_skew(t.around.expert_ranks, spec)))
    arrived = t.operation(rows, gives=rows.new(count, rows.shape[1]))
    if rows.grad:
        t.keep_bytes(_INDEX * count, _INDEX * count)  # the place of each row among those that arrived
    return t.operation(arrived, gives=arrived.new(*arrived.shape), holds=(rows,))


def _returned_rows(results: Value, sent: Value, t: Tape) -> Value:
    """Returns the results of the rows that this rank sent."""
    if t.around.expert_ranks == 1:
        return results
    if results.grad:
        t.keep_bytes(_INDEX * results.shape[0], _INDEX * results.shape[0])  # the row of each that arrived
    results = t.operation(results, gives=results.new(*results.shape), holds=(sent,))
    return t.operation(results, gives=results.new(sent.shape[0], results.shape[1]), holds=(sent,))


def largest_skew(ranks: int, spec: s.MixtureOfExperts) -> float:
    """Returns the rows of the busiest rank of an expert axis over the even share, if all tokens choose its experts.

    A token sends a rank no more rows than the rank has experts.
    """
    return min(ranks, spec.experts / spec.top_k)


def with_more_rows(layer: LayerNode, share: float) -> LayerNode:
    """Returns a layer of a library's network whose experts work on more rows, by a share of those that it has."""
    stacks = {q.name: q for q in layer.parameters if q.experts}
    kept = most = flops = 0
    for part in layer.parts:
        down_proj = stacks.get(f"{part.name}.down_proj") if part.kind == "experts" else None
        if down_proj is None:
            continue
        rows, (width, hidden) = ceil(share * part.takes[0]), down_proj.shape[1:]
        kept += rows * (width + 4 * hidden)  # the rows, both halves of the first product, and what these give
        most = max(most, rows * (2 * width + 3 * hidden))
        flops += 6 * rows * width * hidden
    return replace(
        layer,
        float32=with_more_bytes(layer.float32, 4 * kept, 4 * most),
        autocast=with_more_bytes(layer.autocast, 2 * kept, 2 * most),
        forward_flops=layer.forward_flops + flops,
        backward_flops=layer.backward_flops + 2 * flops,
    )


def _kept_rows(rows: Value, t: Tape) -> Value:
    """Returns the rows that experts take, at most all: none is dropped if the routing is even."""
    if rows.grad:
        t.keep_bytes(_INDEX * rows.shape[0], _INDEX * rows.shape[0])  # the places of these rows
    return t.operation(rows, gives=rows.new(*rows.shape, sequence=True))


def _cast_tokens(x: Value, t: Tape) -> Value:
    operand = t.cast(x)
    return operand if operand.autocast is x.autocast else t.operation(x, gives=operand)


@layer(ExpertRouter)
def router(layer_spec: ExpertRouter, x: Value, t: Tape) -> Value:
    spec, width = layer_spec.spec, x.shape[-1]
    tokens, rate = x.count // width, spec.balance.rate if isinstance(spec.balance, s.BalanceBias) else None
    factor = spec.balance.factor if isinstance(spec.balance, s.BalanceLoss) else None
    t.module(
        ".Router",
        width=width,
        experts=spec.experts,
        top_k=spec.top_k,
        score=spec.score,
        normalize=spec.normalize,
        scale=spec.scale,
        rate=rate,
        factor=factor,
        capacity=spec.capacity,
    )
    bound = 1 / sqrt(width)
    t.parameter("weight", (spec.experts, width), "uniform", -bound, bound)
    if rate is not None:
        t.buffer("e_score_correction_bias", (spec.experts,), "float32")
    t.buffer("load", (spec.experts,), "int64", saved=False)
    if factor is not None:
        t.buffer("probability_sum", (spec.experts,), "float32", saved=False)
    if spec.capacity is not None:
        t.buffer("dropped_rows", (spec.experts,), "int64", saved=False)
    logits = t.product(x, x.count * spec.experts, tokens, spec.experts)
    logits = t.operation(t.cast(x), gives=logits)
    scores = logits.new(tokens, spec.experts, low=False)
    if scores.grad and (not spec.normalize or factor is not None):
        t.keep(scores)
    scores = t.operation(logits, gives=scores)
    weights = scores.new(tokens, spec.top_k)
    source = logits if spec.normalize else scores
    if scores.grad:
        t.keep(source)  # torch keeps all of what it gathers from
        t.keep_bytes(_INDEX * weights.count, _INDEX * weights.count)
    weights = t.operation(source, gives=weights)
    if spec.normalize:
        normalized = weights.new(*weights.shape)
        numbers = 4 * weights.count
        if weights.grad and spec.score == "sigmoid":
            t.keep_bytes(2 * numbers, 2 * numbers)  # of the logarithm: its input and, on a CPU, a buffer of its kernel
            t.keep(normalized)
        elif weights.grad:
            t.keep_bytes(numbers, numbers)  # the weights, of which the runtime makes others that are nan where it must
        weights = t.operation(weights, gives=normalized)
    if spec.scale != 1.0:
        weights = t.operation(weights, gives=weights.new(*weights.shape))
    return weights if factor is None else _with_balance_loss(spec, weights, scores, t)


def _with_balance_loss(spec: s.MixtureOfExperts, weights: Value, scores: Value, t: Tape) -> Value:
    """Returns the weights, from which the gradient of the balance loss goes to the scores too."""
    probabilities = scores
    if spec.score == "sigmoid":
        probabilities = scores.new(*scores.shape)
        if scores.grad:
            t.keep_bytes(4 * scores.shape[0], 4 * scores.shape[0])  # each token's sum
        probabilities = t.operation(scores, gives=probabilities)
    return t.operation(weights, probabilities, gives=weights.new(*weights.shape), view=True)


@layer(GroupedExperts)
def grouped_experts(layer_spec: GroupedExperts, x: Value, t: Tape) -> Value:
    spec, (rows, width) = layer_spec.spec, x.shape
    experts, hidden = spec.experts, spec.hidden
    adapted, first_parameter, first_init = _adapted_stacks(t), len(t.parameters), len(t.around.inits)
    sizes = {"experts": experts, "width": width, "hidden": hidden}
    if adapted:
        assert t.around.adapter is not None
        adapter = {"stacks": adapted, "rank": t.around.adapter.rank, "scale": t.around.adapter.scale}
        t.module(".AdaptedExperts", **sizes, **adapter)
    else:
        t.module(".Experts", **sizes)
    inside = len(adapted) * f"{BASE}."
    bound = 1 / sqrt(width)
    t.parameter(f"{inside}gate_up_proj", (experts, 2 * hidden, width), "uniform", -bound, bound, experts=experts)
    both = t.product(x, rows * width * 2 * hidden, rows, 2 * hidden, weight=f"{inside}gate_up_proj")
    both = t.operation(x, gives=both)
    if "gate_up_proj" in adapted:
        both = _with_adapter(experts, x, both, (len(adapted) - 1) * f"{BASE}.", t)
    gate = t.operation(both, gives=both.new(rows, hidden), view=True)
    up = t.operation(both, gives=both.new(rows, hidden), view=True)
    if both.grad:
        t.keep(both)
    activated = t.operation(gate, gives=both.new(rows, hidden), holds=(both,))
    if both.grad:
        t.keep(activated)
    product = t.operation(activated, up, gives=both.new(rows, hidden), holds=(both,))
    bound = 1 / sqrt(hidden)
    t.parameter(f"{inside}down_proj", (experts, width, hidden), "uniform", -bound, bound, experts=experts)
    results = t.product(product, rows * hidden * width, rows, width, weight=f"{inside}down_proj")
    results = t.operation(product, gives=results, holds=(both,))
    if "down_proj" in adapted:
        results = _with_adapter(experts, product, results, "", t)
    if adapted:  # the order of the module's parameters: the experts' own are first
        t.parameters[first_parameter:] = sorted(t.parameters[first_parameter:], key=lambda q: is_of_adapter(q.name))
        own_inits = t.around.inits[first_init:]
        t.around.inits[first_init:] = sorted(own_inits, key=lambda init: is_of_adapter(init.parameter))
    return results


def _adapted_stacks(t: Tape) -> tuple[str, ...]:
    """Returns the stacks of this module of experts that have an adapter."""
    names = t.around.adapter_names
    return names.stacks_of(t.module_name) if names is not None else ()


def _with_adapter(experts: int, x: Value, y: Value, wrapper: str, t: Tape) -> Value:
    """Returns the results of rows with the change by the adapter, whose two matrices have all experts. The grouped
    product takes a rank that is a multiple of 8.
    """
    adapter = t.around.adapter
    assert adapter is not None
    (rows, inputs), outputs, rank = x.shape, y.shape[-1], -(-adapter.rank // WIDTH_STEP) * WIDTH_STEP
    first, second = f"{wrapper}{FIRST}.weight", f"{wrapper}{SECOND}.weight"
    bound = 1 / sqrt(inputs)
    t.parameter(first, (experts * adapter.rank, inputs), "uniform", -bound, bound)
    held = experts // t.around.expert_ranks
    padded = held * rank * inputs if x.grad and rank != adapter.rank else 0
    narrow = t.product(x, rows * inputs * rank, rows, rank, weight=first)
    narrow = t.operation(x, gives=narrow, rearranged=padded)
    t.parameter(second, (outputs, adapter.rank * experts), "constant", 0.0)
    change = t.product(narrow, rows * rank * outputs, rows, outputs, weight=second)
    change = t.operation(narrow, gives=change, rearranged=held * rank * outputs)  # its experts are the first dim there
    change = t.operation(change, gives=change.new(*change.shape))
    t.operations += 4
    return t.operation(y, change, gives=added(y, change), adds=True)


def _weighted(weights: Value, results: Value, tokens: Value, entered: Value, t: Tape) -> Value:
    """Returns the sum of each token's results, by its weights; the mixture's variables hold what has `entered`, and
    the tokens.
    """
    factors = t.cast(weights)
    if factors.autocast is not weights.autocast:
        factors = t.operation(weights, gives=factors)
    if weights.grad:
        t.keep(results)
    if results.grad:
        t.keep(factors)
    y = tokens.new(*tokens.shape, low=True, grad=weights.grad or results.grad)
    return t.operation(factors, results, gives=y, holds=(entered, tokens))


def _check(spec: s.MixtureOfExperts, x: Value, t: Tape) -> None:
    if spec.top_k > spec.experts:
        t.fail(
            "E0229",
            f"a token cannot go to {spec.top_k} of {spec.experts} experts",
            spec,
            "top_k",
            label=f"{spec.top_k} > {spec.experts}",
            help=remedy(set_argument(spec.span, "top_k", spec.experts), ", or more experts"),
        )
    if spec.hidden % WIDTH_STEP:
        near = [n for n in (spec.hidden // WIDTH_STEP * WIDTH_STEP, -(-spec.hidden // WIDTH_STEP) * WIDTH_STEP) if n]
        t.fail(
            "E0230",
            f"a grouped product needs widths that are multiples of {WIDTH_STEP}, and `hidden` is {spec.hidden}",
            spec,
            "hidden",
            help=remedy(join_remedies(" or ", [remedy(set_argument(spec.span, "hidden", n)) for n in near])),
        )
    if x.shape[-1] % WIDTH_STEP:
        t.fail(
            "E0230",
            f"a grouped product needs widths that are multiples of {WIDTH_STEP}, and {x} comes in",
            spec,
            help=f"a width that is a multiple of {WIDTH_STEP}",
        )
