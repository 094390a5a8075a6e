"""Messages between two ranks over shared memory: a sender copies them into its segment, from where they are taken.

Model: each sender has a ring of descriptors for every receiver (shared_segment.py). A message is found by the order of
those with its tag. When it is taken, its descriptor says so, and the sender uses its place again.

Contract: a send never waits. While `DESCRIPTORS` messages to one receiver have not been taken, further ones are kept
back, and follow whenever the sender waits for anything in this group; a receiver that waits for anything copies what
has arrived. The messages of one tag are received in the order in which they were sent.
"""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Callable
from typing import TypeAlias

from torch import Tensor

from dslc.compiler.facts.hardware import DESCRIPTORS
from dslc.runtime.transport.shared_segment import (
    MESSAGE_BYTES,
    Descriptor,
    Segment,
    Word,
    has_reached,
    stored_bytes,
    wake,
    word_value,
)

Wait: TypeAlias = Callable[[Word, int, Segment], None]


class MessageStore:
    """The part of a rank's segment that holds what it has sent, and its peers have not taken."""

    def __init__(self, segment: Segment) -> None:
        self._content = segment.messages
        self._end = 0
        self._free: defaultdict[int, list[int]] = defaultdict(list)  # by size

    def store(self, tensor: Tensor) -> int:
        """Copies a tensor; returns its place."""
        size = stored_bytes(tensor)
        if self._free[size]:
            place = self._free[size].pop()
        else:
            place, self._end = self._end, self._end + size
            if self._end > MESSAGE_BYTES:
                raise RuntimeError(f"messages have reserved {MESSAGE_BYTES >> 30} GiB of shared memory")
        content = self._content[place : place + tensor.numel() * tensor.element_size()]
        content.view(tensor.dtype).view(tensor.shape).copy_(tensor.data)
        return place

    def release(self, place: int, size: int) -> None:
        self._free[size].append(place)


class Outbox:
    """Messages from a rank to one other rank. Messages that find no descriptor wait for one in the store."""

    def __init__(self, own: Segment, receiver: int, store: MessageStore) -> None:
        self._sent, self._descriptors = own.messages_sent[receiver], own.descriptors[receiver]
        self._store = store
        self._count = 0  # of messages that have a descriptor
        self._released = 0  # the first of them were taken, and their places are free
        self._waiting: deque[tuple[int, int, int, int]] = deque()  # tag, place, size and stored size of those without
        self._stored: deque[tuple[int, int, int]] = deque()  # number, place and stored size of messages not released

    def send(self, tensor: Tensor, tag: int) -> None:
        size = tensor.numel() * tensor.element_size()
        self._waiting.append((tag, self._store.store(tensor), size, stored_bytes(tensor)))
        self.advance()

    def advance(self) -> bool:
        """Gives descriptors to messages as far as there are any; returns True if some are left without."""
        while self._stored and self._descriptors[self._stored[0][0] % DESCRIPTORS].is_taken.value:
            number, place, size = self._stored.popleft()
            self._released = number + 1
            self._store.release(place, size)
        while self._waiting and (self._count - self._released < DESCRIPTORS):
            descriptor = self.next_descriptor
            descriptor.tag, descriptor.offset, descriptor.bytes, stored = self._waiting.popleft()
            descriptor.is_taken.value = 0
            self._stored.append((self._count, descriptor.offset, stored))
            self._count += 1
            self._sent.value = word_value(self._count)
            wake(self._sent)
        return bool(self._waiting)

    @property
    def next_descriptor(self) -> Descriptor:
        return self._descriptors[self._count % DESCRIPTORS]


class Inbox:
    """Messages to a rank from one other rank."""

    def __init__(self, sender: Segment, receiver: int, wait: Wait) -> None:
        self._sender, self._wait = sender, wait
        self._sent, self._descriptors = sender.messages_sent[receiver], sender.descriptors[receiver]
        self._messages = sender.messages
        self._seen = 0
        self._expected: defaultdict[int, int] = defaultdict(int)  # receives so far, by tag
        self._arrived: defaultdict[int, int] = defaultdict(int)  # messages seen so far, by tag
        self._early: dict[tuple[int, int], Tensor] = {}  # messages not asked for yet, in bytes, by tag and place

    def expect(self, tag: int) -> int:
        """Returns the place of the next message with a tag among those with it."""
        place = self._expected[tag]
        self._expected[tag] += 1
        return place

    def take(self, tensor: Tensor, tag: int, place: int) -> None:
        """Waits for the message, and copies it into a tensor. Others that arrive before it are kept."""
        while (tag, place) not in self._early:
            self._wait(self._sent, self._seen + 1, self._sender)
            if self._next((tag, place), tensor):
                return
        _copy(self._early.pop((tag, place)), tensor)

    def relieve(self) -> bool:
        """Keeps messages that have arrived, where they take half of the descriptors; returns True if there were any."""
        began = self._seen
        while has_reached(self._sent.value, self._seen + DESCRIPTORS // 2):
            self._next(None, None)
        return self._seen > began

    def _next(self, key: tuple[int, int] | None, tensor: Tensor | None) -> bool:
        """Copies the next message into `tensor` if it has this tag and place, and keeps it if not; returns True if it
        has.
        """
        descriptor = self._descriptors[self._seen % DESCRIPTORS]
        arrived = descriptor.tag, self._arrived[descriptor.tag]
        content = self._messages[descriptor.offset : descriptor.offset + descriptor.bytes]
        if arrived == key and tensor is not None:
            _copy(content, tensor)
        else:
            self._early[arrived] = content.clone()
        self._seen += 1
        self._arrived[arrived[0]] += 1
        descriptor.is_taken.value = 1
        wake(descriptor.is_taken)
        return arrived == key


def _copy(content: Tensor, tensor: Tensor) -> None:
    """Copies the bytes of a message into a tensor of as many."""
    if (size := tensor.numel() * tensor.element_size()) != content.numel():
        raise RuntimeError(f"a message of {content.numel()} bytes arrived for a tensor of {size} bytes")
    tensor.data.copy_(content.view(tensor.dtype).view(tensor.shape))
