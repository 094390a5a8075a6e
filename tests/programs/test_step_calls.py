"""The calls of Python functions between a user's step and torch, which are most of what a small step costs."""

from __future__ import annotations

import json
import shutil
from collections import Counter
from pathlib import Path

from helpers.launcher import Launcher
from helpers.paths import ROOT
from helpers.trained import train_job

FIRST, LAST = 20, 40
MOST = 172  # calls of dslc's own functions in a step; 4% more than were counted on 2026-11-29
COUNTING = f"""
import json, os, sys
from collections import Counter

calls = Counter()

def count(frame, event, argument):
    if event == "call":
        code = frame.f_code
        calls[f"{{code.co_filename}}:{{code.co_firstlineno}} {{code.co_name}}"] += 1

class Counting:
    def before_step(self, training):
        if training.step == {FIRST}:
            sys.setprofile(count)
        if training.step == {LAST}:
            sys.setprofile(None)
            with open(os.path.join(os.path.dirname(__file__), "calls.json"), "w") as file:
                json.dump(calls, file)
"""


def test_a_steady_step_makes_few_calls(launcher: Launcher, tmp_path: Path) -> None:
    folder = tmp_path / "triplets"
    shutil.copytree(ROOT / "tests" / "programs" / "triplets", folder)
    (folder / "counting.py").write_text(COUNTING)
    job = folder / "triplets.plt"
    train_job(
        launcher, job, f"train.steps={LAST + 2}", "log.every=10 steps", 'train.hooks=[python("counting:Counting")]'
    )
    calls = Counter(json.loads((folder / "calls.json").read_text()))
    ours = Counter({name: count for name, count in calls.items() if _is_of_dslc(name)})
    in_a_step = ours.total() / (LAST - FIRST)
    assert in_a_step <= MOST, f"{in_a_step} calls: {ours.most_common(30)}"


def _is_of_dslc(name: str) -> bool:
    path = Path(name.rpartition(":")[0])
    folders = [ROOT / folder for folder in ("runtime", "compiler", "dsl", "cli")]
    return any(path.is_relative_to(folder) for folder in folders)
