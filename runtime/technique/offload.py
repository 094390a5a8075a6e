"""Keeps tensors in the host's memory while the device does not need them.

Model: three techniques, each of a library.

    activations               torch's `saved_tensors_hooks`: what autograd keeps goes to pinned memory and comes back
                              in the backward pass; parameters stay, which autograd keeps by reference only
    optimizer, parameters     torch's `CPUOffloadPolicy` for `fully_shard`: shards of parameters live on the host,
                              gradients go there, and the update is done there
    optimizer                 torchao's `CPUOffloadOptimizer`, for one rank: a copy of the parameters on the host is
                              updated there as gradients come in

Contract: the numbers are the same as without offloading, except for an update by the CPU's kernel.

Limits: `CPUOffloadOptimizer` takes gradients as soon as the backward pass has made them, so the compiler lets none be
clipped, scaled or agreed on beside it. It leaves parameters of fewer than 4,096 numbers to an optimizer on the GPU.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks

from dslc.compiler.ir.program import JobProgram
from dslc.compiler.trace.private_torch import base_of, is_distributed, local_part, spec_of

if TYPE_CHECKING:
    from torch.distributed.fsdp import OffloadPolicy


class OffloadError(RuntimeError):
    """The machine lacks a library or device that `memory.offload` needs."""


# ------------------------------------------------------------------------------------------------ activations


class _Activations(saved_tensors_hooks):
    """Moves the tensors that autograd saves to the host, except parameters and views of them; of a DTensor, this rank's
    share.

    A replacement for torch's `save_on_cpu` (2.13), which waits for each copy, and returns pinned tensors with other
    strides than they had, on which the compiled backward pass relies. Here copies are queued on the computing stream.
    """

    def __init__(self, pin_memory: bool) -> None:
        def pack(tensor: Tensor) -> Tensor | _HostCopy | _HostShard:
            if _is_parameter(tensor):
                return tensor
            if is_distributed(tensor):
                return _HostShard(_moved(local_part(tensor), pin_memory), spec_of(tensor))
            return _moved(tensor, pin_memory)

        def unpack(packed: Tensor | _HostCopy | _HostShard) -> Tensor:
            if isinstance(packed, Tensor):
                return packed
            if isinstance(packed, _HostShard):
                from torch.distributed.tensor import DTensor

                return DTensor(_back(packed.kept), packed.spec, requires_grad=False)
            return _back(packed)

        super().__init__(pack, unpack)


class _HostCopy(NamedTuple):
    """The numbers of a tensor on the host, each once, with its device, size and strides."""

    numbers: Tensor
    device: torch.device
    size: torch.Size
    stride: tuple[int, ...]


class _HostShard(NamedTuple):
    """A saved DTensor: this rank's share, and its layout over the ranks."""

    kept: _HostCopy
    spec: object


def _moved(tensor: Tensor, pin_memory: bool) -> _HostCopy:
    once = tensor
    for dim, (size, step) in enumerate(zip(tensor.size(), tensor.stride(), strict=True)):
        if step == 0 and size > 1:  # an expanded dimension: the same numbers again and again
            once = once.narrow(dim, 0, 1)
    numbers = torch.empty_like(once, device="cpu", pin_memory=pin_memory)
    numbers.copy_(once, non_blocking=pin_memory)
    return _HostCopy(numbers, tensor.device, tensor.size(), tensor.stride())


def _back(kept: _HostCopy) -> Tensor:
    numbers = kept.numbers
    if numbers.size() == kept.size and numbers.stride() == kept.stride:
        return numbers.to(kept.device, non_blocking=True)
    made = torch.empty_strided(numbers.size(), kept.stride, dtype=numbers.dtype, device=kept.device)
    return made.copy_(numbers, non_blocking=True).expand(kept.size)


def _is_parameter(tensor: Tensor) -> bool:
    return isinstance(tensor, nn.Parameter) or isinstance(base_of(tensor), nn.Parameter)


def activations(job: JobProgram, device: torch.device) -> Callable[[], contextlib.AbstractContextManager[object]]:
    """Returns the function that makes the context for the forward pass of a micro-batch."""
    if "activations" not in job.offload:
        return contextlib.nullcontext
    return lambda: _Activations(pin_memory=device.type == "cuda")


# --------------------------------------------------------------------------------------- parameters and optimizer


def policy(job: JobProgram, device: torch.device) -> OffloadPolicy:
    from torch.distributed.fsdp import CPUOffloadPolicy, OffloadPolicy

    return CPUOffloadPolicy(pin_memory=device.type == "cuda") if "parameters" in job.offload else OffloadPolicy()


def home(job: JobProgram, device: torch.device) -> torch.device:
    return torch.device("cpu") if "parameters" in job.offload else device


def moves_optimizer(job: JobProgram) -> bool:
    return "optimizer" in job.offload and "parameters" not in job.offload


def settle(optimizer: Any) -> None:
    """Lets the device wait for parameters that an offloaded optimizer is still sending back."""
    if hasattr(optimizer, "optim_dict"):  # torchao's
        torch.cuda.current_stream().wait_stream(optimizer.stream)


def optimizer(
    kind: type[torch.optim.Optimizer], groups: list[dict[str, object]], arguments: dict[str, object]
) -> torch.optim.Optimizer:
    """Returns the optimizer `kind` over `groups` on a GPU, with its state on the host. Raises OffloadError."""
    try:
        from torchao.optim import CPUOffloadOptimizer
    except ImportError as error:
        raise OffloadError(
            f"`memory.offload = [optimizer]` needs torchao ({error}): `pip install torchao`, or leave it out"
        ) from error
    made: torch.optim.Optimizer = CPUOffloadOptimizer(groups, kind, **arguments)
    return made
