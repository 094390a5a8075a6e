"""Scripted stalls and ends of small trainings, and whether the cause that is named is right.

Each case draws a rank, a step, a number of ranks and an engine (`ddp` or `fsdp`). At that step the rank of a case does

    sleep       nothing, in the forward pass                     skip   a step without one of the modules
    hook        nothing, in a hook of the backward pass          kill   SIGKILL to itself
    data        nothing, in the data set                         stop   SIGSTOP to itself
    worker      nothing, in a data worker                        cut    takes the network of all ranks away
    raise       raises an exception, after which others wait
    build       nothing, where the model is built                source nothing, where the data set is opened
    count       takes the network away before the others have counted their targets

A hundred cases are between the sixth step and the thirtieth, as are those of `LATER`; those of `EARLY` are before the
second step. A stall lasts until the launcher has reported it: who stalls reads a pipe that nobody writes, and the
launcher opens and removes it with its report. The limit of a stall is `LIMIT` here, so that a case takes seconds. A
case is `right` if what the launcher prints names the rank, the node and the line; `wrong` if it names another rank;
else `open`.
"""

from __future__ import annotations

import contextlib
import os
import random
import re
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

LIMIT, HANGS = 2.0, 300.0
KINDS = {"sleep": 20, "hook": 12, "data": 12, "worker": 8, "skip": 12, "kill": 12, "stop": 8, "cut": 8, "raise": 8}
EARLY = {"build": 5, "source": 5, "sleep": 6, "hook": 3, "data": 4, "cut": 2}
LATER = {"count": 2}
CUTS = ("cut", "count")
CODE = """
import os, pathlib, signal, subprocess, threading, torch

RANK, CASE, PIPE = int(os.environ.get("RANK", -1)), {case!r}, pathlib.Path({pipe!r})
HELPERS = []  # a process of the user's, which no stall ends

def strikes(step):
    return RANK == {rank} and step == {step}

class Net(torch.nn.Module):
    def __init__(self):
        super().__init__()
        if RANK == {rank} and CASE == "build":
            PIPE.exists() and PIPE.read_bytes()  # the line of build
        self.one, self.two, self.head = (torch.nn.Linear(64, n) for n in (64, 64, 10))
        self.step = 0

    def forward(self, x):
        self.step += self.training
        Data.steps = self.step
        x = x.flatten(1)
        if CASE == "worker" and RANK >= 0 and self.training:
            HELPERS or HELPERS.append(subprocess.Popen(["sleep", "60"]))
            assert HELPERS[0].poll() is None, "a process of the user's was ended"
        now = self.training and strikes(self.step)
        if now and CASE == "hook" and torch.is_grad_enabled():  # the first step compares an output beforehand
            x = self.one(x)
            x.register_hook(pause)
        if now and CASE in ("sleep", "kill", "stop", "raise", "cut", "count"):
            globals()["do_" + CASE]()
        x = self.one(x).relu()
        if not (now and CASE == "skip"):
            x = self.two(x).relu()
        return self.head(x)

def pause(gradient=None):
    PIPE.exists() and PIPE.read_bytes()  # the line of hook

def do_sleep():
    PIPE.exists() and PIPE.read_bytes()  # the line of sleep

def do_kill():
    os.kill(os.getpid(), signal.SIGKILL)

def do_stop():
    os.system(f"(cat {{PIPE}}; kill -CONT {{os.getpid()}}) &")
    os.kill(os.getpid(), signal.SIGSTOP)

def do_raise():
    raise ValueError("planted")  # the line of raise

def do_cut():
    os.system(f"ip link set lo down; (cat {{PIPE}}; ip link set lo up) &")

def do_count():
    do_cut()
    for rank in set(range({ranks})) - {{RANK}}:
        pipe_of(rank).write_bytes(b"")

def pipe_of(rank):  # at which another rank waits, before it counts, until the network is cut
    return PIPE.with_name(f"{{PIPE.name}}-{{rank}}")

class Data(torch.utils.data.Dataset):
    steps = 0  # that this process has begun

    def __init__(self):
        self.drawn = 0
        if RANK == {rank} and CASE == "source":
            PIPE.exists() and PIPE.read_bytes()  # the line of source
        self.x = torch.randn(4096, 1, 8, 8, generator=torch.Generator().manual_seed(1))

    def __len__(self):
        return len(self.x)

    def __getitem__(self, n):
        self.drawn += 1
        strikes_now = Data.steps == {step} - 1 if CASE == "data" else CASE == "worker" and self.drawn == {sample}
        if CASE == "count" and RANK not in (-1, {rank}) and Data.steps == {step} - 1:
            Data.steps += 1
            pipe_of(RANK).read_bytes()
        if RANK == {rank} and strikes_now:
            Data.steps += 1
            PIPE.exists() and PIPE.read_bytes()  # the line of data
        return self.x[n], n % 10
"""
JOB = """
model {{
  network = python("{module}:Net")
  loss    = cross_entropy()
}}
data {{
  source  = python("{module}:Data")
  batch   = {batch}
  workers = {workers}
}}
devices {{
  cpus = {ranks}
}}
parallelism {{
  zero = {zero}
}}
train {{
  steps     = 40
  optimizer = sgd(lr = 0.01)
}}
"""


LAUNCHER = """
import contextlib, os, sys
from dslc.main import main
from dslc.runtime import stall_watch
from dslc.runtime.stall_watch import StallWatch

stall_watch.LIMIT = {limit}
look = StallWatch.look

def look_and_end(watch):
    cause = look(watch)
    if cause:
        with contextlib.suppress(OSError):  # nobody reads it
            os.close(os.open({pipe!r}, os.O_WRONLY | os.O_NONBLOCK))
            os.unlink({pipe!r})
    return cause

StallWatch.look = look_and_end
sys.exit(main(sys.argv[1:]))
"""


@dataclass(frozen=True)
class Case:
    """`rank` of `ranks` does what its `kind` says, at `step`."""

    kind: str
    number: int
    rank: int
    ranks: int
    step: int
    zero: int

    def __str__(self) -> str:
        return f"{self.kind} on rank {self.rank} of {self.ranks} at step {self.step}, zero = {self.zero}"


def drawn_cases(seed: int = 7) -> list[Case]:
    """Returns the cases. A step without a module is none of those whose order is compared before."""
    draw, cases = random.Random(seed), list[Case]()
    for kind, count in KINDS.items():
        for _ in range(count):
            ranks = draw.choice((2, 2, 3))
            step = draw.choice((9, 11, 13, 18, 21)) if kind == "skip" else draw.randint(6, 30)
            zero = draw.choice((0, 3))
            cases.append(Case(kind, len(cases), draw.randrange(ranks), ranks, step, zero))
    draw.shuffle(cases)
    for kind, count in EARLY.items():
        for _ in range(count):
            ranks = draw.choice((2, 2, 3))
            cases.append(Case(kind, len(cases), draw.randrange(ranks), ranks, 1, draw.choice((0, 3))))
    for kind, count in LATER.items():
        for _ in range(count):
            ranks, step = draw.choice((2, 2, 3)), draw.randint(6, 30)
            # Without shards, whose gathers come before the rank is in its forward pass.
            cases.append(Case(kind, len(cases), draw.randrange(ranks), ranks, step, zero=0))
    return cases


def line_of(folder: Path, module: str, kind: str) -> str:
    """Returns the line at which a case waits, `net.py:31`; "" for a kind that has none."""
    mark = f"# the line of {'data' if kind == 'worker' else kind}"
    lines = (folder / f"{module}.py").read_text().splitlines()
    return next((f"{module}.py:{n}" for n, line in enumerate(lines, 1) if line.endswith(mark)), "")


def judge(case: Case, said: str, line: str) -> str:
    """Returns whether what a launcher has `said` is right, wrong, or leaves the cause open."""
    rank, step = f"rank {case.rank}", f"step {case.step}"
    forward = f"in the forward pass of {step}"
    loading = r"loading the samples of step \d+" + "|opening its data" * (case.step == 1)  # which looks at a sample
    exchange = "the all-reduce of the gradients" if case.zero == 0 else "the all-gather|the reduce-scatter"
    patterns = {
        "sleep": rf"{rank} is before .+{forward}.+waited in it.+{rank}'s last line of Python is \S*{line}",
        "hook": rf"{rank} is (before .+)?in the (forward|backward) pass of {step}.+last line of Python is \S*{line}",
        "data": rf"{rank} is .*({loading}).+{rank}'s last line of Python is \S*{line}",
        "build": rf"{rank} is .*building the model .+{rank}'s last line of Python is \S*{line}",
        "source": rf"{rank} is .*opening its data .+{rank}'s last line of Python is \S*{line}",
        "worker": rf"{rank} is .*loading the samples of step \d+.+{rank}'s last line of Python is \S*{line}",
        "skip": rf"{rank} did not take part in ({exchange})|training failed on {rank} at step ({case.step}|"
        rf"{case.step + 1})\b",
        "kill": rf"training failed on {rank} at {step}\b(.|\n)+SIGKILL(.|\n)+{forward}",
        "stop": rf"{rank} is stopped .+{forward}",
        "cut": rf"all ranks wait in the (all-reduce|all-gather|reduce-scatter).*, in the \w+ pass of {step} \(.*is cut",
        "count": rf"all ranks wait in the all-reduce of the count of targets, in the forward pass of {step} \(.*is cut",
        "raise": rf"training failed on {rank} at {step}\b(.|\n)+line {line.partition(':')[2] or 0}\b",
    }
    if re.search(patterns[case.kind], said):
        return "right"
    others = "|".join(str(other) for other in range(case.ranks) if other != case.rank)
    named = (
        rf"(^|: )rank ({others}) (is before|is past|is stopped|did not take part|was ended)|failed on rank ({others})"
    )
    return "wrong" if re.search(named, said, re.M) else "open"


def run_case(case: Case, folder: Path) -> tuple[str, str]:
    """Returns how a case was judged, and what the launcher said."""
    module = f"net{case.number}"
    batch, workers = 8 * case.ranks, int(case.kind == "worker")
    pipe, sample = str(folder / f"pipe{case.number}"), 8 * (case.step - 1) + 1
    for path in (pipe, *(f"{pipe}-{rank}" for rank in range(case.ranks))):
        os.mkfifo(path)
    code = CODE.format(case=case.kind, rank=case.rank, ranks=case.ranks, step=case.step, pipe=pipe, sample=sample)
    (folder / f"{module}.py").write_text(code)
    job = folder / f"{module}.plt"
    job.write_text(JOB.format(module=module, batch=batch, workers=workers, ranks=case.ranks, zero=case.zero))
    words = [
        sys.executable,
        "-c",
        LAUNCHER.format(limit=LIMIT, pipe=pipe),
        "run",
        str(job),
        "--out",
        str(folder / f"run{case.number}"),
    ]
    words += ["--set", "launch.timeout=30s"]
    if case.kind in CUTS:
        words += ["--set", "devices.backend=gloo"]  # shared memory needs no network
    quiet = {**os.environ, "OMP_NUM_THREADS": "1", "OMP_WAIT_POLICY": "PASSIVE", "CI": "1"}
    apart = ["unshare", "--net", "sh", "-c", 'ip link set lo up; exec "$@"', "sh"]  # as root
    command = [*apart, *words] if case.kind in CUTS else words
    with contextlib.suppress(subprocess.TimeoutExpired):
        told = subprocess.run(command, cwd=folder, env=quiet, capture_output=True, text=True, timeout=HANGS)
        said = told.stdout + told.stderr
        return judge(case, said, line_of(folder, module, case.kind)), said
    return "open", "it hangs"
