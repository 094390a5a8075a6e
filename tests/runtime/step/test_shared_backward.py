"""The backward pass of a share of a mean: that of the sum times the share, without a node that multiplies."""

from __future__ import annotations

import pytest
import torch

from dslc.runtime.step.stepper import MeanBackward, share_of_mean


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_gradients_are_those_of_the_share_to_the_bit(dtype: torch.dtype) -> None:
    """Over steps of different sizes, and over sums that a factor must not be kept for."""
    work = MeanBackward(3, torch.amp.GradScaler("cpu", enabled=False))
    sums = [
        *((dtype, number) for number in (7, 7, 11, 7)),
        (torch.float64, 7),
        (dtype, torch.tensor(7.0, dtype=torch.float64)),
    ]
    for kind, number in sums:
        grads = []
        for own in (True, False):
            weight = torch.linspace(-1, 1, 5, dtype=kind).requires_grad_()
            summed = (weight * weight).sum()
            if own:
                work.run(summed, number)
            else:
                share_of_mean(summed, 3, number).backward()
            assert weight.grad is not None
            grads.append(weight.grad)
        assert torch.equal(*grads), (kind, number)


def test_a_scaled_loss_is_scaled_before_its_backward_pass() -> None:
    weight = torch.ones(2, requires_grad=True)
    MeanBackward(1, torch.amp.GradScaler("cpu", init_scale=8.0)).run(weight.sum(), 4)
    assert weight.grad is not None and weight.grad.tolist() == [2.0, 2.0]
