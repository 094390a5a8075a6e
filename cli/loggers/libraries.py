"""The loggers of libraries: what each does with the settings, the records and the files of a run.

A run keeps its identity over resumes, if the library knows one. Names of numbers come from `metrics_of`:
`train/loss`, `validation/accuracy`, `phases/forward`.
"""

from __future__ import annotations

import contextlib
import csv
import os
import re
import secrets
import shutil
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from html import escape
from itertools import count
from typing import TYPE_CHECKING, Any

from dslc.runtime.process.records import Record, TensorBoard, metrics_of

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

_MOST_TEXT = 6000  # characters of a parameter that MLflow takes
_FAILED = "failed"
_KEYS = ("step", "split")  # of a row
_TEXTS, _TEXT_COLUMNS = "texts.csv", ("step", "number", "prompt", "text", "tokens", "ended")


@dataclass(frozen=True, kw_only=True)
class RunFacts:
    """The facts of a run that a logger gets when it opens: `settings` are the fields of the resolved job by path,
    and `previous` is the identity of the run that a resumed training continues ("" for none).
    """

    folder: str
    job: str
    job_folder: str
    settings: Mapping[str, str]
    previous: str = ""

    @property
    def name(self) -> str:
        """The name of the run, unless the job gives one."""
        return f"{self.job} {os.path.basename(self.folder)}"


class LibraryRun(ABC):
    """A run as a library keeps it; opened by its constructor. `address` is where a person finds it."""

    identity: str = ""
    address: str = ""

    @abstractmethod
    def log(self, record: Record) -> None:
        """Keeps the numbers of a record."""

    @abstractmethod
    def log_text(self, text: Record) -> None:
        """Keeps a text that the network generated after a step."""

    @abstractmethod
    def add_file(self, path: str) -> None:
        """Keeps a file of the run directory."""

    @abstractmethod
    def close(self, state: str) -> None:
        """Ends the run: `done`, `stopped` or `failed`."""


class TensorBoardRun(LibraryRun):
    """Event files. They are opened with the first record, whose step tells which earlier events are done again."""

    def __init__(self, arguments: Mapping[str, Any], facts: RunFacts) -> None:
        self._folder = os.path.join(facts.folder, "tensorboard")
        if arguments["dir"]:
            self._folder = facts.previous or _new_folder(arguments["dir"], facts.name)
            self.identity = self._folder
        self._board: TensorBoard | None = None
        self._last_step = 0
        self._pending_files: list[str] = []

    def log(self, record: Record) -> None:
        if self._board is None or record["step"] < self._last_step:
            self._reopen(record["step"])
        assert self._board is not None
        self._last_step = record["step"]
        self._board.write(record)

    def log_text(self, text: Record) -> None:
        if self._board is None:
            self._reopen(text["step"])
        assert self._board is not None
        self._board.write_text(text)

    def add_file(self, path: str) -> None:
        if self._board is None:
            self._pending_files.append(path)
        elif path.endswith(".svg"):
            self._board.writer.add_image("plan", _pixels(path), 0)
        elif not path.endswith("plan.json"):
            with open(path, encoding="utf-8") as file:
                self._board.writer.add_text(os.path.basename(path), f"```\n{file.read()}\n```", 0)

    def close(self, state: str) -> None:
        if self._board is None:
            self._reopen(1)
        assert self._board is not None
        self._board.close()

    def _reopen(self, step: int) -> None:
        if self._board is not None:
            self._board.close()
        self._board = TensorBoard(self._folder, step)
        pending, self._pending_files = self._pending_files, []
        for path in pending:
            self.add_file(path)


def _pixels(path: str) -> NDArray[np.uint8]:
    """Returns an SVG diagram as an array of height, width and colors."""
    import io

    import numpy as np
    from PIL import Image

    from dslc.compiler.show.picture import paint

    with open(path, encoding="utf-8") as file:
        image = Image.open(io.BytesIO(paint(file.read())))
    return np.asarray(image.convert("RGB")).transpose(2, 0, 1)


class WandbRun(LibraryRun):
    """A run of Weights & Biases. Steps are a number of their own, as a restart may do some again."""

    def __init__(self, arguments: Mapping[str, Any], facts: RunFacts) -> None:
        import wandb

        self.identity = facts.previous or secrets.token_hex(4)
        self._run = wandb.init(
            project=arguments["project"] or facts.job,
            entity=arguments["entity"],
            name=arguments["name"] or facts.name,
            group=arguments["group"],
            tags=arguments["tags"] or None,
            mode=arguments["mode"],
            id=self.identity,
            resume="allow",
            dir=facts.folder,
            config=dict(facts.settings),
            allow_val_change=True,
            settings=wandb.Settings(console="off"),
        )
        self._run.define_metric("step")
        self._run.define_metric("*", step_metric="step")
        self.address = self._run.url or ""
        self._html: Callable[[str], object] = wandb.Html

    def log(self, record: Record) -> None:
        self._run.log({"step": record["step"], **metrics_of(record)})

    def log_text(self, text: Record) -> None:
        self._run.log(
            {"step": text["step"], f"texts/{text['number']}": self._html(f"<pre>{escape(_full_text(text))}</pre>")}
        )

    def add_file(self, path: str) -> None:
        self._run.save(path, base_path=os.path.dirname(path), policy="now")
        if path.endswith(".svg"):
            with open(path, encoding="utf-8") as file:
                self._run.log({"plan": self._html(file.read())})

    def close(self, state: str) -> None:
        self._run.finish(exit_code=int(state == _FAILED))


class MLflowRun(LibraryRun):
    """A run of MLflow, with files as its artifacts."""

    def __init__(self, arguments: Mapping[str, Any], facts: RunFacts) -> None:
        from mlflow.entities import Param
        from mlflow.tracking import MlflowClient

        uri = arguments["uri"] or os.environ.get("MLFLOW_TRACKING_URI")
        if uri and uri.startswith("file:"):
            if not uri.startswith("file:/"):
                uri = f"file:{os.path.join(facts.job_folder, uri.removeprefix('file:'))}"
            os.environ.setdefault("MLFLOW_ALLOW_FILE_STORE", "true")  # MLflow 3.7 asks for this word
        self._client = MlflowClient(tracking_uri=uri)
        if facts.previous:
            self.identity = facts.previous
            self._client.update_run(self.identity, status="RUNNING")
            return
        name = arguments["experiment"] or facts.job
        experiment = self._client.get_experiment_by_name(name)
        number = experiment.experiment_id if experiment is not None else self._client.create_experiment(name)
        run = self._client.create_run(number, run_name=arguments["name"] or facts.name)
        self.identity = run.info.run_id
        parameters = [Param(path, text[:_MOST_TEXT]) for path, text in facts.settings.items()]
        self._client.log_batch(self.identity, params=parameters)

    def log(self, record: Record) -> None:
        from mlflow.entities import Metric

        now = int(time.time() * 1000)
        metrics = [Metric(name, value, now, record["step"]) for name, value in metrics_of(record).items()]
        self._client.log_batch(self.identity, metrics=metrics)

    def log_text(self, text: Record) -> None:
        self._client.log_text(self.identity, _full_text(text), f"texts/{text['number']}/step-{text['step']:08}.txt")

    def add_file(self, path: str) -> None:
        self._client.log_artifact(self.identity, path)

    def close(self, state: str) -> None:
        words = {"done": "FINISHED", "stopped": "KILLED"}
        self._client.set_terminated(self.identity, words.get(state, "FAILED"))


class TrackioRun(LibraryRun):
    """A run of Trackio, which knows runs by their names, and files as artifacts of the project."""

    def __init__(self, arguments: Mapping[str, Any], facts: RunFacts) -> None:
        import trackio

        self.identity = facts.previous or arguments["name"] or facts.name
        self._run = trackio.init(
            project=arguments["project"] or facts.job,
            name=self.identity,
            space_id=arguments["space"],
            config=dict(facts.settings),
            resume="allow",
            embed=False,
        )

    def log(self, record: Record) -> None:
        self._run.log(metrics_of(record), step=record["step"])

    def log_text(self, text: Record) -> None:
        import trackio

        self._run.log({f"texts/{text['number']}": trackio.Markdown(f"```\n{_full_text(text)}\n```")}, step=text["step"])

    def add_file(self, path: str) -> None:
        import trackio

        name = re.sub(r"[^\w.-]", "_", f"{self.identity}-{os.path.basename(path)}")
        trackio.log_artifact(path, name=name, type="run-file")

    def close(self, state: str) -> None:
        self._run.finish()


class CSVRun(LibraryRun):
    """A table with one row for each record, and one with a row for each generated text. They are rewritten if steps are
    done again, the first also if a number is new.
    """

    def __init__(self, arguments: Mapping[str, Any], facts: RunFacts) -> None:
        self._folder, self._copies_files = facts.folder, bool(arguments["dir"])
        if arguments["dir"]:
            self._folder = os.path.dirname(facts.previous) or _new_folder(arguments["dir"], facts.name)
        rows = _read_rows(facts.previous) if facts.previous else []
        self._path = self.identity = os.path.join(self._folder, "metrics.csv")
        self._columns = list(rows[0]) if rows else list(_KEYS)
        self._write_rows(rows)
        self._last_step = max((int(row["step"]) for row in rows), default=0)
        self._last_splits = {row["split"] for row in rows if int(row["step"]) == self._last_step}
        self._last_text: tuple[int, int] | None = None
        if texts := _read_rows(os.path.join(os.path.dirname(facts.previous), _TEXTS)) if facts.previous else []:
            _write_table(os.path.join(self._folder, _TEXTS), _TEXT_COLUMNS, texts)

    def log(self, record: Record) -> None:
        prefix = f"{record['split']}/"
        row: dict[str, object] = {key: record[key] for key in _KEYS}
        row |= {name.removeprefix(prefix): value for name, value in metrics_of(record).items()}
        step, split = record["step"], record["split"]
        repeats = step < self._last_step or (step == self._last_step and split in self._last_splits)
        if repeats or not row.keys() <= set(self._columns):
            self._columns += [name for name in row if name not in self._columns]
            self._write_rows([kept for kept in _read_rows(self._path) if _precedes(kept, record)])
        self._last_splits = {split} if step != self._last_step else self._last_splits | {split}
        self._last_step = step
        with open(self._path, "a", encoding="utf-8", newline="") as file:
            csv.DictWriter(file, self._columns).writerow(row)

    def log_text(self, text: Record) -> None:
        path, place = os.path.join(self._folder, _TEXTS), (text["step"], text["number"])
        if self._last_text is None or place <= self._last_text:
            _write_table(path, _TEXT_COLUMNS, [row for row in _read_rows(path) if _place_of_text(row) < place])
        self._last_text = place
        with open(path, "a", encoding="utf-8", newline="") as file:
            csv.DictWriter(file, _TEXT_COLUMNS, extrasaction="ignore").writerow(text)

    def add_file(self, path: str) -> None:
        if self._copies_files:
            shutil.copy(path, self._folder)

    def close(self, state: str) -> None:
        """Every row is written already."""

    def _write_rows(self, rows: Sequence[Mapping[str, object]]) -> None:
        _write_table(self._path, self._columns, rows)


def _write_table(path: str, columns: Sequence[str], rows: Sequence[Mapping[str, object]]) -> None:
    with open(path, "w", encoding="utf-8", newline="") as file:
        writer = csv.DictWriter(file, columns)
        writer.writeheader()
        writer.writerows(rows)


def _place_of_text(row: Mapping[str, str]) -> tuple[int, int]:
    return int(row["step"]), int(row["number"])


def _full_text(text: Record) -> str:
    """Returns a prompt with what the network wrote after it, or with its answer."""
    return f"{text['prompt']}\n\nanswer:\n{text['text']}" if text.get("chat") else f"{text['prompt']}{text['text']}"


def _read_rows(path: str) -> list[dict[str, str]]:
    try:
        with open(path, encoding="utf-8", newline="") as file:
            return list(csv.DictReader(file))
    except FileNotFoundError:
        return []


def _new_folder(parent: str, name: str) -> str:
    """Makes a folder for a run that no other run has, even if both start at once."""
    os.makedirs(parent, exist_ok=True)
    for number in count(1):
        path = os.path.join(parent, name if number == 1 else f"{name} {number}")
        with contextlib.suppress(FileExistsError):
            os.mkdir(path)
            return path
    raise AssertionError("numbers have no end")


def _precedes(row: Mapping[str, str], record: Record) -> bool:
    """True if a row is of an earlier step than a record, or of another split after the same step."""
    step = int(row["step"])
    return bool(step < record["step"] or (step == record["step"] and row["split"] != record["split"]))


LIBRARIES: Mapping[str, Callable[[Mapping[str, Any], RunFacts], LibraryRun]] = {
    "tensorboard": TensorBoardRun,
    "wandb": WandbRun,
    "mlflow": MLflowRun,
    "trackio": TrackioRun,
    "csv": CSVRun,
}
