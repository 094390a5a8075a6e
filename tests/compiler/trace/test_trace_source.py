"""A user's data set is traced by some samples, of whatever they consist."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.data import default_collate

from dslc.compiler.ir.facts import SourceFacts
from dslc.compiler.trace.sources.trace_source import trace_source

SAMPLES = 6


def traced(tmp_path: Path, extra: Any) -> SourceFacts:
    """Returns the facts of samples with two numbers, a class, and `extra(n)` beside them."""
    samples = [({"x": torch.full((2,), float(n)), "extra": extra(n)}, n % 2) for n in range(SAMPLES)]
    return trace_source(
        lambda: samples, lambda number: None, collate=default_collate, example=str(tmp_path / "example")
    )


@pytest.mark.parametrize(
    "extra",
    [
        lambda n: np.array(["first", "second"])[n % 2],
        lambda n: np.bytes_(b"name"),
        lambda n: "name",
        lambda n: np.float32("nan"),
    ],
    ids=["numpy text", "numpy bytes", "text", "not a number"],
)
def test_what_is_no_number_is_compared_as_it_is(tmp_path: Path, extra: Any) -> None:
    facts = traced(tmp_path, extra)
    assert (facts.samples, facts.changes) == (SAMPLES, None)


def test_a_text_that_changes_is_known(tmp_path: Path) -> None:
    class Renamed:
        calls = 0

        def __len__(self) -> int:
            return SAMPLES

        def __getitem__(self, n: int) -> tuple[dict[str, Any], int]:
            self.calls += 1
            return {"x": torch.zeros(2), "name": np.array([f"call {self.calls}"])[0]}, 0

    facts = trace_source(Renamed, lambda number: None, collate=default_collate, example=str(tmp_path / "example"))
    assert facts.changes == 0
