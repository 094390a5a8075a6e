"""The context axis: each rank has a contiguous piece of every sequence, of inputs and targets alike.

Model: all layers but attention work on each position by itself. In attention a rank's queries meet the keys and values
of all pieces, which one all-gather brings (one reduce-scatter returns the gradients); under a causal mask, the keys and
values of its own piece and the pieces before it. All ranks have the same parameters, and sum their gradients like ranks
with other samples.

A network that a function makes calls torch's attention itself. While a module runs that does so, by the program, this
function is replaced by a function that meets all pieces; and the network is given the positions of its piece, if it
takes them. A loss of pairs needs the log-probability of each whole answer: the ranks sum it over their pieces.

Contract: `apply` changes modules in place; names and parameters stay. `piece_of` returns the function that cuts inputs
and targets, (batch, length, …) along the length. The pieces of one sequence are equal.

Limits: each rank holds keys and values of the whole sequence while a layer works (no ring). Later ranks do more of a
causal layer's work than earlier ones. Only networks that the compiler admits work here.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator, Mapping

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd.function import FunctionCtx

from dslc.compiler.ir.program import JobProgram
from dslc.compiler.trace.private_torch import gather_with_gradient
from dslc.compiler.trace.structures import map_tensors, tensors
from dslc.runtime.model import llama_modules
from dslc.runtime.model.documents import Documents, cast_operands, documents_of, see
from dslc.runtime.model.llama_modules import GroupedAttention
from dslc.runtime.model.losses import AnswerPieces
from dslc.runtime.model.modules import Attention, PositionalEmbedding
from dslc.runtime.parallel.mesh import mesh_of

_ATTENTION = F.scaled_dot_product_attention


class PieceError(RuntimeError):
    """A batch that cannot be cut into pieces of sequences."""

    remedy = "let each tensor be (batch, positions, …), padded to one length that the context axis divides"


def apply(job: JobProgram, model: nn.Module) -> None:
    """Makes the attention of `model` meet the whole sequence, and lets positions begin at this rank's."""
    if job.axes["context"] == 1:
        return
    mesh = mesh_of(job)
    number, group = mesh.coordinates["context"], mesh.group("context")
    assert group is not None
    documents = documents_of(model)
    attends: Callable[..., Tensor] = functools.partial(attend, number=number, group=group)
    if documents is not None:
        attends = functools.partial(attend_in_documents, number=number, group=group, documents=documents)
        attends = torch.compiler.disable(attends) if job.compiled else attends
        documents.attend = attends  # type: ignore[method-assign]
    for module in model.modules():
        if isinstance(module, Attention | GroupedAttention):
            module.attend = attends
        if isinstance(module, PositionalEmbedding | GroupedAttention):
            module.piece = number
    if job.context is not None and documents is None:
        torch.backends.mha.set_fastpath_enabled(False)  # in evaluation it would go around torch's attention
        for name in job.context.attention:
            module = model.get_submodule(name)
            module.forward = _attending(module.forward, torchs_attention(job))
        if job.context.positions:
            model.register_forward_pre_hook(_with_positions(number), with_kwargs=True)


def torchs_attention(job: JobProgram) -> Callable[..., Tensor]:
    """Returns the function that stands in for torch's attention: it meets the keys and values of all pieces."""
    mesh = mesh_of(job)
    group = mesh.group("context")
    assert group is not None
    return functools.partial(attend_as_torch, number=mesh.coordinates["context"], group=group)


@contextlib.contextmanager
def given_positions(model: nn.Module, number: int) -> Iterator[None]:
    """Gives a network that takes positions the positions of piece `number`, while the context lasts."""
    handle = model.register_forward_pre_hook(_with_positions(number), with_kwargs=True)
    try:
        yield
    finally:
        handle.remove()


def _with_positions(number: int) -> Callable[..., object]:
    def hook(module: nn.Module, args: tuple[object, ...], kwargs: Mapping[str, object]) -> object:
        input = tensors((args, kwargs))[0]
        own = input.shape[1]
        positions = torch.arange(number * own, (number + 1) * own, device=input.device).unsqueeze(0)
        return args, {**kwargs, "position_ids": positions}

    return hook


def _attending(forward: Callable[..., object], attention: Callable[..., Tensor]) -> Callable[..., object]:
    """Returns `forward` with another function as torch's attention while it runs, also in the backward pass."""

    def call_sharded(*args: object, **kwargs: object) -> object:
        before = F.scaled_dot_product_attention
        F.scaled_dot_product_attention = attention
        try:
            return forward(*args, **kwargs)
        finally:
            F.scaled_dot_product_attention = before

    return call_sharded


def attend_as_torch(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
    *,
    number: int,
    group: dist.ProcessGroup,
) -> Tensor:
    """Returns what torch's attention would for this rank's queries, piece `number`: (…, heads, length, head_dim)."""
    assert attn_mask is None, "the compiler refuses masks"
    kind = query.device.type
    if torch.is_autocast_enabled(kind):  # before they are sent, as torch's own does before it computes
        dtype = torch.get_autocast_dtype(kind)
        query, key, value = query.to(dtype), key.to(dtype), value.to(dtype)
    own = query.shape[-2]
    first = number * own
    keys, values = _of_all_pieces(key, value, group)
    mask = None
    if is_causal:
        keys, values = keys[..., : first + own, :], values[..., : first + own, :]
        if first:
            places = torch.arange(first, first + own, device=query.device)[:, None]
            mask = torch.arange(first + own, device=query.device) <= places
    return _ATTENTION(
        query,
        keys,
        values,
        attn_mask=mask,
        dropout_p=dropout_p,
        is_causal=is_causal and mask is None,
        scale=scale,
        enable_gqa=enable_gqa,
    )


def _of_all_pieces(key: Tensor, value: Tensor, group: dist.ProcessGroup) -> tuple[Tensor, Tensor]:
    """Returns keys and values of the whole sequence, which one gather brings."""
    if key.shape == value.shape:
        both = torch.stack((key, value)).contiguous()
        keys, values = gather_with_gradient(both, dim=both.dim() - 2, group=group).unbind(0)
        return keys, values
    both = torch.cat((key, value), dim=-1).contiguous()
    gathered = gather_with_gradient(both, dim=both.dim() - 2, group=group)
    return gathered[..., : key.shape[-1]], gathered[..., key.shape[-1] :]


def attend(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    is_causal: bool,
    window: int | None = None,
    *,
    number: int,
    group: dist.ProcessGroup,
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
    return llama_modules.attend(query, keys, values, is_causal=is_causal, window=window, first_position=first)


def attend_in_documents(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    is_causal: bool,
    window: int | None = None,
    scale: float | None = None,
    dropout: float = 0.0,
    *,
    number: int,
    group: dist.ProcessGroup,
    documents: Documents,
) -> Tensor:
    """Returns the attention within documents for this rank's queries, which see the keys of all pieces."""
    query, key, value = cast_operands(query, key, value)
    first, own = number * query.shape[2], query.shape[2]
    keys, values = _of_all_pieces(key, value, group)
    if is_causal:
        keys, values = keys[:, :, : first + own], values[:, :, : first + own]
    mask = documents.now.mask(query.dtype, is_causal, window, first, own)
    grouped = key.shape[1] != query.shape[1]
    return _ATTENTION(query, keys, values, attn_mask=mask, dropout_p=dropout, scale=scale, enable_gqa=grouped)


def piece_of(job: JobProgram) -> Callable[[object], object]:
    """Returns the function that takes this rank's piece of a batch of sequences, a tensor or a structure of them."""
    if job.axes["context"] == 1:
        return _all_of_it
    number, count = mesh_of(job).coordinates["context"], job.axes["context"]

    def cut(tensor: Tensor) -> Tensor:
        if job.loss.rows > 1 and tensor.dim() == 1:
            return tensor  # the reference's log-probabilities, of whole answers
        positions = tensor.shape[1] if tensor.dim() > 1 else 0
        if not positions or positions % count:
            raise PieceError(f"a batch has a tensor of shape {tuple(tensor.shape)}, not of {count} equal pieces")
        own = positions // count
        return tensor.narrow(1, number * own, own)

    return functools.partial(map_tensors, cut)


def input_piece_of(job: JobProgram, model: nn.Module) -> Callable[[object], object]:
    """Returns the function that takes this rank's piece of an input, within whose documents the model then stays."""
    cut = piece_of(job)
    if job.model.documents is None or (job.axes["context"] == 1 and job.pipeline is None):
        return cut

    def cut_input(tokens: object) -> object:
        see(model, tokens)
        return cut(tokens)

    return cut_input


def answer_pieces(job: JobProgram) -> AnswerPieces | None:
    """Returns the ranks that have pieces of an answer with this one, for a loss of pairs."""
    if job.axes["context"] == 1 or job.loss.rows == 1:
        return None
    group = mesh_of(job).group("context")
    assert group is not None

    def total(tensor: Tensor) -> Tensor:
        summed: Tensor = _SumAnswers.apply(tensor, group)  # type: ignore[no-untyped-call]
        return summed

    return AnswerPieces(job.axes["context"], total)


class _SumContext(FunctionCtx):
    ranks: int


class _SumAnswers(torch.autograd.Function):
    """The sum over the ranks of a group, which each goes on with alike."""

    @staticmethod
    def forward(ctx: _SumContext, tensor: Tensor, group: dist.ProcessGroup) -> Tensor:
        ctx.ranks = dist.get_world_size(group)
        summed = tensor.detach().clone()
        dist.all_reduce(summed, group=group)
        return summed

    @staticmethod
    def backward(ctx: _SumContext, gradient: Tensor) -> tuple[Tensor, None]:
        # The ranks' gradients are equal: no exchange is needed to sum them.
        return gradient * ctx.ranks, None


def gather_output(job: JobProgram, output: object) -> object:
    """Gathers an output from the ranks' pieces; tensors without positions, such as a loss, stay as they are."""
    group = mesh_of(job).group("context")
    if group is None:
        return output

    def gathered(tensor: Tensor) -> Tensor:
        if tensor.dim() < 2:
            return tensor
        pieces = [torch.empty_like(tensor) for _ in range(job.axes["context"])]
        dist.all_gather(pieces, tensor.contiguous(), group=group)
        return torch.cat(pieces, dim=1)

    return map_tensors(gathered, output)


def _all_of_it(batch: object) -> object:
    return batch
