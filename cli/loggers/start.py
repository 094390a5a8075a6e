"""Starts the process that feeds the loggers of libraries, and waits for it at the end of a training.

Model: the process follows metrics.jsonl (feed.py). The ranks and their launcher do no work for a logger, and no thread
of a library is there when ranks are forked. The process receives its orders as JSON on standard input.

Contract: the context never raises because of a logger. Warnings appear among the notes of the training; those after its
end are printed by this process.
"""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import sys
from collections.abc import Iterator, Mapping

from dslc.compiler.facts.untrusted_files import read_json, recreate_file
from dslc.compiler.ir.program import CheckpointStep
from dslc.dsl.language import registry
from dslc.dsl.language.job import JobSpec
from dslc.dsl.language.loggers import LibraryLogger
from dslc.dsl.meaning.write import value_text
from dslc.dsl.plain import plain
from dslc.runtime.process.records import NOTES, Follower
from dslc.runtime.process.run_status import read_status

RUNS = "loggers.json"  # the identities of the loggers' runs, by which a resumed training continues them
LOG = "loggers.log"
_CLOSING = 180.0  # seconds that the loggers have to send what is left
_MOST = 1 << 20  # bytes of a file that is read


@contextlib.contextmanager
def feed_loggers(job: JobSpec, checkpoint: CheckpointStep, folder: str) -> Iterator[None]:
    """Feeds the job's loggers of libraries during the context, with what appears in the run directory `folder`."""
    loggers = [logger for logger in job.log.loggers if isinstance(logger, LibraryLogger)]
    if not loggers:
        yield
        return
    checkpoints = [checkpoint.folder] if checkpoint.folder and checkpoint.is_enabled else []
    orders = {
        "folder": folder,
        "loggers": [logger_orders(logger) for logger in loggers],
        "job": job.name,
        "job_folder": job.folder,
        "settings": settings_of(job),
        "runs": previous_runs(checkpoint, folder),
        "identity_folders": [folder, *checkpoints],
    }
    process = _start(orders, folder)
    try:
        yield
    finally:
        notes, status = os.path.join(folder, NOTES), read_status(folder)
        shown = status.notes_shown if status is not None else None
        if shown is None:
            shown = os.path.getsize(notes) if os.path.exists(notes) else 0
        _wait(process, folder)
        for line in Follower(notes, shown).new():
            print(plain(line.rstrip()), file=sys.stderr)


def logger_orders(logger: LibraryLogger) -> dict[str, object]:
    """Returns the word of a logger, and its arguments by name."""
    arguments = {field.word: getattr(logger, field.name) for field in registry.fields(type(logger))}
    return {"word": logger.word, "required": arguments.pop("required"), "arguments": arguments}


def settings_of(job: JobSpec) -> dict[str, str]:
    """Returns the fields of the resolved job by path, in the language: `train.optimizer` is `sgd(lr = 0.1)`."""
    settings = {}
    for word in registry.BLOCKS:
        block = getattr(job, word)
        for field in registry.fields(type(block)):
            value = getattr(block, field.name)
            if value is None or value == ():
                continue
            if field.name in block.auto_fields:
                settings[f"{word}.{field.word}"] = registry.AUTO
            elif field.name != type(block).whole:
                settings[f"{word}.{field.word}"] = " ".join(value_text(value, field.kind).split())
    return settings


def previous_runs(checkpoint: CheckpointStep, folder: str) -> Mapping[str, str]:
    """Returns the identities of the runs that a resumed training continues, by logger; {} if it begins anew."""
    if checkpoint.resume == "none":
        return {}
    places = [folder, checkpoint.folder, os.path.dirname(checkpoint.folder)]
    if checkpoint.resume != "auto":
        above = os.path.dirname(checkpoint.resume)
        places = [checkpoint.resume, above, os.path.dirname(above)]  # a run directory, `checkpoints`, a checkpoint
    for place in filter(None, places):
        with contextlib.suppress(OSError, ValueError):
            runs = read_json(os.path.join(place, RUNS), _MOST)
            return {str(name): str(run) for name, run in runs.items()}
    return {}


def _start(orders: Mapping[str, object], folder: str) -> subprocess.Popen[str]:
    with open(recreate_file(os.path.join(folder, "logs", LOG)), "wb") as log:
        process = subprocess.Popen(
            [sys.executable, "-P", "-m", "dslc.loggers.feed"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=log,
            text=True,
            process_group=0,  # Ctrl-C is for the training
        )
    assert process.stdin is not None and process.stdout is not None
    with contextlib.suppress(BrokenPipeError), process.stdin:
        json.dump(orders, process.stdin)
    with process.stdout:
        process.stdout.readline()  # it knows now which records are of an earlier start
    return process


def _wait(process: subprocess.Popen[str], folder: str) -> None:
    """Lets the process end the loggers' runs."""
    log = os.path.join(folder, "logs", LOG)
    process.terminate()
    try:
        status = process.wait(_CLOSING)
    except (subprocess.TimeoutExpired, KeyboardInterrupt):
        process.kill()
        process.wait()
        print(plain(f"the loggers were ended before they had sent everything: see {log}"), file=sys.stderr)
        return
    if status != 0:
        print(plain(f"the process of the loggers failed: see {log}"), file=sys.stderr)
