"""Copies that oneDNN makes in the backward pass of a convolution, beside those that torch's profiler sees."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.autograd.profiler import profile

from dslc.compiler.trace.memory import _reorders
from dslc.compiler.trace.private_torch import is_allocation

WITH_AVX512 = pytest.mark.skipif(
    torch.backends.cpu.get_cpu_capability() != "AVX512",
    reason="oneDNN's kernels for this CPU copy more of convolutions with groups or three dims",
)
Convolution = nn.Conv1d | nn.Conv2d | nn.Conv3d | nn.ConvTranspose2d


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    """Each thread of oneDNN has copies of a weight of its own."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


def allocated(module: Convolution, x: Tensor, wanted: list[bool]) -> tuple[int, int, tuple[Any, ...]]:
    """Returns the most bytes that a backward pass of a convolution allocates, those of its results, and what it is
    called with.
    """
    y = module(x)
    settings = [
        list(module.stride),
        list(module.padding),
        list(module.dilation),
        isinstance(module, nn.ConvTranspose2d),
    ]
    zeros = [0] * len(module.stride)
    arguments = (torch.ones_like(y), x, module.weight, [y.shape[1]], *settings, zeros, module.groups, wanted)
    with profile(profile_memory=True) as recorded:
        results = torch.ops.aten.convolution_backward(*arguments)
    assert recorded.kineto_results is not None
    sizes: list[tuple[int, int]] = []

    def collect(event: Any) -> None:
        if is_allocation(event):
            sizes.append((event.start_time_ns, event.extra_fields.alloc_size))
        for child in event.children:
            collect(child)

    for event in recorded.kineto_results.experimental_event_tree():
        collect(event)
    now = most = 0
    for _, size in sorted(sizes):
        now += size
        most = max(most, now)
    del results
    return most, now, arguments


@pytest.mark.parametrize("wanted", [[True, True, True], [False, True, True], [True, False, False]], ids=str)
@pytest.mark.parametrize(
    ("module", "size"),
    [
        (nn.Conv2d(32, 64, 3, stride=2, padding=1), (16, 16)),
        (nn.Conv2d(32, 64, 3, padding=1), (16, 16)),
        (nn.Conv2d(32, 64, 1, stride=2), (16, 16)),
        pytest.param(nn.Conv2d(32, 64, 3, stride=2, padding=1, groups=4), (16, 16), marks=WITH_AVX512),
        (nn.Conv1d(32, 64, 3, stride=2, padding=1), (64,)),
        pytest.param(nn.Conv3d(16, 32, 3, stride=2, padding=1), (8, 8, 8), marks=WITH_AVX512),
        (nn.ConvTranspose2d(32, 64, 4, stride=2, padding=1), (16, 16)),
    ],
    ids=["strided", "unstrided", "of a pixel", "grouped", "1d", "3d", "transposed"],
)
def test_the_copies_are_those_of_onednn(module: Convolution, size: tuple[int, ...], wanted: list[bool]) -> None:
    taken = torch.ones(16, module.in_channels, *size)
    most, results, arguments = allocated(module, taken, wanted)
    found = _reorders(arguments)
    assert found is not None
    weights = 4 * sum(parameter.numel() for parameter in module.parameters())
    # Copies of a weight, and of a bias, are no more than these; they do not grow with the batch.
    expected = max(found.input, found.weight + results - weights * wanted[1])
    assert expected <= most <= expected + 2 * weights


def test_channels_last_is_the_order_of_onednn() -> None:
    module = nn.Conv2d(32, 64, 3, stride=2, padding=1).to(memory_format=torch.channels_last)  # type: ignore[call-overload]
    taken = torch.ones(16, 32, 16, 16).to(memory_format=torch.channels_last)
    most, results, arguments = allocated(module, taken, [True, True, True])
    assert _reorders(arguments) is None
    assert most - results <= 9 * module.weight.numel()
