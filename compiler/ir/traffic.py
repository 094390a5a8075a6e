"""The exchanges of one rank in a step."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Literal

from dslc.dsl.record import Record, record

Among = Literal["", "node", "nodes"]


@record
class When(Record):
    """The steps in which an exchange takes place: every so many (0: by the clock, not by steps), after step `after`,
    and up to step `until` if there is one (0: in none).
    """

    every: int = 1
    after: int = 0
    until: int | None = None

    def holds(self, step: int) -> bool:
        """True of a step, counted from 1, in which it surely takes place."""
        in_time = step > self.after and (self.until is None or step <= self.until)
        return in_time and self.every > 0 and step % self.every == 0

    @property
    def steady(self) -> bool:
        """True if it takes place in the steps after the first ones."""
        return self.until is None

    @property
    def share(self) -> float:
        """The share of the later steps in which it takes place."""
        return 1 / self.every if self.steady and self.every else 0.0


ALWAYS = When()


@record
class TrafficNode(Record):
    """The exchanges of one rank on one axis in a step: `count` operations, with `bytes` of input in all.

    `among`: the ranks of one node alone, or those at one place in all nodes; else all of the axis. `when`: the steps in
    which they take place.
    """

    operation: str  # all_reduce, reduce_scatter, all_gather, all_to_all, broadcast, send, receive
    axis: str  # or `all` of them
    what: str  # gradients, parameters, batch statistics, activations, …
    dtype: str
    count: int
    bytes: int
    among: Among = ""
    when: When = ALWAYS


def handed_in(exchanged: Iterable[TrafficNode]) -> int:
    """Returns the bytes of a rank's input in a step, in the mean over later steps."""
    return round(sum(node.bytes * node.when.share for node in exchanged if node.operation != "receive"))
