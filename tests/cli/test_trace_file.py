"""`dslc run --profile=trace`: the lanes of a trace, their clocks, and what a real training leaves."""

from __future__ import annotations

import gzip
import json
from collections.abc import Mapping
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from helpers import made_plans
from helpers.commands import dslc
from helpers.launcher import Launcher
from helpers.paths import EXAMPLES
from helpers.planning import JOBS, compiled
from helpers.trained import ready

from dslc.compiler.ir.program import TrainMode
from dslc.compiler.ir.records import StageTime, StepEnd
from dslc.jobs.prepare_run import MOST_TRACED, traced_ranks
from dslc.main import main
from dslc.runs.trace_file import NAME, ClockReadings, clock_offsets, write_trace
from dslc.runtime.measure.step_trace import STEPS, first_traced_step
from dslc.runtime.process.records import SHARED_MEMORY_MARK

BASE = 1_790_857_026_000_000_000
GPT = ("train.lr_schedule.warmup=2 steps", "checkpoint.every=none")
CATALOGUE = '[cpu]\nfp32 = "0.2TFLOPS"\nbf16 = "0.2TFLOPS"\nlink = "2GBps"\nefficiency = 0.5\n'


def lanes(folder: Path) -> dict[str, dict[str, list[dict[str, Any]]]]:
    """Returns the events by process and lane, which lie inside one another in each lane."""
    with gzip.open(folder / NAME, "rt") as file:
        events = json.load(file)["traceEvents"]
    names = {(e["pid"], e["tid"], e["name"]): e["args"].get("name") for e in events if e["ph"] == "M"}
    lanes: dict[str, dict[str, list[dict[str, Any]]]] = {}
    assert all("cat" in event for event in events if event["ph"] == "M")  # strict readers expect it of all events
    for event in events:
        if event["ph"] == "M":
            continue
        assert event["ts"] >= 0 and event["name"]
        process = names[event["pid"], event["pid"], "process_name"]
        lanes.setdefault(process, {}).setdefault(names[event["pid"], event["tid"], "thread_name"], []).append(event)
    for rank in lanes.values():
        for lane in rank.values():
            ends: list[int] = []
            for event in (event for event in lane if event["ph"] == "X"):
                start, length = (round(event[key] * 1e3) for key in ("ts", "dur"))
                while ends and ends[-1] <= start:
                    ends.pop()
                assert not ends or start + length <= ends[-1], f"{event} overlaps the event before it"
                ends.append(start + length)
    return lanes


def spans(events: list[dict[str, Any]], *named: str) -> list[tuple[str, float, float]]:
    """Returns names, beginnings and lengths in microseconds."""
    return [(e["name"], e["ts"], e["dur"]) for e in events if not named or e["name"].startswith(named)]


def recording(folder: Path, rank: int, machine: str, ahead: int, ranges: Mapping[str, tuple[float, float]]) -> None:
    """Writes what a rank leaves, whose clock is `ahead` by some nanoseconds; times in microseconds."""
    logs = folder / "logs"
    logs.mkdir(exist_ok=True)
    readings = [BASE + ahead + 1000 * n for n in range(3)]
    (logs / f"rank-{rank}.clock.json").write_text(json.dumps({"machine": machine, "readings": readings}))
    place: dict[str, Any] = {"ph": "X", "pid": 7, "tid": 7}
    events: list[dict[str, Any]] = [
        {**place, "name": name, "ts": ahead / 1e3 + start, "dur": length, "args": {}}
        for name, (start, length) in ranges.items()
    ]
    # Two collectives, the work of one of them in another thread, and work that overlaps the calls of its thread.
    for start, size in ((200, 8), (400, 70_592 // 4)):
        shapes = {"Input Dims": [[[size]], []], "Input type": ["TensorList", ""]}
        issued = {**place, "name": "c10d::allreduce_", "ts": ahead / 1e3 + start, "dur": 10, "args": shapes}
        events += [
            issued,
            {**issued, "name": "gloo:all_reduce", "tid": 8, "ts": ahead / 1e3 + start + 5, "dur": 40, "args": {}},
        ]
    events.append({**place, "name": "gloo:send", "ts": ahead / 1e3 + 205, "dur": 300, "args": {}})
    events.append({"ph": "M", "name": "thread_name", "pid": 7, "tid": 8, "ts": 0, "args": {"name": "pool"}})
    content = {"baseTimeNanoseconds": BASE, "traceEvents": events}
    (logs / f"rank-{rank}.trace.json").write_text(json.dumps(content))


def test_lanes_of_a_plan_and_of_ranks_with_other_clocks(tmp_path: Path) -> None:
    plan = compiled(EXAMPLES / "digits.plt", "model.network=[flatten(), linear(10)]")
    (gradients,) = plan.plan.ranks[0].traffic
    step = replace(
        made_plans.STEP,
        stages=(StageTime(forward=20e-6, backward=30e-6),),
        ends=(StepEnd(exposed=0.0, update=5e-6),),
        samples=0.0,
        rest=0.0,
    )
    ranges = {
        "dslc: samples": (50.0, 40.0),
        "dslc: step 5": (100.0, 500.0),
        "dslc: 0F0": (110.0, 80.0),
        "dslc: 0B0": (195.0, 200.0),
        "dslc: values to log": (396.0, 50.0),
        "dslc: update 0": (450.0, 100.0),
    }
    recording(tmp_path, 0, "a", 0, ranges)
    recording(tmp_path, 1, "b", 5_000_000_123, ranges)
    said = write_trace(plan.graph, replace(plan.plan, step=step), str(tmp_path))
    assert said.endswith("has 2 ranks: open it in https://ui.perfetto.dev")
    found = lanes(tmp_path)
    assert list(found) == ["rank 0", "rank 1"]
    for rank in found.values():
        assert list(rank)[:3] == ["predicted", "plan", "exchanges"], "the predicted lane is the first"
        assert spans(rank["predicted"]) == [("0F0", 100, 20), ("0B0", 120, 30), ("update 0", 150, 5)]
        assert spans(rank["plan"], "0", "update") == [("0F0", 110, 80), ("0B0", 195, 200), ("update 0", 450, 100)]
        assert spans(rank["main thread, asynchronous 1"]) == [("gloo:send", 205, 300)]
        # The second collective is of a range that the plan does not have; the first has other bytes than the plan's.
        assert spans(rank["exchanges"]) == [("all_reduce", 200, 45)]
    assert gradients.count == 1


def test_collectives_have_names_of_the_plan_where_their_bytes_are_its(tmp_path: Path) -> None:
    plan = compiled(EXAMPLES / "digits.plt", "model.network=[flatten(), linear(10)]")
    (gradients,) = plan.plan.ranks[0].traffic
    recording(tmp_path, 0, "a", 0, {"dslc: step 5": (100.0, 250.0)})
    path = tmp_path / "logs" / "rank-0.trace.json"
    path.write_text(path.read_text().replace("[[[8]], []]", f"[[[{gradients.bytes // 4}]], []]"))
    recording(tmp_path, 1, "a", 0, {})
    (tmp_path / "logs" / "rank-1.trace.json").write_text("{")
    assert "has 1 rank:" in (said := write_trace(plan.graph, plan.plan, str(tmp_path)))
    assert "\nthe recording of rank 1 cannot be read: Expecting" in said
    (tmp_path / "logs" / "rank-1.clock.json").unlink()
    said = write_trace(plan.graph, plan.plan, str(tmp_path))
    assert "it lacks 1: the recordings of other hosts" in said and "no predicted lane" in said
    (rank,) = lanes(tmp_path).values()
    assert spans(rank["exchanges"]) == [("exchange 0.0: all_reduce of gradients", 200, 45)]
    assert rank["exchanges"][0]["args"] == {"carries": "gradients", "axis": "data", "bytes": gradients.bytes}
    assert "predicted" not in rank


def test_a_collective_over_shared_memory_ends_when_its_work_ends(tmp_path: Path) -> None:
    """Its thread is not the one that has issued it. Only an all-to-all may be gloo's, whose work begins in the call."""
    plan = compiled(EXAMPLES / "digits.plt", "model.network=[flatten(), linear(10)]")
    recording(tmp_path, 0, "a", 0, {"dslc: step 5": (100.0, 250.0)})
    path = tmp_path / "logs" / "rank-0.trace.json"
    content = json.loads(path.read_text())
    work = next(event for event in content["traceEvents"] if event["name"] == "gloo:all_reduce")
    content["traceEvents"] += [{**work, "name": "gloo:all_to_all", "ts": start, "dur": 60} for start in (302, 340)]
    path.write_text(json.dumps(content))
    calls = (("all_reduce", 120, 100), ("all_to_all", 300, 5), ("all_to_all", 320, 5))
    events = [
        {"name": f"{SHARED_MEMORY_MARK}{name} 4", "ts": BASE + 1000 * start, "dur": 1000 * length}
        for name, start, length in calls
    ]
    (tmp_path / "logs" / "rank-0.collectives.json").write_text(json.dumps(events))
    write_trace(plan.graph, plan.plan, str(tmp_path))
    (rank,) = lanes(tmp_path).values()
    exchanges = sorted(span for lane in rank if lane.startswith("exchanges") for span in spans(rank[lane]))
    assert exchanges == [
        *(("all_reduce", 120, 100), ("all_reduce", 200, 45)),
        *(("all_to_all", 300, 62), ("all_to_all", 320, 5)),
    ]
    assert len(rank["shared memory"]) == len(calls)


def test_clocks_of_machines_are_off_by_the_median_over_rounds_and_ranks() -> None:
    def clock(machine: str, *readings: int) -> ClockReadings:
        return ClockReadings(machine=machine, readings=readings)

    clocks = {
        0: clock("a", 10, 20, 30),
        1: clock("a", 14, 29, 35),
        2: clock("b", 110, 121, 190),
        3: clock("b", 111, 121, 131),
    }
    assert clock_offsets(clocks) == {0: 0, 1: 0, 2: 101, 3: 101}


def test_recorded_steps_are_late_enough_and_not_compared() -> None:
    assert first_traced_step(0, 100) == 5, "step 4 is compared"
    assert first_traced_step(10, 100) == 17, "so is step 16"
    assert first_traced_step(0, 5) == 3 and first_traced_step(0, 2) == 1 and first_traced_step(6, 8) == 7


def test_no_trace_without_a_recording(tmp_path: Path) -> None:
    plan = compiled(EXAMPLES / "digits.plt")
    (tmp_path / "logs").mkdir()
    assert "no trace" in write_trace(plan.graph, plan.plan, str(tmp_path))
    assert not (tmp_path / NAME).exists()


def test_of_a_large_world_one_replica_is_recorded_first(tmp_path: Path) -> None:
    plan = compiled(
        JOBS / "pipeline.plt",
        "parallelism.pipeline=4",
        "parallelism.data=16",
        "devices.cpus=64",
        "data.batch=256",
    )
    places = plan.places()
    traced = traced_ranks(places)
    by_rank = {place.rank: place.coordinates for place in places}
    assert len(traced) == MOST_TRACED and {by_rank[rank]["data"] for rank in traced} == {0, 1, 2, 3}
    assert all({by_rank[r]["pipeline"] for r in traced if by_rank[r]["data"] == n} == {0, 1, 2, 3} for n in range(4))
    assert traced_ranks(places[:MOST_TRACED]) == ()
    recording(tmp_path, 0, "a", 0, {"dslc: step 5": (100.0, 250.0)})
    said = write_trace(plan.graph, plan.plan, str(tmp_path), traced)
    assert "of 64 ranks 16 are recorded, those of one replica first, so that the file stays small: ranks 0, 1" in said
    assert "it lacks 1, 2, 3, 16" in said, "ranks that were to be recorded"


@pytest.mark.slow
def test_a_rank_that_is_not_recorded_leaves_nothing(launcher: Launcher, tmp_path: Path) -> None:
    made = ready(EXAMPLES / "digits.plt", "train.epochs=none", "train.steps=8", "evaluate.every=none")
    program = replace(made.program, mode=TrainMode(trace=True, traced=(1,)))
    outcome, shown = launcher.launch(program, made.places, tmp_path)
    assert outcome.is_complete, shown
    names = {path.name for path in (tmp_path / "logs").glob("rank-*.*.json")}
    assert names == {"rank-1.clock.json", "rank-1.trace.json"}
    assert "has 1 rank:" in write_trace(made.compiled.graph, made.compiled.plan, str(tmp_path), (1,))


def test_trace_is_no_value_that_takes_the_job(capsys: pytest.CaptureFixture[str]) -> None:
    for option in ("--profile", "--profile=trace"):
        assert main(["run", option, "nowhere.plt", "--try", "--out=x"]) == 2
        assert "`--out`" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("job", "settings", "passes", "exchanges"),
    [
        (
            "digits",
            ("train.epochs=none", "parallelism.microbatches=2"),
            ["0F0", "0B0", "0F1", "0B1", "update 0"],
            {f"exchange 0.{n}: all_reduce of batch statistics" for n in range(4)}
            | {"exchange 0.4: all_reduce of gradients"},
        ),
        pytest.param(
            "pipeline",
            ("parallelism.data=1", "devices.cpus=2", *GPT),
            ["0F0", "0F1", "0B0", "0F2", "0B1", "0F3", "0B2", "0B3", "update 0"],
            {"exchange 0.0: all_reduce of norm of the gradient"},
            marks=pytest.mark.long,
        ),
        pytest.param(
            "gpt_cpu",
            (
                "parallelism.tensor=2",
                "parallelism.sequence=true",
                "parallelism.data=1",
                "parallelism.zero=0",
                "memory.recompute=none",
                *GPT,
            ),
            ["0F0", "0B0", "update 0"],
            {
                "exchange 0.0: all_reduce of activations",
                "exchange 0.1: all_gather of activations",
                "exchange 0.2: reduce_scatter of activations",
                "exchange 0.3: all_reduce of parts of the loss",
                "exchange 0.4: all_gather of gradients of activations",
                "exchange 0.5: reduce_scatter of gradients of activations",
                "exchange 0.6: all_gather of gradients of activations",
                "exchange 0.7: all_reduce of gradients beside pieces",
                "exchange 0.8: all_reduce of norm of the gradient",
            },
            marks=pytest.mark.slow,
        ),
    ],
)
def test_a_training_leaves_its_steps(
    job: str, settings: tuple[str, ...], passes: list[str], exchanges: set[str], tmp_path: Path
) -> None:
    (tmp_path / "here.toml").write_text(CATALOGUE)
    shorter = ("evaluate.every=none", "train.steps=8", f'devices.catalogue="{tmp_path / "here.toml"}"', *settings)
    words = [word for setting in shorter for word in ("--set", setting)]
    run = dslc("run", EXAMPLES / f"{job}.plt", "--profile=trace", "--out", tmp_path / "run", *words)
    assert run.returncode == 0, run.stdout + run.stderr
    assert f"{NAME} has 2 ranks: open it in https://ui.perfetto.dev" in run.stdout
    first, _ = lanes(tmp_path / "run").values()
    steps = spans(first["plan"], "step ")
    assert [name for name, _, _ in steps] == ["step 5", "step 6", "step 7"] and len(steps) == STEPS
    assert all(start + length <= after for (_, start, length), (_, after, _) in pairwise(steps))
    assert [e["name"] for e in first["plan"] if e["name"] in passes] == passes * STEPS
    assert {e["name"] for e in first["exchanges"]} == exchanges
    predicted = [e["name"] for e in first["predicted"] if e["name"] in passes and e["name"] != "update 0"]
    assert predicted == passes[:-1] * STEPS
    assert "samples" in {e["name"] for e in first["plan"]} and len(first["main thread"]) > 100
