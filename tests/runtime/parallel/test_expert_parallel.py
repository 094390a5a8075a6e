"""Experts on the ranks of an axis give each row what they give it on one rank, forward and backward."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from helpers.gang import gang

from dslc.runtime.parallel.expert_parallel import dispatch

WIDTH, EXPERTS = 8, 4
ROUTINGS = {
    "uneven": [[3, 1, 0, 2], [0, 4, 1, 1], [2, 2, 2, 2], [1, 0, 0, 5]],
    "no tokens on one rank": [[0, 0, 0, 0], [2, 1, 3, 1], [1, 1, 1, 1], [0, 0, 2, 0]],
    "no tokens for one expert": [[3, 0, 2, 1], [1, 0, 1, 1], [2, 0, 0, 0], [0, 0, 4, 1]],
    "one expert for all": [[0, 0, 5, 0], [0, 0, 2, 0], [0, 0, 1, 0], [0, 0, 3, 0]],
    "nothing at all": [[0, 0, 0, 0]] * 4,
}


def rows_of(rank: int, counts: list[int]) -> tuple[torch.Tensor, torch.Tensor]:
    """Returns a rank's rows, and the weights of their results in the loss."""
    generator = torch.Generator().manual_seed(rank)
    values = torch.randn(2, sum(counts), WIDTH, generator=generator)
    return values[0], values[1]


def matrices() -> torch.Tensor:
    return torch.randn(EXPERTS, WIDTH, WIDTH, generator=torch.Generator().manual_seed(9))


def multiply(matrices: torch.Tensor, rows: torch.Tensor, counts: torch.Tensor) -> torch.Tensor:
    return F.grouped_mm(rows, matrices, offs=counts.cumsum(0).to(torch.int32))


def on_a_rank(rank: int, routing: list[list[int]], ranks: int) -> list[Any]:
    """Returns the results of this rank's rows, their gradients and the gradients of the experts that it holds."""
    held, group = EXPERTS // ranks, dist.group.WORLD
    assert group is not None
    own = matrices()[rank * held : (rank + 1) * held].requires_grad_()
    rows, weights = rows_of(rank, routing[rank])
    rows.requires_grad_()
    results = dispatch(lambda *given: multiply(own, *given), rows, torch.tensor(routing[rank]), group=group)
    (results * weights).sum().backward()
    assert rows.grad is not None and own.grad is not None
    return [tensor.detach().numpy().copy() for tensor in (results, rows.grad, own.grad)]


@pytest.mark.parametrize(("ranks", "names"), [(2, list(ROUTINGS)[:2]), (4, list(ROUTINGS))])
def test_experts_give_each_row_what_they_give_it_on_one_rank(ranks: int, names: list[str]) -> None:
    answers = gang(ranks, every_routing, names, ranks)
    for number, name in enumerate(names):
        whole = matrices().requires_grad_()
        for rank in range(ranks):
            counts = ROUTINGS[name][rank]
            rows, weights = rows_of(rank, counts)
            rows.requires_grad_()
            results = multiply(whole, rows, torch.tensor(counts))
            (results * weights).sum().backward()
            for found, expected in zip(answers[rank][number], (results.detach(), rows.grad), strict=False):
                assert expected is not None
                np.testing.assert_allclose(found, expected.numpy(), atol=1e-6, err_msg=f"{name}, rank {rank}")
        assert whole.grad is not None
        gathered = np.concatenate([answers[rank][number][2] for rank in range(ranks)])
        np.testing.assert_allclose(gathered, whole.grad.numpy(), atol=1e-5, err_msg=name)


def every_routing(rank: int, names: list[str], ranks: int) -> list[list[Any]]:
    return [on_a_rank(rank, ROUTINGS[name], ranks) for name in names]
