"""Flips of one bit in a training: `train.check_replicas` or `dslc bisect` names each, or rounding explains it."""

from __future__ import annotations

import math
import random
from pathlib import Path

import pytest
import torch
from helpers.flipped_bits import Flip, flip_bit
from instruments.bit_flips import FlipTrial, count_flips, drawn_flip


def test_one_bit_of_one_number_is_flipped() -> None:
    numbers = torch.tensor([1.0, 1.0, 1.0])
    assert flip_bit(numbers, 1, 22) == 0.5 and numbers.tolist() == [1.0, 1.5, 1.0]
    assert flip_bit(numbers, 2, 31) == -2.0 and flip_bit(numbers, 0, 0) == 2.0**-23
    assert math.isinf(flip_bit(torch.tensor([1.0]), 0, 30))


@pytest.mark.slow
def test_flips_are_named_at_their_step_and_tensor(tmp_path: Path) -> None:
    """One rank that differs, a gradient of all ranks, and a bit that rounding explains."""
    trial = FlipTrial(tmp_path)
    flips = [
        Flip(kind="parameter", step=2, parameter="last.weight", element=5, bit=0, rank=2, folder=str(tmp_path)),
        Flip(kind="gradient", step=1, parameter="first.bias", element=5, bit=22, rank=-1, folder=str(tmp_path)),
        Flip(kind="parameter", step=1, parameter="norm.weight", element=1, bit=0, rank=-1, folder=str(tmp_path)),
    ]
    results = [trial.try_flip(flip) for flip in flips]
    assert [result.outcome for result in results] == ["copies", "named", "nothing"]
    assert results[1].share > 10 > 3 > results[2].share > 0


@pytest.mark.long
def test_thirty_drawn_flips_have_no_wrong_name() -> None:
    outcomes = count_flips(30, 1)
    assert sum(outcomes.values()) == 30 and not outcomes["wrong"]
    assert outcomes["copies"] + outcomes["named"] >= 15


def test_flips_are_drawn_over_kinds_and_places(tmp_path: Path) -> None:
    draw = random.Random(0)
    flips = [drawn_flip(draw, number, tmp_path) for number in range(60)]
    assert {flip.kind for flip in flips} == {"parameter", "gradient", "exp_avg", "exp_avg_sq"}
    assert {flip.rank for flip in flips} == {-1, 0, 1, 2} and {flip.step for flip in flips} == {1, 2, 3}
