"""Examples that no other test trains: each runs over its ranks, and its loss falls."""

from __future__ import annotations

from pathlib import Path

import pytest
from helpers.launcher import Launcher
from helpers.paths import EXAMPLES
from helpers.trained import train_job


@pytest.mark.slow
@pytest.mark.parametrize("name", ["chat", "chunks", "dpo", "experts", "muon"])
def test_an_example_trains(launcher: Launcher, tmp_path: Path, name: str) -> None:
    (tmp_path / "run").mkdir()
    job = EXAMPLES / f"{name}.plt"
    losses = train_job(launcher, job, "train.steps=20", "log.every=1 step", folder=tmp_path / "run").losses()
    assert len(losses) == 20 and losses[-1] < 0.9 * losses[0]
    assert (tmp_path / "run" / "samples.jsonl").exists() == (name == "chat")
