"""Trainings whose samples take longer to make than to train on, beside a plain loop over torch's `DataLoader`."""

from __future__ import annotations

import json
import os
import sys
import tempfile
from collections.abc import Callable

from benchmarks.measure import Ratio, compare

JOBS = os.path.join(os.path.dirname(os.path.abspath(__file__)), "jobs")
KINDS = ("images", "texts")
WORKERS, FIRST, LAST = 2, 20, 120  # steps; the workers begin in the first
LOOP = "import sys; sys.path.insert(0, sys.argv[1]); import loading; print(loading.plain(sys.argv[2], {}, {}, {}))"


def measure(
    kind: str, pairs: int, dslc: Callable[..., list[str]], finish: Callable[[list[str]], str]
) -> tuple[Ratio, float]:
    """Returns a step of the job over that of the loop, and the share of a step that waits for samples, by the records.
    Ends the program if the records name another phase.
    """
    shares: list[float] = []

    def ours() -> float:
        with tempfile.TemporaryDirectory() as folder:
            out = os.path.join(folder, "run")
            finish(dslc("run", os.path.join(JOBS, f"{kind}.plt"), "--out", out))
            with open(os.path.join(out, "metrics.jsonl"), encoding="utf-8") as file:
                lines = [line for line in map(json.loads, file) if line["split"] == "train" and line["step"] >= FIRST]
        first, last = lines[0], lines[-1]
        phases = {name: last[f"seconds.{name}"] for name in ("data", "passes", "update", "host")}
        slowest = max(phases, key=lambda name: phases[name])
        if slowest != "data":
            sys.exit(f"loading, {kind}: the record names {slowest}, not data: {phases}")
        shares.append(phases["data"] / sum(phases.values()))
        return float(1000 * (last["seconds"] - first["seconds"]) / (last["step"] - first["step"]))

    def by_hand() -> float:
        return float(finish([sys.executable, "-c", LOOP.format(WORKERS, FIRST, LAST), JOBS, kind]))

    ratio = compare(f"step, {kind}, {WORKERS} workers", ours, by_hand, pairs=pairs, unit="ms", target=1)
    return ratio, sum(shares) / len(shares)
