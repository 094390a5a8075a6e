"""The bytes of a step that a plan says are those that the network interface of a host has sent, within 5 %."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import pytest
from helpers.commands import dslc
from helpers.hosts import TOOL, local_command, namespaces, started, why_none
from helpers.job_texts import job_text
from helpers.trained import write_job_with_helper

pytestmark = pytest.mark.skipif(bool(why_none()), reason=why_none())

JOB = job_text(
    model={"network": "[flatten(), linear(600), relu(), linear(601), relu(), linear(10)]"},
    data={"source": "digits()", "batch": 32},
    devices={"nodes": 2, "cpus": 1},
    train={"steps": 20, "optimizer": "sgd(lr = 0.05)", "hooks": 'python("counters:SettledCounters", ranks = all)'},
    log={"every": "20 steps"},
)
CATALOGUE = '[cpu]\nfp32 = "0.1TFLOPS"\nlink = "10GBps"\nnetwork = "1Gbps"\n'
FIRST, LAST = 8, 16  # whole periods of every exchange, and no step that is logged
EXCHANGES = (
    "parallelism.gradients=allreduce()",
    "parallelism.gradients=fp16()",
    "parallelism.gradients=bf16()",
    "parallelism.gradients=powersgd(rank = 32)",
    "parallelism.gradients=bytegrad()",
    "parallelism.gradients=decentralized(interval = 2)",
    "parallelism.gradients=decentralized(peers = shift_one)",
    "parallelism.gradients=low_precision_decentralized()",
    "parallelism.gradients=local_sgd(period = 4)",
    "parallelism.gradients=diloco(period = 8)",
    "train.optimizer=qadam(warmup = 5)",
    "train.optimizer=onebit_adam(freeze = 5)",
)


@pytest.fixture(scope="module")
def hosts() -> Iterator[list[str]]:
    with namespaces(2) as names:
        yield names


@pytest.mark.cases(2)
@pytest.mark.parametrize(
    "setting", [pytest.param(each, marks=pytest.mark.slow if n else ()) for n, each in enumerate(EXCHANGES)]
)
def test_the_interface_has_sent_what_the_plan_says(tmp_path: Path, hosts: list[str], setting: str) -> None:
    job, out = write_job_with_helper("counters.py", tmp_path, JOB), tmp_path / "run"
    words = ["run", str(job), "--out", str(out), "--rendezvous", "host1", "--set", setting]
    with started(tmp_path, [[str(TOOL), "run", str(n), *local_command(words)] for n in (1, 2)]) as commands:
        for status, said in [command.end() for command in commands]:
            assert status == 0, said
    lines = [json.loads(line) for line in (out / "sent-0.jsonl").read_text().splitlines()]
    sent = (lines[LAST - 1]["sent"] - lines[FIRST - 1]["sent"]) / (LAST - FIRST)
    assert sent == pytest.approx(planned(tmp_path, job, setting), rel=0.05)


def planned(folder: Path, job: Path, setting: str) -> float:
    """Returns the bytes that a host sends in a step, by the plan."""
    (folder / "catalogue.toml").write_text(CATALOGUE)
    catalogue = f"devices.catalogue={folder / 'catalogue.toml'}"
    made = dslc("plan", job, "--summary", "--set", setting, "--set", catalogue)
    assert made.returncode == 0, made.stderr
    return float(json.loads(made.stdout)["step"]["between"])
