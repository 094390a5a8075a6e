"""Exchanges of gradients by the book: what all ranks agree on, in numpy."""

from __future__ import annotations

import hashlib

import numpy as np
import torch

from helpers.exchanges import Array, Weights, buckets_of, flat, mean_of, unflatten

SEED = 0


def rounded(gradients: list[Weights], exchange: str) -> Weights:
    """Returns the mean of gradients that are sent in 16 bits, as docs/exchanges.md says."""
    ranks = len(gradients)
    found = {}
    largest = max(float(np.abs(each).max()) for gradient in gradients for each in gradient.values())
    scale = 2.0 ** np.floor(np.log2(2.0**15 / largest)) if exchange == "fp16" else 1.0
    dtype = torch.float16 if exchange == "fp16" else torch.bfloat16
    for name in gradients[0]:
        low = [torch.from_numpy(each[name] * np.float32(scale / ranks)).to(dtype) for each in gradients]
        total = low[0]
        for each in low[1:]:
            total = total + each
        found[name] = total.float().numpy() / np.float32(scale)
    return found


def drawn(name: str, columns: int, rank: int, seed: int = SEED) -> Array:
    told = hashlib.sha256(f"powersgd {seed} {name}".encode()).digest()
    generator = torch.Generator().manual_seed(int.from_bytes(told[:8], "little", signed=True))
    return torch.randn((columns, rank), generator=generator).numpy()


class LowRank:
    """The state of all ranks, by the name of a matrix."""

    def __init__(self, ranks: int, rank: int) -> None:
        self.rank = rank
        self.errors: dict[str, list[Array]] = {}
        self.factors: dict[str, Array] = {}
        self.ranks = ranks

    def agreed(self, gradients: list[Weights]) -> Weights:
        found = mean_of(gradients)
        for name, whole in found.items():
            rows, columns = whole.shape[0], int(np.prod(whole.shape[1:]))
            if whole.ndim < 2 or (rows + columns) * self.rank >= rows * columns:
                continue
            errors = self.errors.setdefault(name, [np.zeros((rows, columns), np.float32) for _ in range(self.ranks)])
            right = self.factors.get(name, drawn(name, columns, self.rank))
            matrices = [each[name].reshape(rows, columns) + e for each, e in zip(gradients, errors, strict=True)]
            left, _ = np.linalg.qr(np.mean([each @ right for each in matrices], axis=0, dtype=np.float32))
            self.factors[name] = np.asarray(np.mean([each.T @ left for each in matrices], axis=0, dtype=np.float32))
            low = left @ self.factors[name].T
            self.errors[name] = [each - low for each in matrices]
            found[name] = low.reshape(whole.shape)
        return found


def coded(row: Array) -> Array:
    """Returns a row after MinMaxUInt8, as docs/exchanges.md has it."""
    low, high = row.min(), row.max()
    scale = np.float32(255) / (high - low + np.float32(1e-7))
    upper = np.round(high * scale)
    lower = upper - 255
    code = (np.minimum(np.round(row * scale), upper) - lower).astype(np.uint8)
    return (code.astype(np.float32) + lower) / scale


def exchanged(buckets: list[Array]) -> Array:
    """Returns what all members agree on."""
    members, count = len(buckets), buckets[0].size
    rows = [np.pad(each, (0, -count % members)).reshape(members, -1) for each in buckets]
    agreed = [
        coded(np.asarray(np.mean([coded(each[owner]) for each in rows], axis=0, dtype=np.float32)))
        for owner in range(members)
    ]
    return np.concatenate(agreed)[:count]


def in_codes(gradients: list[Weights], pieces: int = 1) -> Weights:
    found: Weights = {}
    for names in buckets_of(gradients[0], sorted(gradients[0], reverse=True)):
        whole = [flat(each, names) for each in gradients]
        nodes = [np.mean(whole[n : n + pieces], axis=0, dtype=np.float32) for n in range(0, len(whole), pieces)]
        cut = [np.pad(each, (0, -each.size % pieces)).reshape(pieces, -1) for each in nodes]
        agreed = np.concatenate([exchanged([each[piece] for each in cut]) for piece in range(pieces)])
        found |= unflatten(agreed[: whole[0].size], gradients[0], names)
    return found
