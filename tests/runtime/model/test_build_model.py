"""Models made from their description: the numbers they start with, their modules' arithmetic, users' own functions."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from helpers.networks_drawn import built, classes, of, step_of, tokens
from torch import Tensor, nn

from dslc.compiler.ir.codec import from_json, to_json
from dslc.compiler.ir.facts import SourceFacts
from dslc.compiler.ir.program import InitStep, ModelStep, ModuleStep, PythonFunction
from dslc.dsl.language import layers as s
from dslc.dsl.language.registry import Call
from dslc.runtime.model import modules
from dslc.runtime.model.errors import ModelError
from dslc.runtime.model.meta_model import build_model
from dslc.runtime.model.module_builder import initial_value

GPT = of(s.GPT, layers=2, width=16, heads=2, context=8)


def gpt_step(seed: int = 3, **arguments: bool) -> ModelStep:
    network = of(s.GPT, layers=2, width=16, heads=2, context=8, **arguments)
    return step_of(built(network, tokens(8, 20)), seed)


# ----------------------------------------------------------------------------------------------------- first values


def test_an_initial_value_is_a_function_of_seed_and_name() -> None:
    init = InitStep(parameter="blocks.0.weight", shape=(40, 30), kind="normal", a=1.0, b=2.0)
    torch.manual_seed(0)
    first = initial_value(init, 7)
    torch.rand(3)
    assert torch.equal(first, initial_value(init, 7))
    assert not torch.equal(first, initial_value(init, 8))
    other = InitStep(parameter="blocks.1.weight", shape=(40, 30), kind="normal", a=1.0, b=2.0)
    assert not torch.equal(first, initial_value(other, 7))
    assert first.mean().item() == pytest.approx(1.0, abs=0.2) and first.std().item() == pytest.approx(2.0, rel=0.1)


def test_initial_values_stay_the_same_from_version_to_version() -> None:
    init = InitStep(parameter="0.weight", shape=(3,), kind="uniform", a=-1.0, b=1.0)
    assert initial_value(init, 0).tolist() == pytest.approx(EXPECTED, abs=1e-6)


EXPECTED = [0.375551, 0.807461, 0.408376]


@pytest.mark.parametrize(
    "layers, source, reference",
    [
        ((of(s.Linear, features=200),), classes(200, 300), nn.Linear(300, 200)),
        ((of(s.Conv2d, channels=64, groups=2),), classes(9, 32, 8, 8), nn.Conv2d(32, 64, 3, groups=2)),
        ((of(s.Conv1d, channels=64, kernel=5),), classes(9, 32, 8), nn.Conv1d(32, 64, 5)),
        ((of(s.Embedding, width=64),), tokens(8, 500), nn.Embedding(500, 64)),
        ((of(s.LSTM, width=50),), classes(9, 8, 60), nn.LSTM(60, 50)),
        ((of(s.LayerNorm),), classes(9, 8), nn.LayerNorm(8)),
        ((of(s.BatchNorm),), classes(9, 8), nn.BatchNorm1d(8)),
        ((of(s.RMSNorm),), classes(9, 8), nn.RMSNorm(8)),
    ],
    ids=lambda value: type(value).__name__ if isinstance(value, nn.Module) else "",
)
def test_layers_start_as_torch_starts_them(layers: tuple[Call, ...], source: SourceFacts, reference: nn.Module) -> None:
    made = build_model(step_of(built(layers, source)), "cpu").state_dict()
    for name, theirs in reference.state_dict().items():
        ours = made[f"0.{name}"]
        assert ours.shape == theirs.shape and ours.dtype == theirs.dtype
        if theirs.numel() < 1000:
            bound = theirs.abs().max() * 1.1  # few numbers: only the range can be tested
            assert ours.abs().max() <= bound
            continue
        assert ours.std().item() == pytest.approx(theirs.std().item(), rel=0.05)
        assert ours.abs().max().item() == pytest.approx(theirs.abs().max().item(), rel=0.25)


def test_a_model_does_not_depend_on_what_is_around_it() -> None:
    shallow = build_model(step_of(built(of(s.GPT, layers=2, width=16, heads=2, context=8), tokens(8, 20))), "cpu")
    torch.manual_seed(99)
    again = build_model(step_of(built(of(s.GPT, layers=2, width=16, heads=2, context=8), tokens(8, 20))), "cpu")
    assert all(torch.equal(a, b) for a, b in zip(shallow.parameters(), again.parameters(), strict=True))
    plain = build_model(step_of(built((of(s.Linear, features=3),), classes(3, 4))), "cpu").state_dict()
    more = (of(s.Linear, features=3), of(s.Linear, features=3))
    assert torch.equal(
        plain["0.weight"], build_model(step_of(built(more, classes(3, 4))), "cpu").state_dict()["0.weight"]
    )


def test_building_leaves_the_random_state_alone(tmp_path: Path) -> None:
    (tmp_path / "quiet_net.py").write_text("import torch\ndef net(): return torch.nn.Linear(2, 2)\n")
    torch.manual_seed(5)
    before = torch.get_rng_state()
    build_model(gpt_step(), "cpu")
    python = PythonFunction(function="quiet_net:net", folder=str(tmp_path))
    build_model(ModelStep(python=python, seed=1), "cpu")
    assert torch.equal(before, torch.get_rng_state())


def test_tied_weights_are_one_tensor() -> None:
    model = build_model(gpt_step(tie=True), "cpu")
    assert model.get_parameter("head.weight") is model.get_parameter("embedding.weight")
    model(torch.zeros(1, 8, dtype=torch.int64)).sum().backward()
    assert model.get_parameter("embedding.weight").grad is not None


def test_every_tensor_is_filled_or_it_is_an_error() -> None:
    step = gpt_step()
    lacking = ModelStep(root=step.root, inits=step.inits[1:], ties=step.ties, seed=0)
    with pytest.raises(AssertionError, match=r"embedding\.weight"):
        build_model(lacking, "cpu")


def test_buffers_start_as_they_should() -> None:
    graph = built(
        (of(s.Conv2d, channels=4), of(s.BatchNorm), of(s.Flatten), of(s.Linear, features=2)), classes(2, 1, 5, 5)
    )
    state = build_model(step_of(graph), "cpu").state_dict()
    assert state["1.running_mean"].eq(0).all() and state["1.running_var"].eq(1).all()
    assert state["1.num_batches_tracked"] == 0 and state["1.num_batches_tracked"].dtype == torch.int64


def test_a_description_survives_json() -> None:
    step = gpt_step(tie=True)
    again = from_json(ModelStep, json.loads(json.dumps(to_json(step))))
    assert again == step
    first, second = build_model(step, "cpu").state_dict(), build_model(again, "cpu").state_dict()
    assert list(first) == list(second) and all(torch.equal(first[name], second[name]) for name in first)


def test_a_module_that_is_not_there_is_our_own_mistake() -> None:
    with pytest.raises(AssertionError, match=r"job\.plt:3:1: no module Nonsense"):
        build_model(ModelStep(root=ModuleStep(name="", kind="Nonsense", line="job.plt:3:1")), "cpu")


# ------------------------------------------------------------------------------------------------ arithmetic of ours


def lone(layer: Call, source: SourceFacts) -> nn.Module:
    return build_model(step_of(built((layer, of(s.Linear, features=2)), source)), "cpu").get_submodule("0")


@pytest.mark.parametrize("causal", [False, True])
def test_attention_is_softmax_of_products(causal: bool) -> None:
    module = lone(of(s.Attention, heads=3, causal=causal), classes(2, 7, 12))
    assert isinstance(module, modules.Attention)
    x = torch.randn(2, 7, 12)
    rows = F.linear(x, module.qkv.weight, module.qkv.bias).view(2, 7, 3, 3, 4)  # type: ignore[arg-type]
    out = []
    for head in range(3):
        q, k, v = (rows[:, :, head, part] for part in range(3))
        scores = q @ k.transpose(1, 2) / 4**0.5
        if causal:
            scores = scores.masked_fill(torch.ones(7, 7).triu(1).bool(), float("-inf"))
        out.append(scores.softmax(-1) @ v)
    torch.testing.assert_close(module(x), module.output(torch.cat(out, -1)))


def test_a_share_of_qkvs_rows_is_a_share_of_the_heads() -> None:
    module = lone(of(s.Attention, heads=4, bias=False), classes(2, 5, 16))
    half = lone(of(s.Attention, heads=4, bias=False), classes(2, 5, 16))
    x = torch.randn(1, 5, 16)
    parts = []
    for rows, columns in ((slice(0, 24), slice(0, 8)), (slice(24, 48), slice(8, 16))):
        half.qkv.weight = nn.Parameter(module.qkv.weight[rows])  # type: ignore[union-attr, index]
        half.output.weight = nn.Parameter(module.output.weight[:, columns])  # type: ignore[union-attr, index]
        parts.append(half(x))
    torch.testing.assert_close(parts[0] + parts[1], module(x))


def test_a_transformer_block_adds_two_branches() -> None:
    block = lone(of(s.TransformerBlock, heads=2), classes(2, 5, 8))
    assert isinstance(block, modules.TransformerBlock)
    x = torch.randn(3, 5, 8)
    y = x + block.attention(F.layer_norm(x, (8,)))
    z = y + block.mlp.down(F.gelu(block.mlp.up(F.layer_norm(y, (8,)))))  # type: ignore[operator]
    torch.testing.assert_close(block(x), z)


def test_a_causal_network_does_not_look_ahead() -> None:
    model = build_model(gpt_step(), "cpu")
    x = torch.randint(0, 20, (1, 8), generator=torch.Generator().manual_seed(0))
    y = x.clone()
    y[0, 5] = (y[0, 5] + 1) % 20
    a, b = model(x), model(y)
    torch.testing.assert_close(a[:, :5], b[:, :5])
    assert not torch.allclose(a[:, 5:], b[:, 5:])


def test_positions_of_shorter_sequences_are_the_first() -> None:
    module = modules.PositionalEmbedding(6, 4)
    nn.init.normal_(module.weight)
    for length in (6, 3):
        x = torch.randn(2, length, 4)
        torch.testing.assert_close(module(x), x + module.weight[:length])


def test_patches_go_row_by_row() -> None:
    module = lone(of(s.PatchEmbedding, patch=4, width=6), classes(2, 3, 8, 12))
    x = torch.randn(2, 3, 8, 12)
    weight, bias = module.get_parameter("projection.weight"), module.get_parameter("projection.bias")
    patches = [x[:, :, row : row + 4, column : column + 4] for row in (0, 4) for column in (0, 4, 8)]
    vectors = [F.linear(patch.reshape(2, 48), weight.view(6, 48), bias) for patch in patches]
    torch.testing.assert_close(module(x), torch.stack(vectors, 1) + module.get_parameter("position"))


def test_a_residual_without_shortcut_adds_its_input() -> None:
    module = lone(of(s.Residual, layers=(of(s.Linear, features=4),)), classes(2, 4))
    x = torch.randn(3, 4)
    torch.testing.assert_close(module(x), x + module.layers[0](x))  # type: ignore[index, operator]
    module = lone(
        of(s.Residual, layers=(of(s.Linear, features=5),), shortcut=(of(s.Linear, features=5),)), classes(2, 4)
    )
    torch.testing.assert_close(module(x), module.layers[0](x) + module.shortcut[0](x))  # type: ignore[index, operator]


def test_rms_norm_takes_sixteen_bits_without_a_word(recwarn: pytest.WarningsRecorder) -> None:
    module = modules.RMSNorm(8, eps=1e-6)
    x = torch.randn(2, 8)
    y: Tensor = module(x.bfloat16())
    assert y.dtype == torch.bfloat16 and not recwarn.list
    torch.testing.assert_close(y.float(), F.rms_norm(x, (8,), eps=1e-6), atol=0.05, rtol=0.05)


def test_batch_norms_say_whether_they_are_shared() -> None:
    layers = (of(s.BatchNorm), of(s.Flatten), of(s.BatchNorm, sync=False), of(s.Linear, features=2))
    model = build_model(step_of(built(layers, classes(2, 2, 3, 3))), "cpu")
    norms = [module for module in model.modules() if isinstance(module, nn.modules.batchnorm._BatchNorm)]
    assert [(type(norm), bool(norm.sync)) for norm in norms] == [
        (modules.BatchNorm2d, True),
        (modules.BatchNorm1d, False),
    ]


# ------------------------------------------------------------------------------------------------ users' own models

OWN = """
import torch
def net(width): return torch.nn.Sequential(torch.nn.Linear(width, width), torch.nn.Linear(width, 2))
def number(): return 3
"""


def own(folder: Path, function: str, seed: int = 0, **arguments: int) -> ModelStep:
    (folder / "own_net.py").write_text(OWN)
    python = PythonFunction(
        function=f"own_net:{function}", arguments=arguments, folder=str(folder), line="job.plt:3:13"
    )
    return ModelStep(python=python, seed=seed)


def test_a_users_own_model_is_made_under_the_seed(tmp_path: Path) -> None:
    first = build_model(own(tmp_path, "net", seed=4, width=5), "cpu")
    torch.manual_seed(123)
    again = build_model(own(tmp_path, "net", seed=4, width=5), "cpu")
    other = build_model(own(tmp_path, "net", seed=5, width=5), "cpu")
    assert list(first.state_dict()) == ["0.weight", "0.bias", "1.weight", "1.bias"]
    assert torch.equal(first.state_dict()["0.weight"], again.state_dict()["0.weight"])
    assert not torch.equal(first.state_dict()["0.weight"], other.state_dict()["0.weight"])


def test_a_function_that_gives_no_module_is_named_with_its_line(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match=r"job\.plt:3:13: `own_net:number` must return a torch\.nn\.Module.* an `int`"):
        build_model(own(tmp_path, "number"), "cpu")
