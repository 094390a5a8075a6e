"""Compares what all ranks should hold alike: samples by their number, and the tensors of a model that ranks share.

Model: each rank makes the data set for itself. Before the first step it reads a few samples of each split, and the
ranks compare their digests. Where some differ, all read these again: what a rank gives otherwise the second time is
drawn anew for each access, and is not compared.

Parameters of which ranks hold copies are compared by a digest of each, a sum of its bits: after the first steps, after
each evaluation, and before each checkpoint. A large model is compared by every n-th number of a tensor, `NUMBERS` in
all. Buffers are compared where their statistics are those of all ranks.

Contract: a difference is an error on all ranks, which names the sample or the tensor, and the ranks. Nothing is read
between these times. Reads leave the host's random generators as they were, and are done by a worker where workers read
the samples of the training.

Limits: samples of streams are not compared, each of which one rank reads; nor weights that differ by design
(exchanges). Copies that differ by less than `ROUNDING` of their largest number count as equal: processors of different
kinds round differently.
"""

from __future__ import annotations

import dataclasses
import hashlib
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from dslc.compiler.ir.program import JobProgram, RankPlace
from dslc.compiler.trace.private_torch import local_part
from dslc.compiler.trace.structures import named
from dslc.runtime.data.batches import read_batches
from dslc.runtime.data.held_out import sample_name
from dslc.runtime.data.samples import Samples, Splits
from dslc.runtime.measure import collectives
from dslc.runtime.parallel.mesh import mesh_of
from dslc.runtime.process.job_line import at
from dslc.runtime.process.random_numbers import aside
from dslc.runtime.step.assemble import Parts

FIRST = 3  # steps of a process after which parameters are compared
NUMBERS = 1 << 24  # of a model, compared at once
ROUNDING = 1e-4

_INTEGERS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


class RanksDifferError(RuntimeError):
    """Ranks that hold different samples or parameters. The text is for the user; `told` on the rank that reports it."""

    def __init__(self, message: str, *, told: bool) -> None:
        super().__init__(message)
        self.told = told


# ------------------------------------------------------------------------------------------------------------ samples


def compare_samples(job: JobProgram, place: RankPlace, splits: Splits, device: torch.device) -> None:
    """Raises RanksDifferError if the ranks hold different samples under one number."""
    if job.world_size == 1 or splits.stream is not None or job.data.stream is not None:
        return
    numbered = list(_some(splits))
    first = [_leaf_digests(job, place, *each, times=1)[0] for each in numbered]
    differing = _differing([_digest("".join(f"{name} {each[name]} " for name in each)) for each in first], device)
    for n in differing:
        split, samples, number = numbered[n]
        one, other = _leaf_digests(job, place, split, samples, number, times=2)
        of_all: list[Any] = [None] * job.world_size
        dist.all_gather_object(of_all, {name: [value, other.get(name)] for name, value in one.items()})
        if (found := _first_difference(of_all)) is None:
            continue
        rank, leaf = found
        with at(job.data.line):
            error = RanksDifferError(
                f"{sample_name(job.data, split, number)} is not the same on rank 0 and rank {rank}: its {leaf} differs",
                told=place.rank == 0,
            )
            error.add_note(
                "each rank makes the data set for itself, and all have to make the same: what one holds out, another "
                "trains on"
            )
            error.add_note(
                "give generators a seed (`numpy.random.default_rng(0)`), and sort the names of a set or a folder"
            )
            raise error


def _some(splits: Splits) -> Iterator[tuple[str, Samples, int]]:
    """Yields some samples of each split: its name, its samples, and a number among them."""
    for split, samples in (("train", splits.train), ("validation", splits.validation), ("test", splits.test)):
        count = 0 if samples is None else len(samples)
        for number in sorted({0, count // 2} if split == "train" else {0}):
            if samples is not None and number < count:
                yield split, samples, number


def _leaf_digests(
    job: JobProgram, place: RankPlace, split: str, samples: Samples, number: int, *, times: int
) -> list[dict[str, int]]:
    """Reads a sample so many times, in one process; returns each time the digests of its tensors, by their names."""
    step = dataclasses.replace(job.data, workers=1 if job.data.workers and samples.by_process else 0)
    with aside():
        try:
            pairs = list(read_batches(step, samples, place, [torch.tensor([number])] * times, torch.device("cpu")))
        except Exception as error:  # any kind: the user's code runs; the training raises it where it needs the sample
            return [{"error": _digest(type(error).__name__)}] * times
    return [
        {
            f"{what}{name}": _of_tensor(tensor)
            for what, part in zip(("input", "target"), pair, strict=True)
            for name, tensor in named(part).items()
        }
        for pair in pairs
    ]


def _of_tensor(tensor: Tensor) -> int:
    content = tensor.detach().cpu().reshape(-1).contiguous().view(torch.uint8).numpy().tobytes()
    return _digest(f"{tuple(tensor.shape)} {tensor.dtype} ".encode() + content)


def _digest(content: str | bytes) -> int:
    content = content.encode() if isinstance(content, str) else content
    return int.from_bytes(hashlib.blake2b(content, digest_size=7).digest())


def _differing(digests: Sequence[int], device: torch.device, group: dist.ProcessGroup | None = None) -> list[int]:
    """Returns the places at which the ranks of a group (None: all ranks) have different numbers."""
    own = torch.tensor(digests, dtype=torch.int64, device=device)
    both = torch.stack((own, -own))
    with collectives.aside():
        dist.all_reduce(both, dist.ReduceOp.MAX, group=group)
    found: list[int] = (both[0] != -both[1]).nonzero().flatten().tolist()
    return found


def _first_difference(of_all: Sequence[Mapping[str, list[int]]]) -> tuple[int, str] | None:
    """Returns the first rank, and the part of the sample, that differs from rank 0's and is not drawn anew."""
    changing = {name for told in of_all for name, (value, again) in told.items() if value != again}
    for rank, told in enumerate(of_all):
        for name in {**of_all[0], **told}:
            if name not in changing and told.get(name) != of_all[0].get(name):
                return rank, name
    return None


# --------------------------------------------------------------------------------------------------------- parameters


class ReplicaCheck:
    """Compares, at some steps, the tensors of which several ranks hold copies. Made by all ranks."""

    def __init__(self, job: JobProgram, place: RankPlace, parts: Parts) -> None:
        self._job, self._rank, self._parts = job, place.rank, parts
        self._done, self._compared = 0, -1
        self._groups: dict[dist.ProcessGroup, dict[str, Tensor]] = {}
        exchange = parts.exchange
        if job.world_size == 1 or job.gradients.kind == "local" or (exchange is not None and exchange.differ):
            return
        whole = mesh_of(job).group("data", "context")
        tensors: dict[str, Tensor] = dict(parts.plain.named_parameters())
        if job.sync_batch_norm:
            alone = _unsynchronised(parts.plain)
            tensors |= {
                name: each
                for name, each in parts.plain.named_buffers()
                if each.is_floating_point() and id(each) not in alone
            }
        for name, tensor in tensors.items():
            for group in _groups_of_copies(tensor, whole):
                self._groups.setdefault(group, {})[name] = tensor

    def after_step(self, step: int) -> None:
        """Compares them if this is one of the first steps of this process."""
        self._done += 1
        if self._groups and self._done <= FIRST:
            self.compare(step)

    @torch.no_grad()
    def compare(self, step: int) -> None:
        """Raises RanksDifferError if a tensor is not the same on the ranks that hold copies of it."""
        if self._compared == step:
            return
        self._compared = step
        for group, tensors in self._groups.items():
            digests = bit_sums(list(tensors.values()))
            for place in _differing(digests, self._parts.device, group):
                name, tensor = list(tensors.items())[place]
                self._hold_alike(step, name, local_part(tensor), group)

    def _hold_alike(self, step: int, name: str, own: Tensor, group: dist.ProcessGroup) -> None:
        """Raises RanksDifferError if a tensor differs from that of the group's first rank by more than rounding."""
        own = own.to(self._parts.device)  # a group of GPUs takes nothing of the host's
        first = own.clone(memory_format=torch.contiguous_format)
        dist.broadcast(first, group_src=0, group=group)
        farthest = (own - first).abs().max().double() if own.numel() else torch.zeros((), dtype=torch.float64)
        largest = first.abs().max().double() if own.numel() else farthest
        bad = not bool(farthest <= ROUNDING * largest) and not (own.isnan() & first.isnan()).any()
        of_all: list[Any] = [None] * dist.get_world_size(group)
        dist.all_gather_object(of_all, [self._rank, bad, float(farthest)], group=group)
        others = [(rank, distance) for rank, differs, distance in of_all if differs]
        if not others:
            return
        lowest, (rank, distance) = of_all[0][0], others[0]
        error = RanksDifferError(
            f"after step {step}, `{name}` is not the same on rank {lowest} and rank {rank}: it differs by "
            f"{distance:.3g}, and all ranks do the same updates",
            told=self._rank == lowest,
        )
        hooks = self._job.hooks
        if hooks:
            named_hooks = ", ".join(f"`{hook.python.function}` ({hook.python.line})" for hook in hooks)
            error.add_note(f"a hook must not change it on one rank alone: {named_hooks}")
        error.add_note(
            "code of the network that writes to parameters (`.data`, `copy_`) has to do the same on each rank"
        )
        python = self._job.model.python
        with at(hooks[0].python.line if hooks else python.line if python is not None else ""):
            raise error


def _unsynchronised(model: nn.Module) -> set[int]:
    """Returns the identities of the buffers of batch norms with `sync = false`, which each rank moves by itself."""
    norms = (module for module in model.modules() if not getattr(module, "sync", True))
    return {id(buffer) for norm in norms for buffer in norm.buffers(recurse=False)}


def _groups_of_copies(tensor: Any, whole: dist.ProcessGroup | None) -> list[dist.ProcessGroup]:
    """Returns the groups of ranks that hold the same part of a tensor as this one; `whole` is that of a tensor which
    is not sharded.
    """
    if not hasattr(tensor, "placements"):
        return [whole] if whole is not None else []
    mesh = tensor.device_mesh
    dims = [dim for dim, placement in enumerate(tensor.placements) if placement.is_replicate()]
    return [mesh.get_group(dim) for dim in dims if mesh.size(dim) > 1]


@torch.no_grad()
def bit_sums(tensors: Sequence[Tensor]) -> list[int]:
    """Returns for each tensor a sum of its bits on this rank, of every n-th number if there are many in all."""
    if not tensors:
        return []
    local = [local_part(tensor).detach() for tensor in tensors]
    every = 1 + sum(tensor.numel() for tensor in local) // NUMBERS
    sums = [_bit_sum(tensor, every) for tensor in local]
    by_device: dict[torch.device, list[int]] = {}
    for place, each in enumerate(sums):
        by_device.setdefault(each.device, []).append(place)
    found = [0] * len(sums)
    for places in by_device.values():
        for place, value in zip(places, torch.stack([sums[place] for place in places]).tolist(), strict=True):
            found[place] = value
    return found


def _bit_sum(tensor: Tensor, every: int) -> Tensor:
    tensor = torch.view_as_real(tensor) if tensor.is_complex() else tensor
    bits = tensor.reshape(-1)[::every].contiguous().view(_INTEGERS[tensor.element_size()])
    # An odd factor for each place, so that numbers that change places show.
    factors = torch.arange(bits.numel(), device=bits.device).mul_(2).add_(1)
    return factors.mul_(bits).sum()
