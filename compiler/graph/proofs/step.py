"""Proofs of the actions of each process in a step. Each returns the reason why its proposition fails, or "". verify.py
lists the propositions.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from typing import TypeAlias

from dslc.compiler.graph.plan_graph import passes_in, unknown
from dslc.compiler.graph.proofs.flow import holders
from dslc.compiler.graph.proofs.view import Line, View
from dslc.compiler.ir.actions import (
    ALWAYS,
    ROUTED,
    Action,
    Backward,
    Cadence,
    Collective,
    Forward,
    ForwardAhead,
    InputBackward,
    Message,
    MicrobatchAction,
    Payload,
    ReceiveActivations,
    ReceiveGradients,
    Role,
    SendActivations,
    SendGradients,
    StageAction,
    StagePass,
    Update,
    WeightBackward,
)
from dslc.compiler.ir.program import GradientStep
from dslc.compiler.ir.records import Batches, Devices, Process, Schedule, Stage
from dslc.dsl.words import plural

_Done: TypeAlias = tuple[type[MicrobatchAction], int, int]  # an action, its stage and its micro-batch
# Operation, axis, payload, dtype, group, among whom, and when.
Exchanged: TypeAlias = tuple[str, str, str, str, tuple[int, ...], str, Cadence]


def actions(view: View) -> str:
    plan = view.plan
    if unknown(plan):
        return ""
    microbatches = plan.one(Batches).microbatches
    homes = {
        stage.index: {plan.node_record(process, Process).index for process in plan.graph.successors(name)}
        for name, stage in plan.of_kind(Stage)
    } or {0: set(view.coordinates)}  # an unknown model is one stage
    counts_seen: Counter[tuple[int, int, int, type[Action]]] = Counter()
    updates: Counter[int] = Counter()
    for name, action in view.actions.items():
        if isinstance(action, StageAction) and not isinstance(action, Message):
            on = homes.get(action.stage, set())
            if action.process not in on:
                processes_text = ", ".join(map(str, sorted(on))) or "no process"
                return f"{name} is on process {action.process}, its stage on {processes_text}"
        if isinstance(action, StagePass | ForwardAhead):
            if not 0 <= action.microbatch < microbatches:
                return f"{name} is of micro-batch {action.microbatch} of {microbatches}"
            counts_seen[action.process, action.stage, action.microbatch, type(action)] += 1
        updates[action.process] += isinstance(action, Update)
    for index, on in homes.items():
        for process in on:
            for m in range(microbatches):
                kinds = (Forward, Backward, InputBackward, WeightBackward)
                once = [counts_seen[process, index, m, kind] for kind in kinds]
                if once not in ([1, 1, 0, 0], [1, 0, 1, 1]):
                    times_text = f"forward {once[0]}, backward {once[1]}, halves {once[2]} and {once[3]} times"
                    return f"micro-batch {m} goes through stage {index} on process {process}: {times_text}"
    for process in view.coordinates:
        if updates[process] != 1:
            return f"process {process} has {updates[process]} updates"
    return ""


def table(view: View) -> str:
    """Returns the first process whose passes differ from its row in the schedule's table."""
    schedule = view.plan.find(Schedule)
    if schedule is None:
        return ""
    if len(schedule.rows) != view.plan.axis("pipeline").size:
        return f"the table has {plural(len(schedule.rows), 'row')}"
    for process, line in view.lines.items():
        row, passes = schedule.rows[view.coordinates[process]], " ".join(passes_in(action for _, action in line))
        if " ".join(slot for slot in row.split() if slot != "-") != passes:
            return f"process {process} does {passes}, and the table says {row}"
    return ""


def fields(view: View) -> str:
    """Returns the first action with values that none of its kind can have, or that overlaps no other."""
    axes = {axis.name for axis in view.plan.one(Devices).axes} | {"all", "expert"}
    pipelined = view.plan.find(Schedule) is not None
    for name, action in view.actions.items():
        if not action.is_well_formed(axes, pipelined=pipelined):
            return f"{name} is no {type(action).__name__}: {action!r}"
    return next((reason for line in view.lines.values() if (reason := _overlaps(line))), "")


def _overlaps(line: Line) -> str:
    """Returns the first pass that overlaps no pass of the other direction before it."""
    previous: StagePass | None = None
    for name, action in line:
        if not isinstance(action, StagePass):
            continue
        directions = {isinstance(stage_pass, Forward) for stage_pass in (previous, action)}
        if action.overlaps and (previous is None or previous.overlaps or len(directions) == 1):
            return f"{name} overlaps no forward or backward pass before it"
        previous = action
    return ""


def order(view: View) -> str:
    return view.broken


def inputs(view: View) -> str:
    last_stage = max(view.homes, default=0)
    for line in view.lines.values():
        results: set[_Done] = set()
        for name, action in line:
            if not isinstance(action, MicrobatchAction):
                continue
            for alternatives in _needs(action, last_stage):
                if results.isdisjoint(alternatives):
                    needed = " or ".join(f"{stage}{kind.notation}{m}" for kind, stage, m in alternatives)
                    return f"{name} comes before what it needs: {needed}"
            results.add((type(action), action.stage, action.microbatch))
    return ""


def _needs(action: MicrobatchAction, last_stage: int) -> list[tuple[_Done, ...]]:
    """Returns the requirements for earlier actions on the same process; of each entry, one is enough."""
    stage, m = action.stage, action.microbatch
    match action:
        case Forward() if stage > 0:
            return [((ReceiveActivations, stage, m), (Forward, stage - 1, m))]
        case Backward() | InputBackward():
            later = (ReceiveGradients, stage, m), (Backward, stage + 1, m), (InputBackward, stage + 1, m)
            return [((Forward, stage, m),), *([later] if stage < last_stage else [])]
        case WeightBackward():
            return [((InputBackward, stage, m),)]
        case SendActivations():
            return [((Forward, stage, m),)]
        case SendGradients():
            return [((Backward, stage, m), (InputBackward, stage, m))]
    return []


def totals(view: View) -> str:
    """Checks that the totals shown for each process equal the sums over its collectives and messages."""
    pieces = _ranks_of_a_member(view)
    for name, home in view.plan.of_kind(Process):
        actual: Counter[Exchanged] = Counter()
        sizes: Counter[Exchanged] = Counter()
        for _, action in view.lines.get(home.index, ()):
            for key, count, size in _exchanges(action, pieces):
                actual[key] += count
                sizes[key] += size
        stated: Counter[Exchanged] = Counter()
        bytes_: Counter[Exchanged] = Counter()
        for node in home.traffic:
            group = (node.ranks, node.stride) if node.run == 1 else (node.ranks, node.stride, node.run)
            key = node.operation, node.axis, node.what, node.dtype, group, node.among, node.when
            stated[key] += node.count
            bytes_[key] += node.bytes
        for key in actual | stated:
            if (actual[key], sizes[key]) != (stated[key], bytes_[key]):
                return (
                    f"{name} does {key[0]} of {key[2]} over the {key[1]} axis {actual[key]} times with {sizes[key]} "
                    f"bytes; {stated[key]} times with {bytes_[key]} are shown"
                )
    return ""


def _ranks_of_a_member(view: View) -> int:
    """Returns the ranks of a node that exchange as one; 1 if each is for itself."""
    step = view.plan.find(GradientStep)
    return step.exchange.pieces if step is not None and step.exchange is not None else 1


def _exchanges(action: Action, pieces: int) -> Iterator[tuple[Exchanged, int, int]]:
    """Yields the parts of an action by operation, axis, content, dtype, group and time: count, and bytes."""
    match action:
        case Collective(operation=operation, axis=axis, carries=carries):
            scope = ""
            if pieces > 1 and Role.AGREEMENT in carries.role:
                scope = "node" if action.group == (pieces, 1) else "nodes" if action.stride > 1 else ""
            key = operation, axis, carries, action.dtype, action.group, scope, action.when
            yield key, action.count, action.bytes
        case Message():
            for size, dtype in zip(action.sizes, action.dtypes, strict=True):
                yield (action.operation, "pipeline", action.carries, dtype, (0, 0), "", ALWAYS), 1, size


def groups(view: View) -> str:
    """Returns the first collective of an axis that is not among the ranks along it. Four kinds may be among other
    ranks: collectives of rows for experts (experts.py); collectives of parameters and gradients are along two axes;
    collectives of a few numbers are among all ranks with a part (flow.py); collectives of a loss that compares samples
    are among the ranks that have the samples (losses.py).
    """
    axes = {axis.name: (axis.size, axis.stride) for axis in view.plan.one(Devices).axes}
    axes["all"] = (view.plan.one(Devices).count, 1)
    all_holders = holders(view.plan)
    for name, action in view.actions.items():
        if not isinstance(action, Collective):
            continue
        if action.is_message and action.axis == "pipeline":
            sound = action.group == (0, 0)
        elif action.carries in ROUTED or action.carries is Payload.ROW_COUNTS:
            continue  # experts.py
        elif action.carries in (Payload.BUFFERS, Payload.EXPERT_COUNTS, Payload.BALANCE_COUNTS):
            sound = action.group == (all_holders.ranks, all_holders.stride)
        else:
            role = action.carries.role & (Role.AGREEMENT | Role.COMPARISON | Role.HOLDERS)
            sound = (action.axis == "data" and bool(role)) or action.group == axes[action.axis]
        if not sound:
            return f"{name} is among {action.ranks} ranks {action.stride} apart, which is not the {action.axis} axis"
    return ""


def check_held_microbatches(view: View) -> str:
    """Returns the first stage that does not hold as many micro-batches as in the account, from the forward to the end
    of the backward.
    """
    most = {stage.index: stage.held for _, stage in view.plan.of_kind(Stage)}
    peak: Counter[int] = Counter()
    for line in view.lines.values():
        now: Counter[int] = Counter()
        for name, action in line:
            match action:
                case Forward(stage=stage):
                    now[stage] += 1
                    peak[stage] = max(peak[stage], now[stage])
                    limit = most.get(stage)
                    if limit is not None and now[stage] > limit:
                        return f"at {name} stage {stage} holds {now[stage]} micro-batches, {limit} by the account"
                case Backward(stage=stage) | WeightBackward(stage=stage):
                    now[stage] -= 1
    fewer = [stage for stage, count in most.items() if count is not None and peak[stage] < count]
    return f"stage {fewer[0]} holds {peak[fewer[0]]} micro-batches, {most[fewer[0]]} by the account" if fewer else ""
