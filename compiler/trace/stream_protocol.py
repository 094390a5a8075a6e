"""A user's stream as shards: samples that come one after another, in a number that is not known.

Model: three kinds of objects are streams: torch's `IterableDataset`, which is one shard; a stream of Hugging Face's
`datasets`, with the shards that it has; any object with a number `shards` and a method `shard(n)`, which returns
something to iterate over. A stream may have `set_epoch(epoch)`, which is called before each pass.

Contract: a shard is read from its beginning, or from a state: the `state_dict()` of what is iterated over, or of its
iterator, if JSON holds it. A shard without states is read again up to the sample.

Limits: an object that can be iterated over only once is no stream.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from dslc.compiler.trace.structures import UserValue


class StreamError(ValueError):
    """An object that cannot be read as a stream."""


def is_stream(made: object) -> bool:
    """True for what is read one sample after another."""
    kinds = {kind.__name__ for kind in type(made).__mro__ if kind.__module__.startswith("torch.utils.data")}
    if "DataLoader" in kinds:  # it gives batches
        return False
    if "IterableDataset" in kinds or (hasattr(made, "shards") and callable(getattr(made, "shard", None))):
        return True
    indexed = hasattr(made, "__len__") and hasattr(made, "__getitem__")
    return hasattr(made, "__iter__") and not indexed


class Shards:
    """The shards of a stream, numbered from 0. Raises StreamError."""

    def __init__(self, made: UserValue) -> None:
        if hasattr(made, "__next__") and iter(made) is made:
            raise StreamError(
                f"a `{type(made).__name__}` ends after one pass: give an object whose `__iter__` begins anew, or one "
                "with `shards` and `shard(n)`"
            )
        self._made, self._parts = made, callable(getattr(made, "shard", None))
        self._library = self._parts and hasattr(made, "num_shards")  # of Hugging Face
        name = "num_shards" if self._library else "shards"
        self.count: int = getattr(made, name) if self._parts else 1
        if isinstance(self.count, bool) or not isinstance(self.count, int) or self.count < 1:
            raise StreamError(f"`{name}` of the stream is {self.count!r}: it has to be a whole number from 1 up")

    @property
    def length(self) -> int | None:
        """The samples of a pass, if the stream says it."""
        try:
            return len(self._made)
        except (TypeError, NotImplementedError):  # Python's way to have none, and Hugging Face's
            return None

    def open(self, number: int, epoch: int, state: UserValue = None) -> Shard:
        """Returns shard `number` in pass `epoch`, from its beginning or from a state."""
        made = self._made
        if self._library:
            made = made.shard(num_shards=self.count, index=number) if self.count > 1 else made
        if hasattr(made, "set_epoch"):
            made.set_epoch(epoch)
        return Shard(made.shard(number) if self._parts and not self._library else made, state)


class Shard(Iterator[object]):
    """The samples of a shard, one after another."""

    def __init__(self, made: UserValue, state: UserValue = None) -> None:
        self._made = made
        if state is not None and hasattr(made, "load_state_dict"):
            made.load_state_dict(state)
            state = None
        self._iterator: UserValue = iter(made)
        if state is not None:
            self._iterator.load_state_dict(state)

    def __next__(self) -> UserValue:
        return next(self._iterator)

    def state(self) -> UserValue:
        """Returns the state after the samples so far, as JSON holds it; None if there is none."""
        for holder in (self._made, self._iterator):
            if hasattr(holder, "state_dict") and hasattr(holder, "load_state_dict"):
                found = holder.state_dict()
                try:
                    copy = json.loads(json.dumps(found))
                    return copy if copy == found else None
                except (TypeError, ValueError):
                    return None
        return None
