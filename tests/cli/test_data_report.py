"""`dslc data`: planted copies, leaks, long samples and classes are found, and what was read is stated."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from textwrap import dedent
from typing import Any

import pytest
import torch
from helpers.golden import hold
from helpers.paths import TESTS

from dslc.compiler.facts.calibration import CONSTANTS_VERSION, RunFit, fit_text, with_constants
from dslc.compiler.facts.user_calibrations import calibration_path, this_machine
from dslc.dsl.diagnostics import Diagnostic, Findings, Report
from dslc.dsl.meaning.load import load
from dslc.jobs import worst_batch
from dslc.jobs.prepare_run import Ready, check_batches, prepare
from dslc.jobs.worst_batch import batch_place, find_fullest_batch
from dslc.main import main
from dslc.probe.child import ChildAnswer
from dslc.runtime.data import fullest_batch
from dslc.runtime.data.sample_records import sample_lengths, spread
from dslc.runtime.launchers.world import World

GOLDEN = TESTS / "cli" / "formats"
MODULE = """
import torch
from torch import nn


class Sentences:
    '''Sequences of 1 to 40 numbers. Sample 41 is 900 long, 20 is a copy of 3, and 30 is 3 with another target.'''

    def __init__(self, samples, first=0):
        self.samples, self.first = samples, first

    def __len__(self):
        return self.samples

    def __getitem__(self, index):
        if index == BROKEN:
            raise ValueError("a line without a label")
        number = 3 if self.first == 0 and index in (20, 30) else self.first + index
        random = torch.Generator().manual_seed(number)
        length = 900 if number == 41 else 1 + number * 7 % 40
        return torch.randn(length, generator=random), (number + (index == 30)) % 3


BROKEN = None


def data():
    return Sentences(48), Sentences(10, first=40)


class Stream:
    shards = 2

    def shard(self, number):
        return iter(Sentences(30, first=100 * number))

    def __len__(self):
        return 60


def padded(samples):
    values = nn.utils.rnn.pad_sequence([values for values, _ in samples], batch_first=True)
    return {"values": values}, torch.tensor([target for _, target in samples])


class Network(nn.Module):
    def __init__(self):
        super().__init__()
        self.hidden, self.head = nn.Linear(1, 8), nn.Linear(8, 3)

    def forward(self, values):
        return self.head(torch.tanh(self.hidden(values[:, :, None])).mean(1))
"""
JOB = """
model { network = python("MODULE:Network"), loss = cross_entropy() }
data {
  source  = python("MODULE:data")
  collate = python("MODULE:padded")
  batch   = 8
}
devices { cpus = 2 }
train { epochs = 2, optimizer = sgd(lr = 0.1) }
"""

pytestmark = pytest.mark.usefixtures("loaded")


def planted(folder: Path, name: str, broken: str = "None") -> Path:
    """Writes the job, with a module of this name."""
    (folder / f"{name}.py").write_text(dedent(MODULE).replace("BROKEN = None", f"BROKEN = {broken}"))
    (folder / "job.plt").write_text(JOB.replace("MODULE", name))
    return folder / "job.plt"


def report_of(capsys: pytest.CaptureFixture[str], *arguments: object) -> dict[str, Any]:
    assert main(["data", *map(str, arguments), "--json"]) == 0
    report: dict[str, Any] = json.loads(capsys.readouterr().out)
    return report


def test_planted_copies_leaks_and_long_samples_are_found(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    job = planted(tmp_path, "planted_data")
    monkeypatch.chdir(tmp_path)
    assert main(["data", "job.plt"]) == 0
    hold(capsys.readouterr().out, GOLDEN / "data_report.txt")
    report = report_of(capsys, job)
    training = report["splits"]["training"]
    assert training["duplicates"] == [{"number": 20, "original": 3}]
    assert training["contradictions"] == [{"number": 30, "original": 3}]
    assert training["length"]["longest_sample"] == 41 and training["length"]["longest"] == 900
    shared = [(copy["number"], copy["original"]) for copy in report["overlap"]["validation"]]
    assert shared == [(n, 40 + n) for n in range(8)]
    assert sum(map(sum, report["classes"].values())) == 48
    assert report["fullest"]["source_number"] == 41 and report["fullest"]["memory"] == pytest.approx(
        338 * 1024, rel=0.01
    )
    assert report["padding_seconds"] is None and report["fullest"]["seconds"] is None
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path))
    fit = Path(calibration_path("cpu"))
    fit.parent.mkdir()
    here = this_machine()
    constants = RunFit(
        machine=here.processor, torch=here.torch, cores=here.cores, constants=CONSTANTS_VERSION, runs=3, error=0.1
    )
    fit.write_text(fit_text("cpu", with_constants(constants, {"flop": 1e-6}), "made by hand"))
    priced = report_of(capsys, job, "--set", "devices.cpus=1")
    assert main(["plan", str(job), "--trace", "--summary", "--set", "devices.cpus=1"]) == 0
    step = json.loads(capsys.readouterr().out)["step"]["step_time"]  # of samples of 38 numbers
    for order, padding in priced["padding"].items():
        seconds = step * padding["numbers"] / 38 * padding["share"]
        assert priced["padding_seconds"][order] == pytest.approx(seconds, rel=1e-3)
    assert priced["fullest"]["seconds"] == pytest.approx(step * 900 / 38, rel=0.15)  # but the head
    job.write_text("\n".join(line for line in job.read_text().splitlines() if "collate" not in line))
    assert main(["data", "job.plt"]) == 0
    assert " training samples of 48, sample " in capsys.readouterr().out.partition("unequal shapes: ")[2]
    planted(tmp_path, "planted_data")
    part = report_of(capsys, job, "--samples", 12)
    assert part["splits"]["training"]["read"] == 12 and part["splits"]["validation"]["read"] == 10
    assert sum(map(sum, part["classes"].values())) == 12


def test_other_sources_have_a_report(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    digits = tmp_path / "digits.plt"
    digits.write_text(
        "model { network = [flatten(), linear(10)], loss = cross_entropy() }\n"
        "data { source = digits(), batch = 64, validation = 20%, last_batch = drop, sampler = balanced() }\n"
        "devices { cpus = 16 }\ntrain { steps = 3, optimizer = sgd(lr = 0.1) }\nmemory { limit = 1KiB }\n"
        'checkpoint { every = 2 steps, resume = "nowhere" }\nlaunch { restarts = 1 }\n'
    )
    report = report_of(capsys, digits)
    assert report["splits"]["training"]["shape"] == [1, 8, 8] and report["splits"]["training"]["length"] is None
    assert sum(map(sum, report["classes"].values())) == 3 * 64  # the steps of the training, not a whole epoch
    assert main(["data", str(digits), "--samples", "50"]) == 0
    text = capsys.readouterr().out
    assert "50 of 1,438 training and 50 of 359 validation samples were read, spread evenly" in text
    assert "fewest" in text and "rank 7" not in text.split("classes by data rank")[0]
    digits.write_text(digits.read_text().replace("digits()", 'mnist("nowhere")'))
    assert main(["data", str(digits)]) == 1 and "error[E0309]" in capsys.readouterr().err
    stream = planted(tmp_path, "planted_stream")
    stream.write_text(stream.read_text().replace(":data", ":Stream").replace("batch   = 8", "batch = 8, samples = 60"))
    told = report_of(capsys, stream, "--samples", 20)["splits"]["training"]
    assert told["read"] == 20 and told["length"]["longest"] <= 40


def test_a_sample_that_cannot_be_read_is_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["data", str(planted(tmp_path, "planted_fault", broken="33"))]) == 1
    told = capsys.readouterr().err
    assert "the data cannot be read: ValueError: a line without a label (`dataset[33]`" in told
    assert "planted_fault.py, line" in told


def prepared(job: Path, *settings: str) -> Ready:
    """Returns a training for which nothing is looked up in its batches yet."""
    report = Report()
    ready = prepare(load(str(job), list(settings)), report)
    assert ready is not None and not report.found
    return ready


def found_before_training(job: Path, *settings: str) -> Report:
    """Returns what is found before the first step."""
    report = Report()
    check_batches(prepared(job, *settings), report)
    return report


def test_a_planted_long_sample_is_refused_before_the_first_step(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    job = planted(tmp_path, "planted_long")
    monkeypatch.chdir(tmp_path)
    arguments = ["--set", "memory.limit=300KiB", "--set", "data.shuffle=false"]
    assert main(["run", "job.plt", *arguments, "--out", str(tmp_path / "run")]) == 1
    hold(capsys.readouterr().err, GOLDEN / "worst_batch.txt")
    assert not (tmp_path / "run").exists()
    assert main(["plan", "job.plt", "--trace", "--json", *arguments]) == 0
    (tmp_path / "plan.json").write_text(capsys.readouterr().out)
    assert main(["run", "plan.json", "--out", str(tmp_path / "run")]) == 1
    assert "error[E0504]" in capsys.readouterr().err
    assert not found_before_training(job, "memory.limit=400KiB").found  # 338 KiB
    # The training ends before the sample comes, in step 6.
    assert not found_before_training(job, "memory.limit=300KiB", "data.shuffle=false", "train.steps=5").found
    (tmp_path / "planted_long.py").write_text(
        (tmp_path / "planted_long.py")
        .read_text()
        .replace(
            "    def forward(self, values):",
            "    def forward(self, values):\n        values + torch.zeros(1, 40)[:, :values.shape[1]]",
        )
    )
    for limit in ("300KiB", "1GiB"):  # of which the second holds any shape
        (refusal,) = found_before_training(job, f"memory.limit={limit}").errors
        assert refusal.code == "E0505" and "Mismatching argument" in refusal.message
    analysis = prepared(job).compiled.analysis
    workload = replace(analysis.workload, measured=True)
    fullest = find_fullest_batch(analysis)
    assert ", data rank 1, with equal shares: " in batch_place(replace(analysis, workload=workload), fullest)


def test_one_process_of_a_launcher_looks_for_the_fullest_batch(tmp_path: Path) -> None:
    ready, report = prepared(planted(tmp_path, "planted_many_processes"), "memory.limit=300KiB"), Report()
    world = World(word="torchrun", command="torchrun", rank=1, size=2, names={}, speaks=False)
    check_batches(replace(ready, world=world), report)
    assert not report.found
    check_batches(replace(ready, world=replace(world, rank=0, speaks=True)), report)
    assert [error.code for error in report.errors] == ["E0504"]


def test_a_rule_against_the_longest_sample_is_reported(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    job = planted(tmp_path, "planted_rule")

    def refused(*arguments: object, **more: object) -> Findings[None]:
        yield Diagnostic("E0215", "the loss does not fit", None)

    monkeypatch.setattr(worst_batch, "analyse", refused)
    (refusal,) = found_before_training(job).errors
    assert refusal.code == "E0505" and refusal.message.endswith("ends it: the loss does not fit")
    assert main(["data", str(job)]) == 0
    told = capsys.readouterr().out
    assert "ends it: the loss does not fit" in told and "covers it" not in told


def test_a_bounded_reading_is_a_note(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    job = planted(tmp_path, "planted_many")
    monkeypatch.setattr(fullest_batch, "READING", 0.0)
    monkeypatch.setattr(fullest_batch, "ORDERING", 0.0)
    (reading, orders) = found_before_training(job).found
    assert reading.code == orders.code == "N0507"
    assert "the longest of 1 sample was found in 0 s, of 48 in the training data" in reading.message
    assert "the batches of 6 of 12 steps were followed in 0 s" in orders.message
    # The sample that is read first is the longest one; the order of `by_length()` is that of all samples.
    monkeypatch.setattr(torch, "randperm", lambda count, **_: torch.arange(count).roll(-41))
    sorted_job = [*["--set", "memory.limit=300KiB"][1:], "data.sampler=by_length()"]
    warning = next(each for each in found_before_training(job, *sorted_job).found if each.code != "N0507")
    assert warning.code == "W0508" and warning.message.startswith("perhaps the fullest micro-batch of the training")
    assert warning.label.startswith("4 samples of 900 numbers each")


def test_a_fault_of_a_sample_is_a_warning_before_the_first_step(tmp_path: Path) -> None:
    job = planted(tmp_path, "planted_late_fault", broken="33")
    answers: dict[str, ChildAnswer] = {}
    for rate, words in ((0.1, "a line without a label"), (0.2, "as the combination before")):
        report = Report()
        check_batches(prepared(job, f"train.optimizer.lr={rate}"), report, answers)
        (warning,) = report.found
        assert warning.code == "W0506" and words in warning.message
        (answer,) = answers.values()  # which the next combination of a sweep takes
        answer["error"] = "as the combination before"


def test_lengths_and_the_samples_that_are_read() -> None:
    assert sample_lengths([(3, 4), (3, 6)]) == [12, 18]
    assert sample_lengths([(5,), (7,)]) == [5, 7] and sample_lengths([(), ()]) == [1, 1]
    assert spread(10, 4) == [0, 2, 5, 7] and spread(3, 9) == [0, 1, 2]
    assert torch.tensor(spread(1000, 999)).diff().min() >= 1
