"""Ctrl-C stops all ranks after one and the same step, with everything written and no process left."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import textwrap
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from helpers.launcher import Command, write_program
from helpers.made_programs import images, places, program, python
from helpers.paths import TESTS
from safetensors.numpy import load_file

from dslc.compiler.ir import program as p
from dslc.runtime.agent import Agent
from dslc.runtime.process.records import read_metrics
from dslc.runtime.process.stop import SECOND, RunControl

MODEL = """
import os, threading, torch

class Net(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = torch.nn.Linear(64, 10)
        self.register_buffer("steps", torch.zeros((), dtype=torch.int64))
        self.step = 0

    def forward(self, x):
        if self.training:
            self.step += 1
            self.steps += 1
            print("forward", self.step, flush=True)
            if self.step == {hang}:
                threading.Event().wait()
        return self.linear(x.flatten(1))
"""


def start(folder: Path, ranks: int, hang: int = 0, **changed: Any) -> Command:
    (folder / "net.py").write_text(MODEL.format(hang=hang))
    values: dict[str, Any] = {
        "model": p.ModelStep(python=python("net:Net", folder)),
        "sync_batch_norm": False,
        "steps": 10**6,
        "log_every": 50,
    }
    job = program(ranks, images(folder), **(values | changed))
    return Command(write_program(job, places(ranks), folder / "run"))


@pytest.mark.slow
@pytest.mark.parametrize("ranks", [1, 2, 4])
@pytest.mark.parametrize("how", ["a Ctrl-C to all of them", "a SIGTERM to all of them", "a SIGTERM to the launcher"])
def test_all_ranks_stop_after_the_same_step(tmp_path: Path, ranks: int, how: str) -> None:
    with start(tmp_path, ranks) as command:
        command.wait_for("step       1/1000000")
        if how.endswith("to all of them"):
            os.killpg(command.process.pid, signal.SIGINT if "Ctrl-C" in how else signal.SIGTERM)
        else:
            command.process.send_signal(signal.SIGTERM)
        status, output = command.end()
        assert (status, command.left()) == (130, []), output
    logs = [(tmp_path / "run" / "logs" / f"rank-{rank}.log").read_text() for rank in range(ranks)]
    (last,) = {log.splitlines()[-1] for log in logs}
    step = int(last.removeprefix("forward "))
    assert f"stopped after {step} steps" in output
    record = read_metrics(str(tmp_path / "run"))[-1]
    assert (record["step"], record["split"], record["samples"]) == (step, "train", 16 * step)
    assert load_file(tmp_path / "run" / "weights.safetensors")["steps"] == step


@pytest.mark.slow
@pytest.mark.parametrize("log", ["can be written", "is removed", "is a folder"])
def test_a_second_time_ends_at_once(tmp_path: Path, log: str) -> None:
    """torch's agent writes this into the launcher's log, if it can."""
    with start(tmp_path, 2, hang=2) as command:
        command.wait_for("step       1/1000000")
        if log == "is removed":
            shutil.rmtree(tmp_path / "run" / "logs")
        elif log == "is a folder":
            (tmp_path / "run" / "logs" / "launcher.log").mkdir()
        os.killpg(command.process.pid, signal.SIGINT)
        command.wait_for("stopping after this step")
        with pytest.raises(subprocess.TimeoutExpired):
            command.process.wait(1.5 * SECOND)  # sooner a second one counts as the same
        os.killpg(command.process.pid, signal.SIGINT)
        status, output = command.end()
        assert (status, command.left()) == (130, []), output
    assert "ended at once" in output and "Traceback" not in output
    assert log != "can be written" or "signal" in (tmp_path / "run" / "logs" / "launcher.log").read_text()
    assert not (tmp_path / "run" / "weights.safetensors").exists()


def test_a_job_in_the_background_ignores_what_its_shell_ignores(tmp_path: Path) -> None:
    before = signal.signal(signal.SIGINT, signal.SIG_IGN)  # as `sh -c 'command &'` does, and the child inherits it
    try:
        command = start(tmp_path, 2, steps=1000)
    finally:
        signal.signal(signal.SIGINT, before)
    with command:
        command.wait_for("step    1/1000")
        os.killpg(command.process.pid, signal.SIGINT)
        status, output = command.end()
    assert status == 0 and "trained 1000 steps" in output


SCRIPT = """
import sys
sys.path.insert(0, {tests!r})
from pathlib import Path
from types import SimpleNamespace
from helpers.made_programs import images, places, program, python
from dslc.compiler.ir import program as p
from dslc.runtime.launch import run_in_subprocess

folder = Path({folder!r})
model = p.ModelStep(python=python("net:Net", folder))
job = program(2, images(folder), model=model, sync_batch_norm=False, steps=10**6)
outcome = run_in_subprocess(job, places(2), str(folder / "run"))
print("outcome", outcome.stopped_at, flush=True)
"""


def test_ctrl_c_in_a_program_stops_the_training_that_it_runs(tmp_path: Path) -> None:
    (tmp_path / "net.py").write_text(MODEL.format(hang=0))
    tests = str(TESTS)
    script = SCRIPT.format(tests=tests, folder=str(tmp_path))
    with Command(tmp_path, [sys.executable, "-c", script]) as command:
        command.wait_for("step       1/1000000")
        command.process.send_signal(signal.SIGINT)
        status, output = command.end()
        assert (status, command.left()) == (0, []), output
    steps = read_metrics(str(tmp_path / "run"))[-1]["step"]
    assert output.endswith(f"outcome {steps}\n"), output


# In the process that trains, as it begins to load torch: a Ctrl-C to the program that has started it.
EARLY = """
import os, signal, sys

class Early:
    def find_spec(self, name, path=None, target=None):
        if name == "torch":
            sys.meta_path.remove(self)
            os.kill(os.getppid(), signal.SIGINT)
            signal.pause()

sys.meta_path.insert(0, Early())
"""


def test_an_early_ctrl_c_in_a_program_leaves_no_traceback(tmp_path: Path) -> None:
    (tmp_path / "sitecustomize.py").write_text(EARLY)
    tests = str(TESTS)
    run = SCRIPT.format(tests=tests, folder=str(tmp_path)).replace(
        "outcome = ", "sys.path.insert(0, str(folder))\noutcome = "
    )
    script = "try:\n" + textwrap.indent(run, "    ") + "\nexcept KeyboardInterrupt:\n    print('interrupted')\n"
    with Command(tmp_path, [sys.executable, "-c", script]) as command:
        status, output = command.end()
        assert (status, output, command.left()) == (0, "interrupted\n", [])


def test_the_board() -> None:
    board = RunControl(3)
    board.answer(4)
    assert board.stop_at == 0, "nobody has asked"
    board.request_stop()
    board.answer(5)
    board.answer(6)
    assert board.stop_at == 5, "said once, it stays"
    board.enter(2, 7)
    board.say(1, "seven steps", done=True)
    assert [board.step(rank) for rank in range(3)] == [0, 0, 7]
    assert [board.has_finished(rank) for rank in range(3)] == [False, True, False]


def test_who_is_done_is_never_seen_with_words_and_not_done() -> None:
    """The launcher may read between any two writes of a rank; the words of a rank that is not done are those of a
    failure.
    """
    board = RunControl(2)
    numbers, seen = board._numbers, []

    class Watched:
        def __getitem__(self, index: int) -> int:
            return numbers[index]

        def __setitem__(self, index: int, value: int) -> None:
            numbers[index] = value
            seen.append((board.last_message(1), board.has_finished(1)))

    board._numbers = Watched()  # type: ignore[assignment]
    board.say(1, "three steps", done=True)
    assert seen == [("three steps", True)]
    board.say(0, "an error")
    assert (board.last_message(0), board.has_finished(0), board.all_done) == ("an error", False, False)


def test_a_rank_that_is_done_between_two_questions_has_not_failed() -> None:
    board = RunControl(1)
    numbers = board._numbers

    class Done:
        """Numbers of a board whose rank is done as soon as one of them was read."""

        def __getitem__(self, index: int) -> int:
            found = numbers[index]
            board._numbers = numbers
            board.say(0, "three steps", done=True)
            return found

    board._numbers = Done()  # type: ignore[assignment]
    agent = SimpleNamespace(_board=board, _statuses=lambda: {0: None}, _ranks=lambda: range(1))
    assert not Agent._has_failed(agent)  # type: ignore[arg-type]
    assert board.all_done
