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
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from dslc.compiler.ir.steps import SHARED, WIDEST_RANGE
from dslc.compiler.trace.code_place import line_at
from dslc.runtime.technique import philox, philox_tensors
from dslc.runtime.technique.sample_pass import ACTIVE, LAYERS, Buffer, DrawingLayer, SamplePass

FillTensor = Callable[[Tensor, int, int], None]  # fills a tensor from a key's place on
Fill = Callable[[str, Tensor, SamplePass, DrawingLayer, tuple[float, ...]], None]  # by an operation and its numbers

_UNSIGNED = {1: torch.uint8, 2: torch.uint16, 4: torch.uint32, 8: torch.uint64}  # by bytes


def replace_kernels(device: str) -> None:
    """Replaces torch's kernels for CPUs, and those for another type of device, once in a process."""
    _replace_cpu_kernels()
    if device != "cpu":
        replace_tensor_kernels(device.upper())


class _Filling(NamedTuple):
    """The functions that fill an array and a tensor by an operation, and torch's defaults for its numbers."""

    by_numpy: Callable[..., None]
    by_tensors: Callable[..., None]
    defaults: tuple[float, ...] = ()


_FILLINGS = {
    "bernoulli_.float": _Filling(philox.bernoulli, philox_tensors.bernoulli, (0.5,)),
    "uniform_": _Filling(philox.uniform, philox_tensors.uniform, (0.0, 1.0)),
    "normal_": _Filling(philox.normal, philox_tensors.normal, (0.0, 1.0)),
    "exponential_": _Filling(philox.exponential, philox_tensors.exponential, (1.0,)),
    "random_.from": _Filling(philox.integers, philox_tensors.integers),
    "random_.to": _Filling(philox.integers, philox_tensors.integers),
}


@functools.cache  # holds the kernels
def _replace_cpu_kernels() -> torch.library.Library:
    return _replace_all("CPU", fill_by_numpy)


@functools.cache
def replace_tensor_kernels(key: str) -> torch.library.Library:
    """Replaces torch's kernels for the devices of a dispatch key by tensor operations, while the result lives."""
    library = _replace_all(key, _fill_by_tensors)
    _replace(library, "native_dropout", key, _dropout_kernel)
    _replace(library, "scaled_dot_product_attention", f"Autograd{key}", _attention_kernel)
    return library


def _replace_all(key: str, fill: Fill) -> torch.library.Library:
    library = torch.library.Library("aten", "IMPL")
    for name in _FILLINGS:
        _replace(library, name, key, functools.partial(_kernel, name=name, fill=fill))
    _replace(library, "bernoulli_.Tensor", key, _chances_kernel)
    for name in ("normal.Tensor_float", "normal.float_Tensor", "normal.Tensor_Tensor"):
        _replace(library, name, key, _normal_kernel)
    _replace(library, "randperm.generator_out", key, _permutation_kernel)
    return library


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


def _numbers_of(name: str, args: tuple[float | None, ...]) -> tuple[float, ...]:
    """Returns the numbers of an operation. Integers that end with their dtype end at infinity."""
    numbers = tuple(math.inf if number is None else number for number in args)
    if name.startswith("random_"):
        return (0, *numbers)[-2:]
    return numbers + _FILLINGS[name].defaults[len(numbers) :]


def _is_left_to_torch(name: str, tensor: Tensor, numbers: tuple[float, ...]) -> bool:
    """True if torch raises, as there are no such numbers; or draws what compiler/trace/draws.py excludes."""
    if name.startswith("random_"):
        low, high = numbers
        if not low < high <= low + WIDEST_RANGE or tensor.dtype == torch.bool:
            return True
        limits = None if tensor.is_floating_point() or tensor.is_complex() else torch.iinfo(tensor.dtype)
        return limits is not None and not limits.min <= low < high <= limits.max + 1
    if name == "bernoulli_.float":
        return tensor.is_complex() or not 0 <= numbers[0] <= 1
    if name == "exponential_":
        return not tensor.is_floating_point() or not numbers[0] > 0
    if not (tensor.is_floating_point() or tensor.is_complex()):
        return True
    first, second = numbers
    if name == "normal_":
        return not second >= 0
    limit = torch.finfo(tensor.dtype).max
    return not -limit <= first <= second <= limit or second - first > limit


def _kernel(original: Any, name: str, fill: Fill) -> Callable[..., Tensor]:
    def kernel(keys: object, tensor: Tensor, *args: float | None, generator: torch.Generator | None = None) -> Tensor:
        numbers = _numbers_of(name, args)
        active = _active(tensor, by_torch=generator is not None or _is_left_to_torch(name, tensor, numbers))
        if active is not None:
            fill(name, tensor, *active, numbers)
            return tensor
        result: Tensor = original.call_boxed(keys, tensor, *args, generator=generator)
        return result

    return kernel


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


def fill_by_numpy(
    name: str, tensor: Tensor, samples: SamplePass, layer: DrawingLayer, numbers: tuple[float, ...]
) -> None:
    """Fills a tensor of a CPU with the numbers of an operation."""
    view = None
    if name == "bernoulli_.float":  # the bits of one, as numpy has no bfloat16
        view = _UNSIGNED[tensor.element_size()]
        numbers = (*numbers, int(torch.ones((), dtype=tensor.dtype).view(view)))
    elif name == "uniform_":
        numbers = (*numbers, philox_tensors.digits_of(tensor.dtype))
    by_numpy = _FILLINGS[name].by_numpy
    number, key = _begin_draw(samples, layer)
    tensor, rows, first = _place_of_samples(tensor, samples, layer, number)
    dtype = tensor.dtype if view else _of_numpy(tensor)
    in_place = tensor.is_contiguous() and samples.order is None and dtype == tensor.dtype
    target = tensor if in_place else torch.empty(tensor.shape, dtype=dtype)
    array = target.detach().view(view).numpy() if view else target.detach().numpy()
    _fill_samples(
        array.reshape(rows, -1), key, first, layer, number, lambda out, key, first: by_numpy(out, key, first, *numbers)
    )
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


def _fill_by_tensors(
    name: str, tensor: Tensor, samples: SamplePass, layer: DrawingLayer, numbers: tuple[float, ...]
) -> None:
    by_tensors = _FILLINGS[name].by_tensors
    fill_tensor(tensor, samples, layer, lambda out, key, first: by_tensors(out, key, first, *numbers))


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
        _fill_by_tensors("bernoulli_.float", mask, *active, (1 - p,))
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
