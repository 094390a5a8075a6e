"""Proofs of the actions of each process in a step. Each returns the reason why its proposition fails, or "". verify.py
lists the propositions.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterator
from math import prod
from typing import TypeAlias

from dslc.compiler.graph.graph import COMPUTE, LOCAL, MESSAGES, passes_in, unknown
from dslc.compiler.graph.proof_exchange import AGREED
from dslc.compiler.graph.proof_view import Line, View
from dslc.compiler.ir.program import GradientStep
from dslc.compiler.ir.records import Action, Batches, Devices, Process, Schedule, Stage
from dslc.compiler.ir.tensors import DTYPE_BYTES
from dslc.compiler.ir.traffic import ALWAYS, Payload, When
from dslc.compiler.placement.whole_losses import EXCHANGED
from dslc.dsl.words import plural

Exchanged: TypeAlias = tuple[str, str, str, str, str, When]  # operation, axis, content, dtype, among whom, when


def actions(view: View) -> str:
    plan = view.plan
    if unknown(plan):
        return ""
    microbatches = plan.one(Batches).microbatches
    homes = {
        stage.index: {plan.node_record(process, Process).index for process in plan.graph.successors(name)}
        for name, stage in plan.of_kind(Stage)
    } or {0: set(view.coordinates)}  # an unknown model is one stage
    seen: Counter[tuple[int, int, int, str]] = Counter()
    for name, action in view.actions.items():
        process, stage, m, what = action.process, action.stage, action.microbatch, action.what
        if what in LOCAL and what != "update" and process not in homes.get(stage, ()):
            where = ", ".join(map(str, sorted(homes.get(stage, ())))) or "no process"
            return f"{name} is on process {process}, its stage on {where}"
        if what in COMPUTE and not 0 <= m < microbatches:
            return f"{name} is of micro-batch {m} of {microbatches}"
        seen[process, stage, m, what] += 1
    for index, on in homes.items():
        for process in on:
            for m in range(microbatches):
                once = [seen[process, index, m, kind] for kind in "FBIW"]
                if once not in ([1, 1, 0, 0], [1, 0, 1, 1]):
                    shown = f"forward {once[0]}, backward {once[1]}, halves {once[2]} and {once[3]} times"
                    return f"micro-batch {m} goes through stage {index} on process {process}: {shown}"
    for process in view.coordinates:
        if seen[process, -1, -1, "update"] != 1:
            return f"process {process} has {seen[process, -1, -1, 'update']} updates"
    return ""


def table(view: View) -> str:
    """Returns the first process whose passes are not those of its row in the schedule's table."""
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
    """Returns the first action that lacks a field of its kind, or has one of another kind, or overlaps no other."""
    axes = {axis.name for axis in view.plan.one(Devices).axes} | {"all"}
    pipelined = view.plan.find(Schedule) is not None
    for name, action in view.actions.items():
        where = (action.stage >= 0, action.microbatch >= 0)
        passes = action.what in COMPUTE
        if passes or action.what in LOCAL:
            told = (action.axis, action.carries, action.shapes, action.dtypes, action.count, action.bytes)
            sound = (
                not (any(told) or _has_group(action))
                and action.when == ALWAYS
                and where == (passes or action.what != "update", passes)
            )
        elif action.what in MESSAGES:
            sound = all(where) and _is_message(action) and not _has_group(action) and action.when == ALWAYS
        else:
            sound = not any(where) and _is_collective(action, axes)
        if not sound or (action.overlaps and not (passes and pipelined)):
            return f"{name} is no {action.what}: {action}"
    return next((reason for line in view.lines.values() if (reason := _overlaps(line))), "")


def _overlaps(line: Line) -> str:
    """Returns the first pass that overlaps no pass of the other direction before it."""
    before: Action | None = None
    for name, action in line:
        if action.what not in COMPUTE:
            continue
        if action.overlaps and (before is None or before.overlaps or (before.what == "F") == (action.what == "F")):
            return f"{name} overlaps no forward or backward pass before it"
        before = action
    return ""


def _has_group(action: Action) -> bool:
    return bool(action.ranks or action.stride or action.weights)


def _is_collective(action: Action, axes: Collection[str]) -> bool:
    named = action.axis in axes and bool(action.carries)
    return named and action.count > 0 and len(action.dtypes) == 1 and not action.shapes


def _is_message(action: Action) -> bool:
    if not len(action.shapes) == len(action.dtypes) == action.count or not set(action.dtypes) <= DTYPE_BYTES.keys():
        return False
    size = sum(prod(s) * DTYPE_BYTES[dtype] for s, dtype in zip(action.shapes, action.dtypes, strict=True))
    return size == action.bytes and not (action.axis or action.carries)


def order(view: View) -> str:
    return view.broken


def inputs(view: View) -> str:
    last = max(view.homes, default=0)
    for line in view.lines.values():
        done: set[tuple[str, int, int]] = set()
        for name, action in line:
            what, stage, m = action.what, action.stage, action.microbatch
            for alternatives in _needs(what, stage, m, last):
                if done.isdisjoint(alternatives):
                    return f"{name} comes before what it needs: {' or '.join(f'{s}{k}{n}' for k, s, n in alternatives)}"
            done.add((what, stage, m))
    return ""


def _needs(what: str, stage: int, m: int, last: int) -> list[tuple[tuple[str, int, int], ...]]:
    """Returns the requirements for earlier actions on the same process; of each entry, one is enough."""
    needs: list[tuple[tuple[str, int, int], ...]] = []
    match what:
        case "F" if stage > 0:
            needs.append((("RECV_F", stage, m), ("F", stage - 1, m)))
        case "B" | "I":
            needs.append((("F", stage, m),))
            if stage < last:
                needs.append((("RECV_B", stage, m), ("B", stage + 1, m), ("I", stage + 1, m)))
        case "W":
            needs.append((("I", stage, m),))
        case "SEND_F":
            needs.append((("F", stage, m),))
        case "SEND_B":
            needs.append((("B", stage, m), ("I", stage, m)))
    return needs


def totals(view: View) -> str:
    """Checks that the totals shown for each process are those of its collectives and messages."""
    pieces = _ranks_of_a_member(view)
    for name, home in view.plan.of_kind(Process):
        found: Counter[Exchanged] = Counter()
        sizes: Counter[Exchanged] = Counter()
        for _, action in view.lines.get(home.index, ()):
            if action.what in LOCAL:
                continue
            for key, count, size in _exchanges(action, pieces):
                found[key] += count
                sizes[key] += size
        told: Counter[Exchanged] = Counter()
        bytes_: Counter[Exchanged] = Counter()
        for node in home.traffic:
            key = node.operation, node.axis, node.what, node.dtype, node.among, node.when
            told[key] += node.count
            bytes_[key] += node.bytes
        for key in found | told:
            if (found[key], sizes[key]) != (told[key], bytes_[key]):
                return (
                    f"{name} does {key[0]} of {key[2]} over the {key[1]} axis {found[key]} times with {sizes[key]} "
                    f"bytes; {told[key]} times with {bytes_[key]} are shown"
                )
    return ""


def _ranks_of_a_member(view: View) -> int:
    """Returns the ranks of a node that exchange as one; 1 if each is for itself."""
    step = view.plan.find(GradientStep)
    return step.exchange.pieces if step is not None and step.exchange is not None else 1


def _exchanges(action: Action, pieces: int) -> Iterator[tuple[Exchanged, int, int]]:
    """Yields the parts of an action by operation, axis, content, dtype, group and time: count, and bytes."""
    if action.axis:
        among = ""
        if pieces > 1 and action.carries in AGREED:
            among = {(pieces, 1): "node"}.get((action.ranks, action.stride), "nodes" if action.stride > 1 else "")
        key = (action.what, action.axis, action.carries, action.dtypes[0], among, action.when)
        yield key, action.count, action.bytes
        return
    for shape, dtype in zip(action.shapes, action.dtypes, strict=True):
        yield (*_MESSAGES[action.what], dtype, "", ALWAYS), 1, prod(shape) * DTYPE_BYTES[dtype]


_MESSAGES = {
    f"{end}_{way}": (operation, "pipeline", what)
    for end, operation in (("SEND", "send"), ("RECV", "receive"))
    for way, what in (("F", Payload.ACTIVATIONS), ("B", Payload.ACTIVATION_GRADIENTS))
}


def groups(view: View) -> str:
    """Returns the first collective of an axis that is not among the ranks along it; those of parameters and gradients
    are along two axes, those of a few numbers among all who have a part (proof_flow.py), and those of a loss that
    compares samples among the ranks that have them (proof_losses.py).
    """
    axes = {axis.name: (axis.size, axis.stride) for axis in view.plan.one(Devices).axes}
    axes["all"] = (view.plan.one(Devices).count, 1)
    for name, action in view.actions.items():
        if not action.axis:
            continue
        if action.what in ("send", "receive") and action.axis == "pipeline":
            sound = (action.ranks, action.stride) == (0, 0)
        else:
            wider = action.axis == "data" and action.carries in _OF_ALL_HOLDERS
            sound = wider or (action.ranks, action.stride) == axes[action.axis]
        if not sound:
            return f"{name} is among {action.ranks} ranks {action.stride} apart, which is not the {action.axis} axis"
    return ""


_OF_ALL_HOLDERS = (*AGREED, Payload.PARAMETERS, Payload.GRADIENT_NORM, Payload.NONFINITE, *EXCHANGED)


def check_held_microbatches(view: View) -> str:
    """Returns the first stage that does not hold as many micro-batches as in the account, from the forward to the end
    of the backward.
    """
    most = {stage.index: stage.held for _, stage in view.plan.of_kind(Stage)}
    found: Counter[int] = Counter()
    for line in view.lines.values():
        now: Counter[int] = Counter()
        for name, action in line:
            stage = action.stage
            if action.what == "F":
                now[stage] += 1
                found[stage] = max(found[stage], now[stage])
                limit = most.get(stage)
                if limit is not None and now[stage] > limit:
                    return f"at {name} stage {stage} holds {now[stage]} micro-batches, {limit} by the account"
            elif action.what in ("B", "W"):
                now[stage] -= 1
    fewer = [stage for stage, count in most.items() if count is not None and found[stage] < count]
    return f"stage {fewer[0]} holds {found[fewer[0]]} micro-batches, {most[fewer[0]]} by the account" if fewer else ""
