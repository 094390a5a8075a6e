"""Rows of numbers as their signs, 8 in a byte, and one magnitude.

Rule: a number is restored as the mean of the absolute values of its row, with its sign; zero counts as positive. Of a
row that is filled up only the real numbers count. The sign of number 8 i + k is bit k of byte i.

Model: `compress` packs the magnitude as 4 bytes in front of the signs of a row, so that one collective carries both.

Contract: a row with nan or infinity is restored as nan or infinity throughout.
"""

from __future__ import annotations

from functools import cache

import torch
from torch import Tensor

HEADER = 4  # bytes: the magnitude, in float32
_GATHER = 0x0102040810204080  # times eight bytes that are 0 or 1: their bits in the highest byte


def chunk_of(numbers: int, members: int) -> int:
    """Returns the numbers of a chunk, in whole bytes of signs."""
    return 8 * -(-numbers // (8 * members))


def compress(rows: Tensor, real: Tensor) -> Tensor:
    """Returns float32 rows, whose length is a multiple of 8, as uint8 rows; the first `real` numbers of each are no
    filling.
    """
    packed = rows.new_empty((rows.shape[0], HEADER + rows.shape[1] // 8), dtype=torch.uint8)
    magnitude = rows.abs().sum(dim=1).div_(real.clamp(min=1))
    packed[:, :HEADER] = magnitude.unsqueeze(1).view(torch.uint8)
    packed[:, HEADER:] = pack(rows >= 0)
    return packed


def restore(packed: Tensor) -> Tensor:
    magnitude = packed[:, :HEADER].clone(memory_format=torch.contiguous_format).view(torch.float32)
    found = unpack(packed[:, HEADER:])
    return found.mul_(magnitude)


def subtract(rows: Tensor, packed: Tensor, real: int) -> None:
    """Subtracts from rows what was made of them, in place; filling, all but the first `real` numbers, stays 0."""
    rows.sub_(restore(packed))
    clear(rows, real)


def clear(rows: Tensor, real: int) -> None:
    """Sets all but the first `real` numbers of the rows, one after another, to 0, in place."""
    rows.view(-1)[real:].zero_()


def pack(bits: Tensor) -> Tensor:
    """Returns rows of booleans, in number a multiple of 8, as rows of bytes."""
    words = bits.view(torch.uint8).view(torch.int64)
    return ((words * _GATHER) >> 56).bitwise_and_(255).to(torch.uint8)


def unpack(packed: Tensor) -> Tensor:
    """Returns rows of bytes as rows of -1 and 1."""
    rows, count = packed.shape
    return _signs(packed.device).index_select(0, packed.reshape(-1).to(torch.int32)).view(rows, 8 * count)


@cache
def _signs(device: torch.device) -> Tensor:
    """Returns the signs of each byte. A copy to a GPU would wait for it, so that it is made once."""
    bits = (torch.arange(256).unsqueeze(1) >> torch.arange(8)) % 2
    return (bits * 2.0 - 1.0).to(device, torch.float32)
