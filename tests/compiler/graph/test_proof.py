"""Proofs of a step: plans broken on purpose are refused by name, and those broken at random are refused."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
from helpers.planning import JOBS, compiled
from hypothesis import HealthCheck, assume, given, settings
from hypothesis import strategies as st

from dslc.compiler.compile import Compiled
from dslc.compiler.graph.build import build_graph
from dslc.compiler.graph.plan_graph import PlanGraph
from dslc.compiler.graph.proofs.view import message, view
from dslc.compiler.graph.proofs.waits import waits
from dslc.compiler.graph.verify import Unsound, verify
from dslc.compiler.ir import actions as a
from dslc.compiler.ir.records import NextActionEdge, PlacementEdge, Process, Share, Stage, TransferEdge
from dslc.compiler.placement.schedules import NAMES, SPLITS_BACKWARD, default_virtual_stages, demands

Change = Callable[[PlanGraph], None]


@pytest.fixture(scope="module")
def pipeline() -> Compiled:
    return compiled(JOBS / "pipeline.plt")


@pytest.fixture(scope="module")
def sharded() -> Compiled:
    return compiled(JOBS / "pipeline.plt", "parallelism.zero=2", "parallelism.schedule=zbv", "model.network.layers=6")


def refused(job: Compiled, change: Change) -> str:
    """Returns the proposition that refuses the changed graph, and the reason."""
    plan = build_graph(job.analysis)
    change(plan)
    with pytest.raises(Unsound) as found:
        verify(plan)
    return f"{found.value.proposition}: {found.value}"


# ------------------------------------------------------------------------------------------------- changes to a line


def process_of(plan: PlanGraph, name: str) -> int:
    return plan.node_record(name, a.Action).process


def reorder(plan: PlanGraph, process: int, change: Callable[[list[str]], list[str]]) -> None:
    old = plan.lines()[0][process]
    plan.line(change(list(old)), instead_of=old)


def drop(plan: PlanGraph, name: str) -> None:
    """Removes an action; its neighbours then follow one another."""
    reorder(plan, process_of(plan, name), lambda line: [other for other in line if other != name])
    plan.graph.remove_node(name)


def double(plan: PlanGraph, name: str) -> None:
    """Inserts the same action again, right after it."""

    def change(line: list[str]) -> list[str]:
        at = line.index(name) + 1
        return [*line[:at], "again", *line[at:]]

    old = plan.lines()[0][process_of(plan, name)]
    plan.put("again", plan.graph.nodes[name]["record"])
    plan.line(change(old), instead_of=old)


def move(plan: PlanGraph, name: str, before: str) -> None:
    def change(line: list[str]) -> list[str]:
        line.remove(name)
        line.insert(line.index(before), name)
        return line

    reorder(plan, process_of(plan, name), change)


def swap(plan: PlanGraph, one: str, two: str) -> None:
    def change(line: list[str]) -> list[str]:
        a, b = line.index(one), line.index(two)
        line[a], line[b] = line[b], line[a]
        return line

    reorder(plan, process_of(plan, one), change)


def split(plan: PlanGraph) -> None:
    """Ranks 0 and 1, which do the same, as two processes that do the same."""
    line = plan.lines()[0][0]
    plan.put("process 0b", replace(plan.node_record("process 0", Process), index=9, first=1))
    plan.relate("process 0b", "devices", PlacementEdge())
    plan.change("process 0", last=0)
    for stage in [name for name, _ in plan.of_kind(Stage)]:
        if plan.graph.has_edge(stage, "process 0"):
            plan.relate(stage, "process 0b", PlacementEdge())
    for name in line:
        plan.put(f"{name}b", replace(plan.node_record(name, a.Action), process=9))
        for other, edge in list(plan.graph.adj[name].items()):
            if isinstance(edge["relation"], TransferEdge):
                plan.relate(f"{name}b", other, edge["relation"])
        for other, edge in list(plan.graph.pred[name].items()):
            if isinstance(edge["relation"], TransferEdge):
                plan.relate(other, f"{name}b", edge["relation"])
    plan.line([f"{name}b" for name in line], instead_of=[])


# ---------------------------------------------------------------------------------------------------------- actions


@pytest.mark.parametrize("action", ["0F0", "1F3", "0B0", "1B3", "update 0"])
def test_an_action_that_is_dropped(pipeline: Compiled, action: str) -> None:
    assert refused(pipeline, lambda plan: drop(plan, action)).startswith("actions: ")


@pytest.mark.parametrize("action", ["0F0", "1B3", "update 0"])
def test_an_action_that_is_doubled(pipeline: Compiled, action: str) -> None:
    def change(plan: PlanGraph) -> None:
        plan.put("again", plan.graph.nodes[action]["record"])

    assert refused(pipeline, change).startswith("actions: ")


def test_an_action_on_the_wrong_process_or_of_no_stage(pipeline: Compiled) -> None:
    def process(plan: PlanGraph) -> None:
        plan.change("0F0", process=1)

    def stage(plan: PlanGraph) -> None:
        plan.change("0F0", stage=7)

    assert "0F0 is on process 1, its stage on 0" in refused(pipeline, process)
    assert "its stage on no process" in refused(pipeline, stage)


def test_a_forward_where_a_backward_should_be(pipeline: Compiled) -> None:
    def change(plan: PlanGraph) -> None:
        plan.put("0B1", a.Forward(process=0, stage=0, microbatch=1))

    assert refused(pipeline, change).startswith("actions: ")


# ------------------------------------------------------------------------------------------------- order and inputs


def test_two_actions_at_once(pipeline: Compiled) -> None:
    def change(plan: PlanGraph) -> None:
        plan.relate("0B0", "0F0", NextActionEdge())

    assert refused(pipeline, change).startswith("order: ")


def test_a_line_that_is_torn(pipeline: Compiled) -> None:
    def change(plan: PlanGraph) -> None:
        plan.graph.remove_edge("0F0", "0SEND_F0")

    assert "both begin" in refused(pipeline, change)


def test_a_forward_before_its_input(pipeline: Compiled) -> None:
    found = refused(pipeline, lambda plan: move(plan, "1F0", before="1RECV_F0"))
    assert found.startswith("inputs: ") and "1F0 comes before what it needs: 1RECV_F0 or 0F0" in found


def test_a_send_before_what_it_sends(pipeline: Compiled) -> None:
    assert refused(pipeline, lambda plan: move(plan, "0SEND_F0", before="0F0")).startswith("inputs: ")


def test_weights_before_the_gradient_of_their_output(sharded: Compiled) -> None:
    def change(plan: PlanGraph) -> None:
        line = plan.lines()[0][0]
        mine = [(name, record) for name, record in plan.of_kind(a.WeightBackward) if name in line]
        weights, action = mine[0]
        move(plan, weights, before=f"{action.stage}I{action.microbatch}")

    assert refused(sharded, change).startswith("inputs: ")


# ------------------------------------------------------------------------------------- ends, agreement and waits


@pytest.mark.parametrize(
    ("name", "says"),
    [
        ("0RECV_B0", "1SEND_B0 has no receive"),
        ("1RECV_F3", "0SEND_F3 has no receive"),
        ("1SEND_B2", "0RECV_B2 has no send"),
        ("0SEND_F1", "1RECV_F1 has no send"),
    ],
)
def test_a_dropped_receive_or_send(pipeline: Compiled, name: str, says: str) -> None:
    found = refused(pipeline, lambda plan: drop(plan, name))
    assert found.startswith("ends: ") and says in found


def test_a_message_sent_twice(pipeline: Compiled) -> None:
    found = refused(pipeline, lambda plan: double(plan, "0SEND_F3"))
    assert found.startswith("ends: ") and "0SEND_F3 is issued on process 0, 0, not on [0]" in found


@pytest.mark.parametrize(("what", "other"), [("dtype", {"dtypes": ("float16",)}), ("shape", {"shapes": ((1,),)})])
def test_a_message_with_other_numbers_at_one_end(pipeline: Compiled, what: str, other: dict[str, Any]) -> None:
    found = refused(pipeline, lambda plan: plan.change("1RECV_F2", **other))
    assert found.startswith("ends: ") and f"0SEND_F2 and 1RECV_F2 differ in {what}" in found


def test_two_ranks_that_disagree_on_the_order_of_their_messages(pipeline: Compiled) -> None:
    """Rank 1 takes the second input before it hands the first gradient back; rank 0 has it the other way round."""

    found = refused(pipeline, lambda plan: move(plan, "0RECV_B0", before="0SEND_F1"))
    assert found.startswith("agreement: ") and "processes 0 and 1 (pipeline 0 and 1) disagree" in found
    assert refused(pipeline, lambda plan: swap(plan, "1RECV_F0", "1RECV_F1")).startswith("agreement: ")


def test_sends_that_wait_for_each_other_are_a_hang(pipeline: Compiled) -> None:
    """1F1B as one would write it, each receive right before its use: both send, and nobody receives."""
    plan = build_graph(pipeline.analysis)
    for name, action in [each for each in plan.of_kind(a.Message) if each[1].operation == "receive"]:
        use = f"{action.stage}{name[-2]}{action.microbatch}"
        move(plan, name, before=use)
    assert waits(view(plan)) == "a circle of waits, a plan that hangs: 0SEND_F1 -> 1SEND_B0 -> 0SEND_F1"
    with pytest.raises(Unsound) as found:
        verify(plan)
    assert found.value.proposition == "agreement"


def test_processes_that_wait_for_each_other(pipeline: Compiled) -> None:
    def change(plan: PlanGraph) -> None:
        plan.relate("update 0", "1F0", TransferEdge(bytes=0))

    found = refused(pipeline, change)
    assert found.startswith("waits: ") and "a circle of waits" in found and "1F0" in found


def test_ranks_that_do_the_same_may_be_told_apart(pipeline: Compiled) -> None:
    plan = build_graph(pipeline.analysis)
    split(plan)
    verify(plan)


def test_ranks_of_a_group_that_disagree_on_the_order_of_groups(pipeline: Compiled) -> None:
    """One process reduces its gradients before it sends its last input, the other after."""

    def change(plan: PlanGraph) -> None:
        split(plan)
        move(plan, "exchange 0.0b", before="0SEND_F3b")

    found = refused(pipeline, change)
    assert found.startswith("waits: ") and "exchange 0.0b" in found


@pytest.mark.parametrize("what", ["bytes", "dtype", "operation", "carries", "count"])
def test_a_collective_with_other_numbers_at_one_end(pipeline: Compiled, what: str) -> None:
    def change(plan: PlanGraph) -> None:
        split(plan)
        other = {"bytes": 17, "dtype": "float16", "operation": "broadcast", "carries": "buffers", "count": 7}
        plan.change("exchange 0.0b", **{what: other[what]})

    found = refused(pipeline, change)
    assert found.startswith("ends: ") and f"exchange 0.0 and exchange 0.0b differ in {what}" in found


def test_a_collective_that_one_rank_skips(pipeline: Compiled) -> None:
    def change(plan: PlanGraph) -> None:
        split(plan)
        drop(plan, "exchange 0.0b")

    found = refused(pipeline, change)
    assert found.startswith("ends: ") and "process 9 has no end of exchange 0.0" in found


# ------------------------------------------------------------------------------- parameters, gradients, global numbers


@pytest.fixture(scope="module")
def freed() -> Compiled:
    """Parameters in shares, freed after each pass, beside replicas; the gradient is clipped."""
    axes = ("parallelism.pipeline=1", "parallelism.data=4", "parallelism.zero=3", "parallelism.replicas=2")
    return compiled(JOBS / "pipeline.plt", *axes, "train.clip=1.0", "model.loss.ignore=0")


@pytest.fixture(scope="module")
def dealt() -> Compiled:
    """Each of two ranks updates some of the parameters."""
    axes = ("devices.cpus=2", "parallelism.pipeline=1", "parallelism.data=2", "parallelism.zero=1")
    return compiled(JOBS / "pipeline.plt", *axes)


@pytest.fixture(scope="module")
def cut() -> Compiled:
    """Two tensor ranks, each with pieces of the sequence; two stages have the same embedding."""
    axes = ("parallelism.tensor=2", "parallelism.sequence=true", "parallelism.data=1", "model.network.tie=true")
    return compiled(JOBS / "pipeline.plt", *axes)


def carrying(plan: PlanGraph, carries: str, operation: str = "") -> list[str]:
    collectives = plan.of_kind(a.Collective)
    return [name for name, each in collectives if each.carries == carries and each.operation.startswith(operation)]


def test_a_sum_that_is_missing_or_comes_twice(pipeline: Compiled) -> None:
    found = refused(pipeline, lambda plan: double(plan, "exchange 0.0"))
    assert found.startswith("summed: ") and "again sums gradients of weights 0.0, of which there are none" in found
    found = refused(pipeline, lambda plan: drop(plan, "exchange 0.0"))
    assert found.startswith("summed: ") and "that 0B3 made, summed over 1 of 2 ranks" in found


def test_an_update_before_its_gradients_are_summed(pipeline: Compiled) -> None:
    found = refused(pipeline, lambda plan: move(plan, "update 0", before="exchange 0.0"))
    assert found.startswith("summed: ") and "update 0 uses the gradients of weights 0.0 that 0B3 made" in found


def test_gradients_that_are_summed_before_the_last_backward(pipeline: Compiled, sharded: Compiled) -> None:
    found = refused(pipeline, lambda plan: move(plan, "exchange 0.0", before="0B3"))
    assert found.startswith("summed: ") and "that 0B3 made, summed over 1 of 2 ranks" in found

    def change(plan: PlanGraph) -> None:
        line = plan.lines()[0][0]
        scattered = [name for name in line if name in carrying(plan, "gradients", "reduce_scatter")]
        kinds = a.Backward | a.WeightBackward
        move(plan, scattered[-1], before=[n for n in line if isinstance(plan.node_record(n, a.Action), kinds)][-1])

    assert refused(sharded, change).startswith("summed: ")


def test_a_sum_over_other_ranks_than_those_that_hold_a_share(freed: Compiled) -> None:
    """Over the shares but not the replicas, over the shares twice, or over ranks with other parameters."""
    found = refused(freed, lambda plan: drop(plan, carrying(plan, "gradients", "all_reduce")[0]))
    assert found.startswith("summed: ") and "summed over 2 of 4 ranks" in found
    found = refused(freed, lambda plan: plan.change(carrying(plan, "gradients", "all_reduce")[0], stride=1))
    assert found.startswith("summed: ") and "not over 1 ranks" in found
    found = refused(freed, lambda plan: plan.change(carrying(plan, "gradients", "all_reduce")[0], ranks=4))
    assert found.startswith("summed: ") and "summed over 8 of 4 ranks" in found
    found = refused(freed, lambda plan: plan.change(carrying(plan, "gradients", "reduce")[0], operation="all_reduce"))
    assert found.startswith("summed: ") and "leaves gradients of other numbers" in found


def test_a_sum_that_leaves_a_parameter_out(freed: Compiled) -> None:
    def change(plan: PlanGraph) -> None:
        name = carrying(plan, "gradients", "reduce_scatter")[0]
        plan.change(name, weights=plan.node_record(name, a.Collective).weights[1:])

    assert refused(freed, change).startswith("summed: ")


def test_parameters_that_a_pass_has_not_gathered(freed: Compiled) -> None:
    found = refused(freed, lambda plan: drop(plan, carrying(plan, "parameters", "all_gather")[0]))
    assert found.startswith("gathered: ") and "0F0 uses weights 0." in found
    found = refused(freed, lambda plan: move(plan, carrying(plan, "parameters", "all_gather")[1], before="0F1"))
    assert found.startswith("gathered: ") and "0B0 uses weights 0." in found
    found = refused(freed, lambda plan: double(plan, carrying(plan, "parameters", "all_gather")[0]))
    assert found.startswith("gathered: ") and "again gathers weights 0." in found
    found = refused(freed, lambda plan: plan.change(carrying(plan, "parameters", "all_gather")[0], stride=2))
    assert found.startswith("gathered: ") and "is not among the ranks that have the shares" in found


def test_parameters_of_before_the_update(freed: Compiled) -> None:
    """They would be gathered in the next step as if they were not there."""
    found = refused(freed, lambda plan: drop(plan, "0RESHARD (4)"))
    assert found.startswith("gathered: ") and "update 0 leaves weights 0." in found


@pytest.mark.parametrize(
    ("kind", "says"),
    [
        (a.Unshard, "comes before stage"),
        (a.Reshard, "has not gathered"),
        (a.ReduceGradients, "summed over 1 of 2 ranks"),
    ],
)
def test_another_stage_than_the_one_that_is_used(sharded: Compiled, kind: type[a.StageAction], says: str) -> None:
    """Of the same process."""

    def change(plan: PlanGraph) -> None:
        name, action = next(each for each in plan.of_kind(kind) if each[1].process == 0)
        stages = [other.stage for _, other in plan.of_kind(a.StagePass) if other.process == 0]
        plan.change(name, stage=next(stage for stage in stages if stage != action.stage))

    assert says in refused(sharded, change)


def test_a_pass_that_overlaps_none(sharded: Compiled) -> None:
    found = refused(sharded, lambda plan: plan.change("0F0", overlaps=True))
    assert found.startswith("fields: ") and "0F0 overlaps no forward or backward pass before it" in found


def test_weights_that_are_none_or_two_stages(pipeline: Compiled) -> None:
    found = refused(pipeline, lambda plan: plan.graph.remove_node("weights 0.1"))
    assert found.startswith("weights: ") and "of them among its weights" in found
    assert refused(pipeline, lambda plan: plan.change("weights 0.1", stage=1)).startswith("weights: ")


def test_an_update_of_one_rank_that_the_others_do_not_get(dealt: Compiled) -> None:
    def early(plan: PlanGraph) -> None:
        move(plan, carrying(plan, "parameters", "broadcast")[0], before="update 0")

    found = refused(dealt, lambda plan: drop(plan, carrying(plan, "parameters", "broadcast")[0]))
    assert found.startswith("summed: ") and "each rank has new numbers of its own part alone" in found
    assert "comes before the update of what it sends" in refused(dealt, early)
    found = refused(
        dealt, lambda plan: plan.change("process 0", dealt=plan.node_record("process 0", Process).dealt[:1])
    )
    assert found.startswith("summed: ") and "are dealt out as" in found


def test_a_mean_for_which_the_loss_is_not_scaled(dealt: Compiled) -> None:
    found = refused(dealt, lambda plan: plan.change("gradients", averages=1))
    assert found.startswith("summed: ") and "a mean over 2 ranks, and the loss is multiplied by 1" in found


def test_gradients_of_pieces_that_are_not_summed_along_the_tensor_axis(cut: Compiled) -> None:
    found = refused(cut, lambda plan: drop(plan, carrying(plan, "gradients beside pieces")[0]))
    assert found.startswith("summed: ") and "does not wait for the sum along the tensor axis" in found
    found = refused(cut, lambda plan: plan.change(carrying(plan, "gradients beside pieces")[0], stride=2))
    assert found.startswith("groups: ") and "is not the tensor axis" in found


def test_gradients_of_a_shared_weight_that_a_stage_does_not_get(cut: Compiled) -> None:
    found = refused(cut, lambda plan: drop(plan, carrying(plan, "gradients of shared weights", "receive")[0]))
    assert found.startswith("summed: ") and "comes with other gradients of shared weights" in found
    name = "gradients of shared weights"
    one_rank_a_stage = compiled(JOBS / "pipeline.plt", "devices.cpus=2", "parallelism.data=1", "model.network.tie=true")
    for made in (cut, one_rank_a_stage):
        found = refused(made, lambda plan: move(plan, carrying(plan, name, "send")[0], before="0B3"))
        assert found.startswith("summed: ")


@pytest.mark.parametrize("what", ["count of what is kept", "norm of the gradient"])
def test_a_number_of_all_ranks_that_is_not_a_sum_over_them(freed: Compiled, what: str) -> None:
    late = what.startswith("count")

    def moved(plan: PlanGraph) -> None:
        move(plan, carrying(plan, what)[0], before="update 0" if late else "0B0")

    assert refused(freed, moved).startswith("counts: ")
    assert f"sums {what} 0 times, not 1" in refused(freed, lambda plan: drop(plan, carrying(plan, what)[0]))
    found = refused(freed, lambda plan: plan.change(carrying(plan, what)[0], ranks=3))
    assert found.startswith("groups: " if late else "counts: ")


def test_totals_that_are_not_those_of_the_actions(pipeline: Compiled) -> None:
    def change(plan: PlanGraph) -> None:
        first, *others = plan.node_record("process 0", Process).traffic
        plan.change("process 0", traffic=(replace(first, bytes=first.bytes + 4), *others))

    found = refused(pipeline, change)
    assert found.startswith("totals: ") and "are shown" in found


# ------------------------------------------------------------------------------------------------------------- held


def test_a_schedule_that_holds_too_much(pipeline: Compiled) -> None:
    """Three forwards of stage 0 before the first backward, where the account has two."""

    def change(plan: PlanGraph) -> None:
        move(plan, "0F2", before="0B0")

    found = refused(pipeline, change)
    assert found.startswith("held: ") and "at 0F2 stage 0 holds 3 micro-batches, 2 by the account" in found


# ---------------------------------------------------------------------------------------------------------- the program


@pytest.mark.parametrize("axes", [(), ("parallelism.tensor=2",), ("parallelism.context=2",)])
@pytest.mark.parametrize("precision", ["fp32", "bf16", "bf16(level = O2)"])
def test_the_messages_are_those_of_the_program(axes: tuple[str, ...], precision: str) -> None:
    """Returns shape and dtype, as each stage is told them."""
    cpus = "devices.cpus=8" if axes else "devices.cpus=4"
    job = compiled(JOBS / "pipeline.plt", cpus, f"train.precision={precision}", *axes)
    told = job.program().pipeline
    assert told is not None
    for name, action in job.graph.of_kind(a.Message):
        stage = told.stages[action.stage]
        ends = stage.inputs if isinstance(action, a.ReceiveActivations | a.SendGradients) else stage.outputs
        assert _carried(action) == ends, name


def _carried(action: a.Message) -> tuple[tuple[tuple[int, ...], str], ...]:
    return tuple((shape[1:], dtype) for shape, dtype in zip(action.shapes, action.dtypes, strict=True))


# --------------------------------------------------------------------------------------------------------- at random


@st.composite
def jobs(draw: st.DrawFn) -> tuple[str, ...]:
    """Settings of a job that the compiler accepts: axes, schedule, zero, precision."""
    name = draw(st.sampled_from(NAMES))
    ranks, data = draw(st.sampled_from([2, 3, 4])), draw(st.sampled_from([1, 2, 3]))
    microbatches = draw(st.integers(2, 10))
    assume(not demands(name, ranks, microbatches, default_virtual_stages(name)))
    zero = draw(st.sampled_from([0, 1, 2] if name in SPLITS_BACKWARD else [0, 1, 2, 3])) if data > 1 else 0
    tensor, context = draw(st.sampled_from([(1, 1), (2, 1), (1, 2), (2, 2)]))
    return (
        f"parallelism.pipeline={ranks}",
        f"parallelism.data={data}",
        f"parallelism.tensor={tensor}",
        f"parallelism.context={context}",
        f"devices.cpus={ranks * data * tensor * context}",
        f"parallelism.schedule={name}",
        f"parallelism.microbatches={microbatches}",
        f"parallelism.zero={zero}",
        f"data.batch={data * microbatches * draw(st.sampled_from([1, 2]))}",
        f"train.precision={draw(st.sampled_from(['fp32', 'bf16']))}",
        f"model.network.layers={draw(st.integers(6, 12))}",
        "memory.limit=64GiB",
    )


def nodes_of(plan: PlanGraph, kind: type[a.Action]) -> list[str]:
    return [name for name, _ in plan.of_kind(kind)]


def mutations(plan: PlanGraph, pick: Callable[[list[Any]], Any]) -> dict[str, Callable[[], None]]:
    """Single changes, each of which makes any plan unsound. `pick` chooses one of several."""
    computes, messages, collectives = (nodes_of(plan, kind) for kind in (a.StagePass, a.Message, a.Collective))
    processes = [name for name, _ in plan.of_kind(Process)]
    stages = [name for name, _ in plan.of_kind(Stage)]
    shares = [name for name, _ in plan.of_kind(Share)]

    def add(names: list[str], key: str, step: int) -> None:
        name = pick(names)
        plan.change(name, **{key: getattr(plan.graph.nodes[name]["record"], key) + step})

    def put(names: list[str], key: str, value: Any) -> None:
        plan.change(pick(names), **{key: value})

    def cross() -> None:
        """Swaps two messages of one connection at one end."""
        one = pick(messages)
        peers = [
            n for n in messages if peer(plan, n) == peer(plan, one) and process_of(plan, n) == process_of(plan, one)
        ]
        others = [n for n in peers if n != one]
        assume(bool(others))
        swap(plan, one, pick(others))

    def heavier() -> None:
        name = pick(processes)
        memory = plan.node_record(name, Process).memory
        assert memory is not None
        plan.change(name, memory=replace(memory, activations=2**37))

    found: dict[str, Callable[[], None]] = {
        "a compute action dropped": lambda: drop(plan, pick(computes)),
        "a message dropped at one end": lambda: drop(plan, pick(messages)),
        "an action doubled": lambda: double(plan, pick([*computes, *messages, *collectives])),
        "another stage": lambda: add([*computes, *messages], "stage", 1),
        "another micro-batch": lambda: add([*computes, *messages], "microbatch", pick([1, -1])),
        "another dtype at one end": lambda: put(messages, "dtypes", ("int8",)),
        "another shape at one end": lambda: put(messages, "shapes", ((3,),)),
        "messages in another order": cross,
        "layers on two stages or none": lambda: add(stages, pick(["first", "last"]), pick([1, -1])),
        "a stage left out": lambda: plan.graph.remove_node(pick(stages)),
        "ranks on two processes or none": lambda: add(processes, pick(["first", "last"]), pick([1, -1])),
        "samples given twice or never": lambda: add(shares, pick(["samples", "ranks", "first_rank"]), pick([1, -1])),
        "less held by the account": lambda: add(stages, "held", -1),
        "too much memory": heavier,
    }
    if collectives:
        found["a collective dropped"] = lambda: drop(plan, pick(collectives))
        found["other bytes"] = lambda: add(collectives, "bytes", 4)
    return found


def peer(plan: PlanGraph, name: str) -> int:
    """Returns the process at the other end of a message."""
    _, way, stage, m = message(plan.node_record(name, a.Message))
    letter = "F" if way > 0 else "B"
    ends = (f"{stage}SEND_{letter}{m}", f"{stage + way}RECV_{letter}{m}")
    return process_of(plan, ends[1] if ends[0] == name else ends[0])


@pytest.mark.slow
@settings(max_examples=12, suppress_health_check=list(HealthCheck))
@given(jobs(), st.data())
def test_valid_plans_pass_and_any_single_change_is_refused(chosen: tuple[str, ...], data: st.DataObject) -> None:
    job = compiled(JOBS / "pipeline.plt", *chosen)
    verify(job.graph)
    for name in mutations(build_graph(job.analysis), lambda items: items[0]):
        plan = build_graph(job.analysis)
        changes = mutations(plan, lambda items: data.draw(st.sampled_from(items)))
        changes[name]()
        assert unsound(plan), f"{name} is not noticed"


def unsound(plan: PlanGraph) -> bool:
    try:
        verify(plan)
    except Unsound:
        return True
    return False
