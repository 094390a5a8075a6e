"""Draws by tensor operations, which GPUs take, equal those on CPUs to the bit. Here the CPU does these operations."""

from __future__ import annotations

import itertools
import os
import subprocess
import sys
from collections.abc import Callable, Iterator

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.autograd.profiler import profile

from dslc.compiler.ir.program import CutDraw, DrawStep, RecomputeStep
from dslc.compiler.trace.structures import class_name
from dslc.runtime.technique import draw_kernels, philox, philox_tensors, recompute, sample_draws
from dslc.runtime.technique.sample_pass import ACTIVE, DrawingLayer, SamplePass

CPU = torch.device("cpu")
KEYS = st.integers(0, 2**128 - 1)
FIRST = st.one_of(st.integers(0, 40), st.integers(0, 2**50))


@pytest.fixture
def on_tensors() -> Iterator[None]:
    """Gives the CPU the kernels of other devices."""
    draw_kernels.replace_kernels("cpu")
    library = draw_kernels.replace_tensor_kernels("CPU")
    yield
    library._destroy()
    draw_kernels.replace_tensor_kernels.cache_clear()


def words(key: int, first: int, count: int) -> np.ndarray:
    made = np.zeros(count, dtype=np.int64)
    for place, chunk in philox.words(key, first, count):
        made[place] = chunk
    return made


@given(KEYS, FIRST, st.integers(0, 100))
def test_words_are_those_on_cpus(key: int, first: int, count: int) -> None:
    made = torch.full((count,), -1)
    for place, chunk in philox_tensors.words(key, first, count, CPU):
        made[place] = chunk
    np.testing.assert_array_equal(made.numpy(), words(key, first, count))


@given(KEYS, FIRST, st.integers(0, 60), st.sampled_from([torch.bool, torch.float32, torch.bfloat16]))
@settings(max_examples=50)
def test_chances_and_even_numbers_are_those_on_cpus(key: int, first: int, count: int, dtype: torch.dtype) -> None:
    chances, expected = torch.empty(count, dtype=dtype), np.empty(count, np.uint8)
    for probability in (0.0, 0.3, 1.0):
        philox_tensors.bernoulli(chances, key, first, probability)
        philox.bernoulli(expected, key, first, probability, 1)
        np.testing.assert_array_equal(chances.float().numpy(), expected)
    for number_type in (np.float32, np.float64):
        numbers, even = np.empty(count, number_type), torch.from_numpy(np.empty(count, number_type))
        philox.uniform(numbers, key, first, -0.7, 1.9)
        philox_tensors.uniform(even, key, first, -0.7, 1.9)
        np.testing.assert_array_equal(even.numpy(), numbers)
        philox.normal(numbers, key, first, 2.0, 0.5)
        philox_tensors.normal(even, key, first, 2.0, 0.5)
        torch.testing.assert_close(even, torch.from_numpy(numbers), rtol=1e-6, atol=0)


@given(KEYS, FIRST, st.integers(0, 60))
@settings(max_examples=50)
def test_integers_orders_and_exponential_numbers_are_those_on_cpus(key: int, first: int, count: int) -> None:
    for low, high in ((0, 2), (-7, 3), (5, 5 + 2**53)):
        numbers, whole = np.empty(count, np.int64), torch.empty(count, dtype=torch.int64)
        philox.integers(numbers, key, first, low, high)
        philox_tensors.integers(whole, key, first, low, high)
        np.testing.assert_array_equal(whole.numpy(), numbers)
        assert ((low <= numbers) & (numbers < high)).all()
    philox.permutation(numbers, key)
    philox_tensors.permutation(whole, key)
    np.testing.assert_array_equal(whole.numpy(), numbers)
    assert sorted(numbers) == [*range(count)]
    times, other = np.empty(count), torch.empty(count, dtype=torch.float64)
    philox.exponential(times, key, first, 2.0)
    philox_tensors.exponential(other, key, first, 2.0)
    torch.testing.assert_close(other, torch.from_numpy(times), rtol=1e-12, atol=0)


def test_chunks_join(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(philox_tensors, "_CHUNK", 16)
    chances, expected = torch.empty(100), np.empty(100, np.uint8)
    philox_tensors.bernoulli(chances, 5, 3, 0.4)
    philox.bernoulli(expected, 5, 3, 0.4, 1)
    np.testing.assert_array_equal(chances.numpy(), expected)


def test_triton_makes_the_same_masks() -> None:
    """By its interpreter, which computes on the CPU. A GPU's torch brings Triton along."""
    pytest.importorskip("triton")
    code = """if True:
        import numpy as np, torch
        from dslc.runtime.technique import philox, philox_tensors
        from dslc.runtime.technique.philox_triton import fill_where_below
        for key, first, count in ((7, 0, 40), (2**127 + 5, 3, 77), (9, 5, 1), (2**64 - 1, 7, 5000), (5, 2**40, 9)):
            mask, expected = torch.zeros(count, dtype=torch.bool), np.empty(count, np.uint8)
            fill_where_below(mask, key, first, round(0.3 * 2**32))
            philox.bernoulli(expected, key, first, 0.3, 1)
            np.testing.assert_array_equal(mask.numpy(), expected)
        assert philox_tensors._is_launched(torch.device("cpu"))
    """
    subprocess.run([sys.executable, "-c", code], env=os.environ | {"TRITON_INTERPRET": "1"}, check=True)


def test_masks_are_made_by_operations_where_triton_makes_no_kernel(monkeypatch: pytest.MonkeyPatch) -> None:
    gpu = torch.device("cuda", 0)
    monkeypatch.setattr(philox_tensors, "_LAUNCHED", {})
    monkeypatch.setattr(philox_tensors, "has_triton", lambda: True)
    monkeypatch.setenv("CC", "/no/compiler")  # a GPU, where there is one, gets no kernel by it
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
    assert not philox_tensors._has_kernel(gpu) and not philox_tensors._LAUNCHED, "not tried while a graph is recorded"
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
    with pytest.warns(UserWarning, match=r"masks of dropout \(\w+: .+\); torch's operations make the same") as told:
        assert not any(philox_tensors._has_kernel(device) for device in (gpu, gpu, CPU))
    assert len(told) == 1


def test_temporary_numbers_take_what_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    """As CPUs allocate."""
    shrunk = 16
    monkeypatch.setattr(philox_tensors, "_CHUNK", philox_tensors._CHUNK // shrunk)
    fills: list[tuple[Callable[..., None], tuple[float, ...], torch.dtype]] = [
        (philox_tensors.bernoulli, (0.3,), torch.float32),
        (philox_tensors.uniform, (0.0, 1.0), torch.float64),
        (philox_tensors.uniform, (0.0, 1.0), torch.float32),
        (philox_tensors.normal, (0.0, 1.0), torch.bfloat16),
        (philox_tensors.exponential, (1.0,), torch.float32),
        (philox_tensors.integers, (3, 7), torch.int64),
    ]
    for fill, chances, dtype in fills:
        out = torch.empty(2 * philox_tensors._CHUNK, dtype=dtype)
        with profile(profile_memory=True) as recorded:
            fill(out, 5, 3, *chances)
        assert recorded.kineto_results is not None
        found = [each for each in recorded.kineto_results.events() if each.name() == "[memory]"]
        taken = itertools.accumulate(each.nbytes() for each in sorted(found, key=lambda each: each.start_ns()))
        assert 8 * philox_tensors._CHUNK < max(taken) <= philox_tensors.WORKSPACE // shrunk, (fill, dtype)


@pytest.mark.slow
def test_shapes_are_known_without_numbers() -> None:
    ((place, chunk),) = philox_tensors.words(1, 3, 20, torch.device("meta"))
    assert (place, chunk.shape, chunk.dtype) == (slice(0, 20), (20,), torch.int64)


RANGES = st.sampled_from([(0.0, 1.0), (1.0, 2.0), (-0.7, 1.9), (0.0, 0.1), (-3.0, -1.0), (-1.0, 0.0), (4.0, 4.0)])
FLOATS = st.sampled_from([torch.float64, torch.float32, torch.bfloat16, torch.float16])


def drawn_by_both(like: Tensor, name: str, *arguments: float, layer: DrawingLayer | None = None) -> list[Tensor]:
    """Returns what a layer draws by tensor operations, and by numpy: a row for each sample."""
    made = []
    draw_kernels.replace_kernels("cpu")
    for is_on_tensors in (True, False):
        library = draw_kernels.replace_tensor_kernels("CPU") if is_on_tensors else None
        ACTIVE.samples = SamplePass(seed=1, step=2, first=8, samples=len(like))
        ACTIVE.layer = layer or DrawingLayer(name="net")
        try:
            made.append(getattr(torch.empty_like(like), name)(*arguments))
        finally:
            ACTIVE.samples = ACTIVE.layer = None
            if library is not None:
                library._destroy()
                draw_kernels.replace_tensor_kernels.cache_clear()
    return made


@given(RANGES, FLOATS)
@settings(max_examples=20, deadline=None)
def test_even_numbers_stay_below_the_end_in_every_width(span: tuple[float, float], dtype: torch.dtype) -> None:
    low, high = span
    by_tensors, by_numpy = drawn_by_both(torch.empty(4, 5000, dtype=dtype), "uniform_", low, high)
    assert torch.equal(by_tensors, by_numpy)
    numbers = by_numpy.double()
    assert low <= numbers.min() + abs(low) * torch.finfo(dtype).eps
    assert numbers.max() < high if low < high else numbers.eq(low).all()
    assert abs(numbers.mean() - (low + high) / 2) <= (high - low) * (0.01 + torch.finfo(dtype).eps)


def test_half_widths_reach_all_numbers_but_the_end() -> None:
    """The largest word becomes the number before `high`, also where adding `low` rounds up."""
    for dtype, last in ((torch.bfloat16, 1 - 2**-8), (torch.float16, 1 - 2**-11)):
        by_tensors, by_numpy = drawn_by_both(torch.empty(4, 5000, dtype=dtype), "uniform_")
        assert by_tensors.max() == by_numpy.max() == last and by_numpy.min() == 0
    shift, scale, last = philox.even_numbers(1.0, 2.0, 24)
    largest = np.float32((0xFFFF_FFFF >> shift) * scale) + np.float32(1)
    assert largest == 2 and last == np.nextafter(np.float32(2), np.float32(1))


@pytest.mark.filterwarnings("ignore:ComplexHalf support is experimental")
@pytest.mark.parametrize("dtype", [torch.complex64, torch.complex128, torch.complex32])
def test_both_parts_of_complex_numbers_are_drawn(dtype: torch.dtype) -> None:
    for name, arguments, mean, deviation in (
        ("normal_", (3.0, 2.0), 3, 2 / 2**0.5),
        ("uniform_", (0.0, 1.0), 0.5, 1 / 12**0.5),
    ):
        made = drawn_by_both(torch.empty(4, 3000, dtype=dtype), name, *arguments)
        parts, by_numpy = (torch.view_as_real(numbers).double() for numbers in made)
        torch.testing.assert_close(parts, by_numpy, rtol=1e-2 if dtype == torch.complex32 else 1e-5, atol=1e-5)
        for part in parts.unbind(-1):
            assert abs(part.mean() - mean) < 0.05 and abs(part.std() - deviation) < 0.05
        assert abs(torch.corrcoef(parts.flatten(0, 1).T)[0, 1]) < 0.05
    with pytest.raises(NotImplementedError):
        drawn_by_both(torch.empty(4, 3, dtype=dtype), "bernoulli_", 0.5)


def test_a_rank_takes_its_piece_of_complex_numbers() -> None:
    cut = CutDraw(module="", number=0, shape=(2, 6), dim=1, outer=1, size=6, parts=())
    whole = drawn_by_both(torch.empty(4, 2, 6, dtype=torch.complex64), "normal_")
    for number in range(2):
        cuts = sample_draws._pieces_of(DrawStep(tensor=(cut,)), "", {"tensor": number}, {"tensor": 2})
        layer = DrawingLayer(name="net", cuts=cuts)
        made = drawn_by_both(torch.empty(4, 2, 3, dtype=torch.complex64), "normal_", layer=layer)
        for piece, numbers in zip(made, whole, strict=True):
            assert torch.equal(piece, numbers[..., 3 * number : 3 * number + 3])


class Drawing(nn.Module):
    """Draws in the ways that have kernels of their own on GPUs: (batch, heads, positions, 8)."""

    def __init__(self) -> None:
        super().__init__()
        self.drop, self.recurrent = nn.Dropout(0.3), nn.LSTM(8, 8, num_layers=2, dropout=0.2)

    def forward(self, x: Tensor) -> Tensor:
        x = self.drop(x) + torch.rand(x.shape, dtype=x.dtype)
        x = F.scaled_dot_product_attention(x, x, x, dropout_p=0.4, is_causal=True)
        keys = torch.cat((x, x), -2)
        mask = torch.ones(x.shape[-2], keys.shape[-2], dtype=torch.bool).tril(1)
        x = x + F.scaled_dot_product_attention(x, keys, keys, mask, dropout_p=0.1)
        x = x * x.new_empty(len(x), 1, 1, 1).bernoulli_(0.7)
        y: Tensor = self.recurrent(x.flatten(1, 2))[0]
        return F.dropout(y.transpose(1, 2), 0.1)


def outputs(model: nn.Module, step: DrawStep, samples: SamplePass, x: Tensor) -> list[Tensor]:
    """Returns the output and the gradient of a pass."""
    sample_draws.apply(step, model, {"context": 0}, {"context": 1}, CPU)
    input = x.clone().requires_grad_()
    ACTIVE.samples = samples
    ACTIVE.layer = DrawingLayer(name="net")
    try:
        output = model(input)
        output.square().sum().backward()
    finally:
        ACTIVE.samples = ACTIVE.layer = None
    assert input.grad is not None
    return [output.detach(), input.grad]


@pytest.mark.usefixtures("on_tensors")
@pytest.mark.parametrize("order", [None, [2, 0, 3, 1]])
def test_modules_draw_what_they_draw_by_numpy(order: list[int] | None) -> None:
    torch.manual_seed(0)
    model, x = Drawing(), torch.randn(4, 2, 3, 8)

    def run() -> list[Tensor]:
        places = None if order is None else torch.tensor(order)
        samples = SamplePass(seed=1, step=2, first=8, samples=4, order=places)
        return outputs(model, DrawStep(), samples, x)

    made = run()
    draw_kernels.replace_tensor_kernels("CPU")._destroy()
    for by_tensors, by_numpy in zip(made, run(), strict=True):
        torch.testing.assert_close(by_tensors, by_numpy, rtol=0, atol=0)


@given(st.data())
@settings(max_examples=40)
def test_pieces_of_ranks_are_those_on_cpus(data: st.DataObject) -> None:
    """Of a cut along one of three dims, and of pieces of the sequence."""
    some = st.integers(1, 3)
    shape, dim, ranks = [data.draw(some), data.draw(some), data.draw(some)], data.draw(st.integers(0, 2)), 2
    shape[dim] *= ranks
    number = data.draw(st.integers(0, 1))
    cut = CutDraw(module="", number=0, shape=(*shape,), dim=dim, outer=1, size=shape[dim], parts=())
    cuts = sample_draws._pieces_of(DrawStep(tensor=(cut,)), "", {"tensor": number}, {"tensor": ranks})
    pieces = data.draw(st.sampled_from([(cuts, 0, 1), ({}, number, ranks)]))
    layer = DrawingLayer(name="net", cuts=pieces[0], number=pieces[1], pieces=pieces[2])
    samples = SamplePass(seed=data.draw(some), step=data.draw(some), first=data.draw(some), samples=2)
    size = int(np.prod(shape)) // ranks
    made = torch.empty(2, size)
    draw_kernels.fill_tensor(
        made, samples, layer, lambda out, key, first: philox_tensors.bernoulli(out, key, first, 0.5)
    )
    by_numpy = torch.empty(2, size)
    samples.draws.clear()
    draw_kernels.fill_by_numpy("bernoulli_.float", by_numpy, samples, layer, (0.5,))
    assert torch.equal(made, by_numpy)


@pytest.mark.usefixtures("on_tensors")
def test_the_mask_of_a_gpus_dropout_has_a_byte_and_is_that_of_a_cpu() -> None:
    x = torch.randn(4, 6, dtype=torch.bfloat16).t()  # not contiguous
    results = []
    for drop in (lambda: torch.native_dropout(x, 0.3, True), lambda: (F.dropout(x, 0.3), x)):
        ACTIVE.samples, ACTIVE.layer = SamplePass(seed=1, step=2, first=0, samples=3), DrawingLayer(name="net")
        results.append(drop())
        ACTIVE.samples = ACTIVE.layer = None
    (output, mask), (expected, _) = results
    assert mask.dtype == torch.bool and mask.stride() == output.stride() == x.stride()
    torch.testing.assert_close(output, expected, rtol=1e-2, atol=0)
    assert torch.equal(output != 0, mask)
    assert torch.equal(torch.native_dropout(x, 0.3, False)[0], x), "outside of a pass, as torch"


class DroppedAttention(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return F.scaled_dot_product_attention(x, x, x, dropout_p=0.4)


@pytest.mark.usefixtures("on_tensors")
@pytest.mark.parametrize("kind", ["full", "selective"])
def test_recomputed_attention_draws_again(kind: str) -> None:
    x, step = torch.randn(4, 2, 3, 8), DrawStep(kinds=(class_name(DroppedAttention),))
    results = []
    for is_recomputed in (False, True):
        model = nn.Sequential(DroppedAttention())
        sample_draws.apply(step, model, {"context": 0}, {"context": 1}, CPU)
        if is_recomputed:
            recompute.apply(RecomputeStep(kind=kind, modules=("0",)), model)  # type: ignore[arg-type]
        results.append(outputs(model, DrawStep(), SamplePass(seed=1, step=2, first=0, samples=4), x))
    for plain, again in zip(*results, strict=True):
        torch.testing.assert_close(again, plain, rtol=0, atol=0)
