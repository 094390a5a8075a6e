"""The chances of philox.py as one kernel of Triton, which torch's builds for GPUs bring along.

Contract: the numbers are those of philox.py to the bit. Nothing is used beside the result.
"""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

_PROGRAM = 256  # blocks of 8 words that one program of the kernel makes


def fill_where_below(out: Tensor, key: int, first: int, limit: int) -> None:
    """Fills a mask of one dim with True where a word is below the limit."""
    block, skipped = divmod(first, 8)
    blocks = -(-(skipped + len(out)) // 8)
    low_key, high_key = (_signed(key >> shift) for shift in (0, 64))
    grid = (triton.cdiv(blocks, _PROGRAM),)
    _fill_where_below[grid](out, len(out), block, skipped, low_key, high_key, limit, _PROGRAM)


def _signed(bits: int) -> int:
    return (bits + (1 << 63)) % (1 << 64) - (1 << 63)


# Compiled once for all keys and places, and not for those that 16 divides.
@triton.jit(do_not_specialize=["count", "block", "skipped", "low_key", "high_key", "limit"])  # type: ignore[untyped-decorator]
def _fill_where_below(out, count, block, skipped, low_key, high_key, limit, SIZE: tl.constexpr):  # type: ignore[no-untyped-def]
    number = tl.program_id(0).to(tl.int64) * SIZE + tl.arange(0, SIZE)
    first = (number + block + 1).to(tl.uint64)  # the generator counts before it makes a block
    second, third, fourth = tl.zeros_like(first), tl.zeros_like(first), tl.zeros_like(first)
    low_key, high_key = low_key.to(tl.int64).to(tl.uint64), high_key.to(tl.int64).to(tl.uint64)
    for _ in tl.static_range(10):
        high, low = tl.umulhi(first, 0xD2E7470EE14C6C93), first * 0xD2E7470EE14C6C93
        other_high, other_low = tl.umulhi(third, 0xCA5A826395121157), third * 0xCA5A826395121157
        first, second, third, fourth = other_high ^ second ^ low_key, other_low, high ^ fourth ^ high_key, low
        low_key += 0x9E3779B97F4A7C15
        high_key += 0xBB67AE8584CAA73B
    place = number * 8 - skipped
    _store_halves(out, place, first, count, limit)
    _store_halves(out, place + 2, second, count, limit)
    _store_halves(out, place + 4, third, count, limit)
    _store_halves(out, place + 6, fourth, count, limit)


@triton.jit
def _store_halves(out, place, word, count, limit):  # type: ignore[no-untyped-def]
    low, high = (word & 0xFFFFFFFF).to(tl.int64), (word >> 32).to(tl.int64)
    tl.store(out + place, low < limit, mask=(place >= 0) & (place < count))
    tl.store(out + place + 1, high < limit, mask=(place >= -1) & (place + 1 < count))
