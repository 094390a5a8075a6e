"""Attention over a sequence in pieces is attention over the whole, forward and backward."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from helpers.gang import gang

from dslc.runtime.model.modules import PositionalEmbedding
from dslc.runtime.parallel.context_parallel import attend

LENGTH = 12


def inputs() -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(5)
    made = [torch.randn(2, LENGTH, 3, 4, generator=generator).transpose(1, 2) for _ in range(4)]
    return [tensor.clone(memory_format=torch.preserve_format) for tensor in made]


def piece(rank: int, ranks: int, causal: bool) -> list[Any]:
    """Returns attention's output for this rank's piece, and the gradients of its queries, keys and values."""
    own = LENGTH // ranks
    *parts, weight = (tensor[:, :, rank * own : (rank + 1) * own] for tensor in inputs())
    query, key, value = (part.detach().requires_grad_() for part in parts)
    group = dist.group.WORLD
    assert group is not None
    y = attend(query, key, value, is_causal=causal, number=rank, group=group)
    (y * weight).sum().backward()
    found = [y.detach(), query.grad, key.grad, value.grad]
    return [tensor.numpy().copy() for tensor in found if tensor is not None]


@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("ranks", [2, 3])
def test_pieces_make_the_whole(ranks: int, causal: bool) -> None:
    *parts, weight = inputs()
    query, key, value = (part.requires_grad_() for part in parts)
    y = F.scaled_dot_product_attention(query, key, value, is_causal=causal)
    (y * weight).sum().backward()
    found = gang(ranks, piece, ranks, causal)
    for number, whole in enumerate((y.detach(), query.grad, key.grad, value.grad)):
        assert whole is not None
        np.testing.assert_allclose(np.concatenate([each[number] for each in found], axis=2), whole.numpy(), atol=1e-6)


def test_positions_begin_where_the_piece_does() -> None:
    module = PositionalEmbedding(context=8, width=2)
    with torch.no_grad():
        module.weight.copy_(torch.arange(8.0)[:, None].expand(8, 2))
    module.piece = 2
    assert module(torch.zeros(1, 2, 2))[0, :, 0].tolist() == [4.0, 5.0]
    module.piece = 0
    assert module(torch.zeros(1, 3, 2))[0, :, 0].tolist() == [0.0, 1.0, 2.0]
