"""Fine-tunes a saved model in 4 bits by adapters; `python qlora.py` saves one to begin with."""

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


class Repetitions:
    """Sentences that repeat their first half."""

    def __len__(self) -> int:
        return 64

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        half = torch.randint(3, 64, (8,), generator=torch.Generator().manual_seed(index))
        tokens = torch.cat([half, half])
        return tokens[:-1], tokens[1:]


class Adapter(nn.Module):
    """A dense layer in 4 bits, and two matrices beside it, which begin as in a job (docs/adapters.md)."""

    def __init__(self, layer: nn.Linear, name: str) -> None:
        from torchao.quantization import NF4Tensor

        super().__init__()
        blocks = layer.weight.numel() // 64
        self.frozen: Any = NF4Tensor.from_tensor(layer.weight.detach(), 64, min(256, blocks & -blocks))
        self.trains = name.endswith(("q_proj", "v_proj"))
        if self.trains:
            digest = hashlib.sha256(f"0:{name}.lora_A.weight".encode()).digest()
            random, bound = torch.Generator().manual_seed(int.from_bytes(digest[:8], "big") >> 1), 0.25
            self.down = nn.Parameter(torch.empty(4, layer.in_features).uniform_(-bound, bound, generator=random))
            self.up = nn.Parameter(torch.zeros(layer.out_features, 4))

    def forward(self, x: Tensor) -> Tensor:
        y = F.linear(x, self.frozen)
        return y + 2 * F.linear(F.linear(x, self.down), self.up) if self.trains else y


def plain(steps: int) -> list[float]:
    from transformers import AutoModelForCausalLM

    prepare()
    model: Any = AutoModelForCausalLM.from_pretrained(HERE / "base")
    model.requires_grad_(False).train()
    for name, layer in list(model.named_modules()):
        if isinstance(layer, nn.Linear) and name != "lm_head":
            parent, _, attribute = name.rpartition(".")
            setattr(model.get_submodule(parent), attribute, Adapter(layer, name))
    data = Repetitions()
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
