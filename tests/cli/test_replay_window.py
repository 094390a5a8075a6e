"""The steps of two runs that `dslc bisect` replays."""

from __future__ import annotations

import json
from pathlib import Path

from dslc.compiler.facts.checkpoint_names import MANIFEST, name_of
from dslc.verification.replay_window import MAX_STEPS, logged_losses, window_from, window_of_runs


def run_folder(path: Path, losses: dict[int, float | None], saved: tuple[int, ...] = ()) -> str:
    for step in saved:
        (path / "checkpoints" / name_of(step)).mkdir(parents=True)
        (path / "checkpoints" / name_of(step) / MANIFEST).write_text("{}")
    path.mkdir(exist_ok=True)
    lines = [{"step": step, "split": "train", "loss": loss} for step, loss in losses.items()]
    lines.insert(1, {"step": 1, "split": "validation", "loss": 9.0})
    (path / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines) + '{"step": 3, "sp')
    return str(path)


def test_the_last_checkpoint_before_the_losses_part(tmp_path: Path) -> None:
    one = run_folder(tmp_path / "a", {1: 2.0, 10: 1.5, 20: 1.2, 30: 1.0}, saved=(10, 15, 20, 25))
    other = run_folder(tmp_path / "b", {1: 2.0, 10: 1.5 + 1e-6, 20: 1.2, 30: 1.1}, saved=(5,))
    window = window_of_runs(one, other, 3)
    assert (window.first, window.last) == (16, 30)
    assert window.checkpoint == str(tmp_path / "a" / "checkpoints" / "step-00000015")
    assert window.text.startswith("the logged losses part at step 30, and agree up to step 20: ")
    other = run_folder(tmp_path / "c", {1: 2.0, 10: None, 20: 1.2})
    window = window_of_runs(one, other, 3)
    assert (window.first, window.last, window.checkpoint) == (1, 10, "")
    far = run_folder(tmp_path / "d", {1: 2.0, 1000: 1.0})
    window = window_of_runs(far, run_folder(tmp_path / "e", {1: 2.0, 1000: 1.1}), 3)
    assert (window.first, window.last) == (1000 - MAX_STEPS + 1, 1000)
    assert window.text.endswith("from the beginning; steps before 801 are not compared")


def test_equal_losses_and_a_checkpoint_that_is_named(tmp_path: Path) -> None:
    one = run_folder(tmp_path / "a", {1: 2.0, 10: 1.5})
    window = window_of_runs(one, one, 3)
    assert (window.first, window.last, window.text) == (1, 3, "the 2 logged losses agree")
    diverged = run_folder(tmp_path / "b", {1: 2.0, 10: None})
    assert window_of_runs(diverged, diverged, 3).text == "the 2 logged losses agree"
    other = run_folder(tmp_path / "c", {2: 2.0, 3: 1.9})
    assert window_of_runs(one, other, 3).text == "the runs have logged no step in common"
    with open(tmp_path / "c" / "metrics.jsonl", "a") as file:
        file.write('\n{"step": 4, "split": "train"}\n')
    assert logged_losses(other) == {2: 2.0, 3: 1.9}, "lines that cannot be read, or have no loss, are left out"
    window = window_from(str(tmp_path / "checkpoints" / "step-00000040"), 2)
    assert (window.first, window.last) == (41, 42)
