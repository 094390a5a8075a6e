"""Trainings of tests: a job or a program, run to its end on real processes, and the comparison of two."""

from __future__ import annotations

import dataclasses
import importlib
import shutil
from collections.abc import Mapping
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.numpy import load_file

from dslc.compiler.ir.program import JobProgram, RankPlace
from dslc.compiler.ir.tensors import TensorFact
from dslc.compiler.trace.trace_model import trace_model
from dslc.dsl.diagnostics import Report
from dslc.dsl.meaning.load import load
from dslc.jobs.prepare_run import ALONE, LaunchContext, Ready, prepare, report_on, write_run_directory
from dslc.runtime.measure.collectives import FIRST_STEP, STEPS
from dslc.runtime.process.records import Record, read_metrics
from dslc.runtime.process.vision_library import let_torchvision_load
from helpers.job_texts import job_text
from helpers.launcher import LIBRARIES, TRACING, Launcher
from helpers.paths import HELPERS

# A job whose network is a user's, of the module `net` beside it.
OWN_JOB = job_text(
    model={"network": 'python("net:network")'},
    data={"source": "digits()", "batch": 8},
    train={"steps": 1, "optimizer": "sgd()"},
    log=None,
)
METRICS = ("loss", "accuracy", "top_k")


class Trained:
    """The run directory of a training, and its output."""

    def __init__(self, folder: Path, shown: str = "") -> None:
        self.folder, self.shown = folder, shown
        self.lines = read_metrics(str(folder))
        self.weights: dict[str, np.ndarray[Any, Any]] = load_file(folder / "weights.safetensors")

    def losses(self, split: str = "train") -> list[float]:
        return [line["loss"] for line in self.lines if line["split"] == split]

    @property
    def records(self) -> dict[tuple[str, int], Record]:
        return {(line["split"], line["step"]): line for line in self.lines}


def without_times(line: Record) -> Record:
    """Returns a record without what depends on the machine: times, and which rank was the slowest."""
    return {name: value for name, value in line.items() if not name.startswith(("seconds", "slowest."))}


@cache
def load_what_traces() -> None:
    """Loads what tracing needs into this process, once, and not into each child that traces: 3 s each."""
    let_torchvision_load()  # which these import
    for name in (*LIBRARIES, *TRACING):
        importlib.import_module(name)
    trace_model(lambda: torch.nn.Linear(2, 2), TensorFact(shape=(2,), dtype="float32"))


def filled(text: str, choice: Mapping[str, str]) -> str:
    """Returns `text` with the choices in place of its names in capitals."""
    for name in sorted(choice, key=len, reverse=True):  # the longer of two names that begin alike
        text = text.replace(name.upper(), choice[name])
    return text


def beside_own_networks(folder: Path, text: str) -> Path:
    """Writes a job into a folder where it finds own_networks.py."""
    return write_job_with_helper("own_networks.py", folder, text)


def write_job_with_helper(helper: str, folder: Path, text: str) -> Path:
    """Writes a job into a folder where it finds this file of `helpers`."""
    shutil.copy(HELPERS / helper, folder)
    job = folder / "job.plt"
    job.write_text(text)
    return job


def staged(schedule: str, pipeline: int, data: int, microbatches: int, *settings: str) -> tuple[str, ...]:
    """Returns the `--set`s of a pipeline with `data` replicas, and further ones."""
    axes = (f"parallelism.data={data}", f"parallelism.pipeline={pipeline}", f"devices.cpus={data * pipeline}")
    return (*axes, f"parallelism.schedule={schedule}", f"parallelism.microbatches={microbatches}", *settings)


def ready(job: Path, *settings: str, profile: bool = False, around: LaunchContext = ALONE) -> Ready:
    """Returns the job with its `--set`s, as `dslc run` prepares it; if they ask for several nodes, on one of these.
    Raises AssertionError if it is rejected.
    """
    if any(setting.startswith("devices.nodes=") and setting != "devices.nodes=1" for setting in settings):
        around = dataclasses.replace(around, hosts=True)
    if any(call in job.read_text() for call in ("python(", "transformers(")):
        load_what_traces()
    loaded, report = load(str(job), list(settings)), Report()
    found = prepare(loaded, report, profile=profile, around=around) if loaded.job is not None else None
    assert found is not None, [d.message for d in (*loaded.report.errors, *report.errors)]
    return found


def train(
    launcher: Launcher, folder: Path, program: JobProgram, places: tuple[RankPlace, ...], **changed: Any
) -> Trained:
    """Trains `program`, `changed` in these fields, in the run directory `folder`."""
    outcome, shown = launcher.launch(dataclasses.replace(program, **changed), places, folder)
    if outcome is not None and outcome.failure is not None:
        shown += Path(outcome.failure.log).read_text(errors="replace")[-10_000:]
    assert outcome is not None and outcome.is_complete, f"{outcome}\n{shown}"
    return Trained(folder, shown)


def train_job(launcher: Launcher, job: Path, *settings: str, folder: Path | None = None) -> Trained:
    """Trains a job, in a folder of its own beside it if none is given."""
    made = ready(job, *settings)
    if folder is None:
        folder = job.parent / f"run{len(list(job.parent.iterdir()))}"
        folder.mkdir()
    return train(launcher, folder, made.program, made.places)


def train_on_nodes(launcher: Launcher, job: Path, folder: Path, *settings: str) -> Trained:
    """Trains a job of several nodes in the run directory `folder`, all of them on this machine."""
    made = ready(job, *settings, around=dataclasses.replace(ALONE, hosts=True))
    folder.mkdir(exist_ok=True)
    return train(launcher, folder, made.program, made.places)


def train_in_parts(launcher: Launcher, folder: Path, job: Path, *parts: tuple[int, tuple[str, ...]]) -> Trained:
    """Trains a job in the run directory `folder` to each of these steps in turn, with these settings."""
    for steps, settings in parts:
        made = ready(job, "checkpoint.every=100 steps", "checkpoint.resume=auto", *settings)
        found = train(launcher, folder, made.program, made.places, steps=steps)
    return found


def exchanges_as_planned(launcher: Launcher, folder: Path, job: Path, *settings: str) -> None:
    """Asserts that the exchanges of each rank in a step, run with --profile, are the plan's: kind, count, bytes."""
    for rank in profiled(launcher, folder, job, *settings):
        assert rank["recorded"] == list(range(FIRST_STEP, FIRST_STEP + STEPS)) and rank["steady"]
        found = {each["operation"]: each["measured"] for each in rank["collectives"]}
        assert found == {each["operation"]: each["predicted"] for each in rank["collectives"]}
        assert any(each["count"] for each in found.values())


def profiled(launcher: Launcher, folder: Path, job: Path, *settings: str) -> list[dict[str, Any]]:
    """Returns what the report says of each rank of a short training, run with --profile."""
    made = ready(job, *settings, f"train.steps={FIRST_STEP + STEPS}", profile=True)
    write_run_directory(made, str(folder))
    outcome, shown = launcher.launch(made.program, made.places, folder)
    assert outcome.failure is None, f"{outcome.failure}\n{shown}"
    ranks: Any = report_on(made, str(folder), outcome.steps)["ranks"]
    return list(ranks)


def agree(one: Trained, other: Trained, losses: float = 1e-5, weights: float | None = 1e-5) -> None:
    """Asserts the same records, with the same losses and metrics, and the same parameters; None: these are not
    compared.
    """
    expected, found = one.records, other.records
    assert expected and list(found) == list(expected)
    for key, record in expected.items():
        for metric in filter(record.__contains__, METRICS):
            np.testing.assert_allclose(
                found[key][metric], record[metric], rtol=0, atol=losses, err_msg=f"{key} {metric}"
            )
    assert list(other.weights) == list(one.weights)
    if weights is None:
        return
    for name, value in one.weights.items():
        assert other.weights[name].dtype == value.dtype, name
        np.testing.assert_allclose(other.weights[name], value, rtol=0, atol=weights, err_msg=name)
