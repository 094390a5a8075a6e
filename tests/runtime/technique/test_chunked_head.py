"""The head computes the losses of its logits in chunks: the numbers of torch's cross entropy, and no whole logits."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from dslc.compiler.ir.program import LossStep
from dslc.compiler.trace.structures import tensors
from dslc.runtime.model.errors import LossError
from dslc.runtime.model.losses import as_rank_0, loss_sum
from dslc.runtime.technique import chunked_head

SEQUENCES, LENGTH, WIDTH, CLASSES, CHUNKS = 3, 17, 12, 29, 4


class _LargestResult(TorchDispatchMode):
    """Notes how many numbers the largest result of an operation has."""

    numbers = 0

    def __torch_dispatch__(
        self, func: torch._ops.OpOverload, types: object, args: tuple[object, ...] = (), kwargs: object = None
    ) -> object:
        assert kwargs is None or isinstance(kwargs, Mapping)
        result = func(*args, **(kwargs or {}))
        self.numbers = max([self.numbers, *(tensor.numel() for tensor in tensors(result))])
        return result


def _step(smoothing: float = 0.0, ignore: int | None = None) -> LossStep:
    return LossStep(
        kind="cross_entropy", arguments={"label_smoothing": smoothing}, counts="tokens", ignore=ignore, head="1",
        chunks=CHUNKS,
    )  # fmt: skip


def _network(bias: bool) -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, CLASSES, bias=bias))


def _batch(ignore: int | None) -> tuple[Tensor, Tensor]:
    torch.manual_seed(1)
    targets = torch.randint(0, CLASSES, (SEQUENCES, LENGTH))
    if ignore is not None:
        targets[0, :9] = ignore
    return torch.randn(SEQUENCES, LENGTH, WIDTH), targets


def _gradients(model: nn.Module, loss: Tensor) -> dict[str, Tensor]:
    (loss * 3 / 7).backward()
    return {name: parameter.grad for name, parameter in model.named_parameters() if parameter.grad is not None}


@contextmanager
def _autocast(is_low: bool) -> Iterator[None]:
    with torch.autocast("cpu", dtype=torch.bfloat16, enabled=is_low):
        yield


@pytest.mark.parametrize("is_low", [False, True], ids=["float32", "bfloat16"])
@pytest.mark.parametrize(
    ("bias", "smoothing", "ignore"), [(False, 0.0, None), (True, 0.0, -100), (False, 0.1, -100), (True, 0.1, None)]
)
def test_losses_and_gradients_are_those_of_whole_logits(
    bias: bool, smoothing: float, ignore: int | None, is_low: bool
) -> None:
    (inputs, targets), step = _batch(ignore), _step(smoothing, ignore)
    model = _network(bias)
    with _autocast(is_low):
        scores = model(inputs).float().flatten(0, 1)
        expected = F.cross_entropy(
            scores, targets.flatten(), ignore_index=-1 if ignore is None else ignore, reduction="sum",
            label_smoothing=smoothing,
        )  # fmt: skip
    gradients = _gradients(model, expected)
    model = _network(bias)
    chunked_head.apply(step, model)
    largest = _LargestResult()
    with largest:
        with _autocast(is_low), chunked_head.computes_losses(model, step, targets):
            losses = model(inputs)
        loss = loss_sum(step)(losses, targets)
        chunked = _gradients(model, loss)
    assert losses.shape == targets.shape
    assert ignore is None or not losses[0, :9].any()
    assert torch.allclose(loss, expected, rtol=1e-6)
    assert gradients.keys() == chunked.keys()
    # Whole logits' gradients of the weight are rounded to 16 bits once; those of chunks are summed in float32.
    tolerance = 4e-3 if is_low else 1e-6
    for name, gradient in gradients.items():
        assert (gradient - chunked[name]).norm() <= tolerance * gradient.norm(), name
    assert largest.numbers < SEQUENCES * LENGTH * CLASSES
    with _autocast(is_low):
        assert model(inputs).shape == (SEQUENCES, LENGTH, CLASSES), "without targets it gives logits"


def test_a_frozen_head_passes_gradients_on() -> None:
    inputs, targets = _batch(None)
    model, step = _network(True), _step()
    model[1].requires_grad_(False)
    expected = _gradients(model, F.cross_entropy(model(inputs).flatten(0, 1), targets.flatten(), reduction="sum"))
    model.zero_grad()
    chunked_head.apply(step, model)
    with chunked_head.computes_losses(model, step, targets):
        loss = model(inputs).sum()
    chunked = _gradients(model, loss)
    assert chunked.keys() == expected.keys() == {"0.weight", "0.bias"}
    assert all(torch.allclose(chunked[name], expected[name], rtol=1e-5, atol=1e-6) for name in expected)


def test_targets_have_to_be_one_for_each_input() -> None:
    inputs, targets = _batch(None)
    model, step = _network(False), _step()
    chunked_head.apply(step, model)
    expected = r"inputs of shape \(3, 17, 12\), and the targets are of shape \(3, 16\)"
    with pytest.raises(LossError, match=expected), chunked_head.computes_losses(model, step, targets[:, 1:]):
        model(inputs)
    assert model(inputs).dim() == 3


def test_only_a_part_of_a_model_may_lack_the_head() -> None:
    body = _network(False)[:1]
    with pytest.raises(AssertionError, match="the model has no `1`"):
        chunked_head.apply(_step(), body)
    chunked_head.apply(_step(), body, is_whole=False)
    with chunked_head.computes_losses(body, _step(), _batch(None)[1]):
        assert body(_batch(None)[0]).shape == (SEQUENCES, LENGTH, WIDTH)


@pytest.mark.parametrize("smoothing", [0.0, 0.1])
def test_a_target_that_is_no_class_of_any_rank_is_an_error(smoothing: float) -> None:
    weight = torch.randn(CLASSES, WIDTH)
    inputs, targets = _batch(-100)
    targets[1, 0] = CLASSES  # the first class of the second rank
    with as_rank_0(2):
        world = torch.distributed.group.WORLD

        def losses(one: int) -> Tensor:
            targets[1, 1] = one
            step = _step(smoothing, -100)
            return chunked_head.compute_in_chunks(step, inputs, weight, None, targets, first=0, group=world)

        assert losses(2 * CLASSES - 1).isfinite().all()
        for one in (2 * CLASSES, -1):
            with pytest.raises((IndexError, RuntimeError), match="out of bounds"):
                losses(one)
