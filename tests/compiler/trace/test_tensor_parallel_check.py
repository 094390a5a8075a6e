"""Shares followed through operations are those that ranks really have, and a rank that deviates is found."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from helpers.own_transformer import HeadNorm, network
from helpers.reference_models import gpt
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils._python_dispatch import TorchDispatchMode

from dslc.compiler.ir.module_facts import ShareFacts
from dslc.compiler.ir.tensors import TensorFact
from dslc.compiler.trace.run import TensorMap, tensors_of
from dslc.compiler.trace.sharding.propagation import ShareError, TensorOperation, TensorShare, follow
from dslc.compiler.trace.trace_model import trace_model

SHAPE = (2, 4, 6, 8)
RANKS = 2
MASK = torch.arange(48).view(6, 8) % 3 == 0
ONE = torch.tensor([0.25])
TABLE = torch.arange(24.0).view(8, 3).sin()


def _repeated_heads(x: Tensor) -> Tensor:
    """Returns every second head, twice."""
    return x.unflatten(1, (-1, 2))[:, :, 0].repeat_interleave(2, 1)


def _turned(x: Tensor) -> Tensor:
    """Turns pairs of numbers by angles, as rotary positions do."""
    pairs = torch.view_as_complex(x.unflatten(3, (-1, 2)))
    return pairs * torch.polar(torch.ones_like(pairs.real), pairs.imag).conj()


# Operations by name, and the dims along which ranks may have shares of their inputs.
FOLLOWED: dict[str, tuple[Callable[[Tensor], Tensor], set[int]]] = {
    "numbers": (lambda x: F.gelu(x * 3 + 1) / x.exp(), {0, 1, 2, 3}),
    "a mask": (lambda x: x.masked_fill(MASK, 0.0), {0, 1}),
    "softmax": (lambda x: x.softmax(-1), {0, 1, 2}),
    "sum": (lambda x: x.sum(1), {0, 2, 3}),
    "mean of two": (lambda x: x.mean((1, 3), keepdim=True), {0, 2}),
    "everything": (lambda x: x - x.mean(), set()),
    "norm": (lambda x: F.layer_norm(x, x.shape[-1:]), {0, 1, 2}),
    "norm by hand": (lambda x: x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True)), {0, 1, 2}),
    "cumsum": (lambda x: x.cumsum(1), {0, 2, 3}),
    "flip": (lambda x: x.flip(2), {0, 1, 3}),
    "joined dims": (lambda x: x.flatten(1), {0, 1, 2, 3}),
    "moved and joined": (lambda x: x.transpose(1, 2).flatten(2), {0, 1, 2, 3}),
    "split dim": (lambda x: x.unflatten(3, (-1, 2)) if x.shape[3] > 1 else x, {0, 1, 2, 3}),
    "permuted": (lambda x: x.permute(3, 0, 2, 1), {0, 1, 2, 3}),
    "half": (lambda x: x.chunk(2, -1)[0], {0, 1, 2}),
    "turned": (lambda x: torch.cat((-x[..., 4:], x[..., :4]), -1), {0, 1, 2}),
    "stacked": (lambda x: torch.stack((x, -x), 1), {0, 1, 2, 3}),
    "first": (lambda x: x[:, 0], {0, 2, 3}),
    "repeated heads": (lambda x: x[:, :, None].expand(-1, -1, 3, -1, -1).flatten(1, 2), {0, 1, 2, 3}),
    "gated": (F.glu, {0, 1, 2}),
    "a product": (lambda x: x @ x.transpose(-1, -2), {0, 1}),
    "grouped heads by hand": (lambda x: x @ _repeated_heads(x).mT * _repeated_heads(x).sum(-1, True), {0, 1}),
    "attention": (lambda x: F.scaled_dot_product_attention(x, x, x, is_causal=True), {0, 1}),
    "sorted": (lambda x: x.sort(2).values, {0, 1, 3}),
    "complex positions": (lambda x: torch.view_as_real(_turned(x)).flatten(3), {0, 1, 2, 3}),
    "pairs of halves": (lambda x: torch.view_as_complex(x.unflatten(3, (2, -1)).mT.contiguous()), {0, 1, 2}),
    "complex halves": (lambda x: torch.complex(x[..., :4], x[..., 4:]).abs(), {0, 1, 2}),
    "turned in turn": (lambda x: torch.stack((-x[..., 1::2], x[..., ::2]), -1).flatten(3), {0, 1, 2}),
    "repeated": (lambda x: x.repeat(2, 1, 1, 3, 2), {0, 1, 2, 3}),
    "each repeated": (lambda x: x.repeat_interleave(3, 1), {0, 1, 2, 3}),
    "triangles": (lambda x: x.tril() + x.triu(1), {0, 1}),
    "sums by letters": (lambda x: torch.einsum("bhqd,bhkd->bhqk", x, x), {0, 1}),
    "sums to heads": (lambda x: torch.einsum("bhqd,bhqe->bqhde", x, x), {0, 1, 2}),
    "added product": (lambda x: torch.baddbmm(ONE, x.flatten(0, 1), x.flatten(0, 1).mT), {0, 1}),
    "product of rows": (lambda x: torch.addmm(torch.arange(3.0), x.flatten(0, 2), TABLE), {0, 1, 2}),
    "product with a vector": (lambda x: x.flatten(0, 2).mv(TABLE[:, 0]), {0, 1, 2}),
    "windows": (lambda x: x.unfold(2, 3, 1), {0, 1, 3}),
    "diagonal": (lambda x: x.diagonal(0, 1, 2), {0, 3}),
    "some": (lambda x: x.index_select(2, torch.tensor([3, 1])), {0, 1, 3}),
    "by index": (lambda x: x[:, torch.tensor([2, 0, 1])], {0, 2, 3}),
    "by indices": (lambda x: x[:, torch.tensor([0, 1]), torch.tensor([3, 2])], {0, 3}),
    "by indices apart": (lambda x: x[torch.tensor([0, 1]), :, torch.tensor([3, 2])], {1, 3}),
    "gathered": (lambda x: x.gather(2, x.argsort(2)), {0, 1, 3}),
    "scattered": (lambda x: torch.zeros_like(x).scatter(2, x.argsort(2), x), {0, 1, 3}),
    "scattered sums": (lambda x: torch.zeros_like(x).scatter_add_(2, x.argsort(2) // 2, x), {0, 1, 3}),
    "sums by index": (lambda x: torch.zeros_like(x).index_add_(2, torch.tensor([0, 0, 1, 2, 2, 5]), x), {0, 1, 3}),
    "filled": (lambda x: x.index_fill(1, torch.tensor([2]), 7.0), {0, 2, 3}),
    "padded": (lambda x: F.pad(x, (0, 0, 2, 1)), {0, 1, 3}),
    "pooled": (lambda x: F.avg_pool2d(x, 2) + F.max_pool2d(x, 2), {0, 1}),
    "enlarged": (lambda x: F.interpolate(x, scale_factor=2), {0, 1}),
    "shuffled": (lambda x: F.pixel_shuffle(x, 2), {0}),
    "waves": (lambda x: torch.fft.rfft(x, dim=2).abs(), {0, 1, 3}),
    "convolution of positions": (lambda x: F.conv2d(x, TABLE[:4].mT[..., None, None]), {0, 2, 3}),
    "convolution": (lambda x: F.conv2d(x, torch.ones(3, 4, 3, 1)), {0, 3}),
    "median": (lambda x: x.median(2).values - x.kthvalue(2, 2).values + x.cummax(2).values[:, :, 0], {0, 1, 3}),
    "distances": (lambda x: torch.cdist(x, x), {0, 1}),
    "distances to some": (lambda x: torch.cdist(x.flatten(0, 2), TABLE.mT), {0, 1, 2}),
    "buckets": (lambda x: torch.bucketize(x, torch.tensor([-1.0, 0.0, 1.0])), {0, 1, 2, 3}),
    "in a set": (lambda x: torch.isin(x.round(), torch.tensor([0.0, 1.0])), {0, 1, 2, 3}),
    "activations": (lambda x: F.logsigmoid(x) + F.hardswish(x) + F.prelu(x, ONE), {0, 1, 2, 3}),
    "zeros": (lambda x: x.new_zeros(x.shape) + x // 2, {0, 1, 2, 3}),
    "a part": (lambda x: x.flatten(0, 1).chunk(2)[1], {1, 2, 3}),
}


class Following(TorchDispatchMode):
    def __init__(self, whole: Tensor, share: TensorShare) -> None:
        super().__init__()
        self.shares = TensorMap[TensorShare]()
        self.shares[whole] = share

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        if any(tensor in self.shares for tensor in tensors_of((args, kwargs))):
            operation = TensorOperation(func, args, kwargs or {}, self.shares)
            for tensor in tensors_of(result):
                share = follow(operation, tensor)
                if share is not None:
                    self.shares[tensor] = share
        return result


def piece(whole: Tensor, share: TensorShare, rank: int) -> Tensor:
    """Returns a rank's part of `whole`."""
    apart = whole.unflatten(share.dim, (share.outer, share.size, -1))
    return apart.chunk(RANKS, share.dim + 1)[rank].flatten(share.dim, share.dim + 2)


@pytest.mark.parametrize("name", FOLLOWED)
def test_what_is_followed_is_what_ranks_have(name: str) -> None:
    function, allowed = FOLLOWED[name]
    whole = torch.randn(SHAPE, generator=torch.Generator().manual_seed(0))
    for dim in range(whole.dim()):
        given = TensorShare(dim, 1, whole.shape[dim])
        following = Following(whole, given)
        try:
            with following:
                result = function(whole)
            share = following.shares.get(result)
            assert share is not None
        except ShareError:
            assert dim not in allowed
            continue
        assert dim in allowed
        for rank in range(RANKS):
            torch.testing.assert_close(function(piece(whole, given, rank)), piece(result, share, rank))


class Net(nn.Module):
    """A module between a column and a row."""

    def __init__(self, between: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.up, self.down, self.between = nn.Linear(8, 16), nn.Linear(16, 8), between
        self.scale = nn.Parameter(torch.ones(1))

    def forward(self, x: Tensor) -> Tensor:
        return x + self.scale * self.down(self.between(self.up(x)))


def found(between: Callable[[Tensor], Tensor], *plan: str) -> ShareFacts:
    entries = plan or ("up: column", "down: row")
    facts = trace_model(lambda: Net(between), TensorFact(shape=(8,), dtype="float32"), tensor=2, tensor_plan=entries)
    assert facts.shares is not None
    return facts.shares


def test_a_plan_without_a_fault() -> None:
    shares = found(torch.relu)
    assert shares.fault == "" and shares.head == ""
    assert [(call.module, call.input.shape, call.output.shape) for call in shares.calls] == [
        ("up", (8,), (16,)),
        ("down", (16,), (8,)),
    ]


@pytest.mark.parametrize(
    "between, fault",
    [
        (lambda x: x / x.shape[-1], "a number that depends on the size of a share"),
        (lambda x: x * torch.arange(x.shape[-1]), "every rank has whole"),
        (lambda x: x * torch.rand(x.shape[0], 1), ""),
        (lambda x: x + torch.zeros(x.shape[-1]).sum(), "of the size of a share"),
        (lambda x: x.relu() if x.shape[-1] == 16 else x.tanh(), "behaves differently where its modules are cut"),
        (lambda x: x * 2 if x.shape[-1] == 16 else x, "where its modules are cut"),
        (lambda x: x.view(-1, 4, 4).transpose(1, 2).reshape(len(x), -1), "is not one of the features"),
        (lambda x: x.view(len(x), 4, -1).flip(-1).flatten(1), "which is not a share of"),
        (lambda x: x.view(len(x), 4, 4).flatten(1), "fails on a rank's share"),
        (lambda x: x.scatter(1, torch.zeros(len(x), 1, dtype=torch.int64), 0.0), "`scatter` works across dim 1"),
        (lambda x: x.renorm(2, 0, 1.0), "the result of `renorm`"),
    ],
)
def test_what_a_rank_would_do_otherwise(between: Callable[[Tensor], Tensor], fault: str) -> None:
    text = found(between).fault
    assert fault in text and bool(fault) == bool(text)


@pytest.mark.slow
@pytest.mark.parametrize(
    "plan, fault",
    [
        (("blocks.*.attention.[qkv]: column", "blocks.*.attention.norm: summed", "blocks.*.attention.out: row"), ""),
        (("blocks.*.attention.norm: summed",), "is `summed`, and works on what every rank has whole"),
        (
            ("blocks.*.attention.[qkv]: column", "blocks.*.attention.out: row"),
            "`blocks.0.attention.norm.weight`, whose",
        ),
        (("blocks.*.up: column", "blocks.*.down: row"), "`blocks.0` works on shares with a tensor that every rank"),
        (("head: column", "table: vocabulary"), ""),
    ],
)
def test_a_transformer(plan: tuple[str, ...], fault: str) -> None:
    facts = trace_model(network, TensorFact(shape=(16,), dtype="int64"), tensor=2, tensor_plan=plan)
    assert facts.shares is not None
    assert fault in facts.shares.fault and bool(fault) == bool(facts.shares.fault)
    assert facts.shares.head == ("head" if plan[0] == "head: column" else "")


@pytest.mark.slow
@pytest.mark.parametrize(
    "parts, kv_heads, by_dims, fault",
    [
        ("3 parts", 4, False, ""),
        ("3 parts", 4, True, ""),
        ("parts [4, 2, 2]", 2, False, ""),
        ("parts [4, 1, 1]", 1, False, "cut differently"),  # half a head of keys
        ("parts [2, 1, 1]", 4, False, "works across dim 2"),
        ("parts [1, 1, 1]", 2, False, "works across dim 2"),
    ],
)
def test_parts_of_a_column(parts: str, kv_heads: int, by_dims: bool, fault: str) -> None:
    plan = (f"h.*.c_attn: column in {parts}", "h.*.c_proj: row", "h.*.gate_up: column in 2 parts", "h.*.down: row")
    made = partial(gpt, kv_heads, by_dims)
    facts = trace_model(made, TensorFact(shape=(16,), dtype="int64"), tensor=2, tensor_plan=plan)
    if kv_heads == 2 and "1, 1" in parts:
        assert facts.shares is None  # 64 features are not three equal parts
        return
    assert facts.shares is not None
    assert fault in facts.shares.fault and bool(fault) == bool(facts.shares.fault)


@pytest.mark.parametrize(
    "between, fault",
    [
        (lambda x: torch.mul(*x.chunk(2, -1)), ""),
        (lambda x: x[..., : x.shape[-1] // 2] * x[..., x.shape[-1] // 2 :], ""),
        (lambda x: torch.mul(*x.unflatten(-1, (2, -1)).unbind(-2)), ""),
        (lambda x: (x + 0)[..., : x.shape[-1]], "its share is not one of the features"),
        (lambda x: torch.mul(*x.view(len(x), -1, 2).unbind(-1)), "share is not one of the features"),
        (lambda x: x[..., :4] * x[..., -4:], "works across"),
    ],
)
def test_two_parts_are_taken_apart(between: Callable[[Tensor], Tensor], fault: str) -> None:
    def make() -> nn.Module:
        net = Net(between)
        net.up, net.down = nn.Linear(8, 16), nn.Linear(16 if "its" in fault else 4 if "works" in fault else 8, 8)
        return net

    plan = ("up: column in 2 parts", "down: row")
    facts = trace_model(make, TensorFact(shape=(8,), dtype="float32"), tensor=2, tensor_plan=plan)
    assert facts.shares is not None
    assert fault in facts.shares.fault and bool(fault) == bool(facts.shares.fault)


class Astray(nn.Module):
    """A norm whose weight is used by the module around it."""

    def __init__(self, scale: bool) -> None:
        super().__init__()
        self.up, self.down, self.norm, self.scale = nn.Linear(8, 16), nn.Linear(16, 8), HeadNorm(4), scale

    def forward(self, x: Tensor) -> Tensor:
        y = self.up(x).view(len(x), -1, 4)
        y = y * self.norm.weight if self.scale else self.norm(y)
        return self.down(y.flatten(1))


def test_what_is_summed_is_so_in_its_own_module() -> None:
    plan = ("up: column", "norm: summed", "down: row")
    for scale, fault in ((False, ""), (True, "works on shares with the parameter `norm.weight`")):
        made = partial(Astray, scale)
        facts = trace_model(made, TensorFact(shape=(8,), dtype="float32"), tensor=2, tensor_plan=plan)
        assert facts.shares is not None
        assert fault in facts.shares.fault and bool(fault) == bool(facts.shares.fault)
        assert facts.shares.help == ("use it in the `forward` of its own module" if scale else "")


def test_a_module_that_sums_counts_each_call() -> None:
    """Like the norm of heads, which one block calls for queries and for keys."""
    plan = ("blocks.*.attention.[qkv]: column", "blocks.*.attention.norm: summed", "blocks.*.attention.out: row")
    facts = trace_model(network, TensorFact(shape=(16,), dtype="int64"), tensor=2, tensor_plan=plan)
    assert facts.shares is not None
    assert facts.shares.summed == tuple(f"blocks.{n}.attention.norm" for n in (0, 0, 1, 1))


def test_the_work_of_a_rank() -> None:
    plan = ("blocks.*.up: column", "blocks.*.gate: column", "blocks.*.down: row")
    facts = trace_model(network, TensorFact(shape=(16,), dtype="int64"), tensor=2, tensor_plan=plan)
    assert facts.shares is not None
    work, whole = dict(facts.shares.work), {layer.name: layer.forward_flops for layer in facts.layers}
    dense = 3 * 2 * 16 * 32 * 48  # of a block: products of 16 positions, forward
    assert work["blocks.0"] == work["blocks.1"] == whole["blocks.0"] - dense // 2
    assert work["head"] == whole["head"] > 0


def test_a_row_wants_shares() -> None:
    assert "is a `row`, and is given the whole" in found(torch.relu, "down: row").fault
    assert found(torch.relu, "down: row_of_whole").fault == ""
    assert found(torch.relu, "up: gathered").fault == ""


class ByHand(nn.Linear):
    """Computes what a dense layer does; `scaled` by numbers of its own."""

    scale: Tensor

    def __init__(self, takes: int, gives: int, scaled: int) -> None:
        super().__init__(takes, gives)
        self.register_buffer("scale", torch.ones(scaled) if scaled else torch.tensor(2.0))

    def forward(self, x: Tensor) -> Tensor:
        return x @ self.weight.T * self.scale + self.bias


@pytest.mark.parametrize(
    "scaled, fault", [(0, ""), (16, "`up` is cut, and works on what is divided with `up.scale`, which is not")]
)
def test_classes_derived_from_a_dense_layer(scaled: int, fault: str) -> None:
    def make() -> nn.Module:
        net = Net(torch.relu)
        net.up = ByHand(8, 16, scaled)
        return net

    facts = trace_model(
        make, TensorFact(shape=(8,), dtype="float32"), tensor=2, tensor_plan=("up: column", "down: row")
    )
    assert facts.shares is not None and facts.shares.fault == fault


def test_classes_with_further_parameters_are_no_dense_layers() -> None:
    def make() -> nn.Module:
        net = Net(torch.relu)
        net.up.further = nn.Parameter(torch.ones(16))
        return net

    facts = trace_model(
        make, TensorFact(shape=(8,), dtype="float32"), tensor=2, tensor_plan=("up: column", "down: row")
    )
    assert facts.shares is None and not next(module.plain for module in facts.modules if module.name == "up")
