"""Experts that ranks share: whole ones over the expert axis, and parts of each over the tensor axis.

Stacks of experts of `transformers` get a forward pass of dslc's own over the expert axis.

The expert axis sends each token's rows to the ranks that hold the experts chosen for it, and their results back.

Model (Lepikhin et al. 2020, arXiv:2006.16668): ranks of the axis hold equal, contiguous parts of each layer's experts.
A rank sorts its rows by expert and tells each rank how many rows come for each of its experts (one all-to-all of
counts). One all-to-all brings the rows, the experts work on all rows that arrived, and a second all-to-all takes the
results back. The backward pass sends gradients the opposite ways. No row is dropped and none is padded.

Over the tensor axis each rank has a part of every expert's width inside (Megatron's expert tensor parallelism), and all
tokens; so all route alike. It multiplies its part and weighs the partial results, which are then summed, once for each
token. In the backward pass the gradients of the tokens and of the weights are partial, and are summed. Where the ranks
have pieces of the sequence, these are gathered before, and the sum is scattered. With both axes the all-to-alls carry
partial results. Adapters of stacks are cut alike: B of `gate_up_proj`, A of `down_proj`. The other two matrices are
whole. Their gradients are partial in each pass, and are summed.

Contract: all ranks of the group call `dispatch` equally often, in the same order, also a rank without rows. The result
has the order of the rows. `apply` takes a model on the meta device, before `fully_shard`, and cuts the experts'
parameters to DTensors, cut along the first dim, or along the width inside. Names stay.

While `dslc calibrate` measures a job that states a skew, ranks get rows at this skew, whatever experts were chosen. The
times are those of the stated routing, and the numbers mean nothing.

Limits: the host waits for the counts, because torch needs the sizes of the rows' all-to-alls.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from math import ceil
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.autograd.function import FunctionCtx

from dslc.compiler.ir.parameter_names import base_name
from dslc.compiler.ir.program import CalibrateMode, JobProgram, TrainMode
from dslc.compiler.ir.tensor_styles import CUT_OF_EXPERTS, EXPERT_STYLES, TensorStyle
from dslc.compiler.placement.shares import pieces
from dslc.compiler.trace.private_torch import fully_shard_over, own_parameters
from dslc.runtime.model.experts.adapted_experts import innermost
from dslc.runtime.model.experts.expert_modules import (
    IS_COMPILABLE,
    MixtureOfExperts,
    WidthExchange,
    cast_for_product,
    restore_rows,
    results_of_pairs,
)
from dslc.runtime.model.experts.expert_modules import Experts as OwnExperts
from dslc.runtime.model.experts.library_experts import count_rows, sorted_results, weighted_sum
from dslc.runtime.parallel.mesh import EXPERT, Mesh, mesh_of

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh

ROW_RECORD = "row_record"  # the attribute of a module whose rows travel
Experts = Callable[[Tensor, Tensor], Tensor]  # rows sorted by expert, and the rows of each expert held: their results


def apply(job: JobProgram, model: nn.Module) -> None:
    """Cuts the experts of `job.experts` and of the tensor axis, in place, and lets rows travel to the ranks that hold
    them.
    """
    layers = job.experts.layers if job.experts is not None else ()
    shared = {base_name(name).rpartition(".")[0] for name, _ in layers}
    styles = job.tensor.styles if job.tensor is not None else ()
    cut_inside = {name: style for name, style in styles if style in EXPERT_STYLES}
    mixtures = [
        (name, module)
        for name, module in model.named_modules()  # of a pipeline, a stage has some of them
        if isinstance(module, MixtureOfExperts) and (name in shared or name in cut_inside)
    ]
    _share_library_experts(job, model)
    for name, module in mixtures:
        mesh, axes = mesh_of(job).root, list[str]()
        assert isinstance(module, MixtureOfExperts) and mesh is not None
        if name in shared:
            axes.append(EXPERT)
            record = RowRecord(name)
            skew = _imposed_skew(job, module.gate.weight.shape[0], module.gate.top_k)
            module.dispatch = functools.partial(dispatch, group=mesh.get_group(EXPERT), record=record, skew=skew)
            setattr(module, ROW_RECORD, record)
        if name in cut_inside:
            axes.append("tensor")
            of_pieces = cut_inside[name] is TensorStyle.EXPERTS_OF_PIECES
            module.exchange = (PieceExchange if of_pieces else SumExchange)(mesh.get_group("tensor"))
        experts = innermost(module.experts)
        matrices = _cut_adapters(experts, mesh["tensor",]) if name in cut_inside else []
        if name in shared and hasattr(experts, "adapters"):
            group = mesh.get_group(EXPERT)
            experts.first = group.rank() * (experts.down_proj.shape[0] // group.size())
        _cut(experts, mesh[tuple(axes)], axes)
        tensor_group = mesh.get_group("tensor") if matrices else None
        experts.forward = functools.partial(_with_local_parameters, (experts, *matrices), tensor_group, experts.forward)


def _share_library_experts(job: JobProgram, model: nn.Module) -> None:
    """Cuts the stacks of experts of `transformers`, and replaces their forward pass, which takes tokens, the experts of
    each token and their weights.
    """
    modules = dict(model.named_modules())
    for name, count in job.experts.layers if job.experts is not None else ():
        experts, mesh = modules.get(name), mesh_of(job).root
        if experts is None or isinstance(experts, OwnExperts):
            continue
        assert mesh is not None
        _cut(experts, mesh[EXPERT,], [EXPERT])
        group = mesh.get_group(EXPERT)
        held = count // group.size()
        results = functools.partial(sorted_results, experts, first=group.rank() * held)
        work = functools.partial(_with_local_parameters, (experts,), None, results)
        record = RowRecord(name)
        send = functools.partial(dispatch, work, group=group, record=record)
        experts.forward = functools.partial(_library_forward, job, count, send)
        setattr(experts, ROW_RECORD, record)
        setattr(experts, IS_COMPILABLE, False)


def _library_forward(
    job: JobProgram, experts: int, send: Callable[..., Tensor], tokens: Tensor, chosen: Tensor, weights: Tensor
) -> Tensor:
    """Returns the sum of each token's results by weight, as the library's own forward pass does."""
    send = functools.partial(send, skew=_imposed_skew(job, experts, chosen.shape[1]))
    results = results_of_pairs(cast_for_product(tokens), chosen, count_rows(chosen, experts), send)
    return weighted_sum(results, weights, tokens)


def _imposed_skew(job: JobProgram, experts: int, top_k: int) -> float | None:
    """Returns the skew at which a calibration of a job sends a layer's rows; None if the chosen experts decide."""
    measures = isinstance(job.mode, CalibrateMode) or (isinstance(job.mode, TrainMode) and job.mode.timed)
    if job.experts is None or job.experts.skew is None or not measures:
        return None
    return min(job.experts.skew, experts / top_k)  # a token sends a rank no more rows than the rank has experts


def _cut(experts: nn.Module, mesh: DeviceMesh, axes: Sequence[str]) -> None:
    """Replaces the parameters, which have no numbers yet, by DTensors with a part on this rank."""
    for name, parameter in list(experts.named_parameters(recurse=False)):
        dims = [0 if axis == EXPERT else CUT_OF_EXPERTS[name] for axis in axes]
        experts.register_parameter(name, _cut_parameter(parameter, mesh, dims))


def _cut_parameter(parameter: Tensor, mesh: DeviceMesh, dims: Sequence[int]) -> nn.Parameter:
    """Returns a parameter without numbers, cut along a dim by each axis of the mesh."""
    from torch.distributed.tensor import DTensor, Shard

    held = parameter.detach()
    for axis, dim in enumerate(dims):
        held = held.chunk(mesh.size(axis), dim)[0]
    held = held.clone(memory_format=torch.contiguous_format)  # one expert alone would keep the strides of its width
    cut = DTensor.from_local(held, mesh, [Shard(dim) for dim in dims], run_check=False)
    return nn.Parameter(cut, requires_grad=parameter.requires_grad)


def _cut_adapters(experts: nn.Module, mesh: DeviceMesh) -> list[nn.Module]:
    """Cuts the adapters of stacks as the stacks are cut inside, and returns the modules of all their matrices."""
    matrices: list[nn.Module] = []
    adapters: Any = getattr(experts, "adapters", None)
    for stack, adapter in adapters.of_stack.items() if adapters is not None else ():
        (down,), (up,) = adapter.lora_A.values(), adapter.lora_B.values()
        cut, dim = (up, 0) if stack == "gate_up_proj" else (down, 1)
        cut.weight = _cut_parameter(cut.weight, mesh, [dim])
        matrices += [down, up]
    return matrices


def _with_local_parameters(
    modules: Sequence[nn.Module], group: dist.ProcessGroup | None, forward: Experts, rows: Tensor, counts: Tensor
) -> Tensor:
    """Runs the experts' forward pass with the parts of their parameters that this rank holds, as plain tensors.

    The modules are the experts, and the matrices of adapters that a tensor axis with this group cuts.
    """
    owners = [own_parameters(module) for module in modules]
    parameters: list[dict[str, Any]] = [dict(own) for own in owners]
    for own in owners:
        own.update({name: _local(parameter, group) for name, parameter in own.items() if parameter is not None})
    try:
        return forward(rows, counts)
    finally:
        for own, before in zip(owners, parameters, strict=True):
            own.update(before)


def _local(parameter: Any, group: dist.ProcessGroup | None) -> Any:
    """Returns a rank's part of a parameter; of one that is whole on each rank, the gradient is summed."""
    if hasattr(parameter, "to_local"):
        return parameter.to_local()
    assert group is not None, "a whole matrix of an adapter"
    return _sum_gradient(parameter, group)


def placement(axes: Mesh, replicas: int) -> Callable[[Tensor], object]:
    """Returns the function by which `fully_shard` takes the mesh of a parameter: for experts, the ranks that hold the
    same ones.
    """
    return fully_shard_over(axes.sharded_experts(replicas), _is_shared)


def _is_shared(parameter: Tensor) -> bool:
    mesh: DeviceMesh | None = getattr(parameter, "device_mesh", None)
    return mesh is not None and EXPERT in (mesh.mesh_dim_names or ())


class RowRecord:
    """The most rows that a rank sent in a training pass through a layer's experts, and the most that arrived."""

    def __init__(self, layer: str) -> None:
        self.layer = layer
        self.sent = self.arrived = 0

    def note(self, sent: int, arrived: int) -> None:
        """Notes the rows of a pass; an evaluation keeps no activations, and does not count."""
        if torch.is_grad_enabled():
            self.sent, self.arrived = max(self.sent, sent), max(self.arrived, arrived)


def row_records(model: nn.Module) -> list[RowRecord]:
    """Returns the records of all layers of `model` whose rows travel."""
    records = (getattr(module, ROW_RECORD, None) for module in model.modules())
    return [record for record in records if isinstance(record, RowRecord)]


def dispatch(
    experts: Experts,
    rows: Tensor,
    counts: Tensor,
    *,
    group: dist.ProcessGroup,
    record: RowRecord | None = None,
    skew: float | None = None,
) -> Tensor:
    """Returns the results of `rows` (n, width), which are sorted by expert; `counts` (experts,) sum to n.

    `experts` works on the rows of the experts that this rank holds, sorted by expert, and is given their counts. With a
    `skew` the counts are those of a routing at this skew instead.
    """
    if skew is not None:
        counts = counts.new_tensor(counts_at_skew(rows.shape[0], counts.shape[0], group.size(), skew))
    sent = counts.view(group.size(), -1)  # (ranks, experts held by each)
    arriving = torch.empty_like(sent)
    dist.all_to_all_single(arriving, sent.contiguous(), group=group)
    sent_sizes, arriving_sizes = torch.stack((sent.sum(1), arriving.sum(1))).tolist()  # the host waits once
    if record is not None:
        record.note(rows.shape[0], sum(arriving_sizes))
    order = _order_by_expert(arriving)
    places = torch.empty_like(order).scatter_(0, order, torch.arange(order.shape[0], device=order.device))
    # Rows as they arrived are held by no variable while the experts work.
    sorted_rows = restore_rows(_exchange(rows, sent_sizes, arriving_sizes, group), places, order)
    results = restore_rows(experts(sorted_rows, arriving.sum(0)), order, places)
    return _exchange(results, arriving_sizes, sent_sizes, group)


def counts_at_skew(rows: int, experts: int, ranks: int, skew: float) -> list[int]:
    """Returns the rows of each expert if the first of the ranks gets `skew` times its even share of `rows`."""
    busiest = min(rows, ceil(skew * rows / ranks))
    of_ranks = [busiest, *(stop - start for start, stop in pieces(rows - busiest, ranks - 1))]
    return [stop - start for of_rank in of_ranks for start, stop in pieces(of_rank, experts // ranks)]


def _order_by_expert(arriving: Tensor) -> Tensor:
    """Returns the indices that sort rows by expert; they arrive by rank, and by expert within a rank."""
    ranks, held = arriving.shape
    numbers = torch.arange(held, device=arriving.device).repeat(ranks)
    return torch.argsort(numbers.repeat_interleave(arriving.flatten()), stable=True)


def _exchange(rows: Tensor, sent: list[int], arriving: list[int], group: dist.ProcessGroup) -> Tensor:
    arrived: Tensor = _RowExchange.apply(rows, sent, arriving, group)  # type: ignore[no-untyped-call]
    return arrived


class _RowsContext(FunctionCtx):
    sizes: tuple[list[int], list[int], dist.ProcessGroup]


class _RowExchange(torch.autograd.Function):
    """One all-to-all of `sent` rows to each rank, with `arriving` rows from each; gradients travel back."""

    @staticmethod
    def forward(
        ctx: _RowsContext, rows: Tensor, sent: list[int], arriving: list[int], group: dist.ProcessGroup
    ) -> Tensor:
        ctx.sizes = sent, arriving, group
        return _send(rows, sent, arriving, group)

    @staticmethod
    def backward(ctx: _RowsContext, *gradients: Tensor) -> tuple[Tensor, None, None, None]:
        sent, arriving, group = ctx.sizes
        return _send(gradients[0], arriving, sent, group), None, None, None


def _send(rows: Tensor, sent: list[int], arriving: list[int], group: dist.ProcessGroup) -> Tensor:
    arrived = rows.new_empty((sum(arriving), *rows.shape[1:]))
    dist.all_to_all_single(arrived, rows.contiguous(), arriving, sent, group=group)
    return arrived


# --------------------------------------------------------------------------------------------------- the tensor axis


class SumExchange(WidthExchange):
    """Ranks of a tensor axis that all have the whole tokens, and get the whole output."""

    def __init__(self, group: dist.ProcessGroup) -> None:
        self._group = group

    def tokens_of_experts(self, tokens: Tensor) -> Tensor:
        """Returns the tokens, whose gradient from the experts is summed over the ranks."""
        return _sum_gradient(tokens, self._group)

    def weights(self, weights: Tensor) -> Tensor:
        """Returns the weights, whose gradient is summed; then the router's is the same on all ranks."""
        return _sum_gradient(weights, self._group)

    def sum_results(self, results: Tensor) -> Tensor:
        """Returns the sum over the ranks."""
        summed: Tensor = _Sum.apply(results, self._group)  # type: ignore[no-untyped-call]
        return summed


class PieceExchange(SumExchange):
    """Ranks of a tensor axis that have pieces of the sequence, and get pieces of the output."""

    def gather_tokens(self, x: Tensor) -> Tensor:
        """Returns the pieces of all ranks; the gradient is summed and scattered."""
        tokens: Tensor = _GatherPieces.apply(cast_for_product(x), self._group)  # type: ignore[no-untyped-call]
        return tokens

    def tokens_of_router(self, tokens: Tensor) -> Tensor:
        """Returns the tokens. Each rank has the router's whole gradient, and these are summed: of each, a share."""
        shared: Tensor = _ShareGradient.apply(tokens, self._group.size())  # type: ignore[no-untyped-call]
        return shared

    def tokens_of_experts(self, tokens: Tensor) -> Tensor:
        """Returns the tokens, whose gradient `gather_tokens` sums."""
        return tokens

    def sum_results(self, results: Tensor) -> Tensor:
        """Returns this rank's piece of the sum."""
        piece: Tensor = _ReduceScatterPieces.apply(results, self._group)  # type: ignore[no-untyped-call]
        return piece


_SEQUENCE = 1  # the dim of positions


def _sum_gradient(x: Tensor, group: dist.ProcessGroup) -> Tensor:
    unchanged: Tensor = _SumGradient.apply(x, group)  # type: ignore[no-untyped-call]
    return unchanged


def _summed(x: Tensor, group: dist.ProcessGroup) -> Tensor:
    summed = x.clone(memory_format=torch.contiguous_format)
    dist.all_reduce(summed, group=group)
    return summed


class _GroupContext(FunctionCtx):
    group: dist.ProcessGroup


class _SumGradient(torch.autograd.Function):
    """Passes a tensor on; its gradient is the sum over the ranks."""

    @staticmethod
    def forward(ctx: _GroupContext, x: Tensor, group: dist.ProcessGroup) -> Tensor:
        ctx.group = group
        return x.view_as(x)

    @staticmethod
    def backward(ctx: _GroupContext, *gradients: Tensor) -> tuple[Tensor, None]:
        return _summed(gradients[0], ctx.group), None


class _Sum(torch.autograd.Function):
    """Sums over the ranks; each passes the gradient, which is the same on all, on."""

    @staticmethod
    def forward(ctx: object, x: Tensor, group: dist.ProcessGroup) -> Tensor:
        return _summed(x, group)

    @staticmethod
    def backward(ctx: object, *gradients: Tensor) -> tuple[Tensor, None]:
        return gradients[0], None


class _ReduceScatterPieces(torch.autograd.Function):
    """Sums over the ranks, and returns this rank's piece of the sequence; the gradients of all pieces are gathered."""

    @staticmethod
    def forward(ctx: _GroupContext, x: Tensor, group: dist.ProcessGroup) -> Tensor:
        ctx.group = group
        return _piece_of_sum(x, group)

    @staticmethod
    def backward(ctx: _GroupContext, *gradients: Tensor) -> tuple[Tensor, None]:
        return _gathered(gradients[0], ctx.group), None


class _GatherPieces(torch.autograd.Function):
    """Gathers the pieces of the sequence of all ranks; the gradient is summed, and a rank gets its piece of it."""

    @staticmethod
    def forward(ctx: _GroupContext, x: Tensor, group: dist.ProcessGroup) -> Tensor:
        ctx.group = group
        return _gathered(x, group)

    @staticmethod
    def backward(ctx: _GroupContext, *gradients: Tensor) -> tuple[Tensor, None]:
        return _piece_of_sum(gradients[0], ctx.group), None


def _gathered(piece: Tensor, group: dist.ProcessGroup) -> Tensor:
    gathered = piece.new_empty((group.size() * piece.shape[0], *piece.shape[1:]))
    dist.all_gather_single(gathered, piece.contiguous(), group=group)
    return torch.cat(gathered.chunk(group.size()), _SEQUENCE)


def _piece_of_sum(x: Tensor, group: dist.ProcessGroup) -> Tensor:
    pieces = torch.cat(x.chunk(group.size(), _SEQUENCE))
    piece = torch.empty_like(pieces[: x.shape[0]])
    dist.reduce_scatter_single(piece, pieces, group=group)
    return piece


class _RanksContext(FunctionCtx):
    ranks: int


class _ShareGradient(torch.autograd.Function):
    """Passes a tensor on; its gradient is divided by the ranks."""

    @staticmethod
    def forward(ctx: _RanksContext, x: Tensor, ranks: int) -> Tensor:
        ctx.ranks = ranks
        return x.view_as(x)

    @staticmethod
    def backward(ctx: _RanksContext, *gradients: Tensor) -> tuple[Tensor, None]:
        return gradients[0] / ctx.ranks, None
