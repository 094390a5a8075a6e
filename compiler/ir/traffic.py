"""The exchanges of one rank in a step."""

from __future__ import annotations

from collections.abc import Iterable
from enum import StrEnum
from typing import Literal

from dslc.dsl.record import Record, record

Among = Literal["", "node", "nodes"]


class Payload(StrEnum):
    """What an exchange carries; the value is its text in plans."""

    NOTHING = ""
    PARAMETERS = "parameters"
    GRADIENTS = "gradients"
    MOMENTA = "momenta"
    WEIGHTS = "weights"
    SCALE = "scale of the gradients"
    SCALE_OF_SUMS = "scale of sums of gradients"  # which shards have taken, before they go over replicas
    SECOND_FACTORS = "second factors of the gradients"
    ROUND_END = "whether a round of averages is over"
    SHARED_GRADIENTS = "gradients of shared weights"
    PARTIAL_GRADIENTS = "gradients beside pieces"  # of parameters that ranks of the tensor axis have whole
    ACTIVATIONS = "activations"
    ACTIVATIONS_AGAIN = "activations, again"
    ACTIVATION_GRADIENTS = "gradients of activations"
    KEYS_AND_VALUES = "keys and values"
    KEY_VALUE_GRADIENTS = "gradients of keys and values"
    LOSS_PARTS = "parts of the loss"
    BATCH_STATISTICS = "batch statistics"
    KEPT_COUNT = "count of what is kept"
    LOSS_COUNT = "count of the losses"
    USED_PARAMETERS = "which parameters were used"
    BUFFERS = "buffers"
    GRADIENT_NORM = "norm of the gradient"
    NONFINITE = "whether a gradient is not finite"
    OUTPUTS = "outputs"  # of a loss that compares samples, as are the next two
    TARGETS = "targets"
    OUTPUT_GRADIENTS = "gradients of outputs"


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
    what: Payload
    dtype: str
    count: int
    bytes: int
    among: Among = ""
    when: When = ALWAYS


def handed_in(exchanged: Iterable[TrafficNode]) -> int:
    """Returns the bytes of a rank's input in a step, in the mean over later steps."""
    return round(sum(node.bytes * node.when.share for node in exchanged if node.operation != "receive"))


def over_replicas(operation: str, what: Payload) -> bool:
    """True of the exchanges of `fully_shard` that are among replicas; others are among the shards of one."""
    return what == Payload.SCALE_OF_SUMS or (operation, what) == ("all_reduce", Payload.GRADIENTS)
