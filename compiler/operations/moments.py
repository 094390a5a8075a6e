"""Operations with other ranks, each with its place among the actions of a step.

An operation says all that its placement and its traffic need. So the code that places it, or sums it, knows no payload.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from dataclasses import replace
from typing import Literal

from dslc.compiler.ir import actions
from dslc.compiler.ir.actions import ALWAYS, Action, Among, Cadence, Payload, TrafficNode
from dslc.dsl.record import Record, record


@record
class Moment(Record):
    """The actions of a step beside which an operation takes place: each of these kinds, or the first or last."""

    kinds: tuple[type[Action], ...]
    which: Literal["each", "first", "last"] = "each"
    after: bool = True


IN_SCHEDULE = Moment(kinds=())  # an action of its own, which the schedule of a pipeline has already
BEFORE_PASSES = Moment(kinds=(actions.ForwardAhead, actions.Forward), which="first", after=False)
BEFORE_GATHERS = Moment(kinds=(actions.Unshard, actions.ForwardAhead, actions.Forward), which="first", after=False)
BEFORE_USE = Moment(kinds=(actions.ForwardAhead, actions.StagePass), after=False)
UNSHARD = Moment(kinds=(actions.Unshard,))
FORWARD = Moment(kinds=(actions.ForwardAhead, actions.Forward))
BACKWARD = Moment(kinds=(actions.Backward, actions.InputBackward))
ALL_PASSES = Moment(kinds=(actions.ForwardAhead, actions.Forward, actions.Backward, actions.InputBackward))
WEIGHT_GRADIENTS = Moment(kinds=(actions.Backward, actions.WeightBackward))
LAST_WEIGHT_GRADIENTS = Moment(kinds=(actions.Backward, actions.WeightBackward), which="last")
REDUCE_GRADIENTS = Moment(kinds=(actions.ReduceGradients,))
OUTPUT = Moment(kinds=(actions.Forward,))
LAST_OUTPUT = Moment(kinds=(actions.Forward,), which="last")
LAST_OUTPUT_AHEAD = Moment(kinds=(actions.ForwardAhead,), which="last")
BEFORE_UPDATE = Moment(kinds=(actions.Update,), after=False)
AFTER_UPDATE = Moment(kinds=(actions.Update,))


@record
class RankGroup(Record):
    """The ranks of an operation: `ranks` of them, each `stride` after the one before; both 0 for two pipeline stages.
    With a `run`, runs of `run` ranks that share a sequence, each run `stride` after the one before.

    `axis` is the axis that they lie on, or `all`.
    """

    axis: str
    ranks: int
    stride: int
    among: Among = ""
    run: int = 1


@record
class StepOperation(TrafficNode):
    """Operations of one kind, whose `count` and `bytes` are divided equally over the actions of their `moment`.

    `stage`: the actions of this stage alone. `occurrences`: these of the actions alone, by number. `weights` names the
    nodes of the plan whose parameters, gradients or momenta are exchanged.
    """

    moment: Moment
    stage: int | None = None
    occurrences: tuple[int, ...] | None = None
    weights: tuple[str, ...] = ()


def operation(
    kind: str,
    what: Payload,
    group: RankGroup,
    moment: Moment,
    sizes: Iterable[int],
    *,
    dtype: str = "float32",
    times: int = 1,
    when: Cadence = ALWAYS,
    stage: int | None = None,
    occurrences: tuple[int, ...] | None = None,
    weights: Iterable[str] = (),
) -> StepOperation:
    """Returns operations with these bytes of input, each `times`; a Counter has the times of each size."""
    of_each = sizes if isinstance(sizes, Counter) else Counter(sizes)
    return StepOperation(
        operation=kind,
        axis=group.axis,
        what=what,
        dtype=dtype,
        count=times * of_each.total(),
        bytes=times * sum(size * often for size, often in of_each.items()),
        ranks=group.ranks,
        stride=group.stride,
        among=group.among,
        run=group.run,
        when=when,
        moment=moment,
        stage=stage,
        occurrences=occurrences,
        weights=tuple(weights),
    )


def traffic(operations: Iterable[StepOperation]) -> tuple[TrafficNode, ...]:
    """Returns the sums of operations that differ in their places alone."""
    sums: dict[tuple[object, ...], TrafficNode] = {}
    for each in operations:
        key = each.operation, each.axis, each.what, each.dtype, each.ranks, each.stride, each.run, each.among, each.when
        node = TrafficNode(**{name: getattr(each, name) for name in TrafficNode.record_names})
        if key in sums:
            node = replace(node, count=node.count + sums[key].count, bytes=node.bytes + sums[key].bytes)
        sums[key] = node
    return tuple(sums.values())
