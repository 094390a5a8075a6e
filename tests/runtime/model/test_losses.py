"""Losses are sums: over any cut of a batch they add up to torch's own mean times the count."""

from __future__ import annotations

import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given
from hypothesis import strategies as st

from dslc.compiler.ir.program import LossStep, PythonFunction
from dslc.runtime.model.custom_losses import OwnSum
from dslc.runtime.model.losses import LossError, classes_last, count, loss_sum, mixes_samples

SMOOTHING = {"label_smoothing": 0.2}


def tokens(batch: int = 6, length: int = 5, classes: int = 7) -> tuple[torch.Tensor, torch.Tensor]:
    made = torch.Generator().manual_seed(batch)
    target = torch.randint(classes, (batch, length), generator=made)
    target[torch.rand(batch, length, generator=made) < 0.3] = -100
    return torch.randn(batch, length, classes, generator=made), target


@given(st.integers(1, 5), st.sampled_from([{}, SMOOTHING]))
def test_kept_tokens_over_any_cut_are_torchs_mean(cut: int, arguments: dict[str, Any]) -> None:
    step = LossStep(kind="cross_entropy", arguments=arguments, counts="kept", ignore=-100)
    output, target = tokens()
    output.requires_grad_()
    pieces = [(output[:cut], target[:cut]), (output[cut:], target[cut:])]
    total = torch.stack([loss_sum(step)(*piece) for piece in pieces]).sum()
    number = sum(count(step, piece[1]) for piece in pieces)
    expected = F.cross_entropy(output.flatten(0, 1), target.flatten(), **arguments)
    torch.testing.assert_close(total / number, expected)
    (gradient,) = torch.autograd.grad(total / number, output)
    torch.testing.assert_close(gradient, torch.autograd.grad(expected, output)[0])


@pytest.mark.parametrize(
    ("kind", "function"),
    [("mse", F.mse_loss), ("l1", F.l1_loss), ("bce", F.binary_cross_entropy_with_logits)],
)
def test_each_sample_is_averaged_over_its_own_numbers(kind: Any, function: Any) -> None:
    made = torch.Generator().manual_seed(0)
    output, target = torch.randn(6, 3, 4, generator=made), torch.rand(6, 3, 4, generator=made)
    step = LossStep(kind=kind, counts="samples")
    assert count(step, target) == 6
    torch.testing.assert_close(loss_sum(step)(output, target) / 6, function(output, target))
    row, aim = output[0, 0], target[0, 0]
    torch.testing.assert_close(loss_sum(step)(row[:, None], aim) / 4, function(row, aim))


def test_targets_of_zeros_and_ones_may_be_whole_numbers() -> None:
    step = LossStep(kind="bce", counts="samples")
    expected = F.binary_cross_entropy_with_logits(torch.tensor([0.5, -1.0]), torch.tensor([1.0, 0.0]), reduction="sum")
    torch.testing.assert_close(loss_sum(step)(torch.tensor([[0.5], [-1.0]]), torch.tensor([1, 0])), expected)


def test_sixteen_bits_are_widened_first() -> None:
    step = LossStep(kind="cross_entropy", counts="tokens")
    output, target = tokens()
    output, target = output.bfloat16(), target.clamp(min=0)
    total = loss_sum(step)(output, target)
    assert total.dtype == torch.float32
    torch.testing.assert_close(total, loss_sum(step)(output.float(), target))


def test_nothing_is_ignored_unless_the_job_says_so() -> None:
    output, target = tokens()
    with pytest.raises(IndexError):
        loss_sum(LossStep(kind="cross_entropy", counts="tokens"))(output, target)


@pytest.mark.parametrize(
    ("kind", "output", "target"),
    [
        ("mse", (4, 3), (4, 2)),
        ("mse", (4, 1), (1, 4)),
        ("l1", (4,), (1,)),
        ("cross_entropy", (4, 10, 3), (4,)),
        ("cross_entropy", (4, 10), (4, 1)),
    ],
)
def test_shapes_that_would_be_broadcast_are_refused(
    kind: Any, output: tuple[int, ...], target: tuple[int, ...]
) -> None:
    labels = torch.zeros(target, dtype=torch.int64)
    with pytest.raises(LossError, match="shape"):
        loss_sum(LossStep(kind=kind, counts="samples"))(torch.zeros(output), labels)


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    monkeypatch.setattr(sys, "path", sys.path[:])
    (tmp_path / "own_losses.py").write_text(
        "def each(output, target, scale=1.0):\n    target = target['values'] if isinstance(target, dict) else target\n"
        "    return scale * (output - target).abs().flatten(1).mean(1)\n"
        "def against_others(output, target):\n    return (output @ output.T).softmax(1).diagonal()\n"
        "def mean(output, target):\n    return (output - target).abs().mean()\n"
        "class holder:\n    number = staticmethod(lambda output, target: 3.0)\n"
    )
    return str(tmp_path)


def own(folder: str, name: str, **arguments: float) -> LossStep:
    function = PythonFunction(function=f"own_losses:{name}", arguments=arguments, folder=folder)
    return LossStep(kind="python", counts="samples", python=function, line="job.plt:3:3")


def test_a_loss_of_the_users_own_is_summed(folder: str) -> None:
    total = loss_sum(own(folder, "each", scale=2.0))(torch.ones(5, 3), torch.zeros(5, 3))
    torch.testing.assert_close(total, torch.tensor(10.0))


@pytest.mark.parametrize(("name", "found"), [("mean", "1$"), ("holder.number", "a float")])
def test_a_loss_of_the_users_own_has_to_give_one_a_sample(folder: str, name: str, found: str) -> None:
    with pytest.raises(LossError, match=rf"job.plt:3:3: .*each sample \(5\).*gave {found}"):
        loss_sum(own(folder, name))(torch.ones(5, 3), torch.zeros(5, 3))


@pytest.mark.parametrize("name", ["nothing", "each.nothing"])
def test_a_function_that_is_not_there(folder: str, name: str) -> None:
    with pytest.raises(ImportError, match=f"has no `{name}`"):
        loss_sum(own(folder, name))


def test_a_module_that_is_not_there() -> None:
    function = PythonFunction(function="no_such_module:f", line="job.plt:4:1")
    with pytest.raises(ImportError, match=r"job.plt:4:1: there is no module `no_such_module`"):
        loss_sum(LossStep(kind="python", python=function))


@given(st.integers(1, 5), st.integers(1, 3))
def test_padding_of_a_batch_does_not_count_however_it_is_cut(cut: int, more: int) -> None:
    """The second piece is padded further, as a batch of its own may be."""
    output, target = tokens()
    step = LossStep(kind="own", arguments={"mean_of": "labels", "ignore": -100, "shift": 0}, counts="own")
    total = OwnSum(step)
    losses = F.cross_entropy(output.flatten(0, 1), target.flatten(), reduction="none").view(target.shape)
    pieces = [
        (losses[:cut], target[:cut]),
        (F.pad(losses[cut:], (0, more)), F.pad(target[cut:], (0, more), value=-100)),
    ]
    summed = torch.stack([total(found + 1, {"labels": labels}) for found, labels in pieces]).sum()
    number, _ = total.take_counts()
    assert number == target.ne(-100).sum()
    torch.testing.assert_close((summed / number).float(), losses[target != -100].mean() + 1)
    python = OwnSum(replace(step, kind="python", arguments={}, ignore=-100))
    pieces_of_python = torch.stack([python.interpret(found + 1, labels).total for found, labels in pieces]).sum()
    torch.testing.assert_close(pieces_of_python, summed)


@pytest.mark.parametrize(("name", "mixes"), [("each", False), ("against_others", True)])
@pytest.mark.parametrize("counts", ["own", "samples"])
def test_a_loss_that_compares_samples_is_told_from_one_that_does_not(
    folder: str, name: str, mixes: bool, counts: Any
) -> None:
    """Also where its targets are a structure, of which one sample is counted otherwise than several."""
    target: Any = torch.zeros(5, 3) if counts == "samples" else {"values": torch.zeros(5, 3)}
    assert mixes_samples(replace(own(folder, name), counts=counts), torch.randn(5, 3), target) is mixes


@pytest.mark.parametrize("dims", [(5,), (3, 4)])
def test_classes_may_come_first_as_torch_has_them(dims: tuple[int, ...]) -> None:
    made = torch.Generator().manual_seed(0)
    target = torch.randint(7, (6, *dims), generator=made).masked_fill(torch.rand(6, *dims, generator=made) < 0.3, -100)
    output = torch.randn(6, 7, *dims, generator=made)
    step = LossStep(kind="cross_entropy", arguments=SMOOTHING | {"classes": "first"}, counts="kept", ignore=-100)
    expected = F.cross_entropy(output, target, label_smoothing=SMOOTHING["label_smoothing"])
    torch.testing.assert_close(loss_sum(step)(output, target) / count(step, target), expected)
    with pytest.raises(LossError, match="the classes come first"):
        loss_sum(step)(output.movedim(1, -1), target)
    scores, labels = classes_last(step, output, target)
    torch.testing.assert_close(scores, output.movedim(1, -1).flatten(0, -2))
    assert torch.equal(labels, target.flatten())


def grad(*shape: int) -> torch.Tensor:
    return torch.full(shape, 2.0, requires_grad=True)


SCORES, LOSS = grad(4, 7), grad()


@pytest.mark.parametrize(
    ("output", "expected"),
    [
        ((SCORES, LOSS), (8.0, 4)),
        ([LOSS, SCORES, (SCORES, None)], (8.0, 4)),
        ((SCORES, LOSS, {"size": SCORES}), (8.0, 4)),
        ((grad(1, 1), LOSS), (8.0, 4)),  # one sample, one score
        ((LOSS, grad(1)), (8.0, 4)),
        ((LOSS, torch.tensor(3)), (2.0, 3)),
        ((LOSS, torch.tensor(3.0)), (2.0, 3)),
        ((LOSS, 3), (2.0, 3)),
        ((grad(1), 3), (2.0, 3)),
    ],
)
def test_the_loss_of_a_model_is_the_one_number_in_a_tuple(output: Any, expected: tuple[float, int]) -> None:
    own = OwnSum(LossStep(kind="own", arguments={"mean_of": None, "ignore": -100, "shift": 0}, counts="own"))
    found = own.count_losses(output, {"labels": torch.zeros(4, 3)})
    assert (found.total.item(), int(found.number)) == expected
    assert set(found.further) == ({"size"} if isinstance(output[-1], dict) else set())


@pytest.mark.parametrize("name", ["step", "loss", "lr", "a\x1b[31m"])
def test_a_further_loss_with_the_name_of_another_number_is_refused(name: str) -> None:
    own = OwnSum(LossStep(kind="own", arguments={"mean_of": None, "ignore": -100, "shift": 0}, counts="own"))
    with pytest.raises(LossError, match=r"the further loss '.*' needs another name"):
        own.count_losses((LOSS, {name: LOSS}), {"labels": torch.zeros(4, 3)})


@pytest.mark.parametrize(
    ("output", "reason"),
    [
        ((LOSS, grad()), "2 parts"),
        ((SCORES, LOSS, torch.tensor(3)), "2 parts"),
        ((grad(1), torch.tensor(3.0)), "no gradient"),  # a sum with dims, and a count that is no whole number
        ((SCORES, LOSS.detach()), "no gradient"),
        ((LOSS, torch.ones(1)), "may be a count"),
        ((SCORES, SCORES), "gave a tuple"),
    ],
)
def test_a_tuple_with_two_readings_is_refused(output: Any, reason: str) -> None:
    own = OwnSum(LossStep(kind="own", arguments={"mean_of": None, "ignore": -100, "shift": 0}, counts="own"))
    with pytest.raises(LossError, match=reason) as raised:
        own.count_losses(output, torch.zeros(4))
    assert '{"loss": (sum, count)}' in raised.value.remedy
