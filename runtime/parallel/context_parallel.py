"""The context axis: each rank has a contiguous piece of every sequence, of inputs and targets alike.

Model: all layers but attention work on each position by itself. In attention a rank's queries meet the keys and values
of all pieces, which one all-gather brings (one reduce-scatter returns the gradients); under a causal mask, those of its
own piece and the pieces before it. All ranks have the same parameters, and sum their gradients like ranks with other
samples.

Contract: `apply` changes modules in place; names and parameters stay. `piece_of` returns the function that cuts inputs
and targets, (batch, length, …) along the length. The pieces of one sequence are equal.

Limits: each rank holds keys and values of the whole sequence while a layer works (no ring). Later ranks do more of a
causal layer's work than earlier ones. Only layers that the compiler admits work here.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from dslc.compiler.ir.program import JobProgram
from dslc.compiler.trace.private_torch import gather_with_gradient
from dslc.runtime.model import llama_modules
from dslc.runtime.model.llama_modules import GroupedAttention
from dslc.runtime.model.modules import Attention, PositionalEmbedding
from dslc.runtime.parallel.mesh import mesh_of


def apply(job: JobProgram, model: nn.Module) -> None:
    """Makes the attention of `model` meet the whole sequence, and lets positions begin at this rank's."""
    if job.axes["context"] == 1:
        return
    mesh = mesh_of(job)
    number, group = mesh.coordinates["context"], mesh.group("context")
    for module in model.modules():
        if isinstance(module, Attention | GroupedAttention):
            module.attend = functools.partial(attend, number=number, group=group)
        if isinstance(module, PositionalEmbedding | GroupedAttention):
            module.piece = number


def attend(
    query: Tensor, key: Tensor, value: Tensor, is_causal: bool, window: int | None = None, *, number: int, group: Any
) -> Tensor:
    """Returns the attention for this rank's queries, piece `number` of a sequence, (batch, heads, length, head_dim)."""
    first, own = number * query.shape[2], query.shape[2]
    # Not torch.distributed.nn's all_gather, whose gradient is wrong for permuted strides.
    gathered = gather_with_gradient(torch.stack((key, value)).contiguous(), dim=3, group=group)
    keys, values = gathered.unbind(0)
    if is_causal:
        keys, values = keys[:, :, : first + own], values[:, :, : first + own]
    else:
        first = 0
    return llama_modules.attend(query, keys, values, is_causal=is_causal, window=window, first=first)


def piece_of(job: JobProgram) -> Callable[[Tensor], Tensor]:
    """Returns the function that takes this rank's piece of a batch of sequences."""
    if job.axes["context"] == 1:
        return _all_of_it
    number, count = mesh_of(job).coordinates["context"], job.axes["context"]

    def cut(tensor: Tensor) -> Tensor:
        own = tensor.shape[1] // count
        assert own * count == tensor.shape[1], "the compiler sees to it that pieces are equal"
        return tensor.narrow(1, number * own, own)

    return cut


def joined(job: JobProgram, output: Tensor) -> Tensor:
    """Gathers the whole from each rank's piece `output`; all ranks of the axis call this."""
    group = mesh_of(job).group("context")
    if group is None:
        return output
    pieces = [torch.empty_like(output) for _ in range(job.axes["context"])]
    dist.all_gather(pieces, output.contiguous(), group=group)
    return torch.cat(pieces, dim=1)


def _all_of_it(tensor: Tensor) -> Tensor:
    return tensor
