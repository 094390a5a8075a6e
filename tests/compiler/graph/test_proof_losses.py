"""Plans of losses that compare samples: broken on purpose, they are refused by the proposition that is about them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest
from helpers.planning import JOBS, compiled

from dslc.compiler.compile import Compiled
from dslc.compiler.graph.build import build_graph
from dslc.compiler.graph.plan_graph import PlanGraph
from dslc.compiler.graph.verify import Unsound, verify
from dslc.compiler.ir.actions import Collective, Payload
from dslc.compiler.ir.program import LossStep

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


def placed(name: str, *, before: str) -> Callable[[PlanGraph], None]:
    """Moves what has this name, or carries it, before an action."""

    def change(plan: PlanGraph) -> None:
        moved = name if name in plan.graph else carrying(plan, name)
        old = plan.lines()[0][0]
        line = [other for other in old if other != moved]
        line.insert(line.index(before), moved)
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
        (placed("0E1", before="0F1"), "makes the outputs of micro-batches [0, 1] ahead"),
        (lambda plan: plan.change("0E1", microbatch=0), "makes the outputs of micro-batches [0, 0] ahead"),
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
            "makes the outputs of micro-batches [0, 1] ahead, and not of []",
        ),
        (lambda plan: plan.change("loss", kind="python"), "a loss over 2 ranks exchanges"),
    ],
)
def test_what_is_refused(job: Compiled, change: Callable[[PlanGraph], None], says: str) -> None:
    found = refused(job, change)
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
