"""A training that compiling makes slower says so, and trains as one that nobody times."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from helpers.job_texts import job_text
from helpers.launcher import Launcher
from helpers.trained import ready, train

from dslc.runtime.step.compile_timing import COMPILED, EAGER, WARM_UP, slower_text

# What its passes change would differ if passes that time it left a trace. On a rank the clock goes by readings: passes
# without compiled code take one second, and compiled ones two.
NETWORK = f"""
import itertools
import os
from types import SimpleNamespace

import torch
from torch import nn

from dslc.runtime.step import compile_timing


class Network(nn.Module):
    def __init__(self):
        super().__init__()
        self.enter, self.leave = nn.Linear(64, 8), nn.Linear(8, 10)
        self.norm, self.drop, self.passes = nn.BatchNorm1d(8), nn.Dropout(0.1), []
        self.copied = nn.Linear(64, 8).requires_grad_(False)
        if "LOCAL_RANK" in os.environ:
            readings = itertools.chain([1] * {2 * EAGER}, itertools.repeat(2))
            compile_timing.time = SimpleNamespace(perf_counter=itertools.accumulate(readings).__next__)

    def forward(self, x):
        x = x.flatten(1)
        if self.training:
            self.passes.append(1)
            with torch.no_grad():
                self.copied.weight.lerp_(self.enter.weight, 0.1)
        x = self.drop(self.norm(torch.tanh(self.enter(x) + self.copied(x))))
        return self.leave(x) / (1 + 0.1 * len(self.passes))
"""
JOB = job_text(
    model={"network": 'python("slow:Network")'},
    data={"source": "digits()", "batch": 16},
    devices={"cpus": 1},
    train={"steps": 1 + WARM_UP + COMPILED, "compile": "true", "optimizer": "sgd(lr = 0.1, momentum = 0.9)"},
    log={"every": "1 step"},
)


def test_compiling_is_slower_from_a_share_on() -> None:
    assert not slower_text(0.1, 0.05) and not slower_text(0.1, 0.104)
    assert slower_text(0.1, 0.2) == (
        "`train.compile` makes steps slower: the forward and backward pass takes 200 ms at best, and 100 ms without: "
        "leave it out"
    )


@pytest.mark.long
def test_a_run_that_compiling_makes_slower_says_so_once(launcher: Launcher, tmp_path: Path) -> None:
    (tmp_path / "slow.py").write_text(NETWORK)
    (tmp_path / "job.plt").write_text(JOB)
    runs = []
    for profile in (False, True):  # passes that are profiled are not timed
        made = ready(tmp_path / "job.plt", profile=profile)
        runs.append(train(launcher, tmp_path / f"run {profile}", made.program, made.places))
    timed, untimed = runs
    lines = [line for line in timed.shown.splitlines() if "`train.compile`" in line]
    assert len(lines) == 1 and lines[0].endswith(slower_text(1, 2)), timed.shown
    assert "`train.compile`" not in untimed.shown
    assert timed.losses() == untimed.losses()
    for name, value in untimed.weights.items():
        np.testing.assert_array_equal(timed.weights[name], value, err_msg=name)
