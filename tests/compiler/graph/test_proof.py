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
from dslc.compiler.graph.graph import COMPUTE, MESSAGES, PlanGraph
from dslc.compiler.graph.passes import build_graph
from dslc.compiler.graph.proof_view import message, view
from dslc.compiler.graph.proof_waits import waits
from dslc.compiler.graph.verify import Unsound, verify
from dslc.compiler.ir.records import Action, Follows, Hands, Placed, Process, Share, Stage
from dslc.compiler.placement.schedules import NAMES, SPLITS_BACKWARD, default_virtual_stages, demands

Change = Callable[[PlanGraph], None]
FIELDS = {"dtype": "dtypes", "shape": "shapes"}  # as a message says them, as a record has them


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
    return plan.at(name, Action).process


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
    plan.put("process 0b", replace(plan.at("process 0", Process), index=9, first=1))
    plan.relate("process 0b", "devices", Placed())
    plan.change("process 0", last=0)
    for stage in [name for name, _ in plan.of_kind(Stage)]:
        if plan.graph.has_edge(stage, "process 0"):
            plan.relate(stage, "process 0b", Placed())
    for name in line:
        plan.put(f"{name}b", replace(plan.at(name, Action), process=9))
        for other, edge in list(plan.graph.adj[name].items()):
            if isinstance(edge["relation"], Hands):
                plan.relate(f"{name}b", other, edge["relation"])
        for other, edge in list(plan.graph.pred[name].items()):
            if isinstance(edge["relation"], Hands):
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
        plan.change("0B1", what="F")

    assert refused(pipeline, change).startswith("actions: ")


# ------------------------------------------------------------------------------------------------- order and inputs


def test_two_actions_at_once(pipeline: Compiled) -> None:
    def change(plan: PlanGraph) -> None:
        plan.relate("0B0", "0F0", Follows())

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
        weights = next(name for name in line if plan.at(name, Action).what == "W")
        action = plan.at(weights, Action)
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


@pytest.mark.parametrize("what", ["bytes", "dtype", "shape"])
def test_a_message_with_other_numbers_at_one_end(pipeline: Compiled, what: str) -> None:
    def change(plan: PlanGraph) -> None:
        other = {"bytes": 17, "dtype": ("float16",), "shape": ((1,),)}[what]
        plan.change("1RECV_F2", **{FIELDS.get(what, what): other})

    found = refused(pipeline, change)
    assert found.startswith("ends: ") and f"0SEND_F2 and 1RECV_F2 differ in {what}" in found


def test_two_ranks_that_disagree_on_the_order_of_their_messages(pipeline: Compiled) -> None:
    """Rank 1 takes the second input before it hands the first gradient back; rank 0 has it the other way round."""

    found = refused(pipeline, lambda plan: move(plan, "0RECV_B0", before="0SEND_F1"))
    assert found.startswith("agreement: ") and "processes 0 and 1 (pipeline 0 and 1) disagree" in found
    assert refused(pipeline, lambda plan: swap(plan, "1RECV_F0", "1RECV_F1")).startswith("agreement: ")


def test_sends_that_wait_for_each_other_are_a_hang(pipeline: Compiled) -> None:
    """1F1B as one would write it, each receive right before its use: both send, and nobody receives."""
    plan = build_graph(pipeline.analysis)
    for name in [name for name, action in plan.of_kind(Action) if action.what.startswith("RECV")]:
        action = plan.at(name, Action)
        use = f"{action.stage}{name[-2]}{action.microbatch}"
        move(plan, name, before=use)
    assert waits(view(plan)) == "a circle of waits, a plan that hangs: 0SEND_F1 -> 1SEND_B0 -> 0SEND_F1"
    with pytest.raises(Unsound) as found:
        verify(plan)
    assert found.value.proposition == "agreement"


def test_processes_that_wait_for_each_other(pipeline: Compiled) -> None:
    def change(plan: PlanGraph) -> None:
        plan.relate("update 0", "1F0", Hands(bytes=0))

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
        move(plan, "exchange 0.0.0b", before="0SEND_F3b")

    found = refused(pipeline, change)
    assert found.startswith("waits: ") and "exchange 0.0.0b" in found


@pytest.mark.parametrize("what", ["bytes", "dtype", "what", "carries", "count"])
def test_a_collective_with_other_numbers_at_one_end(pipeline: Compiled, what: str) -> None:
    def change(plan: PlanGraph) -> None:
        split(plan)
        other = {"bytes": 17, "dtype": ("float16",), "what": "broadcast", "carries": "buffers", "count": 7}
        plan.change("exchange 0.0.0b", **{FIELDS.get(what, what): other[what]})

    found = refused(pipeline, change)
    word = "operation" if what == "what" else what
    assert found.startswith("ends: ") and f"exchange 0.0.0 and exchange 0.0.0b differ in {word}" in found


def test_a_collective_that_one_rank_skips(pipeline: Compiled) -> None:
    def change(plan: PlanGraph) -> None:
        split(plan)
        drop(plan, "exchange 0.0.0b")

    found = refused(pipeline, change)
    assert found.startswith("ends: ") and "process 9 has no end of exchange 0.0.0" in found


# -------------------------------------------------------------------------------------------- exchanges and updates


def test_a_collective_that_the_account_does_not_know(pipeline: Compiled) -> None:
    assert refused(pipeline, lambda plan: double(plan, "exchange 0.0.0")).startswith("exchanges: ")
    assert refused(pipeline, lambda plan: drop(plan, "exchange 0.0.0")).startswith("exchanges: ")


def test_a_process_that_updates_before_gradients_are_agreed_on(pipeline: Compiled) -> None:
    found = refused(pipeline, lambda plan: move(plan, "update 0", before="exchange 0.0.0"))
    assert found.startswith("updates: ") and "update 0 does not wait for exchange 0.0.0" in found


def test_gradients_that_are_agreed_on_before_the_last_backward(pipeline: Compiled, sharded: Compiled) -> None:
    found = refused(pipeline, lambda plan: move(plan, "exchange 0.0.0", before="0B3"))
    assert found.startswith("updates: ") and "exchange 0.0.0 does not wait for 0B3" in found

    def change(plan: PlanGraph) -> None:
        line = plan.lines()[0][0]
        scattered = [name for name in line if plan.at(name, Action).what == "reduce_scatter"]
        move(plan, scattered[-1], before=[n for n in line if plan.at(n, Action).what in ("B", "W")][-1])

    assert refused(sharded, change).startswith("updates: ")


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
    for name, action in job.graph.of_kind(Action):
        if action.what in ("SEND_F", "RECV_B"):
            assert _carried(action) == told.stages[action.stage].outputs, name
        elif action.what in ("RECV_F", "SEND_B"):
            assert _carried(action) == told.stages[action.stage].inputs, name


def _carried(action: Action) -> tuple[tuple[tuple[int, ...], str], ...]:
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


def nodes_of(plan: PlanGraph, fits: Callable[[Action], bool]) -> list[str]:
    return [name for name, action in plan.of_kind(Action) if fits(action)]


def mutations(plan: PlanGraph, pick: Callable[[list[Any]], Any]) -> dict[str, Callable[[], None]]:
    """Single changes, each of which makes any plan unsound. `pick` chooses one of several."""
    computes = nodes_of(plan, lambda action: action.what in COMPUTE)
    messages = nodes_of(plan, lambda action: action.what in MESSAGES)
    collectives = nodes_of(plan, lambda action: bool(action.axis))
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
        memory = plan.at(name, Process).memory
        assert memory is not None
        plan.change(name, memory=replace(memory, activations=2**37))

    found: dict[str, Callable[[], None]] = {
        "a compute action dropped": lambda: drop(plan, pick(computes)),
        "a message dropped at one end": lambda: drop(plan, pick(messages)),
        "an action doubled": lambda: double(plan, pick([*computes, *messages, *collectives])),
        "another stage": lambda: add([*computes, *messages], "stage", 1),
        "another micro-batch": lambda: add([*computes, *messages], "microbatch", pick([1, -1])),
        "other bytes": lambda: add([*messages, *collectives], "bytes", 4),
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
    return found


def peer(plan: PlanGraph, name: str) -> int:
    """Returns the process at the other end of a message."""
    _, way, stage, m = message(plan.at(name, Action))
    ends = (f"{stage}SEND_{way}{m}", f"{stage + (1 if way == 'F' else -1)}RECV_{way}{m}")
    return process_of(plan, ends[1] if ends[0] == name else ends[0])


@settings(max_examples=25, suppress_health_check=list(HealthCheck))
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
