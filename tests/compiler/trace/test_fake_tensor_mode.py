"""Fake tensors are torch's, and found faster: each operation is done three times, with and without dslc's cache."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

from dslc.compiler.trace.fake_tensor_mode import FakeTensorMode
from dslc.compiler.trace.private_torch import FakeTensor, OperationMode, TorchFakeTensorMode, storage_identity

Work = Callable[[], object]


def described(value: object, memory: dict[int, int]) -> object:
    """Returns all that tells one fake tensor from another; memory by the order in which it was seen."""
    if isinstance(value, list | tuple):
        return type(value), [described(each, memory) for each in value]
    if not isinstance(value, FakeTensor):
        return type(value), (value.shape, value.dtype) if isinstance(value, Tensor) else value
    if value.layout != torch.strided:
        return value.layout, value.shape, value.dtype, value.device
    place = memory.setdefault(storage_identity(value), len(memory))
    flags = value.is_conj(), value.is_neg(), value.constant is None
    size = value.untyped_storage().nbytes()
    return value.shape, value.stride(), value.storage_offset(), value.dtype, value.device, place, size, flags


def operations(mode: FakeTensorMode | TorchFakeTensorMode, work: Work) -> list[object]:
    """Returns the operations of `work`, which runs three times, with their results, and its error."""
    seen: list[object] = []
    alive: list[object] = []  # no memory's identity is used again
    memory: dict[int, int] = {}

    def act(func: Any, args: Any, kwargs: Any) -> object:
        result = func(*args, **kwargs)
        alive.append((args, kwargs, result))
        seen.append((func, described(args, memory), described(result, memory)))
        return result

    with mode, OperationMode(act):
        for _ in range(3):
            try:
                work()
            except Exception as error:  # any kind: both modes fail alike
                seen.append((type(error), str(error)))
    return seen


def trained(make: Callable[[], nn.Module], *shape: int, low: bool = False) -> Work:
    """Returns the forward and backward pass of a module."""

    def work() -> None:
        with torch.autocast("cpu", dtype=torch.bfloat16, enabled=low):
            made = make()(torch.empty(shape))
        made.sum().backward()

    return work


class _Attention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inside, self.outside = nn.Linear(8, 24), nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (part.unflatten(-1, (2, 4)).transpose(1, 2) for part in self.inside(x).chunk(3, -1))
        mixed = functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.outside(mixed.transpose(1, 2).reshape(x.shape)) + x


class _ChannelsLast(nn.Sequential):
    def forward(self, x: Tensor) -> Tensor:
        made: Tensor = super().forward(x.to(memory_format=torch.channels_last))
        return made


def _convolution() -> nn.Module:
    return nn.Sequential(nn.Conv2d(3, 8, 3, stride=2), nn.BatchNorm2d(8), nn.ReLU(inplace=True), nn.MaxPool2d(2))


def _in_place() -> Tensor:
    x = torch.zeros(4, 3)
    x[1:, 0] += 2
    x.t_().mul_(3)
    return x.unsqueeze_(0)


def _known_number() -> object:
    known = torch.tensor(3).view(1) * 2
    return torch.zeros(int(known.item()))


def _cut_up() -> object:
    x = torch.empty(2, 3, 4)
    parts = [*x.split(1, -1), *x.unbind(1), x[:, None, ..., ::2], x.expand(5, 2, 3, 4), x.as_strided((3,), (8,), 1)]
    return [*parts, torch.cat([x, x], -1), torch.stack([x[0], x[1]]), x.mT.contiguous(), x.diagonal(dim1=1, dim2=2)]


def _numbers_of_two_kinds() -> object:
    x = torch.zeros(3, dtype=torch.int64)
    return [x + 1, x + 1.0, x + True, x * 0, x * False, x / 2, x.to(torch.int8), x == 1, x.float() + 1, x.bool() + 1]


def _complex() -> object:
    x = torch.fft.rfft(torch.empty(4, 8))
    return [each.clone() for each in (x, x.conj(), x.imag, x.conj().imag)] + [x * 2, x.conj() * 2, x.conj().imag.abs()]


def _lists() -> object:
    """Two convolutions whose lists of numbers differ in where one ends and the next begins."""
    x, weight = torch.empty(1, 1, 9, 9), torch.empty(1, 1, 3, 3)
    convolve = torch.ops.aten.convolution.default
    return [
        convolve(x, weight, None, stride, padding, [1, 1], False, [0, 0], 1)
        for stride, padding in (([2], [1, 1]), ([2, 1], [1]))
    ]


def _strides() -> object:
    square = torch.empty(3, 3)
    return [square + 1, square.t() + 1, square.exp(), square.t().exp(), torch.empty(2, 3, 3) @ square]


WORK: dict[str, Work] = {
    "attention": trained(_Attention, 2, 6, 8),
    "attention in 16 bits": trained(_Attention, 2, 6, 8, low=True),
    "convolution": trained(_convolution, 2, 3, 9, 9),
    "convolution, channels last": trained(lambda: _ChannelsLast(_convolution()), 2, 3, 9, 9),
    "norm and embedding": lambda: (
        nn.LayerNorm(4)(nn.Embedding(5, 4)(torch.zeros(2, 3, dtype=torch.int64))).sum().backward()
    ),
    "dropout": trained(lambda: nn.Dropout(), 2, 3),
    "recurrence": trained(lambda: nn.GRUCell(3, 4), 2, 3),
    "complex": _complex,
    "lists": _lists,
    "two devices": lambda: [torch.empty(2, 3, device=device) + 1 for device in ("cpu", "meta")],
    "written in place": _in_place,
    "known numbers": _known_number,
    "cut up": _cut_up,
    "numbers of two kinds": _numbers_of_two_kinds,
    "strides": _strides,
    "sparse": lambda: torch.sparse.mm(torch.eye(3).to_sparse(), torch.empty(3, 2)),
    "without a shape": lambda: torch.empty(3).nonzero(),
    "without a number": lambda: torch.empty(3).sum().item(),
    "dims that are not there": lambda: torch.empty(4, 3).transpose(0, 5),
    "shapes that do not fit": lambda: torch.empty(4, 3) @ torch.empty(4, 3),
    "dtypes that do not fit": lambda: torch.empty(4, 4) @ torch.empty(4, 4).double(),
    "devices that do not fit": lambda: torch.empty(4, 4) + torch.empty(4, 4, device="meta"),
    "no tensors": lambda: [torch.arange(3), torch.full((2,), 1.5), torch.empty(0, 3)],
    "nothing inside": lambda: [torch.empty(0, 3) + 1, torch.empty(0, 3).sum(0), torch.empty(2, 0).view(0, 4)],
    "inference": lambda: torch.inference_mode()(lambda: [torch.empty(3) + 1, torch.empty(3).view(3, 1)])(),
}


@pytest.mark.parametrize("work", WORK.values(), ids=WORK.keys())
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
def test_each_operation_has_the_result_of_torch(work: Work, dtype: torch.dtype) -> None:
    torch.set_default_dtype(dtype)
    try:
        assert operations(FakeTensorMode(), work) == operations(TorchFakeTensorMode(), work)
    finally:
        torch.set_default_dtype(torch.float32)


def test_a_view_that_cannot_be_fails_as_in_a_training() -> None:
    with pytest.raises(RuntimeError) as real:
        torch.empty(4, 3).t().view(12)
    with FakeTensorMode(), pytest.raises(RuntimeError) as fake:
        torch.empty(4, 3).t().view(12)
    assert str(fake.value) == str(real.value)


def test_a_key_has_the_default_dtype() -> None:
    fake = FakeTensorMode()
    with fake:
        counts = torch.zeros(3, dtype=torch.int64)
        before = counts / 2
        torch.set_default_dtype(torch.float64)
        try:
            assert (before.dtype, (counts / 2).dtype) == (torch.float32, torch.float64)
        finally:
            torch.set_default_dtype(torch.float32)


def test_operations_are_done_by_torch_once(monkeypatch: pytest.MonkeyPatch) -> None:
    done = []
    by_torch = TorchFakeTensorMode.dispatch

    def dispatch(mode: Any, func: Any, *arguments: Any) -> object:
        done.append(func.name())
        return by_torch(mode, func, *arguments)

    monkeypatch.setattr(TorchFakeTensorMode, "dispatch", dispatch)
    with FakeTensorMode():
        x, w = torch.empty(2, 3), torch.empty(3, 4)
        done.clear()
        for _ in range(3):
            (x @ w).view(4, 2).relu()
    assert [name for name in done if name != "prim::device"] == ["aten::mm", "aten::relu"]
