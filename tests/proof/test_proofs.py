"""`dslc convert --prove`: other tools in real processes beside the job, and what is said of their curves.

`DSLC_TOOLS_PYTHON` names an interpreter that has the tools, if they are not installed here.
"""

from __future__ import annotations

import json
import math
import os
import subprocess
import sys
from pathlib import Path

import pytest

from dslc.conversion.convert import convert
from dslc.main import main
from dslc.proof.compare_curves import compare_curves
from dslc.proof.runners.proof_files import Curve

PYTHON = os.environ.get("DSLC_TOOLS_PYTHON", sys.executable)
LOSSES = [4.0, 3.5, 3.0, 2.5, 2.25, 2.0]
RATES = [0.0, 0.25, 0.5, 0.75, 1.0, 1.0]
FACTORS = {"rank": 2, "micro-batch": 4, "micro-batch of each rank": 8}


def curve(losses: list[float] = LOSSES, norm: float | None = 1.0, rates: list[float] = RATES) -> Curve:
    return Curve(name="tool", losses=losses, norms=[norm] * len(losses), rates=rates)


@pytest.mark.parametrize(
    ("tool", "at_its_rates", "finding"),
    [
        (curve(), None, "losses differ by at most 0.0e+00: the curves are the same"),
        (curve([loss / 4 for loss in LOSSES]), None, "the loss of step 1 is 1/4 of the job's: each micro-batch counts"),
        (
            curve(norm=8.0),
            None,
            "the norm of the gradient of step 1 is 8 times the job's: each micro-batch of each rank counts",
        ),
        (
            Curve(name="tool", losses=[3.9, *LOSSES[1:]], norms=[1.0] * 6, rates=RATES, targets=(31, 93)),
            None,
            "0.975 times the job's: the tool averages the means of micro-batches, which have 31 to 93 targets",
        ),
        (curve(norm=None), None, "tool reports no norm of the gradient"),
        (curve(rates=[0.0, *RATES[:-1]]), None, "the tool's schedule is 1 step behind"),
        (curve(rates=[0.0, 0.5, 1.0, 2.0, 2.0, 2.0]), None, "moves 2 times in a step: once for each rank"),
        (curve(rates=[0, 0, *(math.log(k) / math.log(5) for k in (2, 3, 4, 5))]), None, "rises along a logarithm"),
        (curve(rates=[0.0, 1.0, 0.9, 0.8, 0.6, 0.4]), None, "peaks at step 2 in the tool, and at step 5 in the job"),
        (curve(rates=[0.1, *RATES[1:]]), None, "the learning rates differ from step 1 on: 0.1 and 0 in the job"),
        (curve([4.0, 3.5, 3.1, *LOSSES[3:]]), None, "same up to there: the update itself differs"),
        (curve([*LOSSES[:-1], 2.5]), curve([*LOSSES[:-1], 2.5]), "the schedule is all that differs"),
        (curve([*LOSSES[:-1], 2.5]), curve(), "still differs by 2.5e-01: more than the schedule differs"),
    ],
)
def test_the_first_number_that_differs_names_the_cause(tool: Curve, at_its_rates: Curve | None, finding: str) -> None:
    found = compare_curves(tool, curve(), at_its_rates, FACTORS)
    assert any(finding in text for text in found), found


CONFIGURATIONS = {
    "deepspeed": (
        "ds_config.json",
        {
            "train_micro_batch_size_per_gpu": 2,
            "gradient_accumulation_steps": 2,
            "gradient_clipping": 1.0,
            "zero_optimization": {"stage": 2},
            "optimizer": {"type": "AdamW", "params": {"lr": 0.01, "weight_decay": 0.1}},
        },
    ),
    "transformers": (
        "args.json",
        {"per_device_train_batch_size": 2, "gradient_accumulation_steps": 2, "max_steps": 12, "warmup_ratio": 0.3,
         "learning_rate": 0.01, "weight_decay": 0.1, "lr_scheduler_type": "cosine", "bf16": True},
    ),
    "accelerate": ("accelerate.json", {"compute_environment": "LOCAL_MACHINE", "distributed_type": "MULTI_GPU",
                                       "num_processes": 8, "mixed_precision": "bf16"}),
    "lightning": (
        "trainer.json",
        {
            "trainer": {"devices": 8, "max_steps": 20, "gradient_clip_val": 0.5, "accumulate_grad_batches": 2},
            "optimizer": {"class_path": "torch.optim.AdamW", "init_args": {"lr": 0.01}},
        },
    ),
}  # fmt: skip
IMPORTS = {"transformers": "from transformers import Trainer", "accelerate": "from accelerate import Accelerator"}


@pytest.mark.parametrize(
    "tool", [pytest.param(tool, marks=[pytest.mark.slow] * (tool != "accelerate")) for tool in CONFIGURATIONS]
)
def test_a_tool_and_its_job_have_one_curve(tool: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    if subprocess.run([PYTHON, "-c", IMPORTS.get(tool, f"import {tool}")], capture_output=True).returncode:
        pytest.skip(f"{tool} cannot be imported in {PYTHON}")
    name, config = CONFIGURATIONS[tool]
    (tmp_path / name).write_text(json.dumps(config))
    command = ["convert", str(tmp_path / name), "--from", tool, "--prove", "--python", PYTHON, "--steps", "6"]
    assert main(command) == 0
    printed = capsys.readouterr().out
    assert "the losses of step 1 are the same" in printed
    if tool == "accelerate":  # its schedule moves once for each process, and the curves meet at its rates
        assert "moves 2 times in a step: once for each rank" in printed
        assert "the schedule is all that differs" in printed
    else:
        assert "the curves are the same" in printed, printed


def test_a_share_of_warm_up_resolves_auto(tmp_path: Path) -> None:
    """A proof of both files showed a job without the warm-up."""
    (tmp_path / "args.json").write_text(json.dumps({"per_device_train_batch_size": 2, "warmup_ratio": 0.1}))
    schedule = {"type": "WarmupLR", "params": {"warmup_num_steps": "auto", "warmup_max_lr": "auto"}}
    (tmp_path / "ds.json").write_text(json.dumps({"train_micro_batch_size_per_gpu": "auto", "scheduler": schedule}))
    draft = convert([str(tmp_path / "args.json"), str(tmp_path / "ds.json")])
    assert draft.schedule is not None and draft.schedule.arguments["warmup"] == "10.0%"


def test_a_tool_that_is_not_installed_is_named(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "temporary").mkdir()
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path / "temporary"))
    (tmp_path / "ds.json").write_text(json.dumps({"train_batch_size": 8}))
    python = tmp_path / "python"  # an interpreter without packages
    python.write_text(f'#!/bin/sh\nexec {sys.executable} -I -S "$@"\n')
    python.chmod(0o755)
    assert main(["convert", str(tmp_path / "ds.json"), "--prove", "--python", str(python)]) == 3
    assert (
        f"DeepSpeed is not installed in {python}: `{python} -m pip install torch deepspeed`" in capsys.readouterr().err
    )
    assert not list((tmp_path / "temporary").iterdir())


def test_options_of_a_proof_need_it(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["convert", str(tmp_path / "ds.json"), "--model", "net.plt"]) == 2
    assert "belong to --prove" in capsys.readouterr().err


def test_a_tool_that_needs_gpus_is_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "llama.toml").write_text("[training]\nseq_len = 8\nlocal_batch_size = 2\n")
    assert main(["convert", str(tmp_path / "llama.toml"), "--prove"]) == 1
    assert "--prove does not run torchtitan: it trains on accelerators alone" in capsys.readouterr().err
