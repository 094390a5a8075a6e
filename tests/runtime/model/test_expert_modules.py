"""Mixtures of experts: any routing gives the sum that a loop over the experts gives, and counts follow the tokens."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from dslc.compiler.ir.program import RecomputeStep
from dslc.compiler.ir.steps import ModuleStep
from dslc.runtime.model.experts.expert_balance import ExpertBalance
from dslc.runtime.model.experts.expert_modules import Experts, MixtureOfExperts, Router
from dslc.runtime.technique import recompute

WIDTH, HIDDEN = 16, 8


def mixture(experts: int = 4, top_k: int = 2, **settings: Any) -> MixtureOfExperts:
    router: dict[str, Any] = {"score": "softmax", "normalize": True, "scale": 1.0, "rate": None} | settings
    made = MixtureOfExperts()
    made.gate = Router(WIDTH, experts, top_k, **router)
    made.experts = Experts(experts, WIDTH, HIDDEN)
    torch.manual_seed(7)
    for parameter in made.parameters():
        nn.init.normal_(parameter, 0.0, 0.3)
    return made


def by_loop(module: MixtureOfExperts, x: Tensor) -> Tensor:
    """The sum over the experts of a token, one expert after another."""
    tokens = x.flatten(0, -2)
    chosen, weights = module.gate(tokens)
    out = torch.zeros_like(tokens)
    for number in range(len(module.experts.down_proj)):
        for place in range(chosen.shape[1]):
            rows = (chosen[:, place] == number).nonzero()[:, 0]
            gate, up = F.linear(tokens[rows], module.experts.gate_up_proj[number]).chunk(2, -1)
            result = F.linear(F.silu(gate) * up, module.experts.down_proj[number])
            out = out.index_add(0, rows, result * weights[rows, place, None])
    return out.view_as(x)


def all_to_one(module: MixtureOfExperts) -> None:
    """Gives expert 2 the highest score of every token, and expert 0 the lowest."""
    nn.init.zeros_(module.gate.weight)
    module.gate.weight.data[2], module.gate.weight.data[0] = 1.0, -1.0


@pytest.mark.parametrize(
    ("experts", "top_k", "tokens", "settings"),
    [
        (4, 2, 9, {}),
        (4, 4, 5, {"normalize": False}),
        (1, 1, 3, {}),
        (8, 3, 1, {"score": "sigmoid", "scale": 2.5}),  # most experts get no token
        (4, 1, 6, {"one": True}),
        (4, 2, 0, {}),
    ],
    ids=("plain", "all experts", "one expert", "one token", "all tokens to one", "no token"),
)
def test_any_routing_is_the_loop(experts: int, top_k: int, tokens: int, settings: dict[str, Any]) -> None:
    one = settings.pop("one", False)
    module = mixture(experts, top_k, **settings)
    if one:
        all_to_one(module)
    x = torch.rand(1, tokens, WIDTH, generator=torch.Generator().manual_seed(3), requires_grad=True)
    results = []
    for function in (module, lambda x: by_loop(module, x)):
        module.zero_grad()
        x.grad = None
        y = function(x)
        y.square().sum().backward()
        results.append([y.detach(), x.grad, *(p.grad for p in module.parameters())])
    torch.testing.assert_close(results[0], results[1], atol=1e-6, rtol=1e-5)
    if one:
        assert module.gate.load.tolist() == [0, 0, tokens, 0]


def test_a_router_that_is_not_finite_gives_a_loss_that_is_not() -> None:
    module = mixture()
    module.gate.weight.data[1, 3] = float("nan")
    assert module(torch.rand(2, 3, WIDTH)).isnan().any()


def test_biases_move_by_the_tokens_of_a_step_once() -> None:
    module = mixture(4, 1, rate=0.1)
    model = nn.Sequential(module)
    root = ModuleStep(name="", kind="Sequential", children=(ModuleStep(name="0", kind=".MixtureOfExperts", children=(
        ModuleStep(name="gate", kind=".Router", arguments={"experts": 4}),)),))  # fmt: skip
    router = module.gate
    all_to_one(module)
    recompute.apply(RecomputeStep(kind="full", modules=("0",)), model)
    balance = ExpertBalance(model, root, None, torch.device("cpu"))
    x = torch.rand(2, 6, WIDTH, requires_grad=True)
    for _ in range(2):
        balance.begin()
        for micro in x.split(1):
            model(micro).sum().backward()  # the second pass of recomputation counts nothing
        assert router.load.tolist() == [0, 0, 12, 0]
        assert balance.loads(balance.counts().tolist()) == {
            "load_max": 4.0, "load_min": 0.0, **{f"load.0.{n}": 4.0 * (n == 2) for n in range(4)},
        }  # fmt: skip
        balance.update()
    assert router.e_score_correction_bias is not None
    torch.testing.assert_close(router.e_score_correction_bias, torch.tensor([0.2, 0.2, -0.2, 0.2]))
    assert list(model.state_dict())[1] == "0.gate.e_score_correction_bias" and "0.gate.load" not in model.state_dict()
    with torch.no_grad():
        model(x)
    model.eval()(x)
    assert router.load.sum() == 12


@pytest.mark.parametrize("score", ["softmax", "sigmoid"])
@pytest.mark.parametrize("top_k", [1, 2])
def test_a_router_gets_no_rounding_as_its_gradient(score: str, top_k: int) -> None:
    """Adam makes whole steps of rounding: of experts that no token uses, and of a weight that is always 1."""
    module = mixture(experts=6, top_k=top_k, score=score)
    tokens = torch.randn(3, WIDTH)
    chosen, _ = module.gate(tokens)
    module(tokens).square().sum().backward()
    idle = sorted({*range(6)} - {*chosen.flatten().tolist()}) if top_k > 1 else [*range(6)]
    gradient = module.gate.weight.grad
    assert gradient is not None and not gradient[idle].any()


def test_float64_is_the_loop_of_float64() -> None:
    module = mixture(experts=4, top_k=2).double()
    tokens = torch.rand(2, 3, WIDTH, dtype=torch.float64)
    assert torch.allclose(module(tokens), by_loop(module, tokens), atol=1e-14, rtol=0)


@pytest.mark.long
def test_compiled_experts_are_those_of_torch() -> None:
    """In one graph, forward and backward; one expert gets no token."""
    module = mixture(rate=0.01, score="sigmoid")
    x = torch.randn(2, 5, WIDTH, requires_grad=True)
    assert module.gate.e_score_correction_bias is not None
    module.gate.e_score_correction_bias[1] = -10.0

    def numbers(forward: Any) -> list[Tensor]:
        module.zero_grad()
        module.gate.load.zero_()
        x.grad = None
        y = forward(x)
        y.sin().sum().backward()
        assert x.grad is not None
        return [y.detach(), x.grad, module.gate.load.clone(), *(parameter.grad for parameter in module.parameters())]

    expected, found = numbers(module.forward), numbers(torch.compile(module.forward, fullgraph=True))
    assert expected[2][1] == 0
    for one, other in zip(expected, found, strict=True):
        torch.testing.assert_close(other, one, atol=1e-5, rtol=0)


@pytest.mark.slow
def test_selective_recomputation_keeps_the_products_of_compiled_experts(monkeypatch: pytest.MonkeyPatch) -> None:
    module, products, product = mixture(), [], F.grouped_mm

    def counted(*operands: Any, **named: Any) -> Tensor:
        products.append(operands)
        return product(*operands, **named)

    recompute.apply(RecomputeStep(kind="selective", modules=("experts",)), module)
    forward = torch.compile(module.forward, fullgraph=True, backend="aot_eager_decomp_partition")
    monkeypatch.setattr(F, "grouped_mm", counted)
    y = forward(torch.randn(2, 5, WIDTH))
    assert len(products) == 2
    y.sin().sum().backward()
    assert len(products) == 2 + 3  # of the gradients: the rows of the first have none, and nothing is multiplied again
