"""The tensor axis: torch's `parallelize_module` with DTensor styles, set up as the program says.

Model (Shoeybi et al. 2019, arXiv:1909.08053; Korthikanti et al. 2022, arXiv:2205.05198): a matrix is sharded by rows or
columns over the ranks of the axis. Between modules tensors are plain: whole on each rank, or a piece of the sequence,
or, between a column and a row, a share of the features. Each style by the input and the output of its module:

    column, column_of_pieces        the whole, or a piece: its share of the features (rows of the weight)
    row, row_to_pieces              a share of the features (columns of the weight): the whole, or a piece
    row_of_whole                    the whole, from which it takes its share: as a row
    summed                          shares, of any kind: shares; all parameters on every rank, their gradients summed
    vocabulary                      tokens: their vectors, whole; each rank has some rows of the table
    gathered, gathered_of_pieces    as a column, put together again
    scores, scores_of_pieces        as a column, kept in shares for the loss (a DTensor over the classes), or by a head
                                    that computes the losses itself (technique/chunked_head.py)
    sequence                        a piece: a piece, with the same parameters on every rank (norms)
    split                           the whole; it gets a piece
    gather                          a piece; it passes the whole on
    experts, experts_of_pieces      the whole, or a piece: the same; each expert is cut, and so are adapters of stacks
                                    (expert_parallel.py)

A column in parts holds its rows in an order of its own (model/row_order.py). So a rank's share of them, and of the
features, has a piece of every part.

Contract: `apply` takes a model on the meta device, before anything that replaces a `forward` and before `fully_shard`,
which then cuts each rank's share in turn. Names stay. A tied weight stays one tensor, so both its modules must cut it
alike. Parameters without a style are the same on every rank, and so are their gradients.

Asynchronous: torch's compiler finds exchanges of pieces beside products in the graph of a compiled module. Each rank
then reads the pieces of its peers from symmetric memory of GPUs, and multiplies one while the next is copied.

Limits: one axis. Ranks that have the whole draw the same dropout; ranks with pieces draw their own (`noise_rank`).
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any, assert_never

import torch
from torch import Tensor, nn

from dslc.compiler.ir.program import JobProgram, TensorParallelStep
from dslc.compiler.ir.tensor_styles import EXPERT_STYLES, TensorStyle
from dslc.compiler.placement.axes import AXES
from dslc.compiler.trace.private_torch import exchange_in_pieces, is_on_its_way, own_parameters
from dslc.compiler.trace.structures import Structure
from dslc.runtime.model import row_order
from dslc.runtime.model.module_builder import tie
from dslc.runtime.parallel.engine import Engine
from dslc.runtime.parallel.mesh import mesh_of

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh
    from torch.distributed.tensor.parallel import ParallelStyle

_LOSS: list[
    contextlib.AbstractContextManager[object]
] = []  # torch's context for losses over shares of the classes, once it is open


# A head that computes the losses itself gives these, whole on each rank; without targets it gives whole scores.
_GIVES_WHOLE = {
    TensorStyle.SCORES: TensorStyle.GATHERED,
    TensorStyle.SCORES_OF_PIECES: TensorStyle.GATHERED_OF_PIECES,
}


def preload() -> None:
    """Imports the modules that every rank will need (0.8 s), in the process from which ranks are forked."""
    import torch.distributed.tensor.parallel  # noqa: F401


def apply(job: JobProgram, model: nn.Module) -> None:
    """Cuts the modules of `job.tensor`, in place."""
    row_order.begin(job.tensor)
    if job.tensor is None:
        return
    from torch.distributed.tensor.parallel import loss_parallel, parallelize_module

    axis = mesh_of(job).axis("tensor")
    if job.tensor.asynchronous:
        exchange_in_pieces(axis.get_group())
    frozen = [name for name, parameter in model.named_parameters() if not parameter.requires_grad]
    float8 = job.precision.float8
    float8_layers = frozenset(float8.layers or () if float8 is not None else ())
    of_experts = tuple(f"{name}.experts." for name, style in job.tensor.styles if style in EXPERT_STYLES)
    for name, style in job.tensor.styles:
        if style in EXPERT_STYLES or name.startswith(of_experts):
            continue  # expert_parallel.py
        if style is TensorStyle.SUMMED:
            _sum_gradients(model.get_submodule(name), axis)
        else:
            if name == job.loss.head:
                style = _GIVES_WHOLE.get(style, style)
            parallelize_module(model.get_submodule(name), axis, _style(style), src_data_rank=None)
            if name in float8_layers:
                _cut_float8(model.get_submodule(name), style, axis)
            if job.compiled and not any(name.startswith(f"{each}." if each else "") for each in job.compiled):
                model.get_submodule(name).register_forward_hook(_arrived)
    for name in frozen:
        model.get_parameter(name).requires_grad_(False)  # some styles turn requires_grad on
    tie(model, job.model.ties)
    if job.tensor.loss_parallel and not _LOSS:
        # It is never closed: forward and backward passes both need it, and pipeline schedules mix them.
        _LOSS.append(loss_parallel())
        _LOSS[0].__enter__()


def _style(style: TensorStyle) -> ParallelStyle:
    from torch.distributed.tensor import Replicate, Shard
    from torch.distributed.tensor import parallel as t

    whole, piece, share = Replicate(), Shard(1), Shard(-1)
    match style:
        case TensorStyle.COLUMN:
            return t.ColwiseParallel(input_layouts=whole)
        case TensorStyle.COLUMN_OF_PIECES:
            return t.ColwiseParallel(input_layouts=piece)
        case TensorStyle.GATHERED:
            return t.ColwiseParallel(input_layouts=whole, output_layouts=whole)
        case TensorStyle.GATHERED_OF_PIECES:
            return t.ColwiseParallel(input_layouts=piece, output_layouts=whole)
        case TensorStyle.SCORES:
            return t.ColwiseParallel(input_layouts=whole, use_local_output=False)
        case TensorStyle.SCORES_OF_PIECES:
            return t.ColwiseParallel(input_layouts=piece, use_local_output=False)
        case TensorStyle.ROW:
            return t.RowwiseParallel(input_layouts=share, output_layouts=whole)
        case TensorStyle.ROW_TO_PIECES:
            return t.RowwiseParallel(input_layouts=share, output_layouts=piece)
        case TensorStyle.ROW_OF_WHOLE:
            return t.RowwiseParallel(input_layouts=whole, output_layouts=whole)
        case TensorStyle.VOCABULARY:
            return t.RowwiseParallel(input_layouts=whole)
        case TensorStyle.SEQUENCE:
            return t.SequenceParallel(use_local_output=True)
        case TensorStyle.SPLIT:
            return t.PrepareModuleInput(input_layouts=whole, desired_input_layouts=piece, use_local_output=True)
        case TensorStyle.GATHER:
            return t.PrepareModuleOutput(output_layouts=piece, desired_output_layouts=whole)
        case TensorStyle.SUMMED | TensorStyle.EXPERTS | TensorStyle.EXPERTS_OF_PIECES:
            raise AssertionError("torch has no such style: `_sum_gradients` or expert_parallel.py carries it out")
        case _:
            assert_never(style)


def _cut_float8(layer: nn.Module, style: TensorStyle, axis: DeviceMesh) -> None:
    """Lets a layer that multiplies in 8 bits scale by the numbers of all ranks, if its weight is cut."""
    from dslc.runtime.parallel.float8_tensor_parallel import cut  # with torchao

    if style.cut is not None:
        cut(layer, style.cut, axis)


def _sum_gradients(module: nn.Module, axis: DeviceMesh) -> None:
    """Makes the module use its own parameters as they are, and sums their gradients over the axis."""
    from torch.distributed.tensor import DTensor, Partial, Replicate

    kept: dict[str, nn.Parameter] = {}

    def share_parameters(module: nn.Module, args: object) -> None:
        for name, parameter in own_parameters(module).items():
            if parameter is not None:
                kept[name] = parameter
                shared = DTensor.from_local(parameter, axis, [Replicate()], run_check=False)
                own_parameters(module)[name] = shared.to_local(grad_placements=[Partial()])  # type: ignore[assignment]

    def restore_parameters(module: nn.Module, args: object, output: object) -> None:
        own_parameters(module).update(kept)

    module.register_forward_pre_hook(share_parameters)
    module.register_forward_hook(restore_parameters, always_call=True)


@contextlib.contextmanager
def as_on_a_rank(step: TensorParallelStep, model: nn.Module) -> Iterator[None]:
    """Gives the modules of `step`, without numbers or other ranks, the shapes that they have on a rank."""
    with contextlib.ExitStack() as around:
        for name, style in step.styles:
            module = model.get_submodule(name)
            dim = None if style is TensorStyle.VOCABULARY else style.cut
            around.callback(own_parameters(module).update, dict(own_parameters(module)))
            for attribute, whole in own_parameters(module).items():
                if dim is not None and whole is not None and dim < whole.dim():
                    share = whole.detach().chunk(step.size, dim)[0].clone()
                    own_parameters(module)[attribute] = nn.Parameter(share, whole.requires_grad)
            if style is TensorStyle.ROW_OF_WHOLE:
                around.callback(module.register_forward_pre_hook(_first_share(step.size)).remove)
            elif style in (TensorStyle.GATHERED, TensorStyle.SCORES):
                around.callback(module.register_forward_hook(_as_often(step.size)).remove)
        yield


def _first_share(ranks: int) -> Callable[[nn.Module, tuple[Tensor, ...]], object]:
    return lambda module, args: (args[0].chunk(ranks, -1)[0],)


def _as_often(ranks: int) -> Callable[[nn.Module, object, Tensor], Tensor]:
    return lambda module, args, output: torch.cat([output] * ranks, -1)


def _arrived(module: nn.Module, args: object, output: object) -> object:
    """Waits for the output, whose gradient torch (2.13) would lose in compiling the next module (`process_inputs`)."""
    return _Arrived.apply(output) if is_on_its_way(output) else output  # type: ignore[no-untyped-call]


class _Arrived(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, output: Structure) -> Tensor:
        there: Tensor = output.wait()
        return there

    @staticmethod
    def backward(ctx: object, *gradients: Tensor) -> Tensor:
        return gradients[0]


def engine(job: JobProgram, model: nn.Module) -> Engine:
    """Returns the engine of a model that no data axis cuts further; norms on pieces have partial gradients."""
    axes = mesh_of(job)
    parameters: list[Any] = []

    def counts(parameter: object) -> bool:
        return axes.leads or any(placement.is_shard() for placement in getattr(parameter, "placements", ()))

    def complete() -> None:
        if not parameters:
            parameters.extend(model.parameters())  # not before: the parameters of a blank model are replaced
        for parameter in parameters:
            gradient = parameter.grad
            if gradient is not None and getattr(gradient, "placements", ()) != getattr(parameter, "placements", ()):
                parameter.grad = gradient.redistribute(placements=parameter.placements)

    return Engine(model=model, shards=axes.group(*AXES), counts=counts, complete=complete)


def unshard_output(output: Tensor) -> Tensor:
    """Gathers a model's output if the ranks have shares of it; all of them call this."""
    gathered: Tensor = output.full_tensor() if hasattr(output, "full_tensor") else output
    return gathered


def noise_rank(job: JobProgram, rank: int) -> int:
    """Returns the number that seeds a rank's noise: ranks of a tensor axis that compute the same draw the same."""
    if job.tensor is None or job.tensor.sequence:
        return rank
    return rank - mesh_of(job).coordinates["tensor"]
