"""Loggers of libraries: what each has written is read back with its own library, and a failure ends no training."""

from __future__ import annotations

import csv
import importlib.util
import json
import struct
import threading
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest
from helpers.commands import dslc

from dslc.compiler.ir.program import CheckpointStep
from dslc.dsl.language.job import JobSpec
from dslc.dsl.language.loggers import LibraryLogger
from dslc.dsl.meaning.load import load_text
from dslc.jobs.check_job import check_one
from dslc.loggers import libraries
from dslc.loggers.feed import Feed, logger_keys
from dslc.loggers.libraries import CSVRun, RunFacts
from dslc.loggers.start import RUNS, feed_loggers, logger_orders, previous_runs, settings_of
from dslc.runtime.process.records import NOTES
from dslc.runtime.process.run_status import RunStatus, begin, is_asked_to_stop, write_status

JOB = """
model { network = [linear(8), relu(), linear(4)], loss = cross_entropy() }
data { source = synthetic(samples = 48, shape = [6], classes = 4), batch = 8, validation = 8/48 }
devices { cpus = 2 }
train { steps = 4, optimizer = sgd(lr = 0.1) }
log { every = 1 step, loggers = [LOGGERS] }
"""
SVG = '<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 8 6" width="8pt" height="6pt"><title>plan</title></svg>\n'


def job_of(loggers: str) -> JobSpec:
    job = load_text(JOB.replace("LOGGERS", loggers)).job
    assert job is not None
    return job


def write_records(folder: Path, *records: dict[str, Any]) -> None:
    with (folder / "metrics.jsonl").open("a") as file:
        file.writelines(json.dumps(record) + "\n" for record in records)


def write_texts(folder: Path, *steps: int) -> None:
    with (folder / "samples.jsonl").open("a") as file:
        for step in steps:
            text = {"step": step, "number": 0, "prompt": "a <b>", "text": f" {step}", "tokens": 2, "ended": False}
            file.write(json.dumps(text | {"seconds": 0.1, "took": 0.1}) + "\n")


def record(step: int, loss: float | None, split: str = "train", **numbers: float) -> dict[str, Any]:
    return {"step": step, "split": split, "loss": loss, "seconds": 0.1 * step, **numbers}


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A run directory as it is before the ranks are started."""
    run = tmp_path / "run"
    (run / "logs").mkdir(parents=True)
    (run / "job.plt").write_text(JOB)
    (run / "plan.json").write_text("{}")
    begin(str(run), 4)
    return run


def feed_of(folder: Path, loggers: str, runs: dict[str, str] | None = None) -> Feed:
    job = job_of(loggers)
    given = [logger_orders(logger) for logger in job.log.loggers if isinstance(logger, LibraryLogger)]
    orders = {"folder": str(folder), "loggers": given, "job": "digits", "settings": settings_of(job)}
    places = {"identity_folders": [str(folder)], "job_folder": str(folder.parent)}
    return Feed(orders | places | {"runs": runs or {}})


def train(folder: Path, loggers: str) -> None:
    """Does what a training with a validation and a report does, and a second start that does step 2 again."""
    feed = feed_of(folder, loggers)
    feed.open()
    write_records(folder, record(1, 2.0, lr=0.1), record(2, 1.5, lr=0.1))
    write_texts(folder, 1, 2)
    (folder / "plan.svg").write_text(SVG)
    feed.pass_on()
    write_status(str(folder), RunStatus(state="stopped", step=2, steps=4))
    feed.close()
    resumed = feed_of(folder, loggers, json.loads((folder / RUNS).read_text()))
    resumed.open()
    write_records(folder, record(2, 1.25, lr=0.1), record(2, 3.0, split="validation", accuracy=0.5), record(3, None))
    write_texts(folder, 2, 3)
    (folder / "report.json").write_text('{"steps": 3}')
    write_status(str(folder), RunStatus(state="done", step=3, steps=4))
    resumed.close()


def test_settings_are_those_of_the_resolved_job_in_the_language() -> None:
    settings = settings_of(job_of("csv()"))
    assert settings["train.optimizer"].startswith("sgd(lr = 0.1") and settings["data.batch"] == "8"
    assert settings["log.loggers"] == "[csv(required = false)]" and settings["checkpoint.keep"] == "2"


def test_a_table_has_each_record_once(folder: Path) -> None:
    train(folder, f'csv(), csv(dir = "{folder.parent / "other"}")')
    table, place = folder / "metrics.csv", folder.parent / "other" / "digits run"
    for path in (table, place / "metrics.csv"):
        with path.open(newline="") as file:
            rows = [(row["step"], row["split"], row["loss"], row["accuracy"]) for row in csv.DictReader(file)]
        assert rows == [
            ("1", "train", "2.0", ""),
            ("2", "train", "1.25", ""),
            ("2", "validation", "3.0", "0.5"),
            ("3", "train", "", ""),
        ]
        with (path.parent / "texts.csv").open(newline="") as file:
            texts = [(row["step"], row["number"], row["prompt"], row["text"]) for row in csv.DictReader(file)]
        assert texts == [("1", "0", "a <b>", " 1"), ("2", "0", "a <b>", " 2"), ("3", "0", "a <b>", " 3")]
    another = feed_of(folder, f'csv(dir = "{folder.parent / "other"}")')  # a run of the same name
    another.open()
    another.close()
    assert (place / "metrics.csv").read_text().count("\n") == 5
    assert (folder.parent / "other" / "digits run 2" / "metrics.csv").read_text() == "step,split\n"
    new = feed_of(folder, "csv()", {"csv": str(place / "metrics.csv")})  # resumed elsewhere
    new.open()
    new.close()
    assert table.read_text().count("\n") == 5


def test_event_files_have_numbers_the_job_and_the_diagram(folder: Path) -> None:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    train(folder, "tensorboard()")
    events = EventAccumulator(str(folder / "tensorboard"))
    events.Reload()
    assert [(event.step, event.value) for event in events.Scalars("train/loss")] == [(1, 2.0), (2, 1.25)]
    assert [event.value for event in events.Scalars("validation/accuracy")] == [0.5]
    assert b"cross_entropy" in events.Tensors("job.plt/text_summary")[0].tensor_proto.string_val[0]
    assert b'"steps": 3' in events.Tensors("report.json/text_summary")[0].tensor_proto.string_val[0]
    assert events.Images("plan")[0].width >= 8
    assert {event.step for event in events.Tensors("texts/0/text_summary")} == {1, 2, 3}


@pytest.mark.slow
@pytest.mark.skipif(importlib.util.find_spec("mlflow") is None, reason="mlflow is not installed: dslc[mlflow]")
def test_mlflow_has_one_run_over_both_starts(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from mlflow.tracking import MlflowClient

    train(folder, 'mlflow(uri = "file:mlruns", experiment = "tests")')
    uri = f"file:{folder.parent / 'mlruns'}"
    client = MlflowClient(tracking_uri=uri)
    experiment = client.get_experiment_by_name("tests")
    assert experiment is not None
    (run,) = client.search_runs([experiment.experiment_id])
    assert run.info.status == "FINISHED" and run.data.params["data.batch"] == "8"
    history = client.get_metric_history(run.info.run_id, "train/loss")
    assert [(metric.step, metric.value) for metric in history] == [(1, 2.0), (2, 1.5), (2, 1.25)]
    names = {artifact.path for artifact in client.list_artifacts(run.info.run_id)}
    assert names == {"job.plt", "plan.json", "plan.svg", "report.json", "texts"}
    texts = sorted(artifact.path for artifact in client.list_artifacts(run.info.run_id, "texts/0"))
    assert texts == [f"texts/0/step-{step:08}.txt" for step in (1, 2, 3)]


def offline_records(folder: Path) -> Iterator[Any]:
    """Yields the records of all offline starts, in order of time, by wandb's own classes.

    The file is a log of LevelDB: blocks of 32 KiB, in which each part of a record has its checksum, length and kind
    (1: a whole record, 2 to 4: its first, middle and last part).
    """
    from wandb.proto import wandb_internal_pb2 as wandb_records

    for path in sorted(folder.glob("wandb/offline-run-*/run-*.wandb")):
        data, at, parts = path.read_bytes(), 7, b""
        while at + 7 <= len(data):
            if 32768 - at % 32768 < 7:
                at += 32768 - at % 32768
                continue
            _, length, kind = struct.unpack_from("<IHB", data, at)
            parts += data[at + 7 : at + 7 + length]
            at += 7 + length
            if kind in (1, 4):
                yield wandb_records.Record.FromString(parts)
                parts = b""


@pytest.mark.slow
@pytest.mark.skipif(importlib.util.find_spec("wandb") is None, reason="wandb is not installed: dslc[wandb]")
def test_wandb_has_one_run_over_both_starts_and_sends_nothing(folder: Path) -> None:
    import wandb

    train(folder, 'wandb(project = "tests", mode = offline, tags = ["a"])')
    wandb.teardown()  # as the process that feeds loggers does when it exits: everything is written
    records = list(offline_records(folder))
    runs = [kept.run for kept in records if kept.HasField("run")]
    assert {run.run_id for run in runs} == {json.loads((folder / RUNS).read_text())["wandb"]}
    assert runs[0].project == "tests" and list(runs[0].tags) == ["a"]
    config = {update.key: json.loads(update.value_json) for update in runs[0].config.update}
    assert config["data.batch"] == "8"
    rows = [
        {item.key or item.nested_key[0]: json.loads(item.value_json) for item in kept.history.item}
        for kept in records
        if kept.HasField("history")
    ]
    losses = [(row["step"], row["train/loss"]) for row in rows if "train/loss" in row]
    assert losses == [(1, 2.0), (2, 1.5), (2, 1.25)]
    assert [row["step"] for row in rows if "texts/0" in row] == [1, 2, 3]
    files = {path.name for path in folder.glob("wandb/offline-run-*/files/*")}
    assert {"job.plt", "plan.json", "plan.svg", "report.json"} <= files


@pytest.mark.slow
@pytest.mark.skipif(
    importlib.util.find_spec("trackio") is None, reason="trackio needs another huggingface_hub than ours"
)
def test_trackio_has_one_run_over_both_starts(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Continuous integration does not install it: no version of it takes the other libraries of constraints.txt."""
    monkeypatch.setenv("TRACKIO_DIR", str(folder.parent / "trackio"))
    train(folder, 'trackio(project = "tests")')
    import trackio
    from trackio.sqlite_storage import SQLiteStorage

    (run,) = trackio.Api().runs("tests")
    assert run.config["data.batch"] == "8"
    losses = [
        (row["step"], row["train/loss"]) for row in SQLiteStorage.get_logs("tests", run.name) if "train/loss" in row
    ]
    assert losses == [(1, 2.0), (2, 1.5), (2, 1.25)]
    assert len(list((folder.parent / "trackio" / "artifacts").rglob("blobs/*/*/*"))) == 4


def test_a_logger_that_fails_is_noted_and_one_that_is_required_stops_the_training(folder: Path) -> None:
    (folder / "metrics.csv").mkdir()
    feed = feed_of(folder, 'csv(), csv(dir = "job.plt/x")'.replace("job.plt", str(folder / "job.plt")))
    feed.open()
    write_records(folder, *(record(step, 1.0) for step in (1, 2)))
    feed.close()
    notes = (folder / NOTES).read_text()
    assert "the logger `csv` gets no records, as it cannot be opened (IsADirectoryError" in notes
    assert "the logger `csv 2` missed 2 records (NotADirectoryError" in notes and not is_asked_to_stop(str(folder))
    required = feed_of(folder, "csv(required = true)")
    required.open()
    required.close()
    assert "it is required, so the training stops after its step" in (folder / NOTES).read_text()
    assert is_asked_to_stop(str(folder))


def test_a_logger_that_hangs_holds_up_no_other(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    answered = threading.Event()

    class Hangs(CSVRun):
        def __init__(self, arguments: Mapping[str, Any], facts: RunFacts) -> None:
            answered.wait()
            super().__init__(arguments, facts)

    monkeypatch.setitem(libraries.LIBRARIES, "wandb", lambda arguments, facts: Hangs({"dir": str(folder / "w")}, facts))
    feed = feed_of(folder, "wandb(), csv()")
    feed.open()
    write_records(folder, record(1, 2.0))
    feed.pass_on()
    while not (folder / "metrics.csv").exists() or "1,train,2.0" not in (folder / "metrics.csv").read_text():
        threading.Event().wait(0.01)
    answered.set()
    feed.close()
    assert "1,train,2.0" in (folder / "w" / "digits run" / "metrics.csv").read_text()


def test_a_logger_is_called_no_more_after_some_failures(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    class Fails(CSVRun):
        def log(self, record: dict[str, Any]) -> None:
            raise ConnectionError("no answer")

    monkeypatch.setitem(libraries.LIBRARIES, "csv", Fails)
    feed = feed_of(folder, "csv()")
    feed.open()
    write_records(folder, *(record(step, 1.0) for step in range(1, 6)))
    feed.close()
    notes = (folder / NOTES).read_text().splitlines()
    assert len(notes) == 3 and "missed the record of step 1 (" in notes[0]
    assert "missed the record of step 3 (" in notes[1] and notes[1].endswith("and is called no more")
    assert "missed 5 records" in notes[2]


def test_a_process_beside_the_training_feeds_the_loggers(folder: Path, capfd: pytest.CaptureFixture[str]) -> None:
    write_records(folder, record(1, 2.0))
    job = job_of(f'csv(), csv(dir = "{folder / "job.plt"}")')
    with feed_loggers(job, CheckpointStep(folder=str(folder.parent / "kept"), every=1), str(folder)):
        write_records(folder, record(2, 1.5))
    assert [line[:9] for line in (folder / "metrics.csv").read_text().splitlines()] == ["step,spli", "2,train,1"]
    assert json.loads((folder.parent / "kept" / RUNS).read_text()) == {"csv": str(folder / "metrics.csv")}
    assert "the logger `csv 2` missed 1 record (FileExistsError" in capfd.readouterr().err


def test_a_note_written_after_the_last_look_of_the_launcher_is_shown(
    folder: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    (folder / "metrics.csv").mkdir()
    (folder / NOTES).write_text("a note that the launcher has shown\n")
    shown = (folder / NOTES).stat().st_size
    write_status(str(folder), RunStatus(state="running", step=1, steps=4))
    with feed_loggers(job_of("csv()"), CheckpointStep(), str(folder)):
        while (folder / NOTES).read_bytes().count(b"\n") < 2:
            threading.Event().wait(0.01)
        write_status(str(folder), RunStatus(state="done", step=4, steps=4, notes_shown=shown))
    shown_late = capfd.readouterr().err.splitlines()
    assert len(shown_late) == 1 and shown_late[0].startswith("the logger `csv` gets no records")


def test_a_resumed_training_continues_the_runs(folder: Path) -> None:
    (folder / RUNS).write_text('{"wandb": "a1"}')
    checkpoint = folder / "checkpoints" / "step-00000002"
    for resume in (checkpoint, checkpoint.parent, folder):
        assert previous_runs(CheckpointStep(resume=str(resume)), str(folder.parent / "new")) == {"wandb": "a1"}
    kept = CheckpointStep(resume="auto", folder=str(folder))
    assert previous_runs(kept, str(folder.parent / "new")) == {"wandb": "a1"}
    assert previous_runs(CheckpointStep(), str(folder)) == {}
    assert logger_keys(["csv", "wandb", "csv"]) == ["csv", "wandb", "csv 2"]


@pytest.mark.slow
def test_dslc_run_feeds_loggers_with_all_files(tmp_path: Path) -> None:
    job, out, copies = tmp_path / "digits.plt", tmp_path / "run", tmp_path / "copies" / "digits run"
    unusable = f'csv(dir = "{job}/x")'  # a file has no folders
    job.write_text(JOB.replace("LOGGERS", f'tensorboard(), csv(dir = "{copies.parent}"), {unusable}'))
    run = dslc("run", job, "--out", out)
    assert run.returncode == 0, run.stdout + run.stderr
    for name in ("job.plt", "plan.json", "plan.svg", "report.json"):
        assert (copies / name).read_text() == (out / name).read_text()
    with (copies / "metrics.csv").open(newline="") as file:
        losses = [float(row["loss"]) for row in csv.DictReader(file)]
    assert losses == [json.loads(line)["loss"] for line in (out / "metrics.jsonl").read_text().splitlines()]
    assert list((out / "tensorboard").iterdir())
    assert "`csv 2` gets no records" in run.stdout + run.stderr and "missed 5 records" in run.stderr


def test_a_library_that_is_not_installed_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    job = tmp_path / "digits.plt"
    job.write_text(JOB.replace("LOGGERS", "trackio(), csv()"))
    find = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name, *a: None if name == "trackio" else find(name, *a))
    (error,) = check_one(str(job), [], trace=True)[0].errors
    assert error.code == "E0803" and "`pip install 'dslc[trackio]'`" in error.help
