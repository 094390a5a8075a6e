"""What is kept in the host's memory while the device does not need it.

Model: three techniques, each of a library.

    activations               torch's `save_on_cpu`: what autograd keeps goes to pinned memory and comes back in the
                              backward pass; parameters stay, which autograd keeps by reference only
    optimizer, parameters     torch's `CPUOffloadPolicy` for `fully_shard`: shards of parameters live on the host,
                              gradients go there, and the update is done there
    optimizer                 torchao's `CPUOffloadOptimizer`, for one rank: a copy of the parameters on the host is
                              updated there as gradients come in

Contract: the numbers are those of the training that moves nothing, but for an update by the CPU's kernel.

Limits: `CPUOffloadOptimizer` takes gradients as soon as the backward pass has made them, so the compiler lets none be
clipped, scaled or agreed on beside it.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.autograd.graph import save_on_cpu

from dslc.compiler.program import JobProgram

if TYPE_CHECKING:
    from torch.distributed.fsdp import OffloadPolicy


class OffloadError(RuntimeError):
    """The machine has not what `memory.offload` needs."""


# ------------------------------------------------------------------------------------------------ activations


class _Activations(save_on_cpu):
    """`save_on_cpu` that leaves parameters, and views of them, where they are, and takes a rank's share of a tensor."""

    def __init__(self, pin_memory: bool) -> None:
        super().__init__(pin_memory=pin_memory)
        plain_pack, plain_unpack = self.pack_hook, self.unpack_hook

        def pack(tensor: Any) -> Any:
            if _is_parameter(tensor):
                return tensor
            if hasattr(tensor, "_local_tensor"):
                return _Share(plain_pack(tensor._local_tensor), tensor._spec)
            return plain_pack(tensor)

        def unpack(packed: Any) -> Tensor:
            if isinstance(packed, Tensor):
                return packed
            if isinstance(packed, _Share):
                from torch.distributed.tensor import DTensor

                return DTensor(plain_unpack(packed.kept), packed.spec, requires_grad=False)
            moved: Tensor = plain_unpack(packed)
            return moved

        self.pack_hook, self.unpack_hook = pack, unpack


class _Share(NamedTuple):
    """A DTensor: what `save_on_cpu` has kept of this rank's share, and how it lies on the ranks."""

    kept: Any
    spec: Any


def _is_parameter(tensor: Tensor) -> bool:
    return isinstance(tensor, nn.Parameter) or isinstance(tensor._base, nn.Parameter)


def activations(job: JobProgram, device: torch.device) -> Callable[[], contextlib.AbstractContextManager[Any]]:
    """Makes what the forward pass of a micro-batch runs in."""
    if "activations" not in job.offload:
        return contextlib.nullcontext
    return lambda: _Activations(pin_memory=device.type == "cuda")


# --------------------------------------------------------------------------------------- parameters and optimizer


def policy(job: JobProgram, device: torch.device) -> OffloadPolicy:
    """What `fully_shard` is told."""
    from torch.distributed.fsdp import CPUOffloadPolicy, OffloadPolicy

    return CPUOffloadPolicy(pin_memory=device.type == "cuda") if "parameters" in job.offload else OffloadPolicy()


def home(job: JobProgram, device: torch.device) -> torch.device:
    """Where shards of parameters live."""
    return torch.device("cpu") if "parameters" in job.offload else device


def moves_optimizer(job: JobProgram) -> bool:
    """Whether the optimizer's state alone is moved."""
    return "optimizer" in job.offload and "parameters" not in job.offload


def optimizer(
    kind: type[torch.optim.Optimizer], groups: list[dict[str, Any]], arguments: dict[str, Any]
) -> torch.optim.Optimizer:
    """The optimizer `kind` over `groups` of parameters on a GPU, its state on the host. Raises OffloadError."""
    try:
        from torchao.optim import CPUOffloadOptimizer
    except ImportError as error:
        raise OffloadError(
            f"`memory.offload = [optimizer]` needs torchao ({error}): `pip install torchao`, or leave it out"
        ) from error
    made: torch.optim.Optimizer = CPUOffloadOptimizer(groups, kind, **arguments)
    return made
