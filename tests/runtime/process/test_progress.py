"""The display: a bar on a terminal, plain lines in a pipe, and in both the same summary."""

from __future__ import annotations

import io
from pathlib import Path
from typing import Any

import pytest
from helpers.made_programs import images, program

from dslc.compiler.ir.program import StepPhases
from dslc.launching.run_state import run_states
from dslc.runtime.process.failure import Failure, Outcome
from dslc.runtime.process.progress import Watch
from dslc.runtime.process.records import Records
from dslc.runtime.process.stop import RunControl


class Screen(io.StringIO):
    def __init__(self, terminal: bool) -> None:
        super().__init__()
        self._terminal = terminal

    def isatty(self) -> bool:
        return self._terminal


def shown(tmp_path: Path, screen: Screen, outcome: Outcome, **changed: Any) -> str:
    """Returns the display of eight steps with an evaluation."""
    board = RunControl(2)
    watch = Watch(program(2, images(tmp_path), **changed), str(tmp_path), board, screen)
    records = Records(str(tmp_path))
    board.records = records.begin
    watch.look()
    for step in range(1, 9):
        board.enter(0, step)
        line = {"step": step, "split": "train", "loss": 2.5 / step, "lr": 0.1, "samples": 16, "seconds": step}
        records.write({**line, "seconds.data": 0.03, "seconds.passes": 0.05, "slowest.rank": 1, "slowest.data": 0.9})
        watch.look()
    records.write({"step": 8, "split": "validation", "loss": 0.5, "accuracy": 0.875, "samples": 16, "seconds": 9.0})
    watch.close(outcome)
    return screen.getvalue()


@pytest.mark.parametrize("terminal", [True, False])
def test_a_training_that_is_done(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, terminal: bool) -> None:
    monkeypatch.delenv("CI", raising=False)
    monkeypatch.setenv("TERM", "xterm")
    text = shown(tmp_path, Screen(terminal), Outcome(run_dir=str(tmp_path), steps=8))
    assert ("\x1b" in text) == terminal
    assert ("8/8" in text) and ("samples/s" in text) == terminal
    *_, trained, validation, folder = text.splitlines()
    assert trained.endswith("trained 8 steps in 9.0 s: loss 0.3125")
    assert validation == "validation: loss 0.5  accuracy 0.875"
    assert folder == f"weights, metrics and logs are in {tmp_path}"


def test_a_pipe_gets_few_lines(tmp_path: Path) -> None:
    text = shown(tmp_path, Screen(False), Outcome(run_dir=str(tmp_path), steps=8))
    assert text.splitlines()[:2] == ["step 1/8  loss 2.5", "step 8/8  validation  loss 0.5  accuracy 0.875"]


@pytest.mark.parametrize("terminal", [True, False])
def test_a_step_is_shown_beside_the_predicted_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, terminal: bool
) -> None:
    monkeypatch.delenv("CI", raising=False)
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setenv("COLUMNS", "200")
    outcome = Outcome(run_dir=str(tmp_path), steps=8)
    text = shown(tmp_path, Screen(terminal), outcome, expected=StepPhases(data=0.01, passes=0.06))
    assert "loss 2.5  80 ms a step, expected 70 ms" in text
    (state,) = run_states([str(tmp_path)])
    assert state.line() == (
        "done after 8 steps, loss 0.3125, validation loss 0.5, validation accuracy 0.875, 80 ms a step, expected 70 ms"
    )


def test_ci_gets_no_control_characters(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CI", "true")
    assert "\x1b" not in shown(tmp_path, Screen(True), Outcome(run_dir=str(tmp_path), steps=8))


def test_a_failure_has_no_summary(tmp_path: Path) -> None:
    failure = Failure(rank=1, step=8, kind="error", message="no")
    text = shown(tmp_path, Screen(False), Outcome(run_dir=str(tmp_path), steps=7, failure=failure))
    assert "trained" not in text and "weights" not in text


def test_a_stop_names_its_step(tmp_path: Path) -> None:
    text = shown(tmp_path, Screen(False), Outcome(run_dir=str(tmp_path), steps=5, stopped_at=5))
    assert "stopped after 5 steps of 8" in text and "validation:" not in text
