"""The balance loss of experts has the value and the gradients that `transformers` gives it."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from helpers.networks_drawn import built, of, step_of, tokens
from torch import Tensor, nn

from dslc.compiler.ir.program import RecomputeStep
from dslc.dsl.language import layers as s
from dslc.runtime.loop.plain_loop import balance_loss
from dslc.runtime.model.experts.expert_balance import ExpertBalance
from dslc.runtime.model.meta_model import build_model
from dslc.runtime.technique import recompute

FACTOR = 0.3


def network(experts: int = 4, top_k: int = 2, score: str = "softmax") -> tuple[nn.Module, ExpertBalance]:
    moe = of(
        s.BlockExperts, experts=experts, top_k=top_k, hidden=16, score=score, balance=of(s.BalanceLoss, factor=FACTOR)
    )
    step = step_of(built(of(s.Llama, layers=1, width=32, heads=4, context=40, experts=moe), tokens(40, 50)))
    model = build_model(step, "cpu")
    torch.manual_seed(3)
    for parameter in model.parameters():
        nn.init.normal_(parameter, 0.5 if parameter.dim() == 1 else 0.0, 0.2)
    return model, ExpertBalance(model, step.root, None, torch.device("cpu"))


def batch() -> Tensor:
    return torch.randint(0, 50, (4, 40), generator=torch.Generator().manual_seed(4))


def task_loss(model: nn.Module) -> Tensor:
    return F.cross_entropy(model(batch()).flatten(0, 1), batch().flatten())


def gradients(model: nn.Module) -> dict[str, Tensor]:
    return {name: parameter.grad for name, parameter in model.named_parameters() if parameter.grad is not None}


def train(model: nn.Module, balance: ExpertBalance) -> tuple[Tensor, dict[str, Tensor]]:
    """Returns the loss of a step, with the balance loss, and the gradients."""
    balance.begin()
    loss = task_loss(model)
    balance.set_gradients(lambda gradient: gradient)
    loss.backward()
    return loss.detach() + balance.balance_loss().float(), gradients(model)


def test_loss_and_gradients_are_those_of_transformers() -> None:
    transformers = pytest.importorskip("transformers")
    config = transformers.MixtralConfig(
        num_hidden_layers=1,
        hidden_size=32,
        num_attention_heads=4,
        num_key_value_heads=4,
        intermediate_size=16,
        num_local_experts=4,
        num_experts_per_tok=2,
        max_position_embeddings=40,
        vocab_size=50,
        rms_norm_eps=1e-6,
        rope_parameters={"rope_type": "default", "rope_theta": 1e4},
        router_aux_loss_coef=FACTOR,
        output_router_logits=True,
        use_cache=False,
    )
    model, balance = network()
    theirs = transformers.MixtralForCausalLM(config)
    theirs.load_state_dict(model.state_dict())
    output = theirs(batch())
    expected = F.cross_entropy(output.logits.flatten(0, 1), batch().flatten()) + FACTOR * output.aux_loss
    expected.backward()
    loss, found = train(model, balance)
    torch.testing.assert_close(loss, expected.detach(), atol=1e-6, rtol=0)
    torch.testing.assert_close(found, gradients(theirs), atol=1e-6, rtol=1e-5)


@pytest.mark.parametrize(
    ("experts", "top_k", "score", "one"),
    [(4, 2, "sigmoid", False), (4, 4, "softmax", False), (4, 1, "softmax", True), (1, 1, "sigmoid", False)],
    ids=("sigmoid", "all experts", "all tokens to one", "one expert"),
)
def test_the_gradient_is_that_of_the_sum(experts: int, top_k: int, score: str, one: bool) -> None:
    """Adds the balance loss to the loss by hand, and recomputes the block on the other side."""
    model, balance = network(experts, top_k, score)
    (router,) = balance.routers.values()
    if one:
        nn.init.zeros_(router.weight)
    added: list[Tensor] = []
    hook = router.register_forward_hook(
        lambda router, input, output: added.append(balance_loss(router, input[0], output[0]))
    )
    (task_loss(model) + added[0]).backward()  # before a step, routers add nothing
    hook.remove()
    expected = {name: gradient.clone() for name, gradient in gradients(model).items()}
    model.zero_grad()
    recompute.apply(RecomputeStep(kind="full", modules=("model.layers.0",)), model)
    loss, found = train(model, balance)
    torch.testing.assert_close(found, expected, atol=1e-6, rtol=1e-5)
    if one:
        assert sorted(router.load.tolist()) == [0, 0, 0, 160]
    assert (loss - task_loss(model.eval())).item() == pytest.approx(added[0].item(), abs=1e-6)


def test_a_router_that_is_not_finite_gives_a_loss_that_is_not() -> None:
    model, balance = network()
    next(iter(balance.routers.values())).weight.data[1, 3] = float("nan")
    loss, _ = train(model, balance)
    assert loss.isnan()


def test_an_evaluation_counts_nothing() -> None:
    model, balance = network()
    balance.begin()
    task_loss(model.eval())
    with torch.no_grad():
        task_loss(model.train())
    (router,) = balance.routers.values()
    assert router.probability_sum is not None and not router.probability_sum.any() and not router.load.any()
