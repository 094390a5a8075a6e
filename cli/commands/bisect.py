"""`dslc bisect`: trains two plans from the same weights, and names the first tensor by which they part."""

from __future__ import annotations

import argparse
import contextlib
import json
import math
import os
import shutil
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import NoReturn

from dslc.compiler.facts.checkpoint_names import name_of
from dslc.compiler.ir.program import CheckpointStep, JobProgram, ObserveMode, PrecisionStep
from dslc.dsl.diagnostics import Report
from dslc.dsl.meaning.load import LoadResult
from dslc.dsl.plain import plain, plain_lines
from dslc.dsl.words import plural
from dslc.jobs.check_job import show
from dslc.jobs.plan_file_input import is_plan_file, prepare_plan
from dslc.jobs.prepare_run import Ready, prepare
from dslc.jobs.revision import is_revision, load_revision, repository_top
from dslc.jobs.revision_imports import ExportedRevision
from dslc.runs.load_one import load_first
from dslc.runtime.checkpoint.files import is_checkpoint
from dslc.terminal.exit_codes import GOOD, JOB_AT_FAULT, TRAINING_FAILED, CommandFailedError
from dslc.terminal.tables import console
from dslc.verification.bisection import (
    Bisection,
    TensorDistance,
    find_difference,
    step_rows,
    tensor_text,
)
from dslc.verification.comparison import rounding_share_text
from dslc.verification.observed_runs import (
    expected_differences,
    layout_text,
    observed_program,
    train_observed,
)
from dslc.verification.recordings import (
    SUFFIX,
    RecordingError,
    TensorKey,
    TensorRecording,
    is_recording,
    join_ranks,
    read_recording,
    write_recording,
)
from dslc.verification.replay_window import ReplayWindow, window_from, window_of_runs
from dslc.verification.rounding_bounds import SHARE_LIMIT, measure_bounds
from dslc.verification.variants import observed, one_process

SAME, DIFFERENT = GOOD, JOB_AT_FAULT
_ORDERS = 2  # other orders of a batch's samples
_ONE_PROCESS = "one process"
_Bounds = Mapping[TensorKey, float]


@dataclass(frozen=True, kw_only=True)
class BisectedSide:
    """One of the two: a training to be recorded, or a recording with the rounding of its tensors."""

    name: str
    ready: Ready | None = None
    by_nature: tuple[str, ...] = ()
    is_single: bool = False  # the first one's job in one process
    recording: TensorRecording | None = None
    bounds: Mapping[TensorKey, float] | None = None
    revision: ExportedRevision | None = None  # has the modules that it imports

    def imports(self) -> contextlib.AbstractContextManager[None]:
        return self.revision.imports() if self.revision is not None else contextlib.nullcontext()


def main(arguments: argparse.Namespace) -> int:
    if arguments.steps < 1:
        raise CommandFailedError("--steps takes a number of at least 1")
    if arguments.record and (arguments.second or arguments.json):
        raise CommandFailedError("--record takes one job, and writes its recording, which may be A or B later")
    with tempfile.TemporaryDirectory(prefix="dslc-revisions-") as exports:
        if arguments.record:
            side = open_side(arguments.first, arguments.settings, exports)
            return _record(side, _window(arguments), arguments.record)
        return _compare(arguments, exports)


def _compare(arguments: argparse.Namespace, exports: str) -> int:
    first = open_side(arguments.first, [], exports)
    if arguments.second or arguments.settings:
        second = open_side(arguments.second or arguments.first, arguments.settings, exports)
    else:
        second = replace(
            first, name=f"{first.name} in one process", ready=single_process(first), by_nature=(), is_single=True
        )
    window = _window(arguments)
    _check_steps(window, first, second)
    with _keep_folder_on_error() as folder:
        one, other, result, bounds, notes = _bisect(first, second, window, folder)
    by_nature = tuple(dict.fromkeys((*first.by_nature, *second.by_nature)))
    if arguments.json:
        json.dump(_json(one, other, result, bounds, by_nature, notes), sys.stdout, indent=2)
        print()
    else:
        if window.text:
            print(plain(window.text))
        _show(one, other, result, bounds, [*notes, *(f"they are expected to differ: {each}" for each in by_nature)])
    return DIFFERENT if result.text else SAME


def _window(arguments: argparse.Namespace) -> ReplayWindow:
    """Returns the steps that are replayed."""
    runs = [name for name in (arguments.first, arguments.second) if name and os.path.isdir(name)]
    if arguments.checkpoint:
        if not is_checkpoint(arguments.checkpoint):
            raise CommandFailedError(f"--from takes a checkpoint, such as `{name_of(50)}`")
        return window_from(arguments.checkpoint, arguments.steps)
    if len(runs) == 2:
        return window_of_runs(runs[0], runs[1], arguments.steps)
    return ReplayWindow(last=arguments.steps)


def _check_steps(window: ReplayWindow, *sides: BisectedSide) -> None:
    """Refuses what would compare nothing, before anything is trained."""
    common: set[int] | None = None
    for side in sides:
        if side.recording is not None:
            steps = {each.step for each in side.recording.steps}
        else:
            assert side.ready is not None
            last = side.ready.program.steps
            if window.first > last:
                raise CommandFailedError(f"{side.name} has {plural(last, 'step')}: there is no step {window.first}")
            steps = set(range(window.first, min(window.last, last) + 1))
        common = steps if common is None else common & steps
    if not common:
        raise CommandFailedError("A and B have no step in common: nothing can be compared")


# ------------------------------------------------------------------------------------------------------- the two sides


def open_side(name: str, settings: Sequence[str], exports: str) -> BisectedSide:
    """Returns the side of a job, a plan file, a run directory, a job at a revision, or a recording. The files of a
    revision are written to a new folder in `exports`, which has to stay while the side is trained.
    """
    shown = " ".join([name, *(f"--set {setting}" for setting in settings)])
    if is_recording(name):
        if settings:
            raise CommandFailedError(f"{name} is a recording, which `--set` cannot change")
        try:
            recording, bounds = read_recording(name)
        except RecordingError as error:
            _refuse("E1201", str(error), "`dslc bisect JOB --record FILE` makes one, with one version for both sides")
        return BisectedSide(name=shown, recording=recording, bounds=bounds, by_nature=recording.by_nature)
    import dslc.runtime.launch  # noqa: F401 - or each child that looks at a user's function would load torch

    path = os.path.join(name, "job.plt") if os.path.isdir(name) else name
    report, revision = Report(), None
    if is_plan_file(path):
        ready = prepare_plan(path, settings, report)
    elif is_revision(path):
        ready, revision = _prepare_revision(path, settings, report, tempfile.mkdtemp(dir=exports))
    else:
        ready = prepare(_observed(load_first(path, settings)), report)
    show(report if ready is not None else report.errors)
    if ready is None:
        raise CommandFailedError(status=JOB_AT_FAULT)
    return BisectedSide(name=shown, ready=ready, by_nature=tuple(expected_differences(report)), revision=revision)


def _prepare_revision(
    path: str, settings: Sequence[str], report: Report, folder: str
) -> tuple[Ready | None, ExportedRevision | None]:
    """Returns the job of `REV:path`, prepared with the revision's modules, which are written to `folder`."""
    loaded = load_revision(path, settings, report, folder)
    if loaded is None:
        return None, None
    revision = ExportedRevision(top=repository_top(), folder=folder)
    with revision.imports():
        return prepare(_observed(loaded), report), revision


def _observed(loaded: LoadResult) -> LoadResult:
    return loaded if loaded.job is None else replace(loaded, job=observed(loaded.job))


def single_process(side: BisectedSide) -> Ready:
    if side.ready is None:
        raise CommandFailedError(f"{side.name} is a recording: name another one to compare it with")
    job = side.ready.loaded.job
    assert job is not None
    report = Report()
    with side.imports():
        single = prepare(replace(side.ready.loaded, report=Report(), job=one_process(job)), report)
    if single is None:
        show(report.errors)
        _refuse(
            "E1202",
            f"{side.name} cannot run in the one process by which rounding is measured",
            "take smaller sizes with `--set`, or a machine with more memory",
        )
    return single


def _refuse(code: str, message: str, remedy: str) -> NoReturn:
    report = Report()
    report.add(code, message, None, help=remedy)
    show(report)
    raise CommandFailedError(status=JOB_AT_FAULT)


# ------------------------------------------------------------------------------------------------------- trainings


@dataclass(frozen=True, kw_only=True)
class MeasuredRounding:
    """The trainings in one process: without rounding, if the model can be, and as the job is."""

    reference: TensorRecording
    plain: TensorRecording
    bounds: _Bounds
    notes: Sequence[str] = ()  # trainings that failed, and what follows


class Trainings:
    """Trains what is compared, and what rounding is measured by, from the same start."""

    def __init__(self, window: ReplayWindow, folder: str) -> None:
        self._window, self._folder = window, folder

    def record(self, side: BisectedSide, single: TensorRecording) -> TensorRecording:
        """Returns the recording of a side. Raises CommandFailedError if its training fails, which is shown."""
        assert side.ready is not None
        recording = self._train(side.ready, side.name, ObserveMode(tensors=self._window.first), single)
        if recording is None:
            raise CommandFailedError(status=TRAINING_FAILED)
        job = side.ready.program
        names = {key.name.partition("#")[0] for key in recording.sums}
        return replace(
            recording,
            description=layout_text(side.ready),
            lines={name: line for name in sorted(names) if (line := _line(job, name))},
            by_nature=side.by_nature,
        )

    def measure_rounding(self, single: Ready) -> MeasuredRounding:
        """Trains in one process, in several ways. Raises CommandFailedError if it fails."""
        mode = ObserveMode(tensors=self._window.first)
        plain = self._train(single, _ONE_PROCESS, mode)
        if plain is None:
            raise CommandFailedError(status=TRAINING_FAILED)
        if single.program.precision.dtype == "float32":
            precision = "float64"
            wide = self._train(single, precision, replace(mode, exact=True), quiet=True)
        else:
            precision = "float32"
            program = replace(single.program, precision=PrecisionStep())
            wide = self._train(replace(single, program=program), precision, mode, quiet=True)
        is_structured = single.program.data.structured  # its samples have no other order
        numbers = range(1, 1 + (0 if is_structured else _ORDERS))
        tried = [self._train(single, f"order {n}", replace(mode, reorder=n), quiet=True) for n in numbers]
        orders = [each for each in tried if each is not None]
        if wide is None and not orders:
            why = "batches are structures, whose samples have no other order"
            _refuse(
                "E1203",
                f"rounding cannot be measured: the training in {precision} failed, and "
                f"{why if is_structured else 'so did those with other orders of samples'}",
                f"let the network be trained in {precision}: without `.to` and constants of another precision",
            )
        notes = failure_notes(precision if wide is None else "", len(tried) - len(orders), len(tried))
        reference = wide or plain
        bounds = measure_bounds(reference, [plain, *orders])
        return MeasuredRounding(reference=reference, plain=plain, bounds=bounds, notes=notes)

    def _train(
        self,
        ready: Ready,
        name: str,
        mode: ObserveMode,
        single: TensorRecording | None = None,
        *,
        quiet: bool = False,
    ) -> TensorRecording | None:
        window = self._window
        checkpoint = CheckpointStep(resume=window.checkpoint) if window.checkpoint else None
        steps = min(window.last, ready.program.steps)
        program = observed_program(replace(ready.program, mode=mode), steps, checkpoint)
        folder = tempfile.mkdtemp(dir=self._folder)
        seen = train_observed(ready, program, folder, name, quiet=quiet)
        if seen is None:
            return None
        joined = join_ranks(name, seen, single)
        shutil.rmtree(folder)
        return replace(joined, precision=ready.program.precision.dtype)


def failure_notes(precision: str, failed: int, tried: int) -> list[str]:
    """Returns notes on measuring trainings that failed: the one in `precision` ("": none), and in other orders."""
    notes = [f"the training in {precision} failed, so outputs are not compared"] if precision else []
    if failed:
        notes.append(f"{failed} of {tried} trainings with other orders of samples failed: rounding may be more")
    return notes


def _line(job: JobProgram, name: str) -> str:
    from dslc.runtime.process.failure import line_of_module

    return line_of_module(job, name)


def _record(side: BisectedSide, window: ReplayWindow, path: str) -> int:
    if not path.endswith(SUFFIX):
        raise CommandFailedError(f"--record takes a file whose name ends in {SUFFIX}")
    folder = os.path.dirname(path) or "."
    if not os.path.isdir(folder):
        raise CommandFailedError(f"--record takes a file in a folder that exists, and {folder} does not")
    _check_steps(window, side)
    with _keep_folder_on_error() as folder:
        trainings = Trainings(window, folder)
        single = single_process(side)
        with side.imports():
            rounding = trainings.measure_rounding(single)
            recording = trainings.record(side, rounding.plain)
        write_recording(path, recording, rounding.bounds)
    for note in rounding.notes:
        print(plain(f"note: {note}"))
    print(plain(f"{path}: {plural(len(recording.sums), 'tensor')} of {plural(len(recording.steps), 'step')}"))
    return GOOD


@contextlib.contextmanager
def _keep_folder_on_error() -> Iterator[str]:
    """Makes a folder, which stays if an error ends the context: its logs are to be read."""
    folder = tempfile.mkdtemp(prefix="dslc-bisect-")
    yield folder
    shutil.rmtree(folder)


def _bisect(
    first: BisectedSide, second: BisectedSide, window: ReplayWindow, folder: str
) -> tuple[TensorRecording, TensorRecording, Bisection, _Bounds, Sequence[str]]:
    """Trains what is no recording, and compares. A recording has the rounding of its tensors with it."""
    trainings = Trainings(window, folder)
    recorded = next((side.recording for side in (first, second) if side.recording is not None), None)
    if recorded is not None:
        one, other = (_recording(trainings, side, recorded) for side in (first, second))
        bounds = largest_bounds(first.bounds, second.bounds)
        return one, other, find_difference(one, other, bounds), bounds, ()
    process = single_process(first)
    with first.imports():
        rounding = trainings.measure_rounding(process)
    one = _recording(trainings, first, rounding.plain)
    if second.is_single:
        other = replace(rounding.plain, name=second.name, description=_ONE_PROCESS)
    else:
        other = _recording(trainings, second, rounding.plain)
    result = find_difference(one, other, rounding.bounds, rounding.reference)
    return one, other, result, rounding.bounds, rounding.notes


def _recording(trainings: Trainings, side: BisectedSide, single: TensorRecording) -> TensorRecording:
    """Returns the recording of a side, which is trained if it is none."""
    if side.recording is not None:
        shown = f"{side.recording.description} ({side.recording.name})"
        return replace(side.recording, name=side.name, description=shown)
    with side.imports():
        return trainings.record(side, single)


def largest_bounds(*measured: _Bounds | None) -> _Bounds:
    """Returns the largest of several measured roundings of each tensor."""
    bounds: dict[TensorKey, float] = {}
    for each in measured:
        for key, bound in (each or {}).items():
            bounds[key] = max(bound, bounds.get(key, 0.0))
    return bounds


# ------------------------------------------------------------------------------------------------------- on the screen


def _show(
    one: TensorRecording, other: TensorRecording, result: Bisection, bounds: _Bounds, notes: Sequence[str]
) -> None:
    from rich.table import Table

    output = console()
    for letter, recording in (("A", one), ("B", other)):
        output.print(plain(f"{letter}  {recording.name}: {recording.description}"), markup=False)
    output.print()
    table = Table(box=None, pad_edge=False)
    for column in ("step", "loss of A", "loss of B", "apart", "of rounding", "norm apart", "of rounding"):
        table.add_column(column, justify="right", no_wrap=True)
    for step, losses, loss, gradient in step_rows(one, other, bounds):
        table.add_row(
            str(step),
            *("not finite" if value is None else f"{value:.6f}" for value in losses),
            f"{loss.distance:.1e}",
            rounding_share_text(loss.share),
            f"{gradient.distance:.1e}",
            rounding_share_text(gradient.share),
        )
    output.print(table)
    output.print()
    for line in _lines(result):
        output.print(plain_lines(line), markup=False)
    for note in notes:
        output.print(plain(f"note: {note}"), markup=False)


def _lines(result: Bisection) -> list[str]:
    if not result.text:
        most = result.largest
        lines = [f"no difference that rounding does not explain, in {plural(len(result.compared), 'tensor')}"]
        if most is not None:
            place = f"{tensor_text(most.key)} in step {most.key.step}"
            lines.append(f"  the largest is {rounding_share_text(most.share)} of the rounding: {place}")
    else:
        line = f" ({result.line})" if result.line else ""
        lines = [f"they part at step {result.step}, at {result.text}{line}"]
        lines += [f"  {detail}" for detail in result.details]
    if result.missing:
        missing = plural(len(result.missing), "tensor")
        lines.append(f"  {missing} not compared: of one alone, in other parts, or without a measured rounding")
    return lines


def _json(
    one: TensorRecording,
    other: TensorRecording,
    result: Bisection,
    bounds: _Bounds,
    by_nature: Sequence[str],
    notes: Sequence[str],
) -> object:
    first, most = result.first, result.largest
    return {
        "a": {"name": one.name, "plan": one.description},
        "b": {"name": other.name, "plan": other.description},
        "same": not result.text,
        "step": result.step or None,
        "at": result.text,
        "line": result.line,
        "details": result.details,
        "tensor": _distance_json(first),
        "largest": _distance_json(most),
        "limit": SHARE_LIMIT,
        "compared": len(result.compared),
        "missing": len(result.missing),
        "expected": list(by_nature),
        "notes": list(notes),
        "steps": [
            {"step": step, "losses": losses, "loss_share": _finite(loss.share), "norm_share": _finite(gradient.share)}
            for step, losses, loss, gradient in step_rows(one, other, bounds)
        ],
    }


def _distance_json(apart: TensorDistance | None) -> object:
    if apart is None:
        return None
    numbers = {name: _finite(getattr(apart, name)) for name in ("distance", "relative", "share")}
    return {"kind": apart.key.kind, "name": apart.key.name, "step": apart.key.step, **numbers}


def _finite(value: float) -> float | None:
    return value if math.isfinite(value) else None
