"""`dslc convert` and `dslc lint`, as a user types them."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from helpers.paths import TESTS

from dslc.main import main

CASES = TESTS / "conversion" / "cases"
NETWORK = """
model {
  network = gpt(layers = 2, width = 64, heads = 4, context = 32, vocab = 100)
  loss    = cross_entropy()
}

data {
  source = synthetic(vocab = 100)
  batch  = 8
}

train {
  steps     = 10
  optimizer = sgd(lr = 0.1)
}
"""


def test_a_job_is_printed_and_the_keys_beside_it(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["convert", str(CASES / "deepspeed_zero2" / "ds_config.json")]) == 0
    printed = capsys.readouterr()
    assert printed.out.startswith("# Converted from ds_config.json") and "zero         = 2" in printed.out
    assert "global batch 64 = 4 x 2 x 8" in printed.err


def test_a_job_is_written(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    config = tmp_path / "ds.json"
    config.write_text(json.dumps({"train_micro_batch_size_per_gpu": 4, "gradient_accumulation_steps": 2}))
    job = tmp_path / "job.plt"
    assert main(["convert", str(config), "--devices", "2x8", "-o", str(job)]) == 0
    assert "global batch 128 = 4 x 2 x 16" in capsys.readouterr().out
    assert main(["check", str(job)]) == 0 and main(["fmt", "--check", str(job)]) == 0


def test_a_contradiction_writes_no_job(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    job = tmp_path / "job.plt"
    assert main(["convert", str(CASES / "deepspeed_contradictions" / "ds_config.json"), "-o", str(job)]) == 1
    assert not job.exists() and "error[E1103]" in capsys.readouterr().err


@pytest.mark.parametrize("devices", ["0", "2x", "x8", "eight", "2x8x4"])
def test_devices_are_counts(devices: str) -> None:
    with pytest.raises(SystemExit):
        main(["convert", "ds.json", "--devices", devices])


def test_a_tool_can_be_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    config = tmp_path / "settings.json"
    config.write_text('{"steps_per_print": 5}')
    assert main(["lint", str(config)]) == 1
    assert "belongs to no tool" in capsys.readouterr().err
    assert main(["lint", str(config), "--from", "deepspeed"]) == 1
    assert "states no batch" in capsys.readouterr().err


def test_lint_looks_at_each_file_and_prints_annotations(capsys: pytest.CaptureFixture[str]) -> None:
    files = [str(CASES / name) for name in ("deepspeed_misspelt/ds_config.json", "lightning_cli/config.yaml")]
    assert main(["lint", *files, "--format", "github"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert sum(line.startswith("::warning file=") for line in lines) == 8
    assert any("global batch 256 = 16 x 2 x 8" in line for line in lines)


def test_lint_shows_the_memory_with_the_network_of_a_job(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    network = tmp_path / "net.plt"
    network.write_text(NETWORK)
    shown = {}
    for stage in (0, 3):
        config = tmp_path / f"zero{stage}.json"
        config.write_text(json.dumps({"train_batch_size": 64, "zero_optimization": {"stage": stage}}))
        assert main(["lint", str(config), "--devices", "8", "--model", str(network)]) == 0
        line = capsys.readouterr().out.splitlines()[1]
        assert line.startswith("  memory of a rank: ")
        shown[stage] = line
    assert shown[0] != shown[3]


def test_what_torch_refuses_is_no_job(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    config = tmp_path / "ds.json"
    sgd = {"type": "SGD", "params": {"lr": 0.1, "nesterov": True}}
    config.write_text(json.dumps({"train_batch_size": 8, "optimizer": sgd}))
    assert main(["convert", str(config), "-o", str(tmp_path / "job.plt")]) == 1
    assert "error[E0138]" in capsys.readouterr().err and not (tmp_path / "job.plt").exists()
