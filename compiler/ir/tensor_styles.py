"""The styles of the tensor axis: how a module is cut over the ranks, and what it takes and gives.

A value between modules is `whole` on each rank, or a `piece` of the sequence, or a `share` of the features.
`tensor_plan` and the rank program use these names; `split` and `gather` come beside the style of a module.
"""

from __future__ import annotations

from enum import StrEnum
from typing import assert_never


class TensorStyle(StrEnum):
    """A style. Some come in variants, for the value that they take or give where it is not their usual one."""

    COLUMN = "column"  # a dense layer, its weight cut by rows: takes the whole, gives a share
    COLUMN_OF_PIECES = "column_of_pieces"  # takes a piece, and gathers it
    GATHERED = "gathered"  # a column whose shares are put together at once
    GATHERED_OF_PIECES = "gathered_of_pieces"
    SCORES = "scores"  # a column whose shares are handed to the loss
    SCORES_OF_PIECES = "scores_of_pieces"
    ROW = "row"  # a dense layer, its weight cut by columns: takes a share, sums to the whole
    ROW_TO_PIECES = "row_to_pieces"  # gives a piece of the sum
    ROW_OF_WHOLE = "row_of_whole"  # takes the whole, and each rank its share of it
    VOCABULARY = "vocabulary"  # a table, cut by rows
    SEQUENCE = "sequence"  # whole parameters, on pieces; their gradients are summed
    SUMMED = "summed"  # whole parameters, on shares; their gradients are summed
    SPLIT = "split"  # takes the whole, and passes on a piece
    GATHER = "gather"  # makes a piece, and passes on the whole
    EXPERTS = "experts"  # a mixture, each of its experts cut by the width inside: takes the whole, sums to the whole
    EXPERTS_OF_PIECES = "experts_of_pieces"  # takes a piece, and gathers it; gives a piece of the sum

    @property
    def cut(self) -> int | None:
        """The dim along which the weight is cut; None if every rank has it whole."""
        match self:
            case (
                TensorStyle.COLUMN
                | TensorStyle.COLUMN_OF_PIECES
                | TensorStyle.GATHERED
                | TensorStyle.GATHERED_OF_PIECES
                | TensorStyle.SCORES
                | TensorStyle.SCORES_OF_PIECES
                | TensorStyle.VOCABULARY
            ):
                return 0
            case TensorStyle.ROW | TensorStyle.ROW_TO_PIECES | TensorStyle.ROW_OF_WHOLE:
                return 1
            case TensorStyle.SEQUENCE | TensorStyle.SUMMED | TensorStyle.SPLIT | TensorStyle.GATHER:
                return None
            case TensorStyle.EXPERTS | TensorStyle.EXPERTS_OF_PIECES:
                return None  # the router is whole; CUT_OF_EXPERTS has the others
            case _:
                assert_never(self)

    @property
    def of_pieces(self) -> TensorStyle:
        """The variant of a column, or of experts, that takes a piece."""
        return TensorStyle(f"{self}_of_pieces")


EXPERT_STYLES = frozenset({TensorStyle.EXPERTS, TensorStyle.EXPERTS_OF_PIECES})
# The dim along which the tensor axis cuts each parameter of the experts of a mixture: the width inside.
CUT_OF_EXPERTS = {"gate_up_proj": 1, "down_proj": 2}
