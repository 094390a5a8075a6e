"""Computes on the CPU the operations of absent GPUs (../README.md).

Memory of such a GPU is the process's own, so that the CPU can view its tensors. Each operation of torch with a kernel
for CUDA gets another kernel, which calls the CPU's on such views. Operations that only GPUs have (fused attention,
synchronised batch norm) are written out below. Random numbers follow from the GPU generator's seed and offset.
"""

from __future__ import annotations

import ctypes
import math
import re
import warnings
from collections.abc import Callable
from typing import Any

import torch
from torch._ops import OpOverload
from torch.utils._pytree import tree_map_only

aten = torch.ops.aten

# Memory, its views and its streams, which the runtime of these GPUs implements itself.
_KEPT = re.compile(
    "empty|set_|resize_|record_stream|is_|_pin_memory|_local_scalar_dense|_fused_sdp_choice|_efficientzerotensor"
)
# Operations without a CUDA kernel of their own, but with one that depends on the device.
_ALSO = ("copy_", "convolution", "convolution_backward")
# Dispatch keys with a kernel for the CPU.
_COMPOSITE = ("ImplicitAutograd", "ExplicitAutograd", "ExplicitAutogradNonFunctional")
_OF_CPU = ("CPU", *(f"Composite{kind}" for kind in _COMPOSITE))

_reach = ctypes.CDLL(None).absent_gpu_reach
_reach.argtypes = [ctypes.c_void_p]


def seen_by_cpu(tensor: torch.Tensor) -> torch.Tensor:
    """Returns the same memory as a tensor on the CPU."""
    if tensor.device.type != "cuda":
        return tensor
    storage = tensor.untyped_storage()
    if not storage.nbytes():
        return torch.empty_strided(tensor.size(), tensor.stride(), dtype=tensor.dtype)
    memory = (ctypes.c_char * storage.nbytes()).from_address(storage.data_ptr())
    flat = torch.frombuffer(memory, dtype=torch.uint8).untyped_storage()
    seen = torch.empty(0, dtype=tensor.dtype)
    return seen.set_(flat, tensor.storage_offset(), tensor.size(), tensor.stride())


def _on_gpu(tensor: torch.Tensor, device: torch.device) -> torch.Tensor:
    made = torch.empty_strided(tensor.size(), tensor.stride(), dtype=tensor.dtype, device=device)
    seen_by_cpu(made).copy_(tensor)
    return made


def _generator(given: torch.Generator | None, device: torch.device) -> torch.Generator:
    """Returns a CPU generator that continues from the GPU's, which is advanced."""
    if given is not None and given.device.type == "cpu":
        return given
    index = torch.cuda.current_device() if device.index is None else device.index
    of_gpu = given if given is not None else torch.cuda.default_generators[index]
    offset = of_gpu.get_offset()
    of_gpu.set_offset(offset + 4)
    return torch.Generator().manual_seed((of_gpu.initial_seed() * 1_000_003 + offset) % 2**63)


def _replacement(name: str, schema: Any, compute: Callable[..., Any]) -> Callable[..., Any]:
    """Returns a kernel for CUDA.

    Raises NotImplementedError, when called, if the CPU has none.
    """
    outs = [argument.name for argument in schema.arguments if argument.is_out]
    tensors = [n for n, argument in enumerate(schema.arguments) if str(argument.type) == "Tensor"]
    of_any = getattr(aten, name.partition(".")[0])
    written = [n for n, argument in enumerate(schema.arguments) if argument.alias_info and argument.alias_info.is_write]
    random = any(argument.name == "generator" for argument in schema.arguments)
    returned = [result.alias_info is not None for result in schema.returns]

    def kernel(*args: Any, **kwargs: Any) -> Any:
        device = kwargs.get("device")
        on_gpu: list[torch.Tensor] = []
        tree_map_only(torch.Tensor, lambda t: on_gpu.append(t) if t.is_cuda else None, (args, kwargs))
        if on_gpu:
            device = on_gpu[0].device
        device = torch.device("cuda", torch.cuda.current_device()) if device is None else torch.device(device)
        _reach(torch.cuda.current_stream(device).cuda_stream)
        made = {key: kwargs[key] for key in outs}
        host_args, host_kwargs = tree_map_only(torch.Tensor, seen_by_cpu, (args, kwargs))
        for key, out in made.items():
            if isinstance(out, torch.Tensor):
                host_kwargs[key] = torch.empty(0, dtype=out.dtype)
        if "device" in host_kwargs:
            host_kwargs["device"] = "cpu"
        if random:
            host_kwargs["generator"] = _generator(kwargs.get("generator"), device)
        number = any(isinstance(host_args[n], int | float) for n in tensors if n < len(host_args))
        # Torch hands over a number in the place of a tensor, which not every overload takes back.
        result = (of_any if number and isinstance(compute, OpOverload) else compute)(*host_args, **host_kwargs)
        for key, out in made.items():
            if isinstance(out, torch.Tensor):
                if out.size() != host_kwargs[key].size():
                    out.resize_(host_kwargs[key].size())
                seen_by_cpu(out).copy_(host_kwargs[key])
        if not returned:
            return None
        if all(returned) and (outs or written):
            aliased = [made[key] for key in outs] or [args[n] for n in written]
            return aliased[0] if len(returned) == 1 else tuple(aliased[: len(returned)])
        return tree_map_only(torch.Tensor, lambda t: _on_gpu(t, device), result)

    kernel.__name__ = name
    return kernel


# ------------------------------------------------------------------------------------------ what only GPUs have


def _probabilities(
    query: torch.Tensor, key: torch.Tensor, bias: torch.Tensor | None, causal: bool, scale: float | None
) -> tuple[torch.Tensor, torch.Tensor, float]:
    """Returns attention's probabilities, the logarithm of the sum, and the scale, in single precision."""
    scale = 1 / math.sqrt(query.size(-1)) if scale is None else scale
    heads = query.size(-3) // key.size(-3)
    scores = query.float() @ key.float().repeat_interleave(heads, -3).transpose(-1, -2) * scale
    if bias is not None:
        scores = scores + bias
    if causal:
        scores = scores.masked_fill(torch.ones(scores.shape[-2:], dtype=torch.bool).triu(1), -math.inf)
    total = scores.logsumexp(-1)
    return (scores - total.unsqueeze(-1)).exp().nan_to_num(0.0), total, scale


def _kept_by_dropout(shape: torch.Size, p: float, seed: torch.Tensor) -> torch.Tensor:
    drawn = torch.rand(shape, generator=torch.Generator().manual_seed(int(seed)))
    return (drawn >= p) / (1 - p)


def _dropout_seed(p: float) -> torch.Tensor:
    """Draws a seed for the mask of attention's dropout."""
    if not p:
        return torch.zeros((), dtype=torch.int64)
    return torch.randint(2**62, (), generator=_generator(None, torch.device("cuda")))


def _attention(query: Any, key: Any, value: Any, bias: Any, p: float, causal: bool, scale: Any) -> tuple[Any, ...]:
    shares, total, _ = _probabilities(query, key, bias, causal, scale)
    seed = _dropout_seed(p)
    if p:
        shares = shares * _kept_by_dropout(shares.shape, p, seed)
    heads = query.size(-3) // value.size(-3)
    out = shares @ value.float().repeat_interleave(heads, -3)
    # The strides of the fused kernels: batch, position, head, feature.
    return out.to(query.dtype).transpose(1, 2).contiguous().transpose(1, 2), total, seed


def _attention_backward(
    grad: Any, query: Any, key: Any, value: Any, bias: Any, p: float, causal: bool, scale: Any, seed: torch.Tensor
) -> tuple[Any, ...]:
    shares, _, scale = _probabilities(query, key, bias, causal, scale)
    heads = query.size(-3) // key.size(-3)
    keys, values = (t.float().repeat_interleave(heads, -3) for t in (key, value))
    kept = _kept_by_dropout(shares.shape, p, seed) if p else torch.ones(())
    grad = grad.float()
    of_values = (shares * kept).transpose(-1, -2) @ grad
    of_shares = grad @ values.transpose(-1, -2) * kept
    of_scores = shares * (of_shares - (of_shares * shares).sum(-1, keepdim=True))
    of_queries = of_scores @ keys * scale
    of_keys = of_scores.transpose(-1, -2) @ query.float() * scale

    def sum_heads(of_all: torch.Tensor) -> torch.Tensor:
        return of_all.unflatten(-3, (-1, heads)).sum(-3) if heads > 1 else of_all

    found = (of_queries, sum_heads(of_keys), sum_heads(of_values))
    of_bias = None if bias is None else of_scores.sum_to_size(bias.shape).to(bias.dtype)
    return *(t.to(query.dtype) for t in found), of_bias


def _flash(
    query: Any, key: Any, value: Any, p: float = 0.0, causal: bool = False, mask: bool = False, *, scale: Any = None
) -> Any:
    out, total, seed = _attention(query, key, value, None, p, causal, scale)
    none = torch.empty(0, dtype=torch.int64)
    return out, total, none, none, query.size(-2), key.size(-2), seed, torch.zeros((), dtype=torch.int64), none


def _flash_backward(
    grad: Any, query: Any, key: Any, value: Any, out: Any, total: Any, cum_q: Any, cum_k: Any, max_q: Any, max_k: Any,
    p: float, causal: bool, seed: Any, offset: Any, *, scale: Any = None,
) -> Any:  # fmt: skip
    return _attention_backward(grad, query, key, value, None, p, causal, scale, seed)[:3]


def _efficient(
    query: Any,
    key: Any,
    value: Any,
    bias: Any,
    with_total: bool,
    p: float = 0.0,
    causal: bool = False,
    *,
    scale: Any = None,
) -> Any:  # fmt: skip
    out, total, seed = _attention(query, key, value, bias, p, causal, scale)
    total = torch.nn.functional.pad(total, (0, -total.size(-1) % 32)) if with_total else torch.empty(0)
    return out, total, seed, torch.zeros((), dtype=torch.int64)


def _efficient_backward(
    grad: Any, query: Any, key: Any, value: Any, bias: Any, out: Any, total: Any, seed: Any, offset: Any, p: float,
    wanted: Any, causal: bool = False, *, scale: Any = None,
) -> Any:  # fmt: skip
    found = _attention_backward(grad, query, key, value, bias, p, causal, scale, seed)
    return *found[:3], found[3] if found[3] is not None and wanted[3] else torch.empty(0)


def _dropout(x: torch.Tensor, p: float, train: bool | None) -> Any:
    if train is False or not p:
        return x.clone(), torch.ones_like(x, dtype=torch.bool)
    kept = torch.rand(x.shape, generator=_generator(None, torch.device("cuda"))) >= p
    return x * kept / (1 - p) if p < 1 else torch.zeros_like(x), kept


def _rms_norm_backward(grad: Any, x: Any, shape: list[int], rstd: Any, weight: Any, wanted: list[bool]) -> Any:
    axes, normal = [*range(-len(shape), 0)], x.float() * rstd
    of_normal = grad.float() if weight is None else grad.float() * weight.float()
    of_x = (of_normal - normal * (of_normal * normal).mean(axes, keepdim=True)) * rstd
    of_weight = None if weight is None else (grad.float() * normal).sum_to_size(shape).to(weight.dtype)
    return of_x.to(x.dtype), of_weight if wanted[1] else None


def _biased(gates: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
    return gates if bias is None else gates + bias


def _lstm_cell(of_input: Any, of_hidden: Any, cell: Any, input_bias: Any = None, hidden_bias: Any = None) -> Any:
    gates = _biased(of_input, input_bias) + _biased(of_hidden, hidden_bias)
    add, forget, new, show = gates.chunk(4, -1)
    add, forget, new, show = add.sigmoid(), forget.sigmoid(), new.tanh(), show.sigmoid()
    cell = forget * cell + add * new
    return show * cell.tanh(), cell, torch.cat((add, forget, new, show), -1)


def _lstm_cell_backward(grad_hidden: Any, grad_cell: Any, before: Any, cell: Any, kept: Any, has_bias: bool) -> Any:
    add, forget, new, show = kept.chunk(4, -1)
    grad_hidden = torch.zeros_like(cell) if grad_hidden is None else grad_hidden
    total = grad_hidden * show * (1 - cell.tanh() ** 2) + (0 if grad_cell is None else grad_cell)
    of_gates = torch.cat(
        (
            total * new * add * (1 - add),
            total * before * forget * (1 - forget),
            total * add * (1 - new**2),
            grad_hidden * cell.tanh() * show * (1 - show),
        ),
        -1,
    )
    return of_gates, total * forget, of_gates.sum(0) if has_bias else torch.empty(0)


def _gru_cell(of_input: Any, of_hidden: Any, hidden: Any, input_bias: Any = None, hidden_bias: Any = None) -> Any:
    ir, iz, new = _biased(of_input, input_bias).chunk(3, -1)
    hr, hz, from_hidden = _biased(of_hidden, hidden_bias).chunk(3, -1)
    reset, keep = (ir + hr).sigmoid(), (iz + hz).sigmoid()
    new = (new + reset * from_hidden).tanh()
    return new + keep * (hidden - new), torch.cat((reset, keep, new, hidden, from_hidden), -1)


def _gru_cell_backward(grad: Any, kept: Any, has_bias: bool) -> Any:
    reset, keep, new, hidden, from_hidden = kept.chunk(5, -1)
    of_new = grad * (1 - keep) * (1 - new**2)
    of_keep = grad * (hidden - new) * keep * (1 - keep)
    of_reset = of_new * from_hidden * reset * (1 - reset)
    of_input = torch.cat((of_reset, of_keep, of_new), -1)
    of_hidden = torch.cat((of_reset, of_keep, of_new * reset), -1)
    biases = (of_input.sum(0), of_hidden.sum(0)) if has_bias else (torch.empty(0), torch.empty(0))
    return of_input, of_hidden, grad * keep, *biases


def _channels(x: torch.Tensor, of_each: torch.Tensor | None) -> torch.Tensor:
    assert of_each is not None
    return of_each.float().view(1, -1, *[1] * (x.dim() - 2))


def _batch_norm_stats(x: torch.Tensor, eps: float) -> Any:
    axes = [0, *range(2, x.dim())]
    variance, mean = torch.var_mean(x.float(), axes, correction=0)
    return mean, (variance + eps).rsqrt()


def _batch_norm_gather(
    x: Any, mean: Any, invstd: Any, running_mean: Any, running_var: Any, momentum: float, eps: float, counts: Any
) -> Any:
    weights = counts.float().unsqueeze(1)
    number = weights.sum()
    whole = (mean * weights).sum(0) / number
    variance = ((invstd**-2 - eps + (mean - whole) ** 2) * weights).sum(0) / number
    if running_mean is not None:
        running_mean.lerp_(whole.to(running_mean.dtype), momentum)
    if running_var is not None:
        running_var.lerp_((variance * number / (number - 1)).to(running_var.dtype), momentum)
    return whole, (variance + eps).rsqrt()


def _batch_norm_apply(x: Any, weight: Any, bias: Any, mean: Any, invstd: Any, eps: float) -> Any:
    y = (x.float() - _channels(x, mean)) * _channels(x, invstd)
    y = y if weight is None else y * _channels(x, weight)
    return (y if bias is None else y + _channels(x, bias)).to(x.dtype)


def _batch_norm_reduce(
    grad: Any, x: Any, mean: Any, invstd: Any, weight: Any, of_input: bool, of_weight: bool, of_bias: bool
) -> Any:
    axes = [0, *range(2, x.dim())]
    total = grad.float().sum(axes)
    against = (grad.float() * (x.float() - _channels(x, mean))).sum(axes)
    empty = torch.empty(0)
    kind = x.dtype if weight is None else weight.dtype
    found = (against * invstd).to(kind) if of_weight else empty
    return total, against, found, total.to(kind) if of_bias else empty


def _batch_norm_backward(
    grad: Any, x: Any, mean: Any, invstd: Any, weight: Any, total: Any, against: Any, counts: Any
) -> Any:
    number = counts.sum().float()
    shift = _channels(x, total / number)
    slope = _channels(x, invstd**2 * against / number) * (x.float() - _channels(x, mean))
    found = (grad.float() - shift - slope) * _channels(x, invstd)
    return (found if weight is None else found * _channels(x, weight)).to(x.dtype)


_OWN: dict[str, Callable[..., Any]] = {
    "_scaled_dot_product_flash_attention": _flash,
    "_scaled_dot_product_flash_attention_backward": _flash_backward,
    "_scaled_dot_product_efficient_attention": _efficient,
    "_scaled_dot_product_efficient_attention_backward": _efficient_backward,
    "_fused_rms_norm_backward": _rms_norm_backward,
    "_thnn_fused_lstm_cell": _lstm_cell,
    "_thnn_fused_lstm_cell_backward_impl": _lstm_cell_backward,
    "_thnn_fused_gru_cell": _gru_cell,
    "_thnn_fused_gru_cell_backward": _gru_cell_backward,
    "native_dropout": _dropout,
    "batch_norm_stats": _batch_norm_stats,
    "batch_norm_gather_stats_with_counts": _batch_norm_gather,
    "batch_norm_elemt": _batch_norm_apply,
    "batch_norm_backward_reduce": _batch_norm_reduce,
    "batch_norm_backward_elemt": _batch_norm_backward,
    "mm.dtype": lambda a, b, dtype: a.to(dtype) @ b.to(dtype),
    "bmm.dtype": lambda a, b, dtype: a.to(dtype) @ b.to(dtype),
}


def _missing_kernel(name: str) -> Callable[..., Any]:
    def refuse(*args: Any, **kwargs: Any) -> Any:
        raise NotImplementedError(f"aten::{name}: the CPU has no kernel for it (benchmarks/absent_gpu)")

    return refuse


_library = torch.library.Library("aten", "IMPL")


def replace_kernels() -> None:
    """Gives every operation of torch that computes on CUDA a kernel that computes on the CPU."""
    has = torch._C._dispatch_has_kernel_for_dispatch_key
    for full in torch._C._dispatch_get_all_op_names():
        space, name = full.split("::")
        packet, _, overload = name.partition(".")
        if space != "aten" or _KEPT.match(name) or not (has(full, "CUDA") or name in _ALSO):
            continue
        op = getattr(getattr(aten, packet), overload or "default")
        returns = op._schema.returns
        if any(result.alias_info and not result.alias_info.is_write for result in returns):
            continue  # a view
        compute = _OWN.get(name)
        if compute is None:
            compute = op if any(has(full, key) for key in _OF_CPU) else _missing_kernel(name)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # torch warns that there was another kernel
            _library.impl(name, _replacement(name, op._schema, compute), "CUDA")
