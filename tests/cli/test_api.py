"""`import dslc`: check, compile and run, also from a program that has used torch and defines its own network."""

from __future__ import annotations

import os
import pickle
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from helpers.paths import EXAMPLES

import dslc
from dslc.dsl.diagnostics import JobError
from dslc.probe.child import in_child

DIGITS = str(EXAMPLES / "digits.plt")


def test_check_gives_diagnostics() -> None:
    assert dslc.check(DIGITS) == ()
    (found,) = dslc.check(DIGITS, ["data.batch=63"])
    assert (found.code, found.severity) == ("E0301", "error")


def test_check_in_a_fresh_interpreter_imports_neither_torch_nor_networkx() -> None:
    lines = ("import sys, dslc", f"assert dslc.check({DIGITS!r}) == ()", "print(*sys.modules)")
    code = "\n".join((*lines, f"dslc.compile({DIGITS!r}).plan.text()", "print(*sys.modules)"))
    told = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    checked, compiled = told.stdout.splitlines()
    assert not {"torch", "networkx", "numpy", "cattrs", "rich"} & set(checked.split())
    assert not {"platform", "dslc.jobs.choose_plan"} & set(checked.split()), "few jobs need them"
    assert not {"torch", "numpy", "cattrs", "rich"} & set(compiled.split()), "a plan is written without them too"


def test_compile_gives_a_plan_or_raises_all_mistakes() -> None:
    plan = dslc.compile(DIGITS).plan
    assert (plan.world_size, plan.parameters) == (2, 14634)
    with pytest.raises(JobError) as raised:
        dslc.compile(DIGITS, ["data.batch=63", "train.optimizer.lr=-1"])
    assert {d.code for d in raised.value.diagnostics} >= {"E0125"}


def test_the_text_of_a_job_error_is_its_mistakes() -> None:
    with pytest.raises(JobError) as raised:
        dslc.compile(DIGITS, ["data.batch=63"])
    text = str(raised.value)
    assert text.startswith("error[E0301]: a global batch of 63 cannot be shared out over 2 data-parallel ranks")
    assert "--> <--set 1>:1:12" in text and text.endswith("1 error")
    assert str(pickle.loads(pickle.dumps(raised.value))) == text, "as it comes from another process"


def test_run_returns_metrics_and_the_trained_module(tmp_path: Path) -> None:
    (torch.randn(256, 256) @ torch.randn(256, 256)).sum()  # after this a fork is not safe
    result = dslc.run(DIGITS, ["train.epochs=1"], out=str(tmp_path / "run"))
    assert result.metrics[-1]["split"] == "validation"
    assert result.metrics[-1]["accuracy"] > 0.8
    assert result.stopped_at is None
    output = result.module(torch.zeros(3, 1, 8, 8))
    assert output.shape == (3, 10)
    assert not result.module.training


NOTEBOOK = """
import sys
import torch
from torch import nn

import dslc

torch.randn(512, 512) @ torch.randn(512, 512)
width = 7  # cannot be pickled by name: the function below exists only in this program

def network():
    return nn.Sequential(nn.Flatten(), nn.Linear(64, width), nn.ReLU(), nn.Linear(width, 10))

result = dslc.run(sys.argv[1], ['model.network=python("__main__:network")', "train.steps=3"], out=sys.argv[2])
print("hidden", result.module[1].out_features, "steps", result.metrics[-2]["step"])
"""


@pytest.mark.slow
def test_a_program_trains_a_network_of_its_own(tmp_path: Path) -> None:
    script = tmp_path / "notebook.py"
    script.write_text(NOTEBOOK)
    run = subprocess.run(
        [sys.executable, str(script), DIGITS, str(tmp_path / "run")], capture_output=True, text=True, check=False
    )
    assert run.returncode == 0, run.stderr
    assert "hidden 7 steps 3" in run.stdout
    assert "validation" in run.stdout, "the progress of the training is passed through"


def test_a_program_whose_children_may_not_use_torch_traces_by_itself(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """For example one that has run a backward pass on a machine with GPUs. It keeps its random numbers and its
    threads.
    """
    (tmp_path / "seeing.py").write_text(
        "import torch\n"
        "built = []\n"
        "def network():\n"
        "    built.append(torch.get_num_threads())\n"
        "    return torch.nn.Sequential(torch.nn.Flatten(), torch.nn.Linear(64, 10))\n"
        "def loss(output, target):\n"
        "    return torch.nn.functional.cross_entropy(output, target, reduction='none')\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setattr("dslc.probe.child._torch_is_barred", lambda: True)
    assert in_child(lambda: 1) == {"made": 1, "left": ""}
    threads, state = torch.get_num_threads(), torch.get_rng_state()
    compiled = dslc.compile(DIGITS, ['model.network=python("seeing:network")'], trace=True)
    assert compiled.plan.parameters == 650
    assert sys.modules["seeing"].built
    for _ in range(2):
        dslc.compile(DIGITS, ['model.network=python("seeing:network")', 'model.loss=python("seeing:loss")'], trace=True)
    assert not torch.distributed.is_initialized() and "WORLD_SIZE" not in os.environ
    assert torch.get_num_threads() == threads
    assert torch.equal(torch.get_rng_state(), state)
    with pytest.raises(JobError) as raised:
        dslc.compile(DIGITS, ['model.network=python("seeing:other")'], trace=True)
    assert [d.code for d in raised.value.diagnostics] == ["E0802"]


def test_a_failed_training_raises_with_rank_step_and_line(tmp_path: Path) -> None:
    (tmp_path / "bad.py").write_text(
        "import torch\n"
        "class Net(torch.nn.Module):\n"
        "    def __init__(self):\n"
        "        super().__init__()\n"
        "        self.layer, self.calls = torch.nn.Linear(64, 10), 0\n"
        "    def forward(self, x):\n"
        "        self.calls += type(x) is torch.Tensor\n"
        "        if self.calls == 3:\n"
        "            raise ValueError('three is enough')\n"
        "        return self.layer(x.flatten(1))\n"
    )
    job = tmp_path / "bad.plt"
    job.write_text(
        'model {\n  network = python("bad:Net")\n  loss = cross_entropy()\n}\n'
        "data { source = digits(), batch = 32 }\ndevices { cpus = 2 }\ntrain { steps = 9, optimizer = sgd() }\n"
    )
    from dslc.python_api.functions import TrainingError

    with pytest.raises(TrainingError) as raised:
        dslc.run(str(job), out=str(tmp_path / "run"))
    message = str(raised.value)
    assert "step 3" in message
    assert "three is enough" in message
    assert "bad.py" in message
    assert "rank-" in message
