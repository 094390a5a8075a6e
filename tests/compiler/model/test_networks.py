"""The library networks: against torch in several sizes, and against what their authors published."""

from __future__ import annotations

from math import sqrt

import pytest
from helpers.networks_drawn import built, classes, counted_flops, kept, of, saved, step_of, tokens
from helpers.small_networks import SIZES

from dslc.compiler.ir.facts import SourceFacts
from dslc.dsl.language import calls as c
from dslc.dsl.language import layers as s
from dslc.dsl.language.registry import Call
from dslc.runtime.model.module_builder import skeleton


@pytest.mark.cases(10)
@pytest.mark.slow
@pytest.mark.parametrize("name", SIZES)
def test_the_arithmetic_is_torchs(name: str) -> None:
    network, source = SIZES[name]
    graph = built(network, source, of(c.CrossEntropy))
    own = [(p.name, p.shape) for layer in graph.layers for p in layer.parameters if not p.tied_to]
    assert own == [(n, tuple(p.shape)) for n, p in skeleton(step_of(graph)).named_parameters()]
    assert counted_flops(graph, source) == (graph.output.shape, graph.forward_flops, graph.backward_flops)
    assert saved(graph, low=False) == kept(graph, source, low=False)
    assert saved(graph, low=True) == kept(graph, source, low=True)


@pytest.mark.parametrize(
    "network, source, parameters, gigaflops",
    [
        # He et al. 2015 and torchvision's table of models; FLOPs there are multiply-adds.
        (of(s.ResNet, depth=18), classes(1000, 3, 224, 224), 11_689_512, 2 * 1.814),
        (of(s.ResNet, depth=34), classes(1000, 3, 224, 224), 21_797_672, 2 * 3.664),
        (of(s.ResNet, depth=50), classes(1000, 3, 224, 224), 25_557_032, 2 * 4.089),
        (of(s.ResNet, depth=101), classes(1000, 3, 224, 224), 44_549_160, 2 * 7.801),
        (of(s.ResNet, depth=152), classes(1000, 3, 224, 224), 60_192_808, 2 * 11.514),
        # The smallest GPT-2 of Radford et al. 2019.
        (
            of(s.GPT, layers=12, width=768, heads=12, context=1024, tie=True),
            tokens(1024, 50257),
            124_439_808,
            291.6,
        ),
    ],
    ids=["resnet18", "resnet34", "resnet50", "resnet101", "resnet152", "gpt2"],
)
def test_sizes_are_the_published_ones(network: Call, source: SourceFacts, parameters: int, gigaflops: float) -> None:
    graph = built(network, source, of(c.CrossEntropy))
    assert graph.parameters == parameters
    assert graph.forward_flops / 1e9 == pytest.approx(gigaflops, rel=1e-3)


def test_names_speak() -> None:
    graph = built(of(s.GPT, layers=2, width=32, heads=4, context=16), tokens(16, 50))
    assert [layer.name for layer in graph.layers] == ["embedding", "position", "blocks.0", "blocks.1", "norm", "head"]
    assert [layer.kind for layer in graph.layers][2] == "transformer_block"
    assert [p.name for p in graph.layers[3].parameters if p.name.endswith("weight")] == [
        "blocks.1.attention_norm.weight",
        "blocks.1.attention.qkv.weight",
        "blocks.1.attention.output.weight",
        "blocks.1.mlp_norm.weight",
        "blocks.1.mlp.up.weight",
        "blocks.1.mlp.down.weight",
    ]
    graph = built(of(s.ResNet, depth=18), classes(10, 3, 64, 64))
    names = [layer.name for layer in graph.layers]
    assert names[:5] == ["stem.conv", "stem.norm", "stem.activation", "stem.pool", "blocks.0"]
    assert names[-3:] == ["pool", "flatten", "head"]
    assert [layer.recomputable for layer in graph.layers] == [layer.kind == "resnet_block" for layer in graph.layers]


def test_a_tied_head_is_the_embedding() -> None:
    free = built(of(s.GPT, layers=1, width=32, heads=4, context=16), tokens(16, 50))
    tied = built(of(s.GPT, layers=1, width=32, heads=4, context=16, tie=True), tokens(16, 50))
    assert free.parameters - tied.parameters == 50 * 32
    assert tied.ties == (("head.weight", "embedding.weight"),)
    assert tied.layers[-1].parameters[0].tied_to == "embedding.weight"
    assert "head.weight" not in {init.parameter for init in tied.inits}


def test_transformers_start_as_gpt2_does() -> None:
    graph = built(of(s.GPT, layers=8, width=32, heads=4, context=16), tokens(16, 50))
    inits = {init.parameter: (init.kind, init.a, init.b) for init in graph.inits}
    assert inits["embedding.weight"] == inits["position.weight"] == inits["head.weight"] == ("normal", 0.0, 0.02)
    assert inits["blocks.3.attention.qkv.weight"] == ("normal", 0.0, 0.02)
    assert inits["blocks.3.attention.output.weight"] == ("normal", 0.0, 0.02 / sqrt(16))
    assert inits["blocks.3.mlp.down.weight"] == ("normal", 0.0, 0.02 / sqrt(16))
    assert inits["blocks.3.mlp.down.bias"] == ("constant", 0.0, 0.0)
    assert inits["blocks.3.mlp_norm.weight"][:2] == ("constant", 1.0)
