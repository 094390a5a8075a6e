"""Streams: samples that come one after another from fixed shards, in an order that the ranks do not change.

Model: pass `e` reads the shards in the order of a permutation that follows from (seed, e), dealt out to `lanes`: lane
`l` reads every `lanes`-th of them from the `l`-th on, and then goes on to its next pass by itself. A lane shuffles
`window` samples at a time, of one pass: while it gives the samples of a window it reads the next window, so that it
holds at most two. A global batch takes equally many samples from each lane, lane 0 first. So a rank reads only the
lanes of its share. Sample number `k * batch + j` is entry `j` of global batch `k`.

Contract: the sample of a number is a function of the seed and the stream, whatever the ranks and workers, and wherever
the training began. A resumed training goes to where a lane's present window began, by the state of the shard or by
reading that shard again. It reads at most one window that was given before.

Limits: lanes whose shards are of unequal length get ahead of each other; each pass has every sample once all the same.
"""

from __future__ import annotations

import time
from bisect import bisect_right
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate
from typing import ClassVar

import torch
from torch import Tensor

from dslc.compiler.ir.program import DataStep, StreamStep
from dslc.compiler.trace.sources.stream_protocol import Shard, Shards
from dslc.compiler.trace.structures import Structure
from dslc.runtime.data.samples import Marks, Pair, SourceError, Tell
from dslc.runtime.process.random_numbers import begin_sample, generator

UNSHUFFLED = 16  # samples of a window that is not shuffled
TELLS = 5.0  # seconds after which reading again is reported, and between reports


@dataclass(frozen=True, kw_only=True)
class StreamPosition:
    """A place in a lane: in pass `epoch`, after `read` samples of its shard `at` and `count` of the pass; `state` is
    the shard's own. `given` samples of the window that begins there were given, `drawn` in all.
    """

    epoch: int = 0
    at: int = 0
    read: int = 0
    count: int = 0
    state: object = None
    given: int = 0
    drawn: int = 0


class _Reader:
    """The samples of a lane as they come from its shards, pass after pass."""

    def __init__(self, stream: Stream, lane: int, mark: StreamPosition) -> None:
        self._stream, self._lane = stream, lane
        self._epoch, self._at, self._read, self._count = mark.epoch, mark.at, mark.read, mark.count
        self._shard: Shard | None = None
        self._empty = 0  # shards without samples, one after another
        self._order = stream.order(lane, mark.epoch)
        if mark.read:
            self._open(mark.state)
            if mark.state is None:
                self._replay_samples(mark.read)

    def mark(self) -> StreamPosition:
        state = self._shard.state() if self._shard is not None and self._read else None
        return StreamPosition(epoch=self._epoch, at=self._at, read=self._read, count=self._count, state=state)

    def next(self) -> tuple[object] | None:
        """Returns the next sample, in a tuple; None at the end of a pass."""
        while self._at < len(self._order):
            if self._shard is None:
                self._open()
            found = self._sample(self._read)
            if found is not None:
                self._read, self._count, self._empty = self._read + 1, self._count + 1, 0
                return found
            self._empty = 0 if self._read else self._empty + 1
            if self._empty >= 2 * self._stream.shards.count:
                raise self._stream.exhausted_error(self._order[self._at], self._epoch)
            self._shard, self._read, self._at = None, 0, self._at + 1
        self._stream.passed(self._epoch, self._count)
        self._epoch, self._at, self._count = self._epoch + 1, 0, 0
        self._order = self._stream.order(self._lane, self._epoch)
        return None

    def _open(self, state: object = None) -> None:
        begin_sample(*self._seed(0))
        try:
            self._shard = self._stream.shards.open(self._order[self._at], self._epoch, state)
        except BaseException as error:  # any kind: the user's code runs
            self._note_place(error)
            raise

    def _sample(self, number: int) -> tuple[object] | None:
        assert self._shard is not None
        begin_sample(*self._seed(number + 1))
        try:
            return (next(self._shard),)
        except StopIteration:
            return None
        except BaseException as error:  # any kind: the user's code runs
            self._note_place(error)
            raise

    def _replay_samples(self, samples: int) -> None:
        """Reads the samples that came before."""
        told = time.monotonic()
        for number in range(samples):
            if self._sample(number) is None:
                raise SourceError(
                    f"{self._stream.line}: shard {self._order[self._at]} of the stream ends after {number} samples, "
                    f"and had {samples} when the checkpoint was written"
                )
            if time.monotonic() - told > TELLS:
                told = time.monotonic()
                self._stream.tell(f"reads shard {self._order[self._at]} again: {number:,} of {samples:,} samples")

    def _seed(self, number: int) -> tuple[int, str, int, int]:
        shard = self._order[self._at]
        return self._stream.seed, f"{self._stream.part} shard {shard}", self._epoch, number

    def _note_place(self, error: BaseException) -> None:
        error.add_note(f"shard {self._order[self._at]} of the stream, after {self._read} samples of it")


class _Lane:
    """The samples of a lane in the order in which batches take them."""

    def __init__(self, stream: Stream, lane: int, mark: StreamPosition) -> None:
        self._stream, self._lane = stream, lane
        self._reader = _Reader(stream, lane, replace(mark, given=0, drawn=0))
        self._begin, self._coming_begin = self._reader.mark(), self._reader.mark()
        self._window: list[object] = []
        self._coming: list[object] = []
        self._ended = False  # the coming window ends with its pass
        self._order: list[int] = []
        self._given = 0
        self.drawn = mark.drawn
        if mark.given:
            self._turn()
            self._given = mark.given

    def mark(self) -> StreamPosition:
        if self._given == len(self._window):  # the place is the beginning of the next
            return replace(self._coming_begin, drawn=self.drawn)
        return replace(self._begin, given=self._given, drawn=self.drawn)

    def draw(self) -> object:
        if self._given == len(self._window):
            self._turn()
        elif len(self._coming) < self._stream.window and not self._ended:
            self._read_item()
        place = self._order[self._given]
        sample, self._window[place] = self._window[place], None
        self._given += 1
        self.drawn += 1
        return sample

    def _read_item(self) -> None:
        found = self._reader.next()
        if found is not None:
            self._coming.append(found[0])
        elif self._coming:
            self._ended = True
        else:  # the last window ended with its pass
            self._coming_begin = self._reader.mark()

    def _turn(self) -> None:
        while len(self._coming) < self._stream.window and not self._ended:
            self._read_item()
        self._begin, self._window, self._given = self._coming_begin, self._coming, 0
        self._coming, self._ended, self._coming_begin = [], False, self._reader.mark()
        self._order = self._stream.order_of_window(self._lane, self._begin, len(self._window))


@dataclass
class Stream:
    """The samples of a stream by their numbers, read in ascending order. `together` makes some of them a batch."""

    shards: Shards
    step: StreamStep
    batch_size: int
    length: int  # samples that have a number, of one epoch of the sampler
    seed: int
    shuffle: bool
    together: Callable[[list[Structure]], Pair]
    line: str
    is_structure: bool = False
    part: str = "train"
    starts: tuple[int, ...] = ()  # the number of each shard's first sample, where it is known and nothing is shuffled
    by_process: ClassVar[bool] = True

    def __post_init__(self) -> None:
        self.window = max(1, self.step.window // self.step.lanes) if self.shuffle else UNSHUFFLED
        self._lanes: dict[int, _Lane] = {}
        self._begin: dict[int, StreamPosition] = {}
        self.tell: Tell = print
        if self.shards.count != self.step.shards:
            raise SourceError(
                f"{self.line}: the stream has {self.shards.count} shards, and the plan was made for {self.step.shards}"
            )

    def __len__(self) -> int:
        return self.length

    def batch(self, indices: Tensor, epoch: int = 0) -> Pair:
        first = epoch * (self.length // self.batch_size * self.batch_size)
        return self.together([self._sample(first + number) for number in indices.tolist()])

    def items(self, numbers: Sequence[int]) -> Iterator[Structure]:
        """Yields samples as the stream gives them, by ascending numbers over all passes."""
        for number in numbers:
            yield self._sample(number)

    def marks(self) -> Marks:
        """Returns the places of the lanes that have been read."""
        return {str(number): dict(vars(lane.mark())) for number, lane in self._lanes.items()}

    def go_to(self, marks: Marks, tell: Tell) -> None:
        """Begins each lane at a place that `marks` returned, and tells where that takes long."""
        self.tell = tell
        self._begin = {int(number): StreamPosition(**mark) for number, mark in marks.items()}

    def _sample(self, number: int) -> Structure:
        each = self.batch_size // self.step.lanes
        k, j = divmod(number, self.batch_size)
        lane, i = divmod(j, each)
        wanted = k * each + i
        reading = self._lanes.get(lane)
        if reading is None or reading.drawn > wanted or self._nearest_start(wanted) > reading.drawn:
            reading = self._lanes[lane] = _Lane(self, lane, self._place(lane, wanted))
        told = time.monotonic()
        while reading.drawn < wanted:
            reading.draw()
            if time.monotonic() - told > TELLS:
                told = time.monotonic()
                self.tell(f"reads the stream again: {reading.drawn:,} of {wanted:,} samples")
        return reading.draw()

    def _place(self, lane: int, wanted: int) -> StreamPosition:
        """Returns the last known place before a sample of a lane."""
        known = self._begin.get(lane, StreamPosition())
        if known.drawn <= wanted and known.drawn:
            return known
        before = self._nearest_start(wanted)
        return StreamPosition(at=self.starts.index(before), count=before, drawn=before) if before else StreamPosition()

    def _nearest_start(self, wanted: int) -> int:
        """Returns the number of the last shard's first sample that is known, up to `wanted`."""
        return self.starts[bisect_right(self.starts, wanted) - 1] if self.starts else 0

    # ----------------------------------------------------------------------------------------------- for the lanes

    def order(self, lane: int, epoch: int) -> list[int]:
        """Returns the shards that a lane reads in a pass."""
        count = self.shards.count
        if not self.shuffle:
            return list(range(lane, count, self.step.lanes))
        mixed = torch.randperm(count, generator=generator(self.seed, f"shards of epoch {epoch}"))
        found: list[int] = mixed[lane :: self.step.lanes].tolist()
        return found

    def order_of_window(self, lane: int, begin: StreamPosition, size: int) -> list[int]:
        if not self.shuffle or self.window == 1:
            return list(range(size))
        random = generator(self.seed, f"epoch {begin.epoch}, lane {lane}, sample {begin.count}")
        found: list[int] = torch.randperm(size, generator=random).tolist()
        return found

    def passed(self, epoch: int, count: int) -> None:
        """Hears of the end of a pass of a lane."""
        if count < self.step.length and self.step.lanes == 1:
            raise SourceError(
                f"{self.line}: the stream ends early: pass {epoch + 1} has {count:,} samples, and the plan has "
                f"{self.step.length:,}"
            )

    def exhausted_error(self, shard: int, epoch: int) -> SourceError:
        why = "" if not epoch else ": where a stream ends after one pass, `shard(n)` or `__iter__` has to begin anew"
        return SourceError(
            f"{self.line}: the stream gives no more samples: shard {shard} has none in pass {epoch + 1}{why}"
        )


def stream_samples(
    step: DataStep, shards: Shards, part: str, together: Callable[[list[object]], Pair], *, is_structure: bool = False
) -> Stream:
    """Returns the training samples of a stream, or the samples of a stream that is the validation split, in order."""
    order = step.stream
    assert order is not None
    held = order.held
    train = part == "train"
    if not train:
        order = StreamStep(shards=len(held), lanes=1, window=0, length=step.validation_samples)
    return Stream(
        shards=shards,
        step=order,
        batch_size=step.batch,
        length=step.train_samples if train else step.validation_samples,
        seed=step.seed,
        shuffle=step.shuffle and train,
        together=together,
        line=step.line,
        is_structure=is_structure,
        part=part,
        starts=() if train else tuple(accumulate(held, initial=0))[:-1],
    )
