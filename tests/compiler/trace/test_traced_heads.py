"""The dense layer whose output is the network's, as tracing finds it."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from torch import Tensor, nn

from dslc.compiler.ir.tensors import TensorFact
from dslc.compiler.trace.trace_model import trace_model

Ending = Callable[["Network", Tensor], Tensor]


class Network(nn.Module):
    """Two dense layers, and what a case does with the second."""

    def __init__(self, ending: Ending) -> None:
        super().__init__()
        self.body, self.head, self.ending = nn.Linear(8, 8), nn.Linear(8, 5), ending

    def forward(self, x: Tensor) -> Tensor:
        return self.ending(self, self.body(x).relu())


class Capped(nn.Linear):
    """A dense layer of a class of its own."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x).tanh()


def _capped() -> Network:
    network = Network(lambda net, x: net.head(x))
    network.head = Capped(8, 5)
    return network


@pytest.mark.parametrize(
    ("make", "head"),
    [
        (lambda: Network(lambda net, x: net.head(x)), "head"),
        (lambda: Network(lambda net, x: net.head(x[:, -3:])), "head"),  # as `transformers` cuts positions off
        (lambda: Network(lambda net, x: net.head(x) * 0.5), ""),
        (lambda: Network(lambda net, x: net.head(x).mul_(0.5)), ""),
        (lambda: Network(lambda net, x: net.head(x + net.head(x).mean())), ""),  # called twice
        (lambda: Network(lambda net, x: net.head(x).tanh()), ""),
        (_capped, ""),
    ],
)
def test_a_head_is_a_dense_layer_called_once_whose_output_is_left_as_it_is(
    make: Callable[[], nn.Module], head: str
) -> None:
    assert trace_model(make, TensorFact(shape=(6, 8), dtype="float32")).head == head
