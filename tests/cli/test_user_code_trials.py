"""A user's own functions are tried before a training begins, and what is wrong with one is said at its place."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import pytest
from helpers.commands import dslc
from helpers.job_texts import job_text
from helpers.paths import EXAMPLES, HELPERS, TESTS
from helpers.small_disk import fill, small_disk

from dslc.jobs.check_job import check_one
from dslc.main import main
from dslc.probe.unchecked_parts import describe_unchecked

pytestmark = pytest.mark.usefixtures("loaded")
METRICS = HELPERS / "own_metrics.py"
RATES = """
import random

def half(step, steps, power=1):
    return (1 - step / steps) ** power

def of_the_step_alone(step):
    return 1

def drawn(step, steps):
    return random.random()

def negative(step, steps):
    return -1
"""


OBJECTS = """
from dataclasses import dataclass
from typing import NamedTuple

import torch

class Tuple(NamedTuple):
    x: torch.Tensor
    scale: torch.Tensor

@dataclass
class Data:
    x: torch.Tensor
    scale: torch.Tensor

class Net(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = torch.nn.Linear(4, 3)

    def forward(self, *parts, **named):
        part = parts[0] if parts else None
        x = named["x"] if named else part if torch.is_tensor(part) else part.x
        return self.layer(x)

def data(kind):
    return [(globals()[kind](torch.randn(4), torch.ones(1)), n % 3) for n in range(20)]

def loss(output, target):
    return torch.nn.functional.cross_entropy(output, target, reduction="none")
"""
OBJECTS_JOB = """
model { network = python("MODULE:Net"), loss = python("MODULE:loss") }
data { source = python("MODULE:data", kind = "KIND"), batch = 4 }
train { steps = 2, optimizer = sgd(lr = 0.1) }
"""


@pytest.fixture
def job(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    (tmp_path / "of_rates.py").write_text(RATES)
    (tmp_path / "own_metrics.py").write_text(METRICS.read_text())
    (tmp_path / "job.plt").write_text((EXAMPLES / "digits.plt").read_text())
    monkeypatch.chdir(tmp_path)
    return "job.plt"


def test_a_schedule_of_ones_own_is_good_where_its_factors_are(job: str) -> None:
    assert not check_one(job, ['train.lr_schedule=python("of_rates:half", power = 2)'], trace=True)[0].found


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("of_the_step_alone", "takes 1 positional argument but 2 were given"),
        ("drawn", "it gives another factor when it is asked for step 0 again"),
        ("negative", "the schedule gives -1 for step 0, and should give a number of at least 0"),
        ("absent", "`of_rates` has no `absent`"),
    ],
)
def test_a_schedule_of_ones_own_is_tried(job: str, name: str, said: str) -> None:
    (error,) = check_one(job, [f'train.lr_schedule=python("of_rates:{name}")'], trace=True)[0].errors
    assert error.code == "E0802" and error.message.startswith(f"`of_rates:{name}` cannot be used as a schedule")
    assert said in error.message


def test_a_metric_of_ones_own_is_good_where_its_states_add_up(job: str) -> None:
    metrics = '[loss, python("own_metrics:Spread", name = "spread"), python("own_metrics:f1")]'
    assert not check_one(job, [f"evaluate.metrics={metrics}"], trace=True)[0].found


@pytest.mark.parametrize(("name", "said"), [("spread.seen", ""), ("spread.sen", "spread.seen"), ("spread", "spread.")])
def test_a_goal_finds_its_number_in_a_metric_of_ones_own(job: str, name: str, said: str) -> None:
    metrics = 'evaluate.metrics=[python("own_metrics:Spread", name = "spread")]'
    found = check_one(job, [metrics, f'train.early_stopping=highest("{name}")'], trace=True)[0].found
    assert [error.code for error in found] == ["E0317"] * bool(said)
    assert all(said in error.help for error in found)


def test_a_metric_of_ones_own_is_tried(job: str) -> None:
    (error,) = check_one(job, ['evaluate.metrics=[python("own_metrics:not_additive")]'], trace=True)[0].errors
    assert error.code == "E0802" and "put together from two pieces" in error.message
    assert error.message.startswith("`own_metrics:not_additive` cannot be used as a metric")


@pytest.mark.parametrize("kind", ["Tuple", "Data"])
def test_samples_may_be_objects_of_a_class_beside_the_network(
    kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [each for each in sys.path if each])
    module = f"of_{kind.lower()}"
    (tmp_path / f"{module}.py").write_text(OBJECTS)
    (tmp_path / "job.plt").write_text(OBJECTS_JOB.replace("MODULE", module).replace("KIND", kind))
    assert not check_one("job.plt", [], trace=True)[0].found


def test_a_plan_without_what_an_optimizer_keeps_says_so(job: str, capsys: pytest.CaptureFixture[str]) -> None:
    settings = ["--set", 'train.optimizer=python("lion:Lion", lr = 1e-4)']
    assert main(["plan", job, *settings]) == 0
    told = capsys.readouterr()
    assert "warning[W0613]: the memory is shown without what `lion:Lion` keeps" in told.err
    assert "lion:Lion" in told.out and "optimizer 0" not in told.out
    analysis = check_one(job, settings[1:])[1]
    assert analysis is not None
    unchecked = describe_unchecked(analysis, trace=False)
    assert unchecked == " as far as can be seen without its optimizer (`--trace` looks at it)"


def test_a_check_that_calls_nothing_says_what_it_has_not_seen(job: str) -> None:
    report, analysis = check_one(job, ['evaluate.metrics=[python("own_metrics:absent")]'])
    assert not report.found and analysis is not None
    unchecked = describe_unchecked(analysis, trace=False)
    assert unchecked == " as far as can be seen without its metrics (`--trace` looks at it)"


OUTPUTS = """
import torch
import torch.nn as nn
import torch.nn.functional as F
from torch.utils.data import TensorDataset

def made(targets):
    numbers = torch.Generator().manual_seed(0)
    return TensorDataset(torch.randn(24, 4, generator=numbers), targets)

def yes_or_no():
    return made((torch.arange(72).view(24, 3) % 2).float()), made((torch.arange(72).view(24, 3) % 2).float())

def classes():
    return made(torch.arange(24) % 3), made(torch.arange(24) % 3)

def few():
    return made(torch.arange(24) % 3)

def zero():
    linear = nn.Linear(4, 3)
    nn.init.zeros_(linear.weight)
    nn.init.zeros_(linear.bias)
    return linear

def centred(output, target):
    return (output - output.mean(0)).square().sum(1)

def maps():
    images = TensorDataset(torch.randn(24, 3, 8, 8), torch.randint(2, (24, 8, 8)))
    return images, images

def sigmoid():
    return nn.Sequential(nn.Linear(4, 3), nn.Sigmoid())

def log_probabilities():
    return nn.Sequential(nn.Linear(4, 3), nn.LogSoftmax(1))

def positive():
    return nn.Sequential(nn.Linear(4, 3), nn.Softplus())

def simplex():
    return nn.Sequential(nn.Linear(4, 3), nn.Softmax(1))

class Waves(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(4, 6)

    def forward(self, x):
        return torch.view_as_complex(self.linear(x).view(-1, 3, 2))

class Both(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(4, 3)

    def forward(self, x, targets=None):
        logits = self.linear(x)
        return logits, None if targets is None else F.cross_entropy(logits, targets)

class Wide(nn.Module):
    def __init__(self, convolved=False, cast=False):
        super().__init__()
        self.layer = nn.Conv2d(3, 2, 1).double() if convolved else nn.Linear(4, 3).double()
        self.cast = cast

    def forward(self, x):
        return self.layer(x.double() if self.cast else x)

def lazy():
    return nn.Sequential(nn.LazyLinear(3))

def called():
    model = lazy()
    model(torch.zeros(2, 4))
    return model

class Grows(nn.Module):
    def __init__(self, how="module"):
        super().__init__()
        self.linear, self.how = nn.Linear(4, 3).requires_grad_(how != "thaw"), how

    def forward(self, x):
        if self.how == "module" and not hasattr(self, "more"):
            self.more = nn.Linear(3, 3)
        if self.how == "parameter" and not hasattr(self, "scale"):
            self.scale = nn.Parameter(torch.ones(3))
        if self.how == "thaw":
            self.linear.requires_grad_(True)
            return self.linear(x)
        return self.more(self.linear(x)) if self.how == "module" else self.linear(x) * self.scale

class Detector(nn.Module):
    def __init__(self, how="dict"):
        super().__init__()
        self.linear, self.how = nn.Linear(4, 3), how

    def forward(self, x, targets):
        logits = self.linear(x)
        loss = F.cross_entropy(logits, targets)
        return {"loss_cls": loss, "loss_box": logits.square().mean()} if self.how == "dict" else (loss, logits)

class Margin:
    def __init__(self, scale=1.0):
        self.scale = scale

    def __call__(self, output, target):
        return F.cross_entropy(output * self.scale, target, reduction="none")

def mean(output, target):
    return F.cross_entropy(output, target)

def dice(output, target):
    return 1 - (output.softmax(1) * F.one_hot(target, 3)).sum() / len(output)

class Counting(nn.Module):
    states = {"number": "sum"}

    def __init__(self):
        self.number = 0

    def update(self, output, target):
        self.number += len(output)

    def compute(self):
        return self.number

def segments():
    return nn.Conv2d(3, 2, 1)

class Large(nn.Module):
    def __init__(self):
        super().__init__()
        self.table = nn.Parameter(torch.zeros(20_000, 20_000))

    def forward(self, x):
        return torch.softmax(x[:, :3] * self.table[0, :3], 1)

def bce(output, target):
    return F.binary_cross_entropy(output, target, reduction="none").mean(1)

def nll(output, target):
    assert output.max() <= 0
    return F.nll_loss(output, target, reduction="none")

def nll_of_simplex(output, target):
    return nll(output.log(), target)

def poisson(output, target):
    assert output.min() > 0
    return F.poisson_nll_loss(output, target, log_input=False, reduction="none").mean(1)

def divergence(output, target):
    assert torch.allclose(output.sum(1), torch.ones(len(output)))
    return F.kl_div(output.log(), target / target.sum(1, keepdim=True).clamp(min=1), reduction="none").sum(1)

def amplitudes(output, target):
    return (output.abs() - target).square().mean(1)

def of_maps(output, target):
    return F.cross_entropy(output, target, reduction="none").flatten(1).mean(1)

def of_maps_in_sums(output, target):
    return F.cross_entropy(output, target, reduction="sum"), target.numel()

class Hits:
    states = {"hits": "sum", "number": "sum"}

    def __init__(self):
        self.hits, self.number = torch.zeros(()), torch.zeros(())

    def update(self, scores, mask):
        self.hits += (F.one_hot(scores.argmax(1), scores.shape[1]) * F.one_hot(mask, scores.shape[1])).sum()
        self.number += mask.numel()

    def compute(self):
        return self.hits / self.number

class Certain(Hits):
    def update(self, output, target):
        assert 0 <= output.min() and output.max() <= 1
        super().update(output, target)
"""


def outputs_job(folder: Path, network: str, loss: str, source: str) -> Path:
    """Writes a job with a network, a loss and a source of `OUTPUTS`."""
    (folder / "of_outputs.py").write_text(OUTPUTS)
    path = folder / "outputs.plt"
    path.write_text(
        f'model {{ network = python("of_outputs:{network}"), loss = {loss} }}\n'
        f'data {{ source = python("of_outputs:{source}"), batch = 8 }}\n'
        "devices { cpus = 2 }\n"
        "train { steps = 2, optimizer = sgd(lr = 0.1) }\n"
    )
    return path


def check_outputs(folder: Path, network: str, loss: str, source: str, *settings: str) -> list[str]:
    """Returns the diagnostics of such a job."""
    found = check_one(str(outputs_job(folder, network, loss, source)), list(settings), trace=True)[0].found
    return [f"{each.code}: {each.message}" for each in found]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("network", "loss", "source", "metric"),
    [
        ("sigmoid", "bce", "yes_or_no", ""),
        ("segments", "of_maps_in_sums", "maps", "Hits"),
        ("simplex", "nll_of_simplex", "classes", "Certain"),
        pytest.param("log_probabilities", "nll", "classes", "Hits", marks=pytest.mark.long),
        pytest.param("positive", "poisson", "yes_or_no", "", marks=pytest.mark.long),
        pytest.param("simplex", "divergence", "yes_or_no", "", marks=pytest.mark.long),
        pytest.param("Waves", "amplitudes", "yes_or_no", "", marks=pytest.mark.long),
    ],
)
def test_a_loss_is_tried_on_what_the_network_gives(
    tmp_path: Path, network: str, loss: str, source: str, metric: str
) -> None:
    """What only some numbers have a loss or a metric for is not refused."""
    settings = [f'evaluate.metrics=[python("of_outputs:{metric}")]'] if metric else []
    assert check_outputs(tmp_path, network, f'python("of_outputs:{loss}")', source, *settings) == []


def test_a_loss_that_cannot_be_right_is_refused(tmp_path: Path) -> None:
    (found,) = check_outputs(tmp_path, "sigmoid", 'python("of_outputs:of_maps")', "yes_or_no")
    assert found.startswith("E0802: `of_outputs:of_maps` cannot be used as a loss")


@pytest.mark.parametrize("network", ["sigmoid", "zero"])
def test_a_loss_that_compares_samples_is_seen_on_real_ones(tmp_path: Path, network: str) -> None:
    """Also where the last layer begins at zero, so that the outputs of all samples are alike."""
    (found,) = check_outputs(tmp_path, network, 'python("of_outputs:centred")', "classes")
    assert found.startswith("W0625: the loss of a sample depends on the others of its batch")


@pytest.mark.parametrize("goal", ["checkpoint.best=lowest(loss)", "train.early_stopping=lowest(loss)"])
@pytest.mark.parametrize(
    ("source", "trace", "code"), [("classes", False, ""), ("classes", True, ""), ("few", True, "E0317")]
)
def test_a_goal_needs_held_out_samples_once_the_source_is_known(
    tmp_path: Path, goal: str, source: str, trace: bool, code: str
) -> None:
    path = outputs_job(tmp_path, "sigmoid", "cross_entropy()", "classes")
    settings = [goal, "evaluate.every=1 step", f'data.source=python("of_outputs:{source}")', "checkpoint.every=1 step"]
    assert [each.code for each in check_one(str(path), settings, trace=trace)[0].errors] == [code] * bool(code)


@pytest.mark.cases(6)
@pytest.mark.slow
@pytest.mark.parametrize(
    ("setting", "code", "said"),
    [
        ('model.loss=python("of_outputs:Margin", scale = 2.0)', "E0802", "`margin = Margin(scale = 2.0)`"),
        ('model.loss=python("torch.nn:NLLLoss")', "E0802", "`from torch.nn import NLLLoss`, `nllloss = NLLLoss()`"),
        ('model.loss=python("torch.nn:MSELoss", reduction = "sum")', "E0802", '; `reduction = "none"` gives'),
        ('model.loss=python("of_outputs:mean")', "E0802", "own(mean_of = …)"),
        ('model.loss=python("of_outputs:dice")', "E0802", 'python("of_outputs:dice", over = all)'),
        ('model.network=python("of_outputs:Both")', "E0322", "`own()`, if the network returns its loss"),
        ('model={network = python("of_outputs:Both"), loss = own()}', "", ""),
        ('model.network=python("of_outputs:lazy")', "E0802", "call it once on a sample"),
        ('model.network=python("of_outputs:Wide")', "E0802", "let `forward` cast it, as by `x.double()`"),
        (
            'model={network = python("of_outputs:Wide", convolved = true), loss = cross_entropy()} of maps',
            "E0802",
            "",
        ),
        ('model.network=python("of_outputs:Wide", cast = true)', "", ""),
        ('model.network=python("of_outputs:called")', "", ""),
        ('model.network=python("of_outputs:Grows")', "E0802", "make it in `__init__`"),
        ('model.network=python("of_outputs:Grows", how = "parameter")', "E0802", "make it in `__init__`"),
        (
            'model.network=python("of_outputs:Grows", how = "thaw")',
            "E0802",
            "call `requires_grad_(True)` in `__init__`",
        ),
        ('model={network = python("of_outputs:Detector"), loss = own()}', "E0802", "let `forward` add the losses up"),
        ('model={network = python("of_outputs:Detector", how = "pair"), loss = own()}', "", ""),
        ('model.loss=python("of_outputs:dice", over = all)', "", ""),
        ('evaluate.metrics=[python("of_outputs:Counting")]', "E0802", "`self.number = torch.tensor(0)`"),
    ],
)
def test_the_help_of_a_function_that_cannot_be_used(tmp_path: Path, setting: str, code: str, said: str) -> None:
    setting, _, source = setting.partition(" of ")
    path = outputs_job(tmp_path, "simplex", "cross_entropy()", source.strip() or "classes")
    if setting.startswith("model="):
        text = path.read_text().splitlines()
        path.write_text("\n".join([setting.replace("model=", "model "), *text[1:]]))
        setting = "train.steps=1"
    found = check_one(str(path), [setting], trace=True)[0].errors
    assert [each.code for each in found] == [code] * bool(code)
    assert all(said in each.help for each in found)


SEEN = """
import sys

with open("seen", "a") as file:
    print("dslc.runtime.loop.stateful_metrics" in sys.modules, file=file)


def halved(step, steps):
    return 0.5
"""


def test_a_trial_begins_in_a_process_that_has_imported_torch(tmp_path: Path) -> None:
    """Its child would else import torch, and what trials need, each time anew."""
    (tmp_path / "seen.py").write_text(SEEN)
    schedule = {"steps": 2, "optimizer": "sgd(lr = 0.1)", "lr_schedule": 'python("seen:halved")'}
    text = job_text(model={"network": "mlp()"}, data={"source": "digits()", "batch": 8}, train=schedule)
    (tmp_path / "job.plt").write_text(text)
    done = dslc("check", "--trace", "job.plt", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert set((tmp_path / "seen").read_text().split()) == {"True"}


@pytest.mark.parametrize(("pages", "name"), [(1, "batches.pt"), (3, "outputs.pt")])
def test_a_trial_on_a_full_disk_says_so(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], pages: int, name: str
) -> None:
    """Whatever could not be written: batches of the data, or the network's outputs. Answers of trials need no disk."""
    with small_disk(tmp_path / "disk", "1m") as disk:
        filling = fill(disk)
        os.truncate(filling, filling.stat().st_size - pages * os.sysconf("SC_PAGE_SIZE"))
        monkeypatch.setattr("tempfile.tempdir", str(disk))
        assert main(["check", "--trace", str(TESTS / "programs" / "vae" / "vae.plt")]) == 1
    said = capsys.readouterr().err
    assert "OSError: [Errno 28] No space left on device: '" + str(disk) in said, said
    assert f"{name}'" in said and "help: make room there" in said
