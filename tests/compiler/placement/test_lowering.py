"""Lowered schedule tables equal those of torch's own runtime."""

from __future__ import annotations

import re
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from helpers.planning import schedule_csv
from torch.distributed.pipelining import schedules as torch_schedules

from dslc.compiler.placement import lowering
from dslc.compiler.placement.lowering import Issue, lowered
from dslc.compiler.placement.schedules import NAMES, default_virtual_stages, demands, table

SIZES = [(2, 2), (2, 4), (2, 7), (3, 6), (4, 4), (4, 8), (4, 12), (8, 16)]


def by_torch(name: str, ranks: int, microbatches: int, virtual_stages: int, folder: Path) -> dict[int, list[Any]]:
    """Returns the rows that `_PipelineScheduleRuntime` makes from our table, loaded as the runtime loads it."""
    ours = table(name, ranks, microbatches, virtual_stages)
    path = folder / "schedule.csv"
    path.write_text(schedule_csv(ours), newline="")
    stages = [
        SimpleNamespace(group_rank=0, group_size=ranks, num_stages=ours.stages, submod=None)
        for _ in range(virtual_stages)
    ]
    runtime = torch_schedules._PipelineScheduleRuntime(stages, microbatches)
    runtime._load_csv(str(path), format="compute_only")
    return runtime.pipeline_order_with_comms


# Torch 2.15 waits for each reduction in an entry of its own, and for a send when its gradient is back, or at the end.
# The proofs (compiler/graph/proofs/waits.py) have all these waits, as each send waits at once there. But one more entry
# moves receives after it.
WAITS = hasattr(torch_schedules, "WAIT_REDUCE_GRAD")


def with_waits(monkeypatch: pytest.MonkeyPatch) -> None:
    """Makes our rows wait for reductions."""
    reduced = lowering._reduced

    def waiting(row: list[Issue], microbatches: int) -> list[Issue]:
        found = ((each, Issue("WAIT_REDUCE_GRAD", each.stage)) for each in reduced(row, microbatches))
        return [issue for pair in found for issue in pair[: 1 + (pair[0].kind == "REDUCE_GRAD")]]

    monkeypatch.setattr(lowering, "_reduced", waiting)


def without_sends_waits(row: list[str]) -> list[str]:
    """Returns a row without its waits for sends, which come where nothing else is left to wait for, or at the end."""
    done: list[str] = []
    for at, action in enumerate(row):
        stage, wait, microbatch = action.partition("WAIT_SEND_F")
        if "WAIT_SEND" not in action:
            done.append(action)
        elif not (wait and {f"{stage}{kind}{microbatch}" for kind in "BI"} & {*re.split(r"[;()]", ";".join(done))}):
            assert all("WAIT_SEND" in later for later in row[at:]), (at, row)
    return done


@pytest.mark.parametrize(("ranks", "microbatches"), SIZES)
@pytest.mark.parametrize("name", NAMES)
def test_the_rows_are_those_of_torch(
    name: str, ranks: int, microbatches: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if WAITS:
        with_waits(monkeypatch)
    compared = 0
    for virtual_stages in {default_virtual_stages(name), 3, 4}:
        if demands(name, ranks, microbatches, virtual_stages):
            continue
        theirs = by_torch(name, ranks, microbatches, virtual_stages, tmp_path)
        ours = lowered(table(name, ranks, microbatches, virtual_stages))
        for rank in range(ranks):
            assert [str(issue) for issue in ours[rank]] == without_sends_waits([str(action) for action in theirs[rank]])
        compared += 1
    assert compared or demands(name, ranks, microbatches, default_virtual_stages(name))


@pytest.mark.parametrize("name", NAMES)
def test_every_schedule_is_compared(name: str) -> None:
    fitting = [size for size in SIZES if not demands(name, *size, default_virtual_stages(name))]
    assert len(fitting) >= 3, fitting
