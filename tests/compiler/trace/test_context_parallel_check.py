"""Networks of a user's own on pieces of sequences: what is found to be the same, and what is refused."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from helpers.own_attention import Counting, Encoder, Model
from helpers.reference_models import llama
from torch import nn

from dslc.compiler.ir.module_facts import PieceFacts
from dslc.compiler.ir.tensors import TensorFact
from dslc.compiler.trace.trace_model import trace_model


def pieces(make: Callable[[], nn.Module], ranks: int = 2) -> PieceFacts:
    found = trace_model(make, TensorFact(shape=(16,), dtype="int64"), context=ranks).pieces
    assert found is not None and found.ranks == ranks
    return found


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["", "full"])
def test_attention_is_found_with_what_it_gathers(kind: str) -> None:
    found = pieces(lambda: Model(kind=kind), 4)
    assert not found.fault and found.positions
    assert [call.module for call in found.attention] == ["blocks.0.attention", "blocks.1.attention"]
    assert {(call.numbers, call.causal) for call in found.attention} == {(16 * 2 * 16, kind == "")}


@pytest.mark.slow
def test_attention_inside_torchs_own_layers_is_found() -> None:
    found = pieces(Encoder)
    assert not found.fault and not found.positions
    assert [call.module for call in found.attention] == ["layers.0.self_attn", "layers.1.self_attn"]


@pytest.mark.parametrize("positions, says", [(True, ""), (False, "`slice` makes numbers that on a piece are others")])
def test_complex_rotary_positions(positions: bool, says: str) -> None:
    found = pieces(lambda: llama(positions=positions))
    assert (says in found.fault) if says else not found.fault
    assert len(found.attention) == (0 if says else 2)


class InEvaluation(Model):
    """Mixes positions in evaluation alone."""

    def __init__(self) -> None:
        super().__init__()
        self.register_forward_hook(lambda module, args, output: output if module.training else output.flip(1))


@pytest.mark.slow
@pytest.mark.parametrize(
    "make, code, says",
    [
        (lambda: Model(kind="convolution"), "E0440", "`mixer` (own_attention.py:"),
        (lambda: Model(kind="by hand"), "E0440", "`blocks.0.attention` (own_attention.py:"),
        (lambda: Model(kind="mean"), "E0440", "`mean` works across dim 1"),
        (InEvaluation, "E0440", "`flip` works across dim 1"),
        (lambda: Model(kind="mask"), "E0441", "is given a mask"),
        (lambda: Model(kind="from 1"), "E0442", "without `position_ids`"),
        (Counting, "E0442", "`arange`"),
        (lambda: Model(kind="length"), "E0443", "`div` computes with a number that depends on the length"),
    ],
)
def test_what_would_not_compute_the_same_is_refused(make: Callable[[], nn.Module], code: str, says: str) -> None:
    found = pieces(make)
    assert found.code == code and says in found.fault, found.fault
    assert not found.attention
