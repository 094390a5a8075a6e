"""Experts on the ranks of an axis give each row what they give it on one rank, forward and backward."""

from __future__ import annotations

from dataclasses import replace
from math import ceil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from helpers.gang import gang
from helpers.job_texts import job_text
from hypothesis import given
from hypothesis import strategies as st

from dslc.compiler.ir.program import CalibrateMode, JobProgram, TrainMode
from dslc.dsl.diagnostics import Report
from dslc.dsl.meaning.load import load
from dslc.jobs.prepare_run import prepare
from dslc.runtime.parallel.expert_parallel import counts_at_skew, dispatch, row_records
from dslc.runtime.step.assemble import assemble

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


# --------------------------------------------------------------------------------------------- a calibration's skew

BATCH, CONTEXT, TOP_K = 4, 16, 2
SKEWED = job_text(
    model={
        "network": f"llama(layers = 1, width = 16, heads = 2, context = {CONTEXT}, vocab = 32, "
        f"experts = moe(experts = 4, top_k = {TOP_K}, hidden = 16))",
        "loss": "cross_entropy()",
    },
    data={"source": "synthetic(samples = 16, vocab = 32)", "batch": 2 * BATCH},
    devices={"cpus": 2},
    parallelism={"expert": 2, "expert_skew": 1.5},
    train={"steps": 2, "optimizer": "adamw()"},
)


@given(
    rows=st.integers(0, 200), held=st.integers(1, 4), ranks=st.integers(2, 4), share=st.floats(0, 1, allow_nan=False)
)
def test_counts_at_a_skew_are_those_of_the_busiest_rank(rows: int, held: int, ranks: int, share: float) -> None:
    skew = 1 + share * (ranks - 1)
    counts = counts_at_skew(rows, held * ranks, ranks, skew)
    of_ranks = [sum(counts[rank * held : (rank + 1) * held]) for rank in range(ranks)]
    assert sum(counts) == rows and len(counts) == held * ranks and min(counts) >= 0
    assert of_ranks[0] == min(rows, ceil(skew * rows / ranks)) >= max(of_ranks) - 1


def test_a_calibration_sends_rows_at_the_stated_skew(tmp_path: Path) -> None:
    """In a training the router decides."""
    (tmp_path / "made.plt").write_text(SKEWED)
    report = Report()
    ready = prepare(load(str(tmp_path / "made.plt"), []), report)
    assert ready is not None, [error.message for error in report.errors]
    found = gang(2, rows_by_mode, ready.program)
    sent = BATCH * CONTEXT * TOP_K
    assert [arrived for arrived, _, _ in found] == [1.5 * sent, 0.5 * sent]
    assert [arrived for _, arrived, _ in found] == [1.5 * sent, 0.5 * sent]
    assert sum(arrived for _, _, arrived in found) == 2 * sent and found[0][2] != 1.5 * sent


def rows_by_mode(rank: int, job: JobProgram) -> list[int]:
    """Returns the rows that arrive at this rank while parts, a timed step and a training run."""
    arrived = []
    for mode in (CalibrateMode(), TrainMode(timed=True), TrainMode()):
        model = assemble(replace(job, mode=mode), torch.device("cpu")).plain
        model(torch.arange(BATCH * CONTEXT).view(BATCH, CONTEXT) % 32)
        (record,) = row_records(model)
        assert record.sent == BATCH * CONTEXT * TOP_K
        arrived.append(record.arrived)
    return arrived
