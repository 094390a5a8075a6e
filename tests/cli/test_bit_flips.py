"""Flips of one bit in a training: `train.check_replicas` or `dslc bisect` names each, or rounding explains it."""

from __future__ import annotations

import json
import math
import os
import random
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from helpers.flipped_bits import flip_bit
from helpers.paths import ROOT
from instruments.bit_flips import count_flips, drawn_flip


def test_one_bit_of_one_number_is_flipped() -> None:
    numbers = torch.tensor([1.0, 1.0, 1.0])
    assert flip_bit(numbers, 1, 22) == 0.5 and numbers.tolist() == [1.0, 1.5, 1.0]
    assert flip_bit(numbers, 2, 31) == -2.0 and flip_bit(numbers, 0, 0) == 2.0**-23
    assert math.isinf(flip_bit(torch.tensor([1.0]), 0, 30))


TRIALS = """
import json, sys
from pathlib import Path
from instruments.bit_flips import Flip, FlipTrial

folder = sys.argv[1]
trial = FlipTrial(Path(folder))
flips = [
    Flip(kind="parameter", step=2, parameter="last.weight", element=5, bit=0, rank=2, folder=folder),
    Flip(kind="gradient", step=1, parameter="first.bias", element=5, bit=22, rank=-1, folder=folder),
    Flip(kind="parameter", step=1, parameter="norm.weight", element=1, bit=0, rank=-1, folder=folder),
]
results = [trial.try_flip(flip) for flip in flips]
print(json.dumps([[result.outcome, result.share] for result in results]))
"""


@pytest.mark.slow
def test_flips_are_named_at_their_step_and_tensor(tmp_path: Path) -> None:
    """One rank that differs, a gradient of all ranks, and a bit that rounding explains."""
    environment = os.environ | {"PYTHONPATH": os.pathsep.join([str(ROOT / "tests"), os.environ.get("PYTHONPATH", "")])}
    # Ranks are forked, so the process that starts them must have no threads of pytest's.
    command = [sys.executable, "-c", TRIALS, str(tmp_path)]
    run = subprocess.run(command, env=environment, capture_output=True, text=True, check=True)
    outcomes, shares = zip(*json.loads(run.stdout.splitlines()[-1]), strict=True)
    assert outcomes == ("copies", "named", "nothing")
    assert shares[1] > 10 > 3 > shares[2] > 0


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
