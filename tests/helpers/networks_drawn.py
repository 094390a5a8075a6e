"""Random networks that fit: hypothesis strategies for layer lists, and torch's own figures for a model."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any
from weakref import WeakSet

import torch
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.utils.flop_counter import FlopCounterMode, conv_flop_count, sdpa_flop_count

from dslc.compiler.ir.facts import SourceFacts
from dslc.compiler.ir.program import ModelStep
from dslc.compiler.ir.tensors import TensorFact
from dslc.compiler.model.model import ModelGraph, build
from dslc.dsl.diagnostics import Report
from dslc.dsl.language import calls as c
from dslc.dsl.language import layers as s
from dslc.dsl.language.blocks import ModelSpec
from dslc.dsl.language.registry import Call
from dslc.runtime.model.meta_model import build_model
from dslc.runtime.model.module_builder import skeleton

VOCAB = 11
Draw = Callable[[Any], Any]
Shape = tuple[int, ...]
Drawn = tuple[tuple[Call, ...], Shape, str]


def of(kind: type[Call], **arguments: Any) -> Call:
    return kind(**arguments)


def fact(*shape: int, dtype: Any = "float32") -> TensorFact:
    return TensorFact(shape=shape, dtype=dtype)


def tokens(length: int, vocab: int) -> SourceFacts:
    token = fact(length, dtype="int64")
    return SourceFacts(input=token, target=token, vocab=vocab)


def classes(count: int, *shape: int) -> SourceFacts:
    return SourceFacts(input=fact(*shape), target=fact(dtype="int64"), classes=count)


def model_of(network: Any, loss: Call) -> ModelSpec:
    return ModelSpec(network=network, loss=loss, weights=None, freeze=())


def built(network: Any, source: SourceFacts, loss: Call | None = None) -> ModelGraph:
    """Returns the graph of a network without mistakes; its output is not checked unless a loss is given."""
    report = Report()
    graph = report.collect(build(model_of(network, loss or of(c.PythonLoss, function="a:b")), source, None))
    assert graph is not None, [d.message for d in report]
    return graph


# ------------------------------------------------------------------------------------------------------- strategies

POINTWISE: tuple[Call, ...] = (
    of(s.ReLU),
    of(s.GELU),
    of(s.GELU, approximate="tanh"),
    of(s.SiLU),
    of(s.Tanh),
    of(s.Sigmoid),
    of(s.LeakyReLU),
    of(s.ELU),
    of(s.Dropout, p=0.2),
    of(s.Dropout, p=0.0),
)


@st.composite
def networks(draw: Draw) -> tuple[tuple[Call, ...], SourceFacts]:
    """Draws a list of one to seven layers with a parameter at the end, and data that it takes."""
    start = draw(st.sampled_from(["image", "signal", "sequence", "vector", "tokens"]))
    shape: Shape = {
        "image": (draw(st.integers(1, 4)), draw(st.integers(6, 14)), draw(st.integers(6, 14))),
        "signal": (draw(st.integers(1, 4)), draw(st.integers(6, 14))),
        "sequence": (draw(st.integers(2, 9)), draw(st.sampled_from([4, 8, 12]))),
        "vector": (draw(st.integers(2, 12)),),
        "tokens": (draw(st.integers(2, 9)),),
    }[start]
    source = tokens(shape[0], VOCAB) if start == "tokens" else SourceFacts(input=fact(*shape))
    layers: list[Call] = []
    # Of data alone, torch and we cannot know that (a, b) is a sequence: something that makes one comes first.
    if start == "tokens":
        width = draw(st.sampled_from([4, 8, 12]))
        layers.append(of(s.Embedding, width=width))
        shape, start = (*shape, width), "sequence"
    for _ in range(draw(st.integers(0, 6))):
        more, shape, start = draw(step(shape, start))
        layers += more
    return (*layers, of(s.Linear, features=draw(st.integers(1, 5)), bias=draw(st.booleans()))), source


@st.composite
def step(draw: Draw, shape: Shape, kind: str) -> Drawn:
    """Draws a layer (or some) that takes `shape`, with the shape and kind of its output."""
    choice = draw(st.integers(0, 9))
    if choice < 2:
        return (draw(st.sampled_from(POINTWISE)),), shape, kind
    if choice == 2:
        return (of(s.Repeat, count=draw(st.integers(1, 3)), layers=draw(body(shape, kind))),), shape, kind
    if choice == 3:
        return (of(s.Residual, layers=draw(body(shape, kind))),), shape, kind
    made: Drawn = draw({"image": image, "signal": signal, "sequence": sequence, "vector": vector}[kind](shape))
    return made


@st.composite
def body(draw: Draw, shape: Shape, kind: str) -> tuple[Call, ...]:
    """Draws layers that keep the shape of their input."""
    pointwise = draw(st.sampled_from(POINTWISE))
    if kind == "image":
        conv = of(s.Conv2d, channels=shape[0], kernel=3, padding=1, groups=shape[0] if draw(st.booleans()) else 1)
        return draw(st.sampled_from([(conv, of(s.BatchNorm), pointwise), (pointwise, conv), (of(s.BatchNorm),)]))
    if kind == "signal":
        return draw(st.sampled_from([(of(s.Conv1d, channels=shape[0], padding=1), pointwise), (of(s.BatchNorm),)]))
    if kind == "sequence":
        attention = of(s.Attention, heads=2, causal=draw(st.booleans()), dropout=draw(st.sampled_from([0.0, 0.1])))
        block = of(s.TransformerBlock, heads=4, ratio=2, bias=draw(st.booleans()), dropout=0.0)
        grouped = of(
            s.Attention,
            heads=4,
            causal=True,
            kv_heads=draw(st.sampled_from([1, 2, 4])),
            head_dim=draw(st.sampled_from([2, 6])),
            rope_theta=draw(st.sampled_from([None, 100.0])),
            window=draw(st.sampled_from([None, 1, 3])),
            qk_norm=draw(st.booleans()),
        )
        gated = of(s.GatedMLP, hidden=5, activation=draw(st.sampled_from(s.GATES)), bias=draw(st.booleans()))
        llama = of(s.LlamaBlock, heads=2, hidden=6, kv_heads=draw(st.integers(1, 2)), qk_norm=draw(st.booleans()))
        options = [(of(s.LayerNorm), attention), (block,), (of(s.RMSNorm), pointwise), (grouped,), (gated,), (llama,)]
        return draw(st.sampled_from(options))
    return (of(s.Linear, features=shape[0]), pointwise)


@st.composite
def image(draw: Draw, shape: Shape) -> Drawn:
    channels, height, width = shape
    side = min(height, width)
    options = ["conv", "norm", "flatten", "patch", "adaptive", "shortcut"] + (["pool"] * 2 if side >= 2 else [])
    match draw(st.sampled_from(options)):
        case "conv":
            padding = draw(st.integers(0, 2))
            kernel = draw(st.integers(1, min(4, side + 2 * padding)))
            stride, out = draw(st.integers(1, 2)), draw(st.sampled_from([4, 6, 8]))
            groups = draw(st.sampled_from([g for g in (1, 2) if channels % g == 0]))
            conv = of(
                s.Conv2d,
                channels=out,
                kernel=kernel,
                stride=stride,
                padding=padding,
                groups=groups,
                bias=draw(st.booleans()),
            )
            size = [(n + 2 * padding - kernel) // stride + 1 for n in (height, width)]
            return (conv,), (out, *size), "image"
        case "pool":
            kernel = draw(st.integers(2, min(3, side)))
            padding, stride = draw(st.integers(0, 1)), draw(st.sampled_from([None, 1, 2]))
            kind = draw(st.sampled_from([s.MaxPool2d, s.AvgPool2d]))
            size = [(n + 2 * padding - kernel) // (stride or kernel) + 1 for n in (height, width)]
            return (of(kind, kernel=kernel, stride=stride, padding=padding),), (channels, *size), "image"
        case "adaptive":
            size = draw(st.integers(1, 2))
            kind = draw(st.sampled_from([s.AdaptiveAvgPool2d, s.AdaptiveMaxPool2d]))
            return (of(kind, size=size),), (channels, size, size), "image"
        case "norm":
            return (of(s.BatchNorm, sync=draw(st.booleans())),), shape, "image"
        case "shortcut":
            layers = (of(s.Conv2d, channels=4, stride=2, padding=1), of(s.BatchNorm), of(s.ReLU))
            straight = (of(s.Conv2d, channels=4, kernel=1, stride=2),)
            size = [(n - 1) // 2 + 1 for n in (height, width)]
            return (of(s.Residual, layers=layers, shortcut=straight),), (4, *size), "image"
        case "patch":
            patch = next((p for p in (3, 2) if height % p == 0 and width % p == 0), 0)
            if patch:
                made = of(s.PatchEmbedding, patch=patch, width=8)
                return (made,), (height // patch * (width // patch), 8), "sequence"
    return (of(s.Flatten),), (channels * height * width,), "vector"


@st.composite
def signal(draw: Draw, shape: Shape) -> Drawn:
    channels, length = shape
    match draw(st.sampled_from(["conv", "norm", "flatten", "adaptive"] + (["pool"] * 2 if length >= 2 else []))):
        case "conv":
            padding, stride = draw(st.integers(0, 2)), draw(st.integers(1, 2))
            kernel = draw(st.integers(1, min(4, length + 2 * padding)))
            conv = of(s.Conv1d, channels=6, kernel=kernel, stride=stride, padding=padding, bias=draw(st.booleans()))
            return (conv,), (6, (length + 2 * padding - kernel) // stride + 1), "signal"
        case "pool":
            kind = draw(st.sampled_from([s.MaxPool1d, s.AvgPool1d]))
            return (of(kind, kernel=2),), (channels, length // 2), "signal"
        case "adaptive":
            size = draw(st.integers(1, 2))
            return (of(s.AdaptiveAvgPool1d, size=size),), (channels, size), "signal"
        case "norm":
            return (of(s.BatchNorm),), shape, "signal"
    return (of(s.Flatten),), (channels * length,), "vector"


@st.composite
def sequence(draw: Draw, shape: Shape) -> Drawn:
    length, width = shape
    match draw(st.sampled_from(["linear", "norm", "body", "position", "lstm", "last", "mean", "flatten"])):
        case "linear":
            return (of(s.Linear, features=4, bias=draw(st.booleans())),), (length, 4), "sequence"
        case "norm":
            kind = draw(st.sampled_from([s.LayerNorm, s.RMSNorm]))
            return (of(kind),), shape, "sequence"
        case "position":
            context = draw(st.sampled_from([None, length, length + 3]))
            return (of(s.PositionalEmbedding, context=context),), shape, "sequence"
        case "lstm":
            both = draw(st.booleans())
            made = of(s.LSTM, width=4, layers=draw(st.integers(1, 2)), bidirectional=both, bias=draw(st.booleans()))
            return (made,), (length, 8 if both else 4), "sequence"
        case "last":
            return (of(s.LastStep),), (width,), "vector"
        case "mean":
            return (of(s.MeanSteps),), (width,), "vector"
        case "flatten":
            return (of(s.Flatten),), (length * width,), "vector"
    return draw(body(shape, "sequence")), shape, "sequence"


@st.composite
def vector(draw: Draw, shape: Shape) -> Drawn:
    match draw(st.sampled_from(["linear", "norm", "layer_norm", "flatten"])):
        case "linear":
            out = draw(st.integers(1, 8))
            return (of(s.Linear, features=out),), (out,), "vector"
        case "norm":
            return (of(s.BatchNorm),), shape, "vector"
        case "layer_norm":
            return (of(s.LayerNorm),), shape, "vector"
    return (of(s.Flatten),), shape, "vector"


# ------------------------------------------------------------------------------------------------- what torch says


def step_of(graph: ModelGraph, seed: int = 0) -> ModelStep:
    return ModelStep(root=graph.root, inits=graph.inits, ties=graph.ties, seed=seed)


def batch(source: SourceFacts, size: int, device: str) -> Tensor:
    assert source.input is not None
    shape = (size, *source.input.shape)
    if source.input.dtype == "int64":
        return torch.zeros(shape, dtype=torch.int64, device=device)
    return torch.randn(shape, device=device) if device == "cpu" else torch.empty(shape, device=device)


def counted_flops(graph: ModelGraph, source: SourceFacts, size: int = 2) -> tuple[tuple[int, ...], float, float]:
    """Returns output shape, forward and backward FLOPs of one sample, as torch counts them: on the meta device, unless
    the network has grouped products, which torch computes there in 16 bits alone.
    """
    device = "cpu" if any(init.parameter.endswith("gate_up_proj") for init in graph.inits) else "meta"
    model = skeleton(step_of(graph)) if device == "meta" else build_model(step_of(graph), device)
    mapping = {
        torch.ops.aten.convolution_backward: _convolution_backward,
        torch.ops.aten._grouped_mm: _grouped_product,
        torch.ops.aten._scaled_dot_product_flash_attention_for_cpu: _attention,
        torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward: _attention_backward,
    }
    with FlopCounterMode(display=False, custom_mapping=mapping) as forward:
        y = model(batch(source, size, device))
    with FlopCounterMode(display=False, custom_mapping=mapping) as backward:
        y.backward(torch.empty_like(y))
    return tuple(y.shape[1:]), forward.get_total_flops() / size, backward.get_total_flops() / size


def _convolution_backward(
    grad: Any,
    x: Any,
    w: Any,
    _b: Any,
    _s: Any,
    _p: Any,
    _d: Any,
    transposed: bool,
    _o: Any,
    groups: int,
    mask: Any,
    **_: Any,
) -> int:
    """Each gradient costs as much as the forward pass; torch counts that of the weights of a grouped convolution as if
    it were not grouped.
    """
    each: int = conv_flop_count(list(x), list(w), list(grad), transposed=False)
    return each * (int(mask[0]) + int(mask[1]))


def _grouped_product(a: Any, b: Any, *_: Any, **__: Any) -> int:
    """Each row meets one matrix; for the gradient of the weights, rows of both sides meet."""
    return 2 * int(a[0]) * int(a[1]) * int(b[-1])


def _attention(query: Any, key: Any, value: Any, *_: Any, **__: Any) -> int:
    return int(sdpa_flop_count(query, key, value))


def _attention_backward(_grad: Any, query: Any, key: Any, value: Any, *_: Any, **__: Any) -> int:
    """Torch counts twice the forward pass: without the products that the CPU's kernel computes again."""
    return 2 * _attention(query, key, value)


def saved(graph: ModelGraph, *, low: bool) -> int:
    """Bytes that autograd keeps of one sample, as the graph has it."""
    return sum((layer.autocast if low else layer.float32).saved for layer in graph.layers)


def kept(graph: ModelGraph, source: SourceFacts, *, low: bool) -> float:
    """Returns the bytes that autograd keeps for one more sample, as hooks on the CPU see them."""
    model = build_model(step_of(graph), "cpu")
    small, large = 3, 5
    return (
        _saved_bytes(model, batch(source, large, "cpu"), low) - _saved_bytes(model, batch(source, small, "cpu"), low)
    ) / (large - small)


def _saved_bytes(model: nn.Module, x: Tensor, low: bool) -> int:
    held = {t.untyped_storage().data_ptr() for t in [*model.parameters(), *model.buffers(), x]}
    saved: WeakSet[_Saved] = WeakSet()

    def pack(tensor: Tensor) -> _Saved:
        packed = _Saved(tensor.detach())  # an output would hold its own graph
        saved.add(packed)
        return packed

    with (
        torch.autograd.graph.saved_tensors_hooks(pack, lambda packed: packed.tensor),
        torch.autocast("cpu", dtype=torch.bfloat16, enabled=low),
    ):
        y = model(x)
    storages = [packed.tensor.untyped_storage() for packed in saved]
    sizes = {storage.data_ptr(): storage.nbytes() for storage in storages}
    del y  # which holds the graph, and the graph what is saved
    return sum(bytes_ for address, bytes_ in sizes.items() if address not in held)


class _Saved:
    """A tensor that autograd keeps; it goes with the part of the graph that needs it."""

    def __init__(self, tensor: Tensor) -> None:
        self.tensor = tensor
