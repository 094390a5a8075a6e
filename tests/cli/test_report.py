"""report.json of `dslc run`, and what `--profile` adds to it and prints."""

from __future__ import annotations

import io
import json
from pathlib import Path
from typing import Any

import pytest
from helpers.commands import dslc
from helpers.paths import EXAMPLES

from dslc.runs.report_table import show_report
from dslc.runtime.measure.collectives import FIRST_STEP
from dslc.runtime.measure.report import step_time

DIGITS = EXAMPLES / "digits.plt"


def _run(out: Path, *flags: str) -> tuple[str, dict[str, Any]]:
    shorter = ("--set", "train.epochs=none", "--set", "evaluate.every=none")
    run = dslc("run", DIGITS, "--out", out, *shorter, *flags)
    assert run.returncode == 0, run.stdout + run.stderr
    return run.stdout, json.loads((out / "report.json").read_text())


@pytest.mark.slow
def test_every_run_reports_and_profile_adds_what_was_measured(tmp_path: Path) -> None:
    shown, plain = _run(tmp_path / "plain", "--set", "train.steps=12", "--set", "log.every=4 steps")
    plan = json.loads((tmp_path / "plain" / "plan.json").read_text())
    assert plain["plan"] == plan["hash"] and plain["steps"] == {"planned": 12, "done": 12}
    assert plain["step_time"]["measured"] > 0
    assert plain["step_time"]["source"] in (None, "measured")  # a CPU's, without and with a calibration
    assert plain["step_time"]["calibrate"] == f"dslc calibrate {DIGITS}"
    for rank in plain["ranks"]:
        assert list(rank["phases"]) == ["data", "passes", "exposed", "update", "host"]
        assert all(each["measured"] >= 0 and each["predicted"] is None for each in rank["phases"].values())
    assert [rank["rank"] for rank in plain["ranks"]] == [0, 1]
    for rank in plain["ranks"]:
        assert rank["memory"]["measured"] is None and rank["process"]["resident"] > rank["memory"]["predicted"]["peak"]
        assert rank["recorded"] == [] and all(each["measured"] is None for each in rank["collectives"])
    assert "predicted" not in shown

    shown, profiled = _run(tmp_path / "profiled", "--profile", "--set", "train.steps=8")
    for rank in profiled["ranks"]:
        measured, predicted = rank["memory"]["measured"], rank["memory"]["predicted"]
        assert measured["parameters"] == predicted["parameters"] and measured["buffers"] == predicted["buffers"]
        kinds = ("parameters", "gradients", "optimizer", "buffers", "activations", "communication")
        assert measured["peak"] == sum(measured[kind] for kind in kinds) and measured["when"]
        (exchange,) = rank["collectives"]
        assert exchange["operation"] == "all_reduce" and exchange["measured"] == exchange["predicted"]
        assert rank["recorded"] == [4, 5, 6] and rank["steady"]
    table = [line.split() for line in shown.splitlines() if "all_reduce: count" in line]
    count = str(profiled["ranks"][0]["collectives"][0]["measured"]["count"])
    assert table == [["0,", "1", "all_reduce:", "count", "in", "a", "step", count, count, "none"]]


@pytest.mark.slow
def test_a_run_too_short_to_be_recorded_says_so(tmp_path: Path) -> None:
    shown, report = _run(tmp_path / "short", "--profile", "--set", "train.steps=2")
    assert f"collectives are recorded from step {FIRST_STEP} on, and there were fewer" in shown
    for rank in report["ranks"]:
        assert rank["memory"]["measured"]["peak"] > 0
        assert rank["recorded"] == [] and rank["steady"] is None and rank["collectives"][0]["measured"] is None


def test_the_time_of_a_step_leaves_out_the_first_and_evaluations() -> None:
    def record(step: int, seconds: float, split: str = "train") -> dict[str, Any]:
        return {"step": step, "seconds": seconds, "split": split}

    assert step_time([record(1, 9.0)]) is None
    logged = [record(1, 9.0), record(3, 9.5), record(3, 90.0, "validation"), record(5, 90.4), record(7, 91.0)]
    assert abs((step_time(logged) or 0) - 0.25) < 1e-9  # of 0.25, 0.2 and 0.3


def test_ranks_that_differ_have_lines_of_their_own() -> None:
    def rank(number: int, count: int) -> dict[str, Any]:
        counted = {"count": count, "bytes": 8}
        exchange = {"operation": "all_reduce", "predicted": {"count": 2, "bytes": 8}, "measured": counted}
        memory = {"predicted": None, "measured": None}
        return {
            "rank": number,
            "memory": memory,
            "collectives": [exchange],
            "recorded": [4],
            "steady": True,
            "phases": {},
        }

    screen = io.StringIO()
    ranks = [rank(0, 2), rank(1, 3), rank(2, 2), rank(3, 2)]
    times = {"predicted": 0.001, "source": "bound", "measured": 0.002}
    report: Any = {"ranks": ranks, "step_time": times}
    show_report(report, screen)
    lines = [" ".join(line.split()) for line in screen.getvalue().splitlines()]
    assert "0, 2, 3 all_reduce: count in a step 2 2 none" in lines
    assert "1 all_reduce: count in a step 2 3 +50.0%" in lines
    assert "0-3 all_reduce: bytes in a step 8 B 8 B none" in lines
    assert "all time of a step (bound) 1 ms 2 ms +100.0%" in lines


def test_a_table_in_a_pipe_is_not_cut() -> None:
    """Columns that rich would make narrow stay whole, such as many ranks beside numbers."""
    memory = {"predicted": None, "measured": None}
    ranks = [
        {
            "rank": number,
            "memory": memory,
            "collectives": [
                {
                    "operation": "reduce_scatter",
                    "predicted": {"count": 938_271_605, "bytes": 8},
                    "measured": {"count": 938_271_605 + number % 2, "bytes": 8},
                }
            ],
            "recorded": [4],
            "steady": True,
            "phases": {},
        }
        for number in range(40)
    ]
    screen = io.StringIO()
    report: Any = {"ranks": ranks, "step_time": {"predicted": None, "measured": 0.002}}
    show_report(report, screen)
    assert "…" not in screen.getvalue()
    (even,) = [line for line in screen.getvalue().splitlines() if line.startswith("0, 2, ")]
    assert even.split()[-3:] == ["938271605", "938271605", "none"] and "36, 38  reduce_scatter: count" in even


LATE = """
import torch


class Block(torch.nn.Module):
    late = False

    def __init__(self):
        super().__init__()
        self.layer = torch.nn.Linear(8, 8)

    def forward(self, x):
        y = x + self.layer(x)
        return y.relu() if self.late else y


class Net(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.steps = 0
        self.first, self.last = torch.nn.Linear(64, 8), torch.nn.Linear(8, 10)
        self.blocks = torch.nn.ModuleList(Block() for _ in range(2))

    def forward(self, x):
        self.steps += 1
        x = self.first(x.flatten(1))
        for block in self.blocks:
            block.late = self.steps >= 5
            x = block(x)
        return self.last(x)
"""


@pytest.mark.long
def test_what_is_compiled_in_a_recorded_step_does_not_see_the_recorder(tmp_path: Path) -> None:
    (tmp_path / "late.py").write_text(LATE)
    job = tmp_path / "late.plt"
    job.write_text(
        'model { network = python("late:Net"), loss = cross_entropy() }\ndata { source = digits(), batch = 64 }\n'
        "devices { cpus = 2 }\ntrain { steps = 7, optimizer = sgd(), compile = true }\n"
    )
    run = dslc("run", job, "--profile", "--out", tmp_path / "run")
    assert run.returncode == 0, run.stdout + run.stderr
    for rank in json.loads((tmp_path / "run" / "report.json").read_text())["ranks"]:
        (exchange,) = rank["collectives"]
        assert exchange["measured"] == exchange["predicted"]
