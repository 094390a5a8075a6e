"""Networks that functions make, drawn with the plans that cut them over a tensor axis.

Model: a `Family` is one of the networks of own_networks.py, of own_transformer.py or of the `transformers` library, in
sizes that fit the data. `groups` are entries of `tensor_plan` that fit by themselves, in any choice; `draw_plan` takes
some of them, and now and then spoils one.
"""

from __future__ import annotations

import json
import random
import re
from collections.abc import Sequence
from dataclasses import dataclass
from math import prod

Plan = Sequence[str]

# Dense layers, by the names of networks.
ADAPTED = {
    "own_networks:network": ("1", "3"),
    "own_networks:Residual": ("into", "*.1"),
    "own_networks:Skips": ("enter", "down.*.0"),
    "own_networks:Decoder": ("up", "*.mix", "head"),
    "own_transformer:network": ("q", "out", "*.1.up"),
    "gpt2": ("c_attn", "*.0.mlp.c_proj"),
    "llama": ("q_proj", "*.0.mlp.*_proj"),
}
ADAPTERS = 0.2  # the share of such networks with an adapter
DROPOUTS = 0.3  # the share of networks with dropout


@dataclass(frozen=True, kw_only=True)
class Family:
    """`groups` is empty where the library publishes a plan."""

    call: str
    groups: Sequence[Plan] = ()


def families(rng: random.Random, shape: tuple[int, ...], output: tuple[int, ...], *, tokens: bool) -> list[Family]:
    """Returns networks that take samples of `shape` and return `output`."""
    width, flag = rng.choice((8, 8, 16, 6)), rng.choice(("true", "false"))
    if not tokens:
        depth, whole = rng.randint(0, 3), ("gathered", "row_of_whole")
        ends = f"inputs = {prod(shape)}, width = {width}, outputs = {output[0]}"
        batch_norm = "true" if rng.random() < 0.2 else "false"
        return [
            Family(
                call=f'python("own_networks:network", {ends}, depth = {depth})',
                groups=(("1: column", "3: row"), *((f"{5 + n}.0: {rng.choice(whole)}",) for n in range(depth))),
            ),
            Family(
                call=f'python("own_networks:Residual", {ends}, tie = {flag})',
                groups=((f"into: {rng.choice(whole)}",), (f"blocks.*.1: {rng.choice(whole)}",)),
            ),
            Family(
                call=f'python("own_networks:Skips", {ends}, norm = {batch_norm})',
                groups=tuple((f"{name}: {rng.choice(whole)}",) for name in ("enter", "down.*.0", "up.*.0")),
            ),
        ]
    layers, vocab = rng.randint(1, 4), output[-1]
    table, head = "table: vocabulary", "head: gathered"
    groups: tuple[Plan, ...] = ((table, head),) if flag == "true" else ((table,), (head,))
    heads = rng.choice((2, 2, 4, 1))
    return [
        Family(
            call=f'python("own_networks:Decoder", vocab = {vocab}, width = {width}, blocks = {layers}, tie = {flag})',
            groups=(("blocks.*.up: column", "blocks.*.down: row"), ("blocks.*.mix: gathered",), *groups),
        ),
        Family(
            call=f'python("own_transformer:network", vocab = {vocab}, width = {4 * heads}, heads = {heads}, '
            f"blocks = {layers}, tie = {flag}, joined = true)",
            groups=(
                (
                    "blocks.*.attention.qkv: column in 3 parts",
                    "blocks.*.attention.norm: summed",
                    "blocks.*.attention.out: row",
                ),
                ("blocks.*.both: column in parts [1, 1]", "blocks.*.down: row"),
                *groups,
            ),
        ),
        Family(
            call=f'python("own_transformer:network", vocab = {vocab}, width = {4 * heads}, heads = {heads}, '
            f"blocks = {layers}, tie = {flag}, by_hand = {rng.choice(('true', 'false'))})",
            groups=(
                ("blocks.*.attention.[qkv]: column", "blocks.*.attention.norm: summed", "blocks.*.attention.out: row"),
                ("blocks.*.up: column", "blocks.*.gate: column", "blocks.*.down: row"),
                *groups,
            ),
        ),
        Family(
            call=f'transformers("gpt2", n_layer = {layers}, n_embd = 16, n_head = 2, n_positions = 32, '
            f"resid_pdrop = 0.0, embd_pdrop = 0.0, attn_pdrop = 0.0, vocab_size = {vocab})",
            groups=(("transformer.wte: vocabulary", "lm_head: gathered"),),
        ),
        Family(
            call=f'transformers("llama", num_hidden_layers = {layers}, hidden_size = 16, intermediate_size = 24, '
            f"num_attention_heads = {rng.choice((2, 4, 4))}, num_key_value_heads = {rng.choice((2, 2, 1))}, "
            f"max_position_embeddings = 32, tie_word_embeddings = {flag}, vocab_size = {vocab})"
        ),
    ]  # fmt: skip


def draw_adapter(rng: random.Random, network: str) -> str:
    """Returns an expression of `model.adapter` for a network of a job; "" for none."""
    layers = next((each for name, each in ADAPTED.items() if f'("{name}"' in network), ())
    layers = ("qkv", "out", "*.1.both") if "joined = true" in network else layers
    if not layers or rng.random() >= ADAPTERS:
        return ""
    targets = json.dumps(rng.sample(layers, rng.randint(1, len(layers))))
    more = rng.choice(
        ("", "", ", alpha = 2, rslora = true", ', save = ["*norm*", "nothing"]', ', save = ["*head", "table"]')
    )
    return f"lora({rng.choice((1, 2, 4))}, {targets}{more})"


def draw_dropout(rng: random.Random, network: str, share: float = DROPOUTS) -> str:
    """Returns a network with dropout, where its kind has some, or the same."""
    if rng.random() >= share or "dropout" in network:
        return network
    p = rng.choice((0.1, 0.2, 0.5))
    if network.startswith("["):
        blocks = re.sub(r"(\b(?:attention|transformer_block)\([^()]*)\)", rf"\1, dropout = {p})", network)
        before, layer, after = blocks.rpartition("linear(")
        return f"{before}dropout({p}), {layer}{after}"
    if network.startswith('transformers("gpt2"'):
        return network.replace("pdrop = 0.0", f"pdrop = {p}")
    words = {
        "gpt(": "dropout", "vit(": "dropout", "mlp(": "dropout", 'python("own_networks:network"': "dropout",
        'python("own_transformer:network"': "dropout", 'transformers("llama"': "attention_dropout",
    }  # fmt: skip
    word = next((word for start, word in words.items() if network.startswith(start)), "")
    return f"{network.removesuffix(')')}, {word} = {p})" if word else network


def draw_plan(rng: random.Random, groups: Sequence[Plan]) -> str:
    """Returns an expression of `tensor_plan`; "" for none."""
    entries = [entry for group in rng.sample(groups, rng.randint(1, len(groups))) for entry in group] if groups else []
    if rng.random() < 0.15:
        entries = _spoilt(rng, entries or ["*.gate: column"])
    return json.dumps(entries) if entries else ""


def _spoilt(rng: random.Random, entries: list[str]) -> list[str]:
    """Removes one entry, or gives it another style."""
    n = rng.randrange(len(entries))
    style = rng.choice(("column", "row", "gathered", "row_of_whole", "vocabulary", "summed", ""))
    return [*entries[:n], *([f"{entries[n].partition(':')[0]}: {style}"] if style else []), *entries[n + 1 :]]
