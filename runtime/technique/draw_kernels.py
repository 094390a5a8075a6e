"""Torch's kernels that draw, replaced by kernels that draw by sample.

Model: torch fills a tensor with random numbers by `bernoulli_`, `uniform_`, `normal_`, `exponential_`, `random_` and
`randperm`; on GPUs `native_dropout` makes a mask and multiplies by it. `rand`, `randint`, `multinomial` of one and
others go through these; `normal` of tensors and `bernoulli_` of chances are put together of them here. A replaced
kernel fills by position (philox.py, philox_tensors.py) while a layer that draws by sample runs, in a pass over a
micro-batch; else it is torch's.

On GPUs torch's fused attention draws within its kernels. Attention with dropout takes torch's plain products there, as
on CPUs, and its dropout goes through `native_dropout`.

Contract: a tensor has the same numbers on every device, normal and exponential ones up to rounding. No kernel waits for
a GPU, but for a rank's places in a draw that is cut, once.
"""

from __future__ import annotations

import contextlib
import functools
import hashlib
import math
import sys
import warnings
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from dslc.compiler.ir.steps import SHARED, WIDEST_RANGE
from dslc.compiler.trace.code_place import line_at
from dslc.runtime.technique import philox, philox_tensors
from dslc.runtime.technique.sample_pass import ACTIVE, LAYERS, Buffer, DrawingLayer, SamplePass

Fill = Callable[[philox.Array, int, int], None]  # fills an array from a key's place on
FillTensor = Callable[[Tensor, int, int], None]

_UNSIGNED = {1: torch.uint8, 2: torch.uint16, 4: torch.uint32, 8: torch.uint64}  # by bytes


def replace_kernels(device: str) -> None:
    """Replaces torch's kernels for CPUs, and those for another type of device, once in a process."""
    _replace_cpu_kernels()
    if device != "cpu":
        replace_tensor_kernels(device.upper())


@functools.cache  # holds the kernels
def _replace_cpu_kernels() -> torch.library.Library:
    library = torch.library.Library("aten", "IMPL")
    for name, filling in _FILLS.items():
        _replace(library, name, "CPU", functools.partial(_kernel, name=name, filling=filling))
    _replace_others(library, "CPU")
    return library


@functools.cache
def replace_tensor_kernels(key: str) -> torch.library.Library:
    """Replaces torch's kernels for the devices of a dispatch key by tensor operations, while the result lives."""
    library = torch.library.Library("aten", "IMPL")
    for name, filling in _TENSOR_FILLS.items():
        _replace(library, name, key, functools.partial(_tensor_kernel, name=name, filling=filling))
    _replace_others(library, key)
    _replace(library, "native_dropout", key, _dropout_kernel)
    _replace(library, "scaled_dot_product_attention", f"Autograd{key}", _attention_kernel)
    return library


def _replace_others(library: torch.library.Library, key: str) -> None:
    """Replaces the kernels that draw by other kernels, on any device."""
    _replace(library, "bernoulli_.Tensor", key, _chances_kernel)
    for name in ("normal.Tensor_float", "normal.float_Tensor", "normal.Tensor_Tensor"):
        _replace(library, name, key, _normal_kernel)
    _replace(library, "randperm.generator_out", key, _permutation_kernel)


def _replace(library: torch.library.Library, name: str, key: str, make: Callable[[Any], Callable[..., object]]) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)  # torch says that a kernel is replaced
        kernel = make(torch.library.get_kernel(f"aten::{name}", key))
        library.impl(name, kernel, key, with_keyset=True, allow_override=True)


def _active(
    tensor: Tensor, *, by_torch: bool = False, shape: tuple[int, ...] | None = None
) -> tuple[SamplePass, DrawingLayer] | None:
    """Returns the pass and the layer by which a tensor is filled, perhaps in another `shape`; None if torch does."""
    samples, layer = ACTIVE.samples, ACTIVE.layer
    if samples is None or layer is None or by_torch:
        return None
    shape = tuple(tensor.shape) if shape is None else shape
    if layer.dim_of(samples.draws[layer.name], shape, samples.samples) is not None:
        return samples, layer
    if tensor.numel() > 0 and not ACTIVE.misfit:
        line = line_at(sys._getframe(1))
        ACTIVE.misfit = (
            f"code {f'of `{layer.name}`' if layer.name in LAYERS else layer.name}{f' ({line})' if line else ''} draws "
            f"numbers of shape {shape} in a pass over {samples.samples} samples: torch's generator of each rank makes "
            "them, and another plan has others"
        )
    return None


def _is_left_to_torch(name: str, tensor: Tensor, args: tuple[float | None, ...]) -> bool:
    """True if torch raises, as there are no such numbers; or draws what compiler/trace/draws.py excludes."""
    if name.startswith("random_"):
        low, high = (0, *args)[-2:]
        if low is None or high is None or not low < high <= low + WIDEST_RANGE or tensor.dtype == torch.bool:
            return True
        limits = None if tensor.is_floating_point() or tensor.is_complex() else torch.iinfo(tensor.dtype)
        return limits is not None and not limits.min <= low < high <= limits.max + 1
    if name == "bernoulli_.float":
        (chance,) = args or (0.5,)
        return tensor.is_complex() or chance is None or not 0 <= chance <= 1
    if name == "exponential_":
        (rate,) = args or (1.0,)
        return not tensor.is_floating_point() or rate is None or not rate > 0
    if not (tensor.is_floating_point() or tensor.is_complex()):
        return True
    first, second = args[0] if args else 0.0, args[1] if len(args) > 1 else 1.0
    if first is None or second is None:
        return True
    if name == "normal_":
        return not second >= 0
    limit = torch.finfo(tensor.dtype).max
    return not -limit <= first <= second <= limit or second - first > limit


def _place_of_samples(tensor: Tensor, samples: SamplePass, layer: DrawingLayer, number: int) -> tuple[Tensor, int, int]:
    """Returns a view of a tensor with the samples first, how many rows it is, and the first row's sample."""
    dim, outer = layer.dim_of(number, tuple(tensor.shape), samples.samples), layer.outer_of(number)
    assert dim is not None
    if dim == SHARED:
        return tensor, 1, 0
    if outer > 1:
        return tensor.unflatten(dim, (outer, samples.samples, -1)).movedim(dim + 1, 0), samples.samples, samples.first
    return tensor.movedim(dim, 0) if dim else tensor, samples.samples, samples.first


def _begin_draw(samples: SamplePass, layer: DrawingLayer) -> tuple[int, int]:
    """Returns the number of a layer's next draw in the pass, and its key."""
    number = samples.draws[layer.name]
    samples.draws[layer.name] += 1
    named = f"{samples.seed}/{samples.step}/{layer.name}/{number}".encode()
    return number, int.from_bytes(hashlib.blake2b(named, digest_size=16).digest(), "little")


def _fill_samples(
    rows: Buffer, key: int, first: int, layer: DrawingLayer, number: int, fill: Callable[[Buffer, int, int], None]
) -> None:
    """Fills one row for each sample, from sample `first` of the global batch on."""
    size = rows.shape[1]  # numbers of a sample on this rank
    piece = layer.cuts.get(number)
    if piece is not None:
        numbers = math.prod(piece.shape)
        whole = rows.new_empty(numbers) if isinstance(rows, Tensor) else np.empty(numbers, rows.dtype)
        for sample, row in enumerate(rows, first):
            fill(whole, key, sample * len(whole))
            row[:] = piece.take(whole, size)
        return
    if layer.pieces == 1 or (layer.by_position is not None and number not in layer.by_position):
        fill(rows.reshape(-1), key, first * size)
        return
    for sample, row in enumerate(rows, first):
        fill(row, key, (sample * layer.pieces + layer.number) * size)


# ------------------------------------------------------------------------------------------------------------- CPUs


def _kernel(original: Any, name: str, filling: Callable[..., tuple[torch.dtype | None, Fill]]) -> Callable[..., Tensor]:
    def kernel(keys: object, tensor: Tensor, *args: float, generator: torch.Generator | None = None) -> Tensor:
        active = _active(tensor, by_torch=generator is not None or _is_left_to_torch(name, tensor, args))
        if active is not None:
            dtype, fill = filling(tensor, *args)
            _fill(tensor, *active, dtype, fill)
            return tensor
        result: Tensor = original.call_boxed(keys, tensor, *args, generator=generator)
        return result

    return kernel


def _bernoulli(tensor: Tensor, probability: float = 0.5) -> tuple[torch.dtype | None, Fill]:
    # The bits of one, as numpy has no bfloat16.
    unsigned = _UNSIGNED[tensor.element_size()]
    one = int(torch.ones((), dtype=tensor.dtype).view(unsigned))
    return unsigned, lambda out, key, first: philox.bernoulli(out, key, first, probability, one)


def _uniform(tensor: Tensor, low: float = 0.0, high: float = 1.0) -> tuple[torch.dtype | None, Fill]:
    digits = philox_tensors.digits_of(tensor.dtype)
    return None, lambda out, key, first: philox.uniform(out, key, first, low, high, digits)


def _normal(tensor: Tensor, mean: float = 0.0, deviation: float = 1.0) -> tuple[torch.dtype | None, Fill]:
    return None, lambda out, key, first: philox.normal(out, key, first, mean, deviation)


def _exponential(tensor: Tensor, rate: float = 1.0) -> tuple[torch.dtype | None, Fill]:
    return None, lambda out, key, first: philox.exponential(out, key, first, rate)


def _integers(tensor: Tensor, *limits: int) -> tuple[torch.dtype | None, Fill]:
    low, high = (0, *limits)[-2:]
    return None, lambda out, key, first: philox.integers(out, key, first, low, high)


_FILLS: dict[str, Callable[..., tuple[torch.dtype | None, Fill]]] = {
    "bernoulli_.float": _bernoulli,
    "uniform_": _uniform,
    "normal_": _normal,
    "exponential_": _exponential,
    "random_.from": _integers,
    "random_.to": _integers,
}


def _fill(tensor: Tensor, samples: SamplePass, layer: DrawingLayer, view: torch.dtype | None, fill: Fill) -> None:
    """Fills a tensor: its bits as `view`, or its numbers."""
    number, key = _begin_draw(samples, layer)
    tensor, rows, first = _place_of_samples(tensor, samples, layer, number)
    dtype = tensor.dtype if view else _of_numpy(tensor)
    in_place = tensor.is_contiguous() and samples.order is None and dtype == tensor.dtype
    target = tensor if in_place else torch.empty(tensor.shape, dtype=dtype)
    numbers = target.detach().view(view).numpy() if view else target.detach().numpy()
    _fill_samples(numbers.reshape(rows, -1), key, first, layer, number, fill)
    if not in_place:
        tensor.copy_(_in_order(target, samples, rows))


def _of_numpy(tensor: Tensor) -> torch.dtype:
    """Returns a dtype of numpy's that holds a tensor's numbers: its own, or that of 64 bits."""
    if tensor.dtype in (torch.float32, torch.complex64):
        return tensor.dtype
    if not (tensor.is_complex() or tensor.is_floating_point()):
        return torch.int64
    return torch.complex128 if tensor.is_complex() else torch.float64


def _in_order(target: Tensor, samples: SamplePass, rows: int) -> Tensor:
    if samples.order is None or rows != samples.samples:  # one for all samples
        return target
    by_sample = target.view(rows, -1)
    return by_sample[samples.order.to(target.device)].view(target.shape)


# ---------------------------------------------------------------------------------------------------- other devices


def _bernoulli_tensor(probability: float = 0.5) -> FillTensor:
    return lambda out, key, first: philox_tensors.bernoulli(out, key, first, probability)


def _uniform_tensor(low: float = 0.0, high: float = 1.0) -> FillTensor:
    return lambda out, key, first: philox_tensors.uniform(out, key, first, low, high)


def _normal_tensor(mean: float = 0.0, deviation: float = 1.0) -> FillTensor:
    return lambda out, key, first: philox_tensors.normal(out, key, first, mean, deviation)


def _exponential_tensor(rate: float = 1.0) -> FillTensor:
    return lambda out, key, first: philox_tensors.exponential(out, key, first, rate)


def _integers_tensor(*limits: int) -> FillTensor:
    low, high = (0, *limits)[-2:]
    return lambda out, key, first: philox_tensors.integers(out, key, first, low, high)


_TENSOR_FILLS: dict[str, Callable[..., FillTensor]] = {
    "bernoulli_.float": _bernoulli_tensor,
    "uniform_": _uniform_tensor,
    "normal_": _normal_tensor,
    "exponential_": _exponential_tensor,
    "random_.from": _integers_tensor,
    "random_.to": _integers_tensor,
}


def _tensor_kernel(original: Any, name: str, filling: Callable[..., FillTensor]) -> Callable[..., Tensor]:
    def kernel(keys: object, tensor: Tensor, *args: float, generator: torch.Generator | None = None) -> Tensor:
        active = _active(tensor, by_torch=generator is not None or _is_left_to_torch(name, tensor, args))
        if active is not None:
            fill_tensor(tensor, *active, filling(*args))
            return tensor
        result: Tensor = original.call_boxed(keys, tensor, *args, generator=generator)
        return result

    return kernel


@torch.no_grad()
def fill_tensor(tensor: Tensor, samples: SamplePass, layer: DrawingLayer, fill: FillTensor) -> None:
    """Fills a tensor of any device."""
    number, key = _begin_draw(samples, layer)
    tensor, rows, first = _place_of_samples(tensor, samples, layer, number)
    in_place = tensor.is_contiguous() and samples.order is None
    target = tensor if in_place else torch.empty_like(tensor, memory_format=torch.contiguous_format)
    _fill_samples(target.view(rows, -1), key, first, layer, number, fill)
    if not in_place:
        tensor.copy_(_in_order(target, samples, rows))


def _dropout_kernel(original: Any) -> Callable[..., tuple[Tensor, Tensor]]:
    def kernel(keys: object, input: Tensor, p: float, train: bool | None) -> tuple[Tensor, Tensor]:
        active = _active(input)
        if active is None or train is False or not 0 < p < 1:
            result: tuple[Tensor, Tensor] = original.call_boxed(keys, input, p, train)
            return result
        mask = torch.empty_like(input, dtype=torch.bool)
        fill_tensor(mask, *active, _bernoulli_tensor(1 - p))
        return (input * mask).mul_(1 / (1 - p)), mask

    return kernel


def _attention_kernel(original: Any) -> Callable[..., Tensor]:
    def kernel(
        keys: object,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attn_mask: Tensor | None = None,
        dropout_p: float = 0.0,
        is_causal: bool = False,
        *,
        scale: float | None = None,
        enable_gqa: bool = False,
    ) -> Tensor:
        is_by_sample = dropout_p > 0 and (ACTIVE.graph_draws is not None or _active(query) is not None)
        with sdpa_kernel(SDPBackend.MATH) if is_by_sample else contextlib.nullcontext():
            result: Tensor = original.call_boxed(
                keys, query, key, value, attn_mask, dropout_p, is_causal, scale=scale, enable_gqa=enable_gqa
            )
        return result

    return kernel


# ------------------------------------------------------------------------------------------------------- any device


def _has_fault(faults: Tensor) -> bool:
    """True if torch would raise because of a number of a tensor; on CPUs alone, as none waits for a GPU."""
    return faults.device.type == "cpu" and bool(faults.any())


def _chances_kernel(original: Any) -> Callable[..., Tensor]:
    def kernel(keys: object, tensor: Tensor, chances: Tensor, *, generator: torch.Generator | None = None) -> Tensor:
        if (
            _active(tensor, by_torch=generator is not None or tensor.is_complex()) is None
            or chances.is_complex()
            or _has_fault((chances < 0) | (chances > 1) | chances.isnan())
        ):
            result: Tensor = original.call_boxed(keys, tensor, chances, generator=generator)
            return result
        return tensor.copy_(torch.empty_like(tensor, dtype=torch.float32).uniform_() < chances)

    return kernel


def _normal_kernel(original: Any) -> Callable[..., Tensor]:
    def kernel(
        keys: object,
        mean: Tensor | float,
        std: Tensor | float = 1.0,
        *,
        generator: torch.Generator | None = None,
    ) -> Tensor:
        tensors = [value for value in (mean, std) if isinstance(value, Tensor)]
        like = tensors[0] if len(tensors) == 1 else torch.broadcast_tensors(*tensors)[0]
        if (
            _active(like, by_torch=generator is not None or any(map(torch.is_complex, tensors))) is None
            or (not isinstance(std, Tensor) and not std >= 0)
            or (isinstance(std, Tensor) and _has_fault(~(std >= 0)))
        ):
            result: Tensor = original.call_boxed(keys, mean, std, generator=generator)
            return result
        return torch.empty(like.shape, dtype=like.dtype, device=like.device).normal_().mul_(std).add_(mean)

    return kernel


def _permutation_kernel(original: Any) -> Callable[..., Tensor]:
    """Of a fixed number of things alone: the samples of a batch are on several ranks."""

    def kernel(keys: object, n: int, *, generator: torch.Generator | None = None, out: Tensor) -> Tensor:
        active = _active(out, by_torch=generator is not None, shape=(n,))
        if active is None or active[1].dim_of(active[0].draws[active[1].name], (n,), active[0].samples) != SHARED:
            result: Tensor = original.call_boxed(keys, n, generator=generator, out=out)
            return result
        _, key = _begin_draw(*active)
        numbers = torch.empty(n, dtype=torch.int64, device=out.device)
        if numbers.device.type == "cpu":
            philox.permutation(numbers.numpy(), key)
        else:
            philox_tensors.permutation(numbers, key)
        return out.resize_(n).copy_(numbers)

    return kernel
