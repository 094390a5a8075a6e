"""A plan as Chakra execution traces, the format of MLCommons that simulators such as ASTRA-sim read.

Model: each rank has a file, which holds one step: a node for each action of the plan, under the name that the action
has in the plan. A pass and the update compute, for the predicted time; where it is unknown, a pass has its floating
point operations (`num_ops`) alone. A collective has its kind, its bytes of input and its group; a message has its
peer. `comm_group.json` lists the ranks of the groups.

A pass waits for the pass before it, for the messages that it uses, and for the collectives in between. Only the update
waits for what was sent.

Contract: a file is a sequence of protobuf messages, each after its length: the metadata, then the nodes by number. The
messages have the field numbers of the published schema (Apache-2.0), and those of its fields that are used here.

Limits: several collectives that the plan keeps as one action are one node, with their number as `count`. An exchange
that takes place in some steps is in the trace. Messages of an exchange of gradients have peers that the plan does not
name (`PlanNotTraceableError`).
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterator, Mapping
from dataclasses import field, replace
from enum import IntEnum
from functools import cache
from typing import Any

from dslc.compiler.graph.plan_graph import PlanGraph
from dslc.compiler.ir.actions import OF_SAMPLES, Action, Collective, Message, MicrobatchAction, Payload, Update
from dslc.compiler.ir.plan import PlanView, RankNode
from dslc.compiler.ir.records import SharedWeight
from dslc.compiler.show.describe import axis_of, coordinates, entries_of
from dslc.compiler.show.schedule import end_boxes, known_times, pass_rows
from dslc.dsl.files import naming, write_file
from dslc.dsl.record import Record, record

GROUPS = "comm_group.json"
_VERSION = "1.0.0"
_COLLECTIVES = {"all_reduce": 0, "all_gather": 2, "broadcast": 5, "all_to_all": 6, "reduce_scatter": 7}
_FORWARD_SHARE = {"E": 1 / 3, "F": 1 / 3, "B": 2 / 3, "I": 1 / 3, "W": 1 / 3}  # of the FLOPs of both passes


class PlanNotTraceableError(Exception):
    """A plan that no execution trace can say."""


class NodeType(IntEnum):
    COMPUTATION = 4
    SEND = 5
    RECEIVE = 6
    COLLECTIVE = 7


@record
class TraceNode(Record):
    """A node of an execution trace. `start` and `duration` are in microseconds, `waits` the numbers of nodes."""

    id: int
    name: str
    type: NodeType
    waits: tuple[int, ...] = ()
    start: int = 0
    duration: int = 0
    attributes: Mapping[str, int | str] = field(default_factory=dict)


def write_execution_traces(plan: PlanGraph, view: PlanView, folder: str) -> list[str]:
    """Writes the files of all ranks into `folder`, and returns their names. Raises PlanNotTraceableError."""
    from google.protobuf.proto import serialize_length_prefixed

    traces = ExecutionTraces(plan, view)
    node_lists = [list(traces.nodes_of(rank)) for rank in range(view.world_size)]
    os.makedirs(folder, exist_ok=True)
    names = [f"{view.job}.{rank}.et" for rank in range(view.world_size)]
    schema = _schema()
    for rank, (name, nodes) in enumerate(zip(names, node_lists, strict=True)):
        facts: dict[str, int | str] = {"job": view.job, "plan": view.hash, "rank": rank, "times": traces.source}
        path = os.path.join(folder, name)
        with naming(path), open(path, "wb") as file:
            serialize_length_prefixed(schema["GlobalMetadata"](version=_VERSION, attr=_attributes(facts)), file)
            for node in nodes:
                message = schema["Node"](
                    id=node.id,
                    name=node.name,
                    type=node.type,
                    data_deps=node.waits,
                    start_time_micros=node.start,
                    duration_micros=node.duration,
                    attr=[schema["AttributeProto"](name="is_cpu_op", bool_val=False), *_attributes(node.attributes)],
                )
                serialize_length_prefixed(message, file)
    groups = json.dumps({name: ranks for ranks, name in traces.groups.items()}, indent=1)
    write_file(os.path.join(folder, GROUPS), f"{groups}\n")
    return names


class ExecutionTraces:
    """The nodes of each rank, and the names of the groups of ranks, which are numbers."""

    def __init__(self, plan: PlanGraph, view: PlanView) -> None:
        if not view.ranks:
            raise PlanNotTraceableError("its network was not traced, so its actions are unknown: add `--trace`")
        self._plan, self._view = plan, view
        self._lines, broken = plan.lines()
        assert not broken, broken
        self._shared = dict(plan.of_kind(SharedWeight))
        self._home = {stage.index: node for stage in view.stages for node in view.ranks if stage.index in node.stages}
        self.groups: dict[tuple[int, ...], str] = {}
        estimate = known_times(view)
        self.source = estimate.source if estimate is not None else "unknown"
        self._times: dict[tuple[int, str], tuple[float, float]] = {}  # of a node by pipeline coordinate: begin and end
        for coordinate, row in enumerate(pass_rows(view) if estimate is not None else ()):
            for box in row:
                self._times[coordinate, f"{box.stage}{box.kind}{box.text}"] = box.start, box.end
            for box in end_boxes(view, coordinate, row[-1].end):
                self._times[coordinate, box.kind] = box.start, box.end

    def nodes_of(self, rank: int) -> Iterator[TraceNode]:
        """Yields the nodes of a rank, in the order of the plan."""
        place = next(node for node in self._view.ranks if node.first <= rank <= node.last)
        computed, exchanged, sent = list[int](), list[int](), list[int]()
        received: dict[tuple[int, int, bool], int] = {}
        count = 0
        for name in self._lines[place.pipeline]:
            action = self._plan.node_record(name, Action)
            for node in self._nodes(name, action, rank, place):
                waits = [*computed, *exchanged[-1:]]
                if node.type is NodeType.COMPUTATION:
                    waits = [*computed, *exchanged, *(sent if isinstance(action, Update) else ())]
                    if isinstance(action, MicrobatchAction) and (found := received.pop(_use(action), None)) is not None:
                        waits.append(found)
                    computed, exchanged = [count], []
                elif node.type is NodeType.SEND:
                    sent.append(count)
                elif isinstance(action, Message):
                    received[action.stage, action.microbatch, action.way > 0] = count
                else:
                    exchanged.append(count)
                yield replace(node, id=count, waits=tuple(sorted(waits)))
                count += 1

    def _nodes(self, name: str, action: Action, rank: int, place: RankNode) -> Iterator[TraceNode]:
        """Yields the nodes of one action, without numbers: none of an action that marks a place alone."""
        match action:
            case Message():
                other = self._home[action.stage + (action.way if action.operation == "send" else -action.way)]
                peer = rank - place.first + other.first
                tag = 2 * (action.microbatch * len(self._view.stages) + action.sender) + (action.way < 0)
                yield _message(name, action.operation, rank, peer, action.bytes, tag)
            case Collective(is_message=True):
                yield from self._shared_gradients(name, action, rank, place)
            case Collective() if action.when.steady:
                group = self.groups.setdefault(self._members(action, rank), str(len(self.groups)))
                facts: dict[str, int | str] = {
                    "comm_type": _COLLECTIVES[action.operation],
                    "comm_size": self._bytes_of(action, rank),
                    "pg_name": group,
                    "count": action.count,
                    "axis": action.axis,
                    "carries": str(action.carries),
                }
                yield TraceNode(id=0, name=name, type=NodeType.COLLECTIVE, attributes=facts)
            case Update():
                yield self._computation(name, place, "update")
            case MicrobatchAction():
                flops = place.flops / self._view.data.microbatches * _FORWARD_SHARE[action.notation]
                stages = {stage.index: stage.flops for stage in self._view.stages}
                of_rank = sum(stages[stage] for stage in place.stages)
                share = stages[action.stage] / of_rank if of_rank else 0
                yield self._computation(name, place, str(action), round(flops * share * self._work_of(rank)))

    def _members(self, action: Collective, rank: int) -> tuple[int, ...]:
        """Returns the ranks of a collective that `rank` takes part in: runs of ranks that share a sequence, or single
        ranks.
        """
        runs, apart = action.ranks // action.run, axis_of(self._view, "context").stride
        first = rank - rank // action.stride % runs * action.stride - rank // apart % action.run * apart
        return tuple(first + n * action.stride + m * apart for n in range(runs) for m in range(action.run))

    def _bytes_of(self, action: Collective, rank: int) -> int:
        return round(action.bytes * self._work_of(rank)) if action.carries in OF_SAMPLES else action.bytes

    def _work_of(self, rank: int) -> float:
        """Returns the work of a rank, relative to a rank with the largest share of a batch, by the plan."""
        shares = self._view.data.shares
        entries = entries_of(shares, coordinates(self._view, rank).get("data", 0))
        if entries is None or self._view.data.most_share:
            return 1.0
        return (entries[1] + 1 - entries[0]) / max(share.samples for share in shares)

    def _computation(self, name: str, place: RankNode, box: str, flops: int = 0) -> TraceNode:
        start, end = self._times.get((place.pipeline, box), (0.0, 0.0))
        return TraceNode(
            id=0,
            name=name,
            type=NodeType.COMPUTATION,
            start=round(start * 1e6),
            duration=round(end * 1e6) - round(start * 1e6),
            attributes={"num_ops": flops} if flops else {},
        )

    def _shared_gradients(self, name: str, action: Collective, rank: int, place: RankNode) -> Iterator[TraceNode]:
        """Yields the messages by which pipeline stages sum the gradients of the weights that they share."""
        if action.carries is not Payload.SHARED_GRADIENTS:
            raise PlanNotTraceableError(
                f"`{name}` sends {action.carries} to ranks that the plan does not name: an execution trace needs the "
                "peer of each message"
            )
        for number, weight in enumerate(sorted(action.weights)):
            for stage in self._shared[weight].stages:
                other = self._home[stage]
                if other is place:
                    continue
                peer = rank - place.first + other.first
                # Below all tags of activations and gradients, which are of micro-batches.
                tag = 2 * len(self._view.stages) * self._view.data.microbatches + number
                yield _message(name, action.operation, rank, peer, 4 * self._shared[weight].numbers, tag)


def _use(action: MicrobatchAction) -> tuple[int, int, bool]:
    """Returns the stage, the micro-batch and the direction of the message that a pass uses."""
    return action.stage, action.microbatch, action.notation in ("E", "F")


def _message(name: str, operation: str, rank: int, peer: int, size: int, tag: int) -> TraceNode:
    sends = operation == "send"
    ends = {"comm_src": rank if sends else peer, "comm_dst": peer if sends else rank, "comm_tag": tag}
    kind = NodeType.SEND if sends else NodeType.RECEIVE
    return TraceNode(id=0, name=name, type=kind, attributes={**ends, "comm_size": size})


# ------------------------------------------------------------------------------------------------------- the schema

_UINT64, _INT32, _INT64, _BOOL, _STRING = 4, 5, 3, 8, 9  # of google.protobuf.FieldDescriptorProto.Type
_32_BITS = ("comm_src", "comm_dst", "comm_tag")
_FIELDS: dict[str, dict[str, tuple[int, int | str, bool]]] = {  # number, type, repeated
    "AttributeProto": {
        "name": (1, _STRING, False),
        "int32_val": (7, _INT32, False),
        "int64_val": (9, _INT64, False),
        "bool_val": (27, _BOOL, False),
        "string_val": (29, _STRING, False),
    },
    "GlobalMetadata": {"version": (1, _STRING, False), "attr": (2, "AttributeProto", True)},
    "Node": {
        "id": (1, _UINT64, False),
        "name": (2, _STRING, False),
        "type": (3, _INT32, False),
        "data_deps": (5, _UINT64, True),
        "start_time_micros": (6, _UINT64, False),
        "duration_micros": (7, _UINT64, False),
        "attr": (10, "AttributeProto", True),
    },
}


@cache
def _schema() -> dict[str, Any]:
    """Returns the classes of the messages."""
    from google.protobuf import descriptor_pb2, descriptor_pool, message_factory

    file = descriptor_pb2.FileDescriptorProto(name="execution_trace.proto", package="ChakraProtoMsg", syntax="proto3")
    for message, fields in _FIELDS.items():
        declared = file.message_type.add(name=message)
        values = None
        for name, (number, kind, repeated) in fields.items():
            entry = declared.field.add(name=name, number=number, label=3 if repeated else 1)
            if isinstance(kind, str):
                entry.type, entry.type_name = 11, f".ChakraProtoMsg.{kind}"
            else:
                entry.type = kind
            if name.endswith("_val"):  # set even where it is 0
                values = declared.oneof_decl.add(name="value") if values is None else values
                entry.oneof_index = 0
    pool = descriptor_pool.DescriptorPool()
    pool.Add(file)
    return {
        name: message_factory.GetMessageClass(pool.FindMessageTypeByName(f"ChakraProtoMsg.{name}")) for name in _FIELDS
    }


def _attributes(values: Mapping[str, int | str]) -> list[Any]:
    made = _schema()["AttributeProto"]
    return [
        made(name=name, string_val=value)
        if isinstance(value, str)
        else made(name=name, **{"int32_val" if name in _32_BITS else "int64_val": value})
        for name, value in values.items()
    ]
