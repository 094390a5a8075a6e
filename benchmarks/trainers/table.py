"""A step of dslc, Accelerate, Lightning and DeepSpeed beside one of the hand-written loop, in turn.

`python -m benchmarks trainers` measures what the environment has, and writes the table of README.md anew.
"""

from __future__ import annotations

import datetime
import json
import os
import platform
import re
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

from benchmarks.measure import compare_all
from benchmarks.page_blocks import write_block

HERE = Path(__file__).parent.parent
INSTALL = "pip install accelerate transformers lightning deepspeed"  # Accelerate needs transformers for a tensor axis
STEPS, RANKS = 21, 2
NEAR = 0.01  # how far a tool's last loss may be from that of the hand-written loop, as a fraction
TrainDslc = Callable[..., list[dict[str, float]]]


@dataclass(frozen=True)
class Row:
    title: str
    what: str
    way: str  # as in trainers/task.py
    by_hand: tuple[str, ...] = ()
    settings: tuple[str, ...] = ()  # of the job


ROWS = (
    Row("gpt, data", "gpt", "ddp"),
    Row("convnet, data", "convnet", "ddp"),
    Row("gpt, parameters sharded", "gpt", "zero", ("--zero", "3"), ("parallelism.zero=3",)),
    Row("gpt, tensor 2", "gpt", "tensor", ("--tensor",), ("parallelism.tensor=2",)),
    Row(
        "gpt, pipeline 2, 8 micro-batches",
        "gpt",
        "pipeline",
        ("--pipeline",),
        ("parallelism.pipeline=2", "parallelism.microbatches=8"),
    ),
)
TOOLS = {"Accelerate": "accelerate", "Lightning": "lightning", "DeepSpeed": "deepspeed"}
# What tools cannot do on CPUs. These run once, and the table has the line of the output that matches.
REFUSALS = {
    ("Accelerate", "zero"): r"on CPUs Accelerate ignores its plugin for FSDP.*",
    ("Accelerate", "tensor"): r"ParallelismConfig is only compatible.*",
}
UNSUPPORTED = {
    ("Accelerate", "pipeline"): "its `prepare_pippy` is for inference alone",
    ("Lightning", "pipeline"): "it has no strategy for pipelines",
}


@dataclass
class Side:
    """Runs a training, and keeps its last loss."""

    train: Callable[[], tuple[float, float]]  # returns the milliseconds of a step, and the loss
    loss: float = 0.0

    def __call__(self) -> float:
        milliseconds, self.loss = self.train()
        return milliseconds


def start_ranks(command: Sequence[str], environment: Mapping[str, str]) -> tuple[int, str]:
    """Runs the ranks with the variables of torchrun, and returns the first status that is not 0, and the output.
    torchrun itself would import torch first, which is a quarter of such a run.
    """
    with socket.create_server(("localhost", 0)) as free:
        port = free.getsockname()[1]
    shared = {
        "MASTER_ADDR": "localhost", "MASTER_PORT": port, "WORLD_SIZE": RANKS, "LOCAL_WORLD_SIZE": RANKS,
        "OMP_NUM_THREADS": 1, "TORCHELASTIC_RUN_ID": "trainers",
    }  # fmt: skip
    with tempfile.TemporaryFile("w+") as output:
        ranks = []
        for rank in range(RANKS):
            own = {key: str(value) for key, value in (shared | {"RANK": rank, "LOCAL_RANK": rank}).items()}
            ranks.append(
                subprocess.Popen(
                    command, env={**environment, **own}, cwd=HERE.parent, stdout=output, stderr=subprocess.STDOUT
                )
            )
        while any(rank.poll() is None for rank in ranks) and not any(rank.poll() for rank in ranks):
            time.sleep(0.05)
        status = next((rank.returncode for rank in ranks if rank.returncode), 0)
        for process in ranks:
            process.kill()
            process.wait()
        output.seek(0)
        return status, output.read()


def train_ranks(environment: Mapping[str, str], module: str, *arguments: str) -> tuple[float, float]:
    with tempfile.TemporaryDirectory() as folder:
        out = os.path.join(folder, "result.json")
        command = [sys.executable, "-m", module, *arguments, "--steps", str(STEPS), "--out", out]
        status, output = start_ranks(command, environment)
        if status:
            sys.exit(f"{' '.join(command)} failed:\n{output}")
        result = json.loads(Path(out).read_text())
        return 1000 * (result["last"] - result["first"]) / (STEPS - 1), result["loss"]


def train_job(train_dslc: TrainDslc, row: Row) -> tuple[float, float]:
    first, *_, last = train_dslc(row.what, *row.settings, f"train.steps={STEPS}")
    return 1000 * (last["seconds"] - first["seconds"]) / (last["step"] - first["step"]), last["loss"]


def refusal(environment: Mapping[str, str], tool: str, row: Row) -> str:
    """Returns why a tool cannot do what the row does on CPUs, in its own words."""
    if (tool, row.way) in UNSUPPORTED:
        return UNSUPPORTED[tool, row.way]
    with tempfile.TemporaryDirectory() as folder:
        arguments = (row.what, row.way, "--steps", "2", "--out", os.path.join(folder, "result.json"))
        status, output = start_ranks([sys.executable, "-m", loop_of(tool), *arguments], environment)
    reason = re.search(REFUSALS[tool, row.way], output)
    if not status or reason is None:
        sys.exit(f"{row.title}: {tool} was expected to refuse, and ended with {status}:\n{output}")
    return reason[0].strip()


def loop_of(tool: str) -> str:
    return f"benchmarks.trainers.{TOOLS[tool]}_loop"


def installed() -> dict[str, str]:
    """Returns the versions of the tools that the environment has."""
    versions = {}
    for tool, package in TOOLS.items():
        try:
            versions[tool] = version(package)
        except PackageNotFoundError:
            print(f"{tool} is not installed: {INSTALL}", flush=True)
    return versions


def measure_row(
    row: Row, tools: Sequence[str], pairs: int, train_dslc: TrainDslc, environment: Mapping[str, str]
) -> tuple[str, list[str]]:
    """Returns the row of the table, and what tools cannot do of it."""
    by_hand = Side(partial(train_ranks, environment, "benchmarks.handwritten", row.what, *row.by_hand))
    sides = {"dslc": Side(partial(train_job, train_dslc, row))}
    reasons = {}
    for tool in tools:
        if (tool, row.way) in REFUSALS | UNSUPPORTED:
            reasons[tool] = refusal(environment, tool, row)
        else:
            sides[tool] = Side(partial(train_ranks, environment, loop_of(tool), row.what, row.way))
    ratios = compare_all(row.title, sides, by_hand, pairs=pairs, unit="ms")
    for name, side in sides.items():
        print(f"{ratios[name]}; loss {side.loss:.4f}, by hand {by_hand.loss:.4f}", flush=True)
        if name in tools and abs(side.loss / by_hand.loss - 1) > NEAR:
            sys.exit(f"{row.title}: {name} does not train as the hand-written loop does")
    milliseconds = ratios["dslc"].theirs
    cells = [row.title, f"{milliseconds:.1f} ms, loss {by_hand.loss:.3f}"]
    for name in ("dslc", *TOOLS):
        if name in sides:
            r = ratios[name]
            loss = f", loss {sides[name].loss:.3f}" if name == "dslc" else ""  # of tools it is that of the loop
            cells.append(f"{r.median:.3f} [{r.low:.3f}, {r.high:.3f}]{loss}")
        else:
            cells.append("cannot on CPUs" if name in reasons else "not installed")
    notes = [f"- {row.title}, {tool}: {reason}" for tool, reason in reasons.items()]
    return f"| {' | '.join(cells)} |", notes


def machine() -> str:
    """Returns the processor, and what else bears on times."""
    text = Path("/proc/cpuinfo").read_text() if os.path.exists("/proc/cpuinfo") else ""
    model = re.search(r"^model name\s*: (.*)$", text, re.MULTILINE)
    name = model[1].strip() if model else platform.processor()
    realtime = os.sched_getscheduler(0) in (os.SCHED_FIFO, os.SCHED_RR)
    load = f"load {os.getloadavg()[0]:.0f} at the start" + (", all sides at real-time priority" if realtime else "")
    return f"{name}, {len(os.sched_getaffinity(0))} cores, {load}"


def write_table(
    pairs: int, train_dslc: TrainDslc, environment: Mapping[str, str], path: Path = HERE / "README.md"
) -> None:
    place, versions = machine(), installed()
    lines, notes = [], []
    for row in ROWS:
        line, reasons = measure_row(row, list(versions), pairs, train_dslc, environment)
        lines.append(line)
        notes += reasons
    names = [f"{tool} {versions.get(tool, '')}".strip() for tool in TOOLS]
    software = f"torch {version('torch')}, Python {platform.python_version()}"
    title = f"{place}; {software}, {datetime.date.today()}; {pairs} pairs.\n"
    head = f"| {' | '.join(['step', 'by hand', 'dslc', *names])} |\n" + "| --- " * (3 + len(names)) + "|\n"
    table = head + "".join(f"{line}\n" for line in lines)
    cannot = "\nWhat tools cannot do on CPUs:\n\n" + "".join(f"{note}\n" for note in notes) if notes else ""
    write_block(path, "trainers", f"{title}\n{table}{cannot}")
