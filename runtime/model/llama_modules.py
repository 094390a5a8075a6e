"""Modules of language models of the kind of Llama: grouped-query attention, gated networks, and blocks of them.

Model: as in modules.py, parts are attributes that the builder adds. Their names are the names of `transformers`, so
that weights of its Llama and Qwen models fit. So do the order of rows and the pairs that rotary positions turn: number
i of a head with number i + head_dim / 2.

Contract: as in modules.py. Rotary positions are computed in float32 in each forward pass: nothing is kept between them,
and there is no longest sequence.
"""

from __future__ import annotations

from collections.abc import Callable
from math import pi

import torch
import torch.nn.functional as F
from torch import Tensor, nn

Scaling = tuple[str | float | int, ...]


class GroupedAttention(nn.Module):
    """Self-attention whose keys and values may have fewer heads than its queries (Ainslie et al. 2023,
    arXiv:2305.13245), with rotary positions (Su et al. 2021, arXiv:2104.09864), a window, and norms of queries and keys
    (Henry et al. 2020, arXiv:2010.04245), each as asked for.

    Parts: `q_proj`, `k_proj`, `v_proj`, `o_proj`, and `q_norm`, `k_norm`, `dropout` if there are any. The input is the
    beginning of a sequence or, with `piece`, the piece of that number, of equal pieces. `attend` may be replaced, for
    example by a function that gathers keys and values; it takes (batch, heads, length, head_dim), and returns the shape
    of the queries.
    """

    q_proj: nn.Module
    k_proj: nn.Module
    v_proj: nn.Module
    q_norm: nn.Module | None
    k_norm: nn.Module | None
    o_proj: nn.Module
    dropout: nn.Module | None
    attend: Callable[..., Tensor]

    def __init__(
        self,
        head_dim: int,
        causal: bool = False,
        rope_theta: float | None = None,
        rope_scaling: Scaling | None = None,
        window: int | None = None,
    ) -> None:
        super().__init__()
        self.head_dim = head_dim
        self.causal = causal
        self.rope_theta = rope_theta
        self.rope_scaling = rope_scaling
        self.window = window
        self.piece = 0
        self.positions: Tensor | None = None  # of each token, (batch, length); by default one after another
        self.attend = attend
        for part in ("q_proj", "k_proj", "v_proj", "q_norm", "k_norm", "o_proj", "dropout"):
            self.register_module(part, None)  # fixes their order, and so that of the parameters

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (self._heads(projection(x)) for projection in (self.q_proj, self.k_proj, self.v_proj))
        if self.q_norm is not None and self.k_norm is not None:
            q, k = self.q_norm(q), self.k_norm(k)
        if self.rope_theta is not None:
            angles = self._angles(q.shape[1], q.device)
            cosines, sines = angles.cos(), angles.sin()
            q, k = _turned(q, cosines, sines), _turned(k, cosines, sines)
        y = self.attend(
            q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2), is_causal=self.causal, window=self.window
        )
        out: Tensor = self.o_proj(y.transpose(1, 2).flatten(2))
        if self.dropout is not None:
            out = self.dropout(out)
        return out

    def _heads(self, rows: Tensor) -> Tensor:
        heads: Tensor = rows.unflatten(-1, (-1, self.head_dim))
        return heads

    def _angles(self, length: int, device: torch.device) -> Tensor:
        """Returns the angle of each position and pair: (length, 1, head_dim / 2), float32; for each sample where these
        have positions of their own.
        """
        assert self.rope_theta is not None
        first_position = self.piece * length
        positions = torch.arange(first_position, first_position + length, dtype=torch.float32, device=device)
        if self.positions is not None:
            positions = self.positions.float()
        pairs = torch.arange(0, self.head_dim, 2, dtype=torch.float32, device=device)
        frequencies = _scaled(1.0 / self.rope_theta ** (pairs / self.head_dim), self.rope_scaling)
        return (positions[..., None] * frequencies)[..., None, :]

    def extra_repr(self) -> str:
        names = ("head_dim", "causal", "rope_theta", "rope_scaling", "window")
        return ", ".join(f"{name}={getattr(self, name)}" for name in names)


def _scaled(frequencies: Tensor, scaling: Scaling | None) -> Tensor:
    """Returns the frequencies, in radians for each position, for sequences longer than those trained on."""
    if scaling is None:
        return frequencies
    kind, factor, *more = scaling
    assert isinstance(factor, (int, float))
    if kind == "linear":
        return frequencies / factor
    assert kind == "llama3"
    low, high, original = (float(number) for number in more)
    # In the original context: fewer turns than `low` are slowed, more than `high` are not, between them a share is.
    turns = original * frequencies / (2 * pi)
    share = ((turns - low) / (high - low)).clamp(0, 1)
    return (1 - share) * frequencies / factor + share * frequencies


def _turned(x: Tensor, cosines: Tensor, sines: Tensor) -> Tensor:
    """Returns `x`, (batch, length, heads, head_dim), with each pair of numbers turned by its angle."""
    one, second_half = x.to(torch.promote_types(x.dtype, torch.float32)).chunk(2, -1)
    rotated = torch.addcmul(one * cosines, second_half, sines, value=-1)
    second = torch.addcmul(second_half * cosines, one, sines)
    return torch.cat((rotated, second), -1).to(x.dtype)


def attend(
    query: Tensor, key: Tensor, value: Tensor, *, is_causal: bool, window: int | None = None, first_position: int = 0
) -> Tensor:
    """Returns attention for queries of the positions from `first_position` on; keys and values begin at 0 and, under a
    causal mask, end with the last query.

    All are (batch, heads, length, head_dim); keys and values may have fewer heads, each for as many of the queries'.
    With `window` a position sees itself and the positions before it, `window` in all.
    """
    grouped = key.shape[1] != query.shape[1]
    own_length, length = query.shape[2], key.shape[2]
    if first_position == 0 and (window is None or window >= length):
        return F.scaled_dot_product_attention(query, key, value, is_causal=is_causal, enable_gqa=grouped)
    mask = None
    if is_causal:
        places = torch.arange(first_position, first_position + own_length, device=query.device)[:, None]
        key_positions = torch.arange(length, device=query.device)
        mask = (
            key_positions <= places if window is None else (key_positions <= places) & (key_positions > places - window)
        )
    return F.scaled_dot_product_attention(query, key, value, attn_mask=mask, enable_gqa=grouped)


class GatedMLP(nn.Module):
    """Two dense layers, one of them through an activation, multiplied, and a third (Shazeer 2020, arXiv:2002.05202).

    Parts: `gate_proj`, `act_fn`, `up_proj`, `down_proj`.
    """

    gate_proj: nn.Module
    act_fn: nn.Module
    up_proj: nn.Module
    down_proj: nn.Module

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.down_proj(self.act_fn(self.gate_proj(x)) * self.up_proj(x))
        return out


class LlamaBlock(nn.Module):
    """Attention and a gated network, each normalised before and added to its input (Touvron et al. 2023,
    arXiv:2302.13971).

    Parts: `input_layernorm`, `self_attn`, `post_attention_layernorm`, `mlp`.
    """

    input_layernorm: nn.Module
    self_attn: nn.Module
    post_attention_layernorm: nn.Module
    mlp: nn.Module

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.self_attn(self.input_layernorm(x))
        out: Tensor = x + self.mlp(self.post_attention_layernorm(x))
        return out
