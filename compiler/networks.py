"""The library networks, written as layers with speaking names.

Each function turns a network of `dsl/layers.py` into `(name, layer)` pairs; dots in a name make nested modules. Arithmetic
and modules then follow from the layers. Where a network's authors initialise otherwise than torch's layers do, an
`Initialise` says so.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from math import prod, sqrt
from typing import Any

from dslc.compiler.facts import SourceFacts
from dslc.compiler.layers import batch_norm, convolution, relu, wants_channels
from dslc.compiler.tape import Initialise, Misfit, Tape, Value, layer
from dslc.dsl import layers as s
from dslc.dsl.diagnostics import Diagnostic
from dslc.dsl.registry import Call, Node

Named = tuple[tuple[str, Call], ...]


@dataclass(frozen=True, kw_only=True)
class Expansion:
    layers: Named
    initialise: Initialise | None = None
    ties: tuple[tuple[str, str], ...] = ()


def expand(network: Call, source: SourceFacts) -> Expansion:
    """The layers of a library network. Raises Misfit where a size cannot be told, KeyError for a user's own network."""
    return NETWORKS[type(network)](network, source)


def _at(network: Node, **renamed: str) -> dict[str, Any]:
    """Where a network's layers stand: their mistakes point at the network's own arguments of the same (or that) name."""
    places = dict(network.places)
    for argument, of_network in renamed.items():
        places.pop(argument, None)
        if of_network in network.places:
            places[argument] = network.places[of_network]
    return {"span": network.span, "places": places}


def _classes(network: Any, source: SourceFacts) -> int:
    if network.classes is not None:
        return int(network.classes)
    if source.classes is not None:
        return source.classes
    raise Misfit(
        Diagnostic(
            code="E0218",
            message=f"how many numbers come out of `{network.word}` cannot be told from the data, which has no classes",
            span=network.span,
            help="write it: `classes = …`",
        )
    )


ACTIVATIONS: dict[str, type[Call]] = {
    "relu": s.ReLU,
    "gelu": s.GELU,
    "silu": s.SiLU,
    "tanh": s.Tanh,
    "sigmoid": s.Sigmoid,
    "leaky_relu": s.LeakyReLU,
    "elu": s.ELU,
}


def mlp(network: s.MLP, source: SourceFacts) -> Expansion:
    at = _at(network, features="widths")
    layers: list[tuple[str, Call]] = [("flatten", s.Flatten(**at))]
    for number, width in enumerate(network.widths):
        layers.append((f"hidden.{number}.linear", s.Linear(features=width, **at)))
        layers.append((f"hidden.{number}.activation", ACTIVATIONS[network.activation](**at)))
        if network.dropout:
            layers.append((f"hidden.{number}.dropout", s.Dropout(p=network.dropout, **at)))
    layers.append(("head", s.Linear(features=_classes(network, source), **_at(network, features="classes"))))
    return Expansion(layers=tuple(layers))


def convnet(network: s.ConvNet, source: SourceFacts) -> Expansion:
    if network.kernel % 2 == 0:
        raise Misfit(
            Diagnostic(
                code="E0220",
                message=f"a kernel of {network.kernel} is even, so that padding cannot keep the size of the image",
                span=network.at("kernel"),
                help=f"`kernel = {network.kernel - 1}` or `{network.kernel + 1}`",
            )
        )
    at = _at(network, kernel="channels")
    layers: list[tuple[str, Call]] = []
    for number, channels in enumerate(network.channels):
        conv = s.Conv2d(
            channels=channels,
            kernel=network.kernel,
            padding=network.kernel // 2,
            bias=False,
            **_at(network),
        )
        layers += [
            (f"blocks.{number}.conv", conv),
            (f"blocks.{number}.norm", s.BatchNorm(**at)),
            (f"blocks.{number}.activation", s.ReLU(**at)),
            (f"blocks.{number}.pool", s.MaxPool2d(kernel=2, **at)),
        ]
    layers.append(("flatten", s.Flatten(**at)))
    layers.append(("head", s.Linear(features=_classes(network, source), **_at(network, features="classes"))))
    return Expansion(layers=tuple(layers))


# -------------------------------------------------------------------------------------------------------- resnet


@dataclass(frozen=True, kw_only=True)
class ResNetBlock(Call):
    """Two 3x3 convolutions, or with `bottleneck` 1x1, 3x3 and 1x1 to four times `channels`, beside a shortcut."""

    word = "resnet_block"
    channels: int
    stride: int
    bottleneck: bool


@layer(ResNetBlock, recomputable=True)
def resnet_block(spec: ResNetBlock, x: Value, t: Tape) -> Value:
    wants_channels(spec, x, t, 2)
    at = spec.span
    out = spec.channels * (4 if spec.bottleneck else 1)
    t.module(".Bottleneck" if spec.bottleneck else ".BasicBlock")
    plan = [(1, 1), (3, spec.stride), (1, 1)] if spec.bottleneck else [(3, spec.stride), (3, 1)]
    y = x
    for number, (kernel, stride) in enumerate(plan, 1):
        channels = out if number == len(plan) else spec.channels
        conv = s.Conv2d(channels=channels, kernel=kernel, stride=stride, padding=kernel // 2, bias=False, span=at)
        y = t.child(f"conv{number}", conv, y)
        y = t.child(f"norm{number}", s.BatchNorm(span=at), y)
        if number < len(plan):
            y = t.computed_by("relu", y)
    if spec.stride > 1 or x.shape[0] != out:
        with t.inside("shortcut"):
            conv = s.Conv2d(channels=out, kernel=1, stride=spec.stride, bias=False, span=at)
            x = t.child("norm", s.BatchNorm(span=at), t.child("conv", conv, x))
    return y


DEPTHS = {
    18: (False, (2, 2, 2, 2)),
    34: (False, (3, 4, 6, 3)),
    50: (True, (3, 4, 6, 3)),
    101: (True, (3, 4, 23, 3)),
    152: (True, (3, 8, 36, 3)),
}
