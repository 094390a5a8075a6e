"""The cause of a stall, or of an end, from the positions of the ranks (positions.py): who is behind, and who waits.

Model: of ranks that do not go on, those that do not wait are the cause: a process that is gone or suspended, a host
that writes nothing, or a rank that is in code of the user's. If all wait, those that are furthest have left out the
exchange in which the last ones wait. If all wait in the same exchange, the network is the cause.

Contract: a rank is named as the cause only if its stack, its process or its position shows it. Without this the
positions are listed, and no cause is named.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

from dslc.compiler.ir.number_text import time_text
from dslc.runtime.process.lifetime import signal_name
from dslc.runtime.process.positions import HostPositions, Phase, PositionDetails, RankPosition

SILENT = 20.0  # seconds without a new file after which a launcher counts as dead, if another one writes
_LISTED = 8  # lines of positions at most


@dataclass(frozen=True, kw_only=True)
class _Rank:
    """A rank's position, with its host, and the seconds since it came there."""

    place: RankPosition
    host: HostPositions
    silent: bool

    @property
    def seconds(self) -> float:
        return self.place.seconds + self.host.age

    @property
    def details(self) -> PositionDetails:
        return self.place.details or PositionDetails(since=0)

    @property
    def waits(self) -> bool:
        """True if it may wait for another rank."""
        present = self.place.state in ("alive", "failed") and not self.silent
        kinds = ("collective", "backward") if self.host.gradients else ("collective",)
        return present and self.details.waits in kinds

    @property
    def surely_waits(self) -> bool:
        """True if it does not compute: its stack alone does not show this of a backward pass."""
        return self.waits and (self.details.waits == "collective" or self.place.idle or self.place.state == "failed")

    @property
    def operation(self) -> str:
        """The exchange in which it waits; "" if it is not known."""
        if self.details.waits == "backward" and self.host.gradients:
            return f"the {self.host.gradients}"
        return self.details.operation

    @property
    def line(self) -> str:
        """The line of the job that the position concerns."""
        if self.place.phase in (Phase.SAMPLES, Phase.SOURCE):
            return self.host.lines.get("data", "")
        if self.place.phase == Phase.UPDATE:
            return self.host.lines.get("optimizer", "")
        return self.details.line or self.host.lines.get("model", "")


def explain(hosts: Sequence[HostPositions], *, live: bool = True) -> list[str]:
    """Returns the cause of a stall and the positions of all ranks, as lines. `live`: the launchers should still write;
    else the positions are those at the end of the run.
    """
    newest = min((host.age for host in hosts), default=0.0)
    ranks = sorted(
        (
            _Rank(place=place, host=host, silent=live and len(hosts) > 1 and host.age - newest > SILENT)
            for host in hosts
            for place in host.ranks
        ),
        key=lambda rank: rank.place.rank,
    )
    several = len({host.host for host in hosts}) > 1
    cause = _cause(ranks, several)
    return [cause] if cause else list_positions(ranks, several)


def positions_in_words(hosts: Sequence[HostPositions]) -> list[str]:
    """Returns a line for each position, with the ranks that are there."""
    ranks = [_Rank(place=place, host=host, silent=False) for host in hosts for place in host.ranks]
    return list_positions(sorted(ranks, key=lambda rank: rank.place.rank), len({host.host for host in hosts}) > 1)


def list_positions(ranks: Sequence[_Rank], several: bool) -> list[str]:
    groups = _groups(ranks, _position_text)
    lines = [f"{_names(members, several)} {'is' if len(members) == 1 else 'are'} {text}" for text, members in groups]
    more = len(lines) - _LISTED
    return lines[:_LISTED] + ([f"and {more} more positions"] if more > 0 else [])


def _cause(ranks: Sequence[_Rank], several: bool) -> str:
    """Returns the cause; "" if the positions do not show it."""
    waiting = [rank for rank in ranks if rank.waits]
    ends = [
        rank
        for rank in ranks
        if rank.place.state in ("gone", "suspended") or (rank.place.state == "failed" and not rank.waits) or rank.silent
    ]
    if ends:
        texts = [f"{_names(members, several)} {text}" for text, members in _groups(ends, _end_text)]
        return "; ".join([*texts, *_waiting_text(waiting, several)])
    active = [rank for rank in ranks if rank.place.state == "alive" and rank.place.details and not rank.waits]
    # A rank in code of the user's is surely the cause; of one within libraries it is less sure that it does not wait.
    running = [rank for rank in active if rank.details.python] or active
    unknown = [rank for rank in ranks if rank.place.state == "alive" and rank.place.details is None]
    if unknown:
        return ""
    if running:
        behind = [_behind_text(rank, waiting, several) for rank in running[:_LISTED]]
        python = [
            f"rank {rank.place.rank}'s last line of Python is {rank.details.python}"
            for rank in running[:_LISTED]
            if rank.details.python
        ]
        return "; ".join([*behind, *_waiting_text(waiting, several, named=_is_one_for_all(waiting)), *python])
    return _mismatch(waiting, several)


def _behind_text(rank: _Rank, waiting: Sequence[_Rank], several: bool) -> str:
    """Returns where a rank is that does not wait, in relation to the exchange of those that do."""
    name = _names([rank], several)
    where = f"{rank.place.text()}{_module(rank)}{_in_brackets(rank.line)}"
    if not _is_one_for_all(waiting):
        return f"{name} is {where}"
    is_past = rank.place.progress > max(other.place.progress for other in waiting)
    return f"{name} is {'past' if is_past else 'before'} {waiting[0].operation}, {where}"


def _is_one_for_all(waiting: Sequence[_Rank]) -> bool:
    """True if the ranks wait in one exchange, which all must join."""
    return len({rank.operation for rank in waiting}) == 1 and _takes_all(waiting[0].operation)


def _waiting_text(waiting: Sequence[_Rank], several: bool, *, named: bool = False) -> list[str]:
    """Returns who waits in which exchange, and for how long; `it` for the only one, if it was `named`."""
    groups = _groups(waiting, lambda rank: rank.operation)
    texts = []
    for operation, members in groups:
        have = "has" if len(members) == 1 else "have"
        where = f"in {'it' if named else operation}" if operation else members[0].place.text()
        texts.append(f"{_names(members, several)} {have} waited {where}{_duration(members)}")
    return texts


def _mismatch(waiting: Sequence[_Rank], several: bool) -> str:
    """Returns the cause where all ranks wait."""
    groups = _groups(waiting, lambda rank: rank.operation)
    texts = _waiting_text(waiting, several)
    if len(waiting) < 2 or not all(rank.surely_waits for rank in waiting):
        return ""
    if len(groups) == 1 and len({rank.place.progress for rank in waiting}) == 1:
        what, rank = groups[0][0] or "the same exchange", waiting[0]
        where = f"{rank.place.text()}{_in_brackets(rank.line)}"
        duration = _duration(waiting)
        waits = f"all ranks wait in {what}, {where}{',' if duration else ''}{duration}"
        return f"{waits}: a connection between them is cut or stuck"
    first, last = min(map(_order, waiting)), max(map(_order, waiting))
    if first == last or not all(_takes_all(operation) for operation, _ in groups):
        return f"the ranks wait in different exchanges: {'; '.join(texts)}"
    ahead = [rank for rank in waiting if _order(rank) == last]
    missing = next(rank for rank in waiting if _order(rank) == first)
    what = f"{missing.operation or 'the exchange'} of step {missing.place.current_step}{_in_brackets(missing.line)}"
    python = f"; rank {ahead[0].place.rank}'s last line of Python is {ahead[0].details.python}"
    return f"{_names(ahead, several)} did not take part in {what}: {'; '.join(texts)}" + (
        python if ahead[0].details.python else ""
    )


def _takes_all(operation: str) -> bool:
    """True for an exchange that ends only when each rank has joined it, unlike a message between two."""
    return bool(operation) and "message" not in operation and "exchange of" not in operation


def _order(rank: _Rank) -> tuple[int, ...]:
    """Returns the order of exchanges: by progress, and within a pass by the module, backward in a backward pass."""
    order = rank.details.order
    return *rank.place.progress, -order if rank.place.phase == Phase.BACKWARD else order


def _position_text(rank: _Rank) -> str:
    place = rank.place
    if place.state == "done":
        return "done"
    if place.state != "alive" or rank.silent:
        return _end_text(rank)
    if rank.waits and rank.operation:
        return f"waiting in {rank.operation}, {place.text()}{_in_brackets(rank.line)}"
    at = f", at {rank.details.python}" if rank.details.python else ""
    return f"{place.text()}{_module(rank)}{_in_brackets(rank.line)}{at}"


def _end_text(rank: _Rank) -> str:
    where = f"{rank.place.text()}{_module(rank)}{_in_brackets(rank.line)}"
    if rank.silent:
        return f"gave its last sign of life {rank.host.age:.0f} s ago, {where}: the host is dead or cut off"
    if rank.place.state == "suspended":
        return f"is stopped (SIGSTOP, Ctrl-Z or a debugger), {where}"
    if rank.place.state == "failed":
        return f"has failed, {where}"
    status = rank.place.status
    if status is not None and status < 0:
        return f"was ended by {signal_name(-status)}, {where}"
    return f"has left with exit status {status}, {where}" if status is not None else f"is gone, {where}"


def _duration(ranks: Sequence[_Rank]) -> str:
    """Returns for how long all of some ranks have waited; "" for less than a second."""
    seconds = round(min(rank.seconds for rank in ranks))
    return f" for {time_text(seconds)}" if seconds else ""


def _module(rank: _Rank) -> str:
    return f", in {rank.details.module}" if rank.details.module else ""


def _in_brackets(line: str) -> str:
    return f" ({line})" if line else ""


def _groups(ranks: Iterable[_Rank], key: Callable[[_Rank], str]) -> list[tuple[str, list[_Rank]]]:
    found: dict[str, list[_Rank]] = {}
    for rank in ranks:
        found.setdefault(key(rank), []).append(rank)
    return list(found.items())


def _names(ranks: Sequence[_Rank], several: bool) -> str:
    """Returns "rank 3 (host b)", or "ranks 0 to 2, 5" of several ranks."""
    numbers = sorted(rank.place.rank for rank in ranks)
    if len(numbers) == 1:
        return f"rank {numbers[0]}" + (f" ({ranks[0].host.host})" if several else "")
    runs: list[tuple[int, int]] = []
    for number in numbers:
        if runs and number == runs[-1][1] + 1:
            runs[-1] = runs[-1][0], number
        else:
            runs.append((number, number))
    texts = [", ".join(map(str, range(a, b + 1))) if b - a < 2 else f"{a} to {b}" for a, b in runs]
    return f"ranks {', '.join(texts)}"
