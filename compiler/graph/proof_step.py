"""Proofs of what each process does in a step. Each gives the reason why its proposition does not hold, or nothing. The
propositions are told in `verify`."""

from __future__ import annotations

from collections import Counter

from dslc.compiler.graph.graph import COMPUTE, LOCAL, unknown
from dslc.compiler.graph.proof_view import View


def actions(view: View) -> str:
    plan, microbatches = view.plan, view.plan.analysis.layout.microbatches
    if unknown(plan):
        return ""
    homes = {
        data["index"]: {view.nodes[process]["index"] for process in plan.graph.successors(name)}
        for name, data in plan.of_kind("stage")
    } or {0: set(view.coordinates)}  # an unknown model is one stage
    seen: Counter[tuple[int, int, int, str]] = Counter()
    for name, data in plan.of_kind("action"):
        process, stage, m, what = data["process"], data["stage"], data["microbatch"], data["what"]
        if what in COMPUTE:
            if process not in homes.get(stage, ()):
                where = ", ".join(map(str, sorted(homes.get(stage, ())))) or "no process"
                return f"{name} is on process {process}, its stage on {where}"
            if not 0 <= m < microbatches:
                return f"{name} is of micro-batch {m} of {microbatches}"
        seen[process, stage, m, what] += 1
    for stage, on in homes.items():
        for process in on:
            for m in range(microbatches):
                once = [seen[process, stage, m, kind] for kind in "FBIW"]
                if once not in ([1, 1, 0, 0], [1, 0, 1, 1]):
                    shown = f"forward {once[0]}, backward {once[1]}, halves {once[2]} and {once[3]} times"
                    return f"micro-batch {m} goes through stage {stage} on process {process}: {shown}"
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
        for name, data in line:
            what, stage, m = data["what"], data["stage"], data["microbatch"]
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
    for name, home in view.plan.of_kind("process"):
        found: Counter[tuple[str, str, str]] = Counter()
        sizes: Counter[tuple[str, str, str]] = Counter()
        for _, data in view.lines.get(home["index"], ()):
            if data["what"] in LOCAL:
                continue
            key = (data["what"], data["axis"], data["carries"]) if "axis" in data else _MESSAGES[data["what"]]
            found[key] += data.get("count", 1)
            sizes[key] += data["bytes"]
        told: Counter[tuple[str, str, str]] = Counter()
        bytes_: Counter[tuple[str, str, str]] = Counter()
        for node in home.get("traffic", ()):
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
        update = next(n for n, (_, data) in enumerate(line) if data["what"] == "update")
        for name, data in line[update + 1 :]:
            if data.get("carries") != "parameters":
                return f"{line[update][0]} does not wait for {name}"
        agreed = {data["what"]: n for n, (_, data) in enumerate(line) if data.get("carries") == "gradients"}
        made = [n for n, (_, data) in enumerate(line) if data["what"] in ("B", "W")]
        for last in agreed.values():  # of each operation the last: earlier ones are of other parameters, or of parts
            late = next((line[n][0] for n in made if n > last), "")
            if late:
                return f"{line[last][0]} does not wait for {late}"
    return ""


def held(view: View) -> str:
    """Whether stages hold as few micro-batches as the account says: from the forward to the end of the backward."""
    most = {data["index"]: data["held"] for _, data in view.plan.of_kind("stage")}
    for line in view.lines.values():
        now: Counter[int] = Counter()
        for name, data in line:
            if data["what"] == "F":
                now[data["stage"]] += 1
                if now[data["stage"]] > most.get(data["stage"], now[data["stage"]]):
                    return (
                        f"at {name} stage {data['stage']} holds {now[data['stage']]} micro-batches, "
                        f"{most[data['stage']]} by the account"
                    )
            elif data["what"] in ("B", "W"):
                now[data["stage"]] -= 1
    return ""
