"""Draws of forward passes follow from the seed, the step, the sample, the layer and the element."""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from helpers.made_programs import places, program, tokens
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from dslc.compiler.ir.program import CutDraw, DrawStep, RecomputeStep
from dslc.compiler.trace.structures import call, class_name
from dslc.runtime.data.batches import StepBatch
from dslc.runtime.technique import compiling, draw_kernels, philox, recompute, sample_draws
from dslc.runtime.technique.sample_pass import ACTIVE, DrawingLayer, SamplePass

KEY = 0x1234_5678_9ABC_DEF0_1122_3344
CPU = torch.device("cpu")
AXES = {"pipeline": 1, "data": 1, "context": 1, "tensor": 1}


def words(first: int, count: int) -> np.ndarray:
    made = np.zeros(count, dtype=np.uint32)
    for place, chunk in philox.words(KEY, first, count):
        made[place] = chunk
    return made


@given(st.integers(0, 40), st.integers(1, 300))
def test_a_word_depends_on_its_position_alone(first: int, count: int) -> None:
    np.testing.assert_array_equal(words(first, count), words(0, 400)[first : first + count])


def test_numbers_have_the_distribution_that_is_asked_for() -> None:
    chance = np.zeros(1 << 18, dtype=np.uint32)
    philox.bernoulli(chance, KEY, 3, 0.9, 1)
    assert abs(chance.mean() - 0.9) < 0.003
    even, normal = np.zeros(1 << 18), np.zeros(1 << 18, dtype=np.float32)
    philox.uniform(even, KEY, 0, -1.0, 3.0)
    assert even.min() >= -1 and even.max() < 3 and abs(even.mean() - 1) < 0.01
    assert abs(even.std() - 4 / 12**0.5) < 0.01
    philox.normal(normal, KEY, 0, 2.0, 0.5)
    assert abs(normal.mean() - 2) < 0.005 and abs(normal.std() - 0.5) < 0.005
    times, numbers = np.zeros(1 << 18), np.zeros(1 << 18, dtype=np.int64)
    philox.exponential(times, KEY, 0, 2.0)
    assert times.min() > 0 and abs(times.mean() - 0.5) < 0.003 and abs(times.std() - 0.5) < 0.003
    philox.integers(numbers, KEY, 0, -1, 4)
    assert (abs(np.bincount(numbers + 1) / len(numbers) - 0.2) < 0.003).all()
    later = np.zeros(100, dtype=np.float32)
    philox.normal(later, KEY, 200_000, 2.0, 0.5)
    np.testing.assert_array_equal(later, normal[200_000:200_100])


@given(st.data())
def test_the_pieces_of_ranks_are_each_number_of_a_sample_once(data: st.DataObject) -> None:
    some = st.integers(1, 3)
    ranks = {"tensor": data.draw(some), "context": data.draw(some)}
    shape, cuts = [data.draw(some), data.draw(some), data.draw(some)], {}
    dims = data.draw(st.permutations(range(3)))
    for axis, dim in zip(ranks, dims, strict=False):
        if data.draw(st.booleans()):
            parts = tuple(ranks[axis] * each for each in data.draw(st.lists(some, min_size=1, max_size=3)))
            outer, size, rest = 1, sum(parts), 1
        else:
            parts, outer, size, rest = (), data.draw(some), ranks[axis] * data.draw(some), data.draw(some)
        shape[dim], cuts[axis] = outer * size * rest, (dim, outer, size, parts)
    made: Any = {
        axis: (CutDraw(module="drop", number=1, shape=(*shape,), dim=dim, outer=outer, size=size, parts=parts),)
        for axis, (dim, outer, size, parts) in cuts.items()
    }
    step, whole = DrawStep(kinds=("Dropout",), **made), np.arange(np.prod(shape))
    found = []
    for tensor in range(ranks["tensor"]):
        for context in range(ranks["context"]):
            model = nn.ModuleDict({"drop": nn.Dropout(0.1)})
            sample_draws.apply(step, model, {"tensor": tensor, "context": context}, ranks, CPU)
            piece = vars(model["drop"])["forward"].layer.cuts[1]
            found += [*piece.take(whole, len(whole) // ranks["tensor"] // ranks["context"])]
    assert sorted(found) == [*whole]


def test_chances_of_nothing_and_of_all() -> None:
    made = np.full(20, 7, dtype=np.uint8)
    philox.bernoulli(made, KEY, 0, 1.0, 1)
    assert (made == 1).all()
    philox.bernoulli(made, KEY, 0, 0.0, 1)
    assert (made == 0).all()


# ------------------------------------------------------------------------------------------------------ in a model


class Drawing(nn.Module):
    """Draws in most of the ways that networks do: (batch, positions, 8)."""

    def __init__(self) -> None:
        super().__init__()
        self.drop = nn.Dropout(0.3)

    def forward(self, x: Tensor) -> Tensor:
        x = self.drop(self.drop(x))  # two calls, two masks
        x = x * x.new_empty(len(x), 1, 1).bernoulli_(0.7)
        x = x + torch.randn(x.shape) + torch.rand_like(x)
        return F.dropout(x.flatten(0, 1), 0.2, self.training).view(x.shape)


def draws(tmp_path: Path, microbatches: int, rank: int = 0, ranks: int = 1) -> sample_draws.SampleDraws:
    job = program(ranks, tokens(tmp_path), microbatches=microbatches)
    return sample_draws.SampleDraws(dataclasses.replace(job, draws=DrawStep()), places(ranks)[rank])


def drawing(context: tuple[int, int] = (0, 1)) -> Drawing:
    model = Drawing()
    step = DrawStep(kinds=(class_name(Drawing),))
    sample_draws.apply(step, model, AXES | {"context": context[0]}, AXES | {"context": context[1]}, CPU)
    return model


def drawn(tmp_path: Path, input: Tensor, microbatches: int = 1, ranks: int = 1, number: int = 3) -> Tensor:
    """Returns the outputs of all samples of a step."""
    made = []
    for rank, share in enumerate(input.chunk(ranks)):
        passes, model = draws(tmp_path, microbatches, rank, ranks), drawing()
        passes.begin(StepBatch([], len(input), 0, number))
        for micro, part in enumerate(share.chunk(microbatches)):
            passes.enter(micro)
            made.append(model(part))
        passes.leave()
    return torch.cat(made)


OPERATIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "randint": lambda x: torch.randint(2, 9, (len(x), 3)),
    "randint_like": lambda x: torch.randint_like(x, 9),
    "random_": lambda x: x.bfloat16().random_(5),
    "exponential_": lambda x: x.clone().exponential_(),
    "gumbel_softmax": lambda x: F.gumbel_softmax(x),
    "multinomial": lambda x: torch.multinomial(x, 2),
    "categorical": lambda x: torch.distributions.Categorical(x).sample(),
    "bernoulli": torch.bernoulli,
    "bernoulli of a number": lambda x: torch.bernoulli(x, 0.5),
    "bernoulli_ of chances": lambda x: x.clone().bernoulli_(x[:, :1]),
    "normal of a mean": lambda x: torch.normal(x, 0.5),
    "normal of a deviation": lambda x: torch.normal(1.0, x),
    "normal of both": lambda x: torch.normal(x, x[:, :1]),
    "normal of two dtypes": lambda x: torch.normal(x, x.double()),
    "alpha_dropout": lambda x: F.alpha_dropout(x, 0.5, training=True),
    "along the second dim": lambda x: F.dropout(x.T.contiguous(), 0.5).T,
    "the samples' channels": lambda x: F.dropout1d(x[:, :, None], 0.5),
}
SHARED_OPERATIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "a number": lambda x: torch.rand(()),
    "as many as samples": lambda x: torch.randn(4),
    "an order": lambda x: torch.randperm(9),
}


@pytest.mark.parametrize("name", [*OPERATIONS, *SHARED_OPERATIONS])
def test_each_operation_draws_by_sample_or_the_same_for_all(name: str) -> None:
    draw = (OPERATIONS | SHARED_OPERATIONS)[name]
    is_shared, dim = name in SHARED_OPERATIONS, 1 if "second" in name else 0
    layer = DrawingLayer(name="layer", shared=is_shared, dims=(dim,))
    draw_kernels.replace_kernels("cpu")
    chances = torch.rand(4, 6, generator=torch.Generator().manual_seed(0))

    def drawn(first: int, samples: int, step: int = 3) -> Tensor:
        ACTIVE.samples, ACTIVE.layer = SamplePass(seed=1, step=step, first=first, samples=samples), layer
        before = torch.get_rng_state()
        try:
            made = draw(chances[first : first + samples])
        finally:
            ACTIVE.samples = ACTIVE.layer = None
        assert torch.equal(torch.get_rng_state(), before), "torch's generator has drawn"
        return made

    whole, pieces = drawn(0, 4), [drawn(0, 2), drawn(2, 2)]
    assert whole.dtype == draw(chances).dtype
    assert all(torch.equal(piece, whole) for piece in pieces) if is_shared else torch.equal(torch.cat(pieces), whole)
    assert not torch.equal(drawn(0, 4, step=4), whole)


@pytest.mark.parametrize(
    "draw",
    [
        lambda x: torch.bernoulli(x.log()),
        lambda x: torch.bernoulli(x * torch.nan),
        lambda x: x.bernoulli_(1.5),
        lambda x: x.uniform_(2, 1),
        lambda x: x.normal_(0, -1),
        lambda x: x.exponential_(-1),
        lambda x: x.byte().random_(256 + 1),
        lambda x: torch.normal(x, -1.0),
        lambda x: torch.normal(0.0, -x),
        lambda x: torch.normal(x, x * torch.nan),
        lambda x: torch.multinomial(0 * x, 1),
    ],
)
def test_what_torch_refuses_to_draw_is_refused(draw: Callable[[Tensor], Tensor]) -> None:
    draw_kernels.replace_kernels("cpu")
    messages = []
    for samples in (None, SamplePass(seed=1, step=3, first=0, samples=4)):
        ACTIVE.samples, ACTIVE.layer = samples, DrawingLayer(name="layer")
        try:
            with pytest.raises(RuntimeError) as error:
                draw(torch.full((4, 2), 0.5))
        finally:
            ACTIVE.samples = ACTIVE.layer = None
        messages.append(str(error.value))
    assert messages[0] == messages[1]


@pytest.mark.parametrize("input", [torch.ones(8, 4, 8), torch.ones(4, 8, 8).transpose(0, 1)])
@pytest.mark.parametrize(("microbatches", "ranks"), [(2, 1), (4, 1), (1, 2), (2, 4)])
def test_micro_batches_and_data_ranks_draw_what_one_process_draws(
    tmp_path: Path, input: Tensor, microbatches: int, ranks: int
) -> None:
    one = drawn(tmp_path, input)
    torch.testing.assert_close(drawn(tmp_path, input, microbatches, ranks), one, rtol=0, atol=0)
    assert not torch.equal(one[0], one[1]) and not torch.equal(drawn(tmp_path, input, number=4), one)


def test_a_module_that_draws_takes_what_its_forward_takes() -> None:
    class Pairs(nn.Module):
        def forward(self, pair: tuple[Tensor, Tensor]) -> Tensor:
            return F.dropout(pair[0] + pair[1], 0.5)

    model = Pairs()
    sample_draws.apply(DrawStep(kinds=(class_name(Pairs),)), model, AXES, AXES, CPU)
    assert call(model, model.forward, (torch.ones(2), torch.ones(2))).shape == (2,)


def test_half_the_width_of_numbers_draws_the_same_mask(tmp_path: Path) -> None:
    masks = []
    for dtype in (torch.float64, torch.float32, torch.bfloat16, torch.float16):
        passes, model = draws(tmp_path, 1), nn.Sequential(nn.Dropout(0.5))
        sample_draws.apply(DrawStep(), model, AXES, AXES, CPU)
        passes.begin(StepBatch([], 8, 0, 0))
        passes.enter(0)
        masks.append(model(torch.ones(8, 32, dtype=dtype)) > 0)
        passes.leave()
    assert all(torch.equal(mask, masks[0]) for mask in masks) and 0.3 < masks[0].float().mean() < 0.7


def test_pieces_of_the_sequence_draw_their_part(tmp_path: Path) -> None:
    input, made = torch.ones(8, 6, 4), []
    for pieces in (1, 3):
        for number, part in enumerate(input.chunk(pieces, 1)):
            passes, model = draws(tmp_path, 1), nn.Sequential(nn.Dropout(0.5))
            sample_draws.apply(DrawStep(), model, AXES | {"context": number}, AXES | {"context": pieces}, CPU)
            passes.begin(StepBatch([], 8, 0, 0))
            passes.enter(0)
            made.append(model(part))
            passes.leave()
    assert torch.equal(torch.cat(made[1:], 1), made[0])


@pytest.mark.parametrize("kind", ["full", "selective"])
def test_recomputation_draws_again_without_states_of_generators(tmp_path: Path, kind: str) -> None:
    """Also where other micro-batches have gone forward in between, as in a pipeline."""
    torch.manual_seed(0)
    layers = nn.Sequential(nn.Linear(8, 8), nn.Sequential(nn.Linear(8, 8), nn.Dropout(0.5), nn.Tanh(), nn.Dropout(0.5)))
    models = [layers, copy.deepcopy(layers)]
    for model in models:
        sample_draws.apply(DrawStep(), model, AXES, AXES, CPU)
        passes = draws(tmp_path, 2)
        passes.begin(StepBatch([], 8, 0, 0))
        if model is models[1]:
            recompute.apply(RecomputeStep(kind=kind, modules=("1",)), model)  # type: ignore[arg-type]
            assert not recompute.draws_numbers(model)
        before, losses = torch.get_rng_state(), []
        for micro in range(2):
            passes.enter(micro)
            losses.append(model(torch.ones(4, 8)).square().sum())
        for loss in losses:
            loss.backward()
        passes.leave()
        assert torch.equal(torch.get_rng_state(), before)
    gradients = [[parameter.grad for parameter in model.parameters()] for model in models]
    torch.testing.assert_close(gradients[1], gradients[0], rtol=0, atol=0)


class Checkpointing(nn.Module):
    """Recomputes by itself code that draws, outside of a module's `forward` and in one that is called twice."""

    def __init__(self, how: str) -> None:
        super().__init__()
        self.how, self.up, self.down, self.drop = how, nn.Linear(8, 8), nn.Linear(8, 8), nn.Dropout(0.5)

    def forward(self, x: Tensor) -> Tensor:
        x = self.up(x)
        for _ in range(2):
            x = self.body(x) if self.how == "plain" else checkpoint(self.body, x, use_reentrant=self.how == "reentrant")
        return F.dropout(x, 0.3)

    def body(self, x: Tensor) -> Tensor:
        return self.drop(self.down(F.dropout(x, 0.3)).sigmoid()) * torch.rand_like(x)


def test_a_network_that_recomputes_by_itself_draws_again_what_it_drew(tmp_path: Path) -> None:
    gradients, generator = [], torch.Generator().manual_seed(0)
    weights = torch.randn(8, 8, generator=generator)
    for how in ("plain", "reentrant", "without"):
        model = Checkpointing(how)
        with torch.no_grad():
            for layer in (model.up, model.down):
                layer.weight.copy_(weights)
                layer.bias.zero_()
        sample_draws.apply(DrawStep(kinds=(class_name(Checkpointing),)), model, AXES, AXES, CPU)
        passes = draws(tmp_path, 1)
        passes.begin(StepBatch([], 8, 0, 0))
        passes.enter(0)
        model(torch.ones(8, 8)).square().sum().backward()
        passes.leave()
        gradients.append([parameter.grad for parameter in model.parameters()])
    for others in gradients[1:]:
        torch.testing.assert_close(others, gradients[0], rtol=0, atol=0)


class Compiled(nn.Module):
    """Draws in many ways; one dropout is called twice on the same numbers, and has two masks."""

    def __init__(self, breaks: bool) -> None:
        super().__init__()
        self.breaks = breaks
        self.first, self.drop = nn.Linear(8, 8), nn.Dropout(0.5)
        self.attention = nn.MultiheadAttention(8, 2, dropout=0.2, batch_first=True)

    def forward(self, x: Tensor) -> Tensor:
        x = self.attention(x, x, x, need_weights=False)[0]
        x = F.dropout(self.drop(x) + 2 * self.drop(x), 0.3, self.training)
        if self.breaks:
            torch._dynamo.graph_break()
        x = x * torch.randint(1, 3, (len(x), 1, 1)) + torch.randn_like(x) + 0.1 * F.gumbel_softmax(x)
        x = x * torch.bernoulli(torch.sigmoid(x.detach())) + torch.normal(x.detach(), 0.1)
        masked: Tensor = self.first(self.drop(x) * torch.rand(len(x), 1, 1))
        return masked


class CompiledRoot(nn.Module):
    def forward(self, x: Tensor) -> list[Tensor]:
        torch.rand(len(x), 3)  # unused: the next draws keep their numbers
        return [
            F.dropout(x, 0.5),
            torch.randint(2**60, 2**60 + 5, (len(x), 2)),
            torch.normal(x, x.double()),
            torch.bernoulli(x),
            torch.multinomial(x, 2),
        ]


def test_a_compiled_network_draws_what_plain_code_draws_and_refuses_what_torch_refuses() -> None:
    from torch._dynamo.utils import counters

    counters.clear()
    chances = torch.rand(4, 6, generator=torch.Generator().manual_seed(0))
    models, outputs = [CompiledRoot(), CompiledRoot()], []
    for model in models:
        sample_draws.apply(DrawStep(kinds=(class_name(CompiledRoot),)), model, AXES, AXES, CPU)
    compiling.apply(("",), models[1], CPU)

    def run(model: nn.Module, first: int, input: Tensor) -> list[Tensor]:
        ACTIVE.samples = SamplePass(seed=1, step=3, first=first, samples=4)
        try:
            drawn: list[Tensor] = model(input)
            return drawn
        finally:
            ACTIVE.samples = None

    for model in models:
        with ThreadPoolExecutor(1) as thread:  # a new one, in which nothing has drawn
            outputs.append(
                [tensor for first in (0, 4) for tensor in thread.submit(run, model, first, chances).result()]
            )
        with pytest.raises(RuntimeError, match="sum of probabilities"):
            run(model, 0, torch.zeros_like(chances))
    for plain, compiled in zip(*outputs, strict=True):
        torch.testing.assert_close(compiled, plain, rtol=0, atol=0)
    assert counters["stats"]["unique_graphs"] == 1, "compiled again"


def test_equal_blocks_that_draw_nothing_are_compiled_once() -> None:
    from torch._dynamo.utils import counters

    model = nn.Sequential(*[nn.Sequential(nn.Linear(4, 4)) for _ in range(3)], nn.Dropout(0.5))
    sample_draws.apply(DrawStep(), model, AXES, AXES, CPU)
    compiling.apply(("0", "1", "2"), model, CPU)
    counters.clear()
    with torch.no_grad():
        model(torch.ones(4, 4))
    assert counters["stats"]["unique_graphs"] == 1


@pytest.mark.long
@pytest.mark.parametrize("case", ["", "breaks", "full", "selective", "breaks in full"])
def test_compiled_code_draws_what_plain_code_draws(tmp_path: Path, case: Any) -> None:
    """Each pass has masks of its own, and nothing is compiled again for a step or a sample."""
    from torch._dynamo.utils import counters

    torch.manual_seed(0)
    plain = nn.Sequential(Compiled("breaks" in case)).double()
    models = [plain, copy.deepcopy(plain)]
    outputs: list[list[Tensor]] = [[], []]
    counters.clear()
    for model, made in zip(models, outputs, strict=True):
        sample_draws.apply(DrawStep(kinds=(class_name(Compiled),)), model, AXES, AXES, CPU)
        kind: Any = case.split()[-1] if case else ""
        if kind in ("full", "selective"):
            recompute.apply(RecomputeStep(kind=kind, modules=("0",)), model)
        if model is not plain:
            compiling.apply(("0",), model, CPU)
        passes = draws(tmp_path, 2)
        for step in (3, 4):
            passes.begin(StepBatch([], 8, 0, step))
            losses = []
            for micro in range(2):
                passes.enter(micro)
                made.append(model(model(torch.ones(4, 3, 8, dtype=torch.float64))))
                losses.append(made[-1].square().sum())
            passes.leave()
            for loss in losses:
                loss.backward()
    torch.testing.assert_close(outputs[1], outputs[0])
    assert not torch.allclose(outputs[0][0], outputs[0][1]) and not torch.allclose(outputs[0][0], outputs[0][2])
    gradients = [[parameter.grad for parameter in model.parameters()] for model in models]
    torch.testing.assert_close(gradients[1], gradients[0])
    # Torch runs a recomputed module that breaks the graph as plain code.
    graphs = {"breaks": 3, "breaks in full": 0}.get(case, 2)
    assert counters["stats"]["unique_graphs"] == graphs, "compiled again"


def test_outside_of_passes_torch_draws(tmp_path: Path) -> None:
    model = drawing()
    torch.manual_seed(5)
    one = model(torch.ones(8, 4, 8))
    torch.manual_seed(5)
    assert torch.equal(one, Drawing()(torch.ones(8, 4, 8)))
    passes = draws(tmp_path, 1)
    passes.begin(StepBatch([], 8, 0, 0))
    passes.enter(0)
    before = torch.get_rng_state()
    torch.rand(3)  # of no layer
    torch.ones(3).uniform_(generator=torch.Generator())
    passes.leave()
    assert not torch.equal(torch.get_rng_state(), before)
