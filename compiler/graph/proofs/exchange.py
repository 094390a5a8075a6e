"""The proof that ranks agree as an exchange says: on what, with whom, and when. Returns the reason why it fails, or "".

Model: for each group of weights the proof follows a number that is exchanged: a gradient, a momentum, or the weight
itself. It knows over how many ranks a rank's number is a mean or a sum (`over`). It also knows in how many pieces the
number lies, one on each rank of a group (`cut`). A collective takes that a step further:

    all_reduce                   over more ranks
    reduce_scatter, all_to_all   over more ranks, and cut among them: the owner of a piece sums it
    all_gather                   whole again, among the ranks among which it was cut last
    send, receive                over the rank itself and the ranks whose numbers it has received

At the end it is whole, and over as many ranks as the rule of the exchange says. Gradients that no exchange agrees on
are summed over the ranks of a member, and in the first steps over all.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace

from dslc.compiler.graph.proofs.view import Line, View, collectives
from dslc.compiler.ir import program as p
from dslc.compiler.ir.actions import ALWAYS, Backward, Cadence, Collective, Forward, Payload, Role, Update
from dslc.compiler.ir.records import Weights
from dslc.compiler.ir.tensors import DTYPE_BYTES
from dslc.compiler.operations.exchange_rules import RULES, ExchangeRule
from dslc.compiler.placement.buckets import messages
from dslc.compiler.placement.shares import largest
from dslc.dsl.language.registry import CALLS
from dslc.dsl.record import Record, record


@record
class _Contribution(Record):
    """A rank's part of a number: a mean over `over` ranks, in pieces among groups of (ranks, stride)."""

    over: int = 1
    cut: tuple[tuple[int, ...], ...] = ()
    heard: int = 1  # whose numbers a rank has by messages, itself included
    told: int = 0  # to how many it has sent its own
    of_node: bool = False  # the ranks of a node hold the same

    @property
    def pieces(self) -> int:
        count = 1
        for ranks, *_ in self.cut:
            count *= ranks
        return count


def check_inexact_exchange(view: View) -> str:
    """Checks each exchange of gradients, momenta or weights that is no exact sum of gradients."""
    step = view.plan.find(p.GradientStep)
    if step is None or step.exchange is None or step.kind == "fsdp":  # whose sums `summed` proves
        return ""
    if step.exchange.kind not in RULES:
        return f"no exchange is called {step.exchange.kind}"
    for line in view.lines.values():
        if reason := _Agreement(view, step, step.exchange, line).reason():
            return reason
    return ""


class _Agreement:
    def __init__(self, view: View, step: p.GradientStep, exchange: p.ExchangeStep, line: Line) -> None:
        self._step, self._exchange, self._line = step, exchange, line
        self._rule = RULES[exchange.kind]
        self._ranks = view.plan.axis("data").size
        self._own: Mapping[str, Weights] = {n: w for n, w in view.plan.of_kind(Weights) if w.trained}
        self._members = self._ranks // exchange.pieces

    def reason(self) -> str:
        exchange, pieces = self._exchange, self._exchange.pieces
        if self._ranks % pieces or (pieces > 1 and self._members < 2):
            return f"{self._ranks} ranks are no members of {pieces} each"
        partial = [name for name, group in self._own.items() if group.pieces]
        if partial:
            return f"gradients of {partial[0]} are partial sums, which no exchange completes"
        from_start = Cadence(after=exchange.alone)
        if exchange.agrees is Payload.GRADIENTS:
            if exchange.alone or exchange.every != 1:
                return f"{exchange.kind} exchanges the gradients of each step"
            return (
                self._scales()
                or self._factors()
                or self._follow(Payload.GRADIENTS, ALWAYS, _Contribution(), self._ranks)
            )
        reason = ""
        if exchange.alone:
            reason = self._follow(Payload.GRADIENTS, Cadence(until=exchange.alone), _Contribution(), self._ranks)
        if pieces > 1:
            reason = reason or self._follow(Payload.GRADIENTS, from_start, _Contribution(), pieces)
        cadence = Cadence(every=exchange.every, after=exchange.alone)
        reason = reason or self._rounds(from_start)
        contribution = _Contribution(over=pieces, of_node=pieces > 1, cut=((pieces, 1),) if pieces > 1 else ())
        return (
            reason
            or self._follow(exchange.agrees, cadence, contribution, self._required_ranks())
            or self._check_exchange_steps()
        )

    def _scales(self) -> str:
        """Checks that the ranks agree on the scale of half precision before they sum in it."""
        actions = [action for _, _, action in self._mine(Payload.SCALE, ALWAYS)]
        expected = len(self._own) if self._rule.sums_in == "float16" else 0
        collectives_found = [(a.operation, a.dtype, a.count, a.bytes, *a.group) for a in actions]
        sound = [("all_reduce", "float32", expected, 4 * expected, self._ranks, 1)] if expected else []
        return (
            ""
            if collectives_found == sound
            else f"the scales of {expected} groups of gradients are agreed on by {collectives_found}"
        )

    def _factors(self) -> str:
        """Checks that the second factors of all matrices are agreed on, after the first ones and what is summed
        exactly, which go with the gradients.
        """
        factors_of = {name: factors.factors for name, factors in self._own.items() if factors.factors is not None}
        bytes_ = 4 * sum(factors.second for factors in factors_of.values())
        actions = [action for _, _, action in self._mine(Payload.SECOND_FACTORS, ALWAYS)]
        collectives_found = [(a.operation, a.dtype, a.count, a.bytes, *a.group, set(a.weights)) for a in actions]
        sound = (
            [("all_reduce", "float32", len(factors_of), bytes_, self._ranks, 1, set(factors_of))] if factors_of else []
        )
        if collectives_found != sound:
            return f"the second factors of {len(factors_of)} groups of gradients are agreed on by {collectives_found}"
        gradient_places = [n for n, _, _ in self._mine(Payload.GRADIENTS, ALWAYS)]
        are_behind = all(n > max(gradient_places, default=0) for n, _, _ in self._mine(Payload.SECOND_FACTORS, ALWAYS))
        return "" if are_behind else "second factors are agreed on before the first ones"

    def _rounds(self, from_start: Cadence) -> str:
        """Checks that the ranks of a node agree in each step whether a round by the clock is over."""
        first_forward = next(n for n, (_, action) in enumerate(self._line) if isinstance(action, Forward))
        rounds_found = [
            (a.operation, a.dtype, a.count, a.bytes, *a.group, n < first_forward)
            for n, _, a in self._mine(Payload.ROUND_END, from_start)
        ]
        needs_rounds = self._exchange.every == 0 and self._exchange.pieces > 1
        sound = [("all_reduce", "float32", 1, 8, self._exchange.pieces, 1, True)] if needs_rounds else []
        return "" if rounds_found == sound else f"whether a round is over is agreed on by {rounds_found}"

    def _required_ranks(self) -> int:
        """Returns the ranks over which the rule of an exchange of weights or momenta takes a mean."""
        members = 0 if self._exchange.arguments.get("peers") == "all" else self._rule.averaged
        return (members or self._members) * self._exchange.pieces

    def _mine(self, what: Payload, cadence: Cadence) -> Iterator[tuple[int, str, Collective]]:
        for n, name, action in collectives(self._line):
            if action.carries == what and action.when == cadence:
                yield n, name, action

    def _check_exchange_steps(self) -> str:
        """Checks that nothing of it takes place in steps that no rule names."""
        exchange = self._exchange
        allowed = {
            (Payload.GRADIENTS, Cadence(until=exchange.alone)),
            (Payload.GRADIENTS, Cadence(after=exchange.alone)),
        }
        allowed.add((Payload.ROUND_END, Cadence(after=exchange.alone)))
        allowed.add((exchange.agrees, Cadence(every=exchange.every, after=exchange.alone)))
        for _, name, action in collectives(self._line):
            if Role.AGREEMENT in action.carries.role and (action.carries, action.when) not in allowed:
                return f"{name} exchanges {action.carries} in steps in which nothing is to be exchanged: {action.when}"
        return ""

    def _follow(self, what: Payload, cadence: Cadence, begin: _Contribution, expected: int) -> str:
        contributions = dict.fromkeys(self._own, begin)
        passes = [n for n, (_, action) in enumerate(self._line) if isinstance(action, Forward | Backward)]
        update = next(n for n, (_, action) in enumerate(self._line) if isinstance(action, Update))
        for n, name, action in self._mine(what, cadence):
            if reason := self._in_time(what, n, min(passes), max(passes), update, name):
                return reason
            if set(action.weights) != self._own.keys():
                return f"{name} exchanges {what} of {len(action.weights)} groups of weights, and not of all that train"
            if reason := self._size(name, action, contributions):
                return reason
            for group in action.weights:
                moved = _moved(contributions[group], action, self._members, self._rule.neighbours)
                if moved is None:
                    return f"{name} is not among ranks that have something to exchange: {contributions[group]}"
                contributions[group] = moved
        for group, contribution in contributions.items():
            members_summed = contribution.over * contribution.heard
            if contribution.told != contribution.heard - 1:
                return (
                    f"{what} of {group} are sent to {contribution.told} ranks, and received from "
                    f"{contribution.heard - 1}"
                )
            if contribution.cut or members_summed != expected:
                return (
                    f"{what} of {group} end in {contribution.pieces} pieces, over {members_summed} ranks, and not "
                    f"{expected}"
                )
        return ""

    def _in_time(self, what: str, n: int, first_backward: int, last_backward: int, update: int, name: str) -> str:
        if what == Payload.WEIGHTS:
            sound = n < first_backward if _begins_before_passes(self._exchange.kind) else n > update
        else:
            sound = last_backward < n < update
        return "" if sound else f"{name} exchanges {what} too late or too early"

    def _size(self, name: str, action: Collective, contributions: Mapping[str, _Contribution]) -> str:
        sizes = [self._numbers(self._own[group], contributions[group], action) for group in action.weights]
        sizes_sent = [sent_bytes(numbers, action, self._members, self._rule) for numbers in sizes]
        count, total, times = len(sizes_sent), sum(sizes_sent), 1
        if action.is_message:
            count, times = sum(len(messages(parts)) for parts in sizes_sent), self._rule.neighbours
        if (action.count, action.bytes) != (times * count, times * total):
            return f"{name} exchanges {action.count} of {action.bytes} bytes; they are {count} of {total}"
        return ""

    def _numbers(self, group: Weights, contribution: _Contribution, action: Collective) -> int:
        numbers = group.trained or 0
        if group.factors is not None:
            numbers += group.factors.first - group.factors.numbers
        for ranks, *_ in contribution.cut:
            numbers = largest(numbers, ranks)
        return action.ranks * largest(numbers, action.ranks) if action.operation == "reduce_scatter" else numbers


def sent_bytes(numbers: int, action: Collective, members: int, rule: ExchangeRule) -> int:
    """Returns the bytes of a rank's input of `numbers` numbers, in the dtype and the layout of the operation."""
    if action.dtype == "uint8" and rule.row is not None:  # a row for each member, or the row of one
        return members * rule.row(largest(numbers, members)) if action.operation == "all_to_all" else rule.row(numbers)
    is_mean = action.carries is Payload.WEIGHTS and action.operation == "all_reduce"
    return numbers * DTYPE_BYTES.get(action.dtype, 0) + (rule.flag if is_mean else 0)


def _moved(contribution: _Contribution, action: Collective, members: int, neighbours: int) -> _Contribution | None:
    """Returns what a rank has after the action; None if it is not possible. It sends to `neighbours` ranks."""
    if action.is_message and action.group != (members, contribution.over):
        return None
    group = action.group
    full_pieces = contribution.pieces if not contribution.of_node else 1
    match action.operation:
        case "all_reduce" | "reduce_scatter" | "all_to_all":
            summed_ranks = contribution.over  # ranks that have the same already are neighbours
            if (
                action.stride != summed_ranks
                or action.ranks < 2
                or (contribution.cut and not contribution.of_node and full_pieces != summed_ranks)
            ):
                return None
            cut = contribution.cut if action.operation == "all_reduce" else (*contribution.cut, group)
            return _Contribution(over=contribution.over * action.ranks, cut=cut, of_node=contribution.of_node)
        case "all_gather" if contribution.cut and contribution.cut[-1] == group:
            return replace(contribution, cut=contribution.cut[:-1])
        case "send":
            return replace(contribution, told=contribution.told + neighbours)
        case "receive":
            return replace(contribution, heard=contribution.heard + neighbours)
    return None


def _begins_before_passes(kind: str) -> bool:
    """True if an exchange of weights begins before the passes of a step; the others come after its update."""
    declared = CALLS["gradients"].get(kind)
    return declared is not None and getattr(declared, "ahead", False)
