"""The passes one by one: what each adds to the plan graph, and how `dslc plan --after` prints it."""

from __future__ import annotations

import difflib
from pathlib import Path

import pytest
from helpers.golden import hold
from helpers.planning import JOBS, compiled

from dslc.compiler.graph.build import build_graph
from dslc.compiler.graph.passes import PASSES, exchange
from dslc.compiler.graph.plan_graph import PlanGraph
from dslc.compiler.graph.plan_text import plan_text
from dslc.compiler.graph.stored import restore, store
from dslc.compiler.graph.verify import verify
from dslc.main import main

GOLDEN = Path(__file__).parent / "golden"


@pytest.mark.parametrize("name", ["pipeline", "replicas"])
def test_each_pass_changes_the_plan_as_before(name: str) -> None:
    analysis = compiled(JOBS / f"{name}.plt").analysis
    before: list[str] = []
    changes = ""
    for each in PASSES:
        after = plan_text(build_graph(analysis, after=each.name)).splitlines()
        changed = [line for line in difflib.ndiff(before, after) if line[0] in "+-" and "+ after" not in line]
        changes += "\n".join([f"== {each.name}", *(line for line in changed if not line.startswith("- after")), "\n"])
        before = after
    hold(changes, GOLDEN / f"passes_{name}.txt")


def test_a_pass_runs_on_a_plan_that_was_read_from_a_file() -> None:
    analysis = compiled(JOBS / "replicas.plt").analysis
    plan: PlanGraph = restore(store(build_graph(analysis, after="order_actions")))
    exchange(plan, [cost.operations for cost in analysis.costs])
    assert store(plan)["nodes"] == store(build_graph(analysis))["nodes"]
    verify(plan)


def test_a_command_prints_the_plan_after_a_pass(capsys: pytest.CaptureFixture[str]) -> None:
    job = str(JOBS / "pipeline.plt")
    assert main(["plan", job, "--after", "place_processes"]) == 0
    shown = capsys.readouterr().out
    assert shown.startswith("after place_processes: ") and "process 1: Process " in shown and "stage 0" not in shown
    assert main(["plan", job, "--after", "fold"]) == 2
    assert "there is no pass `fold`: the passes are add_constants, place_devices, " in capsys.readouterr().err


def test_a_plan_file_has_been_through_all_passes(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "plan.json").write_text("{}")
    assert main(["plan", str(tmp_path / "plan.json"), "--after", "exchange"]) == 1
    assert "E1006" in capsys.readouterr().err
