"""Records the run of a module on pieces of sequences, and compares two runs (context_parallel_check.py)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch

from dslc.compiler.trace.sharding.propagation import TensorShare
from dslc.compiler.trace.sharding.share_run import OperationRecord, share_shape

POSITIONS = "position_ids"  # the argument of `forward` that takes them
MIXES, ATTENDS, PLACES, DIFFERS = "E0440", "E0441", "E0442", "E0443"


class ContextParallelError(Exception):
    """Why the module cannot be run on pieces: the diagnostic's code, the reason in one line, and the remedy."""

    def __init__(self, code: str, text: str, help: str = "") -> None:
        super().__init__(text)
        self.code, self.text, self.help = code, text, help


@dataclass(kw_only=True)
class ConstantResult:
    """The results of an operation on constants."""

    name: str
    where: str
    values: list[torch.Tensor]


@dataclass
class TraceRecords:
    """The records of a run."""

    records: list[OperationRecord] = field(default_factory=list)
    constants: list[ConstantResult] = field(default_factory=list)
    failed: str = ""
    where: str = ""


# ------------------------------------------------------------------------------------------------- comparing


def same_pieces(whole: TraceRecords, piece: TraceRecords, ranks: int, rank: int) -> None:
    """Checks that the run on a piece did what that on the whole did, on its pieces."""
    for one, other in zip(whole.records, piece.records, strict=False):
        if one.name != other.name or len(one.shapes) != len(other.shapes):
            raise ContextParallelError(DIFFERS, f"{one.place} does something else on a piece{because(piece)}")
        for (shape, share), (own, _) in zip(one.shapes, other.shapes, strict=True):
            if own != share_shape(shape, share, ranks):
                raise ContextParallelError(
                    DIFFERS,
                    f"{one.place}: on a piece `{one.name}` works with a tensor of shape {own}, which is not a piece of "
                    f"{shape}",
                    "sizes that follow from the tensor's own",
                )
        mine = [(place, _of_rank(value, one.shapes[place][1], ranks, rank)) for place, value in one.constants]
        if not _equal_lists(mine, other.constants):
            raise ContextParallelError(DIFFERS, f"{one.place}: `{one.name}` works with another constant on a piece")
        if one.numbers != other.numbers:
            text = f"{one.place}: `{one.name}` computes with a number that depends on the length of a piece"
            raise ContextParallelError(DIFFERS, text, "a number that does not depend on it")
    if len(whole.records) != len(piece.records) or len(whole.constants) != len(piece.constants):
        ends = whole.records[-1].place if whole.records else "its forward"
        raise ContextParallelError(
            DIFFERS,
            f"it fails on a piece: {piece.failed}{_place_suffix(piece.where)}"
            if piece.failed
            else f"{ends} does more or fewer operations on a piece",
            "sizes that follow from the tensor's own",
        )


def same_positions(plain: TraceRecords, told: TraceRecords) -> None:
    """Checks that the module does the same with positions as without."""
    fault = f"without `{POSITIONS}` it computes with other positions than 0, 1, 2, …"
    if plain.failed or len(plain.records) != len(told.records):
        raise ContextParallelError(PLACES, fault, "positions that begin at 0 and count every token")
    for one, other in zip(plain.records, told.records, strict=True):
        same = one.name == other.name and one.numbers == other.numbers
        same = same and [shape for shape, _ in one.shapes] == [shape for shape, _ in other.shapes]
        if not same or not _equal_lists(one.constants, other.constants):
            raise ContextParallelError(
                PLACES, f"{other.place}: {fault}", "positions that begin at 0 and count every token"
            )


def piece_among(whole: torch.Tensor, pieces: Sequence[torch.Tensor]) -> TensorShare | bool:
    """Returns the share whose parts on the ranks are `pieces`; True if the pieces are alike, False if neither."""
    if not pieces:
        return True
    if all(piece.dtype == whole.dtype and piece.equal(whole) for piece in pieces):
        return True
    for dim, size in enumerate(whole.shape):
        if pieces[0].dim() != whole.dim() or pieces[0].shape[dim] == size or size % len(pieces):
            continue
        parts = whole.chunk(len(pieces), dim)
        same = len(parts) == len(pieces) and all(map(_equal, parts, pieces))
        return TensorShare(dim, 1, size) if same else False
    return False


def _of_rank(value: torch.Tensor, share: TensorShare | None, ranks: int, rank: int) -> torch.Tensor:
    return value if share is None else value.chunk(ranks, share.dim)[rank]


def _equal_lists(ones: Sequence[tuple[int, torch.Tensor]], others: Sequence[tuple[int, torch.Tensor]]) -> bool:
    return [n for n, _ in ones] == [n for n, _ in others] and all(
        _equal(one, other) for (_, one), (_, other) in zip(ones, others, strict=True)
    )


def _equal(one: torch.Tensor, other: torch.Tensor) -> bool:
    return one.dtype == other.dtype and one.equal(other)


def because(piece: TraceRecords) -> str:
    return f", where it fails: {piece.failed}" if piece.failed else ""


def _place_suffix(where: str) -> str:
    return f" ({where})" if where else ""


def at_line(where: str) -> str:
    return where or "its forward"
