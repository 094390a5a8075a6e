"""`dslc run plan.json`: what `dslc run job.plt` trains, or a refusal that says what differs."""

from __future__ import annotations

import contextlib
import dataclasses
import io
import json
import re
import shutil
from pathlib import Path
from subprocess import CompletedProcess

import pytest
from helpers.commands import dslc
from helpers.paths import EXAMPLES
from helpers.trained import without_times

from dslc.compiler.plan_file import FORMAT, read_plan
from dslc.dsl.codes import explain
from dslc.dsl.diagnostics import JobError, Report
from dslc.jobs.plan_file_input import prepare_plan
from dslc.main import main
from dslc.python_api import functions
from dslc.runtime.process.records import read_metrics

SHORT = ("train.steps=6", "train.deterministic=true", "log.every=2 steps", "train.epochs=none")
TEXT = "".join(chr(97 + n * n % 23) for n in range(4000))
PIPELINE = """
model {
  network = gpt(layers = 2, width = 8, heads = 2, context = 16, vocab = 256)
  loss    = cross_entropy()
}
data {
  source     = text("data/words.txt")
  batch      = 8
  validation = 10%
}
train {
  steps         = 6
  optimizer     = adamw(lr = 0.01)
  deterministic = true
}
devices {
  cpus = 2
}
parallelism {
  pipeline     = 2
  microbatches = 4
}
checkpoint {
  every = 3 steps
}
"""

MINE = """
import os
import torch

class Net(torch.nn.Linear):
    def forward(self, x):
        assert "RANK" not in os.environ, "no more"
        return super().forward(x)

def net():
    return Net(8, 10)
"""


@pytest.fixture
def job(tmp_path: Path) -> Path:
    """A job with a data file, two stages of a pipeline, and its plan beside it."""
    folder = tmp_path / "jobs"
    (folder / "data").mkdir(parents=True)
    (folder / "data" / "words.txt").write_text(TEXT)
    (folder / "words.plt").write_text(PIPELINE)
    keep(folder / "words.plt")
    return folder / "words.plt"


def here(*arguments: object, cwd: Path | None = None) -> CompletedProcess[str]:
    """The same as `dslc`, in this process: for commands that start no ranks."""
    out, err = io.StringIO(), io.StringIO()
    with contextlib.chdir(cwd or "."), contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        status = main([*map(str, arguments)])
    return CompletedProcess([], status, out.getvalue(), err.getvalue())


def keep(job: Path, *settings: str, trace: bool = False) -> Path:
    """Writes `plan.json` beside a job, as a user does."""
    options = [*(word for each in settings for word in ("--set", each)), *(["--trace"] if trace else [])]
    made = here("plan", job.name, "--json", *options, cwd=job.parent)
    assert made.returncode == 0, made.stderr
    plan = job.with_name("plan.json")
    plan.write_text(made.stdout)
    return plan


def same(one: Path, other: Path) -> None:
    """Asserts that two runs left the same weights to the bit, and the same metrics but for times."""
    assert (one / "weights.safetensors").read_bytes() == (other / "weights.safetensors").read_bytes()
    lines = [list(map(without_times, read_metrics(str(run)))) for run in (one, other)]
    assert lines[0] == lines[1] and lines[0]
    assert (one / "plan.json").read_bytes() == (other / "plan.json").read_bytes()
    assert (one / "job.plt").read_bytes() == (other / "job.plt").read_bytes()


def refused(plan: Path, code: str, *words: str, command: str = "run", options: tuple[str, ...] = ()) -> str:
    """Asserts that a plan is refused before a process starts, and returns the message."""
    out = plan.with_name("never")
    after = ("--out", out) if command == "run" else ()
    run = here(command, plan, *after, *options)
    assert run.returncode == 1, run.stdout
    assert f"error[{code}]" in run.stderr and explain(code), run.stderr
    assert all(word in run.stderr for word in ("help:", *words)), run.stderr
    assert not out.exists()
    return run.stderr


def edit(plan: Path, change: str, by: str) -> None:
    text = plan.read_text()
    assert text.count(change) >= 1
    plan.write_text(text.replace(change, by, 1))


# ------------------------------------------------------------------------------------------------------ the same


@pytest.mark.slow
def test_data_parallel_training_is_the_same_to_the_bit(tmp_path: Path) -> None:
    shutil.copy(EXAMPLES / "digits.plt", tmp_path)
    plan = keep(tmp_path / "digits.plt", *SHORT)
    settings = [word for each in SHORT for word in ("--set", each)]
    of_the_job = dslc("run", "digits.plt", *settings, "--out", "runs/job", cwd=tmp_path)
    assert of_the_job.returncode == 0, of_the_job.stderr
    of_the_plan = dslc("run", plan.name, "--out", "runs/plan", cwd=tmp_path)
    assert of_the_plan.returncode == 0, of_the_plan.stderr
    same(tmp_path / "runs" / "job", tmp_path / "runs" / "plan")
    hidden = [re.sub(r"\d+\.\d+ s|runs/\w+", "", run.stdout) for run in (of_the_job, of_the_plan)]
    assert hidden[0].splitlines()[-3:] == hidden[1].splitlines()[-3:]


@pytest.mark.long
def test_a_pipeline_is_the_same_to_the_bit_after_it_moved(job: Path, tmp_path: Path) -> None:
    """The plan with its job's folder, and without the job; then the plan in the run directory."""
    of_the_job = dslc("run", job, "--out", tmp_path / "job")
    assert of_the_job.returncode == 0, of_the_job.stderr
    there = tmp_path / "elsewhere"
    job.parent.rename(there)
    (there / "words.plt").unlink()
    of_the_plan = dslc("run", there / "plan.json", "--out", there / "run")
    assert of_the_plan.returncode == 0, of_the_plan.stderr
    one, other = tmp_path / "job" / "weights.safetensors", there / "run" / "weights.safetensors"
    assert one.read_bytes() == other.read_bytes()
    again = dslc("run", there / "run" / "plan.json", "--out", tmp_path / "again")
    assert again.returncode == 0, again.stderr
    assert one.read_bytes() == (tmp_path / "again" / "weights.safetensors").read_bytes()


def test_the_graph_in_the_file_is_what_runs(job: Path) -> None:
    """A plan whose graph says another learning rate, with checksums to match, trains at that rate."""
    made = read_plan(job.with_name("plan.json").read_text())
    made.graph.change("optimizer", lr=0.5)
    job.with_name("plan.json").write_text(made.text())
    report = Report()
    ready = prepare_plan(str(job.with_name("plan.json")), (), report)
    assert ready is not None, report.found
    assert (ready.program.optimizer.lr, ready.compiled.analysis.job.train.optimizer.lr) == (0.5, 0.01)


@pytest.mark.slow
def test_a_run_that_ended_early_goes_on(job: Path, tmp_path: Path) -> None:
    plan, out = job.with_name("plan.json"), tmp_path / "run"
    assert dslc("run", plan, "--out", out).returncode == 0
    assert here("run", plan, "--out", out).returncode == 2, "a run is never written over"
    shutil.rmtree(out / "checkpoints" / "step-00000006")
    on = dslc("run", out / "job.plt", "--out", out, "--set", "checkpoint.resume=auto")
    assert on.returncode == 0, on.stderr
    kept = keep(job, "checkpoint.resume=auto")
    assert dslc("run", kept, "--out", out).returncode == 0


@pytest.mark.slow
def test_a_failure_names_the_line_of_the_job(own: Path) -> None:
    keep(own, trace=True)
    tmp_path = own.parent
    texts = [dslc("run", name, "--out", f"run-{name}", cwd=tmp_path) for name in ("job.plt", "plan.json")]
    assert [run.returncode for run in texts] == [3, 3], [run.stderr for run in texts]
    first = [run.stderr.splitlines()[0] for run in texts]
    assert first[0] == first[1] and "job.plt:" in texts[1].stderr, texts[1].stderr


def test_a_plan_of_a_sweep_is_of_its_first_combination(tmp_path: Path) -> None:
    for name in ("sweep.plt", "digits.plt"):
        shutil.copy(EXAMPLES / name, tmp_path)
    report = Report()
    ready = prepare_plan(str(keep(tmp_path / "sweep.plt")), (), report)
    assert ready is not None and ready.loaded.job is not None, report.found
    assert not ready.loaded.combinations
    assert ready.program.optimizer.lr == ready.loaded.job.train.optimizer.lr


@pytest.mark.slow
def test_a_program_runs_a_plan(job: Path, tmp_path: Path) -> None:
    result = functions.run(str(job.with_name("plan.json")), out=str(tmp_path / "run"))
    assert result.metrics[-1]["split"] == "validation"
    with pytest.raises(JobError, match="E1006"):
        functions.run(str(job.with_name("plan.json")), ["train.steps=9"])


@pytest.mark.parametrize("command", [("plan",), ("plan", "--rank", "1"), ("plan", "--json"), ("plan", "--origins")])
def test_a_plan_is_shown_from_the_file_alone(command: tuple[str, ...], job: Path, tmp_path: Path) -> None:
    of_the_job = here(command[0], job.name, *command[1:], cwd=job.parent).stdout
    alone = tmp_path / "plan.json"
    shutil.move(job.with_name("plan.json"), alone)
    shutil.rmtree(job.parent)
    of_the_file = here(command[0], alone.name, *command[1:], cwd=tmp_path)
    assert of_the_file.stdout == of_the_job and of_the_job, of_the_file.stderr


@pytest.mark.parametrize("view", ["placement", "graph", "schedule"])
def test_a_plan_is_drawn_from_the_file_alone(view: str, job: Path, tmp_path: Path) -> None:
    assert here("render", job, "--view", view, "-o", tmp_path / "job.dot").returncode == 0
    plan = tmp_path / "plan.json"
    shutil.move(job.with_name("plan.json"), plan)
    assert here("render", plan, "--view", view, "-o", tmp_path / "plan.dot").returncode == 0
    assert (tmp_path / "job.dot").read_bytes() == (tmp_path / "plan.dot").read_bytes()


# ------------------------------------------------------------------------------------------------------- refusals


def test_one_changed_byte_is_refused(job: Path) -> None:
    plan = job.with_name("plan.json")
    named = json.loads(plan.read_text())["hash"]
    edit(plan, '"lr": 0.01', '"lr": 0.02')
    refused(plan, "E1002", f"plan {named}")
    for command in ("plan", "render"):
        refused(plan, "E1002", command=command, options=("-o", "x.dot") if command == "render" else ())


def test_another_version_is_refused_by_run_alone(job: Path) -> None:
    plan = job.with_name("plan.json")
    made = read_plan(plan.read_text())
    plan.write_text(dataclasses.replace(made, dslc="0.0.9").text())
    refused(plan, "E1003", "dslc 0.0.9")
    assert here("plan", plan).returncode == 0


def test_another_format_is_refused(job: Path) -> None:
    plan = job.with_name("plan.json")
    edit(plan, f'"format": {FORMAT}', f'"format": {FORMAT + 1}')
    refused(plan, "E1003", f"format {FORMAT + 1}")


@pytest.mark.parametrize(
    ("text", "said"),
    [
        (TEXT + "more of it", "./data/words.txt had 4,000 bytes or files, and has 4,010"),
        (TEXT[::-1], "./data/words.txt has other contents"),
    ],
)
def test_a_data_file_that_changed_is_refused(text: str, said: str, job: Path) -> None:
    (job.parent / "data" / "words.txt").write_text(text)
    refused(job.with_name("plan.json"), "E1004", said)


def test_a_data_file_that_is_gone_is_reported_as_for_the_job(job: Path) -> None:
    (job.parent / "data" / "words.txt").unlink()
    assert "words.plt:" in refused(job.with_name("plan.json"), "E0309")


def test_other_device_memory_is_refused(job: Path) -> None:
    """The memory of a device, from the user's own catalogue; that of a GPU is in tests/compiler/test_plan_file.py."""
    catalogue = job.with_name("devices.toml")
    catalogue.write_text("[cpu]\nmemory = '8 GiB'\n")
    plan = keep(job, 'devices.catalogue="devices.toml"')
    catalogue.write_text("[cpu]\nmemory = '4 GiB'\n")
    refused(plan, "E1004", f"hardware.memory was {8 * 2**30}, and is {4 * 2**30}")


def test_settings_are_refused_with_the_remedy(job: Path) -> None:
    plan = job.with_name("plan.json")
    setting = ("--set", "train.steps=9")
    refused(plan, "E1006", "--set train.steps=9", "dslc plan JOB", options=setting)
    refused(plan, "E1006", command="plan", options=setting)
    refused(plan, "E1006", "--trace", command="plan", options=("--trace",))


@pytest.mark.skipif(shutil.which("ssh") is None, reason="there is no ssh")
@pytest.mark.parametrize(
    "hosts, said",
    [
        (["first.invalid", "other.invalid"], ".invalid cannot be reached by ssh"),
        (["first.invalid"], "`ssh(…)` with one host takes the job: give `run` its file"),
    ],
)
def test_a_plan_whose_job_names_hosts_does_not_train_here(job: Path, hosts: list[str], said: str) -> None:
    by_ssh = f'launch.with=ssh(hosts = {json.dumps(hosts)}, options = ["-F", "/dev/null"])'
    devices = (f"devices.nodes={len(hosts)}", f"devices.cpus={2 // len(hosts)}")
    plan = job.with_name("hosts.json")
    plan.write_text(
        here("plan", job, *(word for each in (by_ssh, *devices) for word in ("--set", each)), "--json").stdout
    )
    run = here("run", plan, "--out", job.parent / "run")
    assert run.returncode == 2 and said in run.stderr and not (job.parent / "run").exists(), run.stderr


@pytest.fixture
def own(tmp_path: Path) -> Path:
    """A job whose network is the user's, and fails in a rank."""
    (tmp_path / "mine.py").write_text(MINE)
    job = tmp_path / "job.plt"
    job.write_text(
        'model {\n  network = python("mine:net")\n  loss = cross_entropy()\n}\n'
        "data {\n  source = synthetic(samples = 64, shape = [8], classes = 10)\n  batch = 8\n}\n"
        "train {\n  steps = 2\n  optimizer = sgd(lr = 0.1)\n}\n"
    )
    return job


def test_a_plan_whose_network_was_not_traced_is_refused(own: Path) -> None:
    refused(keep(own), "E1005", "--trace")


def test_a_plan_whose_data_was_not_looked_at_is_refused(tmp_path: Path) -> None:
    for name in ("own.plt", "net.py"):
        shutil.copy(EXAMPLES / "own" / name, tmp_path)
    plan = keep(tmp_path / "own.plt")
    refused(plan, "E1005", "--trace")


def test_a_function_that_changed_is_refused(tmp_path: Path) -> None:
    for name in ("own.plt", "net.py"):
        shutil.copy(EXAMPLES / "own" / name, tmp_path)
    keep(tmp_path / "own.plt", trace=True)
    with (tmp_path / "net.py").open("a") as file:
        file.write("# another\n")
    refused(tmp_path / "plan.json", "E1004", "./net.py had")


def test_what_is_no_plan_is_refused(tmp_path: Path) -> None:
    (tmp_path / "plan.json").write_text("model { }")
    refused(tmp_path / "plan.json", "E1001", "dslc plan JOB --json")
    missing = here("run", tmp_path / "other.json")
    assert missing.returncode == 1 and "error[E0101]" in missing.stderr


def test_the_plan_of_an_elastic_job_is_refused(job: Path) -> None:
    made = here("plan", job, "--set", "devices.nodes=1..2", "--set", "data.batch=16", "--json", "--trace")
    plan = job.with_name("elastic.json")
    plan.write_text(made.stdout)
    refused(plan, "E0815", "the plan of an elastic job", "dslc plan JOB --set devices.nodes=")
