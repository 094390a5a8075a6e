"""`dslc verify`: a plan that trains as one process does passes, and each way to break it is named."""

from __future__ import annotations

import dataclasses
import json
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from helpers.commands import dslc
from helpers.job_texts import job_text
from helpers.launcher import Launcher
from helpers.made_programs import images, places, program

from dslc.compiler.ir.codec import to_json
from dslc.compiler.ir.program import ObserveMode
from dslc.compiler.placement.layout import lay_out
from dslc.dsl.diagnostics import Report
from dslc.dsl.meaning.load import load
from dslc.jobs.check_job import inspect
from dslc.runtime.measure.observe import Observation, StepObservation
from dslc.verification.comparison import Rounding, Verdict, compare, compare_resumed
from dslc.verification.variants import shrink_job

JOB = job_text(
    model={"network": 'python("own:net")', "loss": 'python("own:loss")'},
    data={"source": 'python("own:data")', "batch": 8},
    devices={"cpus": 2},
    train={"steps": 10, "optimizer": "sgd(lr = 0.1, momentum = 0.9)"},
    log=None,
)
# `{…}` is where a test breaks it.
OWN = """
import os
import torch
from torch import nn

class Samples(torch.utils.data.Dataset):
    def __init__(self):
        random = torch.Generator().manual_seed(0)
        self.inputs = torch.randn(41, 6, generator=random)
        self.targets = self.inputs.sum(1).gt(0).long()
    def __len__(self):
        return 41
    def __getitem__(self, index):
        input, target = self.inputs[index], self.targets[index]
        SAMPLE
        return input, target

def data():
    return Samples()

class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.inner = nn.Sequential(nn.Linear(6, 16), nn.Tanh(), nn.Dropout(0.2), nn.Linear(16, 2))
        NET
    def forward(self, x):
        FORWARD
        return self.inner(x)

def net():
    return Net()

def loss(output, target):
    each = nn.functional.cross_entropy(output, target, reduction="none")
    LOSS
    return each

def rate(step, steps, last):
    return 1 - (1 - last) * step / steps

class Heavy(torch.optim.Optimizer):
    def __init__(self, params, lr, weight_decay=0.1):
        super().__init__(params, {"lr": lr, "weight_decay": weight_decay})
        for group in self.param_groups:
            for p in group["params"]:
                self.state[p]["kept"] = torch.zeros_like(p)

    @torch.no_grad()
    def step(self):
        for group in self.param_groups:
            for p in group["params"]:
                kept = self.state[p]["kept"]
                kept.mul_(0.9).add_(p.grad + group["weight_decay"] * p)
                p.add_(kept, alpha=-group["lr"])
"""
LIBRARY = job_text(
    model={"network": "gpt(layers = 2, width = 32, heads = 2, context = 16, vocab = 256, tie = true, dropout = 0.1)"},
    data={"source": "stdlib()", "batch": 10},
    devices={"cpus": 2},
    train={"steps": 20, "optimizer": "adamw(lr = 1e-3)", "clip": "1.0"},
    log=None,
)


def verify(folder: Path, text: str, *settings: str, **broken: str) -> subprocess.CompletedProcess[str]:
    own = OWN
    for place in ("SAMPLE", "NET", "FORWARD", "LOSS"):
        own = own.replace(place, broken.get(place.lower(), "pass"))
    (folder / "own.py").write_text(own)
    (folder / "job.plt").write_text(text)
    words = (word for each in settings for word in ((each,) if each.startswith("--") else ("--set", each)))
    return dslc("verify", "job.plt", *words, cwd=folder)


def line_of(shown: str, title: str) -> str:
    """Returns the lines on one invariant."""
    lines = shown.splitlines()
    start = next(n for n, line in enumerate(lines) if line[2:].startswith(title))
    stop = next(n for n, line in enumerate(lines) if n > start and not line.startswith(" "))
    return "\n".join(lines[start:stop])


def test_sharded_and_recomputed_is_one_process(tmp_path: Path) -> None:
    run = verify(tmp_path, LIBRARY, "parallelism.zero=3", "memory.recompute=full")
    assert run.returncode == 0, run.stdout + run.stderr
    for title in ("same samples", "same start", "same scale", "same state"):
        assert "holds" in line_of(run.stdout, title)
    assert "resumed from the checkpoint of step 2" in line_of(run.stdout, "same state")
    assert "dropout" not in run.stdout, "it stays on, as all ranks draw what one process draws"
    assert run.stdout.splitlines()[1].split().count("rounding") == 2, "each loss and norm as a share of it"
    assert re.search(r"note: a parameter differs by at most \d+% of what rounding explains \(`", run.stdout)
    assert not list(tmp_path.glob("runs*")), "nothing is left"


@pytest.mark.slow
def test_a_users_own_is_one_process(tmp_path: Path) -> None:
    """In two micro-batches, and with an uneven last batch of the epoch."""
    settings = (
        "data.batch=36",
        "data.last_batch=keep",
        "data.workers=1",
        'train.lr_schedule=python("own:rate", last=0.5)',
        'train.optimizer=python("own:Heavy", lr=0.1)',
        'train.no_decay=["*.bias"]',
    )
    run = verify(tmp_path, JOB, *settings, "parallelism.microbatches=2", "parallelism.zero=1", "--steps=3")
    assert run.returncode == 0, run.stdout + run.stderr
    assert "the plan trains as one process does\n" in run.stdout
    assert "77 in 3 steps" in line_of(run.stdout, "same samples")


@pytest.mark.parametrize(
    ("broken", "title", "said"),
    [
        # The samples of two ranks are not those of one process; what differs between ranks, these find themselves.
        (
            {"sample": 'input = input + (os.environ.get("WORLD_SIZE") == "2")'},
            "same samples",
            "step 1: on rank 0 samples ",
        ),
        # Two processes start from other values than one.
        (
            {"net": 'self.inner[3].bias.data.add_(int(os.environ.get("WORLD_SIZE", 1)))'},
            "same start",
            "`inner.3.bias` begins on ranks 0, 1 with values that differ by up to 1",
        ),
        # Two ranks compute another thing than one process.
        pytest.param(
            {"forward": 'x = x * (2.0 if os.environ.get("WORLD_SIZE") == "2" and self.training else 1.0)'},
            "same scale",
            "step 1: the loss is ",
            marks=pytest.mark.long,
        ),
        # A number beside the tensors, which no checkpoint holds.
        (
            {"net": "self.calls = 0", "forward": "self.calls += 1; x = x * self.calls"},
            "same state",
            "resumed from the checkpoint of step 1, the loss of step 2 is ",
        ),
    ],
    ids=["samples of ranks", "start", "model of ranks", "beside the tensors"],
)
def test_what_breaks_an_invariant_is_named(tmp_path: Path, broken: dict[str, str], title: str, said: str) -> None:
    run = verify(tmp_path, JOB, "--steps=2", **broken)
    assert run.returncode == 1, run.stdout + run.stderr
    found = line_of(run.stdout, title)
    assert "broken" in found
    assert said in found
    assert f"does not train as one process does: {title} broken" in run.stdout, "and of what follows nothing is said"


def test_ranks_that_find_their_samples_different_end_the_verification(tmp_path: Path) -> None:
    """The training under the plan says which sample it is, and why, before anything is compared."""
    run = verify(tmp_path, JOB, "--steps=2", sample='input = input + int(os.environ.get("RANK", 0))')
    assert run.returncode == 3, run.stdout + run.stderr
    assert "under the plan: training failed on rank 0 before the first step (job.plt:7:12)" in run.stderr
    assert "sample 0 of the training data (`dataset[0]`) is not the same on rank 0 and rank 1" in run.stderr
    assert "give generators a seed" in run.stderr and "Traceback" not in run.stderr


# A parameter and a buffer without dims; `{}` is what is added to the buffer.
WITHOUT_DIMS = {
    "net": 'self.scale = nn.Parameter(torch.tensor(1.5)); self.register_buffer("shift", torch.tensor(0.5))',
    "forward": "self.shift.add_({} * self.training); x = x * self.scale",
}


@pytest.mark.slow
def test_tensors_without_dims_are_compared(tmp_path: Path) -> None:
    forward = WITHOUT_DIMS["forward"].format("0.1") + " + self.shift"
    adagrad = "train.optimizer=adagrad(lr = 0.05)"  # which makes its state when it is made
    run = verify(tmp_path, JOB, adagrad, "--steps=1", net=WITHOUT_DIMS["net"], forward=forward)
    assert run.returncode == 0, run.stdout + run.stderr
    assert "6 tensors begin with the same values" in line_of(run.stdout, "same start")
    assert "holds" in line_of(run.stdout, "same state")


@pytest.mark.long
def test_of_tensors_without_dims_the_one_that_differs_is_named(tmp_path: Path) -> None:
    forward = WITHOUT_DIMS["forward"].format('0.1 * int(os.environ.get("RANK", 0))')
    run = verify(tmp_path, JOB, "--steps=1", net=WITHOUT_DIMS["net"], forward=forward)
    assert run.returncode == 1, run.stdout + run.stderr
    assert "`shift` ends on rank 1 0.1 away" in line_of(run.stdout, "same state")


# A training of one process, and `dslc verify` of it in a process with a changed runtime.
DECAYED = job_text(
    model={"network": "[linear(16), relu(), dropout(0.2), linear(4)]"},
    data={"source": "synthetic(samples = 64, shape = [6], classes = 4)", "batch": 16},
    train={
        "steps": 10,
        "optimizer": "adamw(lr = 1e-2, weight_decay = 0.1)",
        "lr_schedule": "warmup_cosine(warmup = 2 steps)",
        "no_decay": '["*.bias"]',
        "clip": "0.5",
    },
    log=None,
)
FAULTY = """
import dataclasses, sys
from dslc.runtime.loop import learning_rate
from dslc.runtime.parallel import optimizers
from dslc.runtime.step import stepper
if "FAULT" == "rate":
    factor = learning_rate.factor
    learning_rate.factor = lambda step, s: factor(step, s) if s < 2 else 0.99 * factor(step, s)
elif "FAULT" == "no_decay":
    groups = optimizers._groups
    optimizers._groups = lambda step, *more: groups(dataclasses.replace(step, no_decay=()), *more)
elif "FAULT" == "optimizer":
    build = optimizers._build
    optimizers._build = lambda kind, groups, arguments: build(kind, groups, arguments | {"eps": 1e-3})
elif "FAULT" == "clip":
    clipped = stepper.clipped
    stepper.clipped = lambda parameters, counted, limit, *more: clipped(parameters, counted, None, *more)
from dslc.main import main
sys.exit(main(["verify", "job.plt", "--steps=3", *sys.argv[1:]]))
"""


@pytest.mark.slow
@pytest.mark.parametrize(
    ("fault", "said"),
    [
        ("rate", "step 3: the learning rate is 0.0099 in one process and 0.01 in the plain loop (`train.lr_schedule`)"),
        pytest.param("no_decay", "all of these are parameters that `train.no_decay` names", marks=pytest.mark.long),
        pytest.param("optimizer", "step 1: the gradient agrees, and its update does not: `", marks=pytest.mark.long),
        ("clip", "step 1: the gradient agrees, and its update does not: `"),
    ],
)
def test_what_both_trainings_share_is_held_against_plain_torch(tmp_path: Path, fault: str, said: str) -> None:
    (tmp_path / "job.plt").write_text(DECAYED.replace("adamw(lr = 1e-2, weight_decay = 0.1)", OPTIMIZERS[fault]))
    command = [sys.executable, "-c", FAULTY.replace("FAULT", fault)]
    run = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=False)
    assert run.returncode == 1, run.stdout + run.stderr
    assert said in line_of(run.stdout, "plain torch")
    assert "broken" not in line_of(run.stdout, "same scale") + line_of(run.stdout, "same state")
    assert "one process does not train as a plain loop of torch does" in run.stdout


OPTIMIZERS = {
    "rate": "adamw(lr = 1e-2, weight_decay = 0.1)",
    "no_decay": "adamw(lr = 1e-2, weight_decay = 0.1)",
    "optimizer": "adamw(lr = 1e-2, weight_decay = 0.1)",
    "clip": "sgd(lr = 1e-2, momentum = 0.9)",  # what Adam does is the same for any size of a gradient
}


@pytest.mark.slow
@pytest.mark.parametrize(
    "forward",
    [
        pytest.param("pass", marks=pytest.mark.long),
        'x = x * (8.0 if os.environ.get("WORLD_SIZE") == "2" else 1.0)',
    ],
)
def test_noise_may_be_kept_on(tmp_path: Path, forward: str) -> None:
    """Trainings then agree as closely as other noise allows; the plain loop has the noise of the one process."""
    run = verify(tmp_path, JOB, "--steps=2", "--noise", forward=forward)
    assert run.returncode == (0 if forward == "pass" else 1), run.stdout + run.stderr
    assert ("holds" if forward == "pass" else "broken") in line_of(run.stdout, "same scale")
    assert "switched off" not in run.stdout and "noise is kept on: differences of up to" in run.stdout
    assert "holds" in line_of(run.stdout, "plain torch")


@pytest.mark.slow
def test_noise_is_said_and_not_judged(tmp_path: Path) -> None:
    run = verify(tmp_path, JOB, "--steps=2", forward="x = x + torch.poisson(torch.ones_like(x))")
    assert run.returncode == 0, run.stdout + run.stderr
    assert "holds" in line_of(run.stdout, "same samples")
    assert "not compared" in line_of(run.stdout, "same scale")
    assert "draws random numbers of its own" in run.stdout
    assert "what was compared agrees with one process; not compared: scale and state" in run.stdout
    assert "trains as one process does" not in run.stdout and "dropout is switched off" not in run.stdout


@pytest.mark.slow
def test_a_training_that_fails_is_a_failure(tmp_path: Path) -> None:
    run = verify(tmp_path, JOB, loss='assert os.environ["RANK"] != "1", "no loss today"')
    assert run.returncode == 3
    assert "under the plan: training failed on rank 1" in run.stderr
    assert "no loss today" in run.stderr


CANCELS = job_text(
    model={"network": "mlp(widths = [5, 5, 5], activation = tanh, classes = 2)", "loss": "l1()"},
    data={"source": "synthetic(samples = 64, shape = [6], targets = [2])", "batch": 24},
    devices={"cpus": 2},
    parallelism={"microbatches": 4},
    train={"steps": 4, "optimizer": "adamw(lr = 1e-3)", "seed": 11},
    log=None,
)


@pytest.mark.slow
def test_what_rounding_does_is_let_pass_where_a_gradient_cancels(tmp_path: Path) -> None:
    """The gradient of the last bias is a sum of ones and their opposites, which Adam makes as large as any other."""
    run = verify(tmp_path, CANCELS, "--steps=2")
    assert run.returncode == 0, run.stdout + run.stderr


AMPLIFIES = "x = x.sigmoid()\n        for _ in range(16):\n            x = 3.99 * x * (1 - x)"


@pytest.mark.slow
@pytest.mark.parametrize(
    "settings", [pytest.param((), marks=pytest.mark.long), ("parallelism.zero=3",)], ids=["whole", "zero=3"]
)
def test_what_a_network_amplifies_is_compared_in_float64(tmp_path: Path, settings: tuple[str, ...]) -> None:
    """Float32's rounding of a gradient becomes a loss further apart than any order of the samples shows."""
    run = verify(tmp_path, JOB, *settings, "--steps=4", forward=AMPLIFIES)
    assert run.returncode == 0, run.stdout + run.stderr
    assert "holds" in line_of(run.stdout, "same scale") and "(1e-09 is allowed)" in line_of(run.stdout, "same scale")
    assert "note: both were trained in float64" in run.stdout


OF_16_BITS = {
    "net": "self.low = nn.Linear(6, 6).to(torch.bfloat16)",
    "forward": "x = self.low(x.to(torch.bfloat16)).float()",
}
COMPLEX = {
    "net": "self.turn = nn.Parameter(torch.ones(3, dtype=torch.complex64))",
    "forward": "x = torch.view_as_real(torch.view_as_complex(x.unflatten(1, (3, 2))) * self.turn).flatten(1)",
}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("broken", "words"),
    [
        (OF_16_BITS, "`low.bias`, `low.weight` have 16 bits, and the network rounds to them"),
        (COMPLEX, "both in float64: learning rates, losses"),
        pytest.param(
            {**COMPLEX, "loss": "each = each * (1 + 1e-4 * len(each))"}, "same scale broken", marks=pytest.mark.long
        ),
        pytest.param(
            {**OF_16_BITS, "loss": 'each = each * (1.2 if os.environ.get("RANK") == "1" else 1)'},
            "same scale broken",
            marks=pytest.mark.long,
        ),
    ],
    ids=["16 bits", "complex", "a fault beside complex", "a fault beside 16 bits"],
)
def test_parameters_of_another_precision(tmp_path: Path, broken: dict[str, str], words: str) -> None:
    run = verify(tmp_path, JOB.replace("sgd(lr = 0.1, momentum = 0.9)", "adamw(lr = 1e-2)"), "--steps=4", **broken)
    assert run.returncode == ("broken" in words), run.stdout + run.stderr
    assert words in run.stdout and "ComplexWarning" not in run.stderr


@pytest.mark.slow
def test_a_fault_is_one_in_float64_too(tmp_path: Path) -> None:
    run = verify(tmp_path, JOB, "--steps=2", loss="each = each * (1 + 1e-4 * len(each))")
    assert run.returncode == 1, run.stdout + run.stderr
    assert "broken" in line_of(run.stdout, "same scale")
    assert "both were trained in float64, where no rounding leads them apart" in run.stdout


@pytest.mark.slow
def test_a_narrow_copy_of_a_large_job(tmp_path: Path) -> None:
    sizes = "layers = 80, width = 8192, heads = 64, context = 4096"
    large = LIBRARY.replace("layers = 2, width = 32, heads = 2, context = 16", sizes)
    large = large.replace("vocab = 256", "vocab = 50257").replace("stdlib()", 'tokens("none*.bin")')
    large = large.replace("batch  = 10", "batch  = 1024").replace("cpus = 2", "gpus = 8\n  nodes = 16")
    run = verify(tmp_path, large, "--shrink", "--steps=2", "parallelism.zero=3", "train.precision=bf16")
    assert run.returncode == 0, run.stdout + run.stderr
    assert "narrow copy: ranks 128 -> 4" in run.stdout
    assert "narrow copy: GPUs -> CPUs" in run.stdout
    assert "4 ranks, zero 3, bf16" in run.stdout


def test_a_narrow_copy_has_something_for_each_rank_and_stage(tmp_path: Path) -> None:
    large = LIBRARY.replace("layers = 2, width = 32, heads = 2", "layers = 32, width = 1024, heads = 16")
    (tmp_path / "job.plt").write_text(large.replace("batch  = 10", "batch  = 64").replace("cpus = 2", "gpus = 64"))
    loaded = load(str(tmp_path / "job.plt"), ["parallelism.tensor=8", "parallelism.pipeline=8"])
    assert loaded.job is not None
    layout, report = Report().collect(lay_out(loaded.job)), Report()
    assert layout is not None
    narrow, _ = shrink_job(loaded.job, layout, 0)
    inspect(dataclasses.replace(loaded, job=narrow), report)
    assert not report.errors


def test_what_cannot_be_made_narrow_is_said(tmp_path: Path) -> None:
    run = verify(tmp_path, JOB, "--shrink")
    assert run.returncode == 1
    assert "`python(…)` cannot be made narrow" in run.stderr


def test_ranks_that_take_the_same_samples_are_named(launcher: Launcher, tmp_path: Path) -> None:
    """A fault of dslc itself, which no job can cause: rank 1 takes the place of rank 0."""
    data = images(tmp_path)
    common: dict[str, Any] = {"mode": ObserveMode(), "steps": 2, "clip": None}
    right, wrong = places(2)
    both = (right, dataclasses.replace(wrong, data_rank=0))
    for folder, ranks, where in (("plan", 2, both), ("one", 1, places(1))):
        outcome, shown = launcher.launch(program(ranks, data, **common), where, tmp_path / folder)
        assert outcome.is_complete, shown
    plan, one = Observation(str(tmp_path / "plan"), 2), Observation(str(tmp_path / "one"), 1)
    verdict = compare(program(2, data, **common), plan, one, [])
    assert verdict.broken_invariants == ["same samples"]
    lost, twice = verdict.findings[0].texts
    assert lost.startswith("step 1: no rank takes samples ")
    assert lost.endswith(" and 5 more")
    assert twice.startswith("step 1: rank 1 takes samples ")


def test_a_loss_after_going_on_is_shown_with_what_was_allowed(tmp_path: Path) -> None:
    def told(name: str, losses: dict[int, float]) -> Observation:
        seen = [
            StepObservation(step=n, samples=(n,), digests=("",), total=loss, number=1.0, norm=1.0, lr=0.1, noise=False)
            for n, loss in losses.items()
        ]
        (tmp_path / name / "observed").mkdir(parents=True)
        (tmp_path / name / "observed" / "rank-0.json").write_text(json.dumps(to_json(seen)))
        return Observation(str(tmp_path / name), 1)

    one, resumed, verdict = told("one", {1: 3.0, 2: 2.0}), told("resumed", {2: 2.5}), Verdict(rows=[])
    compare_resumed(program(1, images(tmp_path)), resumed, one, 1, verdict, Rounding(losses=(1e-4, 1e-4)))
    assert verdict.broken_invariants == ["same state"]
    assert verdict.findings[3].texts[0].endswith("(1e-03 is allowed)")
