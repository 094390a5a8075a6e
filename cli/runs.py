"""From a job to a run directory that is ready to be launched, and the launch. Shared by `dslc run` and `dslc.run`."""

from __future__ import annotations

import dataclasses
import json
import os
import subprocess
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from dslc.compiler.compile import Compiled, compile_plan
from dslc.compiler.ir.codec import to_json
from dslc.compiler.ir.program import JobProgram, RankPlace
from dslc.dsl.diagnostics import Report
from dslc.dsl.meaning.load import Loaded
from dslc.dsl.meaning.write import anchored, write
from dslc.dsl.plain import plain
from dslc.front import inspect
from dslc.runtime.process.records import naming

if TYPE_CHECKING:
    from dslc.runtime.process.failure import Outcome


@dataclass(frozen=True, kw_only=True)
class Ready:
    """A job that may start, with the contents of its run directory."""

    loaded: Loaded
    compiled: Compiled
    program: JobProgram
    places: tuple[RankPlace, ...]


def prepare(loaded: Loaded, report: Report, *, profile: bool = False) -> Ready | None:
    """Compiles a job for this machine; returns None with the reasons in the report, where warnings that block a run are
    errors. `profile`: the run records its memory and its collectives.
    """
    found = Report()
    analysis = inspect(loaded, found, run=True)
    report.extend(diagnostic.for_run() for diagnostic in found)
    if report.errors or analysis is None:
        return None
    compiled = compile_plan(analysis)
    program = dataclasses.replace(compiled.program(), profile=profile)
    return Ready(loaded=loaded, compiled=compiled, program=program, places=compiled.places())


def lay_down(ready: Ready, folder: str) -> None:
    """Writes the files known before the start: the job as resolved, the plan, the program."""
    assert ready.loaded.job is not None
    os.makedirs(os.path.join(folder, "logs"), exist_ok=True)
    for name, text in (
        ("job.plt", write(anchored(ready.loaded.job))),
        ("plan.json", ready.compiled.plan.text()),
        ("program.json", json.dumps({"job": to_json(ready.program), "places": to_json(ready.places)})),
    ):
        path = os.path.join(folder, name)
        with naming(path), open(path, "w", encoding="utf-8") as file:
            file.write(text)


def train(ready: Ready, folder: str, launch: Callable[[JobProgram, tuple[RankPlace, ...], str], Outcome]) -> Outcome:
    """Trains in a folder that is claimed: writes the files, launches, and draws the plan meanwhile."""
    lay_down(ready, folder)
    drawing = _start_drawing(folder)
    try:
        return launch(ready.program, ready.places, folder)
    finally:
        _finish_drawing(drawing, folder)


def _start_drawing(folder: str) -> subprocess.Popen[bytes]:
    """Draws `plan.svg` in a process of its own, at the lowest priority, so that it does not delay the training.

    It is a fresh process because a thread of this one would disturb the fork that starts the ranks.
    """
    plan, picture = os.path.join(folder, "plan.json"), os.path.join(folder, "plan.svg")
    with open(os.path.join(folder, "logs", "draw.log"), "wb") as log:
        return subprocess.Popen(
            [sys.executable, "-P", "-m", "dslc.commands.render", plan, picture],
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=log,
            process_group=0,  # Ctrl-C is for the training; this ends by itself
        )


def _finish_drawing(drawing: subprocess.Popen[bytes], folder: str) -> None:
    """Waits for the picture; if there is none, says where the reason is, and makes a folder for it."""
    if drawing.wait() != 0 and os.path.isdir(folder):
        log = os.path.join(folder, "logs", "draw.log")
        print(plain(f"plan.svg could not be drawn: see {log}"), file=sys.stderr)


def report_on(ready: Ready, folder: str, steps: int) -> dict[str, Any]:
    """Writes report.json of a run that was not cut off, and returns its contents."""
    from dslc.runtime.measure.report import write_report

    return write_report(folder, ready.compiled.plan.to_json(), steps)


def folders_of(loaded: Loaded, combinations: Sequence[Loaded], folder: str) -> list[tuple[str, Loaded]]:
    """Returns a sub-folder for each combination of a sweep, named by its values."""
    if len(combinations) == 1 and combinations[0] is loaded:
        return [(folder, loaded)]
    named = []
    for settings, chosen in zip(loaded.combinations, combinations, strict=True):
        words = [f"{path.rsplit('.', 1)[-1]}={text}" for path, text in settings]
        named.append((os.path.join(folder, ",".join(words).replace(os.sep, "_").replace('"', "")), chosen))
    return named
