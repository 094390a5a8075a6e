"""Bytes of gradients, gathers and scatters, as a step goes through the layers of a rank.

Both engines are entered and left layer by layer: `forward(n)`, then `backward(n, moment)` and `leave(n, last)` in the
order of the backward pass; each returns the bytes of existing gradients. `communication` and `passing` are the bytes
gathered and scattered at that moment, the latter only while a collective is running; `beside` are the bytes of
gradients that are made to be added to other gradients, or copied.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from dslc.compiler.cost.gathered_units import GatheredBytes
from dslc.compiler.ir.memory import WorkingSet

IDLE = WorkingSet(0, 0, 0, 0)  # a moment without work


@dataclass(kw_only=True)
class UnshardedMemory:
    """One process, or DistributedDataParallel with or without ZeRO-1: parameters and gradients are whole on each
    rank.
    """

    trains: list[int]  # numbers, by layer
    buckets: bool  # DistributedDataParallel's, which stay and hold the gradients after the exchange
    earlier: bool  # gradients of earlier micro-batches exist, beside the buckets
    held: bool  # a micro-batch after which nothing is exchanged
    staged: bool  # by a stage of a pipeline: each action begins with the gradients of its stage, beside others'

    communication = passing = 0
    beside = 0

    def __post_init__(self) -> None:
        self._all = 4 * sum(self.trains)
        self._made = self._others = 0

    def begin(self, gathered: GatheredBytes | None, layers: range, other_gradients: int) -> int:
        """Begins an action of the stage with these layers, beside `other_gradients`, bytes of other stages; returns
        bytes of gradients.
        """
        if self.staged:
            self._all = 4 * sum(self.trains[n] for n in layers)
            self._made, self._others = 0, other_gradients
        return self.backward(layers.start, IDLE)

    def end(self) -> None:
        """Ends a forward pass."""

    def forward(self, layer: int) -> int:
        """Enters a layer; returns bytes of gradients."""
        return self._others + self._all * (self.buckets + self.earlier)

    def backward(self, layer: int, moment: WorkingSet) -> int:
        """Returns the same in a moment of the layer's backward pass."""
        # Under autocast a 16-bit copy exists besides; the weight's own copy, as large, is freed by then.
        if not self.earlier and (self.held or not self.buckets):
            self.beside = 4 * moment.copies
            return self._others + self._all * self.buckets + self._made + 4 * moment.made
        # A gradient is made beside the tensor that it is copied into, or added to; those copied to buckets are freed.
        freed = self._made if self.earlier and self.buckets and not self.held else 0
        self.beside = 4 * (moment.weights + moment.copies)
        return self._others + self._all * (self.buckets + self.earlier) - freed

    def leave(self, layer: int, is_final: bool) -> Iterator[int]:
        """Leaves a layer in the backward pass; yields bytes of gradients while a completed unit is scattered.
        `is_final`: the action ends.
        """
        self._made += 4 * self.trains[layer]
        yield from ()

    def update(self) -> int:
        return self._all


@dataclass(kw_only=True)
class ShardedMemory:
    """`fully_shard`: a unit is gathered for its layers (gathered_units.py), and its gradients are scattered when these
    are done; at a stage of a pipeline after its last backward pass. The input of a reduce-scatter is freed when the
    next begins, or at the end of the backward pass.
    """

    unit_of: list[int]  # by layer
    trains: list[int]  # numbers, by layer
    shard: list[int]  # numbers that train, by unit
    summed: list[int]  # of gradients that are summed together, by unit
    parts: int
    element: int  # bytes of a new gradient
    accumulate: bool
    stays: bool  # gradients of earlier micro-batches exist
    held: bool  # a micro-batch that is not the last
    copies: bool  # gloo copies its input
    staged: bool  # by a stage of a pipeline: each action begins with the gradients of its stage, beside others'
    rounded: bool = False  # gradients are summed in 16 bits
    moved: bool  # shards are in the host's memory: gradients' go there at once

    def __post_init__(self) -> None:
        self.beside = self._others = 0  # the latter of other stages
        self.passing = 0  # bytes of a running collective
        self._level = 0  # gathered bytes
        self._handed: int | None = None
        # Running sums: existing shards, and whole gradients of earlier micro-batches.
        self._shards = sum(self.shard) if self.stays and not self.accumulate and not self.moved else 0
        self._summed = self.summed
        self._earlier = sum(self._summed) if self.stays and self.accumulate else 0
        self._of_unit = [0] * len(self.shard)
        for unit, numbers in zip(self.unit_of, self.trains, strict=True):
            self._of_unit[unit] += numbers
        self._made = 0  # numbers of gradients of units that are not scattered yet

    @property
    def communication(self) -> int:
        handed = 4 * self._summed[self._handed] if self._handed is not None else 0
        return self._level + handed

    def _gradients(self, new_numbers: int) -> int:
        return self._others + 4 * (self._earlier + self._shards) + self.element * new_numbers

    def begin(self, gathered: GatheredBytes | None, layers: range, other_gradients: int) -> int:
        """Begins an action of the stage with these layers; `other_gradients` are bytes of other stages' gradients."""
        assert gathered is not None
        self._action, self._first = gathered, layers.start
        self._level, self.passing = gathered.begin, 0
        if self.staged:
            units = {self.unit_of[n] for n in layers}
            self._earlier = sum(self._summed[unit] for unit in units) if self.stays else 0
            self._others, self._shards, self._made, self._handed = other_gradients, 0, 0, None
        return self._gradient_bytes(IDLE)

    def end(self) -> None:
        self._level, self.passing = self._action.end, 0

    def _enter(self, layer: int) -> None:
        n = layer - self._first
        self._level = self._action.during[n]
        self.passing = max(0, self._action.gathering[n] - self._level)

    def forward(self, layer: int) -> int:
        self._enter(layer)
        return self._gradients(0)

    def backward(self, layer: int, moment: WorkingSet) -> int:
        self._enter(layer)
        return self._gradient_bytes(moment)

    def _gradient_bytes(self, moment: WorkingSet) -> int:
        added = self.accumulate and self.stays and self.element == 4  # added to earlier micro-batches' at once
        numbers = moment.weights if added else self._made + moment.made
        return self._gradients(numbers) + self.element * moment.copies

    def leave(self, layer: int, is_final: bool) -> Iterator[int]:
        self._made += self.trains[layer]
        self.passing = 0
        complete = self._action.done[layer - self._first]
        if is_final:
            complete += self._action.late
        for unit, level in complete:
            self._level = level
            yield from self._complete(unit, self.held or self.staged)
        for unit, level in self._action.reduced if is_final else ():
            self._level = level
            yield from self._scatter(unit)

    def _complete(self, unit: int, waits: bool) -> Iterator[int]:
        """Completes the gradients of a unit in a micro-batch; `waits`: they are scattered later."""
        if not (waits and self.accumulate):
            yield from self._scatter(unit)
        elif self.element == 2:
            yield from self._widen(unit)

    def _scatter(self, unit: int) -> Iterator[int]:
        """Yields first the gradients beside the collective's input, then the input beside its result."""
        accumulated = self.accumulate and self.stays
        self._handed = unit
        yield self._gradients(0 if accumulated else self._made)
        if accumulated:
            self._earlier -= self._summed[unit]
        if (not self.stays or self.accumulate) and not self.moved:
            self._shards += self.shard[unit]
        self._made -= self._of_unit[unit]
        if self.rounded and self.parts > 1:
            self.passing = 2 * (self._summed[unit] * (1 + self.copies) + self.shard[unit])
        else:  # a single rank divides instead of scattering
            self.passing = 4 * self._summed[unit] if self.copies or self.parts == 1 else 0
        added = 4 * self.shard[unit] if self.moved or (self.stays and not self.accumulate) else 0
        yield self._gradients(0 if accumulated else self._made) + added
        self.passing = 0

    def _widen(self, unit: int) -> Iterator[int]:
        """Yields while 16-bit gradients are added up in float32, once the unit is done."""
        if not self.stays:
            yield self._gradients(self._made) + 4 * self._of_unit[unit]
            self._earlier += self._of_unit[unit]
        self._made -= self._of_unit[unit]

    def update(self) -> int:
        self._level, self._handed = 0, None
        return 0 if self.moved else 4 * sum(self.shard)
