"""`dslc calibrate`: real ranks measure the parts of a step, and plans predict with them."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
from helpers.commands import dslc
from helpers.job_texts import job_text

JOB = job_text(
    model={"network": "[flatten(), linear(16), relu(), linear(10)]", "loss": "cross_entropy()"},
    data={"source": "digits()", "batch": 64},
    devices={"cpus": 2},
    train={"steps": 4, "optimizer": "adamw(lr = 0.001)", "clip": 1.0},
)
HERE = 'devices.catalogue="here.toml"'


@pytest.mark.processes
def test_plans_predict_with_what_ranks_measured(tmp_path: Path) -> None:
    (tmp_path / "made.plt").write_text(JOB)
    run = dslc("calibrate", "made.plt", "-o", "here.toml", cwd=tmp_path)
    assert run.returncode == 0, run.stderr
    assert "1 and 1 more" not in run.stdout and "all_reduce 2 ranks" in run.stdout
    for settings in ([], ["parallelism.zero=3"], ["parallelism.microbatches=2"]):
        flags = [word for each in (HERE, *settings) for word in ("--set", each)]
        step = json.loads(dslc("plan", "made.plt", "--summary", *flags, cwd=tmp_path).stdout)["step"]
        assert step["source"] == "measured" and step["arithmetic"] > 0 and step["update"] > 0, step
        parts = sum(
            step[name] for name in ("arithmetic", "transfers", "waiting", "exposed", "update", "samples", "rest")
        )
        assert step["step_time"] == pytest.approx(parts)
    trained = dslc("run", "made.plt", "--out", "run", "--set", HERE, "--set", "log.every=1 step", cwd=tmp_path)
    assert trained.returncode == 0, trained.stderr
    times = json.loads((tmp_path / "run" / "report.json").read_text())["step_time"]
    assert times["predicted"] > 0 and times["measured"] > 0


@pytest.mark.processes
def test_what_cannot_be_calibrated_is_said(tmp_path: Path) -> None:
    gpt = JOB.replace(
        "[flatten(), linear(16), relu(), linear(10)]",
        "gpt(layers = 2, width = 32, heads = 4, context = 16, vocab = 256)",
    ).replace("digits()", "synthetic(samples = 640, vocab = 256)")
    (tmp_path / "made.plt").write_text(gpt)
    run = dslc("calibrate", "made.plt", "-o", "here.toml", "--set", "parallelism.tensor=2", cwd=tmp_path)
    assert run.returncode == 2 and "cannot be calibrated: the tensor and the context axis cut" in run.stderr
    assert not (tmp_path / "here.toml").exists()
    run = dslc("calibrate", "made.plt", "-o", "nowhere/here.toml", cwd=tmp_path)
    assert run.returncode == 2 and "nowhere is no folder" in run.stderr


@pytest.mark.processes
def test_ranks_that_fail_leave_their_logs(tmp_path: Path) -> None:
    (tmp_path / "own.py").write_text(
        "import torch\n"
        "def loss(output, target):\n"
        "    group = torch.distributed.is_initialized() and torch.distributed.get_backend()\n"
        "    assert group != 'gloo', 'no ranks here'\n"
        "    return torch.nn.functional.cross_entropy(output, target, reduction='none')\n"
    )
    (tmp_path / "made.plt").write_text(JOB.replace("cross_entropy()", 'python("own:loss")'))
    run = dslc("calibrate", "made.plt", "-o", "here.toml", cwd=tmp_path)
    assert run.returncode == 3 and "calibration failed on rank" in run.stderr and "no ranks here" in run.stderr
    log = run.stderr.partition("the whole log: ")[2].splitlines()[0]
    assert "no ranks here" in Path(log).read_text()
    shutil.rmtree(Path(log).parent.parent)
