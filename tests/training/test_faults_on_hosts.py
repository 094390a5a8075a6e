"""Faults on three hosts with addresses of their own, one after another, drawn over kind, moment and host: the training
ends as the undisturbed one, and no process and no port is left (instruments/drawn_faults.py).
"""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Mapping
from contextlib import ExitStack
from pathlib import Path

import pytest
from helpers.hosts import TOOL, local_command, namespaces, why_none
from helpers.launcher import Launcher
from helpers.trained import Trained, agree, train_job
from instruments.drawn_faults import KINDS, Struck, drawn, started_ranks_of
from test_hosts import ALONE, JOB

pytestmark = pytest.mark.skipif(bool(why_none()), reason=why_none())

HOSTS, EACH = 3, 10  # faults in one training, at most
MORE = """
checkpoint {
  every = 20 steps
}
launch {
  restarts = 1000
  timeout  = 60s
}
"""
STEPS = 500


def job(folder: Path, steps: int, *, more: str = MORE) -> Path:
    folder.mkdir(exist_ok=True)
    path = folder / "job.plt"
    path.write_text(JOB.replace("steps     = 12", f"steps     = {steps}").replace("nodes = 2", "nodes = 3") + more)
    return path


def survive(
    folder: Path,
    alone: Trained,
    steps: int,
    draw: random.Random,
    kinds: Mapping[str, int],
    *words: str,
    most: int = EACH,
) -> list[str]:
    """Trains under so many faults, if it takes so long; returns them."""
    out = folder / "run"
    run = local_command(["run", str(job(folder, steps)), "--out", str(out), "--rendezvous", "host1", *words])
    commands = [[str(TOOL), "run", str(n), *run] for n in range(1, HOSTS + 1)]
    with namespaces(HOSTS), ExitStack() as around:
        struck = Struck(commands, out, steps - 100, folder / "said", around, started_ranks_of)
        while len(struck.hit) < most and struck.strike(drawn(draw, HOSTS, kinds, first=not struck.hit)):
            print(struck.hit[-1], flush=True)
        assert struck.ends() == [0] * HOSTS, struck.said()
        assert not struck.left(), struck.said()
    agree(alone, Trained(out))
    return [f"{fault.kind}, {fault.moment}" for fault in struck.hit]


def undisturbed(launcher: Launcher, folder: Path, steps: int) -> Trained:
    return train_job(launcher, job(folder / "alone", steps, more=""), *ALONE)


@pytest.mark.long
def test_ten_faults(launcher: Launcher, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """None that only `launch.timeout` ends."""
    monkeypatch.setenv("OMP_WAIT_POLICY", "PASSIVE")
    kinds = {name: weight for name, weight in KINDS.items() if name != "stop"}
    alone = undisturbed(launcher, tmp_path, STEPS)
    hit = survive(tmp_path / "struck", alone, STEPS, random.Random(1), kinds)
    assert len(hit) == 10


def many(launcher: Launcher, tmp_path: Path, steps: int, count: int, *words: str) -> None:
    draw, hit = random.Random(0), list[str]()
    alone = undisturbed(launcher, tmp_path, steps)
    while len(hit) < count:
        folder = tmp_path / f"training-{len(hit)}"
        hit += survive(folder, alone, steps, draw, KINDS, *words, most=min(EACH, count - len(hit)))
    print(*(f"{number:3} {what}" for what, number in sorted(Counter(hit).items())), sep="\n")


@pytest.mark.long
def test_a_hundred_faults(launcher: Launcher, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OMP_WAIT_POLICY", "PASSIVE")
    many(launcher, tmp_path, STEPS, 100, "--set", "launch.timeout=25s")


@pytest.mark.long
def test_fifty_faults_of_an_elastic_training(
    launcher: Launcher, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("OMP_WAIT_POLICY", "PASSIVE")
    many(launcher, tmp_path, 3000, 50, "--set", "devices.nodes=1..3", "--set", "launch.timeout=25s")
