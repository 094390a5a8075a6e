"""Families of the `transformers` library over the tensor and the context axis: which of them run, by their traces.

Each is a tiny network of a configuration. A family that is refused has the code of the refusal in the table.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import pytest

from dslc.compiler.ir.module_facts import ModelFacts
from dslc.compiler.ir.program import TransformersKind, TransformersStep
from dslc.compiler.ir.tensors import TensorFact
from dslc.compiler.placement.tensor_patterns import resolve_styles
from dslc.compiler.trace.trace_model import trace_model
from dslc.runtime.model.transformers_model import build_transformers, treat_as_known
from dslc.runtime.process.vision_library import let_torchvision_load

RANKS = 2
TOKENS = TensorFact(shape=(16,), dtype="int64")
IMAGES = TensorFact(shape=(3, 16, 16), dtype="float32")
LARGE_IMAGES = TensorFact(shape=(3, 32, 32), dtype="float32")

ENDS = {"bos_token_id": 1, "eos_token_id": 2}
SIZES = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4}
TEXT = {**SIZES, **ENDS, "vocab_size": 64, "pad_token_id": 0, "max_position_embeddings": 32}
GROUPED = {**TEXT, "num_key_value_heads": 2}
WINDOW = {**GROUPED, "head_dim": 8, "sliding_window": 4}
NARROW = {key: value for key, value in TEXT.items() if key != "intermediate_size"}
GPT2 = {**ENDS, "n_embd": 32, "n_layer": 2, "n_head": 4, "vocab_size": 64, "n_positions": 32}
EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16}
IMAGE = {**SIZES, "image_size": 16, "patch_size": 4}
SQUARE = {key: value for key, value in IMAGE.items() if key != "intermediate_size"}

OF_ATTENTION = ("*.q_proj: column", "*.k_proj: column", "*.v_proj: column")
OF_BERT = (
    *("*.self.query: column", "*.self.key: column", "*.self.value: column", "*.attention.output.dense: row"),
    *("*.intermediate.dense: column", "*.layer.?.output.dense: row"),
)
OF_BLOOM = ("*.dense_h_to_4h: column", "*.dense_4h_to_h: row")
OF_MLP = ("*.fc1: column", "*.fc2: row")
OF_OPT = (*OF_ATTENTION, "*.out_proj: row", *OF_MLP)


@dataclass(frozen=True)
class Family:
    """A configuration, a tensor plan (None: that of the library), and what each axis says: "runs", or a code."""

    arguments: dict[str, Any]
    tensor: str = "runs"
    context: str = "runs"
    plan: tuple[str, ...] | None = None
    task: TransformersKind = "causal_lm"
    input: TensorFact = field(default=TOKENS)


FAMILIES = {
    "llama": Family(GROUPED),
    "qwen2": Family(GROUPED),
    "qwen3": Family({**GROUPED, "head_dim": 8}),
    "phi": Family(TEXT),
    "phi3": Family(GROUPED),
    "olmo": Family(GROUPED),
    "olmo2": Family(GROUPED),
    "cohere": Family(GROUPED),
    "granite": Family(GROUPED),
    "smollm3": Family(GROUPED),
    "starcoder2": Family(GROUPED),
    "gpt_neox": Family(TEXT),
    "gemma": Family({**GROUPED, "head_dim": 8}),
    "gemma2": Family(WINDOW, context="E0440"),
    "gemma3_text": Family(WINDOW, context="E0441"),
    "mistral": Family({**GROUPED, "sliding_window": 4}, context="E0441"),
    "mixtral": Family({**GROUPED, "num_local_experts": 4, "sliding_window": None}, tensor="E0427", context="E0440"),
    "qwen3_moe": Family({**GROUPED, **EXPERTS}, tensor="E0427", context="E0440"),
    "gpt2": Family(GPT2, tensor="E0426", plan=("*.mlp.c_fc: column", "*.mlp.c_proj: row")),
    "gptj": Family({**GPT2, "rotary_dim": 4}, tensor="E0428", context="E0440", plan=(*OF_ATTENTION, "*.out_proj: row")),
    "gpt_neo": Family(
        {
            **ENDS,
            "hidden_size": 32,
            "num_layers": 2,
            "num_heads": 4,
            "vocab_size": 64,
            "window_size": 4,
            "attention_types": [[["global", "local"], 1]],
            "max_position_embeddings": 32,
        },
        tensor="E0428",
        context="E0440",
        plan=(*OF_ATTENTION, "*.out_proj: row"),
    ),
    "opt": Family(
        {**NARROW, "ffn_dim": 64, "word_embed_proj_dim": 32, "dropout": 0.0},
        tensor="E0428",
        context="E0442",
        plan=OF_OPT,
    ),
    "stablelm": Family(GROUPED, tensor="E0428", plan=(*OF_ATTENTION, "*.o_proj: row")),
    "bloom": Family(
        {**ENDS, "hidden_size": 32, "n_layer": 2, "n_head": 4, "vocab_size": 64}, context="E0442", plan=OF_BLOOM
    ),
    "falcon": Family(
        {**NARROW, "ffn_hidden_size": 64, "new_decoder_architecture": True, "num_kv_heads": 2},
        context="E0441",
        plan=OF_BLOOM,
    ),
    "mpt": Family(
        {"d_model": 32, "n_heads": 4, "n_layers": 2, "vocab_size": 64, "max_seq_len": 32},
        context="E0440",
        plan=("*.up_proj: column", "*.down_proj: row"),
    ),
    "bert": Family(TEXT, plan=OF_BERT, task="masked_lm"),
    "electra": Family({**TEXT, "embedding_size": 16}, plan=OF_BERT, task="masked_lm"),
    "roberta": Family({**TEXT, "max_position_embeddings": 34}, context="E0442", plan=OF_BERT, task="masked_lm"),
    "distilbert": Family(
        {"dim": 32, "n_layers": 2, "n_heads": 4, "hidden_dim": 64, "vocab_size": 64, "max_position_embeddings": 32},
        plan=("*.[qkv]_lin: column", "*.out_lin: row", "*.lin1: column", "*.lin2: row"),
        task="masked_lm",
    ),
    "albert": Family(
        {**TEXT, "embedding_size": 16},
        plan=(
            *("*.attention.query: column", "*.attention.key: column", "*.attention.value: column"),
            *("*.attention.dense: row", "*.ffn: column", "*.ffn_output: row"),
        ),
        task="masked_lm",
    ),
    "modernbert": Family(
        {**TEXT, "local_attention": 4, "cls_token_id": 1, "sep_token_id": 2},
        tensor="E0428",
        context="E0441",
        plan=("*.mlp.Wi: column",),
        task="masked_lm",
    ),
    "deberta-v2": Family(
        {**TEXT, "relative_attention": True, "pos_att_type": ["p2c", "c2p"], "position_biased_input": False},
        tensor="E0428",
        context="E0440",
        plan=("*.query_proj: column", "*.key_proj: column", "*.value_proj: column", "*.attention.output.dense: row"),
        task="masked_lm",
    ),
    "vit": Family(IMAGE, plan=(*OF_ATTENTION, "*.o_proj: row", *OF_MLP), task="image_classification", input=IMAGES),
    "dinov2": Family({**SQUARE, "mlp_ratio": 2}, plan=OF_MLP, task="image_classification", input=IMAGES),
    "beit": Family(IMAGE, plan=OF_MLP, task="image_classification", input=IMAGES),
    "swin": Family(
        {"embed_dim": 16, "depths": [2, 2], "num_heads": [2, 4], "window_size": 4, "image_size": 16, "patch_size": 2},
        plan=OF_MLP,
        task="image_classification",
        input=IMAGES,
    ),
    "convnext": Family(
        {"hidden_sizes": [8, 16, 16, 32], "depths": [1, 1, 1, 1], "image_size": 32},
        plan=("*.pwconv1: column", "*.pwconv2: row"),
        task="image_classification",
        input=LARGE_IMAGES,
    ),
    "resnet": Family(
        {"embedding_size": 8, "hidden_sizes": [8, 16], "depths": [1, 1]},
        plan=("classifier.1: gathered",),
        task="image_classification",
        input=LARGE_IMAGES,
    ),
}


def network_of(name: str) -> Any:
    let_torchvision_load()
    family = FAMILIES[name]
    labels = 4 if family.task == "image_classification" else 0
    return build_transformers(
        TransformersStep(name=name, kind=family.task, labels=labels, arguments=dict(family.arguments))
    )


def verdict_of_shares(facts: ModelFacts, plan: tuple[str, ...] | None) -> str:
    if facts.shares is not None:
        return "E0428" if facts.shares.fault else "runs"
    return next(fault.code for fault in resolve_styles(plan, facts, RANKS).faults)


def verdict_of_pieces(facts: ModelFacts) -> str:
    assert facts.pieces is not None
    return facts.pieces.code or "runs"


@pytest.mark.long
@pytest.mark.parametrize("name", FAMILIES)
def test_a_family_over_the_tensor_axis(name: str) -> None:
    family = FAMILIES[name]
    facts = trace_model(lambda: network_of(name), family.input, tensor=RANKS, tensor_plan=family.plan)
    assert verdict_of_shares(facts, family.plan) == family.tensor, facts.shares and facts.shares.fault


@pytest.mark.long
@pytest.mark.parametrize("name", [name for name, family in FAMILIES.items() if family.input is TOKENS])
def test_a_family_over_the_context_axis(name: str) -> None:
    family = FAMILIES[name]
    facts = trace_model(lambda: network_of(name), family.input, context=RANKS, ask=treat_as_known)
    assert verdict_of_pieces(facts) == family.context, facts.pieces and facts.pieces.fault
