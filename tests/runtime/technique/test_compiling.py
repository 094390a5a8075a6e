"""A compiled training is the training: on several ranks, with recomputation, over uneven batches and in evaluation."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from helpers import trained
from helpers.launcher import Launcher
from helpers.made_programs import gpt_model, places, program, tokens
from helpers.trained import Trained, agree
from torch import nn

from dslc.compiler.ir import program as p
from dslc.runtime.model.losses import loss_sum
from dslc.runtime.model.meta_model import build_model
from dslc.runtime.technique import compiling, recompute
from dslc.runtime.technique.compiling import CompileError

CPU = torch.device("cpu")


def train(launcher: Launcher, folder: Path, ranks: int, **changed: Any) -> Trained:
    # 14 samples in batches of 8: the last has 6.
    data = tokens(folder.parent, train=14, validation=5, last=True)
    return trained.train(launcher, folder, program(ranks, data, model=gpt_model(), **changed), places(ranks))


@pytest.mark.long
def test_a_compiled_block_on_two_ranks_is_the_plain_training(launcher: Launcher, tmp_path: Path) -> None:
    plain = train(launcher, tmp_path / "plain", 1, steps=4)
    again = p.RecomputeStep(kind="full", modules=("2",))
    agree(plain, train(launcher, tmp_path / "ddp", 2, steps=4, compiled=("2",), recompute=again))
    sharded = p.GradientStep(kind="fsdp", units=("2",), reshard=True)
    agree(plain, train(launcher, tmp_path / "sharded", 2, steps=4, compiled=("2",), gradients=sharded))


def test_modules_of_torch_are_compiled_too_and_keep_their_names() -> None:
    from torch._dynamo.utils import counters

    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 4), nn.ReLU())
    names = [*model.state_dict()]
    input = torch.randn(3, 4)
    expected = model(input)
    compiling.apply(("",), model, CPU)
    counters.clear()
    torch.testing.assert_close(model(input), expected, rtol=0, atol=1e-6)
    assert counters["stats"]["unique_graphs"] == 1, "it ran as it was"
    assert [*model.state_dict()] == names


@pytest.mark.parametrize(
    ("kind", "classes"), [("cross_entropy", {}), ("cross_entropy", {"classes": "first"}), ("mse", {})]
)
def test_a_compiled_loss_is_the_plain_one_without_scores_in_float32(kind: Any, classes: Any) -> None:
    from torch._dynamo.utils import counters

    counters.clear()
    step = p.LossStep(kind=kind, arguments=classes)
    scores = torch.randn(4, 7, 512, generator=torch.Generator().manual_seed(0)).bfloat16()
    target = scores.roll(1, 0) if kind == "mse" else torch.arange(28).view(4, 7)
    if classes:
        scores = scores.movedim(-1, 1)
    found = []
    for each in (step, replace(step, compiled=True)):
        input = scores.clone().requires_grad_()
        wide = [0]  # bytes in float32 that are kept for the backward pass

        def keep(saved: torch.Tensor, wide: list[int] = wide) -> torch.Tensor:
            wide.append(saved.nbytes if saved.dtype == torch.float32 else 0)
            return saved

        with torch.autograd.graph.saved_tensors_hooks(keep, lambda saved: saved):
            loss = loss_sum(each)(input, target)
        loss.backward()
        assert loss.dtype == torch.float32 and input.grad is not None
        found.append((loss.detach(), input.grad, max(wide)))
    (plain, plain_gradient, kept), (loss, gradient, kept_compiled) = found
    torch.testing.assert_close(loss, plain)
    torch.testing.assert_close(gradient, plain_gradient)
    assert kept == 4 * scores.numel() and kept_compiled <= kept // 100
    assert counters["stats"]["unique_graphs"] == 1 and not counters["graph_break"]


@pytest.mark.parametrize("kind", ("full", "selective"))
def test_the_compiler_sees_recomputation_and_writes_statistics_once(kind: Any) -> None:
    from torch._dynamo.utils import counters

    def make() -> nn.Module:
        torch.manual_seed(0)
        return nn.Sequential(nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4), nn.ReLU()))

    plain, made = make(), make()
    recompute.apply(p.RecomputeStep(kind=kind, modules=("0",)), made)
    compiling.apply(("0",), made, CPU)
    input = torch.randn(8, 4)
    counters.clear()
    for model in (plain, made):
        model(input).square().sum().backward()
    assert counters["stats"]["unique_graphs"] == 1 and not counters["graph_break"]
    torch.testing.assert_close(dict(made.named_buffers()), dict(plain.named_buffers()))
    for one, two in zip(plain.parameters(), made.parameters(), strict=True):
        torch.testing.assert_close(two.grad, one.grad)


def test_unlike_modules_are_all_compiled() -> None:
    from torch._dynamo import config
    from torch._dynamo.utils import counters

    counters.clear()
    model = nn.Sequential(*[nn.Sequential(nn.Linear(n, n + 1)) for n in range(1, 5)])
    # 8 as it comes: kinds of modules that share a line of code. A plain `setattr` cannot be undone here.
    with config.patch(recompile_limit=2, accumulated_recompile_limit=2), torch.no_grad():
        compiling.apply(tuple(str(n) for n in range(4)), model, CPU)
        model(torch.randn(2, 1))
    assert counters["stats"]["unique_graphs"] >= 3


def test_a_machine_without_a_compiler_is_told_so(tmp_path: Path) -> None:
    from torch._inductor import config, cpp_builder

    cpp_builder.cpp_compiler_search.cache_clear()
    with (
        config.patch({"cpp.cxx": (None, str(tmp_path / "no-such-compiler"))}),
        pytest.raises(CompileError, match=r"`train.compile` needs a C\+\+ compiler .*`train.compile = false`"),
    ):
        compiling.apply(("2",), build_model(gpt_model(), "cpu"), CPU)
    cpp_builder.cpp_compiler_search.cache_clear()
