"""The expert axis in the text and the pictures of a plan: which ranks share experts, and what they exchange."""

from __future__ import annotations

import re
from collections.abc import Callable

import pytest
from helpers.golden import hold
from helpers.planning import compiled
from test_draw import GOLDEN, named

from dslc.compiler.ir.plan import PlanView
from dslc.compiler.show.draw import draw
from dslc.compiler.show.explain import explain

JOB = """
model {
  network = llama(
    layers = 1, width = 16, heads = 2, context = 8, vocab = 32, experts = moe(experts = 8, top_k = 2, hidden = 16),
  )
  loss = cross_entropy()
}
data {
  source = synthetic(vocab = 32)
  batch  = 64
}
devices {
  cpus = 4
}
parallelism {
  expert = 2
}
train {
  steps     = 2
  optimizer = adamw()
}
"""


@pytest.fixture(scope="module")
def plan(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., PlanView]:
    path = tmp_path_factory.mktemp("experts") / "job.plt"
    path.write_text(JOB)
    return lambda *settings: compiled(path, *settings).plan


@pytest.mark.parametrize("view", ["placement", "graph"])
def test_the_picture_of_an_expert_axis(plan: Callable[..., PlanView], view: str) -> None:
    made = plan()
    hold(draw(made, view).replace(made.hash, "0" * len(made.hash)), GOLDEN / f"experts.{view}.dot")


def test_ranks_that_share_experts_have_a_bar_of_their_own(plan: Callable[..., PlanView]) -> None:
    dot = draw(plan())
    assert named(dot, r"expert 0\.\d\.0") == ["expert 0.0.0", "expert 0.1.0"]
    assert "all-to-all" not in dot.replace("expert x2", ""), "no bar of the data axis has rows for experts"
    assert "data x4 with the same experts (0, 2; 1, 3): all-reduce gradients" in dot
    nine = draw(
        plan("devices.cpus=9", "data.batch=63", "parallelism.expert=3", "model.network.experts=moe(9, 2, hidden = 16)")
    )
    assert named(nine, r"expert .*") == ["expert 0.0.0", "expert 0.1.0", "expert 0.2.0", "expert 0.2.1"], "8 in a line"
    many = draw(plan("devices.cpus=32"))
    assert re.search(r"16 ranks with the same experts \(0, 2, …, 30; …\): all-reduce gradients", many)
    assert "expert x2: all-to-all" in many


def test_groups_of_ranks_with_the_same_experts(plan: Callable[..., PlanView]) -> None:
    pieces = draw(plan("devices.cpus=8", "parallelism.context=2", "parallelism.zero=3"))
    assert "data+context x8 with the same experts (0, 1, 4, 5; 2, 3, 6, 7): all-gather parameters" in pieces
    assert "expert x2, 2 groups" in pieces
    copies = draw(plan("devices.cpus=8", "parallelism.zero=3", "parallelism.replicas=2"))
    assert "with the same experts (0, 2; 1, 3; 4, 6; 5, 7): reduce-scatter gradients" in copies
    assert "across 2 replicas (0, 4; 1, 5; 2, 6; 3, 7): all-reduce gradients" in copies


def test_passes_wait_for_rows_not_the_update(plan: Callable[..., PlanView]) -> None:
    made = plan()
    exchanges = named(draw(made, "graph"), r"exchange 0\.\d+")
    assert len(exchanges) == 2, "the gradients of experts, and the others"
    text = explain(made)
    assert re.search(r"expert +2 +1 +within a node +\S+ KiB +rows of tokens within layers", text)
    assert re.search(r"all_to_all +expert +rows for experts", text)
    assert re.search(r"all_reduce +data same experts 2 +gradients", text)


def test_the_plan_says_what_is_compiled_beside_experts(plan: Callable[..., PlanView]) -> None:
    compiled_blocks = {
        experts: plan("train.compile=true", f"parallelism.expert={experts}").training.compiled for experts in (1, 2)
    }
    assert compiled_blocks == {
        1: "1 block and the loss",
        2: "1 block without mixtures of experts, and the loss",
    }
