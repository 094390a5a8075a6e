"""The library networks, written as layers with descriptive names.

Each function turns a network of `dsl/language/layers.py` into `(name, layer)` pairs; dots in a name make nested
modules. Arithmetic and modules then follow from the layers. If a network's authors initialise otherwise than torch's
layers do, an `Initialise` says so.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from math import sqrt
from typing import Any

from dslc.compiler.ir.facts import SourceFacts
from dslc.compiler.model import attention_layers, expert_layers, sequence_layers  # noqa: F401  they register layers
from dslc.compiler.model.layers import activation_of, added
from dslc.compiler.model.tape import Initialise, LayerInputError, Tape, argument_spans, layer, too_many
from dslc.compiler.model.value import Value
from dslc.dsl.bounds import LAYERS
from dslc.dsl.diagnostics import Diagnostic
from dslc.dsl.language import layers as s
from dslc.dsl.language.registry import Call
from dslc.dsl.record import record
from dslc.dsl.remedy import either_argument, remedy, set_argument

Named = tuple[tuple[str, Call], ...]


@dataclass(kw_only=True, eq=False, repr=False)
class Expansion:
    layers: Named
    initialise: Initialise | None = None
    ties: tuple[tuple[str, str], ...] = ()


def expand(network: Call, source: SourceFacts) -> Expansion:
    """Returns the layers of a library network. Raises LayerInputError for an unknown size, KeyError for a user's own
    network.
    """
    make = NETWORKS[type(network)]
    for name in ("layers", "widths", "channels"):
        dropout = getattr(network, name, 0)
        if (dropout if isinstance(dropout, int) else len(dropout)) > LAYERS.most:
            raise LayerInputError(too_many(network.value_span(name)))
    return make(network, source)


def _classes(network: Any, source: SourceFacts) -> int:
    if network.classes is not None:
        return int(network.classes)
    if source.classes is not None:
        return source.classes
    raise LayerInputError(
        Diagnostic(
            code="E0218",
            message=f"the number of outputs of `{network.word}` cannot be taken from the data, which has no classes",
            span=network.span,
            help="write it: `classes = …`",
        )
    )


def mlp(network: s.MLP, source: SourceFacts) -> Expansion:
    spans = argument_spans(network, features="widths")
    layers: list[tuple[str, Call]] = [("flatten", s.Flatten(**spans))]
    for number, width in enumerate(network.widths):
        layers.append((f"hidden.{number}.linear", s.Linear(features=width, **spans)))
        layers.append((f"hidden.{number}.activation", activation_of(network.activation, network)))
        if network.dropout:
            layers.append((f"hidden.{number}.dropout", s.Dropout(p=network.dropout, **spans)))
    layers.append(("head", s.Linear(features=_classes(network, source), **argument_spans(network, features="classes"))))
    return Expansion(layers=tuple(layers))


def convnet(network: s.ConvNet, source: SourceFacts) -> Expansion:
    if network.kernel % 2 == 0:
        raise LayerInputError(
            Diagnostic(
                code="E0220",
                message=f"a kernel of {network.kernel} is even, so that padding cannot keep the size of the image",
                span=network.value_span("kernel"),
                help=remedy(
                    set_argument(network.span, "kernel", network.kernel - 1),
                    " or ",
                    set_argument(network.span, "kernel", network.kernel + 1, f"`{network.kernel + 1}`"),
                ),
            )
        )
    spans = argument_spans(network, kernel="channels")
    layers: list[tuple[str, Call]] = []
    for number, channels in enumerate(network.channels):
        conv = s.Conv2d(
            channels=channels,
            kernel=network.kernel,
            padding=network.kernel // 2,
            bias=False,
            **argument_spans(network),
        )
        layers += [
            (f"blocks.{number}.conv", conv),
            (f"blocks.{number}.norm", s.BatchNorm(**spans)),
            (f"blocks.{number}.activation", s.ReLU(**spans)),
            (f"blocks.{number}.pool", s.MaxPool2d(kernel=2, **spans)),
        ]
    layers.append(("flatten", s.Flatten(**spans)))
    layers.append(("head", s.Linear(features=_classes(network, source), **argument_spans(network, features="classes"))))
    return Expansion(layers=tuple(layers))


# -------------------------------------------------------------------------------------------------------- resnet


@record
class ResNetBlock(Call):
    """Two 3x3 convolutions, or with `bottleneck` 1x1, 3x3 and 1x1 to four times `channels`, beside a shortcut."""

    word = "resnet_block"
    channels: int
    stride: int
    bottleneck: bool


@layer(ResNetBlock, recomputable=True)
def resnet_block(spec: ResNetBlock, x: Value, t: Tape) -> Value:
    spans = argument_spans(spec)
    out = spec.channels * (4 if spec.bottleneck else 1)
    t.module(".Bottleneck" if spec.bottleneck else ".BasicBlock")
    plan = [(1, 1), (3, spec.stride), (1, 1)] if spec.bottleneck else [(3, spec.stride), (3, 1)]
    y = x
    for number, (kernel, stride) in enumerate(plan, 1):
        channels = out if number == len(plan) else spec.channels
        conv = s.Conv2d(channels=channels, kernel=kernel, stride=stride, padding=kernel // 2, bias=False, **spans)
        y = t.child(f"conv{number}", conv, y)
        y = t.child(f"norm{number}", s.BatchNorm(**spans), y)
        if number < len(plan):
            y = _rectified(y, t)
    if spec.stride > 1 or x.shape[0] != out:
        with t.inside("shortcut"):
            x = t.child("conv", s.Conv2d(channels=out, kernel=1, stride=spec.stride, bias=False, **spans), x)
            x = t.child("norm", s.BatchNorm(**spans), x)
    t.operations += len(plan)  # each is rectified; the addition is the block's own
    return _rectified(t.operation(x, y, gives=added(x, y), adds=True), t, y)


def _rectified(x: Value, t: Tape, *holds: Value) -> Value:
    y = x.new(*x.shape)
    t.keep(y)
    return t.operation(x, gives=y, holds=holds)


DEPTHS = {
    18: (False, (2, 2, 2, 2)),
    34: (False, (3, 4, 6, 3)),
    50: (True, (3, 4, 6, 3)),
    101: (True, (3, 4, 23, 3)),
    152: (True, (3, 8, 36, 3)),
}


def resnet(network: s.ResNet, source: SourceFacts) -> Expansion:
    """torchvision's ResNet: a bottleneck's stride is in its 3x3 convolution, weights are He's (arXiv:1502.01852)."""
    if network.depth not in DEPTHS:
        raise LayerInputError(
            Diagnostic(
                code="E0212",
                message=f"there is no residual network of {network.depth} layers",
                span=network.value_span("depth"),
                help=remedy("one of ", either_argument(network.span, "depth", DEPTHS, ", ")),
            )
        )
    spans = argument_spans(network)
    width, small = network.width, network.stem == "small"
    kernel, stride = (3, 1) if small else (7, 2)
    stem = s.Conv2d(channels=width, kernel=kernel, stride=stride, padding=kernel // 2, bias=False, **spans)
    layers: list[tuple[str, Call]] = [
        ("stem.conv", stem),
        ("stem.norm", s.BatchNorm(**spans)),
        ("stem.activation", s.ReLU(**spans)),
    ]
    if not small:
        layers.append(("stem.pool", s.MaxPool2d(kernel=3, stride=2, padding=1, **spans)))
    bottleneck, counts = DEPTHS[network.depth]
    number = 0
    for stage, count in enumerate(counts):
        for is_start in [True, *[False] * (count - 1)]:
            block = ResNetBlock(
                channels=width * 2**stage, stride=2 if is_start and stage else 1, bottleneck=bottleneck, **spans
            )
            layers.append((f"blocks.{number}", block))
            number += 1
    layers += [
        ("pool", s.AdaptiveAvgPool2d(size=1, **spans)),
        ("flatten", s.Flatten(**spans)),
        ("head", s.Linear(features=_classes(network, source), **argument_spans(network, features="classes"))),
    ]
    return Expansion(layers=tuple(layers), initialise=_he)


def _he(name: str, shape: tuple[int, ...], kind: str, a: float, b: float) -> tuple[str, float, float]:
    """He's initial values of convolutions: normal with variance 2 / fan-out."""
    if len(shape) != 4:
        return kind, a, b
    return "normal", 0.0, sqrt(2 / (shape[0] * shape[2] * shape[3]))


# -------------------------------------------------------------------------------------------------- transformers


def _gpt2(layers: int) -> Initialise:
    """Radford et al. 2019: normal with deviation 0.02; the last projection of a branch divided by the root of their
    number.
    """
    ends = ("attention.output.weight", "mlp.down.weight")

    def initialise(name: str, shape: tuple[int, ...], kind: str, a: float, b: float) -> tuple[str, float, float]:
        if kind == "constant":
            return kind, a, b
        if name.endswith("bias"):
            return "constant", 0.0, 0.0
        return "normal", 0.0, 0.02 / sqrt(2 * layers) if name.endswith(ends) else 0.02

    return initialise


def _blocks(network: s.GPT | s.ViT, *, causal: bool, bias: bool) -> list[tuple[str, Call]]:
    block = s.TransformerBlock(
        heads=network.heads, causal=causal, bias=bias, dropout=network.dropout, **argument_spans(network)
    )
    return [(f"blocks.{number}", block) for number in range(network.layers)]


def gpt(network: s.GPT, source: SourceFacts) -> Expansion:
    vocab = network.vocab if network.vocab is not None else source.vocab
    spans = argument_spans(network)
    layers: list[tuple[str, Call]] = [
        ("embedding", s.Embedding(vocab=vocab, width=network.width, **spans)),
        ("position", s.PositionalEmbedding(context=network.context, **spans)),
        *_blocks(network, causal=True, bias=network.bias),
        ("norm", s.LayerNorm(bias=network.bias, **spans)),
        ("head", s.Linear(features=vocab or 1, bias=False, **argument_spans(network, features="vocab"))),
    ]
    ties = (("head.weight", "embedding.weight"),) if network.tie else ()
    return Expansion(layers=tuple(layers), initialise=_gpt2(network.layers), ties=ties)


def llama(network: s.Llama, source: SourceFacts) -> Expansion:
    """The modules have the names of `transformers`."""
    length = source.input.shape[0] if source.input is not None and source.input.dtype == "int64" else None
    if length is not None and length > network.context:
        raise LayerInputError(
            Diagnostic(
                code="E0209",
                message=f"a context of {network.context} is shorter than the data's sequences of {length}",
                span=network.value_span("context"),
                label=f"{network.context} < {length}",
                help=remedy(
                    set_argument(network.span, "context", length), ", or shorter sequences: `context` of the source"
                ),
            )
        )
    vocab = network.vocab if network.vocab is not None else source.vocab
    spans = argument_spans(network)
    shared = {
        name: getattr(network, name)
        for name in (
            "heads", "hidden", "kv_heads", "head_dim", "rope_theta", "rope_scaling", "qk_norm", "activation", "bias",
            "mlp_bias", "norm_eps",
        )
    }  # fmt: skip
    blocks = {
        (narrow, dense): s.LlamaBlock(
            **shared, window=network.window if narrow else None, experts=None if dense else network.experts, **spans
        )
        for narrow in (False, True)
        for dense in (False, True)
    }
    layers: list[tuple[str, Call]] = [
        ("model.embed_tokens", s.Embedding(vocab=vocab, width=network.width, **spans)),
        *(
            (f"model.layers.{number}", blocks[number >= network.max_window_layers, number < network.dense_layers])
            for number in range(network.layers)
        ),
        ("model.norm", s.RMSNorm(eps=network.norm_eps, **spans)),
        ("lm_head", s.Linear(features=vocab or 1, bias=False, **argument_spans(network, features="vocab"))),
    ]
    ties = (("lm_head.weight", "model.embed_tokens.weight"),) if network.tie else ()
    return Expansion(layers=tuple(layers), initialise=_normal(network.init_std), ties=ties)


def _normal(deviation: float) -> Initialise:
    """As `transformers` begins: all weights from one normal distribution, biases zero."""

    def initialise(name: str, shape: tuple[int, ...], kind: str, a: float, b: float) -> tuple[str, float, float]:
        if kind == "constant":
            return kind, a, b
        return ("constant", 0.0, 0.0) if name.endswith("bias") else ("normal", 0.0, deviation)

    return initialise


def vit(network: s.ViT, source: SourceFacts) -> Expansion:
    spans = argument_spans(network)
    layers: list[tuple[str, Call]] = [
        ("embedding", s.PatchEmbedding(patch=network.patch, width=network.width, **spans)),
        *_blocks(network, causal=False, bias=True),
        ("norm", s.LayerNorm(**spans)),
        ("pool", s.MeanSteps(**spans)),
        ("head", s.Linear(features=_classes(network, source), **argument_spans(network, features="classes"))),
    ]
    return Expansion(layers=tuple(layers), initialise=_gpt2(network.layers))


NETWORKS: dict[type[Call], Callable[[Any, SourceFacts], Expansion]] = {
    s.MLP: mlp,
    s.ConvNet: convnet,
    s.ResNet: resnet,
    s.ViT: vit,
    s.GPT: gpt,
    s.Llama: llama,
}
