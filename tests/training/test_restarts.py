"""`launch.restarts`: after a fault of any kind the ranks are started again, and the training is the undisturbed one."""

from __future__ import annotations

import shutil
import signal
from collections.abc import Sequence
from pathlib import Path

import pytest
from helpers.hosts import local_command
from helpers.job_texts import job_text
from helpers.launcher import Command, Launcher
from helpers.paths import HELPERS
from helpers.trained import Trained, ready, without_times

from dslc.runtime.process.failure import Outcome, describe

JOB = job_text(
    model={"network": "[flatten(), linear(16), relu(), linear(10)]"},
    data={"source": "digits()", "batch": 48, "validation": "10%"},
    devices={"cpus": 2},
    train={
        "steps": 12,
        "optimizer": "sgd(lr = 0.1, momentum = 0.9)",
        "hooks": '[python("own_trouble:Trouble", faults = FAULTS, ranks = all)]',
    },
    evaluate={"every": "5 steps"},
    checkpoint={"every": "4 steps", "asynchronous": "false"},
    launch={"restarts": 3},
)


def job_with(folder: Path, *faults: str) -> Path:
    """Writes a job in which there are these faults into a folder of its own."""
    folder.mkdir()
    shutil.copy(HELPERS / "own_trouble.py", folder)
    path = folder / "job.plt"
    listed = ", ".join(f'"{fault}"' for fault in faults)
    path.write_text(JOB.replace("FAULTS", f"[{listed}]"))
    return path


def run(launcher: Launcher, folder: Path, faults: Sequence[str], *settings: str) -> tuple[Outcome, str]:
    """Trains with these faults in `folder`/run; returns the outcome and what was shown."""
    made = ready(job_with(folder, *faults), *settings)
    outcome, shown = launcher.launch(made.program, made.places, folder / "run")
    return outcome, shown


def same(folder: Path, other: Path) -> None:
    """Asserts that two trainings have the same records, each once, and the same weights, to the bit."""
    one, two = Trained(folder / "run"), Trained(other / "run")
    told = [list(map(without_times, each.lines)) for each in (one, two)]
    assert told[0] == told[1]
    assert all((one.weights[name] == two.weights[name]).all() for name in one.weights)


@pytest.fixture(scope="module")
def undisturbed(launcher: Launcher, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("undisturbed") / "job"
    outcome, _ = run(launcher, folder, [])
    assert outcome.is_complete and outcome.restarts == 0
    return folder


@pytest.mark.core
def test_a_training_survives_faults_one_after_another(launcher: Launcher, tmp_path: Path, undisturbed: Path) -> None:
    folder = tmp_path / "job"
    outcome, shown = run(launcher, folder, ["1:6:killed", "0:5:bug", "1:11:crash"])
    assert outcome.is_complete, describe(outcome)
    assert outcome.restarts == 3
    same(folder, undisturbed)
    kinds = ("training failed", "restart", "resumes")  # a rank that lost its connection "has failed", too, in a note
    told = [line for line in shown.splitlines() if any(kind in line for kind in kinds)]
    assert told[0] == "training failed on rank 1 at step 6"
    assert told[1] == "note: restart 1 of 3, from the checkpoint of step 4"
    assert told[2].startswith("resumes after step 4, from ")
    assert told[3].startswith("training failed on rank 0 at step 5 (job.plt:")
    assert told[4] == "note: restart 2 of 3, from the checkpoint of step 4"
    assert told[6] == "training failed on rank 1 at step 11"
    assert told[7] == "note: restart 3 of 3, from the checkpoint of step 8"
    assert told[9].startswith("trained 12 steps in ") and ", after 3 restarts: " in told[9]
    logs = folder / "run" / "logs"
    assert f"the whole log: {logs}/attempt-3/rank-1.log" in shown
    assert "a bug" in (logs / "attempt-2" / "rank-0.log").read_text()
    assert "Segmentation fault" in (logs / "attempt-3" / "rank-1.log").read_text()
    assert (logs / "attempt-4" / "rank-0.log").exists()


def test_a_rank_that_is_stopped_or_leaves_is_started_again(
    launcher: Launcher, tmp_path: Path, undisturbed: Path
) -> None:
    folder = tmp_path / "job"
    outcome, shown = run(launcher, folder, ["0:7:stopped", "1:8:exits"], "launch.timeout=4s")
    assert outcome.is_complete and outcome.restarts == 2, describe(outcome)
    same(folder, undisturbed)
    assert "the process is stopped" in shown and "left with exit status 5" in shown


def test_a_fault_before_the_first_checkpoint_begins_anew(launcher: Launcher, tmp_path: Path, undisturbed: Path) -> None:
    folder = tmp_path / "job"
    outcome, shown = run(launcher, folder, ["1:3:killed"])
    assert outcome.is_complete and outcome.restarts == 1, describe(outcome)
    assert "note: restart 1 of 3, from the first step" in shown
    same(folder, undisturbed)


def test_the_same_exception_in_the_same_step_ends_the_run(launcher: Launcher, tmp_path: Path) -> None:
    outcome, shown = run(launcher, tmp_path / "job", ["1:6:bug", "1:6:other_bug", "1:6:bug"])
    said = describe(outcome)
    assert outcome.restarts == 2
    assert "training failed on rank 1 at step 6" in said and "ValueError: a bug" in said
    assert "note: not restarted: the same exception ended the same step before" in said
    assert "ValueError: another bug" in shown


def test_restarts_are_counted_in_all(launcher: Launcher, tmp_path: Path) -> None:
    faults = ["1:6:killed", "1:10:killed"]
    outcome, _ = run(launcher, tmp_path / "job", faults, "launch.restarts=1")
    assert outcome.restarts == 1
    assert "restarted once, the most that `launch.restarts` allows" in describe(outcome)


def test_a_damaged_checkpoint_is_passed_over(launcher: Launcher, tmp_path: Path, undisturbed: Path) -> None:
    folder = tmp_path / "job"
    outcome, shown = run(launcher, folder, ["1:10:damage"])
    assert outcome.is_complete and outcome.restarts == 1, describe(outcome)
    assert "skipped " in shown and "step-00000008: __" in shown
    assert "resumes after step 4, from " in shown
    same(folder, undisturbed)


def test_a_training_that_is_asked_to_stop_is_not_restarted(launcher: Launcher, tmp_path: Path) -> None:
    outcome, _ = run(launcher, tmp_path / "job", ["1:6:asked"])
    assert outcome.restarts == 0 and "not restarted, as it was asked to stop" in describe(outcome)


@pytest.mark.slow
def test_ctrl_c_after_a_restart_stops_with_a_checkpoint(tmp_path: Path) -> None:
    job = job_with(tmp_path / "job", "1:6:killed")
    command = local_command(["run", str(job), "--out", str(tmp_path / "run"), "--set", "train.steps=100000"])
    with Command(tmp_path / "command", command) as running:
        running.wait_for("resumes after step 4")
        running.process.send_signal(signal.SIGINT)
        status, shown = running.end()
        assert (status, running.left()) == (130, []), shown
    steps = [line["step"] for line in Trained(tmp_path / "run").lines if line["split"] == "train"]
    assert steps == list(range(1, len(steps) + 1))
    assert (tmp_path / "run" / "checkpoints" / f"step-{len(steps):08}").exists()
    assert "stopped after" in shown and ", after 1 restart" in shown


# Those whose state lies between two steps; async_average has no undisturbed run to compare with.
EXCHANGES = (
    "parallelism.gradients=powersgd(rank = 2)",
    "parallelism.gradients=bytegrad()",
    "parallelism.gradients=decentralized(peers = shift_one)",
    "parallelism.gradients=low_precision_decentralized()",
    "parallelism.gradients=local_sgd(period = 3)",
    "parallelism.gradients=diloco(period = 3)",
    "train.optimizer=qadam(warmup = 3)",
    "train.optimizer=onebit_adam(freeze = 3)",
)


@pytest.mark.parametrize("exchange", EXCHANGES)
def test_a_killed_training_goes_on_with_its_exchange(launcher: Launcher, tmp_path: Path, exchange: str) -> None:
    for name, faults in (("whole", []), ("killed", ["1:7:killed"])):
        outcome, _ = run(launcher, tmp_path / name, faults, exchange)
        assert outcome.is_complete and outcome.restarts == len(faults), describe(outcome)
    same(tmp_path / "killed", tmp_path / "whole")
