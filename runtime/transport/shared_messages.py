"""Messages between two ranks over shared memory: a sender copies into its room, and the receiver takes it from there.

Model: each sender has a ring of descriptors for every receiver (shared_segment.py). A message is found by the order of
those with its tag. When it is taken, its descriptor says so, and the sender uses its room again.

Contract: sending waits only where `DESCRIPTORS` messages to one receiver have not been taken. The messages of one tag
are received in the order in which they were sent.
"""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Callable
from typing import TypeAlias

from torch import Tensor

from dslc.runtime.transport.shared_segment import DESCRIPTORS, ROOM, Segment, Word, room_of, wake, word_value

Wait: TypeAlias = Callable[[Word, int, Segment], None]


class Room:
    """The part of a rank's segment that holds what it has sent, and its peers have not taken."""

    def __init__(self, segment: Segment) -> None:
        self._content = segment.room
        self._end = 0
        self._free: defaultdict[int, list[int]] = defaultdict(list)  # by size

    def store(self, tensor: Tensor) -> int:
        """Copies a tensor; returns its place."""
        size = room_of(tensor)
        if self._free[size]:
            place = self._free[size].pop()
        else:
            place, self._end = self._end, self._end + size
            if self._end > ROOM:
                raise RuntimeError(f"messages of {ROOM >> 30} GiB in shared memory wait to be received")
        _content(self._content, place, tensor).copy_(tensor.data)
        return place

    def release(self, place: int, size: int) -> None:
        self._free[size].append(place)


class Outbox:
    """What a rank sends to one other."""

    def __init__(self, own: Segment, to: Segment, receiver: int, room: Room, wait: Wait) -> None:
        self._sent, self._descriptors = own.sent[receiver], own.descriptors[receiver]
        self._to, self._room, self._wait = to, room, wait
        self._count = 0
        self._held: deque[tuple[int, int, int]] = deque()  # number, place and size of messages in the room

    def send(self, tensor: Tensor, tag: int) -> None:
        descriptor = self._descriptors[self._count % DESCRIPTORS]
        if self._count >= DESCRIPTORS:
            self._wait(descriptor.taken, 1, self._to)
        while self._held and self._descriptors[self._held[0][0] % DESCRIPTORS].taken.value:
            _, place, size = self._held.popleft()
            self._room.release(place, size)
        place = self._room.store(tensor)
        self._held.append((self._count, place, room_of(tensor)))
        descriptor.tag, descriptor.offset = tag, place
        descriptor.bytes = tensor.numel() * tensor.element_size()
        descriptor.taken.value = 0
        self._count += 1
        self._sent.value = word_value(self._count)
        wake(self._sent)


class Inbox:
    """What a rank receives from one other."""

    def __init__(self, sender: Segment, receiver: int, wait: Wait) -> None:
        self._sender, self._wait = sender, wait
        self._sent, self._descriptors = sender.sent[receiver], sender.descriptors[receiver]
        self._room = sender.room
        self._seen = 0
        self._expected: defaultdict[int, int] = defaultdict(int)  # receives so far, by tag
        self._arrived: defaultdict[int, int] = defaultdict(int)  # messages seen so far, by tag
        self._numbers: dict[tuple[int, int], int] = {}  # of messages seen and not taken, by tag and place

    def expect(self, tag: int) -> int:
        """Returns the place of the next message with a tag among those with it."""
        place = self._expected[tag]
        self._expected[tag] += 1
        return place

    def take(self, tensor: Tensor, tag: int, place: int) -> None:
        """Waits for the message, and copies it into a tensor."""
        while (tag, place) not in self._numbers:
            self._wait(self._sent, self._seen + 1, self._sender)
            arrived = self._descriptors[self._seen % DESCRIPTORS].tag
            self._numbers[arrived, self._arrived[arrived]] = self._seen
            self._arrived[arrived] += 1
            self._seen += 1
        descriptor = self._descriptors[self._numbers.pop((tag, place)) % DESCRIPTORS]
        if (size := tensor.numel() * tensor.element_size()) != descriptor.bytes:
            raise RuntimeError(f"a message of {descriptor.bytes} bytes arrived for a tensor of {size} bytes")
        tensor.data.copy_(_content(self._room, descriptor.offset, tensor))
        descriptor.taken.value = 1
        wake(descriptor.taken)


def _content(room: Tensor, place: int, like: Tensor) -> Tensor:
    """Returns the part of a room from a place on that holds a tensor like another."""
    return room[place : place + like.numel() * like.element_size()].view(like.dtype).view(like.shape)
