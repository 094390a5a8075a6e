"""A cache of keys and values, for texts that a network continues token by token.

Model: the first pass is over a whole window of positions. Each attention keeps its keys and values. A later pass has
one token of each text, at a position of its own: learned and rotary positions are those of the token, and its query
meets the kept keys and values up to this position, the token's own among them. What the first pass kept of positions
behind a text is never seen, and replaced as the text grows.

Contract: outputs are those of a pass over all positions, to rounding. `KeyValueCache` changes modules, and `remove`
restores them.

Limits: causal networks of the language, of layers that treat each position by itself, attention aside; whole sequences
on each rank.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from dslc.runtime.model.llama_modules import GroupedAttention
from dslc.runtime.model.modules import Attention, PositionalEmbedding


@dataclass
class _Positions:
    """The position of the token of each text, (batch, 1), as learned positions take it."""

    places: Tensor


class KeyValueCache:
    """The keys and values of a model, which it keeps until `remove`. Without `positions` a pass is over a window."""

    def __init__(self, model: nn.Module) -> None:
        self._positions: Tensor | None = None
        self._kept: dict[nn.Module, tuple[Tensor, Tensor]] = {}
        self._attention = [each for each in model.modules() if isinstance(each, Attention | GroupedAttention)]
        self._embeddings = [each for each in model.modules() if isinstance(each, PositionalEmbedding)]
        self._functions = [each.attend for each in self._attention]
        for module, function in zip(self._attention, self._functions, strict=True):
            module.attend = functools.partial(self._attend, module, function)

    def enter(self, positions: Tensor | None) -> None:
        """Begins a pass over the tokens at these positions, (batch), of the texts; None: over whole windows."""
        self._positions = positions
        places = None if positions is None else positions[:, None]
        for embedding in self._embeddings:
            embedding.documents = None if places is None else _Positions(places)
        for module in self._attention:
            if isinstance(module, GroupedAttention):
                module.positions = places

    def remove(self) -> None:
        """Restores the modules."""
        self.enter(None)
        for module, function in zip(self._attention, self._functions, strict=True):
            module.attend = function
        self._kept.clear()

    def _attend(
        self,
        module: nn.Module,
        attend: Callable[..., Tensor],
        query: Tensor,
        key: Tensor,
        value: Tensor,
        *,
        is_causal: bool,
        window: int | None = None,
    ) -> Tensor:
        """Returns attention, (batch, heads, length, head_dim), and keeps the keys and values."""
        if self._positions is None:
            self._kept[module] = key.contiguous(), value.contiguous()
            more = {} if window is None else {"window": window}
            return attend(query, key, value, is_causal=is_causal, **more)
        keys, values = self._kept[module]
        rows = torch.arange(len(self._positions), device=key.device)
        keys[rows, :, self._positions], values[rows, :, self._positions] = key[:, :, 0], value[:, :, 0]
        places, last = torch.arange(keys.shape[2], device=key.device), self._positions[:, None]
        mask = places <= last if window is None else (places <= last) & (places > last - window)
        grouped = keys.shape[1] != query.shape[1]
        return F.scaled_dot_product_attention(query, keys, values, attn_mask=mask[:, None, None, :], enable_gqa=grouped)
