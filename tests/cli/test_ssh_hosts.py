"""The hosts of an elastic job that come and go, each a shell in the place of its `ssh`."""

from __future__ import annotations

import subprocess
from collections.abc import Callable, Sequence

import pytest

from dslc.launching import ssh_hosts
from dslc.launching.ssh_agent import READY
from dslc.launching.ssh_hosts import ElasticHosts, Host, NotStarted, end
from dslc.launching.ssh_launch import _fault
from dslc.runtime.process.stop import RunControl

GO = f"echo '{READY}'; until [ \"$word\" = go ]; do read word || exit; done; "
TRAINS = GO + "echo trains; exit 0"
UNREACHED = "echo 'connect: refused' >&2; exit 255"
LOST = GO + "exit 255"


def host(name: str, script: str) -> Host:
    pipe = subprocess.PIPE
    return Host(name=name, process=subprocess.Popen(["sh", "-c", script], stdin=pipe, stdout=pipe, stderr=pipe))


def run(
    scripts: Sequence[str], least: int = 1, *, timeout: float = 60, again: Callable[[str], str] = lambda name: TRAINS
) -> int:
    hosts = [host(f"host{n}", script) for n, script in enumerate(scripts, 1)]

    def start(name: str) -> Host:
        return host(name, again(name))

    try:
        return ElasticHosts(hosts, RunControl(1), _fault, least=least, timeout=timeout, start=start).run()
    finally:
        end(hosts)


@pytest.fixture(autouse=True)
def soon(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ssh_hosts, "_AGAIN", (0.1, 0.2))


def test_hosts_that_can_be_reached_train(capfd: pytest.CaptureFixture[str]) -> None:
    assert run([UNREACHED, TRAINS, TRAINS]) == 0
    said = capfd.readouterr()
    assert said.out.count("trains") == 1, "what several say is printed once"
    assert said.err.startswith("dslc: host1 cannot be reached by ssh (connect: refused)")
    assert said.err.count("\n") == 1 and "it is tried again, and the others go on" in said.err


def test_a_host_that_is_lost_joins_again(capfd: pytest.CaptureFixture[str]) -> None:
    tried: list[str] = []

    def again(name: str) -> str:
        tried.append(name)
        return TRAINS if len(tried) == 3 else UNREACHED

    assert run([LOST], again=again) == 0 and tried == ["host1"] * 3
    said = capfd.readouterr()
    assert said.out == "host1: trains\n"
    assert [line.partition(" (")[0] for line in said.err.splitlines()] == [
        "dslc: the connection to host1 was lost",
        "dslc: host1 cannot be reached by ssh",
    ], "each reason once"


def test_without_a_host_it_ends_after_the_timeout(capfd: pytest.CaptureFixture[str]) -> None:
    assert run([LOST], timeout=1, again=lambda name: UNREACHED) == 3
    assert "no host was there for 1 s (`launch.timeout`): the training ends" in capfd.readouterr().err


def test_too_few_hosts_are_an_error_that_names_one() -> None:
    with pytest.raises(NotStarted, match="host2 cannot be reached by ssh"):
        run([TRAINS, UNREACHED], least=2)


@pytest.mark.parametrize(
    "statuses, status",
    [((0, 2), 0), ((3, 2), 3), ((130, 0), 130), ((3, 0), 0), ((2, 2), 2), ((137, 137), 3)],
)
def test_one_host_that_knows_the_end_is_enough(statuses: Sequence[int], status: int) -> None:
    assert run([f"{GO} exit {each}" for each in statuses]) == status
