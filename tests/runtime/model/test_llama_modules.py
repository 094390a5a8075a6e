"""`llama(…)` computes what the models of `transformers` compute from the same weights, in the same names."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from helpers.networks_drawn import built, of, step_of, tokens

from dslc.dsl.language import layers as s
from dslc.runtime.model.meta_model import build_model

transformers = pytest.importorskip("transformers")

SIZES: dict[str, Any] = {"layers": 3, "width": 32, "heads": 4, "kv_heads": 2, "hidden": 48, "context": 40}
THEIRS: dict[str, Any] = {
    "num_hidden_layers": 3,
    "hidden_size": 32,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "intermediate_size": 48,
    "max_position_embeddings": 40,
    "vocab_size": 50,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
LLAMA3 = {"factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 20}
SCALED = of(s.Llama3Scaling, factor=8.0, original_context=20)
CASES: dict[str, tuple[str, dict[str, Any], dict[str, Any]]] = {
    "llama": ("Llama", {}, {}),
    "llama 3": (
        "Llama",
        {"rope_theta": 5e5, "rope_scaling": SCALED, "norm_eps": 1e-5},
        {"rope_parameters": {"rope_type": "llama3", "rope_theta": 5e5, **LLAMA3}, "rms_norm_eps": 1e-5},
    ),
    "stretched": (
        "Llama",
        {"rope_scaling": of(s.LinearScaling, factor=2.0), "head_dim": 6, "bias": True, "mlp_bias": True},
        {
            "rope_parameters": {"rope_type": "linear", "rope_theta": 1e4, "factor": 2.0},
            "head_dim": 6,
            "attention_bias": True,
            "mlp_bias": True,
        },
    ),
    "qwen 3": (
        "Qwen3",
        {"head_dim": 16, "qk_norm": True, "rope_theta": 1e6, "tie": True, "activation": "gelu_tanh"},
        {
            "head_dim": 16,
            "rope_parameters": {"rope_type": "default", "rope_theta": 1e6},
            "tie_word_embeddings": True,
            "hidden_act": "gelu_pytorch_tanh",
        },
    ),
    "with a window": (
        "Qwen3",
        {"head_dim": 8, "qk_norm": True, "window": 7, "max_window_layers": 1},
        {"head_dim": 8, "use_sliding_window": True, "sliding_window": 7, "max_window_layers": 1},
    ),
}


@pytest.mark.parametrize("name", CASES)
def test_logits_and_gradients_are_those_of_transformers(name: str) -> None:
    kind, own, theirs = CASES[name]
    config = getattr(transformers, f"{kind}Config")(**THEIRS, **theirs, use_cache=False)
    torch.manual_seed(3)
    model = getattr(transformers, f"{kind}ForCausalLM")(config)
    for parameter in model.parameters():
        torch.nn.init.normal_(parameter, 0.5 if parameter.dim() == 1 else 0.0, 0.2)
    graph = built(of(s.Llama, **SIZES, **own), tokens(40, 50))
    made = build_model(step_of(graph), "cpu")
    assert {n: p.shape for n, p in made.named_parameters()} == {n: p.shape for n, p in model.named_parameters()}
    made.load_state_dict(model.state_dict(), strict=True)
    batch = torch.randint(0, 50, (2, 40), generator=torch.Generator().manual_seed(4))
    expected, found = model(batch).logits, made(batch)
    torch.testing.assert_close(found, expected, atol=1e-5, rtol=1e-5)
    for logits in (expected, found):
        F.cross_entropy(logits.flatten(0, 1), batch.flatten()).backward()
    wanted = dict(model.named_parameters())
    for parameter_name, parameter in made.named_parameters():
        torch.testing.assert_close(parameter.grad, wanted[parameter_name].grad, atol=1e-5, rtol=1e-4)


def test_initial_values_are_those_of_transformers() -> None:
    graph = built(of(s.Llama, **SIZES, bias=True, init_std=0.1), tokens(40, 50))
    found = {init.parameter: (init.kind, init.a, init.b) for init in graph.inits}
    assert found["model.embed_tokens.weight"] == found["lm_head.weight"] == ("normal", 0.0, 0.1)
    assert found["model.layers.2.mlp.down_proj.weight"] == ("normal", 0.0, 0.1)
    assert found["model.layers.0.self_attn.q_proj.bias"][:2] == ("constant", 0.0)
    assert found["model.norm.weight"][:2] == ("constant", 1.0)
