"""Bytes that `fully_shard` has gathered, action by action of a rank's stages.

Model: the units of a stage in the order of its layers, beneath a root, which has the parameters of no other unit. A
forward pass gathers a unit before its layer and, under ZeRO-3, frees it after. A gathered unit exists twice while it is
copied out of the collective's buffer; a forward pass frees that buffer when the next unit is copied out, or at its end.
A backward pass copies a unit out, frees its buffer, and gathers the unit before ahead of its use (`backward_prefetch`):
the one before in the order of all forward passes so far. If nothing in that unit has a gradient, its buffer stays until
the next forward pass of the unit, or the last backward pass. The root, and a unit whose input has no gradient, are
complete at the end of a backward pass.

All units of a pipeline's stage are gathered ahead of its first action. Its backward passes free nothing; after the last
the units are reduced and freed one after another. Contract: each action is followed in the order of the rank; one that
begins as an earlier one did is not followed again, so that the work does not grow with the micro-batches.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import NamedTuple

from dslc.compiler.placement.schedules import ScheduledAction

Complete = tuple[tuple[int, int], ...]  # units, with the bytes that are left gathered
_State = tuple[frozenset[int], frozenset[int], int | None]  # gathered, pending, the unit of the buffer


class UnitBytes(NamedTuple):
    """Bytes of a unit: gathered, in the buffer of the collective, and of the copy that the collective takes."""

    gathered: int
    buffer: int
    copy: int


class GatheredBytes(NamedTuple):
    """Bytes that are gathered in an action of a stage.

    `during` is by layer; `gathering` is the most while the unit of a layer is gathered before it, or 0; `done` has the
    unit that a backward pass completes with the layer, or none. `late` are the units that a backward pass completes at
    its end, `reduced` the units of a stage after its last backward pass; each with the bytes that are left gathered.
    """

    begin: int
    during: tuple[int, ...]
    gathering: tuple[int, ...]
    end: int
    done: tuple[Complete, ...] = ()
    late: Complete = ()
    reduced: Complete = ()

    def with_other_stages(self, other_bytes: int) -> GatheredBytes:
        """Returns the same with the bytes that the other stages of the rank have gathered."""

        def more(complete: Complete) -> Complete:
            return tuple((unit, size + other_bytes) for unit, size in complete)

        return self._replace(
            begin=self.begin + other_bytes,
            during=tuple(size + other_bytes for size in self.during),
            gathering=tuple(size and size + other_bytes for size in self.gathering),
            end=self.end + other_bytes,
            done=tuple(more(complete) for complete in self.done),
            late=more(self.late),
            reduced=more(self.reduced),
        )


class GatheredUnits:
    """The units of a stage: each layer, unless the root has it. `has_backward`: a gradient reaches the layer."""

    def __init__(
        self,
        unit_of: Sequence[int],
        has_backward: Sequence[bool],
        sizes: Sequence[UnitBytes],
        root: int,
        *,
        reshard: bool,
        staged: bool,
    ) -> None:
        self._unit_of, self._has_backward, self._sizes, self._root = unit_of, has_backward, sizes, root
        self._reshard, self._staged = reshard, staged
        self._units = dict.fromkeys([root, *unit_of])  # in the order of the modules
        passed = [*(unit for unit in unit_of if unit != root), root]  # in the order in which a forward pass leaves them
        self._passed = [unit for unit in passed if sizes[unit].gathered]  # without those that are no units of torch's
        self._before = dict(zip(self._passed, [*self._passed[-1:], *self._passed[:-1]], strict=True))
        self._gathered = frozenset(self._units if staged else ())
        self._pending = frozenset[int]()  # gathered ahead, and not copied out
        self._buffer: int | None = None  # the unit whose buffer a forward pass has not freed
        self._forwards = 0  # of the step so far
        self._unfinished: list[int] = []  # the numbers of those whose backward pass has not run
        self._followed: dict[tuple[object, ...], tuple[GatheredBytes, _State]] = {}
        self._sums: dict[frozenset[int], int] = {}

    @property
    def bytes(self) -> int:
        sizes = self._sizes
        buffer = sizes[self._buffer].buffer if self._buffer is not None else 0
        if self._gathered not in self._sums:
            self._sums[self._gathered] = sum(sizes[unit].gathered for unit in self._gathered)
        return self._sums[self._gathered] + sum(self._sizes[unit].buffer for unit in self._pending) + buffer

    def follow(self, forward: bool, is_final: bool) -> GatheredBytes:
        """Follows a pass of a micro-batch; `is_final`: the last backward pass of a step."""
        begin = forward, is_final, self._gathered, self._pending, self._buffer, self._unfinished[-1:] in ([], [0])
        if begin not in self._followed:
            gathered = self._forward() if forward else self._backward(is_final)
            self._followed[begin] = gathered, (self._gathered, self._pending, self._buffer)
        gathered, (self._gathered, self._pending, self._buffer) = self._followed[begin]
        if forward:
            self._unfinished.append(self._forwards)
            self._forwards += 1
        elif is_final or not self._staged:
            self._unfinished, self._forwards = [], 0
        else:
            del self._unfinished[-1:]
        return gathered

    def _forward(self) -> GatheredBytes:
        begin, during, gathering = self.bytes, list[int](), list[int]()
        most = self._enter(self._root)
        for unit in self._unit_of:
            if unit != self._root:
                most = max(most, self._enter(unit))
            during.append(self.bytes)
            gathering.append(most)
            most = 0
            if unit != self._root and self._reshard:
                self._gathered -= {unit}
        self._buffer = None
        return GatheredBytes(begin, tuple(during), tuple(gathering), self.bytes)

    def _enter(self, unit: int) -> int:
        """Gathers a unit for its forward pass; returns the most bytes meanwhile, or 0."""
        if unit in self._gathered:
            return 0
        most = self._begin_gather(unit)
        self._pending -= {unit}
        self._buffer = unit
        self._gathered |= {unit}
        return most

    def _begin_gather(self, unit: int) -> int:
        """Begins to gather a unit; returns the bytes while the collective runs, or 0."""
        if unit in self._gathered or unit in self._pending:
            return 0
        self._pending |= {unit}
        return self.bytes + self._sizes[unit].copy

    def _backward(self, is_final: bool) -> GatheredBytes:
        begin, frees = self.bytes, not self._staged and (is_final or self._reshard)
        during, gathering, completed = list[int](), list[int](), list[Complete]()
        most = self._pre_backward(self._root) if any(self._has_backward) else 0
        late_units = [self._root]
        for n in reversed(range(len(self._unit_of))):
            unit = self._unit_of[n]
            if self._has_backward[n] and unit != self._root:
                most = max(most, self._pre_backward(unit))
            during.append(self.bytes)
            gathering.append(most)
            most = 0
            completes = unit != self._root and n > 0 and self._has_backward[n - 1]
            completed.append(tuple(self._complete([unit], frees)) if completes else ())
            if unit != self._root and not completes:
                late_units.insert(1, unit)  # no gradient of its input says that it is done
        gathered = GatheredBytes(
            begin,
            tuple(reversed(during)),
            tuple(reversed(gathering)),
            0,
            done=tuple(reversed(completed)),
            late=tuple(self._complete(late_units, frees)),
            reduced=tuple(self._complete(self._units, True)) if is_final and self._staged else (),
        )
        if is_final or not self._staged:
            self._pending = frozenset()
        return gathered._replace(end=self.bytes)

    def _complete(self, units: Iterable[int], frees: bool) -> Iterator[tuple[int, int]]:
        """Yields the units with the bytes that are gathered when each is complete."""
        for unit in units:
            if frees:
                self._gathered -= {unit}
            yield unit, self.bytes

    def _pre_backward(self, unit: int) -> int:
        """Copies a unit out, and gathers the one before ahead; returns the most bytes meanwhile, or 0."""
        most = self._begin_gather(unit)
        if unit in self._pending:
            most = max(most, self.bytes + self._sizes[unit].gathered)
            self._pending -= {unit}
            self._gathered |= {unit}
        # The order of forward passes begins with the first unit of the first pass.
        if unit not in self._before or (unit == self._passed[0] and self._unfinished[-1:] in ([], [0])):
            return most
        return max(most, self._begin_gather(self._before[unit]))


def last_backward(actions: Iterable[ScheduledAction]) -> dict[int, int]:
    """Returns the place of the last action of each stage that is no forward pass."""
    return {action.stage: n for n, action in enumerate(actions) if action.kind != "F"}


def gathered_by_action(stages: Mapping[int, GatheredUnits], actions: Iterable[ScheduledAction]) -> list[GatheredBytes]:
    order = list(actions)
    final = last_backward(order)
    by_action = []
    for n, action in enumerate(order):
        units = stages[action.stage]
        other_bytes = sum(unit.bytes for stage, unit in stages.items() if stage != action.stage)
        gathered = units.follow(action.kind == "F", final.get(action.stage) == n)
        by_action.append(gathered.with_other_stages(other_bytes) if other_bytes else gathered)
    return by_action
