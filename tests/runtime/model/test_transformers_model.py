"""Models of the `transformers` library, built from configurations alone: names, values and outputs."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from dslc.compiler.facts.transformers_file import mean_of, written_task
from dslc.compiler.ir.program import ModelStep, TransformersStep
from dslc.dsl.language.layers import TransformersNetwork
from dslc.runtime.model.meta_model import blank, build_model
from dslc.runtime.model.transformers_model import TransformersError, build_transformers, longest

SMALL: dict[str, dict[str, Any]] = {
    "gpt2": {"n_layer": 1, "n_embd": 16, "n_head": 2, "vocab_size": 40, "n_positions": 12},
    "llama": {
        "num_hidden_layers": 1,
        "hidden_size": 16,
        "intermediate_size": 24,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "vocab_size": 40,
    },
    "bert": {
        "num_hidden_layers": 1,
        "hidden_size": 16,
        "intermediate_size": 24,
        "num_attention_heads": 2,
        "vocab_size": 40,
    },
    "vit": {
        "num_hidden_layers": 1,
        "hidden_size": 16,
        "intermediate_size": 24,
        "num_attention_heads": 2,
        "image_size": 8,
        "patch_size": 4,
    },
}


def step(name: str, kind: Any = "causal_lm", labels: int = 0, folder: str = "", **more: Any) -> TransformersStep:
    return TransformersStep(name=name, kind=kind, labels=labels, folder=folder, arguments=SMALL.get(name, {}) | more)


@pytest.mark.parametrize(
    "made, input, output, name",
    [
        (step("gpt2"), (3, 5), (3, 5, 40), "transformer.h.0.attn.c_attn.weight"),
        (step("llama"), (3, 5), (3, 5, 40), "model.layers.0.self_attn.q_proj.weight"),
        (step("bert", "sequence_classification", 7), (3, 5), (3, 7), "bert.embeddings.word_embeddings.weight"),
        (step("vit", "image_classification", 7), (3, 3, 8, 8), (3, 7), "vit.embeddings.cls_token"),
    ],
    ids=list(SMALL),
)
def test_it_takes_one_tensor_and_gives_one(
    made: TransformersStep, input: tuple[int, ...], output: tuple[int, ...], name: str
) -> None:
    model = build_model(ModelStep(transformers=made, seed=3), "cpu")
    x = torch.zeros(input, dtype=torch.int64) if len(input) == 2 else torch.randn(input)
    y = model(x)
    assert isinstance(y, torch.Tensor) and tuple(y.shape) == output and y.dtype == torch.float32
    assert name in dict(model.named_parameters())
    assert model.training
    again = build_model(ModelStep(transformers=made, seed=3), "cpu").state_dict()
    assert all(torch.equal(value, again[key]) for key, value in model.state_dict().items())
    other = build_model(ModelStep(transformers=made, seed=4), "cpu").state_dict()
    assert not torch.equal(other[name], again[name]) or name.endswith("cls_token")


def test_the_libraries_own_forward_gives_the_same() -> None:
    import transformers

    ours = build_model(ModelStep(transformers=step("gpt2", resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0)), "cpu")
    config: Any = ours.config
    theirs = transformers.GPT2LMHeadModel(config)
    theirs.load_state_dict(ours.state_dict())
    x = torch.randint(0, 40, (2, 6))
    torch.testing.assert_close(ours(x), theirs(x).logits)
    assert type(ours).__name__ == "GPT2LMHeadModel"


def test_configurations_from_files(tmp_path: Path) -> None:
    written = {"model_type": "llama", "torch_dtype": "bfloat16", "rms_norm_eps": 1e-3, **SMALL["llama"]}
    (tmp_path / "tiny").mkdir()
    (tmp_path / "tiny" / "config.json").write_text(json.dumps(written))
    for name in ("tiny", "tiny/config.json"):
        model = build_transformers(step(name, folder=str(tmp_path), num_hidden_layers=2))
        config: Any = model.config
        assert "model.layers.1" in dict(model.named_modules()) and config.rms_norm_eps == 1e-3
        assert next(model.parameters()).dtype == torch.float32


def test_labels_are_the_datas_unless_said(tmp_path: Path) -> None:
    def labels(made: TransformersStep) -> int:
        return build_transformers(made)(torch.zeros(2, 4, dtype=torch.int64)).shape[1]

    assert labels(step("bert", "sequence_classification", 6)) == 6
    assert labels(step("bert", "sequence_classification", 6, num_labels=9)) == 9
    config = {"model_type": "bert", "id2label": {"0": "a", "1": "b", "2": "c"}, **SMALL["bert"]}
    (tmp_path / "config.json").write_text(json.dumps(config))
    assert labels(step(".", "sequence_classification", 6, str(tmp_path))) == 3


def test_a_masked_model_where_the_file_says_so(tmp_path: Path) -> None:
    config = {"model_type": "bert", "architectures": ["BertForMaskedLM"], **SMALL["bert"]}
    (tmp_path / "config.json").write_text(json.dumps(config))
    network = TransformersNetwork(path=str(tmp_path))
    assert written_task(network, "") == "masked_lm"
    assert mean_of(network, "") == {"mean_of": "labels", "shift": 0}
    assert type(build_transformers(step("bert", "masked_lm"))).__name__ == "BertForMaskedLM"


@pytest.mark.parametrize("name", ["gpt2", "llama", "bert"])
def test_each_module_can_make_its_own_numbers(name: str) -> None:
    torch.manual_seed(0)  # a table of 16 numbers deviates by more than its deviation does, at times
    model = build_transformers(step(name))
    deviation = {
        key: float(value.detach().double().std()) for key, value in model.named_parameters() if value.dim() > 1
    }
    with torch.no_grad():
        for tensor in (*model.parameters(), *model.buffers()):
            tensor.fill_(99)
    for module in model.modules():
        if any(True for _ in (*module.parameters(recurse=False), *module.buffers(recurse=False))):
            module.reset_parameters()  # type: ignore[operator]
    for key, value in model.named_parameters():
        assert not (value == 99).any(), key
        if value.dim() > 1 and "c_proj" not in key:  # of which GPT-2 has its own opinion
            assert float(value.detach().double().std()) == pytest.approx(deviation[key], rel=0.3), key
    for key, held in model.named_buffers():
        assert not (held.float() == 99).all(), key


def test_learnt_positions_end() -> None:
    assert longest(build_transformers(step("gpt2"))) == 12
    assert longest(build_transformers(step("llama"))) is None


@pytest.mark.parametrize(
    "made, argument, message",
    [
        (step("gtp2"), "path", "did you mean `gpt2`?"),
        (step("gpt2", n_layers=3), "n_layers", "did you mean `n_layer`?"),
        (step("gpt2", n_embd=6, n_head=4), "path", "must be divisible by num_heads"),
        (step("org/name"), "path", "`hf download org/name config.json --local-dir name`"),
        (step("vit"), "path", "`vit` has no model that predicts the next token"),
        (step("missing/config.json", folder="/nowhere"), "path", "there is no /nowhere/missing/config.json"),
    ],
)
def test_what_gives_no_model_is_said(made: TransformersStep, argument: str, message: str) -> None:
    with pytest.raises(TransformersError) as error:
        build_transformers(made)
    assert error.value.argument == argument
    assert message in str(error.value)


@pytest.mark.parametrize(
    "text", ["{", "[1]", '{"vocab_size": 3}', '{"model_type": ["gpt2"]}', '{"model_type": "nonesuch"}']
)
def test_files_that_are_no_configurations(tmp_path: Path, text: str) -> None:
    (tmp_path / "config.json").write_text(text)
    with pytest.raises(TransformersError, match=r"config.json|nonesuch"):
        build_transformers(step(str(tmp_path)))


def test_a_file_with_a_value_of_another_type_is_told_whole(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text('{"model_type": "gpt2", "n_embd": "x"}')
    with pytest.raises(TransformersError, match=r"configuration cannot be made: .*`?n_embd`?.*(int|str)"):
        build_transformers(step(str(tmp_path)))


def test_it_is_the_same_on_the_meta_device() -> None:
    with torch.device("meta"):
        made = build_transformers(step("llama"))
    whole = build_transformers(step("llama"))
    assert [(n, p.shape) for n, p in made.named_parameters()] == [(n, p.shape) for n, p in whole.named_parameters()]
    assert all(p.is_meta for p in made.parameters())
    assert isinstance(made, nn.Module)


@pytest.mark.parametrize("name", ["gpt2", "llama"])
def test_it_can_be_made_module_by_module(name: str) -> None:
    def made() -> dict[str, torch.Tensor]:
        parts = blank(ModelStep(transformers=step(name), seed=3, reset=True))
        parts.fill(lambda value, _: value.clone(), "cpu")
        assert not any(tensor.is_meta for tensor in (*parts.module.parameters(), *parts.module.buffers()))
        return parts.module.state_dict()

    one, other = made(), made()
    assert all(torch.equal(value, other[key]) for key, value in one.items())
    whole = build_transformers(step(name))
    for key, value in whole.named_buffers():
        torch.testing.assert_close(one.get(key, value), value)
