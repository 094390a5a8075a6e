"""The expert axis: sends each token's rows to the ranks that hold the experts chosen for it, and their results back.

Model (Lepikhin et al. 2020, arXiv:2006.16668): ranks of the axis hold equal, contiguous parts of each layer's experts.
A rank sorts its rows by expert and tells each rank how many rows come for each of its experts (one all-to-all of
counts). One all-to-all brings the rows, the experts work on all rows that arrived, and a second all-to-all takes the
results back. The backward pass sends gradients the opposite ways. No row is dropped and none is padded.

Contract: all ranks of the group call `dispatch` equally often, in the same order, also a rank without rows. The result
has the order of the rows. `apply` takes a model on the meta device, before `fully_shard`, and cuts the experts'
parameters to DTensors, of which each rank has a part along the first dim. Names stay.

Limits: the host waits for the counts, because torch needs the sizes of the rows' all-to-alls.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from dslc.compiler.ir.program import JobProgram
from dslc.compiler.trace.private_torch import fully_shard_over, own_parameters
from dslc.runtime.parallel.mesh import EXPERT, Mesh, mesh_of

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh

Experts = Callable[[Tensor, Tensor], Tensor]  # rows sorted by expert, and the rows of each expert held: their results


def apply(job: JobProgram, model: nn.Module) -> None:
    """Cuts the experts of the layers of `job.experts`, in place, and lets rows travel to the ranks that hold them."""
    if job.experts is None:
        return
    mesh = mesh_of(job)
    assert mesh.root is not None
    group, axis = mesh.root.get_group(EXPERT), mesh.root[EXPERT]
    mixtures = {name.rpartition(".")[0]: name.rpartition(".")[2] for name, _ in job.experts.layers}
    for name, module in model.named_modules():
        if name in mixtures:  # of a pipeline, a stage has some of them
            experts: Any = module.get_submodule(mixtures[name])
            module.dispatch = functools.partial(dispatch, group=group)
            _cut(experts, axis)
            experts.forward = functools.partial(_with_local_parameters, experts, experts.forward)


def _cut(experts: nn.Module, axis: DeviceMesh) -> None:
    """Replaces the parameters, which have no numbers yet, by DTensors of which this rank has a part."""
    from torch.distributed.tensor import DTensor, Shard

    for name, parameter in list(experts.named_parameters(recurse=False)):
        held = parameter.detach().chunk(axis.size(), 0)[0].clone()
        cut = DTensor.from_local(held, axis, [Shard(0)], run_check=False)
        experts.register_parameter(name, nn.Parameter(cut, requires_grad=parameter.requires_grad))


def _with_local_parameters(experts: nn.Module, forward: Experts, rows: Tensor, counts: Tensor) -> Tensor:
    """Runs the experts' forward pass with the parts of their parameters that this rank holds, as plain tensors."""
    own = own_parameters(experts)
    parameters: dict[str, Any] = dict(own)
    own.update({name: parameter.to_local() for name, parameter in parameters.items()})
    try:
        return forward(rows, counts)
    finally:
        own.update(parameters)


def placement(axes: Mesh, replicas: int) -> Callable[[Tensor], Any]:
    """Returns the function by which `fully_shard` takes the mesh of a parameter: for experts, the ranks that hold the
    same ones.
    """
    return fully_shard_over(axes.sharded_experts(replicas), lambda parameter: hasattr(parameter, "placements"))


def dispatch(experts: Experts, rows: Tensor, counts: Tensor, *, group: dist.ProcessGroup) -> Tensor:
    """Returns the results of `rows` (n, width), which are sorted by expert; `counts` (experts,) sum to n.

    `experts` works on the rows of the experts that this rank holds, sorted by expert, and is given their counts.
    """
    sent = counts.view(group.size(), -1)  # (ranks, experts held by each)
    arriving = torch.empty_like(sent)
    dist.all_to_all_single(arriving, sent.contiguous(), group=group)
    sent_sizes, arriving_sizes = torch.stack((sent.sum(1), arriving.sum(1))).tolist()  # the host waits once
    arrived = _exchange(rows, sent_sizes, arriving_sizes, group)
    order = _order_by_expert(arriving)
    results = experts(arrived[order], arriving.sum(0))
    return _exchange(results[torch.argsort(order)], arriving_sizes, sent_sizes, group)


def _order_by_expert(arriving: Tensor) -> Tensor:
    """Returns the indices that sort rows by expert; they arrive by rank, and by expert within a rank."""
    ranks, held = arriving.shape
    numbers = torch.arange(held, device=arriving.device).repeat(ranks)
    return torch.argsort(numbers.repeat_interleave(arriving.flatten()), stable=True)


def _exchange(rows: Tensor, sent: list[int], arriving: list[int], group: dist.ProcessGroup) -> Tensor:
    arrived: Tensor = _RowExchange.apply(rows, sent, arriving, group)  # type: ignore[no-untyped-call]
    return arrived


class _RowExchange(torch.autograd.Function):
    """One all-to-all of `sent` rows to each rank, with `arriving` rows from each; gradients travel back."""

    @staticmethod
    def forward(ctx: Any, rows: Tensor, sent: list[int], arriving: list[int], group: dist.ProcessGroup) -> Tensor:
        ctx.sizes = sent, arriving, group
        return _send(rows, sent, arriving, group)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None, None, None]:
        sent, arriving, group = ctx.sizes
        return _send(gradients[0], arriving, sent, group), None, None, None


def _send(rows: Tensor, sent: list[int], arriving: list[int], group: dist.ProcessGroup) -> Tensor:
    arrived = rows.new_empty((sum(arriving), *rows.shape[1:]))
    dist.all_to_all_single(arrived, rows.contiguous(), arriving, sent, group=group)
    return arrived
