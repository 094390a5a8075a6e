"""The dense layer whose output is the network's, as tracing finds it."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from helpers.module_facts import analysed
from torch import Tensor, nn

from dslc.compiler.ir.facts import SourceFacts
from dslc.compiler.ir.tensors import TensorFact
from dslc.compiler.placement.sharding import adamw_matrices
from dslc.compiler.trace.trace_model import trace_model
from dslc.dsl.language.blocks import TrainSpec
from dslc.dsl.language.optimizers import Muon

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


def _with_entropy(network: Network, x: Tensor) -> Tensor:
    logits = network.head(x)
    network.entropy = logits.detach().softmax(-1).log().mean()
    return logits


def _hooked(hook: Callable[[nn.Module, object, Tensor], Tensor | None]) -> Network:
    network = Network(lambda net, x: net.head(x))
    network.head.register_forward_hook(hook)
    return network


def _hooked_backward() -> Network:
    network = Network(lambda net, x: net.head(x))
    network.head.register_full_backward_hook(lambda *call: None)
    return network


def _given_a_forward() -> Network:
    network = Network(lambda net, x: net.head(x))
    forward = network.head.forward
    network.head.forward = lambda input: forward(input)  # type: ignore[method-assign]
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
        (lambda: Network(_with_entropy), ""),  # the head's logits are read
        (lambda: _hooked(lambda module, args, output: 20 * output), ""),
        (lambda: _hooked(lambda module, args, output: setattr(module, "largest", output.detach().max())), ""),
        (_hooked_backward, ""),
        (_given_a_forward, ""),
    ],
)
def test_a_head_is_a_dense_layer_called_once_whose_output_is_left_as_it_is(
    make: Callable[[], nn.Module], head: str
) -> None:
    assert trace_model(make, TensorFact(shape=(6, 8), dtype="float32")).head == head


class Lookup(nn.Module):
    """An embedding `tok`, a hidden layer, and a head `out`, which is `tied` to the embedding or comes first."""

    def __init__(self, *, tied: bool, head_first: bool) -> None:
        super().__init__()
        if head_first:
            self.out = nn.Linear(24, 32)
        self.tok, self.body = nn.Embedding(32, 24), nn.Linear(24, 24)
        if not head_first:
            self.out = nn.Linear(24, 32)
        if tied:
            self.out.weight = self.tok.weight

    def forward(self, x: Tensor) -> Tensor:
        return self.out(self.body(self.tok(x)).relu())


@pytest.mark.parametrize(
    ("tied", "head_first", "matrices"),
    [
        (False, False, {"tok.weight": "an embedding", "out.weight": "the head"}),
        (False, True, {"out.weight": "the head", "tok.weight": "an embedding"}),
        (True, False, {"tok.weight": "an embedding"}),
        (True, True, {"out.weight": "an embedding"}),
    ],
)
def test_muon_leaves_embeddings_and_heads_to_adamw_whatever_their_names(
    tied: bool, head_first: bool, matrices: dict[str, str]
) -> None:
    tokens = TensorFact(shape=(6,), dtype="int64")
    facts = trace_model(lambda: Lookup(tied=tied, head_first=head_first), tokens)
    source = SourceFacts(input=tokens, target=tokens, classes=32, samples=1000)
    analysis, report = analysed(facts, source, train=TrainSpec(steps=5, optimizer=Muon()))
    assert analysis is not None and analysis.model is not None, report.errors
    assert adamw_matrices(analysis.job, analysis.model) == matrices
