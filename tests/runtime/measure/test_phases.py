"""The phases of a step: what the clock records, and which phase or rank is at fault."""

from __future__ import annotations

import socket
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from helpers.job_texts import job_text
from helpers.launcher import Launcher
from helpers.made_programs import images, program
from helpers.trained import ready, train

from dslc.compiler.ir.codec import to_json
from dslc.compiler.ir.program import StepPhases
from dslc.runtime.data.batches import StepBatch
from dslc.runtime.measure.device_clock import DeviceClock
from dslc.runtime.measure.phases import PhaseClock, comparisons, exposed_within, phases_of_ranks, shows_exposed
from dslc.runtime.measure.slow_steps import (
    STEPS,
    SlowStepWatch,
    compared_phases,
    find_slow_rank,
    folded,
    phase_at_fault,
    phase_numbers,
    slow_step_text,
)

CPU = torch.device("cpu")
COMMAND = "dslc calibrate job.plt -o FILE"
EXPECTED = StepPhases(data=0.002, passes=0.07, exposed=0.01, update=0.01, host=0.008)


def step(**changed: float) -> StepPhases:
    return StepPhases(**{**{name: getattr(EXPECTED, name) for name in EXPECTED.record_names}, **changed})


def one_step(clock: PhaseClock, weight: torch.Tensor) -> None:
    between = clock.wrap_between(lambda batch, total, number: None)

    def work(batch: StepBatch) -> None:
        (weight * weight).sum().backward()
        between(batch, weight, 1)

    clock.wrap(work)(StepBatch([], 1, 0))


def test_phases_add_up_to_the_time_of_a_step() -> None:
    weight = torch.ones(4, requires_grad=True)
    clock = PhaseClock(1, 2, DeviceClock(CPU), [weight])
    for _ in clock.batches(range(3)):
        one_step(clock, weight)
        with clock.pause():
            torch.ones(100, 100) @ torch.ones(100, 100)
    lap = clock.finish_lap()
    assert lap is not None and all(getattr(lap, name) >= 0 for name in lap.record_names)
    assert lap.passes > 0 and lap.exposed > 0 and lap.total >= lap.data + lap.passes + lap.exposed + lap.update
    assert clock.finish_lap() is None, "no step has ended since"
    numbers = clock.share(lap, torch.zeros((), dtype=torch.float64)).tolist()
    assert numbers[:6] == [0.0] * 6 and phases_of_ranks(numbers) == [], "rank 0 has none"
    assert phases_of_ranks([*numbers[6:], *numbers[6:]]) == [lap, lap]


class LateClock(DeviceClock):
    """Marks each count one second, as events of a device that comes past them when `now` says so."""

    is_host = False

    def __init__(self) -> None:
        super().__init__(CPU)
        self.count, self.now = 0.0, 0.0

    def mark(self) -> float:
        self.count += 1
        return self.count

    def is_past(self, mark: Any) -> bool:
        return bool(mark <= self.now)


def test_marks_of_a_device_are_read_when_it_has_come_past_them() -> None:
    late, weight = LateClock(), torch.ones(4, requires_grad=True)
    clock = PhaseClock(0, 1, late, [weight])
    one_step(clock, weight)
    assert clock.finish_lap() is None, "the device has not come past the step"
    late.now = late.count
    one_step(clock, weight)
    lap = clock.finish_lap()
    assert lap is not None
    assert (lap.passes, lap.exposed, lap.update) == (1, 1, 1), "of the first step alone: begin, gradient, end of passes"


def test_only_the_last_gradient_is_marked_after_the_first_step() -> None:
    late, weights = LateClock(), [torch.ones(4, requires_grad=True) for _ in range(3)]
    clock = PhaseClock(0, 1, late, weights)

    def marks_of_a_step() -> float:
        before = late.count
        between = clock.wrap_between(lambda batch, total, number: None)

        def work(batch: StepBatch) -> None:
            (weights[0] * weights[1] * weights[2]).sum().backward()
            between(batch, weights[0], 1)

        clock.wrap(work)(StepBatch([], 1, 0))
        return late.count - before

    assert [marks_of_a_step() for _ in range(3)] == [7, 5, 5]


@pytest.mark.parametrize(
    ("changed", "phase"),
    [
        ({"data": 0.06}, "data"),
        ({"passes": 0.1}, "passes"),
        ({"exposed": 0.05}, "exposed"),
        ({"update": 0.04}, "update"),
        ({"host": 0.03}, "host"),
        ({"data": 0.02}, None),
        ({"passes": 0.01}, None),
        ({"passes": 0.0, "data": 0.12}, "data"),
    ],
)
def test_the_phase_at_fault(changed: dict[str, float], phase: str | None) -> None:
    assert phase_at_fault(step(**changed), EXPECTED) == phase


def test_the_line_has_figures_and_a_remedy() -> None:
    assert slow_step_text(step(data=0.062), EXPECTED, COMMAND) == (
        "slower than expected, 160 ms a step for 100 ms: data loading takes 39% of a step; expected 2%: raise "
        "data.workers"
    )
    assert slow_step_text(step(exposed=0.06), EXPECTED, COMMAND) == (
        "slower than expected, 150 ms a step for 100 ms: waiting for gradients takes 40% of a step; expected 10%: look "
        f"at the links between the ranks, or measure anew with `{COMMAND}`"
    )
    assert slow_step_text(step(passes=0.089), EXPECTED, COMMAND) == "", "by 19%"


def test_an_exchange_that_is_part_of_a_phase_counts_there() -> None:
    assert folded(EXPECTED, "passes") == step(passes=0.08, exposed=0.0)
    assert folded(EXPECTED, "update").update == pytest.approx(0.02)
    assert folded(EXPECTED, "") is EXPECTED


def test_a_slow_rank_is_the_one_that_the_others_wait_for() -> None:
    waiting, slow = step(exposed=0.06), step(passes=0.12)
    found = find_slow_rank([waiting, waiting, slow, waiting], (True,))
    assert found is not None and (found.rank, found.phase, found.seconds, found.others) == (2, "passes", 0.12, 0.07)
    assert find_slow_rank([waiting, waiting, slow], (False,)) is None, "its passes may wait as well"
    slow = step(data=0.06, passes=0.1)
    found = find_slow_rank([slow, step(passes=0.158)], (False,))
    assert found is not None and (found.rank, found.phase) == (0, "data")
    assert find_slow_rank([step(host=0.058, rank_wait=0.05), step(update=0.02)], (True,)) is None
    assert find_slow_rank([slow], (True,)) is None
    kept = [step(passes=0.15), step(data=0.06, passes=0.1)]
    found = find_slow_rank(kept, (True, False))
    assert found is not None and (found.rank, found.phase) == (1, "data"), "rank 0 waits for it within its passes"
    tiny = StepPhases(passes=0.001), StepPhases(passes=0.003)
    assert find_slow_rank(tiny, (True,)) is None, "of some ms, as the system schedules processes"


def watch(expected: StepPhases | None, hosts: tuple[str, ...]) -> SlowStepWatch:
    return SlowStepWatch(expected, within="", ways=(True,), hosts=hosts, calibrate=COMMAND)


def test_each_is_reported_once_after_the_first_steps() -> None:
    ranks, watched = [step(exposed=0.068), step(data=0.06)], watch(EXPECTED, ("a", "b"))
    assert watched.follow(1, [step(data=9.0), step()]) == []
    assert watched.follow(10, ranks) == [] and watched.follow(STEPS - 1, ranks) == []
    assert watched.follow(STEPS, ranks) == [
        "rank 1 on b is slower than the others: data loading takes 60 ms of its step, 2 ms at the median of the "
        "others: raise data.workers",
        "slower than expected, 158 ms a step for 100 ms: data loading takes 38% of a step; expected 2%: raise "
        "data.workers",
    ]
    assert watched.follow(STEPS + 10, ranks) == []


def test_a_step_that_was_slow_by_chance_is_not_reported() -> None:
    watched = watch(EXPECTED, ("a", "a"))
    for number in range(1, 100):
        slow = step(passes=3.0) if number % 3 == 0 else step()
        assert watched.follow(number, [slow, step()]) == []
    without = watch(None, ("a",))
    assert not any(without.follow(number, [step(data=9.0)]) for number in range(100)), "nothing was expected"


def test_what_the_engines_show(tmp_path: Path) -> None:
    data = images(tmp_path)
    two = program(2, data, sync_batch_norm=False)
    assert comparisons(replace(two, sync_batch_norm=True)) == (True, False), "its passes wait for statistics"
    assert shows_exposed(two) and exposed_within(two) == "" and comparisons(two) == (True,)
    one = program(1, data)
    assert not shows_exposed(one) and exposed_within(one) == "" and comparisons(one) == (False,)
    sharded = replace(two, gradients=replace(two.gradients, kind="fsdp"))
    assert not shows_exposed(sharded) and exposed_within(sharded) == "passes" and comparisons(sharded) == (False,)
    assert "seconds.exposed" not in phase_numbers(sharded, [step(), step()])
    assert exposed_within(replace(two, gradients=replace(two.gradients, kind="zero1"))) == "update"
    measured, expected = to_json(step()), step(update=0.02)
    told = compared_phases(replace(sharded, expected=expected), measured)
    assert list(told) == ["data", "passes", "update", "host"], "the exchange is part of the passes"
    assert told["passes"] == {"predicted": pytest.approx(0.08), "measured": pytest.approx(0.08)}
    assert told["update"] == {"predicted": 0.02, "measured": 0.01}
    assert compared_phases(two, None)["exposed"] == {"predicted": None, "measured": None}
    assert phase_numbers(two, [step(exposed=0.06), step(passes=0.12)])["slowest.rank"] == 1
    assert "slowest.rank" not in phase_numbers(two, [step(), step()])


SLOW = """
import os
import time

import torch


class Slow:
    def __len__(self):
        return 64

    def __getitem__(self, index):
        until = time.thread_time() + 0.01 * (os.environ.get("LOCAL_RANK") == "1")
        while time.thread_time() < until:
            pass
        return torch.full((6,), index / 64), index % 3
"""
JOB = job_text(
    model={"network": "[linear(3)]"},
    data={"source": 'python("slow:Slow")', "batch": 8},
    devices={"cpus": 2},
    train={"steps": STEPS},
    log={"every": "5 steps"},
)


def test_a_run_names_the_slow_rank_and_its_phase(launcher: Launcher, tmp_path: Path) -> None:
    (tmp_path / "slow.py").write_text(SLOW)
    (tmp_path / "job.plt").write_text(JOB)
    made = ready(tmp_path / "job.plt")
    run = train(launcher, tmp_path / "run", made.program, made.places, expected=StepPhases(passes=1e-3, host=1e-3))
    lines = [line for line in run.shown.splitlines() if "slower than" in line]
    assert len(lines) == 2, run.shown
    where = f"rank 1 on {socket.gethostname()} is slower than the others: data loading takes "
    assert lines[0].startswith(where) and lines[0].endswith(": raise data.workers")
    assert lines[1].startswith("slower than expected, ") and ": data loading takes " in lines[1]
    assert " a step, expected 2 ms" in run.shown
    last = run.lines[-1]
    assert last["slowest.rank"] == 1 and last["slowest.data"] > last["seconds.data"]
