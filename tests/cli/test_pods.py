"""The pods of an elastic job: how a process knows that it is one, and in which order they end."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from helpers.paths import EXAMPLES

from dslc.dsl.diagnostics import Report
from dslc.dsl.meaning.load import load
from dslc.jobs.prepare_run import LaunchContext, Ready, prepare, write_run_directory
from dslc.launching import elastic
from dslc.launching.hosts import HostPaths, train_with_others
from dslc.launching.restart_detection import is_training_done
from dslc.runs.run_folder import claim_folder
from dslc.runtime.hosts.elastic import TrainingOverError
from dslc.runtime.process.failure import Failure, Outcome
from dslc.runtime.process.run_status import RunStatus, write_status

POD = {"JOB_COMPLETION_INDEX": "1"}
PODS = 'launch.with=kubernetes(image = "dslc", volumes = ["claim:/runs"])'


def prepared(environ: Mapping[str, str], *settings: str, hosts: bool = True) -> tuple[Ready | None, Report]:
    report = Report()
    loaded = load(str(EXAMPLES / "elastic.plt"), [PODS, *settings])
    return prepare(loaded, report, around=LaunchContext(hosts=hosts, environ=environ)), report


def in_pod() -> Ready:
    ready, report = prepared(POD)
    assert ready is not None, report.errors
    return ready


def test_a_pod_is_a_host_that_comes_to_the_others() -> None:
    ready = in_pod()
    assert ready.world is None and list(ready.counts) == [1, 2, 3]


@pytest.mark.parametrize(
    "environ, settings, hosts, said",
    [
        ({}, (), True, "JOB_COMPLETION_INDEX is not set"),
        (POD, (), False, "this pod is not one that `dslc submit` has made of this job"),
        (POD, ("devices.nodes=2",), True, "this pod is not one that `dslc submit` has made of this job"),
    ],
    ids=["by hand", "without a rendezvous", "of a fixed number"],
)
def test_what_kubernetes_has_not_started_so_is_refused(
    environ: Mapping[str, str], settings: tuple[str, ...], hosts: bool, said: str
) -> None:
    ready, report = prepared(environ, *settings, hosts=hosts)
    (error,) = report.errors
    assert ready is None and error.code == "E0809" and said in error.message


def test_a_training_that_has_ended_is_done_only_if_it_is_of_the_plan(tmp_path: Path) -> None:
    ready, out = in_pod(), str(tmp_path)
    assert not is_training_done(ready, out)
    write_run_directory(ready.on(2), out)
    for state, done in (("running", False), ("stopped", False), ("done", True)):
        write_status(out, RunStatus(state=state, step=400, steps=400))
        assert is_training_done(ready, out) == done
    with claim_folder(out, None):
        assert not is_training_done(ready, out)  # somebody writes there
    longer, _ = prepared(POD, "train.steps=500")
    assert longer is not None and not is_training_done(longer, out)


AT_TWO_PODS = HostPaths(job="", rendezvous="a,b")


class Coordinator:
    """Notes what it is told."""

    def __init__(self, *, apart: bool = False, is_coordinator: bool = True) -> None:
        self.order: list[Any] = []
        self.apart, self.is_coordinator = apart, is_coordinator

    def dismiss(self, steps: int | None, *, was_stopped: bool) -> None:
        self.order.append((steps, was_stopped))

    def let_end(self) -> None:
        self.order.append("lets end")

    def close(self) -> None:
        self.order.append("closes")


@pytest.mark.parametrize(
    "outcome, told",
    [
        (Outcome(run_dir="", steps=400), (400, False)),
        (Outcome(run_dir="", steps=7, stopped_at=7), (7, True)),
    ],
    ids=["done", "stopped"],
)
def test_those_who_wait_are_dismissed_when_all_is_written(
    monkeypatch: pytest.MonkeyPatch, outcome: Outcome, told: tuple[int, bool]
) -> None:
    """Kubernetes ends all pods when the first has ended with 0: it must be no other than the coordinator."""
    coordinator = Coordinator()

    def written(*_: object) -> int:
        coordinator.order.append("written")
        return 0

    monkeypatch.setattr(elastic, "meet", lambda rendezvous: coordinator)
    monkeypatch.setattr(elastic._ElasticTraining, "run", lambda self, group: (outcome, None))
    monkeypatch.setattr("signal.signal", lambda *_: None)
    assert train_with_others(in_pod(), AT_TWO_PODS, written) == 0
    assert coordinator.order == ["written", told, "lets end", "closes"]


@pytest.mark.parametrize("stopped, status", [(False, 0), (True, 130)])
def test_who_waited_for_a_place_leaves_as_the_training_ended(
    monkeypatch: pytest.MonkeyPatch, stopped: bool, status: int
) -> None:
    """A pod that ended with 0 when the others were only stopped would end the Job; it leaves after the coordinator."""
    waited = list[float]()
    event = SimpleNamespace(wait=waited.append)  # not of all threads: those of libraries wait as well
    monkeypatch.setattr(elastic, "threading", SimpleNamespace(Event=lambda: event))

    def over(_: object) -> None:
        raise TrainingOverError(7, "coordinator", was_stopped=stopped)

    monkeypatch.setattr(elastic, "meet", over)
    monkeypatch.setattr("signal.signal", lambda *_: None)
    assert train_with_others(in_pod(), AT_TWO_PODS, lambda *_: 3) == status
    assert len(waited) == (not stopped)


@pytest.mark.parametrize("is_coordinator", [False, True])
def test_the_coordinator_is_the_first_to_end(monkeypatch: pytest.MonkeyPatch, is_coordinator: bool) -> None:
    waited = list[float]()
    event = SimpleNamespace(wait=waited.append)
    monkeypatch.setattr(elastic, "threading", SimpleNamespace(Event=lambda: event))
    monkeypatch.setattr(elastic, "meet", lambda rendezvous: Coordinator(is_coordinator=is_coordinator))
    monkeypatch.setattr(elastic._ElasticTraining, "run", lambda self, group: (Outcome(run_dir="", steps=400), None))
    monkeypatch.setattr("signal.signal", lambda *_: None)
    assert train_with_others(in_pod(), AT_TWO_PODS, lambda *_: 0) == 0
    assert len(waited) == (not is_coordinator)


@pytest.mark.parametrize("apart, status", [(False, 3), (True, 2)])
def test_a_pod_that_is_cut_off_gives_itself_up_alone(monkeypatch: pytest.MonkeyPatch, apart: bool, status: int) -> None:
    """A training that failed ends the Job; one that others may go on with does not."""
    failure = Failure(rank=None, step=7, kind="ended", message="found nobody")
    monkeypatch.setattr(elastic, "meet", lambda rendezvous: Coordinator(apart=apart))
    outcome = Outcome(run_dir="", steps=6, failure=failure)
    monkeypatch.setattr(elastic._ElasticTraining, "run", lambda self, group: (outcome, None))
    monkeypatch.setattr("signal.signal", lambda *_: None)
    assert train_with_others(in_pod(), AT_TWO_PODS, lambda *_: 3) == status
