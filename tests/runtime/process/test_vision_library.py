"""A torchvision that does not fit its torch is named, whatever the library says that imports it."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from dslc.probe.child import in_child
from dslc.runtime.process.vision_library import VisionLibraryError, true_cause

IMPORTING = """
import importlib, sys
from dslc.runtime.process.vision_library import let_torchvision_load, true_cause
let_torchvision_load()
for _ in range(2):  # a library may try again
    try:
        module, _, name = sys.argv[1].partition(":")
        getattr(importlib.import_module(module), name)
    except Exception as error:
        print(true_cause(error))
"""


@pytest.mark.parametrize(
    "name", ["torchmetrics:Metric", pytest.param("transformers:GPT2LMHeadModel", marks=pytest.mark.long)]
)
def test_a_torchvision_of_another_torch_is_named(tmp_path: Path, name: str) -> None:
    (tmp_path / "torchvision").mkdir()
    (tmp_path / "torchvision" / "__init__.py").write_text("import torch\ntorch.library.of_another_version()\n")
    found = subprocess.run(
        [sys.executable, "-c", IMPORTING, name],
        env={**os.environ, "PYTHONPATH": str(tmp_path)},
        capture_output=True,
        text=True,
        check=True,
    )
    first, second = found.stdout.splitlines()
    assert first == second and first.startswith("torchvision ")
    assert first.endswith("AttributeError: module 'torch.library' has no attribute 'of_another_version'")


def test_the_cause_is_found_behind_others() -> None:
    vision, own = VisionLibraryError(RuntimeError("operator torchvision::nms does not exist")), ValueError("mine")
    behind = RuntimeError("Could not import module")
    behind.__cause__ = vision
    last = ModuleNotFoundError("another")
    last.__context__ = behind
    assert true_cause(last) is vision
    assert true_cause(own) is own


def test_a_trial_of_a_users_function_names_it_with_the_remedy() -> None:
    def imports() -> None:
        try:
            raise VisionLibraryError(RuntimeError("operator torchvision::nms does not exist"))
        except ImportError as error:
            raise RuntimeError("Could not import module 'Metric'") from error

    answer = in_child(imports)
    assert answer["error"].startswith("torchvision ") and "operator torchvision::nms" in answer["error"]
    assert answer["remedy"] == VisionLibraryError.remedy
