"""`python -m benchmarks.parsers`: what is printed of a file that a tool's parser and `dslc convert` read."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from benchmarks.parsers import compare
from dslc.dsl.json_value import Json

TOML = "[training]\nseq_len = 64\nlocal_batch_size = 2\nsteps = 10\n\n[optimizer]\nlr = 0.5\n"


def test_a_file_is_taken_refused_or_differs(tmp_path: Path) -> None:
    path = tmp_path / "train.toml"
    path.write_text(TOML)
    values: dict[str, Json] = {
        "micro": 2,
        "lr": 0.5,
        "steps": 10,
        "context": 64,
        "clip": 1.0,
        "precision": "bf16",
        "seed": None,
    }
    assert compare(str(path), "torchtitan", {**values, "devices": [1, 8]}) == ("taken by both", "")
    assert compare(str(path), "torchtitan", {**values, "lr": 0.25}) == ("taken by both", "lr 0.25, in the job 0.5")
    assert compare(str(path), "torchtitan", "Error: no") == ("refused by the tool alone", "Error: no")
    path.write_text(TOML.replace("seq_len", "sequence_length"))
    assert compare(str(path), "torchtitan", "Error: no") == ("refused by both", "")
    kind, refusal = compare(str(path), "torchtitan", values)
    assert kind == "refused by dslc alone" and "sequence_length" in refusal


def test_a_python_without_the_tool_is_named(tmp_path: Path) -> None:
    (tmp_path / "train.toml").write_text(TOML)
    if not subprocess.run([sys.executable, "-c", "import torchtitan"], capture_output=True).returncode:
        pytest.skip("torchtitan is installed here")
    root = Path(__file__).parents[2]
    command = [sys.executable, "-m", "benchmarks.parsers", "torchtitan", str(tmp_path)]
    run = subprocess.run(command, cwd=root, env=os.environ | {"COLUMNS": "80"}, capture_output=True, text=True)
    assert run.returncode == 1
    assert f"{sys.executable} cannot run the parser of torchtitan" in run.stderr and "No module named" in run.stderr
