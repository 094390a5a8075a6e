"""`llama(…)` computes what the models of `transformers` compute from the same weights, in the same names."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from helpers.networks_drawn import built, of, step_of, tokens
from safetensors.torch import load_file

from dslc.compiler.facts.weights_match import stack_experts
from dslc.compiler.ir.program import WeightsStep
from dslc.dsl.language import layers as s
from dslc.runtime.checkpoint.weights import save_weights
from dslc.runtime.model import initial_weights
from dslc.runtime.model.initial_weights import _read_stack
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
    "mixtral": (
        "Mixtral",
        {"experts": of(s.BlockExperts, experts=4, top_k=2, hidden=48), "rope_theta": 1e6, "norm_eps": 1e-5},
        {"num_local_experts": 4, "num_experts_per_tok": 2},
    ),
    "qwen 3 of experts": (
        "Qwen3Moe",
        {
            "head_dim": 16,
            "qk_norm": True,
            "dense_layers": 1,
            "experts": of(s.BlockExperts, experts=6, top_k=3, hidden=16, normalize=False),
        },
        {
            "head_dim": 16,
            "num_experts": 6,
            "num_experts_per_tok": 3,
            "moe_intermediate_size": 16,
            "norm_topk_prob": False,
            "mlp_only_layers": [0],
        },
    ),
    "deepseek 3": (
        "Dots1",
        {
            "qk_norm": True,
            "dense_layers": 1,
            "experts": of(
                s.BlockExperts,
                experts=8,
                top_k=3,
                hidden=16,
                shared=2,
                score="sigmoid",
                scale=2.5,
                balance=of(s.BalanceBias, rate=0.0),
            ),
        },
        {
            "head_dim": 8,
            "first_k_dense_replace": 1,
            "n_routed_experts": 8,
            "num_experts_per_tok": 3,
            "moe_intermediate_size": 16,
            "n_shared_experts": 2,
            "routed_scaling_factor": 2.5,
            "norm_topk_prob": True,
            "n_group": 1,
            "topk_group": 1,
        },
    ),
    "with a window": (
        "Qwen3",
        {"head_dim": 8, "qk_norm": True, "window": 7, "max_window_layers": 1},
        {"head_dim": 8, "use_sliding_window": True, "sliding_window": 7, "max_window_layers": 1},
    ),
}


EXPERTS = ("mixtral", "qwen 3 of experts", "deepseek 3")


@pytest.mark.parametrize("name", CASES)
def test_logits_and_gradients_are_those_of_transformers(name: str) -> None:
    kind, own, theirs = CASES[name]
    config = getattr(transformers, f"{kind}Config")(**THEIRS, **theirs, use_cache=False)
    torch.manual_seed(3)
    model = getattr(transformers, f"{kind}ForCausalLM")(config)
    for parameter in model.parameters():
        torch.nn.init.normal_(parameter, 0.5 if parameter.dim() == 1 else 0.0, 0.2)
    for buffer_name, buffer in model.named_buffers():
        if buffer_name.endswith("e_score_correction_bias"):
            torch.nn.init.normal_(buffer, 0.0, 0.1)
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


@pytest.mark.parametrize("name", EXPERTS)
def test_weights_of_experts_are_those_of_transformers(name: str, tmp_path: Path) -> None:
    """Files of the hub have a matrix for each expert; files of dslc have the stacks, which `transformers` reads too."""
    kind, own, theirs = CASES[name]
    model = getattr(transformers, f"{kind}ForCausalLM")(getattr(transformers, f"{kind}Config")(**THEIRS, **theirs))
    model.save_pretrained(tmp_path / "hub")
    assert any(".experts.0." in name for name in load_file(tmp_path / "hub" / "model.safetensors"))
    step = step_of(built(of(s.Llama, **SIZES, **own), tokens(40, 50)))
    step = replace(step, weights=WeightsStep(files=(str(tmp_path / "hub" / "model.safetensors"),)))
    made = build_model(step, "cpu")
    initial_weights.load(step, made)
    torch.testing.assert_close(made.state_dict(), dict(model.state_dict()), rtol=0, atol=0)

    save_weights(made, str(tmp_path / "hub"))
    (tmp_path / "hub" / "weights.safetensors").replace(tmp_path / "hub" / "model.safetensors")
    again = type(model).from_pretrained(tmp_path / "hub")
    torch.testing.assert_close(dict(again.state_dict()), dict(model.state_dict()), rtol=0, atol=0)


def test_a_rank_reads_its_rows_of_stacked_experts() -> None:
    matrices = {f"mlp.experts.{n}.{part}_proj.weight": torch.randn(6, 4) for n in range(5) for part in ("gate", "up")}
    stack = stack_experts(dict.fromkeys(matrices, (6, 4)), ["mlp.experts.gate_up_proj"])["mlp.experts.gate_up_proj"]
    full = torch.stack([torch.cat([matrices[name] for name in names]) for names in stack.matrices])
    assert stack.shape == full.shape == (5, 12, 4)
    for part in ((slice(1, 3), slice(0, 12), slice(0, 4)), (slice(0, 5), slice(4, 9), slice(1, 2))):
        assert _read_stack(stack, lambda name, inner: matrices[name][inner], part).equal(full[part])


def test_initial_values_are_those_of_transformers() -> None:
    graph = built(of(s.Llama, **SIZES, bias=True, init_std=0.1), tokens(40, 50))
    found = {init.parameter: (init.kind, init.a, init.b) for init in graph.inits}
    assert found["model.embed_tokens.weight"] == found["lm_head.weight"] == ("normal", 0.0, 0.1)
    assert found["model.layers.2.mlp.down_proj.weight"] == ("normal", 0.0, 0.1)
    assert found["model.layers.0.self_attn.q_proj.bias"][:2] == ("constant", 0.0)
    assert found["model.norm.weight"][:2] == ("constant", 1.0)
