"""Models written as public reference files write them, for tests of the axes: `python("reference_models:llama", …)`."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional as F

VOCAB, WIDTH, HEADS, LENGTH = 256, 32, 4, 16


# ------------------------------------------------------------------------------- Meta's and torchtitan's Llama


def precompute_freqs_cis(size: int, end: int, theta: float = 10000.0) -> Tensor:
    freqs = 1.0 / (theta ** (torch.arange(0, size, 2)[: size // 2].float() / size))
    freqs = torch.outer(torch.arange(end), freqs).float()
    return torch.polar(torch.ones_like(freqs), freqs)


def apply_rotary_emb(xq: Tensor, xk: Tensor, freqs_cis: Tensor) -> tuple[Tensor, Tensor]:
    xq_ = torch.view_as_complex(xq.float().reshape(*xq.shape[:-1], -1, 2))
    xk_ = torch.view_as_complex(xk.float().reshape(*xk.shape[:-1], -1, 2))
    freqs_cis = freqs_cis[None, :, None] if freqs_cis.dim() == 2 else freqs_cis[:, :, None]
    xq_out = torch.view_as_real(xq_ * freqs_cis).flatten(3)
    xk_out = torch.view_as_real(xk_ * freqs_cis).flatten(3)
    return xq_out.type_as(xq), xk_out.type_as(xk)


def repeat_kv(x: Tensor, times: int) -> Tensor:
    bs, slen, heads, size = x.shape
    return x[:, :, :, None].expand(bs, slen, heads, times, size).reshape(bs, slen, heads * times, size)


class LlamaAttention(nn.Module):
    def __init__(self, kv_heads: int) -> None:
        super().__init__()
        self.head_dim, self.times = WIDTH // HEADS, HEADS // kv_heads
        self.wq = nn.Linear(WIDTH, WIDTH, bias=False)
        self.wk = nn.Linear(WIDTH, kv_heads * self.head_dim, bias=False)
        self.wv = nn.Linear(WIDTH, kv_heads * self.head_dim, bias=False)
        self.wo = nn.Linear(WIDTH, WIDTH, bias=False)

    def forward(self, x: Tensor, freqs_cis: Tensor) -> Tensor:
        bs, slen, _ = x.shape
        xq, xk, xv = (w(x).view(bs, slen, -1, self.head_dim) for w in (self.wq, self.wk, self.wv))
        xq, xk = apply_rotary_emb(xq, xk, freqs_cis)
        xk, xv = repeat_kv(xk, self.times), repeat_kv(xv, self.times)
        xq, xk, xv = (t.transpose(1, 2) for t in (xq, xk, xv))
        y = F.scaled_dot_product_attention(xq, xk, xv, is_causal=True)
        return self.wo(y.transpose(1, 2).contiguous().view(bs, slen, -1))


class LlamaFeedForward(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.w1, self.w3 = nn.Linear(WIDTH, 48, bias=False), nn.Linear(WIDTH, 48, bias=False)
        self.w2 = nn.Linear(48, WIDTH, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.w2(F.silu(self.w1(x)) * self.w3(x))


class LlamaBlock(nn.Module):
    def __init__(self, kv_heads: int) -> None:
        super().__init__()
        self.attention, self.feed_forward = LlamaAttention(kv_heads), LlamaFeedForward()
        self.attention_norm, self.ffn_norm = nn.RMSNorm(WIDTH), nn.RMSNorm(WIDTH)

    def forward(self, x: Tensor, freqs_cis: Tensor) -> Tensor:
        h = x + self.attention(self.attention_norm(x), freqs_cis)
        return h + self.feed_forward(self.ffn_norm(h))


class Llama(nn.Module):
    freqs_cis: Tensor

    def __init__(self, kv_heads: int) -> None:
        super().__init__()
        self.tok_embeddings = nn.Embedding(VOCAB, WIDTH)
        self.layers = nn.ModuleDict({str(n): LlamaBlock(kv_heads) for n in range(2)})
        self.norm, self.output = nn.RMSNorm(WIDTH), nn.Linear(WIDTH, VOCAB, bias=False)
        self.register_buffer("freqs_cis", precompute_freqs_cis(WIDTH // HEADS, 2 * LENGTH), persistent=False)

    def forward(self, tokens: Tensor) -> Tensor:
        return self.at(tokens, self.freqs_cis[: tokens.shape[1]])

    def at(self, tokens: Tensor, freqs_cis: Tensor) -> Tensor:
        h = self.tok_embeddings(tokens)
        for layer in self.layers.values():
            h = layer(h, freqs_cis)
        return self.output(self.norm(h))


class LlamaAtPositions(Llama):
    """Takes the positions of its tokens, as pieces of sequences need it."""

    def forward(self, tokens: Tensor, position_ids: Tensor | None = None) -> Tensor:
        if position_ids is None:
            position_ids = torch.arange(tokens.shape[1], device=tokens.device)[None]
        return self.at(tokens, self.freqs_cis[position_ids])


def llama(kv_heads: int = 2, positions: bool = False) -> nn.Module:
    return (LlamaAtPositions if positions else Llama)(kv_heads)


LLAMA_PLAN = """[
    "layers.*.w[qkv]: column", "layers.*.wo: row", "layers.*.w[13]: column", "layers.*.w2: row",
    "tok_embeddings: vocabulary", "output: gathered",
  ]"""


# -------------------------------------------------------------------------------- joined projections, as in GPT-2


class JoinedAttention(nn.Module):
    """Queries, keys and values of one dense layer; with fewer `kv_heads` these are of unequal sizes."""

    def __init__(self, kv_heads: int, by_dims: bool) -> None:
        super().__init__()
        self.size, self.kv_heads, self.by_dims = WIDTH // HEADS, kv_heads, by_dims
        self.c_attn = nn.Linear(WIDTH, WIDTH + 2 * kv_heads * self.size)
        self.c_proj = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        batch, length, _ = x.shape
        joined = self.c_attn(x)
        if self.by_dims:  # as timm's vision transformer
            q, k, v = joined.reshape(batch, length, 3, -1, self.size).permute(2, 0, 3, 1, 4)
        else:
            unit = joined.shape[-1] // (HEADS + 2 * self.kv_heads)
            parts = joined.split([HEADS * unit, self.kv_heads * unit, self.kv_heads * unit], -1)
            q, k, v = (part.view(batch, length, -1, self.size).transpose(1, 2) for part in parts)
        k, v = (part.repeat_interleave(q.shape[1] // part.shape[1], 1) for part in (k, v))
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.c_proj(y.transpose(1, 2).reshape(batch, length, -1))


class JoinedBlock(nn.Module):
    def __init__(self, kv_heads: int, by_dims: bool) -> None:
        super().__init__()
        self.ln_1, self.ln_2 = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.attn = JoinedAttention(kv_heads, by_dims)
        self.gate_up, self.down = nn.Linear(WIDTH, 96), nn.Linear(48, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attn(self.ln_1(x))
        gate, up = self.gate_up(self.ln_2(x)).chunk(2, dim=-1)
        return x + self.down(F.silu(gate) * up)


class JoinedGPT(nn.Module):
    def __init__(self, kv_heads: int, by_dims: bool) -> None:
        super().__init__()
        self.wte, self.wpe = nn.Embedding(VOCAB, WIDTH), nn.Embedding(LENGTH, WIDTH)
        self.h = nn.ModuleList(JoinedBlock(kv_heads, by_dims) for _ in range(2))
        self.ln_f, self.lm_head = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, VOCAB, bias=False)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.wte(tokens) + self.wpe(torch.arange(tokens.shape[1], device=tokens.device))
        for block in self.h:
            x = block(x)
        return self.lm_head(self.ln_f(x))


def gpt(kv_heads: int = HEADS, by_dims: bool = False) -> nn.Module:
    return JoinedGPT(kv_heads, by_dims)


def joined_plan(parts: str) -> str:
    return (
        f'["h.*.c_attn: column in {parts}", "h.*.c_proj: row", "h.*.gate_up: column in 2 parts", "h.*.down: row", '
        '"wte: vocabulary", "lm_head: gathered"]'
    )
