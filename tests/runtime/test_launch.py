"""Processes begin and end as they should: with status 0 and no process left, however a training ends."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from helpers.launcher import Command, Launcher, write_program
from helpers.made_programs import gpt_model, images, places, program, python, tokens
from helpers.paths import TESTS

from dslc.compiler.ir import program as p
from dslc.runtime.launch import _preload
from dslc.runtime.transport.barriers import Barrier


def small(folder: Path, ranks: int, **changed: Any) -> p.JobProgram:
    return program(ranks, images(folder, train=32, validation=8), **({"steps": 4} | changed))


def run_often(tmp_path: Path, times: int) -> None:
    """gloo's own thread aborts or hangs one plain process of ten at its end (see runtime/worker.py)."""
    for number in range(times):
        job = small(tmp_path, 2)
        with Command(write_program(job, places(2), tmp_path / str(number))) as command:
            status, output = command.end()
            assert (status, command.left()) == (0, []), f"run {number}: {output}"
        assert "trained 4 steps" in output


@pytest.mark.long
@pytest.mark.slow
def test_ten_runs_end_with_status_0_and_leave_no_process(tmp_path: Path) -> None:
    run_often(tmp_path, 10)


@pytest.mark.long
def test_a_hundred_runs_end_with_status_0_and_leave_no_process(tmp_path: Path) -> None:
    run_often(tmp_path, 100)


def test_no_rank_begins_before_all_are_forked() -> None:
    """Also if one of them ends at once."""
    gate, (reading, writing) = Barrier(), os.pipe()

    def rank(number: int) -> None:
        if number != 1:
            os.write(writing, b"here" if number == 3 else b"")
            gate.approach()
            gate.wait()
            os.write(writing, b".")

    ranks = []
    for number in range(4):
        ranks.append(os.fork())
        if not ranks[-1]:
            rank(number)
            os._exit(0)
    os.close(writing)
    gate.open()
    with open(reading, "rb") as told:
        assert told.read() == b"here..."
    assert [os.waitpid(each, 0)[1] for each in ranks] == [0] * 4


def test_ranks_end_with_a_launcher_that_is_killed(tmp_path: Path) -> None:
    with Command(write_program(small(tmp_path, 2, steps=10**6), places(2), tmp_path / "run")) as command:
        command.wait_for("step       1/1000000")
        assert len(command.left()) == 3
        command.process.send_signal(signal.SIGKILL)
        command.end()
        command.wait_for_all()  # the test's own time limit ends this


def test_a_training_goes_on_where_no_one_reads_what_it_shows(tmp_path: Path) -> None:
    job = small(tmp_path, 2, steps=60, evaluate_every=20)
    with Command(write_program(job, places(2), tmp_path / "run")) as command:
        command.wait_for("step  1/60")
        assert command.process.stdout is not None
        command.process.stdout.close()
        assert command.process.wait() == 0
    assert (tmp_path / "run" / "weights.safetensors").exists()


WORKERS = """
import torch

class Samples:
    def __len__(self): return 64
    def __getitem__(self, k): return torch.full((1, 8, 8), k / 64), k % 10

def trouble(output, target):
    trouble.calls = getattr(trouble, "calls", 0) + 1
    if trouble.calls == 3:
        raise ValueError("trouble")
    return torch.nn.functional.cross_entropy(output, target, reduction="none")
"""


@pytest.mark.parametrize("how", ["done", "failed", "killed"])
def test_workers_that_fetch_samples_end_as_well(tmp_path: Path, how: str) -> None:
    (tmp_path / "fetched.py").write_text(WORKERS)
    data = p.DataStep(
        source="python",
        python=python("fetched:Samples", tmp_path),
        train_samples=64,
        validation_samples=0,
        split="none",
        seed=0,
        shuffle=True,
        batch=16,
        last=0,
        workers=2,
        line="made.plt:7:12",
    )
    job = program(2, data, steps=10**6 if how == "killed" else 6)
    if how == "failed":
        job = replace(job, loss=p.LossStep(kind="python", python=python("fetched:trouble", tmp_path)))
    with Command(write_program(job, places(2), tmp_path / "run")) as command:
        if how == "killed":
            command.wait_for("step       1/1000000")
            assert len(command.left()) >= 3 + 4
            command.process.send_signal(signal.SIGKILL)
        status, output = command.end()
        assert status == {"done": 0, "failed": 3, "killed": -signal.SIGKILL}[how], output
        command.wait_for_all()  # the test's own time limit ends this


@pytest.mark.slow
@pytest.mark.cases(3)
@pytest.mark.parametrize("model", ["conv", "gpt", "sharded gpt"])
def test_a_training_that_compiles_nothing_loads_no_compiler(tmp_path: Path, model: str) -> None:
    """The first optimizer, DDP, `backward`, shard, DTensor, recomputation or scaled step would load torch._dynamo, if
    not prevented; DTensors need sympy.
    """
    launcher = Launcher()  # one that has launched nothing which needs more
    (tmp_path / "seen.py").write_text(
        "import sys, torch\n"
        "def loss(output, target):\n"
        "    print([name for name in ('torch._dynamo', 'sympy') if name in sys.modules])\n"
        "    output, target = output.flatten(0, -2), target.flatten()\n"
        "    return torch.nn.functional.cross_entropy(output, target, reduction='none')\n"
    )
    data = images(tmp_path) if model == "conv" else tokens(tmp_path)
    counts: Any = "samples" if model == "conv" else "tokens"
    loss = p.LossStep(kind="python", python=python("seen:loss", tmp_path), counts=counts)
    precision = p.PrecisionStep(dtype="float16", scaled=True) if model == "conv" else p.PrecisionStep()
    job = program(2, data, model=None if model == "conv" else gpt_model(), loss=loss, clip=1.0, precision=precision)
    if model == "sharded gpt":
        again = p.RecomputeStep(kind="selective", modules=("2",))
        job = replace(job, gradients=p.GradientStep(kind="fsdp", units=("2",), reshard=True), recompute=again)
    outcome, _ = launcher.launch(job, places(2), tmp_path / "run")
    launcher.close()
    assert outcome.is_complete, outcome
    lines = (tmp_path / "run" / "logs" / "rank-1.log").read_text().splitlines()
    needed = ["sympy"] if model == "sharded gpt" else []
    assert lines == [str(needed)] * len(lines) and len(lines) >= job.steps


def test_threads_are_shared_out(launcher: Launcher, tmp_path: Path) -> None:
    (tmp_path / "threads.py").write_text(
        "import torch\n"
        "def net():\n"
        "    print('threads', torch.get_num_threads())\n"
        "    return torch.nn.Sequential(torch.nn.Flatten(), torch.nn.Linear(64, 10))\n"
    )
    model = p.ModelStep(python=python("threads:net", tmp_path))
    job = small(tmp_path, 1, model=model, threads=3)
    outcome, _ = launcher.launch(job, places(1), tmp_path / "run")
    assert outcome.is_complete
    assert (tmp_path / "run" / "logs" / "rank-0.log").read_text() == "threads 3\n"


SCRIPT = """
import sys, torch
torch.set_num_threads(2)
torch.randn(1000, 1000) @ torch.randn(1000, 1000)  # a process forked after this would hang
sys.path.insert(0, {tests!r})
from pathlib import Path
from helpers.made_programs import images, places, program
from dslc.compiler.ir import program as p
from dslc.runtime.launch import _preload
from dslc.runtime.launch import run_in_subprocess

def net(width):
    return torch.nn.Sequential(torch.nn.Flatten(), torch.nn.Linear(64, width))

class Screen:
    def __init__(self): self.lines = []
    def write(self, text): self.lines.append(text)
    def flush(self): pass

if __name__ == "__main__":
    model = p.ModelStep(python=p.PythonFunction(function="__main__:net", arguments={{"width": 10}}))
    job = program(2, images(Path({folder!r})), model=model, threads=2, sync_batch_norm=False, steps=4)
    before, sys.stdout = sys.stdout, Screen()
    outcome = run_in_subprocess(job, places(2), {run!r})
    screen, sys.stdout = sys.stdout, before
    assert outcome.is_complete and outcome.steps == 4, outcome
    assert any("trained 4 steps" in line for line in screen.lines), screen.lines
"""


@pytest.mark.slow
def test_from_a_program_that_has_used_torch(tmp_path: Path) -> None:
    """Its output passes through `sys.stdout`, and functions of `__main__` are handed over."""
    script = tmp_path / "script.py"
    tests = str(TESTS)
    script.write_text(SCRIPT.format(tests=tests, folder=str(tmp_path), run=str(tmp_path / "run")))
    done = subprocess.run([sys.executable, script], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    assert (tmp_path / "run" / "weights.safetensors").exists()


@pytest.mark.parametrize(("device", "imported"), [("cpu", True), ("cuda", False)])
def test_what_may_begin_with_cuda_is_not_imported_before_ranks_are_forked(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, device: Any, imported: bool
) -> None:
    """Transformers and peft import torchao, which does."""
    seen: list[object] = []
    monkeypatch.setattr("dslc.runtime.model.transformers_model.preload", seen.append)
    monkeypatch.setattr("dslc.runtime.model.adapters.preload", lambda: seen.append("peft"))
    adapter = p.AdapterStep(rank=2, alpha=2.0, targets=("c_attn",))
    model = p.ModelStep(transformers=p.TransformersStep(name="gpt2"), adapter=adapter)
    _preload(program(2, tokens(tmp_path), model=model, device=device))
    assert bool(seen) == imported
