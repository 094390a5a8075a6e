"""Random numbers by position: a counter-based generator (Philox, Salmon et al. 2011, doi:10.1145/2063384.2063405).

Model: a key names an endless sequence of words of 32 bits. Any range of it is made at once, without what comes before.
numpy's Philox makes blocks of 8 words, each from the key and the number of the block.

Contract: a word depends on the key and its position alone, not on the range that is asked for, the machine or the
process. The functions fill an array of one dim, whatever its dtype's width: `bernoulli` writes the bits of one or of
zero.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np

Array = np.ndarray[Any, Any]

_BLOCK = 8  # words of 32 bits that one count of the generator makes
_CHUNK = 1 << 17  # words made at once, which stay in the processor's cache
_WORDS = 2.0**32


def words(key: int, first: int, count: int) -> Iterator[tuple[slice, Array]]:
    """Yields the words `first` to `first + count` of a key in chunks, each with its place among them."""
    block, skipped = divmod(first, _BLOCK)
    generator, start = np.random.Philox(key=key, counter=block), 0
    while start < count:
        size = min(_CHUNK - skipped, count - start)
        raw = generator.random_raw(-(-(skipped + size) // 2)).view(np.uint32)
        yield slice(start, start + size), raw[skipped : skipped + size]
        start, skipped = start + size, 0


def bernoulli(out: Array, key: int, first: int, probability: float, one: int) -> None:
    """Fills an array of unsigned integers with `one` where a word is below the probability, and 0 elsewhere."""
    limit = round(probability * _WORDS)
    if limit >= _WORDS:
        out.fill(one)
        return
    bits, threshold = out.dtype.type(one), np.uint32(max(0, limit))
    for place, chunk in words(key, first, len(out)):
        np.multiply(chunk < threshold, bits, out=out[place])


def uniform(out: Array, key: int, first: int, low: float, high: float) -> None:
    """Fills an array of floats with numbers in [low, high), of 24 random bits each."""
    for place, chunk in words(key, first, len(out)):
        np.multiply(chunk >> np.uint32(8), (high - low) * 2.0**-24, out=out[place])
        out[place] += low


def normal(out: Array, key: int, first: int, mean: float, deviation: float) -> None:
    """Fills an array of floats with normal numbers, each of two words (Box and Muller 1958)."""
    for place, chunk in words(key, 2 * first, 2 * len(out)):
        radius, angle = (chunk[half::2].astype(np.float64) + 0.5 for half in (0, 1))
        numbers = np.sqrt(-2 * np.log(radius / _WORDS)) * np.cos(angle * (2 * np.pi / _WORDS))
        out[place.start // 2 : place.stop // 2] = mean + deviation * numbers
