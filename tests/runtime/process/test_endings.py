"""Bad endings: whatever happens to a training, it ends, and one message names the cause."""

from __future__ import annotations

import os
import re
import signal
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from helpers.launcher import Command, Launcher, write_program
from helpers.made_programs import images, places, program, python
from helpers.paths import TESTS
from helpers.small_disk import fill, small_disk

from dslc.compiler.ir import program as p
from dslc.runtime.checkpoint import files
from dslc.runtime.process.failure import Outcome, describe
from dslc.runtime.process.records import Records, read_metrics
from dslc.runtime.process.stop import SECOND

NET = """
import multiprocessing, os, shutil, signal, subprocess, sys, threading, time, torch

class Worse(Exception):
    def __str__(self): raise ValueError("no text")

class Wide(Exception):
    def __str__(self): return "wide " * 10_000_000

def idle():
    threading.Event().wait()

def forks(file):
    child = os.fork()
    if child == 0:
        idle()
    with open(file, "w") as told:
        told.write(str(child))

def stop(*ranks):
    if int(os.environ["RANK"]) in ranks:
        os.kill(os.getpid(), signal.SIGSTOP)

class Net(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = torch.nn.Linear(64, 10)
        self.step = 0
        self.rank = int(os.environ["RANK"])

    def forward(self, x):
        self.step += self.training
        if self.step == 3 and self.training:
            self.trouble()
        return self.linear(x.flatten(1))

    def trouble(self):
        {trouble}
"""


def job(folder: Path, trouble: str, ranks: int = 2, **changed: Any) -> p.JobProgram:
    """A training whose ranks do `trouble` at step 3."""
    (folder / "net.py").write_text(NET.replace("{trouble}", trouble))
    model = p.ModelStep(python=python("net:Net", folder))
    values: dict[str, Any] = {"model": model, "sync_batch_norm": False, "steps": 6}
    return program(ranks, images(folder), **(values | changed))


def end(launcher: Launcher, folder: Path, trouble: str, ranks: int = 2, **changed: Any) -> tuple[Outcome, str, str]:
    """Returns its outcome, the message, and the output."""
    outcome, shown = launcher.launch(job(folder, trouble, ranks, **changed), places(ranks), folder / "run")
    assert outcome is not None, shown
    return outcome, describe(outcome), shown


@pytest.mark.core
@pytest.mark.parametrize(("ranks", "stopped"), [(2, "1"), (2, "0, 1"), (1, "0")])
def test_ranks_that_are_stopped(launcher: Launcher, tmp_path: Path, ranks: int, stopped: str) -> None:
    _, message, _ = end(launcher, tmp_path, f"stop({stopped})", ranks, timeout=3.0)
    assert message.startswith(f"training failed on rank {stopped[0]} at step 3\n  the process is stopped"), message
    assert "longer than `launch.timeout` (3 s)" in message and "memory" not in message
    assert ("so are ranks 0, 1" in message) == (stopped == "0, 1")


def test_a_slow_training_is_not_taken_for_one_that_is_stopped(launcher: Launcher, tmp_path: Path) -> None:
    """It is said where it is, once."""
    outcome, _, shown = end(launcher, tmp_path, "time.sleep(4)", 1, timeout=1.0)
    assert outcome.is_complete
    (told,) = re.findall(r"no progress for 1 s: (.+)", shown)
    assert re.match(
        r"rank 0 is in the forward pass of step 3 \(\S+\); rank 0's last line of Python is \S+/net.py:", told
    )


def test_a_rank_that_loops_in_code_of_the_users_own_is_named(tmp_path: Path) -> None:
    """No other rank waits for it; Ctrl-C, the second time, ends it."""
    made = job(tmp_path, "while True: pass", ranks=1, timeout=1.0)
    with Command(write_program(made, places(1), tmp_path / "run")) as command:
        command.wait_for("no progress for 1 s: rank 0 is in the forward pass of step 3 ")
        os.kill(command.process.pid, signal.SIGINT)
        command.wait_for("stopping after this step")
        with pytest.raises(subprocess.TimeoutExpired):
            command.process.wait(1.5 * SECOND)  # sooner a second one counts as the same
        os.kill(command.process.pid, signal.SIGINT)
        status, output = command.end()
        assert status == 130 and not command.left()
        assert "rank 0's last line of Python is " in output


def test_sigterm_to_one_rank_names_it(launcher: Launcher, tmp_path: Path) -> None:
    _, message, _ = end(launcher, tmp_path, "self.rank and os.kill(os.getpid(), signal.SIGTERM)")
    assert message.startswith("training failed on rank 1 at step 3\n  the process was ended by SIGTERM\nnote: "), (
        message
    )


# Rank 1 is terminated when rank 0 has failed already, over the connections that it lost.
LATE = """
        pids = [0, 0]
        torch.distributed.all_gather_object(pids, os.getpid())
        for opened in os.listdir("/proc/self/fd") if self.rank else ():
            try:
                found = socket.socket(fileno=int(opened))
            except OSError:
                continue
            if found.type == socket.SOCK_STREAM and found.family != socket.AF_UNIX:  # which is the tests' own
                found.shutdown(socket.SHUT_RDWR)
            found.detach()
        if self.rank:
            select.select([os.pidfd_open(pids[0])], [], [])
            os.kill(os.getpid(), signal.SIGTERM)
"""


def test_sigterm_is_the_cause_where_another_rank_has_lost_its_connections_before(
    launcher: Launcher, tmp_path: Path
) -> None:
    _, message, _ = end(launcher, tmp_path, f"import select, socket{LATE}")
    assert message.startswith("training failed on rank 1 at step 3\n  the process was ended by SIGTERM\n"), message
    assert re.search("Connection closed|reset", (tmp_path / "run" / "logs" / "rank-0.log").read_text())


@pytest.mark.parametrize("what", ["run", "run/logs"])
def test_a_run_directory_that_is_removed(launcher: Launcher, tmp_path: Path, what: str) -> None:
    """Only the logs may be missing."""
    trouble = f"self.rank or shutil.rmtree({str(tmp_path / what)!r})"
    if what == "run":
        trouble += "; time.sleep(60)"
    outcome, message, _ = end(launcher, tmp_path, trouble)
    if what == "run":
        assert message == f"training failed at step 3\n  {tmp_path}/run was removed while the training ran"
    else:
        assert outcome.is_complete


def test_the_launcher_itself_ends_where_its_run_directory_is_removed(tmp_path: Path) -> None:
    """Runs in a process of its own, which no thread keeps alive."""
    run = tmp_path / "run"
    made = job(tmp_path, f"self.rank or shutil.rmtree({str(run)!r}); time.sleep(60)")
    with Command(write_program(made, places(2), run)) as command:
        status, output = command.end()
        assert (status, command.left()) == (3, []), output
    assert output.endswith(f"training failed at step 3\n  {run} was removed while the training ran\n")


def test_a_launcher_that_cannot_write_its_log(launcher: Launcher, tmp_path: Path) -> None:
    (tmp_path / "run" / "logs" / "launcher.log").mkdir(parents=True)
    _, message, _ = end(launcher, tmp_path, "self.rank and os.kill(os.getpid(), signal.SIGKILL)")
    assert message.startswith("training failed on rank 1 at step 3\n  the process was ended by SIGKILL"), message


@pytest.mark.parametrize(
    ("trouble", "said"),
    [
        ("threading.Thread(target=idle).start()", r"ranks 0, 1 have been ended: a thread or a process"),
        ("self.rank and threading.Thread(target=idle).start()", r"rank 1 has been ended: a thread or a process"),
        (
            "self.rank or multiprocessing.Process(target=idle).start()",
            r"rank 0 has been ended(.|\n)*a process that the",
        ),
        (
            "self.rank or os.fork() or idle()",
            r"a process that the job's code left behind has been ended: .*process \d+",
        ),
        ("self.rank or subprocess.Popen(['sleep', '1000'])", r"left behind has been ended: sleep 1000 \(process \d+\)"),
        (
            # The launcher may find the process between its fork and its exec, when it is called setsid yet.
            "self.rank or subprocess.Popen(['setsid', '-f', 'sleep', '1000'])",
            r"has been ended: (setsid -f )?sleep 1000 \(process",
        ),
    ],
)
def test_what_the_users_code_leaves_behind_is_ended_and_said(
    launcher: Launcher, tmp_path: Path, trouble: str, said: str
) -> None:
    outcome, message, shown = end(launcher, tmp_path, trouble)
    assert outcome.is_complete, message
    assert re.search(said, shown), shown
    for number in re.findall(r"\(process (\d+)\)", shown):
        assert not Path("/proc", number).exists()


@pytest.mark.parametrize("left", ["threading.Thread(target=idle).start()", "forks(FILE)"])
@pytest.mark.parametrize("trouble", ["raise ValueError('wrong')", "os.kill(os.getpid(), signal.SIGKILL)"])
def test_what_is_left_behind_does_not_hold_up_a_failure(
    launcher: Launcher, tmp_path: Path, left: str, trouble: str
) -> None:
    """A child that was forked holds the pipes and the connections of its rank; it is ended too."""
    child = tmp_path / "child"
    left = left.replace("FILE", repr(str(child)))
    _, message, _ = end(launcher, tmp_path, f"self.rank and {left}\n        if self.rank: {trouble}")
    assert message.startswith("training failed on rank 1 at step 3"), message
    assert "ValueError: wrong" in message or "ended by SIGKILL" in message
    assert not child.exists() or not Path("/proc", child.read_text()).exists()
    assert child.exists() == ("forks" in left)


def test_executors_that_are_left_idle_end_as_in_any_program(launcher: Launcher, tmp_path: Path) -> None:
    done = tmp_path / "done"
    work = f"open({str(done)!r}, 'w').close()"
    trouble = "from concurrent.futures import ThreadPoolExecutor\n"
    trouble += f"        self.rank or ThreadPoolExecutor().submit(lambda: (time.sleep(1), {work}))"
    outcome, _, shown = end(launcher, tmp_path, trouble)
    assert outcome.is_complete and done.exists() and "has been ended" not in shown


def test_the_workers_of_torchs_compiler_are_ended_without_a_word(launcher: Launcher, tmp_path: Path) -> None:
    child = tmp_path / "child"
    worker = "['/lib/torch/_inductor/compile_worker/__main__.py', '1000'], executable='/bin/sleep'"
    trouble = f"self.rank or open({str(child)!r}, 'w').write(str(subprocess.Popen({worker}).pid))"
    outcome, _, shown = end(launcher, tmp_path, trouble)
    assert outcome.is_complete and "has been ended" not in shown
    assert not Path("/proc", child.read_text()).exists()


@pytest.mark.parametrize(
    ("trouble", "words"),
    [
        ("raise Worse()", "  net.Worse: <exception str() failed>"),
        ("raise Wide()", "letters more)"),
        ("raise ValueError('\\n'.join('wrong' for _ in range(10**6)))", "(999,989 lines more)"),
        ("sys.exit('wrong ' * 10**7)", "  the user's code left by sys.exit('wrong wrong"),
        ("raise ValueError('\\ud800')", "  ValueError: "),
    ],
)
def test_exceptions_that_are_hard_to_print(launcher: Launcher, tmp_path: Path, trouble: str, words: str) -> None:
    _, message, _ = end(launcher, tmp_path, f"if self.rank: {trouble}")
    assert message.startswith("training failed on rank 1 at step 3 (made.plt:3:13)\n"), message[:1000]
    assert words in message and len(message) < 3000


@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGUSR1, signal.SIGUSR2])
def test_signals_of_batch_systems_stop_a_training(tmp_path: Path, number: signal.Signals) -> None:
    """Also if they are sent to all of its processes."""
    made = job(tmp_path, "pass", steps=10**6, log_every=50)
    with Command(write_program(made, places(2), tmp_path / "run")) as command:
        command.wait_for("step       1/1000000")
        os.killpg(command.process.pid, number)
        status, output = command.end()
        assert (status, command.left()) == (130, []), output
    assert "stopped after" in output


# -------------------------------------------------------------------------------------------------- a disk that is full


@pytest.fixture
def disk(tmp_path: Path) -> Iterator[Path]:
    with small_disk(tmp_path / "disk", "2m") as folder:
        yield folder


def full(disk: Path) -> str:
    """Fills the disk, as another program may."""
    return (
        f"import sys; sys.path.insert(0, {str(TESTS)!r})\n"
        "        import pathlib; from helpers.small_disk import fill\n"
        f"        self.rank or fill(pathlib.Path({str(disk)!r}))"
    )


@pytest.mark.parametrize("steps", [6, 200])
def test_a_full_disk(launcher: Launcher, tmp_path: Path, disk: Path, steps: int) -> None:
    """What is made cannot be left there; until then the training goes on, and says so once."""
    made = job(tmp_path, full(disk), steps=steps)
    outcome, shown = launcher.launch(made, places(2), disk / "run")
    message = describe(outcome)
    file = r"run/(weights\.safetensors|logs/rank-\d\.json)"
    assert re.search(rf"\n  {disk}/{file}: No space left on device\n", message), message
    told = f"{disk}/run/metrics.jsonl cannot be written (No space left on device); the training goes on"
    assert shown.count(told) == (1 if steps == 200 else 0), shown
    assert f"note: no space is left on the device of {disk}/run" in message
    assert "Traceback" not in message


def test_a_full_disk_where_a_user_prints(launcher: Launcher, tmp_path: Path, disk: Path) -> None:
    """A lost log does not matter, but a lost result does."""
    made = job(tmp_path, full(disk) + "; print('x' * 10_000)", steps=3)
    outcome, _ = launcher.launch(made, places(2), disk / "run")
    assert "print" not in describe(outcome) and "No space left on device" in describe(outcome)


@pytest.mark.parametrize("asynchronous", [True, False])
def test_a_full_disk_of_checkpoints(launcher: Launcher, tmp_path: Path, disk: Path, asynchronous: bool) -> None:
    """The older one is whole, and the training resumes from it when there is room again."""
    step = p.CheckpointStep(every=2, keep=2, asynchronous=asynchronous, resume="auto", folder=str(disk / "kept"))
    written = "[each.join() for each in threading.enumerate() if each.name == 'dslc-checkpoint']"
    made = job(tmp_path, f"{written}\n        {full(disk)}", checkpoint=step)
    outcome, shown = launcher.launch(made, places(2), tmp_path / "run")
    message = describe(outcome)
    assert shown.count("the checkpoint of step 4 could not be written: ") == 1, shown
    assert "  the checkpoint of step 6 could not be written: " in message, message
    assert f"note: no space is left on the device of {disk}/kept" in message
    assert len(message) < 2000 and "Traceback" not in message, message
    (found,) = [files.look(path) for path in files.checkpoints_in(str(disk / "kept"))]
    assert found.manifest is not None and found.manifest.step == 2 and not files.damage(found.path, found.manifest)
    (disk / "filling").unlink()
    again, _ = launcher.launch(job(tmp_path, "pass", checkpoint=step), places(2), tmp_path / "run")
    assert again.is_complete, describe(again)
    steps = [record["step"] for record in read_metrics(str(tmp_path / "run")) if record["split"] == "train"]
    assert steps == [1, 2, 3, 4, 5, 6]


def test_records_are_written_when_there_is_room_again(disk: Path) -> None:
    said: list[str] = []
    records = Records(str(disk), tell=said.append)
    filling = fill(disk)
    lines = [{"step": step, "split": "train", "loss": 1 / step} for step in range(1, 200)]
    for line in lines[:-1]:
        records.write(line)
    assert said == [f"{disk}/metrics.jsonl cannot be written (No space left on device); the training goes on"]
    filling.unlink()
    records.write(lines[-1])
    records.close()
    assert read_metrics(str(disk)) == lines and len(said) == 1


def test_records_that_are_lost_are_counted(disk: Path) -> None:
    said: list[str] = []
    records = Records(str(disk), tell=said.append)
    fill(disk)
    for step in range(1, 4):
        records.write({"step": step, "split": "train", "loss": 0.5})
    records.close()
    assert said[1:] == [f"{disk}/metrics.jsonl lacks 3 lines, which could not be written"]
