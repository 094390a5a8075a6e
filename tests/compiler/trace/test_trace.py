"""Traced modules, layer by layer: compared with the arithmetic of the library's networks, and cut into units."""

from __future__ import annotations

import re
from collections.abc import Callable
from operator import attrgetter
from typing import Any

import pytest
import torch
from helpers.networks_drawn import built, fact, networks, step_of
from helpers.small_networks import SIZES
from hypothesis import HealthCheck, given, settings
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from dslc.compiler.ir.facts import SourceFacts
from dslc.compiler.ir.memory import Working
from dslc.compiler.ir.module_facts import LayerFacts, ModelFacts
from dslc.compiler.ir.tensors import DTYPE_BYTES, TensorFact
from dslc.compiler.model.model import ModelGraph
from dslc.compiler.trace.instantiate import TraceError
from dslc.compiler.trace.trace_model import trace_model
from dslc.dsl.language import layers as s
from dslc.dsl.language.registry import Call
from dslc.runtime.model.module_builder import skeleton

DRAWN = settings(max_examples=12, suppress_health_check=list(HealthCheck))
FIGURES = ("forward_flops", "backward_flops", "float32.saved", "autocast.saved")


def total(layers: Any, figure: str) -> int:
    return sum(attrgetter(figure)(layer) for layer in layers)


def _highest(working: Working) -> tuple[int, int]:
    """Returns the most bytes of a sample in the backward pass, and the numbers of gradients."""
    return max(moment.bytes for moment in working.backward), max(moment.made for moment in working.backward)


def agree(facts: ModelFacts, graph: ModelGraph) -> None:
    nodes = [q for layer in graph.layers for q in layer.parameters]
    assert sorted((n, shape) for n, shape, _ in facts.parameters) == sorted(
        (q.name, q.shape) for q in nodes if q.tied_to is None
    )
    assert (facts.ties, facts.output.shape) == (graph.ties, graph.output.shape)
    assert (facts.batch_norm, facts.noise) == (graph.batch_norm, graph.noise)
    assert any(layer.multiplies for layer in facts.layers) == any(layer.multiplies for layer in graph.layers)
    for figure in FIGURES:
        assert total(facts.layers, figure) == total(graph.layers, figure), figure


@pytest.mark.cases(5)
@pytest.mark.slow
@pytest.mark.parametrize("name", SIZES)
def test_a_library_network_traced_is_its_arithmetic(name: str) -> None:
    network, source = SIZES[name]
    graph = built(network, source)
    assert source.input is not None
    facts = trace_model(lambda: skeleton(step_of(graph)), source.input)
    agree(facts, graph)
    assert total(facts.layers, "operations") == pytest.approx(total(graph.layers, "operations"), rel=0.05)
    traced = {layer.name: layer for layer in facts.layers if layer.block}
    blocks = {node.name: node for node in graph.layers if node.recomputable}
    if len(blocks) > 1:
        assert traced.keys() == blocks.keys()
    for name in traced.keys() & blocks.keys():
        one, other = traced[name], blocks[name]
        assert one.parameters == tuple(q.name for q in other.parameters)
        assert (one.input, one.output) == (other.input, other.output)
        kept = ("float32.selective", "autocast.selective", "float32.full", "autocast.full", "autocast.shared")
        for figure in (*FIGURES, *kept, "multiplies"):
            assert attrgetter(figure)(one) == attrgetter(figure)(other), (name, figure)
        for mine, theirs in (
            (one.float32.working, other.float32.working),
            (one.autocast.working, other.autocast.working),
        ):
            assert mine is not None and theirs is not None
            assert mine.forward == pytest.approx(theirs.forward, rel=0.2)
            assert _highest(mine) == pytest.approx(_highest(theirs), rel=0.2)


@pytest.mark.slow
@DRAWN
@given(networks())
def test_random_networks_traced_are_their_arithmetic(drawn: tuple[tuple[Call, ...], SourceFacts]) -> None:
    network, source = drawn
    if any(isinstance(layer, s.LSTM) for layer in network):
        return  # their kernel has work space of its own
    graph = built(network, source)
    assert source.input is not None
    agree(trace_model(lambda: skeleton(step_of(graph)), source.input), graph)


# ------------------------------------------------------------------------------------------------------- the cut


class Block(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.up = nn.Linear(width, 2 * width)
        self.down = nn.Linear(2 * width, width)

    def forward(self, x: Tensor, scale: float = 1.0) -> tuple[Tensor, float]:
        return x + self.down(self.up(x).relu()) * scale, scale


class Language(nn.Module):
    """Blocks that take keywords and give tuples, a parameter of the model's own, a head tied to the embedding."""

    def __init__(self, tied: bool = True, again: bool = False) -> None:
        super().__init__()
        self.table = nn.Embedding(20, 8)
        self.position = nn.Parameter(torch.zeros(5, 8))
        self.spare = nn.Linear(3, 3)
        self.blocks = nn.ModuleList([Block(8), Block(8), Block(8)])
        self.norm = nn.LayerNorm(8)
        self.head = nn.Linear(8, 20, bias=False)
        if tied:
            self.head.weight = self.table.weight
        self.again = again

    def forward(self, x: Tensor) -> Tensor:
        x = self.table(x) + self.position
        for block in self.blocks:
            x = block(x, scale=0.5)[0]
            if self.again:
                x = block(x)[0]
        return self.head(self.norm(x))


TOKENS = fact(5, dtype="int64")


def by_name(facts: ModelFacts) -> dict[str, LayerFacts]:
    return {layer.name: layer for layer in facts.layers}


def test_blocks_and_what_is_around_them() -> None:
    facts = trace_model(Language, TOKENS)
    names = ["table", "blocks.0", "blocks.1", "blocks.2", "norm", "head", ""]
    assert [layer.name for layer in facts.layers] == names
    assert [layer.name for layer in facts.layers if layer.block] == ["blocks.0", "blocks.1", "blocks.2"]
    layers = by_name(facts)
    assert layers["blocks.1"].parameters[0] == "blocks.1.up.weight"
    assert layers["blocks.1"].input == layers["blocks.1"].output == fact(5, 8)
    assert layers["blocks.1"].forward_flops == 2 * 2 * 5 * 8 * 16
    assert layers["blocks.1"].backward_flops == 2 * layers["blocks.1"].forward_flops
    # Only the input and the output of relu (which its derivative and the next product need).
    assert layers["blocks.1"].float32.saved == 4 * (5 * 8 + 5 * 16)
    assert layers["blocks.1"].float32.selective == 4 * (5 * 8 + 5 * 16 + 5 * 8)
    # Parameters of modules that are never called, and those outside of modules, are the root's.
    assert set(layers[""].parameters) == {"position", "spare.weight", "spare.bias"}
    assert facts.unused == ("spare.weight", "spare.bias")
    assert facts.ties == (("head.weight", "table.weight"),)
    assert layers["head"].parameters == ("head.weight",)
    assert (facts.vocab, facts.noise) == (20, False)


def test_a_block_that_is_called_twice_costs_twice() -> None:
    once, twice = by_name(trace_model(Language, TOKENS)), by_name(trace_model(lambda: Language(again=True), TOKENS))
    assert list(once) == list(twice)
    assert twice["blocks.0"].forward_flops == 2 * once["blocks.0"].forward_flops
    assert twice["blocks.2"].backward_flops == 2 * once["blocks.2"].backward_flops
    assert twice["blocks.2"].float32.saved == 2 * once["blocks.2"].float32.saved


def test_parameters_used_elsewhere_are_the_roots() -> None:
    class Functional(Language):
        def forward(self, x: Tensor) -> Tensor:
            return nn.functional.linear(super().forward(x)[..., :8], self.table.weight)

    layers = by_name(trace_model(lambda: Functional(tied=False), TOKENS))
    assert layers["table"].parameters == ()
    assert "table.weight" in layers[""].parameters


def cut(module: nn.Module, *shape: int) -> tuple[list[str], list[str]]:
    facts = trace_model(lambda: module, fact(*shape))
    return [layer.name for layer in facts.layers], [layer.name for layer in facts.layers if layer.block]


@pytest.mark.slow
def test_what_counts_as_a_block() -> None:
    def pair(*modules: nn.Module) -> nn.Module:
        return nn.Sequential(*modules)

    # Single layers are not units: they keep only their inputs.
    assert cut(nn.Sequential(nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 4)), 4) == (["0", "1", "2"], [])
    # Equal plain containers are units.
    alike = pair(pair(nn.Linear(4, 4), nn.ReLU()), pair(nn.Linear(4, 4), nn.ReLU()), nn.Linear(4, 2))
    assert cut(alike, 4) == (["0", "1", "2"], ["0", "1"])
    # Stages of blocks are lists of them; the finer cut is taken.
    encoder = [nn.TransformerEncoderLayer(8, 2, 16, batch_first=True) for _ in range(4)]
    stages = pair(pair(*encoder[:2]), pair(*encoder[2:]))
    assert cut(stages, 5, 8)[1] == ["0.0", "0.1", "1.0", "1.1"]
    # Of nested classes of a user's, the outer one is the unit.
    assert cut(nn.Sequential(Outer(), Outer()), 4)[1] == ["0", "1"]
    # A wrapper adds nothing.
    assert cut(Wrapper(alike), 4)[1] == ["inner.0", "inner.1"]


def test_containers_that_are_never_called_are_no_blocks() -> None:
    """Attributes count if their names differ in numbers alone, and no container inside has blocks."""

    def blocks(**modules: nn.Module) -> list[str]:
        return cut(InOrder(modules), 4)[1]

    assert blocks(block1=Deep(), block2=Deep(), head=Deep()) == ["block1", "block2"]
    assert blocks(encoder=Deep(), decoder=Deep()) == []
    assert blocks(one=Deep(), all=nn.ModuleDict({"left": Deep(), "right": Deep()})) == ["all.left", "all.right"]
    nested = nn.ModuleList([nn.ModuleDict({"a": Deep(), "b": Wrapper(Deep())}) for _ in range(2)])
    assert blocks(nested=nested) == ["nested.0.a", "nested.0.b", "nested.1.a", "nested.1.b"]
    parts = ["stage1.parts.0", "stage1.parts.1", "stage2.parts.0", "stage2.parts.1"]
    assert blocks(stage1=Outer(), stage2=Outer()) == parts


class InOrder(nn.Module):
    """Calls its modules, which are attributes, and those of containers in them, in order."""

    def __init__(self, parts: dict[str, nn.Module]) -> None:
        super().__init__()
        for name, part in parts.items():
            setattr(self, name, part)

    def forward(self, x: Tensor) -> Tensor:
        def call(module: nn.Module, x: Tensor) -> Tensor:
            if not isinstance(module, nn.ModuleList | nn.ModuleDict):
                return module(x)
            for part in module.children():
                x = call(part, x)
            return x

        for part in self.children():
            x = call(part, x)
        return x


class Deep(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(4, 6), nn.Linear(6, 4)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(self.up(x).relu())


class Outer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.parts = nn.ModuleList([nn.Sequential(nn.Linear(4, 4), nn.Tanh()) for _ in range(2)])

    def forward(self, x: Tensor) -> Tensor:
        for part in self.parts:
            x = part(x)
        return x


class Wrapper(nn.Module):
    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, x: Tensor) -> Tensor:
        return self.inner(x).relu()


def test_noise_is_seen_where_it_is_made() -> None:
    class Noisy(Wrapper):
        def forward(self, x: Tensor) -> Tensor:
            return nn.functional.dropout(self.inner(x), 0.1)

    assert trace_model(lambda: Noisy(nn.Linear(4, 4)), fact(4)).noise
    assert not trace_model(lambda: Wrapper(nn.Sequential(nn.Linear(4, 4), nn.Dropout(0.0))), fact(4)).noise


def test_recomputation_of_the_users_own_is_followed() -> None:
    class Saving(Language):
        def forward(self, x: Tensor) -> Tensor:
            x = self.table(x)
            for block in self.blocks:
                x = checkpoint(block, x, use_reentrant=False)[0]
            return self.head(self.norm(x))

    plain, saving = by_name(trace_model(Language, TOKENS)), by_name(trace_model(Saving, TOKENS))
    # The second product runs again no more: nothing needs its result.
    again = plain["blocks.1"].forward_flops // 2
    assert saving["blocks.1"].backward_flops == plain["blocks.1"].backward_flops + again
    assert saving["blocks.1"].float32.saved < plain["blocks.1"].float32.saved


class Gated(nn.Module):
    """A block of which a compiler keeps less than autograd does: the outputs of norm and gate are cheap to
    recompute.
    """

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.up, self.gate, self.down = nn.RMSNorm(8), *(nn.Linear(8, 8, bias=False) for _ in range(3))

    def forward(self, x: Tensor, scale: Tensor) -> Tensor:
        y = self.norm(x)
        product: Tensor = self.down(self.up(y) * nn.functional.silu(self.gate(y)))
        return x + product * scale


class Stack(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Gated() for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        scale = torch.ones(8).sigmoid()
        for block in self.blocks:
            x = block(x, scale=scale)
        return x


@pytest.mark.processes
@pytest.mark.slow
@pytest.mark.parametrize("low", [pytest.param(False, marks=pytest.mark.long), True])
def test_a_compiled_block_keeps_what_the_compiler_leaves(low: bool) -> None:
    """Compares it with the result of torch's compiler."""
    memory = attrgetter("autocast" if low else "float32")
    plain, compiled = (trace_model(Stack, fact(4, 8), low=low, compile=each).layers for each in (False, True))
    gated, scale = Gated(), torch.ones(8)
    block, own = torch.compile(gated, dynamic=False), {p.untyped_storage().data_ptr() for p in gated.parameters()}
    held = []
    for samples in (2, 4):
        x = torch.randn(samples, 4, 8, requires_grad=True) * 1
        with torch.autocast("cpu", dtype=torch.bfloat16, enabled=low):
            made = block(x, scale=scale).grad_fn
        there = {t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() for t in made.saved_tensors}
        held.append(sum(size for pointer, size in there.items() if pointer not in own))
    expected = (held[1] - held[0]) // 2
    # The first takes the model's own input, which it does not count as kept.
    assert [memory(layer).saved for layer in compiled] == [expected - 4 * 4 * 8, expected, expected]
    for one, other in zip(compiled[1:], plain[1:], strict=True):
        found, usual = (memory(each).working for each in (one, other))
        assert found is not None and usual is not None
        less = memory(other).saved - expected
        assert less > 0
        assert (found.dropping, found.forward) == (usual.dropping, usual.forward - less)
        assert _highest(found)[0] == _highest(usual)[0] - less


@pytest.mark.slow
def test_a_block_that_the_compiler_cannot_follow_counts_as_without(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: Any, **__: Any) -> Any:
        raise RuntimeError("it cannot be followed")

    monkeypatch.setattr("torch._functorch.partitioners.min_cut_rematerialization_partition", refuse)
    assert trace_model(Stack, fact(4, 8), compile=True) == trace_model(Stack, fact(4, 8))


def test_frozen_parameters_are_known() -> None:
    def made() -> nn.Module:
        model = Language(tied=False)
        model.table.requires_grad_(False)
        return model

    facts = trace_model(made, TOKENS)
    assert [name for name, _, trains in facts.parameters if not trains] == ["table.weight"]
    assert "table.weight" not in facts.unused


# --------------------------------------------------------------------------------------------------- how it is made


def test_one_that_reads_numbers_while_it_is_built_is_built_on_the_cpu() -> None:
    def made() -> nn.Module:
        model = Language(tied=False)
        model.head.weight.data /= float(model.head.weight.detach().norm())
        model.get_submodule("blocks.1.up").weight = model.get_parameter("blocks.0.up.weight")
        return model

    facts = trace_model(made, TOKENS)
    assert [layer.name for layer in facts.layers if layer.block] == ["blocks.0", "blocks.1", "blocks.2"]
    assert facts.ties == (("blocks.1.up.weight", "blocks.0.up.weight"),)


def test_one_of_the_meta_device_is_taken() -> None:
    def made() -> nn.Module:
        with torch.device("meta"):
            return Language()

    assert trace_model(made, TOKENS) == trace_model(Language, TOKENS)


def test_modules_that_cannot_make_their_parameters_again_are_named() -> None:
    facts = trace_model(Language, TOKENS)
    assert facts.without_reset == ("",)  # for `position`

    def masked() -> nn.Module:
        inner = nn.Linear(4, 4)
        made = Wrapper(inner)
        made.register_buffer("mask", torch.ones(4))
        return made

    assert trace_model(masked, fact(4)).without_reset == ("",)  # for `mask`


class Reads(Wrapper):
    def forward(self, x: Tensor) -> Tensor:
        return self.inner(x) if float(x.sum()) > 0 else x


class Both(Wrapper):
    def forward(self, x: Tensor) -> Any:
        return self.inner(x), x


class Narrow(Wrapper):
    def forward(self, x: Tensor) -> Tensor:
        return self.inner(x).double().sum()


@pytest.mark.parametrize(
    "kind, message",
    [
        (lambda inner: 3, "it returns a `int`"),
        (Narrow, "2 samples go in, and the output's shape is ()"),
    ],
    ids=["no module", "no batch"],
)
def test_what_cannot_be_used_is_said(kind: Any, message: str) -> None:
    with pytest.raises(TraceError) as error:
        trace_model(lambda: kind(nn.Linear(4, 4)), TensorFact(shape=(4,), dtype="float32"))
    assert message in str(error.value)


def test_a_module_that_reads_numbers_is_run_for_real() -> None:
    inner = fact(4)
    facts = trace_model(lambda: Reads(nn.Linear(4, 4)), inner)
    assert facts.looks.startswith("`_local_scalar_dense`, test_trace.py:")
    assert trace_model(lambda: Wrapper(nn.Linear(4, 4)), inner).looks == ""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("dslc.compiler.trace.trace_model.REAL", 8)
        with pytest.raises(TraceError, match="its forward reads numbers") as error:
            trace_model(lambda: Reads(nn.Linear(4, 4)), inner)
    assert error.value.remedy == "it is too large to be made and run for real beforehand"


def test_an_output_that_is_no_tensor_has_as_many_bytes() -> None:
    facts = trace_model(lambda: Both(nn.Linear(4, 4)), fact(4))
    assert facts.structured and facts.output.bytes == 4 * (4 + 4)


def test_failing_under_autocast_matters_to_jobs_that_use_it() -> None:
    class Strict(Wrapper):
        def forward(self, x: Tensor) -> Tensor:
            y = self.inner(x)
            if y.dtype != torch.float32:
                raise RuntimeError("only float32")
            return y

    def made() -> nn.Module:
        return Strict(nn.Linear(4, 4))

    layer = trace_model(made, fact(4)).layers[0]
    assert layer.autocast.saved == layer.float32.saved
    with pytest.raises(TraceError, match="under autocast its forward fails: only float32"):
        trace_model(made, fact(4), low=True)


ONE_SCALE = (torch.ones(4), torch.zeros(4, dtype=torch.int64))


class WithLayout(nn.Module):
    """Keeps a tensor that is no array of numbers, as a buffer, a parameter or an attribute."""

    def __init__(self, tensor: Any, how: str) -> None:
        super().__init__()
        self.inner = nn.Linear(4, 4)
        if how == "buffer":
            self.inner.register_buffer("adjacency", tensor())
        elif how == "parameter":
            held = tensor()
            self.inner.register_parameter("adjacency", nn.Parameter(held, held.is_floating_point()))
        else:
            self.inner.adjacency = tensor()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.inner(x)


@pytest.mark.parametrize("how", ["buffer", "parameter", "attribute"])
@pytest.mark.parametrize(
    "tensor, kind",
    [
        (lambda: torch.eye(4).to_sparse(), "a sparse tensor (`sparse_coo`)"),
        (lambda: torch.eye(4).to_sparse_csr(), "a sparse tensor (`sparse_csr`)"),
        (lambda: torch.nested.nested_tensor([torch.ones(2), torch.ones(3)], layout=torch.jagged), "a nested tensor"),
        (lambda: torch.nested.nested_tensor([torch.ones(2), torch.ones(3)]), "a nested tensor"),
        (lambda: torch.eye(4).to_mkldnn(), "a tensor in the layout of mkldnn"),
        (lambda: torch.quantize_per_tensor(torch.eye(4), 0.1, 0, torch.qint8), "a quantized tensor"),
        (lambda: torch.quantize_per_channel(torch.eye(4), *ONE_SCALE, 0, torch.quint8), "a quantized tensor"),
    ],
    ids=["coo", "csr", "jagged", "nested", "mkldnn", "quantized", "quantized by channel"],
)
@pytest.mark.filterwarnings("ignore:torch.quantize_per")  # torch is to drop these tensors
def test_a_tensor_that_is_no_array_is_named(tensor: Any, kind: str, how: str) -> None:
    with pytest.raises(TraceError, match=re.escape(f"`inner.adjacency` (Linear) is {kind}")):
        trace_model(lambda: WithLayout(tensor, how), TensorFact(shape=(4,), dtype="float32"))


class WithSparseProduct(nn.Module):
    """Multiplies by a sparse matrix that `forward` builds of buffers, or of a dense one."""

    edges: Tensor
    values: Tensor

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.kind, self.inner = kind, nn.Linear(4, 4)
        self.register_buffer("edges", torch.tensor([[0, 1, 2, 3, 0], [1, 2, 3, 0, 2]]))
        self.register_buffer("values", torch.rand(5))

    def forward(self, x: Tensor) -> Tensor:
        h = self.inner(x).T
        if self.kind == "coo":
            return torch.sparse.mm(torch.sparse_coo_tensor(self.edges, self.values, (4, 4)), h).T
        dense = torch.zeros(4, 4).index_put((self.edges[0], self.edges[1]), self.values)
        return (getattr(dense, f"to_sparse_{self.kind}")() @ h).T


@pytest.mark.parametrize("kind", ["coo", "csr", "csc"])
def test_forward_may_build_a_sparse_tensor(kind: str) -> None:
    facts = trace_model(lambda: WithSparseProduct(kind), TensorFact(shape=(4,), dtype="float32"))
    assert facts.output.shape == (4,)
    assert not facts.looks and not facts.unused, "and its gradient reaches the parameters"


class MakesOther(nn.Module):
    def __init__(self, make: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.make, self.inner = make, nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        h = self.inner(x)
        return h + 0 * self.make(h)


@pytest.mark.parametrize(
    ("make", "kind"),
    [
        (
            lambda h: torch.nested.as_nested_tensor(list(h[:, None]), layout=torch.jagged).to_padded_tensor(0.0),
            "nested",
        ),
        (lambda h: torch.nested.nested_tensor([h[:1], h[1:]]).to_padded_tensor(0.0), "nested"),
        (lambda h: h.detach().to_mkldnn().to_dense(), "in the layout of mkldnn"),
    ],
    ids=["jagged", "nested", "mkldnn"],
)
def test_a_tensor_that_cannot_be_followed_is_named(make: Any, kind: str) -> None:
    with pytest.raises(TraceError, match=f"its `forward` makes a .*{kind}"):
        trace_model(lambda: MakesOther(make), TensorFact(shape=(4,), dtype="float32"))


@pytest.mark.parametrize("dtype", [torch.complex128, torch.float8_e4m3fnuz])
def test_a_dtype_that_no_file_of_weights_has_is_named(dtype: torch.dtype) -> None:
    def with_buffer(persistent: bool) -> nn.Module:
        model = nn.Linear(4, 4)
        model.register_buffer("table", torch.zeros(2).to(dtype), persistent=persistent)
        return model

    with pytest.raises(TraceError, match="its `table` is of"):
        trace_model(lambda: with_buffer(True), TensorFact(shape=(4,), dtype="float32"))
    facts = trace_model(lambda: with_buffer(False), TensorFact(shape=(4,), dtype="float32"))
    assert DTYPE_BYTES[facts.buffers[0][2]] == dtype.itemsize


def test_each_dtype_has_a_size() -> None:
    names = {name: each for name, each in vars(torch).items() if isinstance(each, torch.dtype)}
    known = {str(each).removeprefix("torch."): each.itemsize for each in names.values()}
    assert {name: known[name] for name in DTYPE_BYTES} == DTYPE_BYTES


def test_a_batch_norm_may_get_its_input_by_name() -> None:
    class Named(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.enter, self.norm = nn.Conv2d(1, 3, 1), nn.BatchNorm2d(3)

        def forward(self, x: Tensor) -> Tensor:
            return self.norm(input=self.enter(x)).mean((2, 3))

    facts = trace_model(Named, TensorFact(shape=(1, 4, 5), dtype="float32"))
    assert facts.batch_norm and facts.batch_norm_values == 20


@pytest.mark.filterwarnings("ignore:.*torch.jit")
def test_a_module_that_torch_has_traced_is_a_layer() -> None:
    def make() -> nn.Module:
        return nn.Sequential(nn.Linear(4, 8), torch.jit.trace(nn.Tanh(), torch.randn(2, 8)), nn.Linear(8, 3))

    assert trace_model(make, TensorFact(shape=(4,), dtype="float32")).output.shape == (3,)
