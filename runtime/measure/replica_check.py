"""Compares what all ranks should hold alike: samples by their number, and the tensors of a model that ranks share.

Model: each rank makes the data set for itself. Before the first step the ranks compare digests of samples of each
split: `FEW`, and up to `MANY` more that take no longer than `SECONDS`. Those that differ are read again: what differs
from read to read is not compared, unless one rank draws anew what another does not.

Parameters with copies on several ranks are compared by a digest of each, a sum of its bits: after the first steps,
after each evaluation, and before each checkpoint. With `train.check_replicas` they are then equal to the bit, also
every few steps (bit_equality.py). Copies over a tensor axis, whose gradients are not exchanged, are
compared after the first steps alone: rounding may lead them apart. A large model is compared by every n-th number of a
tensor, `NUMBERS` in all. Buffers are compared where their statistics cover all ranks.

Contract: a difference is an error on all ranks, which names the sample or the tensor, and the ranks. Nothing is read
between these times. Reads leave the host's random generators as they were, and are done by a worker where workers read
the samples of the training.

Limits: samples of streams are not compared, as only one rank reads each; nor weights that differ by design (exchanges).
Copies that differ by less than `ROUNDING` of their largest number count as equal: processors of different kinds round
differently.
"""

from __future__ import annotations

import dataclasses
import itertools
import random
import time
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, NoReturn

import torch
import torch.distributed as dist
from torch import Tensor, nn

from dslc.compiler.ir.program import JobProgram, RankPlace
from dslc.compiler.trace.private_torch import local_part
from dslc.compiler.trace.structures import named
from dslc.runtime.data.batches import read_batches
from dslc.runtime.data.samples import Samples, Splits
from dslc.runtime.data.splits import sample_name
from dslc.runtime.measure import collectives
from dslc.runtime.measure.bit_equality import BitEqualityCheck
from dslc.runtime.measure.copy_digests import RanksDifferError, bit_sums, digest, raise_at_user_code
from dslc.runtime.parallel.mesh import mesh_of
from dslc.runtime.process.job_line import mark_errors
from dslc.runtime.process.random_numbers import preserve_generators
from dslc.runtime.step.assemble import TrainingComponents

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh

FEW, MANY = 4, 60  # samples of the training data that are compared, and more of them; half as many of other splits
SECONDS = 0.1  # that reading the samples of a split takes, beyond the first few
READS, REPEATED = 8, 8  # of a sample that differs, and such samples that are read again

FIRST = 3  # steps of a process after which parameters are compared
ROUNDING = 1e-4

Numbered = tuple[str, Samples, int]  # a split, its samples, and a number among them


# ------------------------------------------------------------------------------------------------------------ samples


def compare_samples(job: JobProgram, place: RankPlace, splits: Splits, device: torch.device) -> None:
    """Raises RanksDifferError if the ranks hold different samples under one number."""
    if job.world_size == 1 or splits.stream is not None or job.data.stream is not None:
        return
    seconds = _compare_read(job, place, _some(splits, 0, FEW), device)
    affordable = torch.tensor(min(MANY, int(SECONDS / max(seconds, 1e-9))), device=device)
    with collectives.exclude_collectives():
        dist.all_reduce(affordable, dist.ReduceOp.MIN)
    _compare_read(job, place, _some(splits, FEW, FEW + int(affordable)), device)


def _compare_read(job: JobProgram, place: RankPlace, numbered: Sequence[Numbered], device: torch.device) -> float:
    """Reads and compares samples; returns the seconds that reading another sample takes here."""
    first_digests, seconds = _leaf_digests(job, place, numbered)
    digests = [
        digest("".join(f"{name} {digests_by_name[name]} " for name in digests_by_name))
        for digests_by_name in first_digests
    ]
    differing = [numbered[position] for position in _differing(digests, device)] if digests else []
    if differing:
        _compare_again(job, place, differing[:REPEATED])
    return seconds


def _compare_again(job: JobProgram, place: RankPlace, numbered: Sequence[Numbered]) -> None:
    """Reads samples that differ several times, and raises RanksDifferError for parts not drawn anew each time."""
    reads = [_leaf_digests(job, place, [entry] * READS)[0] for entry in numbered]
    of_all = [reads] * job.world_size
    dist.all_gather_object(of_all, reads)
    for n, (split, _, number) in enumerate(numbered):
        if (difference := _first_difference([reads_of_rank[n] for reads_of_rank in of_all])) is not None:
            rank, leaf = difference
            sample = sample_name(job.data, split, number)
            _end_by_samples(job, place, f"{sample} is not the same on rank 0 and rank {rank}: its {leaf} differs")
    if (difference := _drawn_by_one(of_all)) is not None:
        rank, leaf = difference
        anew, fixed = (0, rank) if _changes(of_all[0][0], leaf) else (rank, 0)
        sample = sample_name(job.data, numbered[0][0], numbered[0][2])
        text = f"{sample} is drawn anew at each access on rank {anew}, and is the same each time on rank {fixed}"
        _end_by_samples(job, place, f"{text}: its {leaf} differs")


def _end_by_samples(job: JobProgram, place: RankPlace, message: str) -> NoReturn:
    with mark_errors(job.data.line):
        error = RanksDifferError(message, is_reported=place.rank == 0)
        error.add_note(
            "each rank makes the data set for itself, and all have to make the same: what one holds out, another "
            "trains on"
        )
        error.add_note(
            "give generators a seed (`numpy.random.default_rng(0)`), and sort the names of a set or a folder"
        )
        raise error


def _some(splits: Splits, start: int, end: int) -> list[Numbered]:
    """Returns samples `start` to `end` of those that are compared of the training data, and half as many of others."""
    numbered: list[Numbered] = []
    for split, samples in (("train", splits.train), ("validation", splits.validation), ("test", splits.test)):
        part = 1 if split == "train" else 2
        if samples is not None:
            numbered += [(split, samples, number) for number in _numbers(len(samples))[start // part : end // part]]
    return numbered


def _numbers(count: int) -> list[int]:
    """Returns numbers of samples, the same on all ranks: the first, the middle and the last one, and random ones."""
    some = random.Random(count).sample(range(count), min(count, FEW + MANY))
    return list(dict.fromkeys((0, count // 2, count - 1, *some))) if count else []


def _leaf_digests(
    job: JobProgram, place: RankPlace, numbered: Sequence[Numbered]
) -> tuple[list[dict[str, int]], float]:
    """Returns the digests of samples' tensors by name, and the seconds that the quickest sample but the first took."""
    digests: list[dict[str, int]] = []
    seconds = 0.0
    for _, group in itertools.groupby(numbered, key=lambda entry: entry[0]):
        rest = list(group)
        samples = rest[0][1]
        step = dataclasses.replace(job.data, workers=1 if job.data.workers and samples.by_process else 0)
        batches = [torch.tensor([number]) for _, _, number in rest]
        some: list[dict[str, int]] = []
        times: list[float] = []
        with preserve_generators():
            try:
                for pair in read_batches(step, samples, place, batches, torch.device("cpu")):
                    parts = [(what, named(part)) for what, part in zip(("input", "target"), pair, strict=True)]
                    some.append({what + name: _of_tensor(leaf) for what, part in parts for name, leaf in part.items()})
                    times.append(time.monotonic())
            except Exception as error:  # any kind: the user's code runs; the training raises it where it needs it
                some += [{"error": digest(type(error).__name__)}] * (len(rest) - len(some))
        digests += some
        seconds = max(seconds, min((b - a for a, b in itertools.pairwise(times)), default=0.0))
    return digests, seconds


def _of_tensor(tensor: Tensor) -> int:
    content = tensor.detach().cpu().reshape(-1).contiguous().view(torch.uint8).numpy().tobytes()
    return digest(f"{tuple(tensor.shape)} {tensor.dtype} ".encode() + content)


def _differing(digests: Sequence[int], device: torch.device, group: dist.ProcessGroup | None = None) -> list[int]:
    """Returns the places at which the ranks of a group (None: all ranks) have different numbers."""
    own_digests = torch.tensor(digests, dtype=torch.int64, device=device)
    both = torch.stack((own_digests, -own_digests))
    with collectives.exclude_collectives():
        dist.all_reduce(both, dist.ReduceOp.MAX, group=group)
    positions: list[int] = (both[0] != -both[1]).nonzero().flatten().tolist()
    return positions


def _first_difference(of_all: Sequence[Sequence[Mapping[str, int]]]) -> tuple[int, str] | None:
    """Returns the first rank and part of a sample that differs from rank 0's in each read."""
    for rank, reads in enumerate(of_all):
        for name in {**of_all[0][0], **reads[0]}:
            if of_all[0][0].get(name) != reads[0].get(name) and not any(
                _changes(rank_reads, name) for rank_reads in of_all
            ):
                return rank, name
    return None


def _drawn_by_one(of_all: Sequence[Sequence[Sequence[Mapping[str, int]]]]) -> tuple[int, str] | None:
    """Returns the first rank, and the part, that it or rank 0 alone draws anew in each of several samples."""
    if len(of_all[0]) < REPEATED // 2:
        return None
    for rank, samples in enumerate(of_all):
        for name in samples[0][0]:
            one, another = ([_changes(reads, name) for reads in rank_reads] for rank_reads in (of_all[0], samples))
            if (all(one) and not any(another)) or (all(another) and not any(one)):
                return rank, name
    return None


def _changes(reads: Sequence[Mapping[str, int]], name: str) -> bool:
    return len({digests.get(name) for digests in reads}) > 1


# --------------------------------------------------------------------------------------------------------- parameters


class ReplicaCheck:
    """Compares, at some steps, the tensors with copies on several ranks. Made by all ranks."""

    def __init__(
        self, job: JobProgram, place: RankPlace, parts: TrainingComponents, newest_checkpoint: Callable[[], str]
    ) -> None:
        self._job, self._rank, self._parts = job, place.rank, parts
        self._done, self._compared = 0, -1
        self._groups: dict[dist.ProcessGroup, dict[str, Tensor]] = {}
        self._tensor_axis: dist.ProcessGroup | None = None
        self._bit_equality: BitEqualityCheck | None = None
        self._over_tensor_axis: dict[str, Tensor] = {}
        exchange = parts.exchange
        if job.world_size == 1 or job.gradients.kind == "local" or (exchange is not None and exchange.differ):
            return
        all_ranks, self._tensor_axis = mesh_of(job).group("data", "context"), mesh_of(job).group("tensor")
        tensors: dict[str, Tensor] = dict(parts.plain.named_parameters())
        if job.sync_batch_norm:
            unsynchronised = _unsynchronised(parts.plain)
            tensors |= {
                name: buffer
                for name, buffer in parts.plain.named_buffers()
                if buffer.is_floating_point() and id(buffer) not in unsynchronised
            }
        for name, tensor in tensors.items():
            for group in _groups_of_copies(tensor, all_ranks):
                self._groups.setdefault(group, {})[name] = tensor
            if self._tensor_axis is not None and not _belongs_to_axis(tensor, "tensor"):
                self._over_tensor_axis[name] = tensor
        if job.check_replicas:
            copies: dict[dist.ProcessGroup, dict[str, Tensor]] = {}
            for name, parameter in parts.plain.named_parameters():
                for group in _groups_of_copies(parameter, all_ranks, except_axis="tensor"):
                    copies.setdefault(group, {})[name] = parameter
            self._bit_equality = BitEqualityCheck(job, place.rank, parts.device, copies, newest_checkpoint)

    def is_due(self, step: int) -> bool:
        """True if `train.check_replicas` asks for a comparison after this step."""
        return self._bit_equality is not None and step % self._job.check_replicas == 0

    def after_step(self, step: int) -> None:
        """Compares them if this is one of the first steps of this process."""
        self._done += 1
        if self._done <= FIRST:
            self.compare(step)
            if self._tensor_axis is not None:
                self._compare_copies(step, self._over_tensor_axis, self._tensor_axis)

    def compare(self, step: int) -> None:
        """Raises RanksDifferError if a tensor is not the same on the ranks that hold copies of it."""
        if self._compared == step:
            return
        self._compared = step
        if self._bit_equality is not None:
            self._bit_equality.compare(step)
        for group, tensors in self._groups.items():
            self._compare_copies(step, tensors, group)

    def _compare_copies(self, step: int, tensors: Mapping[str, Tensor], group: dist.ProcessGroup) -> None:
        digests = bit_sums(list(tensors.values()))
        for place in _differing(digests, self._parts.device, group) if digests else ():
            name, tensor = list(tensors.items())[place]
            self._hold_alike(step, name, local_part(tensor), group)

    @torch.no_grad()
    def _hold_alike(self, step: int, name: str, own_tensor: Tensor, group: dist.ProcessGroup) -> None:
        """Raises RanksDifferError if a tensor differs from its copy on the group's first rank by more than rounding."""
        own_tensor = own_tensor.to(self._parts.device)  # a group of GPUs takes nothing of the host's
        first_tensor = own_tensor.clone(memory_format=torch.contiguous_format)
        dist.broadcast(first_tensor, group_src=0, group=group)
        farthest = (
            (own_tensor - first_tensor).abs().max().double()
            if own_tensor.numel()
            else torch.zeros((), dtype=torch.float64)
        )
        largest = first_tensor.abs().max().double() if own_tensor.numel() else farthest
        differs_much = (
            not bool(farthest <= ROUNDING * largest) and not (own_tensor.isnan() & first_tensor.isnan()).any()
        )
        of_all = [(self._rank, bool(differs_much), float(farthest))] * dist.get_world_size(group)
        dist.all_gather_object(of_all, of_all[0], group=group)
        different_ranks = [(rank, distance) for rank, differs, distance in of_all if differs]
        if not different_ranks:
            return
        lowest, (rank, distance) = of_all[0][0], different_ranks[0]
        error = RanksDifferError(
            f"after step {step}, `{name}` is not the same on rank {lowest} and rank {rank}: it differs by "
            f"{distance:.3g}, and all ranks do the same updates",
            is_reported=self._rank == lowest,
        )
        raise_at_user_code(error, self._job)


def _unsynchronised(model: nn.Module) -> set[int]:
    """Returns the identities of the buffers of batch norms with `sync = false`, which each rank moves by itself."""
    norms = (module for module in model.modules() if not getattr(module, "sync", True))
    return {id(buffer) for norm in norms for buffer in norm.buffers(recurse=False)}


def _belongs_to_axis(tensor: Tensor, axis: str) -> bool:
    """True if a tensor is sharded over an axis, or kept whole there by its layout."""
    mesh: DeviceMesh | None = getattr(tensor, "device_mesh", None)
    return mesh is not None and axis in (mesh.mesh_dim_names or ())


def _groups_of_copies(
    tensor: Any, all_ranks: dist.ProcessGroup | None, except_axis: str = ""
) -> list[dist.ProcessGroup]:
    """Returns the groups of ranks with the same part of a tensor; `all_ranks` have an unsharded one."""
    if not hasattr(tensor, "placements"):
        return [all_ranks] if all_ranks is not None else []
    mesh = tensor.device_mesh
    axes = mesh.mesh_dim_names or ("",) * mesh.ndim
    dims = [
        dim
        for dim, placement in enumerate(tensor.placements)
        if placement.is_replicate() and (not except_axis or axes[dim] != except_axis)
    ]
    return [mesh.get_group(dim) for dim in dims if mesh.size(dim) > 1]
