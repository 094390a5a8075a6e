"""A folder that `from_pretrained` takes: the same logits, shards, and what lies beside the weights."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from helpers.tiny_llama import write_llama
from safetensors.torch import save_file

from dslc.compiler.ir.program import TransformersStep
from dslc.runtime.checkpoint.companion_files import CompanionFiles
from dslc.runtime.checkpoint.export import export_folder
from dslc.runtime.checkpoint.state import CheckpointError
from dslc.runtime.model.tensor_names import named_tensors
from dslc.runtime.model.transformers_model import build_transformers

GPT2 = {"n_layer": 2, "n_embd": 16, "n_head": 2, "vocab_size": 64, "n_positions": 16}
BERT = {
    "hidden_size": 16,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "intermediate_size": 32,
    "vocab_size": 64,
    "max_position_embeddings": 16,
}
STEPS = {
    "AutoModelForCausalLM": TransformersStep(name="gpt2", arguments=GPT2),
    "AutoModelForSequenceClassification": TransformersStep(
        name="bert", kind="sequence_classification", labels=3, arguments=BERT
    ),
}


def trained(step: TransformersStep, path: Path) -> Any:
    """Returns the model with numbers of its own, and writes them."""
    torch.manual_seed(3)
    model = build_transformers(step).eval()
    save_file({name: tensor.detach() for name, tensor in named_tensors(model).items()}, path)
    return model


@pytest.mark.parametrize("auto", STEPS)
def test_the_same_logits(auto: str, tmp_path: Path) -> None:
    import transformers

    model = trained(STEPS[auto], tmp_path / "weights.safetensors")
    export_folder(str(tmp_path / "weights.safetensors"), STEPS[auto], str(tmp_path / "made"))
    loaded = getattr(transformers, auto).from_pretrained(tmp_path / "made").eval()
    tokens = torch.randint(0, 64, (2, 8))
    assert torch.equal(loaded(tokens).logits, model(tokens))
    assert type(loaded).__name__ == type(model).__name__ and loaded.config.use_cache
    assert sorted(path.name for path in (tmp_path / "made").iterdir()) == ["config.json", "model.safetensors"]


def test_shards_and_files_of_a_tokenizer(tmp_path: Path) -> None:
    import transformers

    write_llama(tmp_path / "base", torch_dtype="bfloat16", use_cache=False)
    for name in ("tokenizer.json", "generation_config.json", "pytorch_model.bin"):
        (tmp_path / "base" / name).write_text("{}")
    step = TransformersStep(name="base", folder=str(tmp_path))
    model = trained(step, tmp_path / "weights.safetensors")
    (tmp_path / "made").mkdir()
    (tmp_path / "start").mkdir()
    (tmp_path / "start" / "tokenizer.json").write_text("[]")
    companions = CompanionFiles(folders=("absent", str(tmp_path / "start"), str(tmp_path / "base")), card="A card.")
    count = export_folder(
        str(tmp_path / "weights.safetensors"), step, str(tmp_path / "made"), limit=40_000, companions=companions
    )
    index = json.loads((tmp_path / "made" / "model.safetensors.index.json").read_text())
    assert index["weight_map"].keys() == named_tensors(model).keys() and len(index["weight_map"]) == count
    assert index["metadata"]["total_size"] == 4 * sum(p.numel() for p in model.parameters())
    shards = {*index["weight_map"].values()}
    assert len(shards) > 1 and all((tmp_path / "made" / name).stat().st_size < 50_000 for name in shards)
    beside = {path.name for path in (tmp_path / "made").iterdir()} - shards
    companion_names = {"generation_config.json", "tokenizer.json", "README.md"}
    assert beside == {"config.json", "model.safetensors.index.json", *companion_names}
    assert [(tmp_path / "made" / name).read_text() for name in sorted(companion_names)] == ["A card.", "{}", "[]"]
    loaded = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "made").eval()
    tokens = torch.randint(0, 256, (2, 8))
    assert torch.equal(loaded(tokens).logits, model(tokens))
    assert loaded.dtype == torch.float32 and not loaded.config.use_cache


def test_weights_of_another_model_leave_nothing(tmp_path: Path) -> None:
    trained(STEPS["AutoModelForCausalLM"], tmp_path / "weights.safetensors")
    step = TransformersStep(name="gpt2", arguments=GPT2 | {"n_layer": 3})
    with pytest.raises(CheckpointError, match="is not of this model"):
        export_folder(str(tmp_path / "weights.safetensors"), step, str(tmp_path / "made"))
    assert [path.name for path in tmp_path.iterdir()] == ["weights.safetensors"]
