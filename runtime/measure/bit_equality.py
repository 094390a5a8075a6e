"""Compares the copies of parameters bit by bit, and names the ranks that differ (`train.check_replicas`).

Model: the ranks of the data axis that hold a copy start equal, sum gradients exactly, and do the same updates. So their
copies are equal to the bit. Each rank makes one digest of all its copies, and one all-gather of 8 bytes a rank compares
them. Only where digests differ do the ranks exchange more: the digest of each parameter, then one parameter.

Contract: every number counts, so that one flipped bit anywhere is found. Of three or more copies the majority is right,
and the others are named with their hosts. Of two copies none is: both are named. All ranks that hold a copy of such a
parameter raise `RanksDifferError`, after the last checkpoint is published. Checkpoints follow a comparison, so the
newest one holds the state on which all agreed.

Limits: copies over a tensor axis are not compared, as their gradients are not exchanged. The optimizer's state is not:
a wrong number in it shows in a parameter after the next update. Processors of different kinds may round the same update
differently, and then copies differ.
"""

from __future__ import annotations

import socket
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

from dslc.compiler.ir.program import JobProgram
from dslc.compiler.trace.private_torch import local_part
from dslc.runtime.measure import collectives
from dslc.runtime.measure.copy_digests import RanksDifferError, bit_sums, bits_of, digest, raise_at_user_code

Values = TypeVar("Values")


@dataclass(frozen=True, kw_only=True)
class CopyDigests:
    """The digests of one rank's copies: of each parameter, and one of all."""

    rank: int
    host: str
    of_all: int
    by_parameter: tuple[int, ...]


@dataclass(frozen=True, kw_only=True)
class CopyDifference:
    """How one rank's copy of a parameter differs from the copy of the reference rank."""

    rank: int
    numbers: int  # that differ
    bits: int  # that differ in all of them
    distance: float  # the largest


class BitEqualityCheck:
    """Compares copies on the ranks of each group. `newest_checkpoint` waits for the last one and returns its path."""

    def __init__(
        self,
        job: JobProgram,
        rank: int,
        device: torch.device,
        groups: Mapping[dist.ProcessGroup, Mapping[str, Tensor]],
        newest_checkpoint: Callable[[], str],
    ) -> None:
        self._job, self._rank, self._device, self._groups = job, rank, device, groups
        self._newest_checkpoint = newest_checkpoint

    def compare(self, step: int) -> None:
        """Raises RanksDifferError if a copy differs in a bit. Called by all ranks after the same step."""
        for group, tensors in self._groups.items():
            sums = bit_sums(list(tensors.values()), sampled=False)
            digests = self._gather(digest(" ".join(map(str, sums))), group)
            if len(set(digests)) > 1:
                own = CopyDigests(
                    rank=self._rank,
                    host=socket.gethostname(),
                    of_all=digests[dist.get_rank(group)],
                    by_parameter=tuple(sums),
                )
                self._report(step, tensors, own, group)

    def _gather(self, own_digest: int, group: dist.ProcessGroup) -> list[int]:
        own = torch.tensor([own_digest], dtype=torch.int64, device=self._device)
        digests = [torch.empty_like(own) for _ in range(dist.get_world_size(group))]
        with collectives.exclude_collectives():
            dist.all_gather(digests, own, group=group)
        return torch.cat(digests).tolist()

    def _report(self, step: int, tensors: Mapping[str, Tensor], own: CopyDigests, group: dist.ProcessGroup) -> None:
        """Raises RanksDifferError on all ranks of the group, with the ranks and the first parameter that differs."""
        copies = [
            CopyDigests(rank=rank, host=host, of_all=of_all, by_parameter=tuple(by_parameter))
            for rank, host, of_all, by_parameter in _gather_values(
                (own.rank, own.host, own.of_all, list(own.by_parameter)), group
            )
        ]
        reference, wrong = divide_copies(copies)
        names = [
            name
            for place, name in enumerate(tensors)
            if any(copy.by_parameter[place] != reference.by_parameter[place] for copy in copies)
        ]
        name = names[0]
        difference = self._difference(local_part(tensors[name]), copies.index(reference), group)
        differences = [
            CopyDifference(rank=rank, numbers=numbers, bits=bits, distance=distance)
            for rank, numbers, bits, distance in _gather_values(difference, group)
        ]
        blamed = wrong or tuple(copies)
        what = (
            f"`{name}` on {_ranks_text(wrong)} is not the same as on the {len(copies) - len(wrong)} other ranks that "
            "hold a copy"
            if wrong
            else f"`{name}` is not the same on {_ranks_text(copies)}"
        )
        more = f", and so do {len(names) - 1} more parameters" if len(names) > 1 else ""
        shown = max(differences, key=lambda each: (each.rank in {copy.rank for copy in blamed}, each.numbers))
        error = RanksDifferError(
            f"after step {step}, {what}: {_difference_text(shown, local_part(tensors[name]).numel())}{more}",
            is_reported=self._rank == blamed[0].rank,
        )
        if not wrong:
            error.add_note(
                f"{len(copies)} copies without a majority do not tell which is right; three equal data ranks would"
            )
        if shown.numbers == shown.bits == 1 and len(names) == 1:
            error.add_note("a single flipped bit is what a memory error or a faulty device leaves behind")
        self._add_remedy(error)
        raise_at_user_code(error, self._job)

    @torch.no_grad()
    def _difference(self, own_tensor: Tensor, reference: int, group: dist.ProcessGroup) -> tuple[int, int, int, float]:
        """Returns the fields of this rank's `CopyDifference` from the copy of the group's rank `reference`."""
        own_tensor = own_tensor.to(self._device)  # a group of GPUs takes nothing of the host's
        other = own_tensor.clone(memory_format=torch.contiguous_format)
        dist.broadcast(other, group_src=reference, group=group)
        own_bits, other_bits = bits_of(own_tensor), bits_of(other)
        differing = own_bits != other_bits
        flipped: list[int] = (own_bits[differing] ^ other_bits[differing]).tolist()
        width = 8 * own_bits.element_size()  # a negative number has the bits of its remainder
        bits = sum((number % (1 << width)).bit_count() for number in flipped)
        distance = (own_tensor - other).abs().max() if own_tensor.numel() else own_tensor.new_zeros(())
        return self._rank, len(flipped), bits, float(distance)

    def _add_remedy(self, error: RanksDifferError) -> None:
        newest, restarts = self._newest_checkpoint(), self._job.restarts
        if newest and restarts:
            error.add_note(f"all copies were equal at the last checkpoint, {newest}")
        elif newest:
            error.add_note(
                f"all copies were equal at the last checkpoint, {newest}: `checkpoint.resume = auto` continues from "
                "it, and with `launch.restarts` the run goes back by itself"
            )
        else:
            error.add_note(
                "there is no checkpoint to go back to: with `checkpoint.every` and `launch.restarts` the run goes back "
                "by itself"
            )


def divide_copies(copies: Sequence[CopyDigests]) -> tuple[CopyDigests, tuple[CopyDigests, ...]]:
    """Returns a copy of the majority, and the copies that differ from it; the first and () if there is no majority."""
    (common, count), *_ = Counter(copy.of_all for copy in copies).most_common()
    if 2 * count <= len(copies):
        return copies[0], ()
    wrong = tuple(copy for copy in copies if copy.of_all != common)
    return next(copy for copy in copies if copy.of_all == common), wrong


def _gather_values(own: Values, group: dist.ProcessGroup) -> list[Values]:
    values = [own] * dist.get_world_size(group)
    with collectives.exclude_collectives():
        dist.all_gather_object(values, own, group=group)
    return values


def _ranks_text(copies: Sequence[CopyDigests]) -> str:
    """Names ranks with their hosts: `rank 0 (host a) and rank 1 (host b)`."""
    words = [f"rank {copy.rank} (host {copy.host})" for copy in copies[:8]]
    if len(copies) > 8:
        words.append(f"{len(copies) - 8} more")
    return words[0] if len(words) == 1 else f"{', '.join(words[:-1])} and {words[-1]}"


def _difference_text(difference: CopyDifference, numbers: int) -> str:
    share = f"{difference.numbers:,} of {numbers:,} numbers differ{'s' * (difference.numbers == 1)}"
    if difference.numbers == difference.bits == 1:
        share += " in one bit"
    return f"{share}, by up to {difference.distance:.3g}"
