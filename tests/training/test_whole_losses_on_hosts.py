"""The examples of `dp`, on one node, and of `ddp2`, on two: the same command on each."""

from __future__ import annotations

from pathlib import Path

import pytest
from helpers.hosts import free_port, local_command, started
from helpers.launcher import Launcher
from helpers.paths import EXAMPLES
from helpers.trained import Trained, agree, train_job, train_on_nodes

FEW = ("train.steps=6", "log.every=1 step", "log.tensorboard=false", "evaluate.every=none")


def trained(launcher: Launcher, example: str, folder: Path, *settings: str) -> Trained:
    folder.mkdir()
    return train_job(launcher, EXAMPLES / example, *FEW, *settings, folder=folder)


@pytest.mark.core
def test_dp_trains_as_one_process(launcher: Launcher, tmp_path: Path) -> None:
    one = trained(launcher, "dp.plt", tmp_path / "one", "devices.cpus=1")
    agree(one, trained(launcher, "dp.plt", tmp_path / "two"), weights=5e-4)
    agree(one, trained(launcher, "dp.plt", tmp_path / "four", "devices.cpus=4"), weights=5e-4)


def test_ddp2_compares_the_samples_of_each_node(launcher: Launcher, tmp_path: Path) -> None:
    out, words = tmp_path / "run", [word for setting in FEW for word in ("--set", setting)]
    command = local_command(
        ["run", str(EXAMPLES / "ddp2.plt"), "--out", str(out), "--rendezvous", f"localhost:{free_port()}"]
    )
    with started(tmp_path, [[*command, *words]] * 2) as commands:
        ends = [each.end() for each in commands]
    assert [status for status, _ in ends] == [0, 0], ends
    found = Trained(out)
    # Two nodes of one process each have the same samples as two of two.
    example = EXAMPLES / "ddp2.plt"
    agree(train_on_nodes(launcher, example, tmp_path / "two", *FEW, "devices.cpus=1"), found, weights=5e-4)
    everything = train_on_nodes(launcher, example, tmp_path / "all", *FEW, "model.loss.over=all")
    assert abs(everything.losses()[0] - found.losses()[0]) > 0.1
