"""`dslc status` and `dslc stop`: where a run stands, from its folder alone, and how it is ended from there."""

from __future__ import annotations

import json
import os
import signal
import sys
from pathlib import Path

import pytest
from helpers.commands import dslc
from helpers.hosts import local_command, started
from helpers.job_texts import job_text
from helpers.launcher import Command
from helpers.waiting import until

from dslc.commands.status import follow
from dslc.runtime.process.run_status import NAME, RunStatus, read_status, silence, write_status

JOB = job_text(
    data={"source": "synthetic(samples = 320, shape = [4], classes = 10)", "batch": 8},
    train={"steps": 1000000},
    checkpoint={"every": "500_000 steps"},
)


@pytest.fixture
def job(tmp_path: Path) -> Path:
    (tmp_path / "made.plt").write_text(JOB)
    return tmp_path / "made.plt"


def run(job: Path, *settings: str, out: str = "run") -> list[str]:
    words = [word for setting in settings for word in ("--set", setting)]
    return local_command(["run", str(job), "--out", str(job.parent / out), *words])


def stands(folder: Path, status: int) -> str:
    told = dslc("status", folder)
    assert told.returncode == status, told.stderr
    return told.stdout


def told_to_run(folder: Path, command: Command) -> None:
    """Waits until the launcher has said that it runs."""
    until(lambda: (found := read_status(str(folder))) is not None and found.state == "running", [command])


def test_a_run_is_stopped_from_its_folder_after_a_step_with_a_checkpoint(job: Path) -> None:
    out = job.parent / "run"
    with started(job.parent, [run(job)]) as (running,):
        told_to_run(out, running)
        assert "running at step " in stands(out, 0)
        stopped = dslc("stop", out)
        status, said = running.end()
    assert stopped.returncode == 0 and "asked to stop" in stopped.stdout, stopped.stderr
    found = read_status(str(out))
    assert status == 130 and found is not None and found.state == "stopped" and found.asked == "dslc stop"
    assert (out / "checkpoints" / f"step-{found.step:08}").exists() and f"stopped after {found.step} steps" in said
    assert f"stopped after step {found.step} of 1000000, by `dslc stop`, loss " in stands(out, 130)
    again = dslc("stop", out)
    assert again.returncode == 0 and "stopped after step" in again.stderr  # there is nothing to stop
    goes_on = run(job, "checkpoint.resume=auto", f"train.steps={found.step + 3}", "checkpoint.every=1 step")
    with started(job.parent, [goes_on]) as (resumed,):
        assert resumed.end()[0] == 0  # the request was for the run before
    assert f"done after {found.step + 3} steps, loss " in stands(out, 0)


@pytest.mark.slow
def test_a_launcher_that_was_killed_does_not_run_for_ever(job: Path) -> None:
    out = job.parent / "run"
    with started(job.parent, [run(job)]) as (running,):
        told_to_run(out, running)
        os.kill(running.process.pid, signal.SIGKILL)
        running.process.wait()
        assert f"its launcher, process {running.process.pid} on " in stands(out, 3)
        running.wait_for_all()


@pytest.mark.slow
def test_a_folder_of_runs_is_told_a_line_each(job: Path) -> None:
    job.write_text(JOB.replace("1000000", "40") + "sweep {\n  train.optimizer.lr = [0.1, 3e38]\n}\n")
    with started(job.parent, [run(job, "train.on_nonfinite=stop")]) as (running,):
        assert running.end()[0] == 3
    told = stands(job.parent, 3).splitlines()
    assert len(told) == 2 and told[0].startswith("run/lr=0.1   done after 40 steps, loss ")
    assert told[1].startswith("run/lr=3e38  failed at step ")
    assert "training failed" in stands(job.parent / "run" / "lr=3e38", 3).splitlines()[1]
    followed = dslc("status", job.parent, "--follow")
    assert followed.returncode == 3 and len(followed.stdout.splitlines()) == 2
    found = json.loads(dslc("status", job.parent, "--json").stdout)
    assert [each["state"] for each in found] == ["done", "failed"]


@pytest.mark.parametrize("is_terminal", [True, False])
def test_a_run_of_an_older_version_is_not_followed_for_ever(
    tmp_path: Path, is_terminal: bool, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "program.json").write_text("{}")
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setattr(sys.stdout, "isatty", lambda: is_terminal)
    monkeypatch.setattr("time.sleep", lambda seconds: pytest.fail("nothing follows that it could wait for"))
    assert [run.state for run in follow([str(tmp_path)])] == ["unknown"]
    assert "an older dslc has run it" in " ".join(capsys.readouterr().out.split())


@pytest.mark.parametrize("name, said", [("", "there is no run in it"), ("nowhere", "there is no such folder")])
def test_a_folder_without_a_run_is_wrong_usage(tmp_path: Path, name: str, said: str) -> None:
    for command in ("status", "stop"):
        told = dslc(command, tmp_path / name)
        assert told.returncode == 2 and said in told.stderr


def test_on_another_host_a_launcher_is_known_by_its_signs_of_life(tmp_path: Path) -> None:
    write_status(str(tmp_path), RunStatus(state="running", step=3, steps=9, within=60))
    told = json.loads((tmp_path / NAME).read_text())
    (tmp_path / NAME).write_text(json.dumps({**told, "host": "far", "place": "of another boot", "process": 1}))
    found = read_status(str(tmp_path))
    assert found is not None and silence(str(tmp_path), found) == ""
    written = (tmp_path / NAME).stat().st_mtime
    os.utime(tmp_path / NAME, (written - 100, written - 100))
    assert silence(str(tmp_path), found) == "its launcher, process 1 on far, has given no sign of life for 100 s"


@pytest.mark.parametrize("text", ["", "[]", "{}", '{"state": "lost"}', '{"state": "done", "step": "3"}'])
def test_what_another_program_has_written_is_no_state(tmp_path: Path, text: str) -> None:
    (tmp_path / NAME).write_text(text)
    assert read_status(str(tmp_path)) is None


def pods(*statuses: dict[str, object]) -> str:
    return json.dumps({"items": [{"status": status} for status in statuses]})


def submitted(folder: Path, monkeypatch: pytest.MonkeyPatch, told: str, *, elastic: bool = False) -> None:
    """Makes a run directory of pods, and a kubectl that answers what is `told`: none of a cluster is to be had."""
    (folder / "answer").write_text(told)
    kubectl = folder / "bin" / "kubectl"
    kubectl.parent.mkdir()
    kubectl.write_text(f'#!/bin/sh\necho "$@" > {folder}/asked\ncat {folder}/answer\n')
    kubectl.chmod(0o755)
    monkeypatch.setenv("PATH", str(kubectl.parent), prepend=os.pathsep)
    (folder / "run").mkdir()
    made = {"cluster": "kubernetes", "job": "made", "script": "submit.json", "space": "ml", "elastic": elastic}
    (folder / "run" / "submitted.json").write_text(json.dumps(made))


TOO_FEW = {"type": "PodScheduled", "status": "False", "reason": "Unschedulable", "message": "0/3 nodes are available"}
NO_IMAGE = {"state": {"waiting": {"reason": "ImagePullBackOff", "message": "Back-off pulling registry/dslc:1"}}}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("told", "line", "status"),
    [
        (pods({"phase": "Running"}, {"phase": "Pending", "conditions": [TOO_FEW]}), "0/3 nodes are available", 0),
        (
            pods({"phase": "Pending", "containerStatuses": [NO_IMAGE]}),
            "waiting in Kubernetes as job made (ImagePullBackOff: ",
            0,
        ),
        (pods({"phase": "Running"}), "starting", 0),
        (pods({"phase": "Failed", "reason": "Evicted"}), "its pods have ended (Failed), and left no word: Evicted", 3),
        (pods(), "waiting", 0),
        ("no JSON", "waiting", 0),
    ],
)
def test_kubernetes_is_asked_why_a_job_waits(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, told: str, line: str, status: int
) -> None:
    submitted(tmp_path, monkeypatch, told)
    assert line in stands(tmp_path / "run", status)
    words = "get pods --selector dslc-run=made --output json --namespace ml"
    assert (tmp_path / "asked").read_text().strip() == words


@pytest.mark.parametrize(
    ("told", "line", "status"),
    [
        (pods({"phase": "Pending", "conditions": [TOO_FEW]}, {"phase": "Running"}), "starting", 0),
        (pods({"phase": "Failed"}, {"phase": "Pending", "conditions": [TOO_FEW]}), "0/3 nodes are available", 0),
        (pods({"phase": "Failed"}, {"phase": "Succeeded"}), "its pods have ended (Succeeded)", 3),
    ],
)
def test_one_pod_of_an_elastic_job_is_enough(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, told: str, line: str, status: int
) -> None:
    submitted(tmp_path, monkeypatch, told, elastic=True)
    assert line in stands(tmp_path / "run", status)


def test_pods_that_see_another_folder_are_stopped_by_deleting_their_job(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    submitted(tmp_path, monkeypatch, pods({"phase": "Running"}), elastic=True)
    assert dslc("stop", tmp_path / "run").returncode == 0
    words = "delete job,service,configmap,secret --selector dslc-run=made --namespace ml"
    assert (tmp_path / "asked").read_text().strip() == words
    assert "stopped" in stands(tmp_path / "run", 130)
