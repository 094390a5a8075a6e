"""The order of permuted rows, along the first dim and along the width inside experts, against plain indexing."""

from __future__ import annotations

import pytest
import torch

from dslc.compiler.ir.program import TensorParallelStep
from dslc.compiler.ir.tensor_styles import TensorStyle
from dslc.runtime.model import row_order

STEP = TensorParallelStep(
    size=2,
    sequence=False,
    styles=(("mlp", TensorStyle.EXPERTS), ("qkv", TensorStyle.COLUMN)),
    loss_parallel=False,
    parts=(("mlp.experts", (4, 4)), ("qkv", (4, 2, 2))),
)
# By parameter: its shape, the dim that is cut, and the rows that rank 0 has.
CUT = {
    "mlp.experts.gate_up_proj": ((3, 8, 5), 1, [0, 1, 4, 5]),
    "qkv.weight": ((8, 5), 0, [0, 1, 4, 6]),
    "mlp.experts.down_proj": ((3, 5, 4), 2, [0, 1]),
}


@pytest.mark.parametrize("name", list(CUT))
def test_a_rank_has_a_piece_of_every_part(name: str) -> None:
    row_order.begin(STEP)
    try:
        shape, dim, rows = CUT[name]
        whole = torch.arange(torch.Size(shape).numel()).view(shape)
        held = row_order.as_held(name, whole)
        assert torch.equal(row_order.as_named(name, held), whole)
        own = whole.index_select(dim, torch.tensor(rows))
        assert torch.equal(held.chunk(2, dim)[0], own)
        part = tuple(slice(0, size) for size in own.shape)
        rebuilt = torch.full_like(whole, -1)
        for own_run, run in row_order.runs_of_part(name, part):
            rebuilt[run] = own[own_run]
        assert torch.equal(rebuilt.index_select(dim, torch.tensor(rows)), own)
        assert (rebuilt >= 0).sum() == own.numel()
    finally:
        row_order.begin(None)
