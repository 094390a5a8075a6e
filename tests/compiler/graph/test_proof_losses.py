"""Plans of losses that compare samples: broken on purpose, they are refused by the proposition that is about them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
from helpers.planning import JOBS, compiled

from dslc.compiler.compile import Compiled
from dslc.compiler.graph.build import build_graph
from dslc.compiler.graph.plan_graph import PlanGraph
from dslc.compiler.graph.verify import Unsound, verify
from dslc.compiler.ir.actions import Collective, Payload
from dslc.compiler.ir.facts import Facts, SourceFacts
from dslc.compiler.ir.program import LossStep
from dslc.compiler.ir.tensors import TensorFact

COMMON = (
    "devices.nodes=2",
    "devices.cpus=2",
    "parallelism.pipeline=1",
    "parallelism.data=4",
    "parallelism.microbatches=2",
    "data.source=digits()",
    "data.batch=16",
    "model.network=[flatten(), linear(10)]",
)


@pytest.fixture(scope="module")
def job() -> Compiled:
    return compiled(JOBS / "pipeline.plt", *COMMON, "model.loss=contrastive(over = node)")


def refused(job: Compiled, change: Callable[[PlanGraph], None]) -> str:
    plan = build_graph(job.analysis)
    change(plan)
    with pytest.raises(Unsound) as found:
        verify(plan)
    return f"{found.value.proposition}: {found.value}"


def carrying(plan: PlanGraph, what: str) -> str:
    return next(name for name, action in plan.of_kind(Collective) if action.carries == what)


def placed(name: str, *, before: str, process: int = 0) -> Callable[[PlanGraph], None]:
    """Moves what has this name, or carries it, before an action."""

    def change(plan: PlanGraph) -> None:
        moved, before_name = (each if each in plan.graph else carrying(plan, each) for each in (name, before))
        old = plan.lines()[0][process]
        line = [other for other in old if other != moved]
        line.insert(line.index(before_name), moved)
        plan.line(line, instead_of=old)

    return change


def test_the_order_of_a_step(job: Compiled) -> None:
    plan = build_graph(job.analysis)
    names = plan.lines()[0][0]
    carried = {name: str(action.carries) for name, action in plan.of_kind(Collective)}
    told = [carried.get(name, name) for name in names]
    made = ["0E0", "0E1", "outputs", "targets", "gradients of outputs", "0F0", "0B0", "0F1", "0B1"]
    assert [each for each in told if each in made] == made
    outputs = plan.node_record(carrying(plan, "outputs"), Collective)
    assert (outputs.ranks, outputs.stride, outputs.count, outputs.bytes) == (2, 1, 1, 4 * 10 * 4)
    assert plan.node_record(carrying(plan, "gradients of outputs"), Collective).bytes == 2 * outputs.bytes


@pytest.mark.parametrize(
    "change, says",
    [
        (placed("outputs", before="0E1"), "outputs are exchanged by all_gather, too early or too late"),
        (placed("gradients of outputs", before="0F1"), "gradients of outputs are exchanged by reduce_scatter, too"),
        (placed("0E1", before="0F1"), "runs forward passes of micro-batches [0, 1] ahead"),
        (lambda plan: plan.change("0E1", microbatch=0), "runs forward passes of micro-batches [0, 0] ahead"),
        (
            lambda plan: plan.change(carrying(plan, "outputs"), ranks=4),
            "is no exchange of outputs over the ranks whose",
        ),
        (
            lambda plan: plan.change(carrying(plan, "targets"), stride=2),
            "is no exchange of targets over the ranks whose",
        ),
        (lambda plan: plan.change("loss", together=3), "of 3 of 4 ranks, which are neither all nor a node"),
        (lambda plan: plan.change("loss", together=4), "is no exchange of outputs over the ranks whose"),
        (
            lambda plan: plan.change("loss", together=0),
            "runs forward passes of micro-batches [0, 1] ahead, and not of []",
        ),
        (lambda plan: plan.change("loss", kind="python"), "a loss over 2 ranks exchanges"),
    ],
)
def test_what_is_refused(job: Compiled, change: Callable[[PlanGraph], None], says: str) -> None:
    found = refused(job, change)
    assert found.startswith("compared: ") and says in found, found


PAIRS = """
model {
  network = llama(layers = 2, width = 16, heads = 2, hidden = 24, context = 32, vocab = 50)
  loss    = ipo()
}
data {
  source = preferences("pairs.jsonl", tokenizer = "tokenizer")
  batch  = 8
}
devices     { cpus = 4 }
parallelism { context = 2, pipeline = 2, microbatches = 2 }
train       { steps = 2, optimizer = sgd(lr = 0.1) }
"""


def pairs(folder: Path) -> Compiled:
    job, tokens = folder / "job.plt", TensorFact(shape=(32,), dtype="int64")
    job.write_text(PAIRS)
    source = SourceFacts(samples=64, input=tokens, target=tokens, vocab=50)
    return compiled(job, facts=Facts(source=source))


def test_answers_in_pieces_are_summed_before_each_backward_pass(tmp_path: Path) -> None:
    plan = build_graph(pairs(tmp_path).analysis)
    sums = [action for _, action in plan.of_kind(Collective) if action.carries == Payload.ANSWER_SUMS]
    assert [(each.operation, each.count, each.bytes, each.group) for each in sums] == [
        ("all_reduce", 1, 4 * 2 * 8 // 2 * 2, (2, 1))
    ] * 2  # sums and numbers of tokens, of two rows for each pair


@pytest.mark.parametrize(
    "change, says",
    [
        (placed("log-probabilities of answers", before="1F0", process=1), "is no sum over the pieces of the answers"),
        (
            placed("1B0", before="log-probabilities of answers", process=1),
            "1B0 comes before the answers of micro-batch 0",
        ),
        (lambda plan: plan.change("loss", kind="cross_entropy"), "is no sum over the pieces of the answers"),
    ],
)
def test_answers_in_pieces_are_refused(tmp_path: Path, change: Callable[[PlanGraph], None], says: str) -> None:
    found = refused(pairs(tmp_path), change)
    assert found.startswith("compared: ") and says in found, found


def test_another_loss_exchanges_no_outputs(job: Compiled) -> None:
    plan = build_graph(compiled(JOBS / "pipeline.plt", *COMMON, "model.loss=cross_entropy()").analysis)
    assert plan.one(LossStep).together == 0
    one = next(action for _, action in plan.of_kind(Collective) if action.carries == "gradients")
    old = plan.lines()[0][0]
    plan.put("more", replace(one, carries=Payload.OUTPUTS, operation="all_gather", weights=()))
    plan.line([*old[:1], "more", *old[1:]], instead_of=old)
    with pytest.raises(Unsound, match="compared"):
        verify(plan)
