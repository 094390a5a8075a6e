"""Documents in one sequence: attention and positions that stay within each.

Model: a token ends a document. Attention sees the positions of its own document alone, and learned positions begin anew
with each. Rotary positions need nothing: attention depends on the distance alone, and both are of one document.

Contract: `apply` changes modules in place; names and parameters stay. The output at a position, and its gradient, are
the same as for its document alone, except for rounding. The mask is made once a pass, (batch, 1, length, length) in the
dtype of the queries, and all layers with one window share it.

Limits: attention is computed in full, over all pairs of positions, whatever the documents. What is masked depends on
the last input that the model was given: a module is run again, for its gradient, before the next input.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from dslc.runtime.model.llama_modules import GroupedAttention
from dslc.runtime.model.modules import Attention, PositionalEmbedding


class Documents:
    """The documents of the model's last input."""

    def __init__(self, token: int) -> None:
        self._token = token
        self._numbers = self.places = torch.empty(0)
        self._masks: dict[tuple[object, ...], Tensor] = {}

    def see(self, tokens: Tensor) -> None:
        """Takes an input, int64 of shape (batch, length)."""
        ends = tokens == self._token
        self._numbers = ends.cumsum(1) - ends.long()  # a token that ends a document belongs to it
        positions = torch.arange(tokens.shape[1], device=tokens.device)
        begins = F.pad(ends[:, :-1], (1, 0), value=True)
        self.places = positions - torch.where(begins, positions, 0).cummax(1).values
        self._masks.clear()

    def attend(
        self, query: Tensor, key: Tensor, value: Tensor, *, is_causal: bool, window: int | None = None
    ) -> Tensor:
        """Returns attention within documents; all are (batch, heads, length, head_dim)."""
        mask = self._mask(query.dtype, is_causal, window)
        grouped = key.shape[1] != query.shape[1]
        return F.scaled_dot_product_attention(query, key, value, attn_mask=mask, enable_gqa=grouped)

    @torch.no_grad()
    def _mask(self, dtype: torch.dtype, causal: bool, window: int | None) -> Tensor:
        kind = (dtype, causal, window)
        if kind not in self._masks:
            numbers = self._numbers
            positions = torch.arange(numbers.shape[1], device=numbers.device)
            same_document = numbers[:, :, None] == numbers[:, None, :]
            if causal:
                same_document &= positions <= positions[:, None]
            if window is not None:
                same_document &= positions > positions[:, None] - window
            mask = torch.zeros(same_document.shape, dtype=dtype, device=same_document.device)
            self._masks[kind] = mask.masked_fill_(~same_document, float("-inf"))[:, None]
        return self._masks[kind]


def apply(token: int | None, model: nn.Module) -> None:
    """Keeps attention and learned positions of `model` within documents that `token` ends."""
    if token is None:
        return
    documents = Documents(token)

    def look(module: nn.Module, inputs: tuple[Tensor, ...]) -> None:
        documents.see(inputs[0])

    for module in model.modules():
        if isinstance(module, Attention | GroupedAttention):
            module.attend = documents.attend
        elif isinstance(module, PositionalEmbedding):
            module.documents = documents
    model.register_forward_pre_hook(look)
