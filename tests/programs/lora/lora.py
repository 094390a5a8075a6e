"""Fine-tunes a saved model of transformers by adapters of peft; `python lora.py` saves one to begin with."""

from __future__ import annotations

import hashlib
import os
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

HERE = Path(__file__).parent
SIZES: dict[str, Any] = {"vocab_size": 64, "hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 2}
SIZES |= {"num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 16}


def prepare() -> None:
    """Saves a model in the folder `base`, if there is none."""
    from transformers import LlamaConfig, LlamaForCausalLM

    if not (HERE / "base").exists():
        torch.manual_seed(1)
        LlamaForCausalLM(LlamaConfig(**SIZES, bos_token_id=1, eos_token_id=2)).save_pretrained(HERE / f"{os.getpid()}")
        os.rename(HERE / f"{os.getpid()}", HERE / "base")


class Sentences:
    """Sentences that repeat their first half."""

    def __len__(self) -> int:
        return 64

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        half = torch.randint(3, 64, (8,), generator=torch.Generator().manual_seed(index))
        tokens = torch.cat([half, half])
        return tokens[:-1], tokens[1:]


def begin(model: nn.Module) -> None:
    """Gives the adapters the first numbers that they have in a job (docs/adapters.md)."""
    for name, matrix in model.named_parameters():
        if ".lora_A." in name:
            told = "0:" + name.removeprefix("base_model.model.").replace(".default", "")
            seed = int.from_bytes(hashlib.sha256(told.encode()).digest()[:8], "big") >> 1
            bound = matrix.shape[1] ** -0.5
            matrix.data.uniform_(-bound, bound, generator=torch.Generator().manual_seed(seed))


def plain(steps: int) -> list[float]:
    from peft import LoraConfig, get_peft_model
    from transformers import AutoModelForCausalLM

    prepare()
    base: Any = AutoModelForCausalLM.from_pretrained(HERE / "base")
    model, data = get_peft_model(base, LoraConfig(r=4, lora_alpha=8, target_modules=["q_proj", "v_proj"])), Sentences()
    begin(model)
    model.train()
    optimizer = torch.optim.AdamW((p for p in model.parameters() if p.requires_grad), lr=1e-2)
    losses: list[float] = []
    for step in range(steps):
        first = step * 8 % len(data)
        x, y = (torch.stack(parts) for parts in zip(*(data[first + n] for n in range(8)), strict=True))
        loss = F.cross_entropy(model(x).logits.flatten(0, 1), y.flatten())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


if __name__ == "__main__":
    prepare()
