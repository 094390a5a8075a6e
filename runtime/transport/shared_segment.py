"""Memory that the ranks of a group on one host share: a segment for each rank, which its peers map.

Model: a rank makes a file without a name, in memory, and writes into a store where its peers find it: below its process
in /proc. They open it there and map it. At the front of a segment stand 32-bit words that only one rank writes; a rank
that waits for a word sleeps in the kernel (a futex). Behind them are the slots, which carry collectives piece by piece,
and the room for messages; only its used part takes memory.

Contract: nothing of a segment is left after the processes that map it, however they end, and no other user can open it.
`open_segments` returns None on every rank of a group if it does so on one, as it does where the ranks are on several
hosts. A rank that waits for one that has ended raises, and so it does after its timeout.

Limits: Linux on x86-64, where a rank sees the writes of another in their order, without barriers. Errors have the words
of gloo's, by which a failure is known for a lost connection or a timeout (process/failure.py). The account of a plan
has the segments that a rank makes (compiler/facts/hardware.py), and leaves its messages out.
"""

from __future__ import annotations

import contextlib
import ctypes
import mmap
import os
import platform
import select
import socket
import sys
import time
from collections.abc import Callable, Iterable

import torch
from torch import Tensor
from torch.distributed import Store

from dslc.compiler.facts.hardware import (
    DESCRIPTOR,
    DESCRIPTORS,
    PAGE,
    SLOT_BYTES,
    SLOTS,
    WORD,
    WORDS_OF_RANK,
    segment_bytes,
    segment_front_bytes,
)

NAME = "dslc-segment"  # of the memory of a segment, in /proc
MESSAGE_BYTES = 1 << 32  # bytes reserved for messages, and not used before they are needed

_FUTEX, _WAIT, _WAKE = 202, 0, 1
_SPINS = 100  # looks at a word before the kernel is asked to wait
_TICK = 100_000_000  # ns: how often a waiting rank looks whether its peer is alive
_SHORT_TICK = 1_000_000  # ns: how often it looks whether it can send what is left
_EVERYONE = 1 << 30


class _Time(ctypes.Structure):
    _fields_ = (("seconds", ctypes.c_long), ("nanoseconds", ctypes.c_long))


class Word(ctypes.Structure):
    """A number that one rank writes and others wait for, alone in its cache line."""

    _fields_ = (("value", ctypes.c_int32), ("_fill", ctypes.c_byte * (WORD - 4)))


class Descriptor(ctypes.Structure):
    """A message: where it is in its sender's room. `is_taken` is 1 when it has been received, and its room is free."""

    _fields_ = (
        ("is_taken", Word),
        ("tag", ctypes.c_int64),
        ("offset", ctypes.c_int64),
        ("bytes", ctypes.c_int64),
        ("_fill", ctypes.c_byte * (DESCRIPTOR - WORD - 24)),
    )


class Segment:
    """A rank's segment of a group of `ranks`, mapped."""

    def __init__(self, file: int, process: int, ranks: int) -> None:
        front, words = segment_front_bytes(ranks), (WORDS_OF_RANK + ranks) * WORD
        self._memory = mmap.mmap(file, _length(ranks))
        self.pieces_laid = Word.from_buffer(self._memory, 0)  # pieces in this rank's slots, so far
        self.pieces_read = Word.from_buffer(self._memory, WORD)  # by this rank
        self.messages_sent = (Word * ranks).from_buffer(self._memory, WORDS_OF_RANK * WORD)  # messages, by receiver
        self.descriptors = [
            (Descriptor * DESCRIPTORS).from_buffer(self._memory, words + n * DESCRIPTORS * DESCRIPTOR)
            for n in range(ranks)
        ]
        content = torch.frombuffer(self._memory, dtype=torch.uint8)
        self.slots = [content[front + n * SLOT_BYTES : front + (n + 1) * SLOT_BYTES] for n in range(SLOTS)]
        self.messages = content[front + SLOTS * SLOT_BYTES :]
        self._process = os.pidfd_open(process)  # readable when the process has ended
        self._end = select.poll()
        self._end.register(self._process, select.POLLIN)

    def has_ended(self) -> bool:
        return bool(self._end.poll(0))

    def release(self) -> None:
        """Closes what the segment holds beside its memory, which goes with its last tensor."""
        os.close(self._process)


def _length(ranks: int) -> int:
    return segment_bytes(ranks) + MESSAGE_BYTES


# ------------------------------------------------------------------------------------------------------------ opening


def open_segments(store: Store, rank: int, ranks: int) -> list[Segment] | None:
    """Returns the segments of all ranks of a group, or None if one of the ranks cannot map them all."""
    file, place = _create(ranks)
    store.set(f"segment {rank}", place)
    places = [store.get(f"segment {peer}").decode() for peer in range(ranks)]
    opened = [_open(peers, place, file if peer == rank else None, ranks) for peer, peers in enumerate(places)]
    segments = [segment for segment in opened if segment is not None]
    store.set(f"mapped {rank}", "all" if len(segments) == ranks else "")
    answers = [bool(store.get(f"mapped {peer}")) for peer in range(ranks)]
    if file is not None:
        os.close(file)  # whoever could has mapped it
    if all(answers):
        return segments
    release(segments)
    return None


def release(segments: Iterable[Segment]) -> None:
    for segment in segments:
        segment.release()


def _create(ranks: int) -> tuple[int | None, str]:
    """Returns a new segment and its place: the host, the process, the file and its identity; "" where there is none."""
    if sys.platform != "linux" or platform.machine() != "x86_64":
        return None, ""
    try:
        file = os.memfd_create(NAME)
        os.ftruncate(file, _length(ranks))
        mmap.mmap(file, _length(ranks)).close()  # a limit of the address space shows here
        identity = os.fstat(file)
        return file, f"{host_name()} {os.getpid()} {file} {identity.st_dev} {identity.st_ino}"
    except OSError:
        return None, ""


def host_name() -> str:
    """Returns a name of this host, which other hosts do not have."""
    name = socket.gethostname()
    with contextlib.suppress(OSError), open("/proc/sys/kernel/random/boot_id", encoding="ascii") as text:
        return f"{name}/{text.read().strip()}"
    return name


def _open(place: str, own_place: str, file: int | None, ranks: int) -> Segment | None:
    """Maps the segment at a place, `file` if it is this rank's own; None if it is on another host or not to be seen."""
    if not place or not own_place:
        return None
    host, process, number, device, inode = place.split()
    if not own_place.startswith(f"{host} "):
        return None
    try:
        opened = os.open(f"/proc/{process}/fd/{number}", os.O_RDWR) if file is None else os.dup(file)
        try:
            identity = os.fstat(opened)
            if (identity.st_dev, identity.st_ino) != (int(device), int(inode)):
                return None  # another container's process of this number
            return Segment(opened, int(process), ranks)
        finally:
            os.close(opened)
    except OSError:
        return None


# ------------------------------------------------------------------------------------------------------------ waiting


_system_call: Callable[..., int] = ctypes.CDLL(None, use_errno=True).syscall if sys.platform == "linux" else lambda: 0


def wake(word: Word) -> None:
    """Wakes the ranks that wait for a word; after its value has changed."""
    _system_call(_FUTEX, ctypes.byref(word), _WAKE, _EVERYONE, None, None, 0)


def wait_for(word: Word, value: int, owner: Segment, timeout: float, meanwhile: Callable[[], bool]) -> None:
    """Waits until a word of `owner` has reached a value, and calls `meanwhile`; often, as long as this returns True.

    Raises RuntimeError where its process has ended, and after `timeout` seconds.
    """
    for _ in range(_SPINS):
        if has_reached(word.value, value):
            return
    began = time.monotonic()
    while not has_reached(seen := word.value, value):
        tick = _Time(0, _SHORT_TICK if meanwhile() else _TICK)
        _system_call(_FUTEX, ctypes.byref(word), _WAIT, seen, ctypes.byref(tick), None, 0)
        if owner.has_ended() and not has_reached(word.value, value):
            raise RuntimeError("Connection closed by peer: the process at the other end of shared memory has ended")
        if time.monotonic() - began > timeout:
            raise RuntimeError(f"Timed out waiting {timeout * 1000:.0f}ms for a rank over shared memory")


def has_reached(seen: int, value: int) -> bool:
    """Compares two numbers of 32 bits that count without an end."""
    return (seen - value) & 0x80000000 == 0


def word_value(number: int) -> int:
    """Returns a count as the signed 32 bits of a word."""
    return ctypes.c_int32(number & 0xFFFFFFFF).value


def stored_bytes(tensor: Tensor) -> int:
    """Returns the bytes that a message takes: a power of two, so that messages of other sizes use its place again."""
    return max(PAGE, 1 << (tensor.numel() * tensor.element_size() - 1).bit_length())
