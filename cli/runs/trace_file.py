"""`trace.json.gz` of a run with `--profile=trace`: the recorded steps of all ranks, below the step that was predicted.

Model: each rank is a process of the trace (Chrome's trace event format, which Perfetto opens), with the lanes

    predicted     the step by the plan's times, from the begin of each recorded step on; none where they are unknown
    plan          what the rank did, by the names that the actions have in the plan
    exchanges     its collectives, from their issue to their end, by name and what they carry
    …             the threads and GPU streams that torch's profiler recorded

Clocks: all times are on the clock of rank 0's machine. Ranks leave an all-reduce at nearly the same moment; the median
difference of their readings there, over its rounds and the ranks of a machine, is what a machine's clock is off.

Contract: collectives have names of actions if those of one kind in a step have the count and the sum of bytes of the
plan's actions of that kind. A collective is the first of these that has as many bytes, else the first one in the order
of the plan. Otherwise a collective has the name of its kind.

Limits: of a large world only some ranks are recorded (cli/jobs/prepare_run.py). Of hosts that share no folder only the
ranks of this one are in the trace; the others are named.
"""

from __future__ import annotations

import gzip
import json
import os
import statistics
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from math import prod
from typing import Any

from dslc.compiler.facts.untrusted_files import atomic_write
from dslc.compiler.graph.plan_graph import PlanGraph
from dslc.compiler.ir.actions import Action, Collective
from dslc.compiler.ir.plan import PlanView
from dslc.compiler.ir.tensors import DTYPE_BYTES
from dslc.compiler.show.schedule import NAMES as PASSES
from dslc.compiler.show.schedule import end_boxes, known_times, pass_rows
from dslc.dsl.words import plural, shorten_list
from dslc.runtime.process.records import LOGGED_VALUES, SHARED_MEMORY_MARK, TRACE_MARK

NAME = "trace.json.gz"
MARKS = (TRACE_MARK, "PP:")  # of the ranges of a rank, and of torch's schedule runtime
# Messages are not among them: over a pipeline the plan's lane has them.
COLLECTIVES = frozenset(("all_reduce", "all_gather", "reduce_scatter", "all_to_all", "broadcast"))
SHARED_MEMORY_LANE = "shared memory"  # of the collectives over it
_TRACKS = 1000  # numbers of threads for each rank

Event = dict[str, Any]


@dataclass(frozen=True, kw_only=True)
class _Slice:
    """A part of a lane; times in nanoseconds."""

    name: str
    start: int
    end: int
    about: Mapping[str, object]


def write_trace(plan: PlanGraph, view: PlanView, folder: str, traced: Sequence[int] = ()) -> str:
    """Writes the trace of a run, and returns what to tell of it. `traced`: the recorded ranks; () for all."""
    logs, ranks = os.path.join(folder, "logs"), traced or range(view.world_size)
    clocks = {rank: clock for rank in ranks if (clock := _read_clock(logs, rank)) is not None}
    if not clocks:
        return "no trace: the training ended before the steps that are recorded"
    offsets = clock_offsets(clocks)
    origin = min(clock.readings[0] - offsets[rank] for rank, clock in clocks.items())
    path = os.path.join(folder, NAME)
    with atomic_write(path) as part, gzip.open(part, "wt", encoding="utf-8", compresslevel=5) as file:
        file.write('{"displayTimeUnit": "ms", "traceEvents": [')
        separator, unread = "\n", list[str]()
        for rank in clocks:
            try:
                recorded_events = _recorded_events(logs, rank)
            except (FileNotFoundError, ValueError) as error:  # its process was killed meanwhile
                unread.append(f"the recording of rank {rank} cannot be read: {error}")
                continue
            for event in RankTrace(plan, view, rank, recorded_events).events():
                if "ts" in event:
                    event["ts"] = (event["ts"] - offsets[rank] - origin) / 1e3
                if "dur" in event:
                    event["dur"] /= 1e3
                file.write(separator + json.dumps(event))
                separator = ",\n"
        file.write("\n]}\n")
    count = plural(len(clocks) - len(unread), "rank")
    lines = [f"{path} has {count}: open it in https://ui.perfetto.dev", *unread]
    if traced:
        lines.append(
            f"of {view.world_size:,} ranks {len(traced)} are recorded, those of one replica first, so that the file "
            f"stays small: ranks {shorten_list(list(map(str, traced)), 8)}"
        )
    if missing := [str(rank) for rank in ranks if rank not in clocks]:
        lines.append(f"it lacks {shorten_list(missing, 8)}: the recordings of other hosts are in their folders")
    if known_times(view) is None:
        lines.append("it has no predicted lane, as the time of a step is unknown: `dslc calibrate JOB` measures it")
    return "\n".join(lines)


@dataclass(frozen=True, kw_only=True)
class ClockReadings:
    """A rank's clock at the end of each round before the recording, in nanoseconds, and the machine that has it."""

    machine: str
    readings: tuple[int, ...]


def clock_offsets(clocks: Mapping[int, ClockReadings]) -> dict[int, int]:
    """Returns by how many nanoseconds each rank's clock is ahead of the first one's."""
    reference = next(iter(clocks.values()))
    differences: dict[str, list[int]] = {}
    for clock in clocks.values():
        pairs = zip(clock.readings, reference.readings, strict=True)
        differences.setdefault(clock.machine, []).extend(ours - theirs for ours, theirs in pairs)
    offsets = {machine: round(statistics.median(values)) for machine, values in differences.items()}
    offsets[reference.machine] = 0  # one clock
    return {rank: offsets[clock.machine] for rank, clock in clocks.items()}


def _read_clock(logs: str, rank: int) -> ClockReadings | None:
    try:
        with open(os.path.join(logs, f"rank-{rank}.clock.json"), encoding="utf-8") as file:
            facts = json.load(file)
    except FileNotFoundError:
        return None
    return ClockReadings(machine=facts["machine"], readings=tuple(facts["readings"]))


def _recorded_events(logs: str, rank: int) -> list[Event]:
    """Returns the events of a rank's recording, with their times in nanoseconds."""
    with open(os.path.join(logs, f"rank-{rank}.trace.json"), encoding="utf-8") as file:
        recording = json.load(file)
    base = int(recording.get("baseTimeNanoseconds", 0))
    events = [event for event in recording["traceEvents"] if isinstance(event.get("pid"), int)]
    for event in events:  # in whole nanoseconds: the sums have more digits than a float
        event["ts"] = round(event["ts"] * 1e3) + base
        if "dur" in event:
            event["dur"] = round(event["dur"] * 1e3)
    return [*events, *_shared_memory_events(logs, rank)]


def _shared_memory_events(logs: str, rank: int) -> Iterator[Event]:
    """Yields the collectives over shared memory, as events of a thread."""
    path = os.path.join(logs, f"rank-{rank}.collectives.json")
    if os.path.exists(path):
        with open(path, encoding="utf-8") as file:
            for event in json.load(file):
                yield {**event, "ph": "X", "cat": "dslc", "pid": 0, "tid": SHARED_MEMORY_LANE, "args": {}}


class RankTrace:
    def __init__(self, plan: PlanGraph, view: PlanView, rank: int, recorded_events: Sequence[Event]) -> None:
        self._plan, self._view, self._rank, self._events = plan, view, rank, recorded_events
        self._place = next((node for node in view.ranks if node.first <= rank <= node.last), None)
        self._process = _TRACKS * (rank + 1)
        ranges = [event for event in recorded_events if event["ph"] == "X" and event["name"].startswith(MARKS)]
        self._ranges = sorted((_slice(event) for event in ranges), key=lambda part: (part.start, -part.end))
        self._steps = [part for part in self._ranges if part.name.startswith("step ")]

    def events(self) -> Iterator[Event]:
        """Yields the events of the trace, with times in nanoseconds."""
        coordinate = f", pipeline {self._place.pipeline}" if self._place and self._view.schedule else ""
        yield self._about("process_name", 0, name=f"rank {self._rank}{coordinate}")
        yield self._about("process_sort_index", 0, sort_index=self._rank)
        track = 0
        if predicted := list(self._predicted()):
            yield from self._lane(track, "predicted", map(_event, predicted))
        track += 1
        yield from self._lane(track, "plan", map(_event, self._ranges))
        exchanges = sorted(self._exchanges(), key=lambda part: part.start)
        for number, row in enumerate(_event_rows(map(_event, exchanges))):
            track += 1
            yield from self._lane(track, f"exchanges {number + 1}" if number else "exchanges", row)
        for name, row in self._threads():
            track += 1
            yield from self._lane(track, name, row)

    def _lane(self, track: int, name: str, events: Iterable[Event]) -> Iterator[Event]:
        yield self._about("thread_name", track, name=name)
        yield self._about("thread_sort_index", track, sort_index=track)
        for event in events:
            yield {**event, "pid": self._process, "tid": self._process + track}

    def _about(self, what: str, track: int, **values: object) -> Event:
        place = {"pid": self._process, "tid": self._process + track}
        return {"ph": "M", "cat": "__metadata", "name": what, **place, "args": values}

    def _predicted(self) -> Iterator[_Slice]:
        """Yields the predicted step, once for each recorded one."""
        estimate, coordinate = known_times(self._view), self._place.pipeline if self._place else 0
        if estimate is None:
            return
        row = pass_rows(self._view)[coordinate]
        boxes = [*row, *end_boxes(self._view, coordinate, row[-1].end)]
        for step in self._steps:
            for box in boxes:
                name = {"update": f"update {coordinate}", "exchange": f"exchange {box.text}"}.get(box.kind, box.text)
                name = f"{box.stage}{box.kind}{box.text}" if box.kind in PASSES else name
                start, end = (step.start + round(seconds * 1e9) for seconds in (box.start, box.end))
                yield _Slice(name=name, start=start, end=end, about={"source": estimate.source})

    def _exchanges(self) -> Iterator[_Slice]:
        """Yields the collectives of each step, named by the plan where it has the same."""
        from dslc.runtime.measure.collectives import operation_of

        calls = sorted((event for event in self._events if _is_collective(event)), key=lambda event: event["ts"])
        work_events = sorted(
            (event for event in self._events if event["name"].startswith("gloo:")), key=lambda e: e["ts"]
        )
        gaps = [part for part in self._ranges if part.name == LOGGED_VALUES]
        for step in self._steps:
            by_operation: dict[str, list[Event]] = {}
            for event in calls:
                if _within(event, step) and not any(_within(event, part) for part in gaps):
                    by_operation.setdefault(operation_of(event["name"].partition("::")[2]), []).append(event)
            for operation, events in by_operation.items():
                if operation not in COLLECTIVES:
                    continue
                actions = self._actions_named(operation, events, int(step.name.removeprefix("step ")))
                for event, (name, about) in zip(events, actions, strict=True):
                    end = _end_of(event, work_events)
                    yield _Slice(name=name, start=event["ts"], end=end, about=about)

    def _actions_named(
        self, operation: str, events: Sequence[Event], step: int
    ) -> list[tuple[str, Mapping[str, object]]]:
        """Returns a name for each collective of a kind in a step, and what the plan says of it."""
        lines, _ = self._plan.lines()
        pending: list[tuple[str, Collective]] = []
        for name in lines.get(self._place.pipeline, []) if self._place else []:
            action = self._plan.node_record(name, Action)
            if isinstance(action, Collective) and action.operation == operation and action.when.holds(step):
                pending += [(name, action)] * action.count
        planned = sum(action.bytes / action.count / DTYPE_BYTES[action.dtype] for _, action in pending)
        if len(pending) != len(events) or round(planned) != sum(map(_elements, events)):
            return [(operation, {})] * len(events)
        names: list[tuple[str, Mapping[str, object]]] = []
        for event in events:
            size = _elements(event)
            exact = (n for n, (_, a) in enumerate(pending) if a.bytes == a.count * size * DTYPE_BYTES[a.dtype])
            name, action = pending.pop(next(exact, 0))
            about = {"carries": str(action.carries), "axis": action.axis, "bytes": size * DTYPE_BYTES[action.dtype]}
            names.append((f"{name}: {operation} of {action.carries}", about))
        return names

    def _threads(self) -> Iterator[tuple[str, list[Event]]]:
        """Yields the lanes of torch's profiler, without the ranges of the plan."""
        titles = {
            (event["pid"], event["tid"]): event["args"]["name"]
            for event in self._events
            if event["ph"] == "M" and event["name"] == "thread_name"
        }
        main = next(((e["pid"], e["tid"]) for e in self._events if e["name"].startswith(MARKS)), None)
        titles |= {main: "main thread"} if main is not None else {}
        titles[0, SHARED_MEMORY_LANE] = SHARED_MEMORY_LANE
        threads: dict[tuple[int, object], list[Event]] = {main: []} if main is not None else {}
        for event in self._events:
            if event["ph"] != "M" and not event["name"].startswith(MARKS):
                threads.setdefault((event["pid"], event["tid"]), []).append(event)
        for source, events in threads.items():
            title = titles.get(source, f"thread {source[1]}")
            for number, row in enumerate(_nested_rows(events)):
                for event in row:
                    if "id" in event:  # of an arrow between two events
                        event["id"] = event["id"] * self._view.world_size + self._rank
                yield f"{title}, asynchronous {number}" if number else title, row


def _event(part: _Slice) -> Event:
    length = {"ts": part.start, "dur": part.end - part.start}
    return {"ph": "X", "cat": "dslc", "name": part.name, **length, "args": dict(part.about)}


def _slice(event: Event) -> _Slice:
    name = next(event["name"].removeprefix(mark) for mark in MARKS if event["name"].startswith(mark))
    return _Slice(name=name, start=event["ts"], end=event["ts"] + event["dur"], about={})


def _within(event: Event, part: _Slice) -> bool:
    start: int = event["ts"]
    return part.start <= start < part.end


def _is_collective(event: Event) -> bool:
    """True for the call of a collective; the collectives of `_c10d_functional` call it in turn."""
    name: str = event["name"]
    return event["ph"] == "X" and name.startswith(("c10d::", SHARED_MEMORY_MARK))


def _elements(event: Event) -> int:
    """Returns the numbers in a collective's input; 0 if the recording does not have its shape."""
    if event["name"].startswith(SHARED_MEMORY_MARK):
        return int(event["name"].rpartition(" ")[2])
    place = 0 if event["name"].startswith(("c10d::allreduce", "c10d::broadcast")) else 1  # else the output is before it
    shapes, kinds = event["args"].get("Input Dims", []), event["args"].get("Input type", [])
    if len(shapes) <= place or len(kinds) <= place:
        return 0
    return sum(prod(shape) for shape in (shapes[place] if kinds[place] == "TensorList" else [shapes[place]]))


def _end_of(event: Event, work_events: list[Event]) -> int:
    """Returns the end of a collective: of the work in gloo's threads that it began, or of its own call. Over shared
    memory the call lasts until the end, but of an all-to-all over hosts, in which gloo's work begins.
    """
    own_end: int = event["ts"] + event["dur"]
    is_shared = event["name"].startswith(SHARED_MEMORY_MARK)
    kind = event["name"].partition("::")[2].replace("_", "")
    for number, work in enumerate(work_events):
        if is_shared and (work["ts"] >= own_end or not kind.startswith("alltoall")):
            continue
        name = work["name"].removeprefix("gloo:").replace("_", "")
        # gloo reduces and scatters by an all-reduce.
        if work["ts"] >= event["ts"] and (kind.startswith(name) or (name, kind[:13]) == ("allreduce", "reducescatter")):
            work_events.pop(number)
            work_end: int = work["ts"] + work["dur"]
            return max(own_end, work_end)
    return own_end


def _nested_rows(events: Sequence[Event]) -> list[list[Event]]:
    """Deals the events of a thread to lanes: the first has those that lie inside one another, as calls do; asynchronous
    work that overlaps them is in the others.
    """
    nested: list[Event] = []
    overlapping: list[Event] = []
    ends: list[int] = []
    for event in sorted(events, key=lambda event: (event["ts"], -event.get("dur", 0))):
        if "dur" in event:
            start, end = event["ts"], event["ts"] + event["dur"]
            while ends and ends[-1] <= start:
                ends.pop()
            if ends and end > ends[-1]:
                overlapping.append(event)
                continue
            ends.append(end)
        nested.append(event)
    return [nested, *_event_rows(overlapping)]


def _event_rows(events: Iterable[Event]) -> list[list[Event]]:
    """Deals events to lanes in which none overlaps another; they are in the order of their beginning."""
    rows: list[list[Event]] = []
    for event in events:
        for row in rows:
            if row[-1]["ts"] + row[-1]["dur"] <= event["ts"]:
                row.append(event)
                break
        else:
            rows.append([event])
    return rows
