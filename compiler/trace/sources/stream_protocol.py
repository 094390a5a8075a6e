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


def is_stream(user_object: object) -> bool:
    """True for what is read one sample after another."""
    kinds = {kind.__name__ for kind in type(user_object).__mro__ if kind.__module__.startswith("torch.utils.data")}
    if "DataLoader" in kinds:  # it gives batches
        return False
    if "IterableDataset" in kinds or (hasattr(user_object, "shards") and callable(getattr(user_object, "shard", None))):
        return True
    indexed = hasattr(user_object, "__len__") and hasattr(user_object, "__getitem__")
    return hasattr(user_object, "__iter__") and not indexed


class Shards:
    """The shards of a stream, numbered from 0. Raises StreamError."""

    def __init__(self, user_object: UserValue) -> None:
        if hasattr(user_object, "__next__") and iter(user_object) is user_object:
            raise StreamError(
                f"a `{type(user_object).__name__}` ends after one pass: give an object whose `__iter__` begins anew, "
                "or one with `shards` and `shard(n)`"
            )
        self._made, self._parts = user_object, callable(getattr(user_object, "shard", None))
        self._library = self._parts and hasattr(user_object, "num_shards")  # of Hugging Face
        name = "num_shards" if self._library else "shards"
        self.count: int = getattr(user_object, name) if self._parts else 1
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
        user_object = self._made
        if self._library:
            user_object = user_object.shard(num_shards=self.count, index=number) if self.count > 1 else user_object
        if hasattr(user_object, "set_epoch"):
            user_object.set_epoch(epoch)
        return Shard(user_object.shard(number) if self._parts and not self._library else user_object, state)


class Shard(Iterator[object]):
    """The samples of a shard, one after another."""

    def __init__(self, user_object: UserValue, state: UserValue = None) -> None:
        self._made = user_object
        if state is not None and hasattr(user_object, "load_state_dict"):
            user_object.load_state_dict(state)
            state = None
        self._iterator: UserValue = iter(user_object)
        if state is not None:
            self._iterator.load_state_dict(state)

    def __next__(self) -> UserValue:
        return next(self._iterator)

    def state(self) -> UserValue:
        """Returns the state after the samples so far, as JSON holds it; None if there is none."""
        for holder in (self._made, self._iterator):
            if hasattr(holder, "state_dict") and hasattr(holder, "load_state_dict"):
                user_state = holder.state_dict()
                try:
                    copy = json.loads(json.dumps(user_state))
                    return copy if copy == user_state else None
                except (TypeError, ValueError):
                    return None
        return None
