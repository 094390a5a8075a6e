"""`dslc calibrate`: measures the times of a job's parts on this machine, by which plans predict the time of a step."""

from __future__ import annotations

import argparse
import io
import json
import os
import shutil
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import replace

from dslc.compiler.cost.calibration_fit import calibration_of
from dslc.compiler.cost.measured_times import CUTTING, arithmetic
from dslc.compiler.facts.calibration import (
    Calibration,
    RankMeasurement,
    calibration_text,
    layer_signature,
    merge_calibrations,
)
from dslc.compiler.facts.untrusted_files import replacing
from dslc.compiler.facts.user_calibrations import calibration_path, this_machine, user_calibration
from dslc.compiler.ir.actions import Payload
from dslc.compiler.ir.codec import from_json
from dslc.compiler.ir.number_text import time_text
from dslc.compiler.ir.program import CalibrateMode
from dslc.compiler.placement.staging import Staging
from dslc.compiler.rules.analysis import Analysis
from dslc.compiler.show.explain import table
from dslc.dsl.bounds import CATALOGUE
from dslc.dsl.diagnostics import Report
from dslc.dsl.language.auto_fields import without_auto
from dslc.dsl.meaning.load import load_each
from dslc.dsl.plain import plain, plain_lines
from dslc.dsl.words import plural
from dslc.jobs.check_job import show
from dslc.jobs.prepare_run import Ready, launch_quietly, prepare, show_failure
from dslc.terminal.exit_codes import GOOD, INTERRUPTED, JOB_AT_FAULT, TRAINING_FAILED, WRONG_USAGE
from dslc.verification.variants import observed

_OPERATIONS = ("all_reduce", "all_gather", "reduce_scatter", "broadcast", "send")  # of the plans on the same ranks
_PAYLOAD = 1 << 20  # bytes, at least, of a collective that is measured


def main(arguments: argparse.Namespace) -> int:
    path: str | None = arguments.output
    beside = os.path.dirname(os.path.abspath(path)) if path is not None else ""
    if path is not None and not os.path.isdir(beside):
        print(plain(f"dslc: {beside} is no folder: name the file to write with -o"), file=sys.stderr)
        return WRONG_USAGE
    _, combinations = load_each(arguments.job, arguments.settings)
    loaded = combinations[0]
    if len(combinations) > 1:
        print("the job sweeps over several trainings, the first of which is measured", file=sys.stderr)
    if loaded.job is not None and not loaded.report.errors:
        loaded = replace(loaded, job=observed(without_auto(loaded.job)))
    report = Report()
    ready = prepare(loaded, report)
    show(report)
    if ready is None:
        return JOB_AT_FAULT
    analysis = ready.compiled.analysis
    unsupported = _unsupported(analysis)
    if unsupported or analysis.staging is None:
        print(plain(f"dslc: {ready.program.file} cannot be calibrated: {unsupported}"), file=sys.stderr)
        return WRONG_USAGE
    folder = tempfile.mkdtemp(prefix="dslc-calibrate-")
    try:
        measured = _measure(ready, folder)
    except KeyboardInterrupt:
        shutil.rmtree(folder)
        print("the calibration was interrupted: nothing is written", file=sys.stderr)
        return INTERRUPTED
    if measured is None:
        return TRAINING_FAILED  # with the logs in their folder, to be read
    shutil.rmtree(folder)
    ranks, step = measured
    machine = _machine(analysis.layout.processes)
    calibration = calibration_of(analysis.staging, analysis.costs, ranks, step, machine)
    print(plain_lines("\n".join(_table_lines(analysis.staging, calibration))))
    if path is None:
        print(plain(_keep(analysis, calibration, ready.program.file)))
    else:
        _write(path, analysis, calibration, ready.program.file)
        print(plain(f'{path} written: `devices.catalogue = "{path}"` makes plans predict with it'))
    return GOOD


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
    if analysis.layout.nodes > 1:
        return "it takes several hosts, and the times of one are measured"
    if analysis.sharding.exchange is not None and analysis.sharding.exchange.agrees is not Payload.GRADIENTS:
        return f"the times of `{analysis.sharding.exchange.kind}` are not measured yet"
    if analysis.job.train.compile:
        return "the parts of a compiled network are not measured yet"
    return ""


def _measure(ready: Ready, folder: str) -> tuple[list[RankMeasurement], float | None] | None:
    """Returns what each rank measured, and the time of a step of the job itself; None if the ranks failed."""
    import dslc.runtime.launch  # noqa: F401 - before the ranks are forked
    from dslc.runtime.measure.layer_times import NAME, stage_count
    from dslc.runtime.measure.report import step_time
    from dslc.runtime.process.records import read_metrics

    analysis = ready.compiled.analysis
    assert analysis.model is not None
    share = analysis.workload.share // analysis.layout.microbatches
    exchanges = {(operation, "all"): _PAYLOAD for operation in _OPERATIONS} if analysis.layout.world_size > 1 else {}
    exchanges |= {
        (each.operation, each.axis): max(_PAYLOAD, each.bytes // each.count)
        for cost in analysis.costs
        for each in cost.traffic
        if each.operation != "receive" and each.axis not in CUTTING
    }
    mode = CalibrateMode(
        layers=tuple(layer.name for layer in analysis.model.layers if layer.name),
        samples=(max(1, share), max(1, share // 2) if share > 1 else 2),
        exchanges=tuple((*name, size) for name, size in exchanges.items()),
    )
    os.makedirs(os.path.join(folder, "logs"))
    print(plain(f"measuring {ready.program.file} on {plural(len(ready.places), 'rank')}, for some seconds"), flush=True)
    screen = _ProgressScreen(stage_count(mode))
    with screen.bar:
        outcome = launch_quietly(replace(ready.program, mode=mode), ready.places, folder, screen)
    if outcome.failure is not None:
        show_failure(outcome, what="calibration")
        return None
    with open(os.path.join(folder, NAME), encoding="utf-8") as file:
        return [from_json(RankMeasurement, rank) for rank in json.load(file)], step_time(read_metrics(folder))


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


def _table_lines(staging: Staging, calibration: Calibration) -> list[str]:
    """Returns the table of what was measured."""
    samples, kind = staging.workload.share / staging.layout.microbatches, arithmetic(staging)
    rows: list[Sequence[str]] = [("what", "forward", "backward")]
    runs: dict[str, list[str]] = {}
    for layer in staging.model.of_a_rank:
        runs.setdefault(layer_signature(layer, kind), []).append(layer.name)
    for signature, names in runs.items():
        time = calibration.layers[signature]
        what = names[0] if len(names) == 1 else f"{names[0]} and {len(names) - 1} more"
        rows.append((what, time_text(time.forward.seconds(samples)), time_text(time.backward.seconds(samples))))
    for time in calibration.losses.values():
        rows.append(("loss", time_text(time.forward.seconds(samples)), time_text(time.backward.seconds(samples))))
    for name, each in calibration.collectives.items():
        rate = f" and {1e-9 / each.byte:.3g} GB/s" if each.byte else ""
        rows.append((f"{name} ranks", time_text(each.latency) + rate, ""))
    return table(rows)
