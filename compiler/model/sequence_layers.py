"""The arithmetic of layers on sequences, and of layers made of layers; attention is in attention_layers.py.

A sequence is `(length, width)`.
"""

from __future__ import annotations

from itertools import count
from math import gcd

from dslc.compiler.model.layers import added, wants_numbers, wants_sequence
from dslc.compiler.model.tape import Tape, argument_spans, layer, unroll
from dslc.compiler.model.value import Value, say
from dslc.compiler.placement.shares import divisors
from dslc.dsl.language import layers as s
from dslc.dsl.language.registry import Call
from dslc.dsl.remedy import either_argument, remedy, remove_at, set_argument


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
            help=remedy(set_argument(spec.span, "vocab", data), ", or ", remove_at(spec.value_span("vocab"))),
        )
    t.module("Embedding", num_embeddings=vocab, embedding_dim=spec.width)
    t.parameter("weight", (vocab, spec.width), "normal", 0.0, 1.0)
    return x.new(*x.shape, spec.width, low=False, grad=t.trains(), sequence=True)


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
            help=remedy(set_argument(spec.span, "context", length), ", or shorter sequences: `context` of the source"),
        )
    t.module(".PositionalEmbedding", context=context, width=width)
    t.parameter("weight", (context, width), "normal", 0.0, 0.02)
    grad = x.grad or t.trains()
    return t.operation(x, gives=x.new(*x.shape, low=False, grad=grad, sequence=True), adds=True)


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
        grad = x.grad or t.trains()
        of_input, of_state = 8 * length * width * inputs * directions, 8 * length * width * width * directions
        t.forward += of_input + of_state
        if grad:
            t.backward += of_input * (2 if x.grad else 1) + of_state + of_state * (length - 1) // length
            t.keep(t.cast(x) if number else t.cast(x).new(*x.shape, low=True))  # input step by step: a copy at first
        y = x.new(length, directions * width, low=True, grad=grad, sequence=True)
        for _ in range(directions if grad else 0):
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
        sides = divisors(gcd(height, width))
        t.fail(
            "E0213",
            f"patches of {spec.patch} x {spec.patch} do not cover {x}",
            spec,
            "patch",
            help=remedy("a side that divides both: ", either_argument(spec.span, "patch", sides, ", ")),
        )
    patches = (height // spec.patch) * (width // spec.patch)
    t.module(".PatchEmbedding", patches=patches, width=spec.width)
    t.parameter("position", (patches, spec.width), "normal", 0.0, 0.02)
    projection = s.Conv2d(channels=spec.width, kernel=spec.patch, stride=spec.patch, **argument_spans(spec))
    images = t.child("projection", projection, x)
    in_order = t.operation(images, gives=images.new(patches, spec.width, sequence=True))
    grad = in_order.grad or t.trains("position")
    return t.operation(in_order, gives=in_order.new(patches, spec.width, low=False, grad=grad), adds=True)


# -------------------------------------------------------------------------------------------------- composition


@layer(s.Residual, recomputable=True)
def residual(spec: s.Residual, x: Value, t: Tape) -> Value:
    t.module(".Residual")
    branch = _branch("layers", spec.layers, x, t)
    straight = _branch("shortcut", spec.shortcut, x, t) if spec.shortcut else x
    if branch.shape != straight.shape:
        way = "the output of the shortcut" if spec.shortcut else "the input"
        t.fail(
            "E0214",
            f"`residual` adds its layers' {say(branch.shape)} to {way}, {say(straight.shape)}",
            spec,
            "layers",
            help="give both one shape"
            if spec.shortcut
            else "keep the shape, or give a `shortcut = […]` that changes it",
        )
    wants_numbers(spec, straight, t)
    return t.operation(straight, branch, gives=added(branch, straight), adds=True)


def _branch(name: str, layers: tuple[Call, ...], x: Value, t: Tape) -> Value:
    numbers = count()
    with t.inside(name):
        return unroll(t.around, layers, x, lambda spec, y: t.child(str(next(numbers)), spec, y))
