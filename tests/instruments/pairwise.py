"""Few choices that together hold every pair, for tests of many independent settings, instead of the product."""

from __future__ import annotations

import itertools
import random
from collections.abc import Callable, Mapping, Sequence

Choice = dict[str, str]


def pairwise(
    factors: Mapping[str, Sequence[str]], allowed: Callable[[Choice], bool] = lambda _: True, seed: int = 0
) -> list[Choice]:
    """Returns choices of one value for each factor, so that any two values of two factors that some allowed choice has
    stand together in one of them. Greedy, so near the least number; a pure function of its arguments.
    """
    names = list(factors)
    whole = [dict(zip(names, values, strict=True)) for values in itertools.product(*factors.values())]
    possible = [choice for choice in whole if allowed(choice)]
    random.Random(seed).shuffle(possible)
    bits: dict[tuple[tuple[str, str], tuple[str, str]], int] = {}
    pairs = [  # those of a choice, each a bit, as ten times quicker than sets
        sum(1 << bits.setdefault(pair, len(bits)) for pair in itertools.combinations(choice.items(), 2))
        for choice in possible
    ]
    missing = (1 << len(bits)) - 1
    chosen = []
    while missing:
        best = max(range(len(possible)), key=lambda i: (pairs[i] & missing).bit_count())
        chosen.append(possible[best])
        missing &= ~pairs[best]
    return chosen
