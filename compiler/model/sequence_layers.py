"""The arithmetic of layers on sequences, and of layers made of layers.

A sequence is `(length, width)`. Attention is counted in full, causal or not, as torch's counter does.
"""

from __future__ import annotations

from itertools import count

from dslc.compiler.model.layers import wants_numbers
from dslc.compiler.model.tape import Tape, at, layer, unroll
from dslc.compiler.model.value import Value, say
from dslc.dsl.diagnostics import division
from dslc.dsl.language import layers as s
from dslc.dsl.language.registry import Call


@layer(s.Embedding)
def embedding(spec: s.Embedding, x: Value, t: Tape) -> Value:
    if not x.tokens:
        t.fail(
            "E0205",
            f"`embedding` looks up tokens, and real numbers come in: {x}",
            spec,
            help="use `linear` for numbers, or a source of tokens",
        )
    data = t.around.source.vocab
    vocab = spec.vocab if spec.vocab is not None else data
    if vocab is None:
        t.fail(
            "E0218",
            "the number of tokens cannot be taken from the data",
            spec,
            help="write it: `vocab = …`",
        )
    if data is not None and vocab < data:
        t.fail(
            "E0208",
            f"a vocabulary of {vocab} does not hold the data's {data} tokens",
            spec,
            "vocab",
            label=f"{vocab} < {data}",
            help=f"`vocab = {data}`, or leave it out",
        )
    t.module("Embedding", num_embeddings=vocab, embedding_dim=spec.width)
    t.parameter("weight", (vocab, spec.width), "normal", 0.0, 1.0)
    return x.new(*x.shape, spec.width, low=False, grad=True, sequence=True)


@layer(s.PositionalEmbedding)
def positional_embedding(spec: s.PositionalEmbedding, x: Value, t: Tape) -> Value:
    wants_sequence(spec, x, t)
    length, width = x.shape
    context = length if spec.context is None else spec.context
    if context < length:
        t.fail(
            "E0209",
            f"a context of {context} is shorter than the data's sequences of {length}",
            spec,
            "context",
            label=f"{context} < {length}",
            help=f"`context = {length}`, or shorter sequences: `context` of the source",
        )
    t.module(".PositionalEmbedding", context=context, width=width)
    t.parameter("weight", (context, width), "normal", 0.0, 0.02)
    return t.operation(x, gives=x.new(*x.shape, low=False, grad=True, sequence=True), adds=True)


def wants_sequence(spec: Call, x: Value, t: Tape) -> None:
    wants_numbers(spec, x, t)
    if len(x.shape) != 2:
        advice = "put `patch_embedding` before it" if len(x.shape) == 3 else ""
        t.fail("E0201", f"`{spec.word}` works on (length, width), and {x} comes in", spec, help=advice)


# -------------------------------------------------------------------------------------------------- attention


@layer(s.Attention, recomputable=True)
def attention(spec: s.Attention, x: Value, t: Tape) -> Value:
    wants_sequence(spec, x, t)
    _wants_heads(spec, x, t, spec.heads)
    width = x.shape[1]
    head = width // spec.heads
    t.module(".Attention", head_dim=head, causal=spec.causal)
    qkv = t.child("qkv", s.Linear(features=3 * width, bias=spec.bias, **at(spec)), x)
    length, own = qkv.shape[0], qkv.shape[1] // 3  # of this rank's heads
    # Scores and their use are one product each; each has two in the backward pass.
    t.forward += 4 * length * length * own
    t.backward += 8 * length * length * own
    # Splitting shares the memory; the gradients of the parts are made separately and then joined.
    parts = t.operation(qkv, gives=qkv.new(*qkv.shape), view=True)
    taken = [parts]
    if t.around.pieces > 1:
        taken.append(_of_all_pieces(parts, own, t))
        t.keep(taken[-1])
        t.masks += length * length // t.around.pieces if spec.causal else 0
    t.keep(qkv)
    result = t.computed(qkv.new(length, own, sequence=True))
    t.keep(result)
    rows = 4 * length * (own // head)  # the logarithm of each softmax's sum
    t.keep_bytes(rows, rows)
    t.operation(*taken, gives=result)
    t.float32.products += rows
    t.autocast.products += rows
    y = t.child("output", s.Linear(features=width, bias=spec.bias, **at(spec)), result)
    return t.child("dropout", s.Dropout(p=spec.dropout, **at(spec)), y) if spec.dropout else y


def _of_all_pieces(parts: Value, own: int, t: Tape) -> Value:
    """Returns keys and values of the whole sequence, for a rank of the context axis, which works on a piece: stacked,
    gathered, and put into the order of the positions. The sizes are those of all ranks' pieces together.
    """
    length, pieces = parts.shape[0], t.around.pieces
    together = t.operation(parts, gives=parts.new(length, 2 * own))
    gathered = t.operation(together, gives=parts.new(pieces * length, 2 * own))
    return t.operation(gathered, gives=parts.new(pieces * length, 2 * own))


def _wants_heads(spec: Call, x: Value, t: Tape, heads: int) -> None:
    width = x.shape[-1]
    if width % heads:
        close = sorted((h for h in range(1, width + 1) if width % h == 0), key=lambda h: abs(h - heads))[:2]
        t.fail(
            "E0207",
            f"{heads} heads cannot share a width of {width}",
            spec,
            "heads",
            label=division(width, heads),
            help=f"`heads = {' or '.join(map(str, sorted(close)))}`, or a width that is a multiple of {heads}",
        )


@layer(s.TransformerBlock, recomputable=True)
def transformer_block(spec: s.TransformerBlock, x: Value, t: Tape) -> Value:
    wants_sequence(spec, x, t)
    _wants_heads(spec, x, t, spec.heads)
    width, here = x.shape[-1], at(spec)
    t.module(".TransformerBlock")
    norm = s.LayerNorm(bias=spec.bias, **here)
    y = t.child("attention_norm", norm, x)
    y = t.child(
        "attention",
        s.Attention(heads=spec.heads, causal=spec.causal, bias=spec.bias, dropout=spec.dropout, **here),
        y,
    )
    x = t.operation(x, y, gives=added(x, y), adds=True)
    y = t.child("mlp_norm", norm, x)
    with t.inside("mlp"):
        y = t.child("up", s.Linear(features=spec.ratio * width, bias=spec.bias, **here), y)
        y = t.child("activation", s.GELU(**here), y)
        y = t.child("down", s.Linear(features=width, bias=spec.bias, **here), y)
        if spec.dropout:
            y = t.child("dropout", s.Dropout(p=spec.dropout, **here), y)
    return t.operation(x, y, gives=added(x, y), adds=True)


def added(a: Value, b: Value) -> Value:
    return a.new(*a.shape, low=a.low and b.low, grad=a.grad or b.grad, sequence=a.sequence or b.sequence)


# ----------------------------------------------------------------------------------------------------- recurrent


@layer(s.LSTM)
def lstm(spec: s.LSTM, x: Value, t: Tape) -> Value:
    """Four gates for each step, layer and direction; every step but the first passes a gradient to the state before."""
    wants_sequence(spec, x, t)
    length, directions, width = x.shape[0], 2 if spec.bidirectional else 1, spec.width
    t.module(
        ".LSTM",
        input_size=x.shape[1],
        hidden_size=width,
        num_layers=spec.layers,
        bias=spec.bias,
        bidirectional=spec.bidirectional,
    )
    bound = width**-0.5
    for number in range(spec.layers):
        inputs = x.shape[1]
        for direction in range(directions):
            end = f"_l{number}{'_reverse' if direction else ''}"
            t.parameter(f"weight_ih{end}", (4 * width, inputs), "uniform", -bound, bound)
            t.parameter(f"weight_hh{end}", (4 * width, width), "uniform", -bound, bound)
            if spec.bias:
                t.parameter(f"bias_ih{end}", (4 * width,), "uniform", -bound, bound)
                t.parameter(f"bias_hh{end}", (4 * width,), "uniform", -bound, bound)
        of_input, of_state = 8 * length * width * inputs * directions, 8 * length * width * width * directions
        t.forward += of_input + of_state
        t.backward += of_input * (2 if x.grad else 1) + of_state + of_state * (length - 1) // length
        t.keep(t.cast(x) if number else t.cast(x).new(*x.shape, low=True))  # the input step by step: a copy at first
        y = x.new(length, directions * width, low=True, grad=True, sequence=True)
        for _ in range(directions):
            _keep_states(length, inputs, width, t)
        x = y
    return x.new(*x.shape)


def _keep_states(length: int, inputs: int, width: int, t: Tape) -> None:
    """Records the tensors that oneDNN's kernel keeps for one direction: results, first and last states, and its
    workspace.

    The workspace holds four gates for each step, and states and their gradients in rows as wide as the wider of input
    and state; the padding of its rows is left out.
    """
    results, wide = length * width + 4 * width, max(inputs, width)
    t.keep_bytes(
        4 * (results + 4 * length * width) + (length + 1) * (24 * wide + 20 * width),
        2 * (results + 4 * length * width) + (length + 1) * (21 * wide + 15 * width),
    )


@layer(s.LastStep)
def last_step(spec: s.LastStep, x: Value, t: Tape) -> Value:
    wants_sequence(spec, x, t)
    t.module(".LastStep")
    length, width = x.shape
    return x.view(width) if length == 1 else x.new(width, sequence=False)


@layer(s.MeanSteps)
def mean_steps(spec: s.MeanSteps, x: Value, t: Tape) -> Value:
    wants_sequence(spec, x, t)
    t.module(".MeanSteps")
    return x.new(x.shape[1], sequence=False)


@layer(s.PatchEmbedding)
def patch_embedding(spec: s.PatchEmbedding, x: Value, t: Tape) -> Value:
    wants_numbers(spec, x, t)
    if len(x.shape) != 3:
        t.fail("E0201", f"`patch_embedding` works on (channels, height, width), and {x} comes in", spec)
    _, height, width = x.shape
    if height % spec.patch or width % spec.patch:
        sides = [p for p in range(1, min(height, width) + 1) if height % p == 0 and width % p == 0]
        t.fail(
            "E0213",
            f"patches of {spec.patch} x {spec.patch} do not cover {x}",
            spec,
            "patch",
            help=f"a side that divides both: {', '.join(map(str, sides))}",
        )
    patches = (height // spec.patch) * (width // spec.patch)
    t.module(".PatchEmbedding", patches=patches, width=spec.width)
    t.parameter("position", (patches, spec.width), "normal", 0.0, 0.02)
    projection = s.Conv2d(channels=spec.width, kernel=spec.patch, stride=spec.patch, **at(spec))
    images = t.child("projection", projection, x)
    in_order = t.operation(images, gives=images.new(patches, spec.width, sequence=True))
    return t.operation(in_order, gives=in_order.new(patches, spec.width, low=False), adds=True)


# -------------------------------------------------------------------------------------------------- composition


@layer(s.Residual, recomputable=True)
def residual(spec: s.Residual, x: Value, t: Tape) -> Value:
    t.module(".Residual")
    beside = _branch("layers", spec.layers, x, t)
    straight = _branch("shortcut", spec.shortcut, x, t) if spec.shortcut else x
    if beside.shape != straight.shape:
        way = "the output of the shortcut" if spec.shortcut else "the input"
        t.fail(
            "E0214",
            f"`residual` adds its layers' {say(beside.shape)} to {way}, {say(straight.shape)}",
            spec,
            "layers",
            help="give both one shape"
            if spec.shortcut
            else "keep the shape, or give a `shortcut = […]` that changes it",
        )
    wants_numbers(spec, straight, t)
    return t.operation(straight, beside, gives=added(beside, straight), adds=True)


def _branch(name: str, layers: tuple[Call, ...], x: Value, t: Tape) -> Value:
    numbers = count()
    with t.inside(name):
        return unroll(t.around, layers, x, lambda spec, y: t.child(str(next(numbers)), spec, y))
