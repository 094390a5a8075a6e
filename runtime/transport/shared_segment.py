"""Memory that the ranks of a group on one host share: a segment for each rank, which its peers map.

Model: a rank makes a file without a name, in memory, and writes into a store where its peers find it: below its process
in /proc. They open it there and map it. At the front of a segment stand 32-bit words that only one rank writes; a rank
that waits for a word sleeps in the kernel (a futex). Behind them are the slots, which carry collectives piece by piece,
and the room for messages, of which only the used part takes memory.

Contract: nothing of a segment is left after the processes that map it, however they end, and no other user can open it.
`open_segments` returns None on every rank of a group if it does so on one, as it does where the ranks are on several
hosts. A rank that waits for one that has ended raises, and so it does after its timeout.

Limits: Linux on x86-64, where a rank sees the writes of another in their order, without barriers. Errors have the words
of gloo's, by which a failure is known for a lost connection or a timeout (process/failure.py).
"""

from __future__ import annotations

import ctypes
import mmap
import os
import platform
import select
import socket
import sys
import time
from collections.abc import Callable

import torch
from torch import Tensor
from torch.distributed import Store

SLOTS = 2  # a rank fills one while its peers read the other
SLOT = 1 << 20  # bytes: two ranks' pieces stay in a core's cache
DESCRIPTORS = 256  # messages from one rank to another that may wait to be received
ROOM = 1 << 32  # bytes reserved for messages, and not used before they are needed

_PAGE = 4096
_FUTEX, _WAIT, _WAKE = 202, 0, 1
_LOOKS = 100  # looks at a word before the kernel is asked to wait
_TICK = 100_000_000  # ns: how often a waiting rank looks whether its peer is alive
_EVERYONE = 1 << 30


class _Time(ctypes.Structure):
    _fields_ = (("seconds", ctypes.c_long), ("nanoseconds", ctypes.c_long))


class Word(ctypes.Structure):
    """A number that one rank writes and others wait for, alone in its cache line."""

    _fields_ = (("value", ctypes.c_int32), ("_fill", ctypes.c_byte * 60))


class Descriptor(ctypes.Structure):
    """A message: where it is in its sender's room. `taken` is 1 when it has been received, and its room is free."""

    _fields_ = (
        ("taken", Word),
        ("tag", ctypes.c_int64),
        ("offset", ctypes.c_int64),
        ("bytes", ctypes.c_int64),
        ("_fill", ctypes.c_byte * 40),
    )


class Segment:
    """A rank's segment of a group of `ranks`, mapped."""

    def __init__(self, file: int, process: int, ranks: int) -> None:
        front = _front(ranks)
        self._memory = mmap.mmap(file, _length(ranks))
        self.posted = Word.from_buffer(self._memory, 0)  # the pieces that this rank has laid into its slots
        self.read = Word.from_buffer(self._memory, ctypes.sizeof(Word))  # the pieces of all that this rank has read
        self.sent = (Word * ranks).from_buffer(self._memory, 2 * ctypes.sizeof(Word))  # messages, by receiver
        self.descriptors = [
            (Descriptor * DESCRIPTORS).from_buffer(self._memory, _words(ranks) + n * DESCRIPTORS * _DESCRIPTOR)
            for n in range(ranks)
        ]
        content = torch.frombuffer(self._memory, dtype=torch.uint8)
        self.slots = [content[front + n * SLOT : front + (n + 1) * SLOT] for n in range(SLOTS)]
        self.room = content[front + SLOTS * SLOT :]
        self._life = os.pidfd_open(process)  # readable when the process has ended

    def has_ended(self) -> bool:
        return bool(select.select([self._life], [], [], 0)[0])


_DESCRIPTOR = ctypes.sizeof(Descriptor)


def _words(ranks: int) -> int:
    return (2 + ranks) * ctypes.sizeof(Word)


def _front(ranks: int) -> int:
    return -(-(_words(ranks) + ranks * DESCRIPTORS * _DESCRIPTOR) // _PAGE) * _PAGE


def _length(ranks: int) -> int:
    return _front(ranks) + SLOTS * SLOT + ROOM


def resident_bytes(ranks: int) -> int:
    """Returns the bytes of memory of a rank's segment in a group of `ranks`, without messages."""
    return _front(ranks) + SLOTS * SLOT


# ------------------------------------------------------------------------------------------------------------ opening


def open_segments(store: Store, rank: int, ranks: int) -> list[Segment] | None:
    """Returns the segments of all ranks of a group, or None if one of the ranks cannot map them all."""
    file, place = _create(ranks)
    store.set(f"segment {rank}", place)
    segments: list[Segment] | None = []
    for peer in range(ranks):
        there = store.get(f"segment {peer}").decode()
        segment = _open(there, place, file if peer == rank else None, ranks)
        if segment is None:
            segments = None
            break
        if segments is not None:
            segments.append(segment)
    store.set(f"mapped {rank}", "" if segments is None else "all")
    if any(not store.get(f"mapped {peer}") for peer in range(ranks)):
        segments = None
    if file is not None and segments is None:
        os.close(file)
    return segments


def _create(ranks: int) -> tuple[int | None, str]:
    """Returns a new segment and its place: the host, the process, the file and its identity; "" where there is none."""
    if sys.platform != "linux" or platform.machine() != "x86_64":
        return None, ""
    try:
        file = os.memfd_create("dslc-segment")
        os.ftruncate(file, _length(ranks))
        mmap.mmap(file, _length(ranks)).close()  # a limit of the address space shows here
    except OSError:
        return None, ""
    identity = os.fstat(file)
    return file, f"{socket.gethostname()}/{_boot()} {os.getpid()} {file} {identity.st_dev} {identity.st_ino}"


def _boot() -> str:
    with open("/proc/sys/kernel/random/boot_id", encoding="ascii") as text:
        return text.read().strip()


def _open(there: str, here: str, file: int | None, ranks: int) -> Segment | None:
    """Maps the segment at a place, `file` if it is this rank's own; None if it is on another host or not to be seen."""
    if not there or not here:
        return None
    host, process, number, device, inode = there.split()
    if not here.startswith(f"{host} "):
        return None
    try:
        opened = os.open(f"/proc/{process}/fd/{number}", os.O_RDWR) if file is None else file
        identity = os.fstat(opened)
        if (identity.st_dev, identity.st_ino) != (int(device), int(inode)):
            return None  # another container's process of this number
        return Segment(opened, int(process), ranks)
    except OSError:
        return None


# ------------------------------------------------------------------------------------------------------------ waiting


_system_call: Callable[..., int] = ctypes.CDLL(None, use_errno=True).syscall if sys.platform == "linux" else lambda: 0


def wake(word: Word) -> None:
    """Wakes the ranks that wait for a word; after its value has changed."""
    _system_call(_FUTEX, ctypes.byref(word), _WAKE, _EVERYONE, None, None, 0)


def wait_for(word: Word, value: int, owner: Segment, timeout: float) -> None:
    """Waits until a word of `owner` has reached a value.

    Raises RuntimeError where its process has ended, and after `timeout` seconds.
    """
    for _ in range(_LOOKS):
        if _reached(word.value, value):
            return
    tick = _Time(0, _TICK)
    began = time.monotonic()
    while not _reached(seen := word.value, value):
        _system_call(_FUTEX, ctypes.byref(word), _WAIT, seen, ctypes.byref(tick), None, 0)
        if owner.has_ended() and not _reached(word.value, value):
            raise RuntimeError("Connection closed by peer: the process at the other end of shared memory has ended")
        if time.monotonic() - began > timeout:
            raise RuntimeError(f"Timed out waiting {timeout * 1000:.0f}ms for a rank over shared memory")


def _reached(seen: int, value: int) -> bool:
    """Compares two numbers of 32 bits that count without an end."""
    return (seen - value) & 0x80000000 == 0


def word_value(number: int) -> int:
    """Returns a count as the signed 32 bits of a word."""
    return ctypes.c_int32(number & 0xFFFFFFFF).value


def room_of(tensor: Tensor) -> int:
    """Returns the bytes that a message takes in the room: whole pages."""
    return max(1, -(-tensor.numel() * tensor.element_size() // _PAGE)) * _PAGE
