"""The state that the account of memory states is the state that an optimizer makes, to the byte."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from helpers.paths import EXAMPLES
from helpers.planning import compiled

from dslc.compiler.graph.constants import optimizer_step
from dslc.compiler.graph.plan_view import optimizer_text
from dslc.runtime.checkpoint.files import fit_of, incompatibilities
from dslc.runtime.model.meta_model import build_model
from dslc.runtime.parallel.optimizers import build_optimizer

OPTIMIZERS = [
    "adamw",
    "adamw(state = 8bit)",
    "adam(state = 8bit)",
    "lion",
    "adafactor",
    "muon",
    'muon(adamw = ["head.*", "*position"])',
]


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_the_state_of_a_vision_transformer(optimizer: str) -> None:
    """It has matrices, vectors, kernels of a convolution, embeddings and a head."""
    made = compiled(EXAMPLES / "vit.plt", "devices.cpus=1", f"train.optimizer={optimizer}")
    program = made.program()
    model = build_model(program.model, torch.device("cpu"))
    for step in (program.optimizer, replace(program.optimizer, fused=())):
        built = build_optimizer(step, model)
        for parameter in model.parameters():
            parameter.grad = torch.randn_like(parameter)
        built.step()
        size = sum(value.nbytes for state in built.state.values() for value in state.values())
        assert size == made.analysis.costs[0].memory.optimizer


def test_muon_has_the_hidden_matrices_and_says_why_it_leaves_the_rest() -> None:
    alone = ("devices.cpus=1", "parallelism.data=1", "parallelism.zero=0")
    program = compiled(EXAMPLES / "gpt_cpu.plt", *alone, "train.optimizer=muon").program()
    assert dict(program.optimizer.adamw or ()) == {
        "embedding.weight": "an embedding",
        "position.weight": "an embedding",
        "head.weight": "the head",
    }
    some = 'train.optimizer=muon(adamw = ["*.qkv.*"])'
    asked = compiled(EXAMPLES / "gpt_cpu.plt", *alone, some).program()
    assert dict(asked.optimizer.adamw or ()) == {
        f"blocks.{n}.attention.qkv.weight": "as `adamw` asks" for n in range(4)
    }
    fit, other = fit_of(program, None), fit_of(asked, None)
    assert incompatibilities(fit, other) == ["its AdamW updates `embedding.weight`, and the job's Muon does"]
    no_matrices = replace(other, adamw=())
    assert incompatibilities(no_matrices, fit) == ["its Muon updates `embedding.weight`, and the job's AdamW does"]
    frozen = replace(fit, adamw=("head.weight", "position.weight"), frozen=("embedding.*",))
    assert incompatibilities(fit, frozen) == incompatibilities(frozen, fit) == []
    assert incompatibilities(fit, replace(fit, adamw=None)) == incompatibilities(fit, fit) == []


def test_without_tracing_the_matrices_of_adamw_are_unknown() -> None:
    muon = ("train.optimizer=muon", "parallelism.zero=0")
    step = optimizer_step(compiled(EXAMPLES / "own" / "own.plt", *muon).analysis)
    assert step.adamw is None
    assert optimizer_text(step) == "muon, and adamw for vectors, kernels and matrices that `--trace` names"
