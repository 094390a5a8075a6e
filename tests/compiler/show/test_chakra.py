"""Execution traces of Chakra: their bytes, read by the numbers of the fields alone, and what they say of a plan."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
from google.protobuf.empty_pb2 import Empty
from google.protobuf.proto import parse_length_prefixed
from google.protobuf.unknown_fields import UnknownFieldSet
from helpers import made_plans
from helpers.paths import EXAMPLES
from helpers.planning import JOBS, compiled

from dslc.compiler.ir.records import StageTime, StepEnd
from dslc.compiler.show.chakra import (
    ExecutionTraces,
    NodeType,
    PlanNotTraceableError,
    TraceNode,
    write_execution_traces,
)

STEP = replace(
    made_plans.STEP,
    stages=(StageTime(forward=0.01, backward=0.03), StageTime(forward=0.02, backward=0.06)),
    message=0.0,
    ends=(StepEnd(exposed=0.02, update=0.05),) * 2,
)


def fields(content: bytes) -> dict[int, list[int | bytes]]:
    """Returns the values of a message by the numbers of its fields."""
    message, values = Empty(), dict[int, list[int | bytes]]()
    message.ParseFromString(content)
    for field in UnknownFieldSet(message):
        values.setdefault(field.field_number, []).append(field.data)
    return values


def messages(path: Path) -> Iterator[dict[int, list[int | bytes]]]:
    with path.open("rb") as file:
        while (message := parse_length_prefixed(Empty, file)) is not None:
            yield fields(message.SerializeToString())


def test_the_files_have_the_field_numbers_of_the_schema(tmp_path: Path) -> None:
    plan = compiled(EXAMPLES / "pipeline.plt")
    view = replace(plan.plan, step=STEP)
    names = write_execution_traces(plan.graph, view, str(tmp_path))
    assert names == [f"pipeline.{rank}.et" for rank in range(4)]
    metadata, *nodes = messages(tmp_path / names[2])
    assert metadata[1] == [b"1.0.0"] and len(metadata[2]) == 4
    by_name = {node[2][0]: node for node in nodes}
    backward, update = by_name[b"1B3"], by_name[b"update 1"]
    assert backward[3] == [4] and backward[7] == [60_000] and update[7] == [50_000]  # a computation, its microseconds
    assert backward[6] == [20_000 * 4 + 60_000 * 3 + 10_000], "four forwards and three backwards after the first input"
    received = [fields(each) for each in by_name[b"1RECV_F0"][10] if isinstance(each, bytes)]
    values = {entry[1][0]: next(value for number, value in entry.items() if number != 1) for entry in received}
    assert values[b"is_cpu_op"] == [0] and values[b"comm_dst"] == [2] and values[b"comm_size"] == [131072]
    assert values.keys() == {b"is_cpu_op", b"comm_src", b"comm_dst", b"comm_tag", b"comm_size"}
    assert by_name[b"1F0"][5] == [b"\0"], "it waits for what it receives, node 0"
    groups = json.loads((tmp_path / "comm_group.json").read_text())
    assert sorted(groups.values()) == [[0, 1], [0, 1, 2, 3], [2, 3]]


@pytest.mark.parametrize(
    ("job", "settings"),
    [
        ("pipeline", ()),
        ("pipeline", ("model.network.tie=true",)),
        ("gpt_cpu", ()),
        ("ddp2", ()),
        ("cluster", ()),
        ("experts", ("devices.cpus=8", "parallelism.context=2", "parallelism.zero=3", "parallelism.expert=2")),
    ],
)
def test_messages_have_two_ends_and_collectives_all_members(job: str, settings: tuple[str, ...]) -> None:
    plan = compiled(EXAMPLES / f"{job}.plt", *settings)
    traces = ExecutionTraces(plan.graph, plan.plan)
    nodes = {rank: list(traces.nodes_of(rank)) for rank in range(plan.plan.world_size)}
    ends: dict[NodeType, Counter[tuple[object, ...]]] = {kind: Counter() for kind in NodeType}
    collectives: dict[object, dict[int, list[object]]] = {}
    for rank, line in nodes.items():
        assert [node.id for node in line] == list(range(len(line)))
        assert all(wait < node.id for node in line for wait in node.waits)
        assert _ancestors(line) == set(range(len(line))), "the last node waits for all"
        for node in line:
            ends[node.type][tuple(node.attributes.values())] += 1
            if node.type is NodeType.COLLECTIVE:
                facts = node.attributes["comm_type"], node.attributes["comm_size"]
                collectives.setdefault(node.attributes["pg_name"], {}).setdefault(rank, []).append(facts)
    assert ends[NodeType.SEND] == ends[NodeType.RECEIVE]
    assert set(ends[NodeType.SEND].values()) <= {1}, "a tag names one message of two ranks"
    for ranks, name in traces.groups.items():
        assert set(collectives[name]) == set(ranks)
        assert len({str(line) for line in collectives[name].values()}) == 1, "in one order on all of them"


def test_a_pass_waits_for_the_pass_before_it_and_the_collectives_in_between() -> None:
    plan = compiled(EXAMPLES / "gpt_cpu.plt")
    waits = {node.name: node.waits for node in ExecutionTraces(plan.graph, plan.plan).nodes_of(1)}
    gathered, gathered_again, summed, norm = (f"exchange 0.{n}" for n in range(4))
    assert waits == {
        gathered: (),
        "0F0": (0,),
        gathered_again: (1,),
        "0B0": (1, 2),
        summed: (3,),
        norm: (3, 4),
        "update 0": (3, 4, 5),
    }


def _ancestors(line: list[TraceNode]) -> set[int]:
    """Returns the nodes that the last one waits for, directly or not, and itself."""
    reached, pending = set[int](), [len(line) - 1]
    while pending:
        number = pending.pop()
        if number not in reached:
            reached.add(number)
            pending += line[number].waits
    return reached


def test_a_plan_whose_peers_are_unknown_is_refused() -> None:
    plan = compiled(EXAMPLES / "digits.plt", "parallelism.gradients=low_precision_decentralized()")
    with pytest.raises(PlanNotTraceableError, match="peer of each message"):
        list(ExecutionTraces(plan.graph, plan.plan).nodes_of(0))


def test_ranks_compute_in_proportion_to_their_shares() -> None:
    plan = compiled(JOBS / "uneven.plt", "parallelism.data_shares=[3, 2, 1]")
    traces = ExecutionTraces(plan.graph, plan.plan)
    passes = [next(node for node in traces.nodes_of(rank) if node.name == "0F0") for rank in (0, 1, 2)]
    work = [int(node.attributes["num_ops"]) for node in passes]
    assert work[0] > 0 and [each / work[0] for each in work] == pytest.approx([1, 2 / 3, 1 / 3], rel=1e-3)
