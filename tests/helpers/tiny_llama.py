"""Small language models as folders with their `config.json`, which a job names as `transformers("FOLDER")`."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from typing import Any

import torch

TINY_LLAMA = {
    "model_type": "llama",
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 256,
    "max_position_embeddings": 32,
    "bos_token_id": 1,
    "eos_token_id": 2,
}


def write_llama(folder: Path, **changed: Any) -> None:
    """Creates `folder`; `changed` are values of the configuration."""
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(TINY_LLAMA | changed))


def save_llama(folder: Path, **settings: Any) -> torch.nn.Module:
    """Creates `folder` as `save_pretrained` does, with these settings of it, and returns the model."""
    from transformers import LlamaConfig, LlamaForCausalLM

    config: dict[str, Any] = {name: value for name, value in TINY_LLAMA.items() if name != "model_type"}
    torch.manual_seed(5)
    model = LlamaForCausalLM(LlamaConfig(**config))
    model.save_pretrained(folder, **settings)
    return model


def save_mixtral(folder: Path) -> None:
    """Creates `folder` with a model of 4 experts, as `save_pretrained` does."""
    from transformers import MixtralConfig, MixtralForCausalLM

    config: dict[str, Any] = {name: value for name, value in TINY_LLAMA.items() if name != "model_type"}
    torch.manual_seed(5)
    MixtralForCausalLM(MixtralConfig(**config, num_local_experts=4, sliding_window=None)).save_pretrained(folder)


def begin_adapters(model: torch.nn.Module, seed: int = 0) -> None:
    """Gives the matrices A of a model of peft the first numbers that they have in a job."""
    for name, parameter in model.named_parameters():
        if ".lora_A." in name:
            told = f"{seed}:{name.removeprefix('base_model.model.').replace('.default', '')}"
            number = int.from_bytes(hashlib.sha256(told.encode()).digest()[:8], "big") >> 1
            random, bound = torch.Generator().manual_seed(number), parameter.shape[1] ** -0.5
            parameter.data.copy_(torch.empty(parameter.shape).uniform_(-bound, bound, generator=random))
