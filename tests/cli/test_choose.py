"""`dslc choose`, and jobs with `auto` in the commands: the chosen values are as if they were written."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
from helpers.job_texts import job_text

from dslc.compiler.compile import compile_plan
from dslc.compiler.graph.stored import hash_without_lines
from dslc.dsl.diagnostics import Report
from dslc.dsl.meaning.load import load
from dslc.jobs.check_job import inspect
from dslc.main import main

CATALOGUE = '[cpu]\nfp32 = "0.05TFLOPS"\nlink = "1GBps"\nmemory = "1GiB"\n'
JOB = job_text(
    model={"network": "[flatten(), linear(32), relu(), linear(10)]", "loss": "cross_entropy()"},
    data={"source": "digits()", "batch": 16},
    devices={"cpus": 2, "catalogue": '"cards.toml"'},
    train={"steps": 2, "optimizer": "sgd(lr = 0.1)"},
)
AUTO = JOB + "parallelism { tensor = auto, zero = auto }\nmemory { recompute = auto }\n"


@pytest.fixture(autouse=True)
def _jobs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    Path("cards.toml").write_text(CATALOGUE)
    Path("job.plt").write_text(JOB)
    Path("auto.plt").write_text(AUTO)


def plan_hash_of(path: str, *changes: str) -> str:
    report = Report()
    analysis = inspect(load(path, list(changes)), report)
    assert analysis is not None and not report.errors
    return hash_without_lines(compile_plan(analysis).graph)


def chosen_settings(path: str, capsys: pytest.CaptureFixture[str]) -> list[str]:
    assert main(["choose", path, "--json"]) == 0
    answer = json.loads(capsys.readouterr().out)
    settings: list[str] = answer["plans"][answer["chosen"]]["settings"]
    return settings


def test_the_table_marks_the_chosen_plan_and_the_written_one(capsys: pytest.CaptureFixture[str]) -> None:
    changes = ["--set", "devices.cpus=1", "--set", "memory.recompute=full"]
    assert main(["choose", "job.plt", *changes, "-o", "chosen.plt", "--picture", "plans.dot"]) == 0
    assert Path("plans.dot").read_text().count("chosen: data") == 1
    assert main(["choose", "job.plt", "--picture", "plans.pdf"]) == 2
    shown = capsys.readouterr()
    assert "a picture is .svg" in shown.err
    (chosen,) = [line for line in shown.out.splitlines() if line.lstrip().startswith("->")]
    (written,) = [line for line in shown.out.splitlines() if line.lstrip().startswith("as written")]
    assert "at best" in chosen and "recompute full" in written and "all were analysed" in shown.out
    assert main(["check", "chosen.plt"]) == 0
    assert "microbatches = 1" in Path("chosen.plt").read_text()


def test_every_plan_is_in_the_json(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["choose", "auto.plt", "--json"]) == 0
    answer = json.loads(capsys.readouterr().out)
    assert answer["exact"] and answer["analysed"] == answer["space"] == len(answer["plans"])
    assert sum(answer["refused"].values()) == sum("refused" in plan for plan in answer["plans"])
    times = [plan["step_time"] for plan in answer["plans"] if "refused" not in plan]
    assert answer["plans"][answer["chosen"]]["step_time"] == min(times)
    assert answer["front"] and answer["seconds"] >= 0


def test_auto_is_the_job_with_the_chosen_values_written(capsys: pytest.CaptureFixture[str]) -> None:
    settings = chosen_settings("auto.plt", capsys)
    assert plan_hash_of("auto.plt") == plan_hash_of("job.plt", *settings)
    assert main(["plan", "auto.plt"]) == 0
    assert "chosen: data" in capsys.readouterr().err
    assert main(["check", "auto.plt"]) == 0
    assert main(["render", "auto.plt", "-o", "plan.dot"]) == 0
    capsys.readouterr()
    assert main(["plan", "auto.plt", "--json"]) == 0
    assert set(settings) <= set(json.loads(capsys.readouterr().out)["source"]["settings"])


def test_why_compares_the_chosen_plan_with_its_runners_up(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["plan", "auto.plt", "--why"]) == 0
    shown = capsys.readouterr().out
    assert shown.count(" chosen") == 1 and ("slower" in shown or "as fast" in shown)
    assert main(["plan", "job.plt", "--why"]) == 2
    assert "dslc choose" in capsys.readouterr().err


def test_a_network_of_the_users_is_searched_only_where_it_is_traced(capsys: pytest.CaptureFixture[str]) -> None:
    Path("nets.py").write_text("import torch\ndef make():\n    return torch.nn.Sequential(torch.nn.Flatten(),"
                               " torch.nn.Linear(64, 10))\n")  # fmt: skip
    network = 'model.network=python("nets:make")'
    assert main(["choose", "job.plt", "--set", network]) == 1
    assert "E0494" in capsys.readouterr().err
    assert main(["check", "auto.plt", "--set", network]) == 0
    assert "W0494" in capsys.readouterr().err
    assert main(["choose", "auto.plt", "--set", network, "--set", "memory=none", "--trace"]) == 0
    assert "->" in capsys.readouterr().out


def test_a_run_trains_the_chosen_plan_and_writes_its_values(capsys: pytest.CaptureFixture[str]) -> None:
    settings = chosen_settings("auto.plt", capsys)
    assert main(["run", "auto.plt", "--out", "run"]) == 0
    assert "chosen: data" in capsys.readouterr().out
    text = Path("run/job.plt").read_text()
    block = text.partition("parallelism {")[2].partition("}")[0]
    assert "auto" not in block and re.search(r"data += \d", block)
    plan = json.loads(Path("run/plan.json").read_text())
    assert set(settings) <= set(plan["source"]["settings"])
    assert plan_hash_of("run/job.plt") == plan_hash_of("job.plt", *settings)
    assert main(["run", "run/plan.json", "--out", "again"]) == 0, "the plan file trains as it is"


def test_counts_of_devices_are_compared_in_time_and_device_hours(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["choose", "auto.plt", "--devices", "1..4"]) == 0
    head, *rows = capsys.readouterr().out.splitlines()
    assert "device hours" in head and [row.split()[0] for row in rows] == ["1", "2", "4"]
    for wrong, reason in (("4..1", "no range"), ("many", "no range"), ("3", "no whole number of nodes of 2")):
        assert main(["choose", "auto.plt", "--devices", wrong]) == 2
        assert reason in capsys.readouterr().err


@pytest.mark.long
def test_calibrating_a_job_with_auto_measures_its_default_plan(capsys: pytest.CaptureFixture[str]) -> None:
    changes = ["--set", "devices.catalogue=none"]
    assert main(["plan", "auto.plt", *changes]) == 1
    assert "dslc calibrate auto.plt" in capsys.readouterr().err
    assert main(["calibrate", "auto.plt", "-o", "here.toml", *changes]) == 0
    assert main(["plan", "auto.plt", "--set", 'devices.catalogue="here.toml"']) == 0
    assert "chosen: data" in capsys.readouterr().err
