"""Plans for 16,384 devices: their size does not grow with the ranks, and fits into little memory."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
from helpers.paths import ROOT
from helpers.planning import JOBS, compiled

from dslc.compiler.graph.verify import PROPOSITIONS, verify
from dslc.compiler.show.draw import VIEWS, draw
from dslc.compiler.show.explain import explain

LARGE = ROOT / "benchmarks" / "jobs" / "large.plt"
MEMORY = 500 * 2**20


def test_sixteen_thousand_devices_on_four_axes() -> None:
    job = compiled(JOBS / "vast.plt")
    verify(job.graph)
    assert job.plan.world_size == 16_384
    assert [axis.size for axis in job.plan.axes] == [16, 64, 2, 8]
    assert "ranks 0–1023" in explain(job.plan) and len(explain(job.plan).splitlines()) < 200
    assert len(job.plan.text()) < 200_000, "a plan is as small as its symmetry allows"
    assert all(len(draw(job.plan, view)) < 500_000 for view in VIEWS)


def test_every_proposition_is_proved_of_it() -> None:
    job = compiled(LARGE)
    assert {needs for _, needs, _ in PROPOSITIONS} <= set(job.graph.done)
    lines, broken = job.graph.lines()
    assert not broken and len(lines) == 16 and min(map(len, lines.values())) > 2 * 2 * 32


@pytest.mark.slow
def test_the_graph_does_not_grow_with_the_ranks() -> None:
    """Sixteen times the data ranks, with sixteen times the samples: the same actions."""
    few = compiled(LARGE, "devices.nodes=128", "parallelism.data=4", "data.batch=128").graph.graph
    many = compiled(LARGE).graph.graph
    assert many.number_of_nodes() == few.number_of_nodes()
    assert many.number_of_edges() == few.number_of_edges()


@pytest.mark.slow
@pytest.mark.parametrize("arguments", [("plan",), ("render", "--view", "schedule", "-o", "plan.dot")])
def test_it_takes_little_memory(arguments: tuple[str, ...], tmp_path: Path) -> None:
    """Loads, checks, plans, proves and draws in one process, measured by the kernel."""
    command = [os.path.join(os.path.dirname(sys.executable), "dslc"), arguments[0], str(LARGE), *arguments[1:]]
    # From a small process: a fork counts its parent's memory until it runs its own program.
    small = (
        "import resource, subprocess, sys; subprocess.run(sys.argv[1:], stdout=subprocess.DEVNULL, check=True); "
        "print(resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss)"
    )
    whole = [sys.executable, "-c", small, *command]
    run = subprocess.run(whole, cwd=tmp_path, capture_output=True, text=True, check=True)
    assert int(run.stdout) * 1024 < MEMORY
