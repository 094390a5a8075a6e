"""Tells which piece of a network's random numbers a rank of the tensor or context axis has.

Model: the check of an axis has followed the shares of all tensors (propagation.py), those that a random operation fills
among them. Attention of the context axis is one operation there, and draws its weights, (…, queries, keys).
"""

from __future__ import annotations

from ast import literal_eval
from collections import Counter
from collections.abc import Iterable

from dslc.compiler.ir.steps import CutDraw
from dslc.compiler.trace.batch import SMALL
from dslc.compiler.trace.draws import CONTROLLED
from dslc.compiler.trace.sharding.propagation import TensorShare
from dslc.compiler.trace.sharding.share_run import OperationRecord

_NAMES = frozenset(name.partition(".")[0] for name in CONTROLLED)


def cut_draws(records: Iterable[OperationRecord]) -> tuple[CutDraw, ...] | None:
    """Returns the draws of which a rank has a piece, from the run on the whole; None if a piece is not one of each
    sample's numbers.
    """
    found, numbers = list[CutDraw](), Counter[str]()
    for record in records:
        weights = _dropped_weights(record)
        if weights is None and record.name not in _NAMES:
            continue
        shape, share = weights or record.shapes[-1]
        number = numbers[record.module]
        numbers[record.module] += 1
        if share is None:
            continue
        samples = SMALL if share.dim == 0 else 1
        if share.outer % samples:
            return None
        cut = CutDraw(
            module=record.module,
            number=number,
            shape=(shape[0] // SMALL, *shape[1:]),
            dim=share.dim,
            outer=share.outer // samples,
            size=share.size,
            parts=share.parts,
            columns=weights is not None,
        )
        found.append(cut)
    return tuple(found)


def _dropped_weights(record: OperationRecord) -> tuple[tuple[int, ...], TensorShare | None] | None:
    """Returns the weights that attention drops some of, and the share of their rows; None for anything else."""
    if record.name != "attention" or literal_eval(record.numbers[0])[0] == 0.0:
        return None
    (query, share), (key, _) = record.shapes[:2]
    return (*query[:-1], key[-2]), share
