"""Proofs of what each process does in a step. Each gives the reason why its proposition does not hold, or nothing. The
propositions are told in `verify`."""

from __future__ import annotations

from collections import Counter

from dslc.compiler.graph.graph import COMPUTE, LOCAL, unknown
from dslc.compiler.graph.proof_view import View
from dslc.compiler.ir.records import Action, Batches, Process, Stage


def actions(view: View) -> str:
    plan = view.plan
    if unknown(plan):
        return ""
    microbatches = plan.one(Batches).microbatches
    homes = {
        stage.index: {plan.at(process, Process).index for process in plan.graph.successors(name)}
        for name, stage in plan.of_kind(Stage)
    } or {0: set(view.coordinates)}  # an unknown model is one stage
    seen: Counter[tuple[int, int, int, str]] = Counter()
    for name, action in plan.of_kind(Action):
        process, stage, m, what = action.process, action.stage, action.microbatch, action.what
        if what in COMPUTE:
            if process not in homes.get(stage, ()):
                where = ", ".join(map(str, sorted(homes.get(stage, ())))) or "no process"
                return f"{name} is on process {process}, its stage on {where}"
            if not 0 <= m < microbatches:
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
    """What has to come earlier on the same process; of each entry, one."""
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


def exchanged(view: View) -> str:
    """Whether collectives and messages are those of the account."""
    for name, home in view.plan.of_kind(Process):
        found: Counter[tuple[str, str, str]] = Counter()
        sizes: Counter[tuple[str, str, str]] = Counter()
        for _, action in view.lines.get(home.index, ()):
            if action.what in LOCAL:
                continue
            key = (action.what, action.axis, action.carries) if action.axis else _MESSAGES[action.what]
            found[key] += action.count
            sizes[key] += action.bytes
        told: Counter[tuple[str, str, str]] = Counter()
        bytes_: Counter[tuple[str, str, str]] = Counter()
        for node in home.traffic:
            told[node.operation, node.axis, node.what] += node.count
            bytes_[node.operation, node.axis, node.what] += node.bytes
        for key in found | told:
            if (found[key], sizes[key]) != (told[key], bytes_[key]):
                return (
                    f"{name} does {key[0]} of {key[2]} over the {key[1]} axis {found[key]} times with {sizes[key]} "
                    f"bytes; by the account {told[key]} times with {bytes_[key]}"
                )
    return ""


_MESSAGES = {
    f"{end}_{way}": (operation, "pipeline", what)
    for end, operation in (("SEND", "send"), ("RECV", "receive"))
    for way, what in (("F", "activations"), ("B", "gradients of activations"))
}


def updates(view: View) -> str:
    for line in view.lines.values():
        update = next(n for n, (_, action) in enumerate(line) if action.what == "update")
        for name, action in line[update + 1 :]:
            if action.carries != "parameters":
                return f"{line[update][0]} does not wait for {name}"
        agreed = {action.what: n for n, (_, action) in enumerate(line) if action.carries == "gradients"}
        made = [n for n, (_, action) in enumerate(line) if action.what in ("B", "W")]
        for last in agreed.values():  # of each operation the last: earlier ones are of other parameters, or of parts
            late = next((line[n][0] for n in made if n > last), "")
            if late:
                return f"{line[last][0]} does not wait for {late}"
    return ""


def held(view: View) -> str:
    """Whether stages hold as few micro-batches as the account says: from the forward to the end of the backward."""
    most = {stage.index: stage.held for _, stage in view.plan.of_kind(Stage)}
    for line in view.lines.values():
        now: Counter[int] = Counter()
        for name, action in line:
            stage = action.stage
            if action.what == "F":
                now[stage] += 1
                limit = most.get(stage)
                if limit is not None and now[stage] > limit:
                    return f"at {name} stage {stage} holds {now[stage]} micro-batches, {limit} by the account"
            elif action.what in ("B", "W"):
                now[stage] -= 1
    return ""
