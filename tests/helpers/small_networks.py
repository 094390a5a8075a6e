"""One small network of each kind, and data for it."""

from __future__ import annotations

from typing import Any

from dslc.compiler.ir.facts import SourceFacts
from dslc.dsl.language import layers as s
from dslc.dsl.language.registry import Call
from helpers.networks_drawn import classes, of, tokens

LLAMA: dict[str, Any] = {"layers": 3, "width": 24, "heads": 4, "hidden": 40, "context": 16}
BLOCKS: dict[str, Any] = {"layers": 2, "width": 24, "heads": 4, "kv_heads": 2, "context": 16}
EXPERTS: dict[str, Any] = {"experts": 6, "top_k": 2, "hidden": 16}
SIZES: dict[str, tuple[Call, SourceFacts]] = {
    "gpt": (of(s.GPT, layers=2, width=32, heads=4, context=16), tokens(16, 50)),
    "gpt, shorter sequences": (of(s.GPT, layers=1, width=16, heads=2, context=16, dropout=0.1), tokens(9, 50)),
    "gpt, tied, no biases": (of(s.GPT, layers=3, width=48, heads=3, context=12, tie=True, bias=False), tokens(12, 64)),
    "llama": (of(s.Llama, layers=2, width=32, heads=4, hidden=48, context=16), tokens(16, 50)),
    "llama, grouped": (
        of(s.Llama, **LLAMA, kv_heads=2, tie=True, bias=True, window=5, max_window_layers=1),
        tokens(9, 50),
    ),
    "qwen3": (of(s.Llama, **LLAMA, head_dim=8, kv_heads=1, qk_norm=True, activation="gelu_tanh"), tokens(12, 50)),
    "mixtral": (of(s.Llama, **BLOCKS, experts=of(s.BlockExperts, **EXPERTS)), tokens(12, 50)),
    "qwen3 of experts": (
        of(s.Llama, **BLOCKS, qk_norm=True, experts=of(s.BlockExperts, **EXPERTS, normalize=False)),
        tokens(9, 50),
    ),
    "deepseek": (
        of(
            s.Llama,
            **LLAMA,
            dense_layers=1,
            experts=of(
                s.BlockExperts, **EXPERTS, shared=2, score="sigmoid", scale=2.5, balance=of(s.BalanceBias, rate=0.0)
            ),
        ),
        tokens(16, 50),
    ),
    "mlp": (of(s.MLP, widths=(16, 8), dropout=0.1, activation="gelu"), classes(4, 1, 8, 8)),
    "mlp without hidden layers": (of(s.MLP, widths=()), classes(4, 6)),
    "mlp of tanh": (of(s.MLP, widths=(8,), activation="tanh"), classes(3, 5)),
    "convnet": (of(s.ConvNet), classes(4, 3, 16, 16)),
    "convnet, wide kernel": (of(s.ConvNet, channels=(4,), kernel=5), classes(4, 1, 9, 7)),
    "resnet18": (of(s.ResNet, depth=18, width=8), classes(4, 3, 64, 64)),
    "resnet34": (of(s.ResNet, depth=34, width=4, stem="small"), classes(4, 3, 16, 16)),
    "resnet50": (of(s.ResNet, depth=50, width=4), classes(4, 3, 64, 64)),
    "resnet101": (of(s.ResNet, depth=101, width=4, stem="small"), classes(4, 3, 16, 16)),
    "vit": (of(s.ViT, patch=4, layers=2, width=32, heads=4), classes(4, 3, 16, 16)),
    "vit on a wide image": (of(s.ViT, patch=8, layers=3, width=24, heads=2, dropout=0.1), classes(4, 1, 16, 32)),
}
