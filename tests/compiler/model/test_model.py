"""The arithmetic of layers against torch (shapes, parameters, FLOPs, kept bytes of random networks), and mistakes.

Kept bytes are exact for all layers but LSTMs, whose kernel has padded work space of its own (within a tenth).
"""

from __future__ import annotations

import sys
from typing import Any

import pytest
import torch
from helpers.made_jobs import make_job
from helpers.networks_drawn import (
    POINTWISE,
    VOCAB,
    batch,
    built,
    classes,
    counted_flops,
    fact,
    kept,
    model_of,
    networks,
    of,
    saved,
    step_of,
    tokens,
)
from hypothesis import HealthCheck, given, settings
from torch.utils._python_dispatch import TorchDispatchMode

from dslc.compiler.ir.facts import SourceFacts
from dslc.compiler.ir.tensors import LeafFact, TensorFact, TreeFact
from dslc.compiler.model import tape
from dslc.compiler.model.model import ModelGraph, build, share_out
from dslc.compiler.model.outputs import classes_come_first
from dslc.compiler.model.tape import LAYERS
from dslc.compiler.placement.tensor_plan import tensor_plan
from dslc.dsl.diagnostics import Diagnostic, Report
from dslc.dsl.language import calls as c
from dslc.dsl.language import layers as s
from dslc.dsl.language.blocks import ParallelismSpec
from dslc.dsl.language.registry import CALLS, Call, Place
from dslc.dsl.source import Source, Span
from dslc.runtime.model.meta_model import build_model
from dslc.runtime.model.module_builder import skeleton

DRAWN = settings(max_examples=120, suppress_health_check=list(HealthCheck))
Drawn = tuple[tuple[Call, ...], SourceFacts]


@pytest.mark.slow
@DRAWN
@given(networks())
def test_parameters_shapes_and_flops_are_torchs(drawn: Drawn) -> None:
    network, source = drawn
    graph = built(network, source)
    model = skeleton(step_of(graph))
    nodes = [parameter for layer in graph.layers for parameter in layer.parameters]
    assert [(p.name, p.shape) for p in nodes] == [(n, tuple(p.shape)) for n, p in model.named_parameters()]
    assert graph.parameters == sum(p.numel() for p in model.parameters())
    buffers = [(b.name, b.shape, b.dtype) for layer in graph.layers for b in layer.buffers]
    assert buffers == [(n, tuple(b.shape), str(b.dtype).removeprefix("torch.")) for n, b in model.named_buffers()]
    assert [p.name for p in nodes] == [i.parameter for i in graph.inits]
    assert counted_flops(graph, source) == (graph.output.shape, graph.forward_flops, graph.backward_flops)
    assert all(a.output == b.input for a, b in zip(graph.layers, graph.layers[1:], strict=False))


@pytest.mark.slow
@DRAWN
@given(networks())
def test_kept_bytes_are_what_hooks_see(drawn: Drawn) -> None:
    network, source = drawn
    if any(isinstance(layer, s.LSTM) for layer in network):
        return  # below, in sizes for which the padding of its work space does not decide
    graph = built(network, source)
    assert saved(graph, low=False) == kept(graph, source, low=False)
    assert saved(graph, low=True) == kept(graph, source, low=True)


IMAGES = SourceFacts(input=fact(2, 6, 6))
SIGNALS = SourceFacts(input=fact(2, 6))
STEPS = SourceFacts(input=fact(5, 4))
WIDE_STEPS = SourceFacts(input=fact(5, 8))
# Each comes after a layer that keeps only its input, so that its own kept bytes decide.
ONE_OF_EACH: list[tuple[Call, SourceFacts]] = [
    *((layer, IMAGES) for layer in POINTWISE),
    (of(s.Linear, features=3), STEPS),
    (of(s.Conv1d, channels=3), SIGNALS),
    (of(s.Conv2d, channels=3, stride=2, bias=False), IMAGES),
    (of(s.MaxPool1d, kernel=2), SIGNALS),
    (of(s.MaxPool2d, kernel=2, stride=1), IMAGES),
    (of(s.AvgPool1d, kernel=3, padding=1), SIGNALS),
    (of(s.AvgPool2d, kernel=2), IMAGES),
    *((of(s.AdaptiveAvgPool1d, size=size), SIGNALS) for size in (1, 2)),
    *((of(s.AdaptiveAvgPool2d, size=size), IMAGES) for size in (1, 2)),
    *((of(s.AdaptiveMaxPool2d, size=size), IMAGES) for size in (1, 2)),
    (of(s.Flatten), IMAGES),
    (of(s.BatchNorm), IMAGES),
    (of(s.LayerNorm), STEPS),
    (of(s.LayerNorm, bias=False), IMAGES),
    (of(s.RMSNorm), STEPS),
    (of(s.Embedding, width=4), tokens(5, VOCAB)),
    (of(s.PositionalEmbedding, context=7), STEPS),
    (of(s.Attention, heads=2), STEPS),
    (of(s.Attention, heads=2, kv_heads=1, rope_theta=10_000.0, dropout=0.1), STEPS),
    (of(s.Attention, heads=2, causal=True, window=2, qk_norm=True, bias=False), STEPS),
    (of(s.Attention, heads=6, causal=True, kv_heads=3, head_dim=2, rope_theta=9.0, qk_norm=True), STEPS),
    (of(s.TransformerBlock, heads=2, dropout=0.1), STEPS),
    (of(s.GatedMLP, hidden=5), STEPS),
    (of(s.GatedMLP, hidden=7, activation="relu", bias=True), STEPS),
    (of(s.LlamaBlock, heads=2, kv_heads=1, hidden=7, rope_scaling=of(s.Llama3Scaling, factor=8.0)), STEPS),
    (of(s.MixtureOfExperts, experts=4, top_k=3, hidden=8), WIDE_STEPS),
    (of(s.MixtureOfExperts, experts=4, top_k=4, hidden=16, shared=1, score="sigmoid", normalize=False), WIDE_STEPS),
    (of(s.LastStep), STEPS),
    (of(s.MeanSteps), STEPS),
    (of(s.PatchEmbedding, patch=3, width=4), IMAGES),
    (of(s.Residual, layers=(of(s.ReLU),)), IMAGES),
]


def test_every_layer_of_the_language_has_its_arithmetic() -> None:
    declared = set(CALLS["layer"].values()) - {s.Repeat}
    assert declared <= set(LAYERS)
    assert declared == {type(layer) for layer, _ in ONE_OF_EACH} | {s.LSTM}


@pytest.mark.slow
@pytest.mark.parametrize("layer, source", ONE_OF_EACH, ids=lambda value: value.word if isinstance(value, Call) else "")
def test_each_layer_alone_is_torchs(layer: Call, source: SourceFacts) -> None:
    before: tuple[Call, ...] = ()
    if source in (IMAGES, SIGNALS):
        before = (of(s.Conv2d if source is IMAGES else s.Conv1d, channels=2, padding=1),)
    elif source in (STEPS, WIDE_STEPS):
        before = (of(s.Linear, features=4 if source is STEPS else 8),)
    is_sequence = source in (STEPS, WIDE_STEPS)
    after = () if isinstance(layer, s.LastStep | s.MeanSteps) else (of(s.MeanSteps),) if is_sequence else ()
    for network in ((layer, of(s.Linear, features=2)), (*before, layer, *after, of(s.Linear, features=2))):
        graph = built(network, source)
        assert counted_flops(graph, source) == (graph.output.shape, graph.forward_flops, graph.backward_flops)
        assert saved(graph, low=False) == kept(graph, source, low=False)
        assert saved(graph, low=True) == kept(graph, source, low=True)
        x = batch(source, 3, "cpu")
        for part in build_model(step_of(graph), "cpu").children():
            x = part(x)
            assert x.is_contiguous(), "a pipeline can cut after any layer, and sends what is contiguous alone"


@pytest.mark.cases(4)
@pytest.mark.slow
@pytest.mark.parametrize("length, width, state", [(32, 64, 64), (64, 32, 256), (16, 256, 64), (20, 100, 100)])
@pytest.mark.parametrize("more", [{}, {"layers": 2}, {"bidirectional": True}], ids=str)
def test_an_lstm_keeps_what_its_kernel_does(length: int, width: int, state: int, more: dict[str, Any]) -> None:
    source = tokens(length, VOCAB)
    graph = built((of(s.Embedding, width=width), of(s.LSTM, width=state, **more), of(s.Linear, features=2)), source)
    model = build_model(step_of(graph), "cpu")
    assert model.get_submodule("1")(torch.rand(3, length, width)).is_contiguous()
    assert saved(graph, low=False) == pytest.approx(kept(graph, source, low=False), rel=0.1)
    if torch.ops.mkldnn._is_mkldnn_bf16_supported():
        assert saved(graph, low=True) == pytest.approx(kept(graph, source, low=True), rel=0.1)


class Products(TorchDispatchMode):
    """Adds up the bytes of the results of products and attention: what selective recomputation keeps."""

    def __init__(self) -> None:
        super().__init__()
        self.bytes = 0

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = function(*args, **(kwargs or {}))
        if any(part in function.__name__ for part in ("mm.", "convolution.", "scaled_dot_product")):
            tensors = result if isinstance(result, tuple) else (result,)
            self.bytes += sum(t.nbytes for t in tensors if isinstance(t, torch.Tensor))
        return result


@pytest.mark.parametrize("low", [False, True])
@pytest.mark.parametrize(
    "layer, source",
    [
        (of(s.TransformerBlock, heads=2), SourceFacts(input=fact(6, 8))),
        (of(s.Attention, heads=2, causal=True), SourceFacts(input=fact(6, 8))),
        (of(s.LlamaBlock, heads=4, kv_heads=2, hidden=6, qk_norm=True), SourceFacts(input=fact(6, 8))),
        (of(s.Residual, layers=(of(s.Conv2d, channels=2, padding=1), of(s.ReLU))), SourceFacts(input=fact(2, 6, 6))),
    ],
    ids=lambda value: value.word if isinstance(value, Call) else "",
)
def test_selective_recomputation_keeps_the_input_and_the_products(layer: Call, source: SourceFacts, low: bool) -> None:
    before = of(s.LayerNorm) if not isinstance(layer, s.Residual) else of(s.BatchNorm)
    graph = built((before, layer), source)
    model = build_model(step_of(graph), "cpu")
    seen = []
    for size in (3, 5):
        x = model[0](batch(source, size, "cpu"))  # type: ignore[index]
        with torch.autocast("cpu", dtype=torch.bfloat16, enabled=low), Products() as products:
            model[1](x)  # type: ignore[index]
        seen.append(products.bytes + x.nbytes)
    node = graph.layers[1]
    assert node.recomputable
    assert (node.autocast if low else node.float32).selective == (seen[1] - seen[0]) / 2


def test_layers_that_are_not_worth_it_are_not_recomputed() -> None:
    graph = built((of(s.Flatten), of(s.Linear, features=3), of(s.ReLU), of(s.Linear, features=2)), classes(2, 1, 4, 4))
    assert not any(layer.recomputable for layer in graph.layers)
    assert all(layer.float32.selective == layer.float32.saved for layer in graph.layers)


def test_the_gpt_of_two_nodes_is_built_with_few_calls() -> None:
    network = of(s.GPT, layers=32, width=4096, heads=32, context=4096, vocab=128_256)
    source, calls = tokens(4096, 128_256), 0

    def count(frame: Any, event: str, argument: Any) -> None:
        nonlocal calls
        calls += event == "call"

    sys.setprofile(count)
    try:
        graph = built(network, source, of(c.CrossEntropy))
    finally:
        sys.setprofile(None)
    assert graph.parameters == 7_511_613_440
    assert calls < 20_000, "`dslc check` is to be done in a tenth of a second"


BLOCK = of(s.TransformerBlock, heads=2)
CONV = of(s.Residual, layers=(of(s.Conv2d, channels=3, padding=1), of(s.BatchNorm), of(s.ReLU)))


@pytest.mark.parametrize("ranks", (1, 2))
@pytest.mark.parametrize(
    ("network", "source"),
    (
        (of(s.GPT, layers=4, width=8, heads=2, context=6, vocab=VOCAB, tie=True), tokens(6, VOCAB)),
        (of(s.GPT, layers=4, width=8, heads=2, context=6, vocab=VOCAB, dropout=0.1), tokens(6, VOCAB)),
        (of(s.Llama, layers=4, width=8, heads=2, hidden=6, context=6, qk_norm=True), tokens(6, VOCAB)),
        (of(s.ViT, layers=4, width=8, heads=2, patch=2), classes(3, 1, 4, 4)),
        (of(s.ResNet, depth=18), classes(3, 3, 32, 32)),
        (
            (of(s.Embedding, width=8), of(s.Repeat, count=3, layers=(BLOCK,)), BLOCK, of(s.Linear, features=VOCAB)),
            tokens(6, VOCAB),
        ),
        (
            (of(s.Conv2d, channels=3), of(s.Repeat, count=3, layers=(CONV,)), of(s.Flatten), of(s.Linear, features=3)),
            classes(3, 3, 6, 6),
        ),
    ),
    ids=("gpt", "with dropout", "llama", "vit", "resnet", "repeated", "convolutions"),
)
def test_a_block_like_the_one_before_it_is_what_it_would_be_if_it_was_run(
    network: Any, source: SourceFacts, ranks: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    pieces = ranks if source.vocab else 1

    def made() -> ModelGraph:
        graph = built(network, source)
        plan = tensor_plan(job, ranks, graph, sequence=True)
        model = model_of(network, of(c.CrossEntropy))
        return share_out(graph, model, source, plan.styles, ranks, pieces, on_cpu=True)

    job = make_job(parallelism=ParallelismSpec(tensor=ranks))
    said = made()
    monkeypatch.setattr(tape, "_like", lambda value: object())
    assert made() == said


def test_repeat_is_unrolled_and_residuals_are_named() -> None:
    inner = of(s.Residual, layers=(of(s.Repeat, count=2, layers=(of(s.Linear, features=4), of(s.ReLU))),))
    graph = built((of(s.Repeat, count=2, layers=(inner, of(s.ReLU))), of(s.Linear, features=2)), classes(2, 4))
    assert [layer.name for layer in graph.layers] == ["0", "1", "2", "3", "4"]
    assert [p.name for p in graph.layers[2].parameters] == [
        f"2.layers.{n}.{part}" for n in (0, 2) for part in ("weight", "bias")
    ]


def test_the_facts_about_norms_and_noise() -> None:
    def of_layers(*layers: Call) -> ModelGraph:
        return built((*layers, of(s.Flatten), of(s.Linear, features=2)), classes(2, 2, 4, 4))

    plain = of_layers()
    assert (plain.batch_norm, plain.noise, plain.batch_norm_values) == (False, False, None)
    normed = of_layers(of(s.BatchNorm), of(s.Flatten), of(s.BatchNorm, sync=False), of(s.Dropout, p=0.1))
    assert (normed.batch_norm, normed.unsynced_batch_norm, normed.noise) == (True, True, True)
    assert normed.batch_norm_values == 1
    grown = of_layers(of(s.BatchNorm), of(s.Conv2d, channels=2, kernel=1, padding=1), of(s.BatchNorm))
    assert grown.batch_norm_values == 16
    assert not of_layers(of(s.BatchNorm), of(s.Dropout, p=0.0)).noise


def test_an_unknown_input_is_passed_over_in_silence() -> None:
    report = Report()
    model = model_of((of(s.Linear, features=2),), of(c.CrossEntropy))
    assert report.collect(build(model, SourceFacts(), None)) is None and not report
    gpt = model_of(of(s.GPT, layers=1, width=8, heads=2, context=4, vocab=9), of(c.CrossEntropy))
    graph = report.collect(build(gpt, SourceFacts(), 4))
    assert graph is not None and graph.input.shape == (4,) and not report


# ------------------------------------------------------------------------------------------------------- mistakes

IMAGE = classes(10, 1, 8, 8)
TEXT = tokens(16, 50)
CLASSED_TEXT = SourceFacts(input=fact(16, dtype="int64"), target=fact(dtype="int64"), vocab=50, classes=3)
GPT: dict[str, Any] = {"layers": 1, "width": 64, "heads": 4, "context": 16}


def conv(**arguments: Any) -> Call:
    return of(s.Conv2d, **{"channels": 8, **arguments})


def found(network: Any, source: SourceFacts, loss: Call) -> list[Diagnostic]:
    report = Report()
    graph = report.collect(build(model_of(network, loss), source, None))
    assert (graph is None) == bool(report.errors)
    return list(report)


@pytest.mark.parametrize(
    "network, source, code, words",
    [
        ((of(s.Flatten), conv()), IMAGE, "E0201", ["(channels, height, width)", "a vector (64)"]),
        ((of(s.Conv1d, channels=4),), IMAGE, "E0201", ["(channels, length)", "(1, 8, 8)"]),
        ((of(s.Attention, heads=2),), IMAGE, "E0201", ["(length, width)", "(1, 8, 8)"]),
        ((of(s.PatchEmbedding, patch=2, width=4), conv()), IMAGE, "E0201", ["a sequence (16, 4)"]),
        ((of(s.LastStep),), classes(2, 4), "E0201", ["a vector (4)"]),
        ((conv(kernel=9),), IMAGE, "E0202", ["a kernel of 9", "an image (1, 8, 8)"]),
        ((of(s.MaxPool2d, kernel=4), of(s.MaxPool2d, kernel=4)), IMAGE, "E0202", ["a kernel of 4", "(1, 2, 2)"]),
        ((of(s.AvgPool2d, kernel=2, padding=2),), IMAGE, "E0203", ["padding of 2", "window of 2"]),
        ((conv(groups=2),), IMAGE, "E0204", ["1 channel at the input", "2 groups"]),
        ((conv(), conv(channels=6, groups=4)), IMAGE, "E0204", ["6 channels at the output", "4 groups"]),
        ((of(s.Embedding, width=4),), IMAGE, "E0205", ["an image (1, 8, 8)"]),
        ((of(s.Linear, features=50),), TEXT, "E0206", ["tokens (16)"]),
        (of(s.MLP, classes=5), TEXT, "E0206", ["tokens (16)"]),
        (of(s.GPT, **{**GPT, "heads": 5}), TEXT, "E0207", ["5 heads", "a width of 64"]),
        (of(s.GPT, **GPT, vocab=40), TEXT, "E0208", ["40", "50 tokens"]),
        (of(s.GPT, **{**GPT, "context": 8}), TEXT, "E0209", ["context of 8", "16"]),
        ((of(s.Flatten), of(s.Linear, features=9)), IMAGE, "E0210", ["9 numbers", "10 classes"]),
        ((of(s.Repeat, count=3, layers=(conv(kernel=5),)),), IMAGE, "E0211", ["round 2", "(8, 4, 4)"]),
        ((of(s.Residual, layers=(conv(),)),), IMAGE, "E0214", ["(8, 6, 6)", "(1, 8, 8)"]),
        (
            (of(s.Residual, layers=(conv(),), shortcut=(conv(stride=2),)),),
            IMAGE,
            "E0214",
            ["(8, 6, 6)", "shortcut", "(8, 3, 3)"],
        ),
        (of(s.ResNet, depth=20), IMAGE, "E0212", ["20"]),
        (of(s.ViT, patch=3, layers=1, width=8, heads=2), IMAGE, "E0213", ["3 x 3", "(1, 8, 8)"]),
        ((conv(), of(s.Linear, features=10)), IMAGE, "E0215", ["(10)", "an image (8, 6, 10)"]),
        ((of(s.Embedding, width=4), of(s.Linear, features=3)), CLASSED_TEXT, "E0215", ["a sequence (16, 3)"]),
        ((of(s.ReLU), of(s.Flatten)), IMAGE, "E0217", ["no parameters"]),
        (of(s.MLP), SourceFacts(input=fact(4), target=fact()), "E0218", ["no classes"]),
        ((of(s.Embedding, width=4), of(s.BatchNorm)), TEXT, "E0219", ["(16, 4)"]),
        (of(s.ConvNet, kernel=4), IMAGE, "E0220", ["4 is even"]),
        ((of(s.Repeat, count=10**9, layers=(of(s.ReLU),)),), IMAGE, "E0221", ["1,000"]),
        ((conv(), of(s.Linear, features=4), of(s.Flatten), of(s.Linear, features=10)), IMAGE, "W0201", ["(8, 6, 6)"]),
        ((of(s.Flatten), of(s.Linear, features=12)), IMAGE, "W0202", ["12 numbers", "10 classes"]),
        (
            (of(s.Embedding, width=4), of(s.Conv1d, channels=16, padding=1), of(s.Linear, features=50)),
            TEXT,
            "W0203",
            ["16 positions"],
        ),
    ],
)
def test_a_mistake_is_named_once_with_its_numbers(
    network: Any, source: SourceFacts, code: str, words: list[str]
) -> None:
    diagnostics = found(network, source, of(c.CrossEntropy))
    assert [d.code for d in diagnostics] == [code]
    assert all(word in diagnostics[0].message for word in words), diagnostics[0].message


@pytest.mark.parametrize(
    "loss, features, source, code",
    [
        (c.MSE, 3, SourceFacts(input=fact(4), target=fact(2)), "E0216"),
        (c.L1, 2, SourceFacts(input=fact(4), target=fact(2, 1)), ""),
        (c.MSE, 1, SourceFacts(input=fact(4), target=fact()), ""),
        (c.MSE, 2, SourceFacts(input=fact(4), target=fact()), "E0216"),
        (c.BCE, 1, classes(2, 4), ""),
        (c.BCE, 1, classes(5, 4), "E0215"),
        (c.CrossEntropy, 2, SourceFacts(input=fact(4), target=fact()), "E0215"),
        (c.CrossEntropy, 2, SourceFacts(input=fact(4)), ""),
        (c.MSE, 2, SourceFacts(input=fact(4)), ""),
    ],
)
def test_the_output_is_held_against_loss_and_target(
    loss: type[Call], features: int, source: SourceFacts, code: str
) -> None:
    diagnostics = found((of(s.Linear, features=features),), source, of(loss))
    assert [d.code for d in diagnostics] == ([code] if code else [])


def test_mistakes_point_at_the_argument_that_made_them() -> None:
    text = Source("job.plt", "gpt(heads = 5)  [flatten(), repeat(2, [conv2d(kernel = 9)])]")

    def at(part: str) -> Span:
        return Span(text, text.text.index(part), text.text.index(part) + len(part))

    places = {"heads": Place(name=at("heads"), value=at("5"))}
    gpt = of(s.GPT, **{**GPT, "heads": 5}, span=at("gpt(heads = 5)"), places=places)
    [wrong] = found(gpt, TEXT, of(c.CrossEntropy))
    assert wrong.span == at("5") and "`blocks.0` of `gpt`" in wrong.notes[-1].message
    kernel = conv(kernel=9, span=at("conv2d(kernel = 9)"), places={"kernel": Place(name=at("kernel"), value=at("9"))})
    [wrong] = found((of(s.Repeat, count=2, layers=(kernel,)),), IMAGE, of(c.CrossEntropy))
    assert wrong.span == at("9") and wrong.code == "E0202"


def test_a_forgotten_flatten_is_suspected() -> None:
    linear = of(s.Linear, features=10)
    [wrong] = found((conv(), linear), IMAGE, of(c.CrossEntropy))
    assert any("`linear` works on the last dim of an image (8, 6, 6)" in note.message for note in wrong.notes)
    assert "flatten()" in wrong.help


@pytest.mark.parametrize(
    ("output", "target", "first"),
    [
        ((3, 6, 8), (6, 8), True),
        ((6, 8, 3), (6, 8), False),
        ((7, 5), (5,), True),
        ((5, 5), (5,), False),  # either; a warning says which is taken
        ((10,), (), False),
        ((3, 6), (6, 8), False),
    ],
)
def test_classes_may_come_first(output: tuple[int, ...], target: tuple[int, ...], first: bool) -> None:
    """Of a target alone, and of one that is the only leaf of a structure."""
    made = TensorFact(shape=output, dtype="float32")
    assert classes_come_first(made, SourceFacts(target=TensorFact(shape=target, dtype="int64"))) == first
    leaf = LeafFact(path="", fixed=(0, *target), grown=(1, *(0 for _ in target)), dtype="int64")
    structures = TreeFact(leaves=()), TreeFact(leaves=(leaf,))
    assert classes_come_first(made, SourceFacts(structures=structures)) == first
