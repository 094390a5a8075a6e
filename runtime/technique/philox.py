"""Random numbers by position: a counter-based generator (Philox, Salmon et al. 2011, doi:10.1145/2063384.2063405).

Model: a key names an endless sequence of words of 32 bits. Any range of it is made at once, without what comes before.
numpy's Philox makes blocks of 8 words, each from the key and the number of the block.

Contract: a word depends on the key and its position alone, not on the range that is asked for, the machine or the
process. The functions fill an array of one dim, whatever its dtype's width: `bernoulli` writes the bits of one or of
zero.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

import numpy as np

Array = np.ndarray[Any, Any]

_BLOCK = 8  # words of 32 bits that one count of the generator makes
_CHUNK = 1 << 17  # words made at once, which stay in the processor's cache
_WORDS = 2.0**32
_RANDOM_BITS = 24  # of an even number, at most


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


def uniform(out: Array, key: int, first: int, low: float, high: float, digits: int | None = None) -> None:
    """Fills an array of floats with numbers in [low, high), of at most 24 random bits each. `digits`: the binary digits
    of the dtype that the numbers are converted to, if it is another. Complex numbers have such numbers as both parts.
    """
    if np.iscomplexobj(out):
        uniform(out.view(out.real.dtype), key, 2 * first, low, high, digits)
        return
    digits = digits or np.finfo(out.dtype).nmant + 1
    shift, scale, last = even_numbers(low, high, digits)
    for place, chunk in words(key, first, len(out)):
        np.multiply(chunk >> np.uint32(shift), scale, out=out[place])
        out[place] += low
        np.minimum(out[place], last, out=out[place])


def even_numbers(low: float, high: float, digits: int) -> tuple[int, float, float]:
    """Returns how numbers in [low, high) that have so many binary digits come from words: the bits to shift a word by,
    the factor before `low` is added, and the largest number, as a sum may round to `high`.
    """
    bits = min(digits, _RANDOM_BITS)  # more would round to 1
    fraction, exponent = math.frexp(math.nextafter(high, -math.inf))
    last = math.ldexp(math.floor(math.ldexp(fraction, digits)), exponent - digits)
    return 32 - bits, (high - low) * 2.0**-bits, max(low, last)


def normal(out: Array, key: int, first: int, mean: float, deviation: float) -> None:
    """Fills an array of floats with normal numbers, each of two words (Box and Muller 1958). The deviation of complex
    numbers is that of both parts together, as torch has it.
    """
    if np.iscomplexobj(out):
        normal(out.view(out.real.dtype), key, 2 * first, mean, deviation / math.sqrt(2))
        return
    for place, chunk in words(key, 2 * first, 2 * len(out)):
        radius, angle = (chunk[half::2].astype(np.float64) + 0.5 for half in (0, 1))
        numbers = np.sqrt(-2 * np.log(radius / _WORDS)) * np.cos(angle * (2 * np.pi / _WORDS))
        out[place.start // 2 : place.stop // 2] = mean + deviation * numbers


def exponential(out: Array, key: int, first: int, rate: float) -> None:
    """Fills an array of floats with exponentially distributed numbers."""
    for place, chunk in words(key, first, len(out)):
        out[place] = np.log((chunk.astype(np.float64) + 0.5) / _WORDS) / -rate


def integers(out: Array, key: int, first: int, low: int, high: int) -> None:
    """Fills an array with integers from `low` to `high - 1`, each of two words."""
    for place, chunk in words(key, 2 * first, 2 * len(out)):
        numbers = (_positive(chunk) % np.uint64(high - low)).astype(np.int64)
        out[place.start // 2 : place.stop // 2] = low + numbers


def permutation(out: Array, key: int) -> None:
    """Fills an array with a random order of 0, 1 and so on."""
    ranks = np.empty(len(out), np.uint64)
    for place, chunk in words(key, 0, 2 * len(out)):
        ranks[place.start // 2 : place.stop // 2] = _positive(chunk)
    out[:] = np.argsort(ranks, kind="stable")


def _positive(chunk: Array) -> Array:
    """Returns numbers of 62 bits, of two words each: such as a signed integer holds, too."""
    high, low = (chunk[half::2].astype(np.uint64) >> np.uint64(1) for half in (0, 1))
    return (high << np.uint64(31)) | low
