"""Elastic trainings in pods: hosts run what the manifest says, and know the names that its Service has."""

from __future__ import annotations

import json
import os
import signal
import sys
from contextlib import ExitStack
from pathlib import Path

import pytest
from helpers.commands import dslc
from helpers.hosts import TOOL, logged, namespaces, reach, reach_checkpoint, started, why_none
from helpers.launcher import Command, Launcher
from helpers.trained import Trained, agree, train_job
from helpers.waiting import until
from test_elastic import written
from test_hosts import ALONE

pytestmark = pytest.mark.skipif(bool(why_none()), reason=why_none())


class Pods:
    """The pods of an elastic job: `start` is what Kubernetes does when there is room for one."""

    def __init__(self, job: Path, hosts: list[str], around: ExitStack) -> None:
        self._folder, self._hosts, self._around, self._number = job.parent, hosts, around, 0
        with_ = f'launch.with=kubernetes(image = "dslc", volumes = ["claim:{job.parent}"])'
        told = dslc("submit", job, "--dry-run", "--out", job.parent / "run", "--set", with_)
        config, _, service, made = json.loads(told.stdout)["items"]
        submitted = job.parent / "etc" / "job.plt"
        submitted.parent.mkdir()
        submitted.write_text(config["data"]["job.plt"])
        spec = made["spec"]["template"]["spec"]
        (container,) = spec["containers"]
        assert spec["subdomain"] == service["metadata"]["name"]
        words = [word.replace("/etc/dslc/job.plt", str(submitted)) for word in container["command"]]
        self._command = [sys.executable, *words[1:]]
        self.names = [f"{made['metadata']['name']}-{n}.{spec['subdomain']}" for n in range(made["spec"]["completions"])]
        self._known: set[int] = set()

    def start(self, index: int) -> Command:
        """Starts a pod, whose name is known from now on."""
        if index not in self._known:
            self._known.add(index)
            for host in self._hosts:
                with open(Path("/etc/netns", host, "hosts"), "a", encoding="utf-8") as file:
                    file.write(f"10.77.0.{index + 1} {self.names[index]}\n")
        self._number += 1
        variables = [f"JOB_COMPLETION_INDEX={index}", "DSLC_RUN_TOKEN=the token of the Secret"]
        command = [str(TOOL), "run", str(index + 1), "env", *variables, *self._command]
        return self._around.enter_context(started(self._folder / f"pod-{self._number}", [command]))[0]

    def end(self, *running: Command) -> None:
        """Ends the Job when the first pod has ended well, as Kubernetes does: the others are still there."""
        until(lambda: any(each.process.poll() is not None for each in running))
        others = [each for each in running if each.process.poll() is None]
        assert len(others) == len(running) - 1
        for each in others:
            os.kill(each.process.pid, signal.SIGTERM)
        ends = [each.end() for each in running]
        assert not any(status for status, _ in ends), ends


def test_two_pods_train_while_a_third_finds_no_room(launcher: Launcher, tmp_path: Path) -> None:
    """When it does, the training is over."""
    job, out = written(tmp_path, 60), tmp_path / "run"
    with namespaces(3) as hosts, ExitStack() as around:
        pods = Pods(job, hosts, around)
        assert len(pods.names) == 3
        pods.end(pods.start(0), pods.start(1))
        assert (out / "report.json").exists()
        status, said = pods.start(2).end()
        assert status == 0 and f"the training has ended without this pod: {out}" in said
    agree(train_job(launcher, job, *ALONE), Trained(out))


@pytest.mark.long
def test_pods_come_and_are_lost(launcher: Launcher, tmp_path: Path) -> None:
    """The first finds room last; the one that kept the training is lost, and made anew, as is one after `dslc stop`."""
    job, out = written(tmp_path, 3000), tmp_path / "run"
    with namespaces(3) as hosts, ExitStack() as around:
        pods = Pods(job, hosts, around)
        second, third = pods.start(1), pods.start(2)
        reach_checkpoint(out, [second, third])
        first = pods.start(0)
        second.wait_for("stops for a host that has come")
        second.wait_for("goes on after step ")
        reach(out, logged(out)[-1] + 30, [first, second, third])
        os.kill(third.process.pid, signal.SIGTERM)  # as by an eviction: all stop, and are made anew
        ends = [each.end() for each in (first, second, third)]
        assert [status for status, _ in ends] == [130, 130, 130], ends
        steps = logged(out)[-1]
        first, second, third = [pods.start(n) for n in range(3)]
        reach(out, steps + 30, [first, second, third])
        os.killpg(second.process.pid, signal.SIGKILL)
        reach(out, logged(out)[-1] + 30, [first, third])
        again = pods.start(1)
        again.wait_for("waits for a place")
        pods.end(first, third, again)
        assert (out / "report.json").exists()
        told = json.loads((out / "status.json").read_text())
        (out / "status.json").write_text(json.dumps({**told, "state": "stopped", "asked": "dslc stop"}))
        status, said = pods.start(0).end()
        assert status == 1 and "it was stopped by `dslc stop`" in said
    agree(train_job(launcher, job, *ALONE), Trained(out))
