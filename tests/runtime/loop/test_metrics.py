"""Metrics of a split are the same however it is cut into batches and shared out."""

from __future__ import annotations

import itertools
import math

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given
from hypothesis import strategies as st

from dslc.compiler.ir.program import LossStep, MetricStep
from dslc.runtime.loop.metrics import Metrics

KEPT = LossStep(kind="cross_entropy", arguments={"label_smoothing": 0.1}, counts="kept", ignore=-100)
ALL = (
    MetricStep(kind="loss", name="loss"),
    MetricStep(kind="accuracy", name="accuracy"),
    MetricStep(kind="top_k", name="top_3", k=3),
    MetricStep(kind="perplexity", name="perplexity"),
)


def sequences() -> tuple[torch.Tensor, torch.Tensor]:
    made = torch.Generator().manual_seed(0)
    target = torch.randint(6, (12, 4), generator=made)
    target[torch.rand(12, 4, generator=made) < 0.25] = -100
    return torch.randn(12, 4, 6, generator=made), target


def over(output: torch.Tensor, target: torch.Tensor, cuts: list[int]) -> torch.Tensor:
    """The sums of one rank that sees these samples in batches cut at these places."""
    metrics = Metrics(ALL, KEPT)
    edges = [0, *cuts, len(output)]
    for a, b in itertools.pairwise(edges):
        if b > a:
            metrics.update(output[a:b], target[a:b])
    return metrics.sums


@given(st.lists(st.integers(0, 12), max_size=4), st.integers(0, 12))
def test_any_cut_and_any_share_give_the_metrics_of_the_whole(cuts: list[int], share: int) -> None:
    output, target = sequences()
    first = sorted(cut for cut in cuts if cut <= share)
    sums = over(output[:share], target[:share], first) + over(output[share:], target[share:], [])
    found = Metrics(ALL, KEPT).results(sums)
    scores, labels = output.flatten(0, 1), target.flatten()
    scores, labels = scores[labels != -100], labels[labels != -100]
    ranks = (scores.argsort(-1, descending=True) == labels[:, None]).nonzero()[:, 1]
    expected = {
        "loss": F.cross_entropy(scores, labels, label_smoothing=0.1).item(),
        "accuracy": (ranks == 0).double().mean().item(),
        "top_3": (ranks < 3).double().mean().item(),
        "perplexity": math.exp(F.cross_entropy(scores, labels).item()),
    }
    assert found == pytest.approx(expected, rel=1e-5)


def test_squared_difference_and_a_loss_of_numbers() -> None:
    loss = LossStep(kind="l1", counts="samples")
    metrics = Metrics((MetricStep(kind="mse", name="mse"), MetricStep(kind="loss", name="loss")), loss)
    output, target = torch.tensor([[1.0, 2.0], [3.0, 5.0], [0.0, 0.0]]), torch.zeros(3, 2)
    metrics.update(output[:1], target[:1])
    metrics.update(output[1:], target[1:])
    assert metrics.results() == pytest.approx({"mse": 39 / 6, "loss": 11 / 6})
    metrics.reset()
    assert all(math.isnan(value) for value in metrics.results().values()), "a metric of nothing is nan"


def test_sums_do_not_lose_small_losses_among_many() -> None:
    metrics = Metrics((MetricStep(kind="loss", name="loss"),), LossStep(kind="l1", counts="samples"))
    metrics.update(torch.full((1,), 2.0**24), torch.zeros(1))
    for _ in range(8):
        metrics.update(torch.ones(1), torch.zeros(1))
    assert metrics.results()["loss"] == (2**24 + 8) / 9


def test_sixteen_bits_are_widened_first() -> None:
    output, target = sequences()
    metrics, wide = Metrics(ALL, KEPT), Metrics(ALL, KEPT)
    metrics.update(output.bfloat16(), target)
    wide.update(output.bfloat16().float(), target)
    assert metrics.results() == wide.results()
    squares = Metrics((MetricStep(kind="mse", name="mse"),), LossStep(kind="mse", counts="samples"))
    squares.update(torch.full((3, 1), 0.1).bfloat16(), torch.zeros(3, 1))
    assert squares.results()["mse"] == pytest.approx(float(torch.tensor(0.1).bfloat16()) ** 2, rel=1e-6)


def test_no_classes_are_likelier_than_all_of_them() -> None:
    metrics = Metrics((MetricStep(kind="top_k", name="top_9", k=9),), LossStep(kind="cross_entropy", counts="samples"))
    metrics.update(torch.randn(3, 4), torch.tensor([0, 1, 3]))
    assert metrics.results() == {"top_9": 1.0}
