"""The arithmetic of layers on vectors and images: dense, convolution, pooling, norms, activations.

One small function for each layer of `dsl/language/layers.py`: its input, its parameters with torch's own initial
values, its products, and the activations that it keeps for the backward pass. Attention is in attention_layers.py,
other sequences and compositions in sequence_layers.py.
"""

from __future__ import annotations

from dataclasses import replace
from math import prod, sqrt
from typing import TypeAlias

from dslc.compiler.ir.parameter_names import BASE
from dslc.compiler.model.replay import Store
from dslc.compiler.model.tape import Tape, argument_spans, layer
from dslc.compiler.model.value import Value, describe, say
from dslc.dsl.diagnostics import Note, division
from dslc.dsl.language import layers as s
from dslc.dsl.language.registry import Call
from dslc.dsl.remedy import remedy, replace_text, set_argument
from dslc.dsl.words import plural

AnyConv: TypeAlias = s.Conv1d | s.Conv2d
AnyPool: TypeAlias = s.MaxPool1d | s.MaxPool2d | s.AvgPool1d | s.AvgPool2d


def wants_numbers(spec: Call, x: Value, t: Tape) -> None:
    if x.tokens:
        t.fail(
            "E0206",
            f"`{spec.word}` works on real numbers, and {x} come in",
            spec,
            help="put `embedding(width = …)` before it",
        )


def wants_sequence(spec: Call, x: Value, t: Tape) -> None:
    wants_numbers(spec, x, t)
    if len(x.shape) != 2:
        advice = "put `patch_embedding` before it" if len(x.shape) == 3 else ""
        t.fail("E0201", f"`{spec.word}` works on (length, width), and {x} comes in", spec, help=advice)


def added(a: Value, b: Value) -> Value:
    return a.new(*a.shape, low=a.low and b.low, grad=a.grad or b.grad, sequence=a.sequence or b.sequence)


# ------------------------------------------------------------------------------------------- dense and convolution


@layer(s.Linear)
def linear(spec: s.Linear, x: Value, t: Tape) -> Value:
    wants_numbers(spec, x, t)
    if not x.shape:
        t.fail("E0201", "`linear` works on the last dim, and one number without dims comes in", spec)
    if len(x.shape) == 3 and not x.sequence:
        t.around.suspects.append(Note(f"`linear` works on the last dim of {x} here", spec.span))
        t.warn(
            "W0201",
            f"`linear` maps only the last dim of {x}, each row separately",
            spec,
            help="put `flatten()` before it to map the whole image",
        )
    width, features = x.shape[-1], spec.features
    names = t.around.adapter_names
    if names is not None and names.has_adapter(t.module_name):
        return _linear_with_adapter(spec, x, t)
    t.module("Linear", in_features=width, out_features=features, bias=spec.bias)
    bound = 1 / sqrt(max(1, width))
    t.parameter("weight", (features, width), "uniform", -bound, bound)
    if spec.tie:
        t.around.tied.append((f"{t.name}.weight", t.parameters[-1].shape, spec))
    if spec.bias:
        t.parameter("bias", (features,), "uniform", -bound, bound)
    t.multiplies = True
    return t.product(x, x.count * features, *x.shape[:-1], features)


def _linear_with_adapter(spec: s.Linear, x: Value, t: Tape) -> Value:
    """A frozen dense layer, and the product of two small ones (runtime/model/modules.py)."""
    adapter, spans = t.around.adapter, argument_spans(spec)
    assert adapter is not None
    t.module(".AdaptedLinear", in_features=x.shape[-1], out_features=spec.features, scale=adapter.scale)
    y, z = t.child(BASE, spec, x), x
    if adapter.dropout:
        with t.inside("lora_dropout"):
            z = t.child("default", s.Dropout(p=adapter.dropout, **spans), z)
    for part, features in (("lora_A", adapter.rank), ("lora_B", spec.features)):
        with t.inside(part):
            z = t.child("default", s.Linear(features=features, bias=False, **spans), z)
    z = t.operation(z, gives=z.new(*z.shape, sequence=z.sequence))
    t.operations += 1
    return t.operation(y, z, gives=added(y, z), adds=True)


@layer(s.Conv1d, s.Conv2d)
def convolution(spec: AnyConv, x: Value, t: Tape) -> Value:
    wants_numbers(spec, x, t)
    dims = 1 if isinstance(spec, s.Conv1d) else 2
    wants_channels(spec, x, t, dims)
    channels = x.shape[0]
    for argument, count, what in (("groups", channels, "at the input"), ("channels", spec.channels, "at the output")):
        if count % spec.groups:
            t.fail(
                "E0204",
                f"{plural(count, 'channel')} {what}, which {spec.groups} groups cannot share",
                spec,
                argument if spec.is_set(argument) else "groups",
                label=division(count, spec.groups),
                help="both numbers of channels must be multiples of `groups`",
            )
    size = windows(spec, x, t, spec.stride)
    t.module(
        f"Conv{dims}d",
        in_channels=channels,
        out_channels=spec.channels,
        kernel_size=spec.kernel,
        stride=spec.stride,
        padding=spec.padding,
        groups=spec.groups,
        bias=spec.bias,
    )
    weight = (spec.channels, channels // spec.groups, *[spec.kernel] * dims)
    bound = 1 / sqrt(prod(weight[1:]))
    t.parameter("weight", weight, "uniform", -bound, bound)
    if spec.bias:
        t.parameter("bias", (spec.channels,), "uniform", -bound, bound)
    # Unlike a product, torch's convolution keeps its input for the gradient of the input alone, too.
    keeps_input = x.grad or t.trains("weight")
    return t.product(x, prod(size) * prod(weight), spec.channels, *size, keeps_input=keeps_input)


def wants_channels(spec: Call, x: Value, t: Tape, dims: int) -> None:
    """Refuses an input that is not (channels, …) with `dims` further dims."""
    shape_text = ("(channels, length)", "(channels, height, width)")[dims - 1]
    if len(x.shape) != dims + 1:
        t.fail(
            "E0201",
            f"`{spec.word}` works on {shape_text}, and {x} comes in",
            spec,
            help=_advice(len(x.shape), spec.word, dims),
        )
    if x.sequence:
        t.warn(
            "W0203",
            f"`{spec.word}` works on {shape_text}, and takes the {plural(x.shape[0], 'position')} of {x} for channels",
            spec,
        )


def _advice(rank: int, word: str, dims: int) -> str:
    if rank == 1:
        return f"`{word}` goes before `flatten()` and dense layers"
    if rank == 3 and dims == 1:
        return f"use `{word[:-2]}2d`"
    if rank == 2 and dims == 2:
        return f"use `{word[:-2]}1d`"
    return ""


def _in_torchs_order(spec: AnyConv | AnyPool, x: Value) -> str:
    """Returns the likely meaning of `conv2d(1, 32, 3)`, as torch's first argument is the input channels; "" if it
    cannot be that.
    """
    if not isinstance(spec, AnyConv) or spec.channels != x.shape[0] or spec.stride > min(x.shape[1:]):
        return ""
    by_place = [name for name, place in spec.places.items() if place.name == place.value]
    if by_place[:3] != ["channels", "kernel", "stride"]:
        return ""
    arguments = ", ".join(str(getattr(spec, name)) for name in by_place[1:])
    call_text = f"{spec.word}({arguments})"
    return remedy("the number of input channels is known: write ", replace_text(spec.span, call_text))


def windows(spec: AnyConv | AnyPool, x: Value, t: Tape, stride: int) -> tuple[int, ...]:
    """Returns the number of positions of a kernel in each dim; reports an error if there is none."""
    padded = [n + 2 * spec.padding for n in x.shape[1:]]
    if min(padded) < spec.kernel:
        what = f"{x}, with padding {say((x.shape[0], *padded))}" if spec.padding else str(x)
        t.fail(
            "E0202",
            f"a kernel of {spec.kernel} does not fit into {what}",
            spec,
            "kernel",
            label=f"{spec.kernel} > {min(padded)}",
            help=_in_torchs_order(spec, x) or "a smaller kernel, more padding, or less pooling before it",
        )
    return tuple((n - spec.kernel) // stride + 1 for n in padded)


# ------------------------------------------------------------------------------------------------------- pooling


@layer(s.MaxPool1d, s.MaxPool2d, s.AvgPool1d, s.AvgPool2d)
def pool(spec: AnyPool, x: Value, t: Tape) -> Value:
    wants_numbers(spec, x, t)
    dims = 1 if isinstance(spec, s.MaxPool1d | s.AvgPool1d) else 2
    wants_channels(spec, x, t, dims)
    if 2 * spec.padding > spec.kernel:
        t.fail(
            "E0203",
            f"padding of {spec.padding} is more than half of the window of {spec.kernel}",
            spec,
            "padding",
            help=remedy("at most ", set_argument(spec.span, "padding", spec.kernel // 2, f"{spec.kernel // 2}")),
        )
    stride = spec.kernel if spec.stride is None else spec.stride
    size = windows(spec, x, t, stride)
    largest = isinstance(spec, s.MaxPool1d | s.MaxPool2d)
    t.module(f"{'Max' if largest else 'Avg'}Pool{dims}d", kernel_size=spec.kernel, stride=stride, padding=spec.padding)
    y = x.new(x.shape[0], *size)
    if x.grad:
        t.keep(x)
        if largest:
            t.keep_bytes(8 * y.count, 8 * y.count)  # the indices of the maxima
    return replace(y, pooled=x.count) if largest and dims == 2 and prod(size) > 1 else y


@layer(s.AdaptiveAvgPool1d, s.AdaptiveAvgPool2d, s.AdaptiveMaxPool2d)
def adaptive_pool(spec: s.AdaptiveAvgPool1d | s.AdaptiveAvgPool2d | s.AdaptiveMaxPool2d, x: Value, t: Tape) -> Value:
    wants_numbers(spec, x, t)
    dims = 1 if isinstance(spec, s.AdaptiveAvgPool1d) else 2
    wants_channels(spec, x, t, dims)
    largest = isinstance(spec, s.AdaptiveMaxPool2d)
    t.module(f"Adaptive{'Max' if largest else 'Avg'}Pool{dims}d", output_size=spec.size)
    y = x.new(x.shape[0], *[spec.size] * dims)
    if x.grad and (largest or spec.size > 1):  # one window is a mean, which keeps nothing
        t.keep(x)
        if largest:
            t.keep_bytes(8 * y.count, 8 * y.count)
    return y


@layer(s.Flatten)
def flatten(spec: s.Flatten, x: Value, t: Tape) -> Value:
    t.module("Flatten")
    return x.view(x.count)


# ------------------------------------------------------------------------------------ normalisation and activation


@layer(s.BatchNorm)
def batch_norm(spec: s.BatchNorm, x: Value, t: Tape) -> Value:
    wants_numbers(spec, x, t)
    if x.sequence and len(x.shape) == 2:
        t.fail(
            "E0219",
            f"`batch_norm` normalises channels, and the first dim of {x} is positions",
            spec,
            help="use `layer_norm()` on sequences",
        )
    if not 1 <= len(x.shape) <= 3:
        t.fail(
            "E0201",
            f"`batch_norm` works on (channels), (channels, length) or (channels, height, width), and {x} comes in",
            spec,
        )
    channels = x.shape[0]
    kind = ".BatchNorm2d" if len(x.shape) == 3 else ".BatchNorm1d"
    t.module(kind, num_features=channels, eps=spec.eps, momentum=spec.momentum, sync=spec.sync)
    t.parameter("weight", (channels,), "constant", 1.0)
    t.parameter("bias", (channels,), "constant", 0.0)
    t.buffer("running_mean", (channels,), "float32")
    t.buffer("running_var", (channels,), "float32")
    t.buffer("num_batches_tracked", (), "int64")
    surroundings, values = t.around, prod(x.shape[1:])
    surroundings.batch_norm_sync.add(spec.sync)
    surroundings.batch_norm_values = min(values, surroundings.batch_norm_values or values)
    if x.grad or t.trains():
        t.keep(x)
    return x.new(*x.shape, grad=x.grad or t.trains())


@layer(s.LayerNorm)
def layer_norm(spec: s.LayerNorm, x: Value, t: Tape) -> Value:
    wants_numbers(spec, x, t)
    _wants_dim(spec, x, t)
    width = x.shape[-1]
    t.module("LayerNorm", normalized_shape=width, eps=spec.eps, bias=spec.bias)
    t.parameter("weight", (width,), "constant", 1.0)
    if spec.bias:
        t.parameter("bias", (width,), "constant", 0.0)
    rows = x.count // width
    if x.grad or t.trains():
        t.keep(x)
        t.keep_bytes(8 * rows, 8 * rows)  # mean and deviation of each row
    return x.new(*x.shape, grad=x.grad or t.trains())


@layer(s.RMSNorm)
def rms_norm(spec: s.RMSNorm, x: Value, t: Tape) -> Value:
    wants_numbers(spec, x, t)
    _wants_dim(spec, x, t)
    width = x.shape[-1]
    t.module(".RMSNorm", normalized_shape=width, eps=spec.eps)
    t.parameter("weight", (width,), "constant", 1.0)
    rows = 4 * (x.count // width)
    if x.grad:
        in_float32 = replace(x, low=False, autocast=Store(4 * x.count)) if x.low else x
        t.keep(in_float32)
        t.keep_bytes(rows, rows)
    if t.trains():
        t.keep_bytes(4 * x.count, 4 * x.count)  # the normalised input, for the weight
    return x.new(*x.shape, grad=x.grad or t.trains())


def _wants_dim(spec: Call, x: Value, t: Tape) -> None:
    if not x.shape:
        t.fail("E0201", f"`{spec.word}` works on the last dim, and {describe(x.shape)} comes in", spec)


ACTIVATIONS: dict[str, type[Call]] = {
    "relu": s.ReLU,
    "gelu": s.GELU,
    "silu": s.SiLU,
    "tanh": s.Tanh,
    "sigmoid": s.Sigmoid,
    "leaky_relu": s.LeakyReLU,
    "elu": s.ELU,
}


def activation_of(name: str, enclosing_call: Call) -> Call:
    """Returns the activation of this name, at the place of the layer or network `enclosing_call`."""
    if name == "gelu_tanh":
        return s.GELU(approximate="tanh", **argument_spans(enclosing_call))
    return ACTIVATIONS[name](**argument_spans(enclosing_call))


def _activation(spec: Call, x: Value, t: Tape, kind: str, *, result: bool = False, **arguments: object) -> Value:
    wants_numbers(spec, x, t)
    t.module(kind, **arguments)
    y = x.new(*x.shape)
    if x.grad:
        t.keep(y if result else x)
    return y


@layer(s.ReLU)
def relu(spec: s.ReLU, x: Value, t: Tape) -> Value:
    return _activation(spec, x, t, "ReLU", result=True)


@layer(s.GELU)
def gelu(spec: s.GELU, x: Value, t: Tape) -> Value:
    return _activation(spec, x, t, "GELU", approximate=spec.approximate)


@layer(s.SiLU)
def silu(spec: s.SiLU, x: Value, t: Tape) -> Value:
    return _activation(spec, x, t, "SiLU")


@layer(s.Tanh)
def tanh(spec: s.Tanh, x: Value, t: Tape) -> Value:
    return _activation(spec, x, t, "Tanh", result=True)


@layer(s.Sigmoid)
def sigmoid(spec: s.Sigmoid, x: Value, t: Tape) -> Value:
    return _activation(spec, x, t, "Sigmoid", result=True)


@layer(s.LeakyReLU)
def leaky_relu(spec: s.LeakyReLU, x: Value, t: Tape) -> Value:
    return _activation(spec, x, t, "LeakyReLU", negative_slope=spec.slope)


@layer(s.ELU)
def elu(spec: s.ELU, x: Value, t: Tape) -> Value:
    return _activation(spec, x, t, "ELU", alpha=spec.alpha)


@layer(s.Dropout)
def dropout(spec: s.Dropout, x: Value, t: Tape) -> Value:
    wants_numbers(spec, x, t)
    t.module("Dropout", p=spec.p)
    if spec.p == 0:
        return x
    t.around.noise = True
    y = x.new(*x.shape)
    if x.grad:
        t.keep(x.new(*x.shape))  # the mask, as numbers of x's kind
    return y
