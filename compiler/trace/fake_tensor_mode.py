"""Tensors without memory: torch's FakeTensorMode, with a faster cache of the results of operations.

Model: torch has such a cache, too. A network is run a dozen times while it is traced, so that most operations are found
in it; but its long keys take more time than the operation takes on small tensors. Here a key has the shapes, strides,
dtypes and devices of tensors, and other arguments as they are. Half of all operations are views, which the kernels of
the meta device make without any cache.

Contract: each result equals torch's (tests/compiler/trace/test_fake_tensor_mode.py). Operations whose result depends on
more, such as a number in a tensor, are left to torch.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterable, Sequence
from functools import cache
from typing import Literal, NamedTuple, TypeAlias, cast

import torch
from torch import Tensor

from dslc.compiler.trace.private_torch import (
    GROUPED_PRODUCT,
    QUANTIZING,
    Argument,
    FakeTensor,
    Operator,
    Options,
    TorchFakeTensorMode,
    find_fake_mode,
    is_composite,
    on_meta_device,
    schema_of,
    storage_identity,
)

_VALUES = {int, float, bool, str, type(None), torch.dtype, torch.device, torch.layout, torch.memory_format}


class _NewTensor(NamedTuple):
    """A result that has memory of its own, and fills it."""

    shape: tuple[int, ...]
    stride: tuple[int, ...]
    dtype: torch.dtype
    device: torch.device


_Entry: TypeAlias = "_NewTensor | tuple[_NewTensor | None, ...]"


class FakeTensorMode(TorchFakeTensorMode):
    """Makes tensors without memory. Torch calls it without the wrapper that hides a mode from its compiler, a tenth of
    the time of an operation: nothing is compiled while modules are traced. `mode_without_memory` makes one.

    `quantized` says that a tensor was quantized: without memory it is a plain one, and only a real one shows its kind.
    """

    quantized = False

    def __init__(self, *, allow_non_fake_inputs: bool = False) -> None:
        super().__init__(allow_non_fake_inputs=allow_non_fake_inputs)
        self._cache: dict[tuple[object, ...], _Entry | None] = {}  # None: torch does the operation each time

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False

    __torch_dispatch__ = inspect.unwrap(TorchFakeTensorMode.__torch_dispatch__)

    def dispatch(
        self, func: Operator, types: Sequence[type], args: Sequence[Argument] = (), kwargs: Options | None = None
    ) -> object:
        """Returns the result of an operation."""
        kind, options = _kind(func), kwargs or {}
        key: list[object] = [func, torch.get_default_dtype(), *options]
        tensors: list[FakeTensor] = []
        is_known = kind != "other" and self._add_to_key((*args, *options.values()), key, tensors) and tensors
        if not is_known or (kind == "view" and len(tensors) > 1):
            return self._dispatch_by_torch(func, types, args, options)
        if kind == "view":
            return self._view(func, args, options, tensors[0].fake_device)
        identity = tuple(key)
        if identity not in self._cache:
            made = self._dispatch_by_torch(func, types, args, options)
            self._cache[identity] = _cache_entry(made, tensors)
            return made
        if (result := self._cache[identity]) is None:
            return self._dispatch_by_torch(func, types, args, options)
        with on_meta_device(self):
            if isinstance(result, _NewTensor):
                return self._new(result)
            return tuple(each and self._new(each) for each in result)

    def _dispatch_by_torch(
        self, func: Operator, types: Sequence[type], args: Sequence[Argument], kwargs: Options
    ) -> object:
        """Returns the result of torch, or of an operation that has a kernel on CPUs in float32 and, without memory, in
        bfloat16 alone.
        """
        if func is GROUPED_PRODUCT.default and args[0].dtype != torch.bfloat16:
            ends = args[2] if len(args) > 2 else kwargs.get("offs")
            shape = _grouped_shape(args[0], args[1], ends)
            with self:
                return torch.empty(shape, dtype=args[0].dtype)
        if func in QUANTIZING:
            self.quantized = True
        return super().dispatch(func, types, args, kwargs)

    def _view(self, func: Operator, args: Sequence[Argument], kwargs: Options, device: torch.device) -> object:
        with on_meta_device(self):
            made = func(*args, **kwargs)
        if isinstance(made, Tensor):
            return FakeTensor(self, made, device)
        return type(made)(FakeTensor(self, each, device) for each in made)

    def _new(self, result: _NewTensor) -> FakeTensor:
        made = torch.empty_strided(result.shape, result.stride, dtype=result.dtype, device="meta")
        return FakeTensor(self, made, result.device)

    def _add_to_key(self, values: Iterable[Argument], key: list[object], tensors: list[FakeTensor]) -> bool:
        """Adds to `key` all of the arguments that a result depends on, and to `tensors` the tensors among them. Returns
        False if that is not all: for a sparse tensor, one of another mode, or one whose number torch knows.
        """
        for value in values:
            kind = type(value)
            if kind is FakeTensor:
                if value.layout is not torch.strided or value.fake_mode is not self or value.constant is not None:
                    return False
                key += value.dtype, value.shape, value.stride(), value.fake_device, value.is_conj(), value.is_neg()
                tensors.append(value)
            elif kind in _VALUES:
                key += kind, value
            elif kind is list or kind is tuple:
                key.append(len(value))
                if not self._add_to_key(value, key, tensors):
                    return False
            else:
                return False
        return True


@cache
def _kind(operator: object) -> Literal["view", "new", "other"]:
    """Returns whether an operation makes views, or new tensors from the shapes of others; "other" for those that torch
    does each time.
    """
    if (
        not isinstance(operator, Operator)
        or operator.namespace not in ("aten", "prims")
        or operator in (GROUPED_PRODUCT.default, *QUANTIZING)
        or is_composite(operator)  # which may return a tensor as it is, as `to` does
        or any(each.alias_info is not None and each.alias_info.is_write for each in schema_of(operator).arguments)
    ):
        return "other"
    return "view" if operator.is_view else "new"


def _cache_entry(made: object, given: Sequence[FakeTensor]) -> _Entry | None:
    """Returns the entry of an operation's result; None if the result is not new tensors alone."""
    results = made if isinstance(made, tuple) else (made,)
    memory = {storage_identity(tensor) for tensor in given}
    entries: list[_NewTensor | None] = []
    for each in results:
        if isinstance(each, FakeTensor) and each.layout is torch.strided and storage_identity(each) not in memory:
            is_plain = not (each.is_conj() or each.is_neg() or each.requires_grad) and each.constant is None
            extent = 1 + sum((n - 1) * step for n, step in zip(each.shape, each.stride(), strict=True))
            size = extent * each.element_size() if each.numel() else 0
            if not is_plain or each.storage_offset() or each.untyped_storage().nbytes() != size:
                return None
            memory.add(storage_identity(each))
            entries.append(_NewTensor(tuple(each.shape), each.stride(), each.dtype, each.fake_device))
        elif each is None and made is not None:
            entries.append(None)
        else:
            return None
    return tuple(entries) if isinstance(made, tuple) else entries[0]


def _grouped_shape(a: Tensor, b: Tensor, ends: Tensor | None) -> tuple[int, ...]:
    """Returns the shape of `torch._grouped_mm`: products of groups; `ends` has the last row or column of each group."""
    if a.dim() == b.dim() == 2:
        assert ends is not None
        return ends.shape[0], a.shape[0], b.shape[1]
    return *a.shape[:-1][-2 if b.dim() == 3 else -1 :], b.shape[-1]


def detect_fake_mode(tensors: Sequence[Tensor]) -> FakeTensorMode | None:
    """Returns the mode that tensors belong to; None if none of them is without memory."""
    return cast("FakeTensorMode | None", find_fake_mode(list(tensors)))
