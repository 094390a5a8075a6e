"""Tells which piece of a network's random numbers a rank of the tensor or context axis has.

Model: the check of an axis has followed the shares of all tensors (propagation.py), those that a random operation fills
among them. Attention of the context axis is one operation there, and draws its weights, (…, queries, keys).
"""

from __future__ import annotations

from ast import literal_eval
from collections import Counter
from collections.abc import Iterable

from dslc.compiler.ir.network_facts import NetworkFacts
from dslc.compiler.ir.steps import SHARED, CutDraw
from dslc.compiler.trace.batch import SMALL
from dslc.compiler.trace.draws import CHOICE, CONTROLLED
from dslc.compiler.trace.sharding.propagation import TensorShare
from dslc.compiler.trace.sharding.share_run import OperationRecord

_NAMES = frozenset(name.partition(".")[0] for name in CONTROLLED)


def cut_draws(records: Iterable[OperationRecord], network: NetworkFacts | None) -> tuple[CutDraw, ...] | None:
    """Returns the draws that ranks have pieces of, from the run on the whole; None if a piece is not one of each
    sample's numbers.
    """
    dims = {draw.module: draw for draw in network.draw_dims} if network is not None else {}
    found, numbers = list[CutDraw](), Counter[str]()
    for record in records:
        weights = _dropped_weights(record)
        if weights is None and record.name not in _NAMES:
            continue
        shape, share = weights or record.shapes[0 if record.name == CHOICE else -1]
        number = numbers[record.layer]
        numbers[record.layer] += 1
        if share is None:
            continue
        along = dims[record.layer].dims[number : number + 1] if record.layer in dims else ()
        shape, dim, samples = _of_one_sample(shape, share.dim, (*along, 0)[0])
        if share.outer % samples:
            return None
        cut = CutDraw(
            module=record.layer,
            number=number,
            shape=shape,
            dim=dim,
            outer=share.outer // samples,
            size=share.size,
            parts=share.parts,
            columns=weights is not None,
        )
        found.append(cut)
    return tuple(found)


def _of_one_sample(shape: tuple[int, ...], cut: int, along: int) -> tuple[tuple[int, ...], int, int]:
    """Returns the shape of one sample of a draw, the place of its dim `cut`, and the number of samples along that. The
    dim `along` goes by samples and is put first.
    """
    if along == SHARED:
        return shape, cut, 1
    rest = (*shape[:along], *shape[along + 1 :])
    place = 0 if cut == along else cut + 1 if cut < along else cut
    return (shape[along] // SMALL, *rest), place, SMALL if cut == along else 1


def _dropped_weights(record: OperationRecord) -> tuple[tuple[int, ...], TensorShare | None] | None:
    """Returns the weights that attention drops some of, and the share of their rows; None for anything else."""
    if record.name != "attention" or literal_eval(record.numbers[0])[0] == 0.0:
        return None
    (query, share), (key, _) = record.shapes[:2]
    return (*query[:-1], key[-2]), share
