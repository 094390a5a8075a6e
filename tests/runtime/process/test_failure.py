"""One rank's failure ends the whole training, and the message names that failure, not its consequences."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from helpers.launcher import Command, Launcher, write_program
from helpers.made_programs import conv_model, images, places, program, python

from dslc.compiler.ir import program as p
from dslc.compiler.ir.memory import LayerShare, MemoryNode
from dslc.runtime.process.failure import Outcome, describe, record
from dslc.runtime.process.stop import RunControl

MODEL = """
import os, signal, sys, threading, torch

class Net(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = torch.nn.Linear(64, 10)
        self.step = 0

    def forward(self, x):
        self.step += 1
        if self.step == 3 and os.environ["RANK"] == "1":
            self.trouble()
        return self.linear(x.flatten(1))

    def trouble(self):
        {trouble}
"""


def fail(launcher: Launcher, folder: Path, trouble: str, ranks: int = 2, **changed: Any) -> tuple[Outcome, str]:
    """The outcome of a training in which rank 1 does `trouble` at step 3, and the message."""
    (folder / "net.py").write_text(MODEL.format(trouble=trouble))
    model = p.ModelStep(python=python("net:Net", folder))
    job = program(ranks, images(folder), model=model, sync_batch_norm=False, **changed)
    outcome, _ = launcher.launch(job, places(ranks), folder / "run")
    assert outcome.failure is not None
    return outcome, describe(outcome)


def test_an_exception(launcher: Launcher, tmp_path: Path) -> None:
    outcome, message = fail(launcher, tmp_path, "raise ValueError('wrong\\nin two lines')", ranks=4)
    log = tmp_path / "run" / "logs" / "rank-1.log"
    assert message.splitlines() == [
        "training failed on rank 1 at step 3 (made.plt:3:13)",
        f'  File "{tmp_path}/net.py", line 13, in forward',
        "    self.trouble()",
        f'  File "{tmp_path}/net.py", line 17, in trouble',
        "    raise ValueError('wrong\\nin two lines')",
        "  ValueError: wrong",
        "  in two lines",
        f"the whole log: {log}",
    ]
    assert outcome.steps == 2
    assert "Traceback" in log.read_text()
    assert len((tmp_path / "run" / "metrics.jsonl").read_text().splitlines()) == 2
    assert not (tmp_path / "run" / "weights.safetensors").exists()


def test_an_exception_that_is_its_own_cause(launcher: Launcher, tmp_path: Path) -> None:
    again = """
        try:
            raise ValueError('wrong')
        except ValueError as error:
            raise error from error"""
    _, message = fail(launcher, tmp_path, again)
    assert "training failed on rank 1 at step 3" in message and "  ValueError: wrong" in message


def test_an_error_of_torch_over_the_users_own_lines(launcher: Launcher, tmp_path: Path) -> None:
    _, message = fail(launcher, tmp_path, "return self.linear(torch.zeros(2, 3))")
    assert "  RuntimeError: " in message and "mat1 and mat2 shapes cannot be multiplied (2x3 and 64x10)" in message
    assert "site-packages/torch" not in message and "line 17, in trouble" in message


def test_memory_that_runs_out_beside_the_plan(launcher: Launcher, tmp_path: Path) -> None:
    """As rank 1's pipeline coordinate is planned."""
    other, mine = (
        MemoryNode(
            parameters=n << 20,
            gradients=0,
            optimizer=0,
            activations=5 << 20,
            buffers=0,
            communication=0,
            when="backward pass of linear",
            layers=(LayerShare(name="linear", bytes=4 << 20),),
            rest=n << 20,
        )
        for n in (7, 3)
    )
    memory: dict[str, Any] = {"memory": (other, mine), "memory_limit": 1 << 30}
    _, message = fail(launcher, tmp_path, "torch.empty(2**60, dtype=torch.uint8)", **memory)
    assert [line for line in message.splitlines() if line.startswith("note: ")] == [
        "note: the plan expects it to hold 8 MiB at its peak (backward pass of linear), of 1 GiB that it may "
        "hold: activations 5 MiB, parameters 3 MiB",
        "note: these layers hold most of the activations: linear 4 MiB",
        "note: between two steps it should hold 3 MiB",
    ]
    _, message = fail(launcher, tmp_path, "raise ValueError('other')", **memory)
    assert "note" not in message


def test_what_torch_wraps_in_stages_is_taken_out(tmp_path: Path) -> None:
    """Otherwise the message would only name the stage, even if another rank is gone."""
    from torch.distributed.pipelining._backward import stage_backward_input

    job = program(1, images(tmp_path))
    (tmp_path / "logs").mkdir()
    input = torch.randn(3, requires_grad=True)
    with pytest.raises(RuntimeError, match="Failed to run stage backward") as caught:
        stage_backward_input([(2 * input).view(3, 1)], [torch.ones(3, 1)], [input], iter(()))
    said = record(str(tmp_path), RunControl(1), 0, caught.value, job, None)
    assert said.message.startswith("RuntimeError: Can't detach views in-place")

    error = RuntimeError("Failed to run stage backward")
    error.__cause__ = RuntimeError("Connection closed by peer")
    error.__traceback__, error.__cause__.__traceback__ = caught.value.__traceback__, caught.value.__traceback__
    assert record(str(tmp_path), RunControl(1), 0, error, job, None).kind == "lost"


@pytest.mark.parametrize(
    ("trouble", "words"),
    [
        ("os.kill(os.getpid(), signal.SIGKILL)", "the process was ended by SIGKILL"),
        ("os.kill(os.getpid(), signal.SIGSEGV)", "the process was ended by SIGSEGV"),
        ("sys.exit(0)", "the user's code left by sys.exit(0)"),
        ("os._exit(7)", "the process left with exit status 7, without an exception"),
        ("os._exit(0)", "the process left with exit status 0, without an exception"),
    ],
)
def test_a_process_that_ends(launcher: Launcher, tmp_path: Path, trouble: str, words: str) -> None:
    _, message = fail(launcher, tmp_path, trouble)
    assert message.startswith("training failed on rank 1 at step 3"), message
    assert words in message
    assert ("memory" in message) == ("SIGKILL" in words)


def test_the_last_words_of_a_process_that_a_signal_ends(launcher: Launcher, tmp_path: Path) -> None:
    """For example those of a C++ library with an uncaught exception."""
    words = "terminate called after throwing an instance of 'gloo::EnforceNotMet'"
    _, message = fail(launcher, tmp_path, f'os.write(2, b"{words}\\n"); os.kill(os.getpid(), signal.SIGABRT)')
    assert "the process was ended by SIGABRT" in message
    assert f"note: its last output: {words}" in message
    assert f'note: it was in File "{tmp_path}/net.py", line 17, in trouble' in message


def test_a_lone_process_that_leaves_with_status_0(launcher: Launcher, tmp_path: Path) -> None:
    (tmp_path / "net.py").write_text("import os\ndef net():\n    os._exit(0)\n")
    model = p.ModelStep(python=python("net:net", tmp_path))
    outcome, _ = launcher.launch(program(1, images(tmp_path), model=model), places(1), tmp_path / "run")
    assert "training failed on rank 0 before the first step" in describe(outcome)
    assert "exit status 0, without an exception" in describe(outcome)


def test_a_rank_that_hangs(launcher: Launcher, tmp_path: Path) -> None:
    """The line is the user's own, although it waits within Python's library."""
    _, message = fail(launcher, tmp_path, "threading.Event().wait()", timeout=3.0)
    assert message.startswith("training failed on rank 0 at step 3"), message
    assert "a collective waited longer than `launch.timeout` (3 s)" in message
    assert "note: rank 1 is before the all-reduce of the order of modules, in the forward pass of step 3" in message
    assert "; rank 0 has waited in it for 3 s; " in message
    assert f"rank 1's last line of Python is {tmp_path}/net.py:17, in trouble" in message


def test_an_error_of_a_library_layer_names_its_line(launcher: Launcher, tmp_path: Path) -> None:
    model = conv_model()
    assert model.root is not None
    *layers, last = model.root.children
    narrow = p.ModuleStep(name="9", kind="Linear", arguments={"in_features": 5, "out_features": 10}, line=last.line)
    inits = [init for init in model.inits if init.parameter != "9.weight"]
    weight = p.InitStep(parameter="9.weight", shape=(10, 5), kind="constant", a=0.0)
    root = p.ModuleStep(name="", kind="Sequential", children=(*layers, narrow))
    wrong = p.ModelStep(root=root, inits=(*inits, weight))
    outcome, _ = launcher.launch(program(2, images(tmp_path), model=wrong), places(2), tmp_path / "run")
    assert outcome.failure is not None
    assert (outcome.failure.step, outcome.failure.line) == (1, "digits.plt:8:18")


def test_errors_of_data_and_loss_name_their_lines(launcher: Launcher, tmp_path: Path) -> None:
    data = images(tmp_path)
    missing = program(2, images(tmp_path, train_samples=90))
    outcome, _ = launcher.launch(missing, places(2), tmp_path / "data")
    assert outcome.failure is not None
    assert (outcome.failure.step, outcome.failure.line) == (0, "made.plt:7:12")
    loss = program(2, data, loss=p.LossStep(kind="mse", line="made.plt:4:13"))
    outcome, _ = launcher.launch(loss, places(2), tmp_path / "loss")
    assert outcome.failure is not None
    assert (outcome.failure.step, outcome.failure.line) == (1, "made.plt:4:13")


def test_the_command_ends_with_status_3_and_one_message(tmp_path: Path) -> None:
    job = program(2, images(tmp_path), loss=p.LossStep(kind="mse", line="made.plt:4:13"))
    with Command(write_program(job, places(2), tmp_path / "run")) as command:
        status, output = command.end()
        assert (status, command.left()) == (3, [])
    first, second, third = output.splitlines()
    assert first.startswith("training failed on rank") and first.endswith("at step 1 (made.plt:4:13)")
    assert second == "  an output of shape (8, 10) and a target of (8,)"
    assert third.startswith("the whole log: ")
