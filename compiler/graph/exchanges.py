"""Places the collectives of the traffic account among the actions of a process.

The account counts them as torch issues them; here each count is divided over the actions that cause it, so that the sum
is kept. All ranks of a process do the same, so all of them issue the collectives at one place in the same order; the
order of the operations within one action is torch's own, and the same on all ranks.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import NamedTuple

from dslc.compiler.ir.records import Action
from dslc.compiler.ir.traffic import TrafficNode
from dslc.compiler.placement.sharding import Sharding


class Place(NamedTuple):
    """Before or after the action at `position` of a line."""

    position: int
    after: bool


def exchanges(
    process: int, sharding: Sharding, traffic: TrafficNode, line: Sequence[Action]
) -> Iterator[tuple[Place, Action]]:
    """Yields the collectives of a process as actions, each with its place in `line`."""
    places = _places(sharding, traffic, line)
    for n, place in enumerate(places):
        before, after = (traffic.count * m // len(places) for m in (n, n + 1))
        count = after - before
        if count:
            action = Action(
                process=process,
                what=traffic.operation,
                axis=traffic.axis,
                carries=traffic.what,
                dtypes=(traffic.dtype,),
                count=count,
                bytes=traffic.bytes * after // traffic.count - traffic.bytes * before // traffic.count,
            )
            yield place, action


def _places(sharding: Sharding, traffic: TrafficNode, line: Sequence[Action]) -> list[Place]:
    at: dict[str, list[int]] = {}
    for n, action in enumerate(line):
        at.setdefault(action.what, []).append(n)
    forward, backward = at["F"], sorted(at.get("B", []) + at.get("I", []))
    passes, weights = sorted(forward + backward), sorted(at.get("B", []) + at.get("W", []))
    complete = [Place(n, True) for n in at.get("REDUCE_GRAD", weights[-1:] if sharding.accumulate else weights)]
    update, unshard = at["update"][0], at.get("UNSHARD")
    match traffic.operation, traffic.what:
        case _, "activations" | "keys and values":
            return [Place(n, True) for n in forward]
        case _, "parts of the loss":
            last = max(line[n].stage for n in forward)
            return [Place(n, True) for n in forward if line[n].stage == last]
        case _, "activations, again" | "gradients of activations" | "gradients of keys and values":
            return [Place(n, True) for n in backward]
        case _, "batch statistics":
            return [Place(n, True) for n in passes]
        case "broadcast", "parameters":
            return [Place(update, True)]
        case "all_gather", "parameters":
            if unshard:
                return [Place(n, True) for n in unshard] + [Place(n, False) for n in passes if sharding.reshard]
            return [Place(n, False) for n in (passes if sharding.reshard else passes[:1])]
        case _, "buffers" | "count of what is kept":
            return [Place(forward[0], False)]
        case ("reduce_scatter", "gradients") | (_, "gradients beside pieces"):
            return complete
    return [Place(update, False)]
