"""`dslc evaluate`: the metrics of a checkpoint over a whole split, on any devices."""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterator
from typing import Any

from dslc.compiler.ir.program import EvaluateMode
from dslc.compiler.show.explain import table
from dslc.dsl.meaning.load import load_each
from dslc.dsl.plain import plain
from dslc.jobs.inference import metrics, prepare_inference
from dslc.runtime.process.records import finite
from dslc.terminal.exit_codes import GOOD, CommandFailedError


def main(arguments: argparse.Namespace) -> int:
    _, combinations = load_each(arguments.job, arguments.settings)
    split = arguments.split
    ready, selected = prepare_inference(
        combinations[0], arguments.checkpoint, EvaluateMode, split=split, raw=arguments.raw
    )
    samples = getattr(ready.program.data, f"{split}_samples")
    if not samples:
        raise CommandFailedError(
            f"there is nothing to evaluate on: the job holds no samples out (`--set data.{split}=10%`)"
        )
    results = metrics(ready)
    if arguments.json:
        step = selected.manifest.step if selected.manifest else None
        print(json.dumps({"checkpoint": selected.path, "step": step, "samples": samples, **finite(results)}))
        return GOOD
    print(plain(f"{selected} over {samples:,} {split} samples"))

    for line in table(row for name, value in results.items() for row in _rows(name, value)):
        print(f"  {line}")
    return GOOD


def _rows(name: str, value: Any) -> Iterator[tuple[str, str]]:
    """Yields the lines of a metric: one, or as many as a matrix has."""
    if not isinstance(value, list):
        yield name, f"{value:.6g}"
    elif value and isinstance(value[0], list):
        for number, row in enumerate(value):
            yield from _rows(f"{name}[{number}]", row)
    else:
        yield name, "  ".join(f"{number:.6g}" for number in value)
