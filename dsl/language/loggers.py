"""Loggers: who receives the records of a training, beside `metrics.jsonl`.

A logger of a library gets the settings of the job, each record, and the files of the run directory that say what the
run was: the resolved job, the plan, its diagram and the report. Credentials are the library's own affair.
"""

from __future__ import annotations

from typing import ClassVar

from dslc.dsl.language.calls import PythonCall
from dslc.dsl.language.registry import Bool, Call, ListOf, Path, Str, arg, call, word
from dslc.dsl.record import record

_PARENT = "a folder, in which each run has its own"
_RUN_FOLDER = "the run directory"
_RUN_NAME = "the name of the run"
_JOB_NAME = "the job's name and the folder's"


@call("logger", "python", open=True)
class PythonLogger(PythonCall):
    """An object of yours, or what a class or function of yours returns: on rank 0 `log(record)` is given each record of
    `metrics.jsonl`, a dict, and `close()`, if it has that, is called at the end.
    """


@record
class LibraryLogger(Call):
    """A logger of a library, which one process beside the ranks feeds. If it fails, the training goes on without it and
    a warning is shown, unless it is `required`.
    """

    library: ClassVar[str] = ""  # the module that it imports; "": one that dslc itself needs
    extra: ClassVar[str] = ""  # `pip install 'dslc[…]'`

    required: bool = arg(Bool(), "a failure of this logger stops the training after its step", default=False)


@call("logger", "tensorboard")
class TensorBoardLogger(LibraryLogger):
    """Event files for TensorBoard, with the job as text and the plan's diagram as an image. `log.tensorboard` then
    writes none of its own.
    """

    dir: str | None = arg(Path("write"), _PARENT, default=None, shown="`tensorboard` in the run directory")


@call("logger", "wandb")
class WandbLogger(LibraryLogger):
    """A run of Weights & Biases. The login comes from `wandb login` or WANDB_API_KEY."""

    library: ClassVar[str] = "wandb"
    extra: ClassVar[str] = "wandb"

    project: str | None = arg(Str(), "the project", default=None, shown="the job's name")
    entity: str | None = arg(Str(), "the user or team", default=None, shown="the login's")
    name: str | None = arg(Str(), _RUN_NAME, default=None, shown=_JOB_NAME)
    group: str | None = arg(Str(), "the group of the run", default=None, shown="none")
    tags: tuple[str, ...] = arg(ListOf(Str()), "tags of the run", default=(), shown="none")
    mode: str | None = arg(
        word("online", "offline"),
        "`offline` sends nothing: `wandb sync` sends the folder `wandb` of the run directory later",
        default=None,
        shown="WANDB_MODE, or `online`",
    )


@call("logger", "mlflow")
class MLflowLogger(LibraryLogger):
    """A run of MLflow, on a tracking server or in a folder."""

    library: ClassVar[str] = "mlflow"
    extra: ClassVar[str] = "mlflow"

    experiment: str | None = arg(
        Str(), "the experiment, which is made if need be", default=None, shown="the job's name"
    )
    uri: str | None = arg(
        Str(),
        'the tracking server, `"http://…"`, or `"file:mlruns"`, a folder beside the job',
        default=None,
        shown="MLFLOW_TRACKING_URI, or MLflow's default",
    )
    name: str | None = arg(Str(), _RUN_NAME, default=None, shown=_JOB_NAME)


@call("logger", "trackio")
class TrackioLogger(LibraryLogger):
    """A run of Trackio: on this machine, or in a Space of Hugging Face."""

    library: ClassVar[str] = "trackio"
    extra: ClassVar[str] = "trackio"

    project: str | None = arg(Str(), "the project", default=None, shown="the job's name")
    name: str | None = arg(Str(), _RUN_NAME, default=None, shown=_JOB_NAME)
    space: str | None = arg(Str(), "the Space", default=None, shown="none: on this machine")


@call("logger", "csv")
class CSVLogger(LibraryLogger):
    """A table `metrics.csv`, with one row for each record and a column for each number."""

    dir: str | None = arg(Path("write"), _PARENT, default=None, shown=_RUN_FOLDER)
