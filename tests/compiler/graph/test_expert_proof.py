"""The plan of an expert axis: what each rank holds and sends, and the proof, which refuses plans broken on purpose."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
from helpers.planning import compiled

from dslc.compiler.compile import Compiled
from dslc.compiler.graph.build import build_graph
from dslc.compiler.graph.plan_graph import PlanGraph
from dslc.compiler.graph.verify import Unsound, verify
from dslc.compiler.ir.actions import Collective, Payload
from dslc.compiler.ir.program import ExpertParallelStep
from dslc.compiler.ir.records import Weights
from dslc.compiler.show.explain import explain

JOB = """
model {
  network = llama(
    layers = 2, width = 16, heads = 2, context = 8, vocab = 32, experts = moe(experts = 8, top_k = 2, hidden = 16),
  )
  loss = cross_entropy()
}
data {
  source = synthetic(vocab = 32)
  batch  = 16
}
devices {
  cpus = 4
}
train {
  steps     = 2
  optimizer = adamw()
}
"""
LAYERS, EXPERTS = 2, 8 * 3 * 16 * 16  # numbers of a layer's experts
ROWS = 4 * 8 * 2 * 16 * 4  # bytes of a rank's rows: samples, positions, experts of each, width


@pytest.fixture(scope="module")
def job(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Compiled]:
    path = tmp_path_factory.mktemp("experts") / "job.plt"
    path.write_text(JOB)

    def plan(*settings: str, experts: str = "") -> Compiled:
        network = (f"model.network.experts={experts}",) if experts else ()
        return compiled(path, *network, *(f"parallelism.{setting}" for setting in settings))

    return plan


@pytest.fixture(scope="module")
def eight(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Compiled]:
    path = tmp_path_factory.mktemp("experts") / "job.plt"
    path.write_text(JOB.replace("cpus = 4", "cpus = 8"))
    return lambda *settings: compiled(path, *(f"parallelism.{setting}" for setting in settings))


def test_a_rank_holds_and_sends_its_part(job: Callable[..., Compiled], tmp_path: Path) -> None:
    whole, shared, sharded = job(), job("expert=2"), job("expert=2", "zero=3")
    parameters = [each.analysis.costs[0].memory.parameters for each in (whole, shared, sharded)]
    assert parameters[0] - parameters[1] == 4 * LAYERS * EXPERTS // 2
    assert parameters[0] == 4 * parameters[2]  # all are cut in four: experts in two parts over two ranks
    sent = {node.what: (node.count, node.bytes, node.ranks) for node in shared.analysis.costs[0].traffic}
    assert sent[Payload.EXPERT_ROWS] == sent[Payload.ROW_GRADIENTS] == (LAYERS, LAYERS * ROWS, 2)
    assert sent[Payload.ROW_COUNTS] == (LAYERS, LAYERS * 8 * 8, 2)
    groups = [group for _, group in build_graph(shared.analysis).of_kind(Weights) if group.experts == 2]
    assert sum(group.numbers for group in groups) == LAYERS * EXPERTS // 2
    assert "works on up to 2 times as many rows" in explain(shared.plan)
    assert "even routing" not in explain(whole.plan)
    again = job("expert=2", "microbatches=2").analysis.costs[0].traffic
    assert next(node.count for node in again if node.what is Payload.EXPERT_RESULTS) == 2 * LAYERS


def refusal(analysed: Compiled, change: Callable[[PlanGraph], None]) -> str:
    plan = build_graph(analysed.analysis)
    change(plan)
    with pytest.raises(Unsound) as found:
        verify(plan)
    return f"{found.value.proposition}: {found.value}"


def of_rows(plan: PlanGraph, what: Payload) -> str:
    return next(name for name, action in plan.of_kind(Collective) if action.carries is what)


def test_rows_that_do_not_return(job: Callable[..., Compiled]) -> None:
    for what in (Payload.EXPERT_RESULTS, Payload.ROW_GRADIENTS, Payload.ROW_COUNTS):

        def drop(plan: PlanGraph, what: Payload = what) -> None:
            name = of_rows(plan, what)
            line = plan.lines()[0][plan.node_record(name, Collective).process]
            plan.line([other for other in line if other != name], instead_of=line)
            plan.graph.remove_node(name)

        assert refusal(job("expert=2"), drop).startswith("routed")


def test_tokens_of_a_balance_loss_that_are_counted_late_or_not(job: Callable[..., Compiled]) -> None:
    for settings in ((), ("microbatches=2",), ("pipeline=2", "schedule=gpipe")):

        def move(plan: PlanGraph, place: int | None) -> None:
            name = of_rows(plan, Payload.BALANCE_COUNTS)
            line = plan.lines()[0][plan.node_record(name, Collective).process]
            others = [other for other in line if other != name]
            if place is None:
                plan.line(others, instead_of=line)
                plan.graph.remove_node(name)
            else:
                plan.line([*others[:place], name, *others[place:]], instead_of=line)

        balanced = job(*settings, experts="moe(experts = 8, top_k = 2, hidden = 16, balance = loss(0.01))")
        experts = 8 if "pipeline=2" in settings else 16  # of the first process
        assert f"does not sum the tokens of {experts} experts" in refusal(balanced, lambda plan: move(plan, None))
        for place in (0, -1):
            assert "too early, too late" in refusal(balanced, lambda plan, place=place: move(plan, place))  # type: ignore[misc]


def test_rows_among_other_ranks(job: Callable[..., Compiled]) -> None:
    def widen(plan: PlanGraph) -> None:
        plan.change(of_rows(plan, Payload.EXPERT_ROWS), ranks=4)

    assert "among 4 ranks" in refusal(job("expert=2"), widen)


def test_experts_that_no_equal_parts_hold(job: Callable[..., Compiled]) -> None:
    def change_step(plan: PlanGraph, **changed: object) -> None:
        name, step = next(plan.of_kind(ExpertParallelStep))
        plan.change(name, **changed) if changed else plan.graph.remove_node(name)
        assert step.size == 2

    odd = (("model.layers.0.mlp.experts", 7),)
    assert "not in 2 equal parts" in refusal(job("expert=2"), lambda plan: change_step(plan, layers=odd))
    assert "4 ranks share experts" in refusal(job("expert=2"), lambda plan: change_step(plan, size=4))
    assert "no axis shares these" in refusal(job("expert=2"), lambda plan: change_step(plan))


def test_gradients_of_experts_summed_over_all_ranks(job: Callable[..., Compiled]) -> None:
    """All ranks of the data axis are too many: half of them hold other experts."""

    def widen(plan: PlanGraph) -> None:
        experts = {name for name, group in plan.of_kind(Weights) if group.experts > 1}
        sums = (name for name, action in plan.of_kind(Collective) if experts & {*action.weights})
        plan.change(next(sums), ranks=4, stride=1)

    assert refusal(job("expert=2"), widen).startswith("summed")


def test_gradients_of_experts_summed_without_the_ranks_of_a_sequence(eight: Callable[..., Compiled]) -> None:
    """Ranks that share a sequence hold the same experts: two runs of two ranks here, four ranks apart."""

    def change(plan: PlanGraph, **changed: int) -> None:
        experts = {name for name, group in plan.of_kind(Weights) if group.experts > 1}
        name, action = next((name, each) for name, each in plan.of_kind(Collective) if experts & {*each.weights})
        assert (action.ranks, action.stride, action.run) == (4, 4, 2)
        plan.change(name, **changed)

    analysed = eight("expert=2", "context=2")
    for changed in ({"run": 1}, {"ranks": 2, "run": 1}, {"ranks": 8, "stride": 1, "run": 1}, {"stride": 2}):
        assert refusal(analysed, lambda plan, changed=changed: change(plan, **changed)).startswith("summed")  # type: ignore[misc]


def test_shares_of_experts_over_the_ranks_of_sequences(eight: Callable[..., Compiled]) -> None:
    whole, sharded = eight("expert=2", "context=2"), eight("expert=2", "context=2", "zero=3")
    gathers = [
        action.group
        for _, action in build_graph(sharded.analysis).of_kind(Collective)
        if action.gathers_parameters and action.run > 1
    ]
    assert gathers and {*gathers} == {(4, 4, 2)}
    parameters = [each.analysis.costs[0].memory.parameters for each in (whole, sharded)]
    assert parameters[1] < parameters[0] / 4


def test_a_stage_without_experts_gathers_none(eight: Callable[..., Compiled]) -> None:
    """Four stages of two blocks: some have no experts."""
    plan = eight("pipeline=2", "schedule=looped_bfs", "expert=2", "zero=3").graph
    experts = {name: group.stage for name, group in plan.of_kind(Weights) if group.experts > 1}
    gathered = {name for _, each in plan.of_kind(Collective) if each.gathers_parameters for name in each.weights}
    assert experts.keys() <= gathered and len({*experts.values()}) == LAYERS


def test_ranks_exchange_no_counts_of_routers_before_a_step(job: Callable[..., Compiled]) -> None:
    collectives = job("zero=0").graph.of_kind(Collective)
    assert not [action for _, action in collectives if action.carries is Payload.BUFFERS]


def test_tokens_of_a_capacity_that_are_gathered_late_or_not(job: Callable[..., Compiled]) -> None:
    def move(plan: PlanGraph, place: int | None) -> None:
        name = of_rows(plan, Payload.CAPACITY_COUNTS)
        line = plan.lines()[0][0]
        others = [other for other in line if other != name]
        if place is None:
            plan.line(others, instead_of=line)
            plan.graph.remove_node(name)
        else:
            plan.line([*others[:place], name, *others[place:]], instead_of=line)

    capped = job(experts="moe(experts = 8, top_k = 2, hidden = 16, capacity = 1.5)")
    assert "process 0 gathers 0 bytes of the tokens of 16 experts" in refusal(capped, lambda plan: move(plan, None))
    assert "too late or over other ranks" in refusal(capped, lambda plan: move(plan, -1))


def test_a_frozen_layer_counts_again_if_a_layer_before_it_trains(tmp_path: Path) -> None:
    path = tmp_path / "job.plt"
    path.write_text(JOB)
    capped = ("model.network.experts=moe(experts = 8, top_k = 2, hidden = 16, capacity = 1.5)", "memory.recompute=full")

    def gathers(frozen: str) -> int:
        traffic = compiled(path, *capped, f"model.freeze=[{frozen}]").analysis.costs[0].traffic
        return next(node.count for node in traffic if node.what is Payload.CAPACITY_COUNTS)

    assert gathers('"*layers.1*"') == 2 * LAYERS
    assert gathers('"*layers.0*", "*embed*"') == 2 * LAYERS - 1
