"""A step of two processes, one at half speed, with unequal shares of a batch over equal ones; and their curves.

A control group gives rank 1 half of a core. Equal shares wait for it in each step; shares of 2 to 1 do not.
"""

from __future__ import annotations

import json
import os
import tempfile
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from pathlib import Path

from benchmarks.measure import Ratio, compare

JOB = os.path.join(os.path.dirname(os.path.abspath(__file__)), "jobs", "throttled.plt")
TARGET = 0.75
WARM_UP = 4  # steps
WEIGHT = 10_000  # against other processes: the limit alone slows the group
PERIOD = 4_000  # microseconds, in half of which the group may compute


@contextmanager
def slow_group() -> Iterator[str]:
    """Makes a control group of half a core (version 1 or 2), and removes it."""
    root = Path("/sys/fs/cgroup")
    first = (root / "cpu").is_dir()
    group = (root / "cpu" if first else root) / f"dslc-slow-{os.getpid()}"
    group.mkdir()
    try:
        if first:
            (group / "cpu.cfs_period_us").write_text(str(PERIOD))
            (group / "cpu.cfs_quota_us").write_text(str(PERIOD // 2))
            (group / "cpu.shares").write_text(str(WEIGHT))
        else:
            (group / "cpu.max").write_text(f"{PERIOD // 2} {PERIOD}")
            (group / "cpu.weight").write_text(str(WEIGHT))
        yield str(group)
    finally:
        group.rmdir()


def bench_shares(pairs: int, run: Callable[[list[str], Mapping[str, str]], str]) -> Iterator[Ratio]:
    """Yields the ratios of steps; prints the shares that were measured and how far the curves are apart. `run` runs
    `dslc` with arguments, in an environment with these variables.
    """
    curves: dict[str, list[float]] = {}
    measured: list[list[int]] = []

    def step(shares: str) -> float:
        """Returns the milliseconds of a step, without the first."""
        with tempfile.TemporaryDirectory() as folder:
            out = Path(folder, "run")
            settings = ("--set", f"parallelism.data_shares={shares}")
            run(["run", JOB, "--out", str(out), *settings], {"DSLC_SLOW_GROUP": group})
            lines = [json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines()]
            if shares == "measured":
                measured.append(json.loads((out / "shares.json").read_text())["shares"])
        curves[shares] = [line["loss"] for line in lines if line["split"] == "train"]
        seconds = [line["seconds"] for line in lines if line["split"] == "train"]
        return float(1000 * (seconds[-1] - seconds[WARM_UP]) / (len(seconds) - 1 - WARM_UP))

    with slow_group() as group:
        for shares in ("[2, 1]", "measured"):
            name = f"step, one of two processes at half speed, data_shares = {shares} over [1, 1]"
            yield compare(name, partial(step, shares), partial(step, "[1, 1]"), pairs=pairs, unit="ms", target=TARGET)
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder, "run")
        run(["run", JOB, "--out", str(out), "--set", "devices.cpus=1"], {})
        losses = [json.loads(line)["loss"] for line in (out / "metrics.jsonl").read_text().splitlines()]
    for shares, curve in curves.items():
        apart = max(abs(one - other) for one, other in zip(losses, curve, strict=True))
        print(f"losses of data_shares = {shares} differ from those of one process by at most {apart:.1e}", flush=True)
    print(f"measured shares of a batch: {measured}", flush=True)
