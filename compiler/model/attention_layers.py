"""The arithmetic of attention, of gated networks, and of the blocks made of them.

A sequence is `(length, width)`. Attention is counted in full, causal or not, with a window or not, as torch's counter
does.
"""

from __future__ import annotations

from collections.abc import Sequence

from dslc.compiler.model.layers import activation_of, added, wants_numbers, wants_sequence
from dslc.compiler.model.operation_counts import LLAMA3_SCALING, ROTATION, WINDOW
from dslc.compiler.model.tape import Tape, argument_spans, layer
from dslc.compiler.model.value import Value
from dslc.compiler.placement.shares import divisors
from dslc.dsl.diagnostics import division
from dslc.dsl.language import layers as s
from dslc.dsl.language.registry import Call
from dslc.dsl.remedy import either_argument, join_edits, join_remedies, remedy, remove_at, set_argument


@layer(s.Attention, recomputable=True)
def attention(spec: s.Attention, x: Value, t: Tape) -> Value:
    wants_sequence(spec, x, t)
    if spec.window is not None and not spec.causal:
        t.fail(
            "E0224",
            "a `window` is of a position and those before it, and this attention is not causal",
            spec,
            "window",
            help=remedy(set_argument(spec.span, "causal", "true")),
        )
    if spec.separate:
        return _separate(spec, x, t)
    _wants_heads(spec, x, t, spec.heads)
    width = x.shape[1]
    head = width // spec.heads
    t.module(".Attention", head_dim=head, causal=spec.causal)
    qkv = t.child("qkv", s.Linear(features=3 * width, bias=spec.bias, **argument_spans(spec)), x)
    length, own_width = qkv.shape[0], qkv.shape[1] // 3  # of this rank's heads
    _count_products(length, own_width, t, backward=qkv.grad)
    # Splitting shares the memory; the gradients of the parts are made separately and then joined.
    parts = t.operation(qkv, gives=qkv.new(*qkv.shape), view=True)
    inputs = [parts]
    if t.around.pieces > 1:
        inputs.append(_of_all_pieces(parts, own_width, t))
        if qkv.grad:
            t.keep(inputs[-1])
        t.masks += length * length // t.around.pieces if spec.causal else 0
    if qkv.grad:
        t.keep(qkv)
    result = _attended(tuple(inputs), length, own_width, head, t)
    y = t.child("output", s.Linear(features=width, bias=spec.bias, **argument_spans(spec)), result)
    return t.child("dropout", s.Dropout(p=spec.dropout, **argument_spans(spec)), y) if spec.dropout else y


def _separate(spec: s.Attention, x: Value, t: Tape) -> Value:
    """Attention whose queries, keys and values have projections of their own, keys and values with fewer heads."""
    width, spans = x.shape[1], argument_spans(spec)
    head, kv_heads = _head_dim(spec, x, t), spec.kv_heads if spec.kv_heads is not None else spec.heads
    if spec.heads % kv_heads:
        t.fail(
            "E0222",
            f"{spec.heads} heads of queries cannot share {kv_heads} of keys and values",
            spec,
            "kv_heads",
            label=division(spec.heads, kv_heads),
            help=remedy(
                "a number that divides `heads`: ", either_argument(spec.span, "kv_heads", divisors(spec.heads), ", ")
            ),
        )
    _check_rotation(spec, head, t)
    arguments = {"rope_theta": spec.rope_theta, "rope_scaling": _scaling(spec.rope_scaling, spec, t)}
    t.module(
        ".GroupedAttention",
        head_dim=head,
        causal=spec.causal,
        **{name: value for name, value in (*arguments.items(), ("window", spec.window)) if value is not None},
    )
    q = t.child("q_proj", s.Linear(features=spec.heads * head, bias=spec.bias, **spans), x)
    k = t.child("k_proj", s.Linear(features=kv_heads * head, bias=spec.bias, **spans), x)
    v = t.child("v_proj", s.Linear(features=kv_heads * head, bias=spec.bias, **spans), x)
    length, own_width, key_width = q.shape[0], q.shape[1], k.shape[1]  # of this rank's heads
    if spec.qk_norm:
        norm = s.RMSNorm(eps=spec.norm_eps, **spans)
        q = t.child("q_norm", norm, q.view(length, own_width // head, head, sequence=True)).view(
            length, own_width, sequence=True
        )
        k = t.child("k_norm", norm, k.view(length, key_width // head, head, sequence=True)).view(
            length, key_width, sequence=True
        )
    if spec.rope_theta is not None:
        q, k = _rotated(q, t), _rotated(k, t)
        t.operations += ROTATION + (LLAMA3_SCALING if isinstance(spec.rope_scaling, s.Llama3Scaling) else 0)
        t.masks += length * head // t.around.pieces  # cosines and sines of the positions
    _count_products(length, own_width, t, backward=any(projection.grad for projection in (q, k, v)))
    if spec.window is not None and spec.window < length and t.around.pieces == 1:
        t.masks += length * length
        t.operations += WINDOW
    graded = any(projection.grad for projection in (q, k, v))
    if graded:
        t.keep(q)
    inputs = [q, k, v]
    if t.around.pieces > 1:
        keys_and_values = t.operation(k, v, gives=k.new(length, 2 * key_width, grad=k.grad or v.grad))
        inputs = [q, _of_all_pieces(keys_and_values, key_width, t, stacked=True)]
        t.masks += length * length // t.around.pieces if spec.causal else 0
    for projected in inputs[1:] if graded else ():
        t.keep(projected)
    result = _attended(inputs, length, own_width, head, t)
    y = t.child("o_proj", s.Linear(features=width, bias=spec.bias, **spans), result)
    return t.child("dropout", s.Dropout(p=spec.dropout, **spans), y) if spec.dropout else y


def _rotated(x: Value, t: Tape) -> Value:
    """Returns queries or keys turned by their positions: two halves, computed in float32 and joined."""
    halves = t.operation(x, gives=x.new(*x.shape, low=False))
    return t.operation(halves, gives=x.new(*x.shape))


def _count_products(length: int, own_width: int, t: Tape, *, backward: bool) -> None:
    """Counts scores and their use: one product each, with two in the backward pass."""
    t.forward += 4 * length * length * own_width
    t.backward += 8 * length * length * own_width * backward


def _attended(inputs: Sequence[Value], length: int, own_width: int, head: int, t: Tape) -> Value:
    """Returns the result of torch's attention, which keeps it and the logarithm of each softmax's sum."""
    graded = any(input_value.grad for input_value in inputs)
    result = t.computed(inputs[0].new(length, own_width, grad=graded, sequence=True))
    rows = 4 * length * (own_width // head)
    if graded:
        t.keep(result)
        t.keep_bytes(rows, rows)
    t.operation(*inputs, gives=result)
    t.float32.products += rows
    t.autocast.products += rows
    return result


def _of_all_pieces(parts: Value, own_width: int, t: Tape, *, stacked: bool = False) -> Value:
    """Returns keys and values of the whole sequence, for a rank of the context axis, which works on a piece. They are
    stacked, gathered, and put into the order of the positions. The sizes cover all ranks' pieces together.
    """
    length, pieces = parts.shape[0], t.around.pieces
    whole_parts = parts if stacked else t.operation(parts, gives=parts.new(length, 2 * own_width))
    gathered = t.operation(whole_parts, gives=parts.new(pieces * length, 2 * own_width))
    return t.operation(gathered, gives=parts.new(pieces * length, 2 * own_width))


def _wants_heads(spec: Call, x: Value, t: Tape, heads: int) -> None:
    width = x.shape[-1]
    if width % heads:
        close = sorted(divisors(width), key=lambda h: abs(h - heads))[:2]
        t.fail(
            "E0207",
            f"{heads} heads cannot share a width of {width}",
            spec,
            "heads",
            label=division(width, heads),
            help=remedy(
                join_remedies(" or ", [remedy(set_argument(spec.span, "heads", count)) for count in sorted(close)]),
                f", or a width that is a multiple of {heads}",
            ),
        )


def _head_dim(spec: s.Attention, x: Value, t: Tape) -> int:
    if spec.head_dim is not None:
        return spec.head_dim
    _wants_heads(spec, x, t, spec.heads)
    return x.shape[-1] // spec.heads


def _check_rotation(spec: s.Attention, head: int, t: Tape) -> None:
    """Refuses heads that cannot be halved, and warns of arguments without effect."""
    if spec.rope_theta is not None and head % 2:
        t.fail(
            "E0223",
            f"rotary positions turn pairs of numbers, and a head has {head}",
            spec,
            "head_dim" if spec.head_dim is not None else "heads",
            help="heads of an even width: `head_dim = …`",
        )
    if spec.rope_theta is None and spec.rope_scaling is not None:
        t.warn(
            "W0103",
            "`rope_scaling` has no effect: the attention has no rotary positions",
            spec,
            "rope_scaling",
            help="set `rope_theta`",
        )
    if not spec.qk_norm and spec.norm_eps != 1e-6:
        t.warn("W0103", "`norm_eps` has no effect: nothing is normalised", spec, "norm_eps",
               help=remedy(set_argument(spec.span, "qk_norm", "true")))  # fmt: skip


def _scaling(scaling: Call | None, spec: Call, t: Tape) -> tuple[str | float | int, ...] | None:
    """Returns the name of the scaling and its numbers, in the order of their declaration."""
    if scaling is None:
        return None
    if isinstance(scaling, s.LinearScaling):
        return ("linear", scaling.factor)
    assert isinstance(scaling, s.Llama3Scaling)
    low, high = scaling.low_freq_factor, scaling.high_freq_factor
    if low >= high:
        t.fail(
            "E0225",
            f"`low_freq_factor` is {low:g}, not below `high_freq_factor`, {high:g}",
            scaling,
            "low_freq_factor" if scaling.is_set("low_freq_factor") else "high_freq_factor",
            help=remedy(
                "as for Llama 3: ",
                join_edits(
                    set_argument(scaling.span, "low_freq_factor", 1),
                    " and ",
                    set_argument(scaling.span, "high_freq_factor", 4),
                ),
            ),
        )
    return ("llama3", scaling.factor, low, high, scaling.original_context)


# ------------------------------------------------------------------------------------------------- networks and blocks


@layer(s.GatedMLP, recomputable=True)
def gated_mlp(spec: s.GatedMLP, x: Value, t: Tape) -> Value:
    wants_numbers(spec, x, t)
    if not x.shape:
        t.fail("E0201", "`gated_mlp` works on the last dim, and one number without dims comes in", spec)
    width, spans = x.shape[-1], argument_spans(spec)
    t.module(".GatedMLP")
    up = s.Linear(features=spec.hidden, bias=spec.bias, **spans)
    gate = t.child("act_fn", activation_of(spec.activation, spec), t.child("gate_proj", up, x))
    y = t.child("up_proj", up, x)
    if y.grad:
        t.keep(gate)
    if gate.grad:
        t.keep(y)
    y = t.operation(gate, y, gives=y.new(*y.shape, grad=gate.grad or y.grad))
    return t.child("down_proj", s.Linear(features=width, bias=spec.bias, **spans), y)


@layer(s.TransformerBlock, recomputable=True)
def transformer_block(spec: s.TransformerBlock, x: Value, t: Tape) -> Value:
    wants_sequence(spec, x, t)
    _wants_heads(spec, x, t, spec.heads)
    width, spans = x.shape[-1], argument_spans(spec)
    t.module(".TransformerBlock")
    norm = s.LayerNorm(bias=spec.bias, **spans)
    y = t.child("attention_norm", norm, x)
    y = t.child(
        "attention",
        s.Attention(heads=spec.heads, causal=spec.causal, bias=spec.bias, dropout=spec.dropout, **spans),
        y,
    )
    x = t.operation(x, y, gives=added(x, y), adds=True)
    y = t.child("mlp_norm", norm, x)
    with t.inside("mlp"):
        y = t.child("up", s.Linear(features=spec.ratio * width, bias=spec.bias, **spans), y)
        y = t.child("activation", s.GELU(**spans), y)
        y = t.child("down", s.Linear(features=width, bias=spec.bias, **spans), y)
        if spec.dropout:
            y = t.child("dropout", s.Dropout(p=spec.dropout, **spans), y)
    return t.operation(x, y, gives=added(x, y), adds=True)


@layer(s.LlamaBlock, recomputable=True)
def llama_block(spec: s.LlamaBlock, x: Value, t: Tape) -> Value:
    wants_sequence(spec, x, t)
    spans = argument_spans(spec)
    t.module(".LlamaBlock")
    norm = s.RMSNorm(eps=spec.norm_eps, **spans)
    attention = s.Attention(
        heads=spec.heads,
        causal=True,
        bias=spec.bias,
        kv_heads=spec.kv_heads,
        head_dim=spec.head_dim,
        rope_theta=spec.rope_theta,
        rope_scaling=spec.rope_scaling,
        window=spec.window,
        qk_norm=spec.qk_norm,
        norm_eps=spec.norm_eps if spec.qk_norm else 1e-6,
        **spans,
    )
    y = t.child("self_attn", attention, t.child("input_layernorm", norm, x))
    x = t.operation(x, y, gives=added(x, y), adds=True)
    y = t.child("mlp", _inner_network(spec, t), t.child("post_attention_layernorm", norm, x))
    return t.operation(x, y, gives=added(x, y), adds=True)


def _inner_network(spec: s.LlamaBlock, t: Tape) -> Call:
    """Returns the experts of a block, or its gated network."""
    if spec.experts is not None:
        unused = [name for name in ("hidden", "mlp_bias") if spec.is_set(name)]
        for name in unused if not isinstance(t.around.network, s.Llama) else ():
            t.warn("W0103", f"`{name}` has no effect: the block has experts", spec, name,
                   help=remedy(remove_at(spec.value_span(name))))  # fmt: skip
        return spec.experts
    if spec.hidden is None:
        t.fail(
            "E0228",
            f"`{spec.word}` needs `hidden`, the width inside its gated network",
            t.around.network or spec,
            help="write it: `hidden = …`, or give the block `experts = moe(…)`",
        )
    return s.GatedMLP(
        hidden=spec.hidden, activation=spec.activation, bias=spec.mlp_bias, **argument_spans(spec, bias="mlp_bias")
    )
