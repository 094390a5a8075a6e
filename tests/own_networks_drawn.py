"""Networks that functions make, drawn with the plans that cut them over a tensor axis.

Model: a `Family` is one of the networks of `OWN` (the module `own` beside a job), of own_transformer.py or of the
`transformers` library, in sizes that fit the data. `groups` are entries of `tensor_plan` that fit by themselves, in any
choice; `draw_plan` takes some of them, and now and then spoils one.
"""

from __future__ import annotations

import json
import random
from collections.abc import Sequence
from dataclasses import dataclass
from math import prod

OWN = '''
import torch
from torch import nn
from torch.utils.data import TensorDataset


def network(inputs=6, width=8, outputs=3, depth=1):
    """Sequences within a sequence."""
    inner = [nn.Sequential(nn.Linear(width, width), nn.LayerNorm(width), nn.Tanh()) for _ in range(depth)]
    return nn.Sequential(nn.Flatten(), nn.Linear(inputs, width), nn.Tanh(), nn.Linear(width, width), nn.Tanh(),
                         *inner, nn.Linear(width, outputs))


class Blocks(nn.Module):
    """A module that is no sequence, with a parameter of its own, a buffer and perhaps a tied weight."""

    def __init__(self, inputs, width, outputs, tie):
        super().__init__()
        self.into = nn.Linear(inputs, width)
        self.blocks = nn.ModuleList(nn.Sequential(nn.LayerNorm(width), nn.Linear(width, width)) for _ in range(2))
        if tie:
            self.blocks[1][1].weight = self.blocks[0][1].weight
        self.scale = nn.Parameter(torch.ones(1))
        self.register_buffer("seen", torch.zeros(width))
        self.out = nn.Linear(width, outputs)

    def forward(self, x):
        x = self.into(x.flatten(1))
        for block in self.blocks:
            x = x + self.scale * torch.tanh(block(x)) + self.seen
        return self.out(x)


def blocks(inputs=6, width=8, outputs=3, tie=True):
    return Blocks(inputs, width, outputs, tie)


class Skips(nn.Module):
    """Skip connections that cross every cut; a parameter of its own before its first layer; views and masks."""

    def __init__(self, inputs, width, outputs, norm):
        super().__init__()
        self.weight = nn.Parameter(torch.linspace(0.5, 1.5, inputs))
        self.enter = nn.Linear(inputs, width)
        norms = [nn.BatchNorm1d(width) if norm else nn.Tanh() for _ in range(4)]
        self.down = nn.ModuleList([nn.Sequential(nn.Linear(width, width), norms[n]) for n in range(2)])
        self.up = nn.ModuleList([nn.Sequential(nn.Linear(width, width), norms[n]) for n in (2, 3)])
        self.leave = nn.Linear(width, outputs)

    def forward(self, x):
        samples = len(x)
        flat = x.reshape(samples, -1)
        with torch.no_grad():
            scale = flat.std(dim=1, keepdim=True) + 1
        first = self.enter(self.weight * flat / scale)
        second = self.down[0](first)
        x = self.down[1](second)
        x = self.up[0](x) + second
        x = self.up[1](x) * torch.sigmoid(first)
        if self.training:
            x = x * 1.0
        return self.leave(x.view(samples, 1, -1)[:, 0])


def skips(inputs=6, width=8, outputs=3, norm=False):
    return Skips(inputs, width, outputs, norm)


class Block(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.mix = nn.Linear(width, width)
        self.up = nn.Linear(width, 2 * width)
        self.down = nn.Linear(2 * width, width)

    def forward(self, x, *, mask):
        weights = (self.mix(x) @ x.transpose(1, 2)).masked_fill(mask, float("-inf")).softmax(-1)
        return x + self.down(self.up(self.norm(weights @ x)).relu()), mask


class Decoder(nn.Module):
    """Blocks that hand a mask along; positions are a parameter of its own, and the head may be its table of tokens."""

    def __init__(self, vocab, width, blocks, tie):
        super().__init__()
        self.table = nn.Embedding(vocab, width)
        self.position = nn.Parameter(0.1 * torch.randn(16, width))
        self.register_buffer("later", torch.ones(16, 16, dtype=torch.bool).triu(1), persistent=False)
        self.register_buffer("scale", torch.full((width,), 0.5))
        self.blocks = nn.ModuleList([Block(width) for _ in range(blocks)])
        self.head = nn.Linear(width, vocab, bias=False)
        if tie:
            self.head.weight = self.table.weight

    def forward(self, tokens):
        length = tokens.size(1)
        assert length <= 16
        x = self.table(tokens) + self.position[:length]
        mask = self.later[:length, :length].expand(tokens.size(0), length, length)
        for block in self.blocks:
            x, mask = block(x, mask=mask)
        return self.head(x * self.scale)


def decoder(vocab=256, width=8, blocks=2, tie=True):
    return Decoder(vocab, width, blocks, tie)


def classified(output, target):
    return nn.functional.cross_entropy(output.float(), target, reduction="none")


def measured(output, target, power=2):
    return (output.float() - target).abs().pow(power).flatten(1).mean(1)


def data():
    """Six numbers and a class; a pair is (train, validation)."""
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(61, 6, generator=generator)
    y = (x[:, 0] > 0).long() + (x[:, 1] > 0).long()
    return TensorDataset(x[:50], y[:50]), TensorDataset(x[50:], y[50:])
'''

Plan = Sequence[str]


@dataclass(frozen=True, kw_only=True)
class Family:
    """`groups` is empty where the library publishes a plan."""

    call: str
    groups: Sequence[Plan] = ()


def families(rng: random.Random, shape: tuple[int, ...], output: tuple[int, ...], *, tokens: bool) -> list[Family]:
    """What takes samples of `shape` and gives `output`."""
    width, flag = rng.choice((8, 8, 16, 6)), rng.choice(("true", "false"))
    if not tokens:
        depth, whole = rng.randint(0, 3), ("gathered", "row_of_whole")
        ends = f"inputs = {prod(shape)}, width = {width}, outputs = {output[0]}"
        batch_norm = "true" if rng.random() < 0.2 else "false"
        return [
            Family(
                call=f'python("own:network", {ends}, depth = {depth})',
                groups=(("1: column", "3: row"), *((f"{5 + n}.0: {rng.choice(whole)}",) for n in range(depth))),
            ),
            Family(
                call=f'python("own:blocks", {ends}, tie = {flag})',
                groups=((f"into: {rng.choice(whole)}",), (f"blocks.*.1: {rng.choice(whole)}",)),
            ),
            Family(
                call=f'python("own:skips", {ends}, norm = {batch_norm})',
                groups=tuple((f"{name}: {rng.choice(whole)}",) for name in ("enter", "down.*.0", "up.*.0")),
            ),
        ]
    layers, vocab = rng.randint(1, 4), output[-1]
    table, head = "table: vocabulary", "head: gathered"
    groups: tuple[Plan, ...] = ((table, head),) if flag == "true" else ((table,), (head,))
    heads = rng.choice((2, 2, 4, 1))
    return [
        Family(
            call=f'python("own:decoder", vocab = {vocab}, width = {width}, blocks = {layers}, tie = {flag})',
            groups=(("blocks.*.up: column", "blocks.*.down: row"), ("blocks.*.mix: gathered",), *groups),
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


def draw_plan(rng: random.Random, groups: Sequence[Plan]) -> str:
    """An expression of `tensor_plan`; "" for none."""
    entries = [entry for group in rng.sample(groups, rng.randint(1, len(groups))) for entry in group] if groups else []
    if rng.random() < 0.15:
        entries = _spoilt(rng, entries or ["*.gate: column"])
    return json.dumps(entries) if entries else ""


def _spoilt(rng: random.Random, entries: list[str]) -> list[str]:
    """One entry less, or in another style."""
    n = rng.randrange(len(entries))
    style = rng.choice(("column", "row", "gathered", "row_of_whole", "vocabulary", "summed", ""))
    return [*entries[:n], *([f"{entries[n].partition(':')[0]}: {style}"] if style else []), *entries[n + 1 :]]
