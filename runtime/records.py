"""What a training writes down while it runs: metrics.jsonl, and the same for TensorBoard.

Model: rank 0 appends one JSON object a line to `metrics.jsonl`, and that file is all there is: the launcher reads it as
it grows, and makes the display and TensorBoard's events from it, away from the ranks.

Contract: a line is written whole and at once. Its keys are `step` (from 1), `split` (`train` or `validation`), `loss`
and other metrics, `lr` (training), `samples` (seen so far) and `seconds` (since the first step began). A number that is
not finite is `null`, as JSON has no word for it.
"""

from __future__ import annotations

import json
import math
import os
from collections.abc import Iterator
from typing import Any

NAME = "metrics.jsonl"
_FACTS = ("step", "split", "samples", "seconds")

Record = dict[str, Any]


class Records:
    """Writes metrics.jsonl of a run directory from its beginning; on rank 0 alone."""

    def __init__(self, run_dir: str) -> None:
        self._file = open(os.path.join(run_dir, NAME), "w", encoding="utf-8", buffering=1)  # noqa: SIM115

    def write(self, record: Record) -> None:
        finite = {k: None if isinstance(v, float) and not math.isfinite(v) else v for k, v in record.items()}
        self._file.write(json.dumps(finite) + "\n")

    def close(self) -> None:
        self._file.close()


def read_metrics(run_dir: str) -> list[Record]:
    """The lines of metrics.jsonl; an empty list where there is none. A line that was cut off is left out."""
    try:
        with open(os.path.join(run_dir, NAME), encoding="utf-8") as file:
            return [json.loads(line) for line in file if line.endswith("\n")]
    except FileNotFoundError:
        return []


class Follower:
    """Reads metrics.jsonl as it grows."""

    def __init__(self, run_dir: str) -> None:
        self._path, self._at = os.path.join(run_dir, NAME), 0

    def new(self) -> Iterator[Record]:
        """The records that were written since the last call."""
        try:
            with open(self._path, encoding="utf-8") as file:
                file.seek(self._at)
                while (line := file.readline()).endswith("\n"):
                    self._at = file.tell()
                    yield json.loads(line)
        except FileNotFoundError:
            return


class TensorBoard:
    """Writes each record's numbers into `<run_dir>/tensorboard`, as `train/loss`, `validation/accuracy`, `train/lr`."""

    def __init__(self, run_dir: str) -> None:
        from torch.utils.tensorboard import SummaryWriter  # 0.1 s: not before the first step is done

        self._writer: Any = SummaryWriter(os.path.join(run_dir, "tensorboard"))

    def write(self, record: Record) -> None:
        for name, value in record.items():
            if name not in _FACTS and value is not None:
                self._writer.add_scalar(f"{record['split']}/{name}", value, record["step"])

    def close(self) -> None:
        self._writer.close()
