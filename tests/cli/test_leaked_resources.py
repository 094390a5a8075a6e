"""User code that leaves a thread or a process running: the check ends, says so, and nothing is left."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from helpers.commands import dslc
from helpers.launcher import DSLC, Command
from helpers.trained import OWN_JOB
from helpers.waiting import until

from dslc.jobs.check_job import check_one

NETWORK = """
import os, sys, threading, multiprocessing, subprocess, time
from concurrent.futures import ThreadPoolExecutor
from torch import nn

def wait():
    while True:
        time.sleep(1)

def noted(process):
    open("started", "w").write(str(process))

def thread():
    threading.Thread(target=wait, name="watch").start()

def forked():
    child = os.fork()
    if child == 0:
        wait()
    noted(child)

def falls_through():
    child = os.fork()
    if child:
        noted(child)
        os.waitpid(child, 0)

def grandchild():
    child = os.fork()
    if child == 0:
        noted(os.getpid())
        if os.fork():
            open(f"forked {os.getpid()}", "w").close()
        wait()
    while not os.path.exists(f"forked {child}"):
        pass

def process():
    started = multiprocessing.get_context("fork").Process(target=wait)
    started.start()
    noted(started.pid)

def crashes():
    forked()
    os.kill(os.getpid(), 9)

def waits():
    noted(os.getpid())
    wait()

def none():
    threading.Thread(target=wait, daemon=True).start()
    multiprocessing.get_context("fork").Process(target=wait, daemon=True).start()
    ThreadPoolExecutor(1).submit(int).result()
    subprocess.run(["true"])

def network(leaves):
    globals()[leaves]()
    return nn.Sequential(nn.Flatten(), nn.Linear(64, 10))
"""
SAID = {  # of one call, though tracing makes the network, and so does the trial on samples
    "thread": "`net:network` leaves a thread (`watch`) running, which `dslc` has ended",
    "forked": "`net:network` leaves a process (",
    "grandchild": "`net:network` leaves 2 processes (",
    "process": "`net:network` leaves a process (",
    "crashes": "`net:network` leaves a process (",
}


@pytest.mark.slow
@pytest.mark.usefixtures("loaded")
@pytest.mark.parametrize("leaves", ["thread", "forked", "falls_through", "grandchild", "process", "crashes", "none"])
def test_a_check_ends_whatever_user_code_leaves_running(
    tmp_path: Path, leaves: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "net.py").write_text(NETWORK)
    (tmp_path / "job.plt").write_text(OWN_JOB)
    found = {d.code: d for d in check_one("job.plt", [f'model.network.leaves="{leaves}"'], trace=True)[0]}
    assert ("W0438" in found) == (leaves in SAID)
    assert leaves not in SAID or found["W0438"].message.startswith(SAID[leaves])
    assert ("E0802" in found) == (leaves == "crashes")
    assert leaves != "crashes" or "the process ended with status -9" in found["E0802"].message
    if leaves in ("forked", "grandchild", "process", "crashes"):
        with pytest.raises(ProcessLookupError):
            os.kill(int(Path("started").read_text()), 0)


@pytest.mark.slow
def test_the_command_ends_and_says_so(tmp_path: Path) -> None:
    """Standard error is a pipe, which a leftover process would hold open."""
    (tmp_path / "net.py").write_text(NETWORK)
    (tmp_path / "job.plt").write_text(OWN_JOB)
    run = dslc("check", "--trace", "job.plt", "--set", "model.network.leaves=forked", cwd=tmp_path)
    assert run.returncode == 0 and "warning[W0438]: `net:network` leaves a process (" in run.stderr


@pytest.mark.slow
def test_a_trial_ends_with_a_command_that_is_killed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "net.py").write_text(NETWORK)
    (tmp_path / "job.plt").write_text(OWN_JOB)
    words = [str(DSLC), "check", "--trace", "job.plt", "--set", "model.network.leaves=waits"]
    with Command(tmp_path, words) as command:
        until(Path("started").exists, [command])
        command.process.kill()
        command.wait_for_all()
