"""kill -9 at any moment, saving included: the training resumes from the newest whole checkpoint as if nothing had
happened.
"""

from __future__ import annotations

import os
import random
import shutil
from collections import Counter
from pathlib import Path

import numpy as np
import pytest
from helpers.launcher import Launcher
from helpers.made_programs import gpt_model, optimizer_step, places, program, tokens
from instruments.killer import live, records

from dslc.compiler.ir import program as p
from dslc.compiler.placement.layout import CPU_BACKEND
from dslc.runtime.checkpoint import files
from dslc.runtime.process.records import read_metrics

STEPS = 14
LIVES = 400  # more than any training needs
ENGINES = {
    "one process": (1, p.GradientStep(kind="none")),
    "ddp": (2, p.GradientStep(kind="ddp", static_graph=True)),
    "zero 1 on 4": (4, p.GradientStep(kind="zero1", static_graph=True)),
    "zero 3": (2, p.GradientStep(kind="fsdp", units=("2",), reshard=True)),
    "zero 3 over shared memory": (2, p.GradientStep(kind="fsdp", units=("2",), reshard=True)),
}


def job(data: p.DataStep, engine: str, asynchronous: bool) -> p.JobProgram:
    ranks, gradients = ENGINES[engine]
    return program(
        ranks,
        data,
        model=gpt_model(),
        sync_batch_norm=False,
        steps=STEPS,
        optimizer=optimizer_step("AdamW", lr=0.01, weight_decay=0.1),
        learning_rate=p.LearningRateStep(kind="cosine", steps=STEPS, warmup=3),
        gradients=gradients,
        backend="shared_memory" if engine.endswith("shared memory") else CPU_BACKEND,
        evaluate_every=5,
        checkpoint=p.CheckpointStep(every=2, keep=2, asynchronous=asynchronous, resume="auto"),
    )


def examine(folder: Path) -> None:
    """Asserts that every folder named like a checkpoint is whole."""
    for path in files.checkpoints_in(str(folder / "checkpoints")):
        found = files.look(path)
        assert found.manifest is not None, found.reason
        assert not files.damage(path, found.manifest)


def kill(launcher: Launcher, tmp_path: Path, kills: int, seed: int) -> list[str]:
    """Trains repeatedly, with that many kills, until the last training is done; returns whom they hit."""
    draw, data, hit = random.Random(seed), tokens(tmp_path), list[str]()
    whole = tmp_path / "whole"
    launcher.launch(job(data, "one process", True), places(1), whole)
    wanted = read_metrics(str(whole))
    for training in range(kills):
        if len(hit) >= kills:
            break
        folder = tmp_path / "run"
        shutil.rmtree(folder, ignore_errors=True)
        (folder / "checkpoints").mkdir(parents=True)
        for _ in range(LIVES):
            made = job(data, draw.choice(list(ENGINES)), asynchronous=training % 2 == 0)
            if len(hit) < kills:
                outcome, killed = live(launcher, draw, made, folder)
                hit += [killed] if killed else []
            else:
                outcome, _ = launcher.launch(made, places(made.world_size), folder)
            examine(folder)
            if outcome is not None and outcome.is_complete:
                break
            assert killed, f"failed by itself: {outcome}"
        found = read_metrics(str(folder))
        assert records(folder) == records(whole), "each step and each evaluation once, in order, of the same samples"
        for name in ("loss", "lr"):
            np.testing.assert_allclose(
                [line.get(name, 0) for line in found], [line.get(name, 0) for line in wanted], rtol=0, atol=1e-5
            )
        assert len(files.checkpoints_in(str(folder / "checkpoints"))) == 2
        left = [name for name in os.listdir(folder / "checkpoints") if "." in name]
        assert not left, "what was left half written is cleared away"
    return hit


def test_five_kills(launcher: Launcher, tmp_path: Path) -> None:
    assert len(kill(launcher, tmp_path, 5, seed=3)) == 5


@pytest.mark.long
def test_a_hundred_kills(launcher: Launcher, tmp_path: Path) -> None:
    hit = kill(launcher, tmp_path, 100, seed=0)
    assert len(hit) == 100
    counts = Counter(hit)
    print(*(f"{count:3} {what}" for what, count in sorted(counts.items())), sep="\n")
    assert {"the launcher, saving", "rank 0 of 2, saving"} <= set(hit)
    assert sum(count for what, count in counts.items() if "saving" in what) >= 30
