"""report.json: the plan's predictions beside the run's measurements.

Model: each rank measures itself and leaves `logs/rank-N.json` at the end of its training (`Measure`); the launcher puts
these beside the plan (`write_report`).

Contract: report.json is written by every run that trained to its end or was stopped between two steps. Its keys:

    version     1
    plan        the plan's hash
    steps       {planned, done}
    shares      the samples of a batch of each data rank, as the job names them or the run measured them; [] if they
                are equal
    step_time   {predicted, source, measured, calibrate}, seconds; measured: the median over the logged steps after the
                first. It excludes evaluation, and includes the delay of a checkpoint in between. `source` is where the
                prediction comes from (bound, estimated, published, fitted, measured), and `calibrate` the command that
                measures anew what predictions rest on
    skipped_batches  [{step, samples}]: the batches that are skipped after spikes of the loss (loop/loss_spikes.py)
    experts     {stated, measured, layer, rank, exceeded} with an expert axis, else null: the rows of the busiest rank
                of a layer in a training pass over its even share. `stated` is the job's `expert_skew`, or null;
                `exceeded` is true if the rows were more. `measured` is null if no layer trained
    ranks       for each rank
        rank
        memory          {predicted, measured}: bytes by kind at the peak, `peak` itself, `rest` (between two steps), and
                        `when` the peak is, in words; the predicted figures are of the rank that holds most
                        among its like, without what torch's allocator does not see; `measured` is null without
                        --profile. Of a GPU, whose allocator knows no kinds, `others` stands for gradients,
                        activations, communication and what cuBLAS works in
        process         {resident} or {resident, allocated, reserved}: peaks of the whole process and of its GPU, bytes
        collectives     [{operation, predicted: {count, bytes}, measured: {count, bytes}}] of one step; `measured` is
                        null without --profile. Of an optimizer with a closure: one evaluation, the first
        recorded        the steps whose collectives were recorded; the predictions are of the first of them
        steady          whether all of these had the same collectives; the first step's are shown
        phases          {predicted, measured} of each phase of a step, seconds (slow_steps.py); measured: the median
                        over the logged steps after the first. Where the engine does not show `exposed`, the phase
                        is part of `passes` or `update`, predicted and measured. Predicted: of the busiest rank
        checkpoints     {saved, stall}: how many it wrote, and for how many seconds (the median) each held it up

An unknown figure is null: step times of hardware without a catalogue entry, all predictions for a model that was not
traced. `--profile` records the steps from `collectives.FIRST_STEP` on; a shorter training has none.

Limits: `resident` is the system's figure for the whole process, its libraries included; it has no kinds.
"""

from __future__ import annotations

import json
import math
import os
import resource
import statistics
import sys
from collections.abc import Callable, Iterable, Sequence
from itertools import pairwise
from typing import TypedDict, TypeVar

import torch
from torch import Tensor

from dslc.compiler.facts.untrusted_files import read_text, replacing
from dslc.compiler.ir.actions import OF_SAMPLES, TrafficNode
from dslc.compiler.ir.codec import to_json
from dslc.compiler.ir.memory import MemoryNode
from dslc.compiler.ir.plan import PlanView, RankNode
from dslc.compiler.ir.program import JobProgram, RankPlace, StepPhases, TrainMode
from dslc.runtime.measure import collectives
from dslc.runtime.measure.slow_steps import compared_phases, median_phases
from dslc.runtime.measure.track_memory import KINDS, Tracker
from dslc.runtime.parallel.expert_parallel import row_records
from dslc.runtime.process.records import REPORT, REPORT_VERSION, SHARES, SKIPPED, Record, readable_records
from dslc.runtime.step.assemble import TrainingComponents

Exchanged = tuple[str, int, int]  # operation, count, bytes
MemoryBytes = dict[str, int | str]  # by kind, with `peak` and `rest`; `when` is text


class CollectiveTotal(TypedDict):
    count: int
    bytes: int


class CollectiveReport(TypedDict):
    operation: str
    predicted: CollectiveTotal | None
    measured: CollectiveTotal | None


class ExchangeMeasurement(CollectiveTotal):
    operation: str
    ranks: int


class MemoryReport(TypedDict):
    predicted: MemoryBytes | None
    measured: MemoryBytes | None


class StepTimeReport(TypedDict):
    predicted: float | None
    source: str | None
    measured: float | None
    calibrate: str


class RoutingReport(TypedDict):
    stated: float | None
    measured: float | None
    layer: str | None
    rank: int | None
    exceeded: bool


class SkippedBatch(TypedDict):
    step: int
    samples: list[int]


class RankMeasurements(TypedDict):
    """The contents of `logs/rank-N.json`."""

    process: dict[str, int]
    checkpoints: dict[str, float | None]
    texts: dict[str, float | None]
    memory: MemoryBytes | None
    experts: dict[str, tuple[int, int]]  # by layer: rows sent, rows arrived
    phases: dict[str, float] | None
    exchanges: dict[str, list[ExchangeMeasurement]]  # by step


class RankReport(TypedDict):
    rank: int
    memory: MemoryReport
    process: dict[str, int]
    phases: dict[str, dict[str, float | None]]
    checkpoints: dict[str, float | None]
    texts: dict[str, float | None]
    collectives: list[CollectiveReport]
    recorded: list[int]
    steady: bool | None


class RunReport(TypedDict):
    """The contents of report.json."""

    version: int
    plan: str
    steps: dict[str, int | None]
    step_time: StepTimeReport
    shares: list[int]
    skipped_batches: list[SkippedBatch]
    experts: RoutingReport | None
    ranks: list[RankReport]


TRACKED_STEPS = 3  # the first steps of a process; their collectives are those of engines that still settle

B = TypeVar("B")
T = TypeVar("T")


def tracker_of(parts: TrainingComponents) -> Tracker:
    def received() -> Iterable[Tensor]:
        schedule, exchange = parts.pipeline and parts.pipeline.schedule, parts.exchange
        yield from schedule.received if schedule else ()
        if exchange is not None:
            yield from (*exchange.own.values(), *exchange.shared.values(), *exchange.held)

    if parts.exchange is not None:
        parts.exchange.measure()
    averages = parts.average.tensors.values() if parts.average is not None else ()
    return Tracker(parts.plain, parts.optimizer, parts.device, received, averages)


class Measure:
    """Measures one rank. `done` steps were done by earlier processes of the training."""

    def __init__(self, job: JobProgram, place: RankPlace, parts: TrainingComponents, steps_before: int) -> None:
        self._rank, self._device, self._done = place.rank, parts.device, steps_before
        self._exchanges: dict[int, tuple[collectives.CollectiveExchange, ...]] = {}
        self._tracker = tracker_of(parts) if job.mode == TrainMode(profile=True) else None
        self._rows = row_records(parts.plain)

    def wrap(self, work: Callable[[B], T]) -> Callable[[B], T]:
        """Returns `work`, which does one step, measured if the program asks for it."""
        if self._tracker is None:
            return work
        tracked = _tracked(work, self._tracker)
        return collectives.recorded(tracked, self._exchanges, self._done)

    def leave(self, run_dir: str, stalls: Sequence[float], texts: Sequence[float], laps: Sequence[StepPhases]) -> None:
        """Writes the measurements; `stalls` are the seconds that each checkpoint delayed the training, `texts` those
        of each generation of texts, `laps` the phases of its steps.
        """
        process = {"resident": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * _RESIDENT_UNIT}
        if self._device.type == "cuda":
            process["allocated"] = torch.cuda.max_memory_allocated(self._device)
            process["reserved"] = torch.cuda.max_memory_reserved(self._device)
        measurements: RankMeasurements = {
            "process": process,
            "checkpoints": {"saved": len(stalls), "stall": statistics.median(stalls) if stalls else None},
            "texts": {"times": len(texts), "seconds": statistics.median(texts) if texts else None},
            "memory": _tracked_memory(self._tracker) if self._tracker is not None else None,
            "experts": {each.layer: (each.sent, each.arrived) for each in self._rows},
            "phases": to_json(median_phases(laps[1:] or laps)) if laps else None,
            "exchanges": {str(step): to_json(exchange) for step, exchange in self._exchanges.items()},
        }
        path = _path(run_dir, self._rank)
        os.makedirs(os.path.dirname(path), exist_ok=True)  # someone may have removed the logs
        with replacing(path) as file:
            json.dump(measurements, file)


def _tracked(work: Callable[[B], T], tracker: Tracker) -> Callable[[B], T]:
    step = 0

    def watched(batch: B) -> T:
        nonlocal step
        step += 1
        if step > TRACKED_STEPS:
            return work(batch)
        with tracker.step():
            return work(batch)

    return watched


def _tracked_memory(tracker: Tracker) -> MemoryBytes | None:
    if not tracker.peak:
        return None
    return {
        **tracker.peak,
        "peak": sum(tracker.peak.values()),
        "rest": sum(tracker.rest.values()),
        "when": tracker.when,
    }


_RESIDENT_UNIT = 1 if sys.platform == "darwin" else 1024  # bytes in a unit of `ru_maxrss`


def _path(run_dir: str, rank: int) -> str:
    return os.path.join(run_dir, "logs", f"rank-{rank}.json")


def write_report(run_dir: str, plan: PlanView, job: JobProgram, steps: int) -> RunReport:
    """Writes report.json of a run of `plan` as `job` that did `steps`, and returns its contents."""
    report: RunReport = {
        "version": REPORT_VERSION,
        "plan": plan.hash,
        "steps": {"planned": plan.data.steps, "done": steps},
        "step_time": {
            "predicted": plan.step_time,
            "source": plan.step.source if plan.step else None,
            "measured": step_time([record for record in readable_records(run_dir) if "seconds" in record]),
            "calibrate": job.calibrate,
        },
        "shares": _shares(run_dir, job),
        "skipped_batches": skipped_batches(run_dir),
        "experts": _routing(run_dir, plan),
        "ranks": [_rank(run_dir, plan, job, rank) for rank in range(plan.world_size)],
    }
    path = os.path.join(run_dir, REPORT)
    with replacing(path) as file:
        json.dump(report, file, indent=1)
        file.write("\n")
    return report


def _shares(run_dir: str, job: JobProgram) -> list[int]:
    """Returns the samples of a batch of each data rank; [] if they are equal, or another host has the file of them."""
    if not job.data.most_share:
        return list(job.data.shares)
    try:
        return list(json.loads(read_text(os.path.join(run_dir, SHARES), 1 << 24))["shares"])
    except FileNotFoundError:
        return []


def skipped_batches(run_dir: str) -> list[SkippedBatch]:
    """Returns the step of each skipped batch with the numbers of its samples."""
    try:
        spikes = json.loads(read_text(os.path.join(run_dir, SKIPPED), 1 << 24))["spikes"]
    except FileNotFoundError:
        return []
    return [
        {"step": step, "samples": spike["samples"][str(step)]} for spike in spikes for step in spike["skipped_steps"]
    ]


def step_time(records: Sequence[Record]) -> float | None:
    """Returns the median time of a step, in seconds, from one record to the next; None if too little was logged."""
    times = []
    for previous, record in pairwise(records):
        if record["split"] == "train" and record["step"] > previous["step"]:
            times.append((record["seconds"] - previous["seconds"]) / (record["step"] - previous["step"]))
    return statistics.median(times) if times else None


def _routing(run_dir: str, plan: PlanView) -> RoutingReport | None:
    """Returns the stated skew of the routing to experts beside the largest that a rank met."""
    if plan.experts is None:
        return None
    rows: dict[str, list[tuple[int, int, int]]] = {}  # by layer: arrived, rank, sent
    for rank in range(plan.world_size):
        for layer, (sent, arrived) in _measurements(run_dir, rank)["experts"].items():
            rows.setdefault(layer, []).append((arrived, rank, sent))
    even = {layer: max(sent for *_, sent in of_layer) for layer, of_layer in rows.items()}
    busiest = {layer: max(of_layer) for layer, of_layer in rows.items() if even[layer]}
    stated = plan.experts.skew
    if not busiest:
        return {"stated": stated, "measured": None, "layer": None, "rank": None, "exceeded": False}
    layer = max(busiest, key=lambda name: busiest[name][0] / even[name])
    arrived, rank, _ = busiest[layer]
    skew = arrived / even[layer]
    exceeded = stated is not None and arrived > math.ceil(stated * even[layer])
    return {"stated": stated, "measured": skew, "layer": layer, "rank": rank, "exceeded": exceeded}


def _measurements(run_dir: str, rank: int) -> RankMeasurements:
    with open(_path(run_dir, rank), encoding="utf-8") as file:
        measurements: RankMeasurements = json.load(file)
    return measurements


def _rank(run_dir: str, plan: PlanView, job: JobProgram, rank: int) -> RankReport:
    measurements = _measurements(run_dir, rank)
    planned = next((node for node in plan.ranks if node.first <= rank <= node.last), None)
    exchanges = measurements["exchanges"]
    recorded = sorted(int(step) for step in exchanges)
    first_exchanges = exchanges[str(recorded[0])] if recorded else None
    predicted, counted = None, None
    if planned is not None:
        traffic = [node for node in planned.traffic if _in_step(node, recorded[0] if recorded else 0)]
        predicted = [(node.operation, node.count, _bytes(node, plan, job, rank)) for node in traffic]
    if first_exchanges is not None:
        counted = [(each["operation"], each["count"], each["bytes"]) for each in first_exchanges]
    share_memory = planned and _memory_of_share(planned, _share(plan, job, rank))
    return {
        "rank": rank,
        "memory": {
            "predicted": _planned_memory(share_memory, measurements["memory"]) if share_memory else None,
            "measured": measurements["memory"],
        },
        "process": measurements["process"],
        "phases": compared_phases(job, measurements["phases"]),
        "checkpoints": measurements["checkpoints"],
        "texts": measurements["texts"],
        "collectives": _side_by_side(predicted, counted),
        "recorded": recorded,
        "steady": all(step_exchanges == first_exchanges for step_exchanges in exchanges.values()) if recorded else None,
    }


def _bytes(traffic: TrafficNode, plan: PlanView, job: JobProgram, rank: int) -> int:
    """Returns the bytes of planned traffic, which is of the largest share of a batch, for the share of a rank."""
    if not job.data.shares or traffic.what not in OF_SAMPLES:
        return traffic.bytes
    return traffic.bytes * _share(plan, job, rank) // max(job.data.shares)


def _share(plan: PlanView, job: JobProgram, rank: int) -> int:
    """Returns the samples that a rank takes of a batch; 0 if shares are equal."""
    (axis,) = (axis for axis in plan.axes if axis.name == "data")
    return job.data.shares[rank // axis.stride % axis.size] if job.data.shares else 0


def _memory_of_share(planned: RankNode, samples: int) -> MemoryNode:
    """Returns the planned memory of a rank: the largest share's, unless its own share is smaller."""
    smaller = (each.memory for each in planned.share_memory if each.samples == samples)
    return next(smaller, planned.memory)


def _in_step(traffic: TrafficNode, step: int) -> bool:
    """True if an exchange takes place in a step; of no step in particular, if it does in some of the later ones."""
    return traffic.when.holds(step) if step else traffic.when.steady


def _planned_memory(memory: MemoryNode, measurements: MemoryBytes | None) -> MemoryBytes:
    """Returns the predicted memory that torch's allocator sees, by the kinds that were measured."""
    kinds = {kind: memory.kinds[kind] for kind in KINDS if measurements is None or kind in measurements}
    if measurements is not None and "others" in measurements:
        kinds["others"] = memory.tensors - sum(kinds.values())
    rest = memory.rest - memory.framework + memory.workspace
    return {**kinds, "peak": memory.tensors, "rest": rest, "when": memory.when}


def _side_by_side(
    predicted: Iterable[Exchanged] | None, measurements: Iterable[Exchanged] | None
) -> list[CollectiveReport]:
    ours, theirs = _by_operation(predicted), _by_operation(measurements)
    no_traffic: CollectiveTotal = {"count": 0, "bytes": 0}
    return [
        {
            "operation": operation,
            "predicted": None if ours is None else ours.get(operation, no_traffic),
            "measured": None if theirs is None else theirs.get(operation, no_traffic),
        }
        for operation in sorted({*(ours or ()), *(theirs or ())})
    ]


def _by_operation(entries: Iterable[Exchanged] | None) -> dict[str, CollectiveTotal] | None:
    if entries is None:
        return None
    sums: dict[str, CollectiveTotal] = {}
    for operation, count, size in entries:
        total = sums.setdefault(operation, {"count": 0, "bytes": 0})
        total["count"] += count
        total["bytes"] += size
    return sums
