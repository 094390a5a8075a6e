"""`dslc calibrate`: measures the times of a job's parts on this machine, by which plans predict the time of a step."""

from __future__ import annotations

import argparse
import json
import os
import platform
import shutil
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from dslc.compiler.cost.estimate import estimate
from dslc.compiler.cost.measured_times import arithmetic
from dslc.compiler.facts.calibration import (
    Calibration,
    CollectiveTime,
    LayerTime,
    PassTime,
    calibration_text,
    collective_name,
    layer_signature,
    loss_signature,
    update_name,
)
from dslc.compiler.facts.untrusted_files import replacing
from dslc.compiler.ir.number_text import time_text
from dslc.compiler.ir.program import CalibrateMode
from dslc.compiler.rules.analysis import Analysis
from dslc.compiler.show.explain import table
from dslc.dsl.diagnostics import Report
from dslc.dsl.meaning.load import load_each
from dslc.dsl.plain import plain, plain_lines
from dslc.dsl.words import plural
from dslc.jobs.check_job import show
from dslc.jobs.prepare_run import Ready, launch_quietly, prepare, show_failure
from dslc.terminal.exit_codes import GOOD, JOB_AT_FAULT, TRAINING_FAILED, WRONG_USAGE
from dslc.verification.variants import observed

_OPERATIONS = ("all_reduce", "all_gather", "reduce_scatter", "broadcast", "send")  # of the plans on the same ranks
_PAYLOAD = 1 << 20  # bytes, at least, of a collective that is measured

Times = dict[str, list[float]]  # seconds forward and backward by layer; of the loss by ""


def main(arguments: argparse.Namespace) -> int:
    folder = os.path.dirname(os.path.abspath(arguments.output))
    if not os.path.isdir(folder):
        print(plain(f"dslc: {folder} is no folder: name the file to write with -o"), file=sys.stderr)
        return WRONG_USAGE
    _, combinations = load_each(arguments.job, arguments.settings)
    loaded = combinations[0]
    if len(combinations) > 1:
        print("the job sweeps over several trainings, the first of which is measured", file=sys.stderr)
    if loaded.job is not None and not loaded.report.errors:
        loaded = replace(loaded, job=observed(loaded.job))
    report = Report()
    ready = prepare(loaded, report)
    show(report)
    if ready is None:
        return JOB_AT_FAULT
    analysis = ready.compiled.analysis
    refused = _reason_against(analysis)
    if refused:
        print(plain(f"dslc: {ready.program.file} cannot be calibrated: {refused}"), file=sys.stderr)
        return WRONG_USAGE
    folder = tempfile.mkdtemp(prefix="dslc-calibrate-")
    try:
        measured = _measure(ready, folder)
        if measured is None:
            return TRAINING_FAILED
        calibration = _with_rest(analysis, _calibration(analysis, measured), measured)
    finally:
        shutil.rmtree(folder)
    path = arguments.output
    processes = plural(analysis.layout.processes, "process")
    heading = f"Written by `dslc calibrate {ready.program.file}`: seconds, with {processes} at once."
    with replacing(path) as file:
        file.write(calibration_text(analysis.layout.hardware.kind, calibration, heading))
    print(plain_lines("\n".join(_table_lines(analysis, calibration))))
    print(plain(f'{path} written: `devices.catalogue = "{path}"` makes plans predict with it'))
    return GOOD


def _reason_against(analysis: Analysis) -> str:
    """Returns why a job cannot be calibrated; "" if it can."""
    if analysis.model is None or not analysis.costs:
        return "its layers are not known"
    if analysis.layout.nodes > 1:
        return "it takes several hosts, and the times of one are measured"
    sizes = analysis.layout.sizes
    if sizes["tensor"] * sizes["context"] > 1:
        return "the tensor and the context axis cut its layers, whose parts are not measured yet"
    if analysis.sharding.exchange is not None:
        return f"the times of `{analysis.sharding.exchange.kind}` are not measured yet"
    if analysis.job.train.compile:
        return "the parts of a compiled network are not measured yet"
    return ""


def _measure(ready: Ready, folder: str) -> list[dict[str, Any]] | None:
    """Returns what each rank measured; None if the ranks failed."""
    import dslc.runtime.launch  # noqa: F401 - before the ranks are forked
    from dslc.runtime.measure.layer_times import NAME

    analysis = ready.compiled.analysis
    assert analysis.model is not None
    share = analysis.workload.share // analysis.layout.microbatches
    exchanges = {(operation, "all"): _PAYLOAD for operation in _OPERATIONS} if analysis.layout.world_size > 1 else {}
    exchanges |= {
        (each.operation, each.axis): max(_PAYLOAD, each.bytes // each.count)
        for cost in analysis.costs
        for each in cost.traffic
        if each.operation != "receive"
    }
    mode = CalibrateMode(
        layers=tuple(layer.name for layer in analysis.model.layers if layer.name),
        samples=(max(1, share), max(1, share // 2) if share > 1 else 2),
        exchanges=tuple((*name, size) for name, size in exchanges.items()),
    )
    os.makedirs(os.path.join(folder, "logs"))
    print(plain(f"measuring {ready.program.file} on {plural(len(ready.places), 'rank')}, for some seconds"), flush=True)
    outcome = launch_quietly(replace(ready.program, mode=mode), ready.places, folder)
    if outcome.failure is not None:
        show_failure(outcome, what="calibration")
        return None
    with open(os.path.join(folder, NAME), encoding="utf-8") as file:
        found: list[dict[str, Any]] = json.load(file)
    return found


def _calibration(analysis: Analysis, measured: Sequence[dict[str, Any]]) -> Calibration:
    """Returns the times of the slowest rank."""
    assert analysis.model is not None
    job, model = analysis.job, analysis.model
    assert analysis.staging is not None
    kind = arithmetic(analysis.staging)
    sizes = [int(size) for size in measured[0]["passes"]]
    passes = {size: _slowest([rank["passes"][str(size)] for rank in measured]) for size in sizes}
    layers: dict[str, list[LayerTime]] = {}
    for layer in model.layers:
        found = [(size, passes[size].get(layer.name, [0.0, 0.0])) for size in sizes]
        layers.setdefault(layer_signature(layer, kind), []).append(_line(found))
    loss = loss_signature(job.model.loss.word, model.output, kind)
    collectives: dict[str, CollectiveTime] = {}
    for exchanges in zip(*([*rank["collectives"], *rank["units"]] for rank in measured), strict=True):
        one = exchanges[0]
        few, many = (max(rank["seconds"][at] for rank in exchanges) for at in (0, 1))
        fixed = _of_line((one["bytes"][0], few), (one["bytes"][1], many))
        name = collective_name(one["operation"], one["ranks"] if one["operation"] != "send" else 0)
        collectives[name] = CollectiveTime(latency=fixed.fixed, byte=fixed.each)
    return Calibration(
        machine=platform.machine(),
        torch=_torch_version(),
        processes=analysis.layout.processes,
        cores=os.cpu_count() or 1,
        layers={name: _mean(times) for name, times in layers.items()},
        losses={loss: _line([(size, passes[size][""]) for size in sizes])},
        updates={update_name(job): max(rank["update"] for rank in measured) / max(1, measured[0]["parameters"])},
        collectives=collectives,
        data=max(rank["data"] for rank in measured),
        overlap=min(rank["overlap"] for rank in measured),
    )


def _with_rest(analysis: Analysis, calibration: Calibration, measured: Sequence[dict[str, Any]]) -> Calibration:
    """Returns the calibration with what a step of the job took beyond its parts."""
    assert analysis.staging is not None
    hardware = replace(analysis.layout.hardware, calibration=calibration)
    staging = replace(analysis.staging, layout=replace(analysis.layout, hardware=hardware))
    predicted, whole = estimate(staging, analysis.costs).step_time, [rank["step"] for rank in measured]
    if predicted is None or None in whole:
        return calibration
    return replace(calibration, rest=max(0.0, max(whole) - predicted))


def _slowest(ranks: Sequence[Times]) -> Times:
    """Returns the times of the rank whose passes take longest."""
    return max(ranks, key=lambda times: sum(map(sum, times.values())))


def _line(found: Sequence[tuple[int, Sequence[float]]]) -> LayerTime:
    (one, first), (other, second) = found
    forward, backward = (_of_line((one, first[way]), (other, second[way])) for way in (0, 1))
    return LayerTime(forward=forward, backward=backward)


def _of_line(one: tuple[float, float], other: tuple[float, float]) -> PassTime:
    """Returns the line through two measurements; through the larger alone and zero, where the smaller took longer."""
    (few, short), (many, long) = sorted((one, other))
    each = max(0.0, (long - short) / (many - few))
    fixed = long - each * many
    return PassTime(fixed=fixed, each=each) if fixed >= 0 else PassTime(fixed=0.0, each=long / many)


def _mean(times: Sequence[LayerTime]) -> LayerTime:
    def mean(passes: list[PassTime]) -> PassTime:
        return PassTime(
            fixed=sum(each.fixed for each in passes) / len(passes), each=sum(each.each for each in passes) / len(passes)
        )

    return LayerTime(forward=mean([each.forward for each in times]), backward=mean([each.backward for each in times]))


def _torch_version() -> str:
    import torch

    return torch.__version__


def _table_lines(analysis: Analysis, calibration: Calibration) -> list[str]:
    """Returns the table of what was measured."""
    assert analysis.model is not None
    samples = analysis.workload.share / analysis.layout.microbatches
    assert analysis.staging is not None
    kind = arithmetic(analysis.staging)
    rows: list[Sequence[str]] = [("what", "forward", "backward")]
    runs: dict[str, list[str]] = {}
    for layer in analysis.model.layers:
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
