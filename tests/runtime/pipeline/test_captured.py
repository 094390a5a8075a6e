"""Modules recorded call by call and cut: stage after stage they return the module's output, with its gradients."""

from __future__ import annotations

import contextlib
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.pipelining._backward import stage_backward_input, stage_backward_weight
from torch.nn import functional as F

from dslc.compiler.ir.program import PrecisionStep, StageStep, TensorParallelStep
from dslc.compiler.ir.tensor_styles import TensorStyle
from dslc.compiler.trace.structures import attribute_tensors
from dslc.runtime.pipeline.capture import capture
from dslc.runtime.pipeline.captured import codes, look, tensors_used_by
from dslc.runtime.pipeline.input_form import InputForm
from dslc.runtime.pipeline.recording import CaptureError
from dslc.runtime.pipeline.stage import CapturedPart, CapturedStage

FP32 = PrecisionStep()
SIX = InputForm((((6,), "float32"),))


def blocks(count: int = 3, width: int = 8) -> nn.ModuleList:
    return nn.ModuleList([nn.Sequential(nn.Linear(width, width), nn.Tanh()) for _ in range(count)])


class Base(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.enter = nn.Linear(6, 8)
        self.blocks = blocks()
        self.leave = nn.Linear(8, 4)


class Skips(Base):
    def forward(self, x: Tensor) -> Tensor:
        first = self.enter(x)
        y = first
        for n, block in enumerate(self.blocks):
            y = block(y) * 0.5 + (first if n % 2 else x.sum(-1, keepdim=True))
        return self.leave(y)


class Sizes(Base):
    """Computes with the sizes of its input, and fills tables in place."""

    def forward(self, x: Tensor) -> Tensor:
        samples, width = x.shape
        mask = torch.ones(samples, 3, dtype=x.dtype)
        mask[:, 1] = 0
        mask.mul_(2.0)
        wide = self.enter(x).repeat(3, 1).view(3, samples, 8).transpose(0, 1)
        y = wide * mask[..., None] + torch.arange(8, device=x.device) / width
        for block in self.blocks:
            y = block(y)
        if not self.training:
            y = y + mask.sum() / (2 * samples)
        return self.leave(y.reshape(samples * 3, 8).view(samples, 3, 8).mean(1))


class Context(Base):
    """The module itself switches gradients and autocast, and returns more than tensors."""

    def forward(self, x: Tensor) -> Tensor:
        with torch.no_grad():
            level = self.enter(x).mean(1, keepdim=True)
        y = self.enter(x) + level
        for block in self.blocks:
            with torch.autocast("cpu", dtype=torch.bfloat16):
                low = block(y)
            values, _ = torch.max(low, dim=1, keepdim=True)
            y = y + values.to(y.dtype)
        return self.leave(y + level)


class Loose(Base):
    """Parameters and buffers of its own, and a layer's weight used outside of it."""

    def __init__(self) -> None:
        super().__init__()
        self.shift = nn.Parameter(torch.randn(8))
        self.register_buffer("scale", torch.rand(8))
        self.unused = nn.Linear(2, 2)

    def forward(self, x: Tensor) -> Tensor:
        y = self.enter(x) + self.shift
        for block in self.blocks:
            y = block(y * self.scale)
        return F.linear(y, self.leave.weight).to(self.leave.bias.device) + self.leave(y)


class Position(nn.Module):
    """A table without parameters, made for the device and dtype of its input."""

    steps: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("steps", torch.linspace(0, 1, 8), persistent=False)

    def forward(self, x: Tensor, at: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
        angle = (at[:, None].float() * self.steps).to(x.dtype)
        return angle.cos(), {"sin": angle.sin()}


class Tables(Base):
    """Each stage makes its tables itself; a mask that would have no effect is left out."""

    def __init__(self) -> None:
        super().__init__()
        self.position = Position()

    def forward(self, x: Tensor) -> Tensor:
        y = self.enter(x)
        at = torch.arange(y.shape[1])
        mask = None if bool((at >= 0).all()) else at > 3
        assert mask is None
        cos, rest = self.position(y, at[:3])
        for block in self.blocks:
            y = block(y) * cos[0] + rest["sin"][2]
        return self.leave(y)


class Attributes(Base):
    """Tables that are plain attributes, one of them complex and one in a structure."""

    def __init__(self) -> None:
        super().__init__()
        self.turn = torch.polar(torch.ones(4), torch.linspace(0, 3, 4))
        self.more = {"steps": [torch.linspace(0, 1, 8)]}

    def forward(self, x: Tensor) -> Tensor:
        y = self.enter(x)
        self.turn = self.turn.to(x.device)
        for block in self.blocks:
            y = block(y + self.more["steps"][0])
            y = torch.view_as_real(torch.view_as_complex(y.unflatten(1, (-1, 2))) * self.turn).flatten(1)
        return self.leave(y)


@dataclass
class Waves:
    table: Tensor
    more: deque[Tensor]


class Rotation:
    """An object that is no module, with a table."""

    def __init__(self) -> None:
        self.table = torch.linspace(0, 2, 8)

    def __call__(self, x: Tensor) -> Tensor:
        return x * self.table

    turn = __call__


class Slots:
    """An object without a dictionary."""

    __slots__ = ("table",)

    def __init__(self) -> None:
        self.table = torch.linspace(0, 3, 8)


class Objects(Base):
    """Tables in objects that are attributes: a dataclass, and classes of the user's."""

    def __init__(self) -> None:
        super().__init__()
        self.waves = Waves(torch.linspace(0, 1, 8), deque([torch.linspace(1, 2, 8)]))
        self.rotation, self.slots = Rotation(), Slots()

    def forward(self, x: Tensor) -> Tensor:
        y = self.enter(x)
        for block in self.blocks:
            y = self.rotation(block(y + self.waves.table)) - self.waves.more[0] + self.slots.table
        return self.leave(y)


def add(table: Tensor, x: Tensor, *, other: Tensor) -> Tensor:
    return x + table - other


class Functions(Base):
    """Tables that functions keep: a partial one, one with a variable around it, and a method."""

    def __init__(self) -> None:
        super().__init__()
        tables = torch.linspace(0, 3, 24).view(3, 8)
        one, two, three = (row.clone() for row in tables)
        self.shift, self.scale = partial(add, one, other=two), lambda x: x * three
        self.turn = Rotation().turn

    def forward(self, x: Tensor) -> Tensor:
        y = self.enter(x)
        for block in self.blocks:
            y = self.turn(self.scale(block(self.shift(y))))
        return self.leave(y)


def stages(model: nn.Module, example: Tensor, layers: Sequence[str], precision: PrecisionStep = FP32) -> Any:
    """Returns the stages of all cuts at once."""
    rest = [name for name, _ in model.named_parameters() if not any(name.startswith(f"{n}.") for n in layers if n)]
    names = [*layers, ""] if rest else list(layers)
    dtype = str(example.dtype).removeprefix("torch.")
    ordered, seams, _ = look(model, names, rest, InputForm(((tuple(example.shape[1:]), dtype),)), precision)
    ends = [n + 1 for n, seam in enumerate(seams) if not seam.refused]
    groups = [ordered[a:b] for a, b in zip([0, *ends], [*ends, len(ordered)], strict=True)]
    made = codes(
        capture(model, names, InputForm(((tuple(example.shape[1:]), dtype),)), precision),
        [group[0] for group in groups],
    )
    found = []
    for n, (group, code) in enumerate(zip(groups, made, strict=True)):
        sent = seams[ends[n] - 1].sent if n < len(ends) else (((4,), "float32"),)
        step = StageStep(index=n, rank=n, modules=tuple(group), inputs=(), outputs=sent)
        places = {held: (model.get_submodule(held.path), held.name) for held in tensors_used_by(code)}
        own = {name: model.get_submodule(name) for name in group if name}
        last = n == len(ends)
        found.append(
            CapturedStage(
                step,
                last,
                own,
                CapturedPart(codes=code, places=places),
                model,
                contextlib.nullcontext,
                torch.device("cpu"),
            )
        )
    return found, seams


def composed(parts: Sequence[CapturedStage], x: Tensor) -> Tensor:
    given: tuple[Tensor, ...] = (x,)
    for part in parts:
        made = part(*given, input=(x,))
        given = made if isinstance(made, tuple) else (made,)
    return given[0]


LAYERS = ("enter", "blocks.0", "blocks.1", "blocks.2", "leave")


@pytest.mark.parametrize("kind", [Skips, Sizes, Context, Loose, Tables, Attributes, Objects, Functions])
def test_the_stages_together_are_the_module(kind: type[Base]) -> None:
    torch.manual_seed(0)
    model = kind()
    layers = [*LAYERS, "position"] if kind is Tables else LAYERS
    parts, seams = stages(model, torch.empty(1, 6), layers)
    assert len(parts) >= 4, [seam.refused for seam in seams]
    for samples in (1, 2, 5):
        for mode in (True, False):
            model.train(mode)
            x = torch.randn(samples, 6)
            results = []
            for run in (model, lambda x: composed(parts, x)):
                model.zero_grad()
                output = run(x)
                output.square().sum().backward()
                results.append((output, {n: p.grad for n, p in model.named_parameters()}))
            (one, grads), (other, others) = results
            torch.testing.assert_close(other, one, rtol=1e-6, atol=1e-6)
            for name, grad in grads.items():
                torch.testing.assert_close(others[name], grad, rtol=1e-5, atol=1e-6, msg=name)


def test_tables_are_found_in_what_functions_and_objects_keep() -> None:
    """They are named where a network is traced without numbers."""
    tables = ["shift.args[0]", "shift.keywords['other']", "scale.three", "turn.__self__.table"]
    assert [name for name, _ in attribute_tensors(Functions())] == tables
    tables = ["waves.table", "waves.more[0]", "rotation.table", "slots.table"]
    assert [name for name, _ in attribute_tensors(Objects())] == tables


def test_in_16_bits_the_dtypes_are_those_of_the_training() -> None:
    model = nn.Sequential(nn.LayerNorm(6), nn.Linear(6, 8), nn.Softmax(1), nn.Linear(8, 4))
    made = []
    for part in model:
        part.register_forward_hook(lambda module, args, output: made.append(str(output.dtype)[6:]))
    with torch.autocast("cpu", dtype=torch.bfloat16):
        model(torch.randn(3, 6))
    assert len(set(made)) == 2
    for level, kinds in (("O1", made[:-1]), ("O2", ["bfloat16"] * 3)):
        precision = PrecisionStep(dtype="bfloat16", level=level)  # type: ignore[arg-type]
        _, seams, _ = look(model, ("0", "1", "2", "3"), (), SIX, precision)
        assert [seam.sent[0][1] for seam in seams] == kinds


def on_two_ranks(**styles: str) -> TensorParallelStep:
    found = tuple((name, TensorStyle(style)) for name, style in styles.items())
    return TensorParallelStep(size=2, sequence=False, styles=found, loss_parallel=False)


class Gated(Base):
    """The output of `gate` bypasses the blocks, with a size of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.gate, self.down = nn.Linear(6, 8), nn.Linear(8, 4)

    def forward(self, x: Tensor) -> Tensor:
        gate = self.gate(x)
        gate = gate.view(len(x), gate.shape[-1] // 2, 2).flip(-1)
        y = self.enter(x)
        for block in self.blocks:
            y = block(y)
        return self.leave(y) + self.down(gate.flatten(1))


@pytest.mark.parametrize(
    "styles, shape",
    [
        ({}, (4, 2)),
        ({"gate": "column", "down": "row"}, (2, 2)),
        ({"gate": "gathered", "down": "row_of_whole", "leave": "scores"}, (4, 2)),
    ],
)
def test_what_crosses_is_what_a_rank_of_a_tensor_axis_has(styles: dict[str, str], shape: tuple[int, ...]) -> None:
    model = Gated()
    before = [(name, id(tensor), tensor.shape) for name, tensor in model.named_parameters()]
    layers = ("gate", *LAYERS, "down")
    _, seams, _ = look(model, layers, (), SIX, FP32, on_two_ranks(**styles))
    assert [seam.sent for seam in seams[1:4]] == [((shape, "float32"), ((8,), "float32"))] * 3
    assert [(name, id(tensor), tensor.shape) for name, tensor in model.named_parameters()] == before
    assert not any(module._forward_hooks or module._forward_pre_hooks for module in model.modules())


class Holder(nn.Module):
    """Uses a parameter of its own between its layers."""

    def __init__(self) -> None:
        super().__init__()
        self.scale, self.parts = nn.Parameter(torch.ones(2)), blocks()

    def forward(self, x: Tensor) -> Tensor:
        for part in self.parts:
            x = part(x)
        return (x.unflatten(1, (-1, 2)) * self.scale).flatten(1)


def test_what_is_summed_has_to_be_in_a_layer() -> None:
    model = nn.Sequential(nn.Linear(6, 8), Holder())
    layers = ("0", "1.parts.0", "1.parts.1", "1.parts.2", "")
    capture(model, layers, SIX, FP32)
    step = TensorParallelStep(size=2, sequence=False, styles=(("1", TensorStyle.SUMMED),), loss_parallel=False)
    with pytest.raises(CaptureError, match=r"`1\.scale` is used outside of a layer") as raised:
        capture(model, layers, SIX, FP32, step)
    assert raised.value.where.startswith("test_captured.py, line ")


def test_nothing_of_the_module_is_changed() -> None:
    model = Loose()
    before = {name: id(tensor) for name, tensor in (*model.named_parameters(), *model.named_buffers())}
    model.enter.eval()
    capture(model, (*LAYERS, ""), SIX, FP32)
    assert {n: id(t) for n, t in (*model.named_parameters(), *model.named_buffers())} == before
    assert model.training and not model.enter.training
    assert not any(module._forward_hooks or module._forward_pre_hooks for module in model.modules())


class Numbers(Base):
    def forward(self, x: Tensor) -> Tensor:
        y = self.enter(x)
        return self.leave(y if y.sum() > 0 else -y)


class Half(Base):
    def forward(self, x: Tensor) -> Tensor:
        return self.leave(self.enter(x).roll((len(x) + 1) // 2, 0))


class Alone(Base):
    def forward(self, x: Tensor) -> Tensor:
        y = self.enter(x)
        return self.leave(y * 2 if len(x) == 2 else y)


class Own(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x * 2

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        return gradient * 2


class Foreign(Base):
    def forward(self, x: Tensor) -> Tensor:
        return self.leave(Own.apply(self.enter(x)))


class Hooked(Base):
    def forward(self, x: Tensor) -> Tensor:
        y = self.enter(x)
        y.register_hook(lambda gradient: gradient * 2)
        return self.leave(y)


class Counting(Base):
    calls: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("calls", torch.zeros(()))

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        return self.leave(self.enter(x))


class Kept(Base):
    """Keeps tensors as plain attributes that are no constants."""

    def __init__(self) -> None:
        super().__init__()
        self.view, self.product = self.enter.weight[0], self.enter.bias * 2
        self.table = torch.zeros(8)
        self.before: Tensor | None = None


class KeptView(Kept):
    def forward(self, x: Tensor) -> Tensor:
        return self.leave(self.enter(x * self.view))


class KeptProduct(Kept):
    def forward(self, x: Tensor) -> Tensor:
        return self.leave(self.enter(x) * self.product)


class KeptTable(Kept):
    def forward(self, x: Tensor) -> Tensor:
        y = self.enter(x)
        self.table[:4].add_(1)
        return self.leave(y * self.table)


class KeptSparse(Kept):
    def __init__(self) -> None:
        super().__init__()
        self.graph = {"edges": torch.eye(8).to_sparse()}

    def forward(self, x: Tensor) -> Tensor:
        return self.leave(torch.sparse.mm(self.graph["edges"], self.enter(x).T).T)


class KeptBefore(Kept):
    def forward(self, x: Tensor) -> Tensor:
        y = self.enter(x)
        if self.before is not None:
            y = y + self.before.mean(0)
        self.before = y
        return self.leave(y)


class Inward(Base):
    def forward(self, x: Tensor) -> Tensor:
        x[:, 0] = 0
        return self.leave(self.enter(x))


@pytest.mark.parametrize(
    "kind, reason",
    [
        (Numbers, "reads numbers out of tensors"),
        (Half, "is 1 for 2 samples and 2 for 4"),
        (Alone, "does different things for different numbers of samples"),
        (Foreign, "gradient `OwnBackward` computes outside of a layer"),
        (Hooked, "calls `register_hook`"),
        (Counting, "changes `calls` outside of a layer"),
        (Inward, "writes into its own input"),
        (KeptView, "`view`, a plain attribute, is a view of `enter.weight`"),
        (KeptProduct, "`product`, a plain attribute, has a gradient"),
        (KeptTable, "changes `table`, which is a plain attribute"),
        (KeptSparse, r"`graph\['edges'\]`, a plain attribute, is no array of numbers"),
        (KeptBefore, "the tensor of an earlier forward pass that it keeps in `before`"),
    ],
)
def test_what_cannot_be_written_down_is_said_with_its_line(kind: type[Base], reason: str) -> None:
    with pytest.raises(CaptureError, match=reason) as raised:
        capture(kind(), LAYERS[:1] + LAYERS[-1:], SIX, FP32)
    assert raised.value.where.startswith("test_captured.py, line "), raised.value.where


class Around(Base):
    def forward(self, x: Tensor) -> Tensor:
        y = self.blocks[0](self.enter(x))
        return self.leave(self.blocks[0](self.blocks[1](y)))


class Chosen(Base):
    def forward(self, x: Tensor) -> Tensor:
        y = self.enter(x)
        chosen = y > 0
        return self.leave(self.blocks[0](y) * chosen)


class Sides(Base):
    def __init__(self) -> None:
        super().__init__()
        self.before, self.after = nn.Parameter(torch.ones(8)), nn.Parameter(torch.ones(8))

    def forward(self, x: Tensor) -> Tensor:
        return self.leave(self.blocks[0](self.enter(x) * self.before) * self.after)


class Written(Base):
    def forward(self, x: Tensor) -> Tensor:
        y = self.enter(x)
        z = self.blocks[0](y)
        y += z
        return self.leave(y)


class Sideways(Base):
    def forward(self, x: Tensor) -> Tensor:
        return self.leave(self.blocks[0](self.enter(x)[None])[0])


@pytest.mark.parametrize(
    "kind, before, reason",
    [
        (Around, "blocks.1", "`blocks.0` is called on both sides"),
        (Chosen, "blocks.0", "a tensor of bool, computed before it"),
        (Sides, "blocks.0", "`before` and `after`, which belong to no layer"),
        (Written, "blocks.0", "is written into (test_captured.py, line"),
        (Sideways, "blocks.0", "whose first dimension is not theirs"),
    ],
)
def test_where_there_can_be_no_cut_is_said(kind: type[Base], before: str, reason: str) -> None:
    model = kind()
    called = ("enter", "blocks.0", *(("blocks.1",) if kind is Around else ()), "leave")
    rest = ("before", "after") if kind is Sides else ()
    layers, seams, _ = look(model, (*called, *(("",) if rest else ())), rest, SIX, FP32)
    assert reason in seams[layers.index(before) - 1].refused


class Uses(Base):
    def __init__(self, use: str) -> None:
        super().__init__()
        self.use = use

    def forward(self, x: Tensor) -> Tensor:
        return self.part(self.enter(x))

    def part(self, x: Tensor) -> Tensor:
        """Returns the output of all that comes after the first stage."""
        one, two = self.blocks[0], self.blocks[1]
        weight = self.leave.weight
        match self.use:
            case "once":
                x = two(one(x))
            case "again at once":
                x = two(one(one(x)))
            case "again after another":
                x = one(two(one(x)))
            case "beside":
                x = one(x) + two(one(-x))
            case "by its weight":
                x = F.linear(two(one(x)), self.get_parameter("blocks.0.0.weight"))
            case "by a product":
                x = two(one(F.linear(x, weight.t() @ weight)))
        return self.leave(x)


@pytest.mark.parametrize(
    ("use", "wrong"),
    [
        *(("once", False), ("again at once", False), ("beside", False)),
        *(("again after another", True), ("by its weight", True), ("by a product", True)),
    ],
)
def test_a_parameter_used_again_is_found_where_torch_cannot_split(use: str, wrong: bool) -> None:
    """torch itself is asked: it halves the backward pass of what comes after `enter`."""
    model = Uses(use)
    _, _, repeated = look(model, ("enter", "blocks.0", "blocks.1", "leave"), (), SIX, FP32)
    assert bool(repeated) == wrong, repeated
    given = torch.randn(3, 8, requires_grad=True)
    result, weights = model.part(given), list(model.parameters())
    _, groups = stage_backward_input([result], [torch.ones_like(result)], [given], iter(weights))
    with pytest.raises(RuntimeError, match="second time") if wrong else contextlib.nullcontext():
        stage_backward_weight(iter(weights), groups)
