"""Bytes of gradients, gathers and scatters, as a step goes through the layers of a rank.

Both engines are entered and left layer by layer: `forward(n)`, then `backward(n, moment)` and `leave(n)` from the last
layer to the first; each returns the bytes of existing gradients. `communication` and `passing` are the bytes gathered
and scattered at that moment, the latter only while a collective is running; `beside` are the bytes of gradients that
are made to be added to other gradients, or copied.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from dslc.compiler.ir.memory import WorkingSet


@dataclass(kw_only=True)
class UnshardedMemory:
    """One process, or DistributedDataParallel with or without ZeRO-1: parameters and gradients are whole on each
    rank.
    """

    trains: list[int]  # numbers, by layer
    buckets: bool  # DistributedDataParallel's, which stay and hold the gradients after the exchange
    earlier: bool  # gradients of earlier micro-batches exist, beside the buckets
    held: bool  # a micro-batch after which nothing is exchanged

    communication = passing = 0
    beside = 0

    def __post_init__(self) -> None:
        self._all = 4 * sum(self.trains)
        self._made = 0

    def forward(self, layer: int) -> int:
        """Enters a layer; returns bytes of gradients."""
        return self._all * (self.buckets + self.earlier)

    def turn(self) -> int:
        """Turns from the forward to the backward pass."""
        return self.forward(0)

    def backward(self, layer: int, moment: WorkingSet) -> int:
        """Returns the same in a moment of the layer's backward pass."""
        # Under autocast a 16-bit copy exists besides; the weight's own copy, as large, is freed by then.
        if not self.earlier and (self.held or not self.buckets):
            self.beside = 4 * moment.copies
            return self._all * self.buckets + self._made + 4 * moment.made
        # A gradient is made beside the tensor that it is copied into, or added to; those copied to buckets are freed.
        taken = self._made if self.earlier and self.buckets and not self.held else 0
        self.beside = 4 * (moment.weights + moment.copies)
        return self._all * (self.buckets + self.earlier) - taken

    def leave(self, layer: int) -> Iterator[int]:
        """Leaves a layer in the backward pass; yields bytes of gradients while a completed unit is scattered."""
        self._made += 4 * self.trains[layer]
        yield from ()

    def update(self) -> int:
        return self._all


@dataclass(kw_only=True)
class ShardedMemory:
    """`fully_shard`: a unit is gathered for its layers, and its gradients scattered when these are done.

    A gathered unit exists twice while it is copied out: as the collective's buffer and parameter by parameter. Forward
    the buffer is freed when the next unit is gathered; backward at once, when the unit before is prefetched already.
    The input of a reduce-scatter is freed when the next begins. The root, and a unit whose input has no gradient, stay
    until the end.

    All units of a stage are gathered ahead of its first action. A forward pass frees them one by one, a backward pass
    none before the last micro-batch is done.
    """

    unit_of: list[int]  # by layer; the last unit is the root
    trains: list[int]  # numbers, by layer
    whole: list[int]  # padded numbers, by unit
    shard: list[int]
    parts: int
    element: int  # bytes of a gathered number, and of a new gradient
    reshard: bool
    accumulate: bool
    stays: bool  # gradients of earlier micro-batches exist
    held: bool  # a micro-batch that is not the last: gathered units stay
    copies: bool  # gloo copies its input
    rounded: bool = False  # gradients are summed in 16 bits
    moved: bool  # shards are in the host's memory: gradients' go there at once
    staged: bool = False  # a stage of a pipeline

    def __post_init__(self) -> None:
        self.beside = 0
        self.passing = 0  # bytes of a running collective
        self._root = len(self.whole) - 1
        self._gathered = {self._root}
        self._flat = self._root if self.parts > 1 else None
        self._handed: int | None = None
        # Running sums: gathered numbers, existing shards, and whole gradients of earlier micro-batches.
        self._there = self.whole[self._root]
        self._shards = sum(self.shard) if self.stays and not self.accumulate and not self.moved else 0
        self._summed = [self.parts * numbers for numbers in self.shard]  # of gradients, by unit
        self._earlier = sum(self._summed) if self.stays and self.accumulate else 0
        self._of_unit = [0] * len(self.whole)
        for unit, numbers in zip(self.unit_of, self.trains, strict=True):
            self._of_unit[unit] += numbers
        self._made = 0  # numbers of gradients of units that are not scattered yet
        if self.staged:
            self._gathered, self._there, self._flat = set(range(len(self.whole))), sum(self.whole), None

    @property
    def communication(self) -> int:
        flat = self.element * self.whole[self._flat] if self._flat is not None else 0
        if self.moved and self._flat is not None:
            flat += 4 * self.shard[self._flat]  # copied from the host to be gathered
        handed = 4 * self._summed[self._handed] if self._handed is not None else 0
        return self.element * self._there + flat + handed

    def _gradients(self, made: int) -> int:
        return 4 * (self._earlier + self._shards) + self.element * made

    def _gather(self, unit: int) -> bool:
        if unit in self._gathered:
            return False
        if self.reshard and not self.staged:
            self._only_root()
        self._gathered.add(unit)
        self._there += self.whole[unit]
        return True

    def _let_go(self, unit: int) -> None:
        if unit in self._gathered:
            self._gathered.discard(unit)
            self._there -= self.whole[unit]

    def _only_root(self) -> None:
        self._gathered, self._there = {self._root}, self.whole[self._root]

    def forward(self, layer: int) -> int:
        if self.staged and self.reshard and layer and self.unit_of[layer - 1] not in (self._root, self.unit_of[layer]):
            self._let_go(self.unit_of[layer - 1])
        if self.stays and not self.reshard:  # from the first micro-batch on
            if len(self._gathered) < len(self.whole):
                self._gathered, self._there, self._flat = set(range(len(self.whole))), sum(self.whole), None
        elif self._gather(self.unit_of[layer]) and self.parts > 1:
            self._flat = self.unit_of[layer]
        return self._gradients(0)

    def turn(self) -> int:
        """Turns from the forward to the backward pass, which frees the unit gathered last; returns bytes of
        gradients.
        """
        if self.reshard:
            self._only_root()
        self._flat = None
        return self._gradients(0)

    def backward(self, layer: int, moment: WorkingSet) -> int:
        unit = self.unit_of[layer]
        self.passing = 0
        begins = unit == self._root and self._gathered == {self._root} and self._flat is None
        if (self._gather(unit) or begins) and self.reshard and self.parts > 1:
            self._flat = unit - 1 if unit > 0 else None
            if self._flat is not None and self.copies:
                self.passing = self.element * self.whole[self._flat]
        added = self.accumulate and self.stays and self.element == 4  # added to earlier micro-batches' at once
        own = moment.weights if added else self._made + moment.made
        return self._gradients(own) + self.element * moment.copies

    def leave(self, layer: int) -> Iterator[int]:
        unit = self.unit_of[layer]
        self._made += self.trains[layer]
        if layer == 0:
            for late in dict.fromkeys((self._root, unit)):
                yield from self._scatter(late)
        elif unit != self._root and self.unit_of[layer - 1] != unit:
            yield from self._scatter(unit)

    def _scatter(self, unit: int) -> Iterator[int]:
        """Yields first the gradients beside the collective's input, then the input beside its result."""
        accumulated = self.accumulate and self.stays
        if not self.held or (self.reshard and not self.staged):
            self._let_go(unit)
        if self.held and self.accumulate:
            if self.element == 2:
                yield from self._widen(unit)
            return
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
        self._gathered, self._there, self._flat, self._handed = set(), 0, None, None
        return 0 if self.moved else 4 * sum(self.shard)
