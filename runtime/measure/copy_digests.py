"""Digests of tensors by their bits, and the error of ranks that hold different ones."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from typing import NoReturn

import torch
from torch import Tensor

from dslc.compiler.ir.program import JobProgram
from dslc.compiler.trace.private_torch import local_part
from dslc.runtime.process.job_line import mark_errors

NUMBERS = 1 << 24  # of a model, compared at once
CHUNK = 1 << 22  # numbers whose factors are held at once
_INTEGERS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


class RanksDifferError(RuntimeError):
    """Ranks that hold different samples or parameters. The text is for the user; `told` on the rank that reports it."""

    def __init__(self, message: str, *, is_reported: bool) -> None:
        super().__init__(message)
        self.told = is_reported


def digest(content: str | bytes) -> int:
    content = content.encode() if isinstance(content, str) else content
    return int.from_bytes(hashlib.blake2b(content, digest_size=7).digest())


def raise_at_user_code(error: RanksDifferError, job: JobProgram) -> NoReturn:
    """Raises an error of different parameters, at the line of the user's code that may have changed them."""
    hooks, python = job.hooks, job.model.python
    if hooks:
        named_hooks = ", ".join(f"`{hook.python.function}` ({hook.python.line})" for hook in hooks)
        error.add_note(f"a hook must not change it on one rank alone: {named_hooks}")
    error.add_note("code of the network that writes to parameters (`.data`, `copy_`) has to do the same on each rank")
    with mark_errors(hooks[0].python.line if hooks else python.line if python is not None else ""):
        raise error


@torch.no_grad()
def bit_sums(tensors: Sequence[Tensor], *, sampled: bool = True) -> list[int]:
    """Returns for each tensor a sum of its bits on this rank; if `sampled`, of every n-th number of a large model.

    A flipped bit changes the sum: it adds a power of two times an odd factor, which 64 bits do not lose.
    """
    if not tensors:
        return []
    local = [local_part(tensor).detach() for tensor in tensors]
    stride = 1 + sum(tensor.numel() for tensor in local) // NUMBERS if sampled else 1
    sums = [_bit_sum(tensor, stride) for tensor in local]
    by_device: dict[torch.device, list[int]] = {}
    for place, bit_sum in enumerate(sums):
        by_device.setdefault(bit_sum.device, []).append(place)
    sums_of_bits = [0] * len(sums)
    for places in by_device.values():
        for place, value in zip(places, torch.stack([sums[place] for place in places]).tolist(), strict=True):
            sums_of_bits[place] = value
    return sums_of_bits


def _bit_sum(tensor: Tensor, stride: int) -> Tensor:
    bits = bits_of(tensor, stride)
    total = torch.zeros((), dtype=torch.int64, device=bits.device)
    for begin in range(0, bits.numel(), CHUNK):
        part = bits[begin : begin + CHUNK]
        # An odd factor for each place, so that numbers that change places show.
        factors = torch.arange(begin, begin + part.numel(), device=bits.device).mul_(2).add_(1)
        total += factors.mul_(part).sum()
    return total


def bits_of(tensor: Tensor, stride: int = 1) -> Tensor:
    """Returns every n-th number of a tensor, flat, as an integer with the same bits."""
    tensor = torch.view_as_real(tensor) if tensor.is_complex() else tensor
    return tensor.reshape(-1)[::stride].contiguous().view(_INTEGERS[tensor.element_size()])
