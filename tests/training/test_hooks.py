"""Hooks see a training go on, keep their state, and are named where they fail; loggers have its records."""

from __future__ import annotations

import copy
import json
import pickle
import shutil
from pathlib import Path
from typing import Any

import pytest
from helpers.launcher import Launcher
from helpers.paths import HELPERS
from helpers.trained import Trained, ready, train_job

from dslc.jobs.check_job import check_one
from dslc.jobs.prepare_run import report_on
from dslc.runtime.hosts.connection import listen
from dslc.runtime.loop.hooks import Context, is_of_service
from dslc.runtime.process.failure import Failure, describe

JOB = """
model {
  network = [linear(8), relu(), linear(4)]
  loss    = cross_entropy()
}
data {
  source     = synthetic(samples = 48, shape = [6], classes = 4)
  batch      = 8
  validation = 8/48
}
devices { cpus = 2 }
train {
  steps     = 4
  optimizer = sgd(lr = 0.1)
}
log {
  every = 2 steps
}
"""


@pytest.fixture
def job(tmp_path: Path) -> Path:
    shutil.copy(HELPERS / "own_hooks.py", tmp_path)
    made = tmp_path / "job.plt"
    made.write_text(JOB)
    return made


def hook(name: str, **arguments: Any) -> str:
    given = "".join(f", {key} = {json.dumps(value)}" for key, value in arguments.items()).replace('"all"', "all")
    return f'train.hooks=python("own_hooks:{name}"{given})'


def diary(trained: Trained, rank: int, name: str = "diary") -> list[dict[str, Any]]:
    return [json.loads(line) for line in (trained.folder / f"{name}-{rank}.jsonl").read_text().splitlines()]


def failure(launcher: Launcher, folder: Path, job: Path, *settings: str) -> tuple[Failure, str]:
    made = ready(job, *settings)
    folder.mkdir()
    outcome, _ = launcher.launch(made.program, made.places, folder)
    assert outcome is not None and outcome.failure is not None
    return outcome.failure, describe(outcome)


def test_a_hook_sees_each_event_on_the_ranks_that_it_asks_for(launcher: Launcher, job: Path) -> None:
    two = 'train.hooks=[python("own_hooks:Diary"), python("own_hooks:Diary", name = "second", ranks = all)]'
    trained = train_job(launcher, job, two, "evaluate.every=2 steps")
    assert not (trained.folder / "diary-1.jsonl").exists() and diary(trained, 1, "second")
    told = diary(trained, 0)
    step = ["before_step", "after_backward", "after_step"]
    assert [each["event"] for each in told] == ["start", *step, *step, "evaluated", *step, *step, "evaluated", "end"]
    assert [each["step"] for each in told] == [0, 1, 1, 1, 2, 2, 2, 2, 3, 3, 3, 4, 4, 4, 4, 4]
    assert told[0]["shown"] == [2, 4, "SGD", "Sequential"]
    assert [each["gradients"] for each in told if "gradients" in each] == [0, 4, 0] * 4
    losses = trained.losses()
    assert [each["loss"] for each in told if each["event"] == "after_step"] == pytest.approx(
        [losses[0], losses[1], losses[1], losses[2]]
    )
    assert [each["metrics"]["loss"] for each in told if "metrics" in each] == trained.losses("validation")
    assert told[-1]["weights"]


def test_a_hook_is_told_when_an_epoch_begins_and_where_a_training_resumes(launcher: Launcher, job: Path) -> None:
    """8 samples of 24 a step: epochs of 3 steps."""
    told = 'train.hooks=python("own_hooks:Epochs", ranks = all)'
    short = ("data.source=synthetic(samples = 24, shape = [4], classes = 3)", "data.validation=0", "data.batch=8")
    kept = (f"checkpoint.dir={job.parent / 'kept'}", "checkpoint.every=5 steps", told, *short)
    first = train_job(launcher, job, *kept, "train.steps=5")
    assert [(first.folder / f"epochs-{rank}.txt").read_text() for rank in range(2)] == ["1 0\n4 1\n"] * 2
    resumed = train_job(launcher, job, *kept, "train.steps=8", "checkpoint.resume=auto")
    assert (resumed.folder / "epochs-0.txt").read_text() == "6 1\n7 2\n"


def test_a_hook_goes_on_from_its_state_under_another_plan(launcher: Launcher, job: Path) -> None:
    kept = f"checkpoint.dir={job.parent / 'kept'}"
    every = hook("Diary", ranks="all")
    train_job(launcher, job, every, kept, "checkpoint.every=2 steps", "train.steps=2")
    resumed = train_job(launcher, job, every, kept, "devices.cpus=4", "checkpoint.resume=auto")
    for rank in range(4):
        begun = diary(resumed, rank)[0]
        assert (begun["steps"], begun["mean"], begun["step"]) == (2, [3.0, 3.0], 2)


def test_a_failing_hook_is_named(launcher: Launcher, tmp_path: Path, job: Path) -> None:
    two = 'train.hooks=[python("own_hooks:Diary", ranks = all), python("own_hooks:Fails", at = 3)]'
    found, text = failure(launcher, tmp_path / "run", job, two)
    assert (found.rank, found.step, found.message) == (0, 3, "ValueError: no more")
    assert "in the hook `own_hooks:Fails`, its `after_step`" in text and "own_hooks.py" in text and "--set 1" in text
    last = json.loads((tmp_path / "run" / "diary-0.jsonl").read_text().splitlines()[-1])
    assert (last["event"], last["error"]) == ("failed", "no more")


@pytest.mark.parametrize(
    ("name", "more", "said"),
    [
        ("Sets", (), "`step` cannot be set: a hook looks at a training"),
        ("Unkept", ("checkpoint.every=2 steps",), "its state can have tensors, numbers, text, lists and dicts"),
    ],
)
def test_a_hook_may_not(
    launcher: Launcher, tmp_path: Path, job: Path, name: str, more: tuple[str, ...], said: str
) -> None:
    found, text = failure(launcher, tmp_path / "run", job, hook(name), *more)
    assert said in found.message and f"the hook `own_hooks:{name}`" in text


@pytest.mark.core
def test_a_logger_has_the_records_of_rank_0(launcher: Launcher, job: Path) -> None:
    path = job.parent / "records.json"
    trained = train_job(launcher, job, f'log.loggers=python("own_hooks:File", path = "{path}")')
    assert json.loads(path.read_text()) == trained.lines and len(trained.lines) == 4


def test_a_failing_logger_is_named_and_closed(launcher: Launcher, tmp_path: Path, job: Path) -> None:
    path = tmp_path / "fails"
    found, text = failure(launcher, tmp_path / "run", job, f'log.loggers=python("own_hooks:File", path = "{path}")')
    assert found.step == 4 and "in the logger `own_hooks:File`" in text
    assert [record["step"] for record in json.loads(path.read_text())] == [1, 2]


def test_a_logger_whose_service_is_away_misses_records(launcher: Launcher, job: Path) -> None:
    """It is told when it happens and at the end, and gets the others; one that cannot be made gets none."""
    path, nowhere = job.parent / "away", job.parent / "absent" / "records"
    both = f'python("own_hooks:File", path = "{path}"), python("own_hooks:Absent", path = "{nowhere}")'
    trained = train_job(launcher, job, f"log.loggers=[{both}]")
    assert [record["step"] for record in json.loads(path.read_text())] == [
        line["step"] for line in trained.lines if line["step"] != 2
    ]
    log = (trained.folder / "logs" / "rank-0.log").read_text() + trained.shown
    assert "missed the record of step 2 (RuntimeError: no answer), and the training goes on" in log
    assert "`own_hooks:File` missed 1 record (RuntimeError: no answer); metrics.jsonl has all of them" in log
    assert "the logger `own_hooks:Absent` gets no records, as it cannot be made (FileNotFoundError" in log


def test_services_that_cannot_be_used_end_no_training(launcher: Launcher, job: Path) -> None:
    """By grpc, by HTTP and in files of TensorBoard, the run's own too: it is told when it happens, and at the end."""
    (job.parent / "file").touch()
    with listen("127.0.0.1") as closed:
        port = closed.getsockname()[1]
    loggers = [f'Remote", port = {port}', 'Web", status = 503', f'Events", folder = "{job.parent / "file" / "in"}"']
    calls = ", ".join(f'python("own_hooks:{each})' for each in loggers)
    trained = train_job(launcher, job, f"log.loggers=[{calls}]", hook("Occupies"))
    log = (trained.folder / "logs" / "rank-0.log").read_text() + trained.shown
    assert len(trained.lines) == 4 and "the logger `own_hooks:Remote` missed the record of step 1" in log
    assert "the logger `own_hooks:Events` gets no records, as it cannot be made (NotADirectoryError" in log
    for name in ("Remote", "Web", "Events"):
        assert f"`own_hooks:{name}` missed 4 records (" in log, log
    assert "the logger `own_hooks:Remote` could not be closed (" in log
    last = trained.shown.splitlines()[-1]
    assert last.startswith("TensorBoard has not all records (") and "/tensorboard" in last, trained.shown


def test_lines_of_another_in_the_records_end_no_training(launcher: Launcher, tmp_path: Path, job: Path) -> None:
    made = ready(job, hook("Forges"))
    (tmp_path / "run").mkdir()
    outcome, shown = launcher.launch(made.program, made.places, tmp_path / "run")
    assert outcome is not None and outcome.failure is None and outcome.steps == 4, shown
    assert "\x1b" not in shown and "Traceback" not in shown and "step 4/4" in shown, shown
    assert report_on(made, str(tmp_path / "run"), 4)["steps"]["done"] == 4


def test_a_copy_of_a_context_keeps_its_values() -> None:
    values: dict[str, object] = {"step": 3}
    context = Context(values)
    copies = copy.copy(context), pickle.loads(pickle.dumps(context))
    values["step"] = 4
    assert (context.step, *(each.step for each in copies)) == (4, 3, 3)


def test_a_request_that_is_wrong_ends_the_training(launcher: Launcher, tmp_path: Path, job: Path) -> None:
    found, text = failure(launcher, tmp_path / "run", job, 'log.loggers=python("own_hooks:Web", status = 400)')
    assert found.message == "RuntimeError: the server answers 400" and "in the logger `own_hooks:Web`" in text


@pytest.mark.parametrize(
    "name, is_one",
    [
        *((name, True) for name in ("CommError", "ServiceUnavailable", "ReadTimeout", "_InactiveRpcError", "Timeout")),
        *((name, True) for name in ("ServerDisconnectedError", "OperationalError", "APIConnectionError", "TimedOut")),
        *((name, False) for name in ("CommandError", "ConnectorTypeError", "UsageError", "ValueError", "Transported")),
    ],
)
def test_an_exception_of_a_service_is_known_by_its_class(name: str, is_one: bool) -> None:
    error: Exception = type(name, (Exception,), {})("no")
    assert is_of_service(error) is is_one is is_of_service(type("Derived", (type(error),), {})("no"))


@pytest.mark.parametrize(
    ("trains", "settings", "said"),
    [
        ("false", (), "it freezes `0.weight`, and the ranks wait for its gradient"),
        ("true", ('model.freeze=["0.*"]',), "it lets `0.weight` train, which the optimizer was made without"),
        pytest.param("false", ("parallelism.zero=3",), "", marks=pytest.mark.long),
    ],
)
def test_a_hook_that_freezes_or_thaws_is_refused_where_ranks_would_differ(
    launcher: Launcher, tmp_path: Path, job: Path, trains: str, settings: tuple[str, ...], said: str
) -> None:
    hook = f'train.hooks=[python("own_hooks:Freezes", trains = {trains}, ranks = all)]'
    if not said:
        assert train_job(launcher, job, hook, "train.steps=6", *settings).lines
        return
    _, text = failure(launcher, tmp_path / "run", job, hook, "train.steps=6", *settings)
    assert said in text


@pytest.mark.parametrize(
    ("field", "call", "said"),
    [
        (
            "train.hooks",
            'python("own_hooks:Nothing")',
            "the class Nothing has none of the methods start, epoch",
        ),
        ("train.hooks", 'python("own_hooks:TakesNothing")', "its `start` is called with one argument"),
        ("train.hooks", 'python("own_hooks:HalfAState")', "it has `state_dict` alone"),
        ("train.hooks", 'python("own_hooks:Diary", nome = 1)', "it is called with other arguments"),
        ("log.loggers", 'python("own_hooks:Diary")', "the class Diary has no `log`"),
    ],
)
def test_what_is_none_is_refused(job: Path, field: str, call: str, said: str) -> None:
    (error,) = check_one(str(job), [f"{field}={call}"], trace=True)[0].errors
    assert error.code == "E0802" and said in error.message, error.message
