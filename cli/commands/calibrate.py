"""`dslc calibrate`: measures the times of a job's parts on this machine, by which plans predict the time of a step."""

from __future__ import annotations

import argparse
import io
import json
import os
import shutil
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

from dslc.compiler.cost.calibration_fit import calibration_of, with_rest
from dslc.compiler.cost.estimate import estimate
from dslc.compiler.cost.measured_times import CUTTING, arithmetic
from dslc.compiler.facts.calibration import (
    CONSTANTS,
    TIMES,
    Calibration,
    RankMeasurement,
    calibration_text,
    fit_text,
    layer_signature,
    merge_calibrations,
)
from dslc.compiler.facts.untrusted_files import replacing
from dslc.compiler.facts.user_calibrations import calibration_path, this_machine, user_calibration, user_fit
from dslc.compiler.ir.actions import Payload
from dslc.compiler.ir.codec import from_json
from dslc.compiler.ir.number_text import percent_text, time_text
from dslc.compiler.ir.program import CalibrateMode
from dslc.compiler.placement.staging import Staging
from dslc.compiler.rules.analysis import Analysis
from dslc.compiler.show.text_table import table
from dslc.dsl.bounds import CATALOGUE
from dslc.dsl.diagnostics import Report
from dslc.dsl.language.job import JobSpec
from dslc.dsl.meaning.auto_fields import auto_fields, value_text, with_values, without_auto
from dslc.dsl.meaning.load import LoadResult
from dslc.dsl.plain import plain, plain_lines
from dslc.dsl.words import plural
from dslc.jobs.check_job import show
from dslc.jobs.prepare_run import LaunchContext, Ready, launch_quietly, prepare, show_failure
from dslc.jobs.step_fits import (
    LEAST_RUNS,
    SMALL_TRAININGS,
    TimedStep,
    UnusableRunError,
    fit_of,
    step_of_run,
    steps_of_small_jobs,
    typical_constants,
)
from dslc.launching.hosts import HostPaths, no_endpoint, train_with_others
from dslc.runs.load_one import load_first
from dslc.terminal.exit_codes import (
    GOOD,
    INTERRUPTED,
    JOB_AT_FAULT,
    TRAINING_FAILED,
    WRONG_USAGE,
    CommandFailedError,
)
from dslc.verification.variants import observed

if TYPE_CHECKING:
    from dslc.runtime.measure.report import RunReport
    from dslc.runtime.process.failure import Outcome

Settings = Mapping[str, object]  # values of searched fields, by path


def further_plans(job: JobSpec, world_size: int) -> Iterator[tuple[Settings, ...]]:
    """Yields the plans beyond the job with its defaults that tell the times of the other ones that `auto` may take.

    These are plans with an engine of their own, each with few and with many micro-batches, and plans with other layers.
    Of several settings the first that rules accept is to be measured.
    """
    searched = auto_fields(job)
    engines: list[Settings] = [{}, {"parallelism.zero": 3}]
    engines += [{"parallelism.pipeline": stages} for stages in sorted({2, world_size} - {1})]
    plans: list[tuple[Settings, ...]] = []
    for engine in engines:
        stages = engine.get("parallelism.pipeline", 1)
        assert isinstance(stages, int)
        few, *many = ({**engine, "parallelism.microbatches": times * stages} for times in (1, 4, 2))
        plans += [(few if few.keys() <= set(searched) else engine,)] if engine else []
        plans.append(tuple(many))
    may_cut_sequence = job.devices.gpus is None and not job.model.has_user_network
    plans += [
        ({"parallelism.zero": 1},),
        ({"parallelism.tensor": 2},),
        *([({"parallelism.tensor": 2, "parallelism.sequence": True},)] if may_cut_sequence else []),
        ({"parallelism.context": 2},),
        ({"parallelism.expert": 2},),
        ({"memory.recompute": "selective"},),
    ]
    yield from (plan for plan in plans if plan[0].keys() <= set(searched))


def with_settings(job: JobSpec, settings: Settings) -> JobSpec:
    """Returns a job with these values, and defaults of the other fields that it leaves to the compiler."""
    return with_values(without_auto(job), settings)


def settings_line(settings: Settings) -> str:
    """Returns settings in words: `zero = 3, microbatches = 4`."""
    return ", ".join(f"{path.partition('.')[2]} = {value_text(value)}" for path, value in settings.items())


_OPERATIONS = ("all_reduce", "all_gather", "reduce_scatter", "broadcast", "send")  # of the plans on the same ranks
_SMALL_WORLD = 8  # ranks, up to which collectives of fewer ranks are measured, too
_PAYLOAD = 1 << 20  # bytes, at least, of a collective that is measured


def main(arguments: argparse.Namespace) -> int:
    beside = os.path.dirname(os.path.abspath(arguments.output)) if arguments.output is not None else ""
    if beside and not os.path.isdir(beside):
        print(plain(f"dslc: {beside} is no folder: name the file to write with -o"), file=sys.stderr)
        return WRONG_USAGE
    if arguments.job is None or arguments.runs:
        return _fit_constants(arguments)
    rendezvous: str = arguments.rendezvous or ""
    if rendezvous and (wrong := no_endpoint(rendezvous)):
        raise CommandFailedError(plain(f"--rendezvous is `{rendezvous}`, and `{wrong}` is not HOST or HOST:PORT"))
    loaded = load_first(arguments.job, arguments.settings)
    report = Report()
    ready = _prepare(loaded, {}, arguments, report)
    show(report)
    if ready is None:
        return JOB_AT_FAULT
    unsupported = _unsupported(ready.compiled.analysis)
    if unsupported:
        print(plain(f"dslc: {ready.program.file} cannot be calibrated: {unsupported}"), file=sys.stderr)
        return WRONG_USAGE
    measured = _MeasuredPlans(arguments)
    status = measured.add(ready, "")
    assert loaded.job is not None
    for alternatives in further_plans(loaded.job, ready.compiled.analysis.layout.world_size):
        for settings in alternatives if status == GOOD else ():
            further = _prepare(loaded, settings, arguments, Report())
            if further is not None and not _unsupported(further.compiled.analysis):
                status = measured.add(further, settings_line(settings))
                break
    if status == GOOD:
        measured.write()
    return status


def _prepare(loaded: LoadResult, settings: Settings, arguments: argparse.Namespace, report: Report) -> Ready | None:
    """Prepares the run of one plan of a job; returns None with the reasons in the report."""
    if loaded.job is not None and not loaded.report.errors:
        loaded = replace(loaded, job=observed(with_settings(loaded.job, settings)))
    return prepare(loaded, report, around=LaunchContext(hosts=bool(arguments.rendezvous), environ=None))


class _MeasuredPlans:
    """Measures plans of one job, one after another, and keeps the times of all of them."""

    def __init__(self, arguments: argparse.Namespace) -> None:
        self._job: str = arguments.job
        self._output: str | None = arguments.output
        self._rendezvous: str | None = arguments.rendezvous
        self._ready: Ready | None = None  # of the last plan
        self._times: Calibration | None = None  # of all plans; none on hosts other than the coordinator

    def add(self, ready: Ready, name: str) -> int:
        """Measures a plan, which `name` tells from the first one. Returns the exit status."""
        folder = tempfile.mkdtemp(prefix="dslc-calibrate-")
        self._ready = ready
        plan = f" with `{name}`" if name else ""
        ranks = plural(len(ready.places), "rank")
        print(plain(f"measuring {ready.program.file} on {ranks}{plan}, for some seconds"), flush=True)
        try:
            status = self._measure(ready, folder)
        except KeyboardInterrupt:
            print("the calibration was interrupted: nothing is written", file=sys.stderr)
            status = INTERRUPTED
        if status != TRAINING_FAILED:  # whose logs are to be read
            shutil.rmtree(folder)
        return status

    def _measure(self, ready: Ready, folder: str) -> int:
        """Measures on this host, or with others. Raises KeyboardInterrupt."""
        import dslc.runtime.launch  # noqa: F401 - before the ranks are forked
        from dslc.runtime.measure.layer_times import stage_count

        step = None if self._rendezvous else self._predicted(ready)
        mode = _mode(ready) if step is None else CalibrateMode(step=step)
        ready = replace(ready, program=replace(ready.program, mode=mode))
        if self._rendezvous:
            # One name on all hosts, which may share the folder: the coordinator, whose it is, removes it.
            run = os.path.join(tempfile.gettempdir(), f"dslc-calibrate-{ready.program.plan_hash}")
            where = HostPaths(job=self._job, rendezvous=self._rendezvous, out=run)
            screen = _ProgressScreen(stage_count(mode))

            def end(outcome: Outcome, report: RunReport | None, folder: str) -> int:
                screen.bar.stop()
                return self._end_on_hosts(ready, outcome, report, folder)

            with screen.bar:
                return train_with_others(ready, where, end, screen)
        os.makedirs(os.path.join(folder, "logs"))
        screen = _ProgressScreen(stage_count(mode))
        with screen.bar:
            outcome = launch_quietly(ready.program, ready.places, folder, screen)
        return self._end(ready, outcome, folder)

    def _predicted(self, ready: Ready) -> float | None:
        """Returns the seconds of a plan's step by the times so far; None if these lack something."""
        analysis = ready.compiled.analysis
        if self._times is None or analysis.staging is None:
            return None
        hardware = replace(analysis.layout.hardware, calibration=self._times)
        layout = replace(analysis.layout, hardware=hardware)
        found = estimate(replace(analysis.staging, layout=layout), analysis.costs)
        return found.step_time if found.source == "measured" else None

    def _end_on_hosts(self, ready: Ready, outcome: Outcome, report: RunReport | None, folder: str) -> int:
        """Ends the measurement of several hosts on one of them. Raises KeyboardInterrupt."""
        if outcome.stopped_at is None and (outcome.failure is not None or report is not None):
            status = self._end(ready, outcome, folder)
        else:
            status = GOOD
        if outcome.failure is None and (report is not None or not os.path.exists(os.path.join(folder, TIMES))):
            shutil.rmtree(folder, ignore_errors=True)  # hosts that share the folder remove it at the same time
        if outcome.stopped_at is not None:
            raise KeyboardInterrupt
        return status

    def _end(self, ready: Ready, outcome: Outcome, folder: str) -> int:
        """Takes and shows what ranks measured in `folder`."""
        from dslc.runtime.measure.report import step_time
        from dslc.runtime.process.records import read_metrics

        if outcome.failure is not None:
            show_failure(outcome, what="calibration")
            return TRAINING_FAILED
        analysis = ready.compiled.analysis
        assert analysis.staging is not None
        staging, step = analysis.staging, step_time(read_metrics(folder))
        known = self._times or _machine(analysis.layout.processes)
        if os.path.exists(os.path.join(folder, TIMES)):
            with open(os.path.join(folder, TIMES), encoding="utf-8") as file:
                ranks = [from_json(RankMeasurement, rank) for rank in json.load(file)]
            self._times = calibration_of(staging, analysis.costs, ranks, step, known)
        else:  # a training alone, whose parts are known
            self._times = with_rest(staging, analysis.costs, known, step, known)
        print(plain_lines("\n".join(_table_lines(staging, self._times, known, step))))
        return GOOD

    def write(self) -> None:
        """Writes the times of all plans, on the coordinator if there are several hosts."""
        assert self._ready is not None
        if self._times is None:
            print("the coordinator has written the times")
            return
        analysis, file = self._ready.compiled.analysis, self._ready.program.file
        if self._output is None:
            print(plain(_keep(analysis, self._times, file)))
        else:
            _write(self._output, analysis, self._times, file)
            print(plain(f'{self._output} written: `devices.catalogue = "{self._output}"` makes plans predict with it'))


def _keep(analysis: Analysis, calibration: Calibration, job: str) -> str:
    """Adds a calibration to the user's own of the same machine, and returns what was done in words."""
    kind, processes = analysis.layout.hardware.kind, analysis.layout.processes
    path = calibration_path(kind, processes)
    os.makedirs(os.path.dirname(path), mode=0o700, exist_ok=True)
    older = Report().collect(user_calibration(kind, processes))
    merged = calibration if older is None else merge_calibrations(older, calibration)
    if len(calibration_text(kind, merged, "").encode()) > CATALOGUE.most // 2:
        merged = calibration  # rather than a file that is too large to be read
    _write(path, analysis, merged, job)
    return f"{path} written: jobs without `devices.catalogue` on {plural(processes, 'process')} are predicted with it"


def _write(path: str, analysis: Analysis, calibration: Calibration, job: str) -> None:
    heading = f"Written by `dslc calibrate {job}`: seconds, with {plural(calibration.processes, 'process')} at once."
    with replacing(path) as file:
        file.write(calibration_text(analysis.layout.hardware.kind, calibration, heading))


def _unsupported(analysis: Analysis) -> str:
    """Returns why a job cannot be calibrated; "" if it can."""
    if analysis.staging is None or not analysis.costs:
        return "its layers are not known"
    if analysis.layout.hardware.kind == "gpu":
        return "the kind of its GPUs is not known: `--set devices.kind=h100`, or whichever it is, names it"
    if len(analysis.layout.node_counts) > 1:
        return "its number of hosts varies: `--set devices.nodes=2`, or another number, settles it"
    if analysis.sharding.exchange is not None and analysis.sharding.exchange.agrees is not Payload.GRADIENTS:
        return f"the times of `{analysis.sharding.exchange.kind}` are not measured yet"
    if analysis.job.train.compile:
        return "the parts of a compiled network are not measured yet"
    return ""


def _fit_constants(arguments: argparse.Namespace) -> int:
    """Fits constants to past runs, or to small jobs, shows how well they explain them, and writes them."""
    given = "a job" if arguments.job is not None else "--set" if arguments.settings else "--rendezvous"
    if arguments.job is not None or arguments.settings or arguments.rendezvous:
        raise CommandFailedError(f"constants are fitted to trainings as they were: leave {given} out")
    try:
        steps = _steps_of_runs(arguments.runs) if arguments.runs else _steps_of_small_jobs()
    except KeyboardInterrupt:
        print("the calibration was interrupted: nothing is written", file=sys.stderr)
        return INTERRUPTED
    except UnusableRunError as reason:  # of a small job, which says what is wrong here
        raise CommandFailedError(str(reason), TRAINING_FAILED) from None
    if len(steps) < LEAST_RUNS:
        raise CommandFailedError(f"{plural(len(steps), 'run')} can be fitted to, and {LEAST_RUNS} are the least")
    kind = steps[0].analysis.layout.hardware.kind
    report = Report()
    typical = typical_constants(report.collect(user_fit(kind))) if arguments.runs else ()
    show(report.found)
    fit, errors = fit_of(steps, typical)
    rows: list[Sequence[str]] = [("training", "a step", "by the others")]
    for step, error in zip(steps, errors, strict=True):
        rows.append((step.name, time_text(step.seconds), f"{100 * error:+.0f}%"))
    print(plain_lines("\n".join(table(rows))))
    print("the constants: " + ", ".join(f"{name} {getattr(fit, name):.2g} s" for name in CONSTANTS))
    worst = max(map(abs, errors))
    print(
        f"each predicted by the others: off by {percent_text(fit.error)} at the median, {percent_text(worst)} at worst"
    )
    path = arguments.output or calibration_path(kind)
    os.makedirs(os.path.dirname(os.path.abspath(path)), mode=0o700, exist_ok=True)
    with replacing(path) as file:
        file.write(
            fit_text(kind, fit, f"Written by `dslc calibrate`: seconds, fitted to {plural(len(steps), 'training')}.")
        )
    print(plain(f"{path} written"))
    return GOOD


def _steps_of_runs(folders: Sequence[str]) -> list[TimedStep]:
    """Returns the steps of runs of one kind of device, and names the runs that are left out."""
    steps: list[TimedStep] = []
    for folder in folders:
        report = Report()
        try:
            step = step_of_run(folder, report)
        except UnusableRunError as reason:
            show(report.errors)
            print(plain(str(reason)), file=sys.stderr)
            continue
        if steps and step.analysis.layout.hardware.kind != steps[0].analysis.layout.hardware.kind:
            raise CommandFailedError(plain(f"{folder} ran on another kind of device than {steps[0].name}"))
        steps.append(step)
    return steps


def _steps_of_small_jobs() -> list[TimedStep]:
    """Trains small jobs, with a bar. Raises KeyboardInterrupt."""
    import dslc.runtime.launch  # noqa: F401 - before ranks are forked

    print("training small jobs on this machine, for about a minute", flush=True)
    screen, steps = _ProgressScreen(SMALL_TRAININGS), []
    with screen.bar:
        for each in steps_of_small_jobs():
            if isinstance(each, str):
                screen.write(each)
            else:
                steps.append(each)
    return steps


def _mode(ready: Ready) -> CalibrateMode:
    """Returns what the ranks of a job measure."""
    analysis = ready.compiled.analysis
    assert analysis.model is not None
    share = analysis.job.data.rows * analysis.workload.share // analysis.layout.microbatches
    world = analysis.layout.world_size
    groups = ["all"] if world > 1 else []
    groups += [str(ranks) for ranks in range(2, world) if world % ranks == 0 and world <= _SMALL_WORLD]
    exchanges = {(operation, group): _PAYLOAD for group in groups for operation in _OPERATIONS}
    exchanges |= {
        (each.operation, each.axis): max(_PAYLOAD, each.bytes // each.count)
        for cost in analysis.costs
        for each in cost.traffic
        if each.operation != "receive" and each.axis not in CUTTING
    }
    return CalibrateMode(
        layers=tuple(layer.name for layer in analysis.model.layers if layer.name),
        samples=(max(1, share), max(1, share // 2) if share > 1 else 2),
        exchanges=tuple((*name, size) for name, size in exchanges.items()),
    )


def _machine(processes: int) -> Calibration:
    """Returns a calibration of this machine without times."""
    here = this_machine()
    return Calibration(machine=here.processor, torch=here.torch, processes=processes, cores=here.cores)


class _ProgressScreen(io.StringIO):
    """A screen for launched ranks, which draws a bar: each line is a stage that they begin. No bar off a terminal."""

    def __init__(self, stages: int) -> None:
        from rich.console import Console
        from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn

        super().__init__()
        console = Console(stderr=True)
        columns = (BarColumn(), TextColumn("{task.description}"), TimeElapsedColumn())
        # Without a thread that refreshes it: ranks are forked meanwhile.
        self.bar = Progress(
            *columns, console=console, transient=True, auto_refresh=False, disable=not console.is_terminal
        )
        self._task = self.bar.add_task("starting the ranks", total=stages)

    def write(self, text: str) -> int:
        if text.strip():
            self.bar.update(self._task, description=text.strip(), advance=1)
            self.bar.refresh()
        return len(text)


def _table_lines(staging: Staging, calibration: Calibration, known: Calibration, step: float | None) -> list[str]:
    """Returns the table of what was measured and not `known` before."""
    samples, kind = staging.workload.share / staging.layout.microbatches, arithmetic(staging)
    rows: list[Sequence[str]] = [("what", "forward", "backward")]
    runs: dict[str, list[str]] = {}
    for layer in staging.model.of_a_rank:
        signature = layer_signature(layer, kind)
        if signature not in known.layers:
            runs.setdefault(signature, []).append(layer.name)
    for signature, names in runs.items():
        time = calibration.layers[signature]
        what = names[0] if len(names) == 1 else f"{names[0]} and {len(names) - 1} more"
        rows.append((what, time_text(time.forward.seconds(samples)), time_text(time.backward.seconds(samples))))
    for time in (time for name, time in calibration.losses.items() if name not in known.losses):
        rows.append(("loss", time_text(time.forward.seconds(samples)), time_text(time.backward.seconds(samples))))
    for name, each in calibration.collectives.items():
        if name in known.collectives:
            continue
        rate = f" and {1e-9 / each.byte:.3g} GB/s" if each.byte else ""
        operation, ranks, *hosts = name.split(" ", 2)
        rows.append((" ".join([operation, ranks, "ranks", *hosts]), time_text(each.latency) + rate, ""))
    whole = [("a whole step", time_text(step), "")] if step is not None else []
    return table([*rows, *whole] if len(rows) > 1 else whole)
