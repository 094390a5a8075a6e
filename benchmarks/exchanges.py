"""Exchanges on two hosts whose link is limited: the time of a step, what it sends, and what the plan said of both.

The hosts are network namespaces, each with one rank on one core (benchmarks/jobs/wide.plt). Beside each exchange are
the plan's prediction, from the time of a step in one process and the rate of the link; torch's own communication hook
of the same kind, where there is one (hooked.py); and the payload that the network interface has counted. A second table
has the loss of `examples/gpt_cpu.plt` and the accuracy of `examples/digits.plt` after 300 steps on two ranks here.

`python -m benchmarks exchanges` writes both tables into docs/exchanges.md.
"""

from __future__ import annotations

import json
import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.page_blocks import write_block

HERE = Path(__file__).parent
ROOT = HERE.parent
sys.path.insert(0, str(ROOT / "tests"))

from helpers.hosts import TOOL, local_command, namespaces, why_none  # noqa: E402
from helpers.paths import HELPERS  # noqa: E402

PAGE = ROOT / "docs" / "exchanges.md"
RATES = {"100mbit": "100 Mbit/s", "1gbit": "1 Gbit/s", "": "unlimited"}
FIRST, STEPS = 8, 24  # a step is timed from the end of step 8 to that of step 24, the end of whole periods
# As written in a job, and the settings that say so.
EXCHANGES: dict[str, tuple[str, ...]] = {
    "allreduce()": (),
    **{
        written: (f"parallelism.gradients={written}",)
        for written in (
            *("fp16()", "bf16()", "powersgd(rank = 2)", "bytegrad()"),
            *("decentralized()", "decentralized(peers = shift_one)", "low_precision_decentralized()"),
            *("local_sgd(period = 8)", "diloco(period = 8)", "async_average(interval = 100ms)"),
        )
    },
    # Times alone count here: so early a second moment is too small to divide by.
    "qadam(warmup = 5)": ("train.optimizer=qadam(lr = 1e-9, warmup = 5)",),
    "onebit_adam(freeze = 5)": ("train.optimizer=onebit_adam(lr = 1e-9, freeze = 5)",),
}
TORCHS = {"allreduce()": "none", "fp16()": "fp16", "bf16()": "bf16", "powersgd(rank = 2)": "powersgd"}
# 300 steps of each example on two ranks, with as many steps of exact sums as a user would begin with.
EXAMPLES = {
    "gpt_cpu": ("parallelism.zero=0", "train.clip=none", "train.precision=fp32", "memory.recompute=none"),
    "digits": (),
}
LONG = {
    "diloco(period = 8)": ("parallelism.gradients=diloco(period = 20)",),
    "qadam(warmup = 5)": ("train.optimizer=qadam(lr = 1e-3, warmup = 60)",),
    "onebit_adam(freeze = 5)": ("train.optimizer=onebit_adam(lr = 1e-3, freeze = 60)",),
}


@dataclass(frozen=True)
class Timed:
    """A step: seconds, and bytes that the first host sent in it."""

    seconds: float
    sent: float


def main() -> None:
    if reason := why_none():
        sys.exit(reason)
    with tempfile.TemporaryDirectory() as folder:
        write_block(PAGE, "times", _times(Path(folder)))
        write_block(PAGE, "results", _results(Path(folder)))


# ----------------------------------------------------------------------------------------------------------- times


def _times(folder: Path) -> str:
    alone = _single_process_seconds(folder)
    rows = []
    found: dict[tuple[str, str], Timed] = {}
    hooked: dict[tuple[str, str], float] = {}
    for rate in RATES:
        with namespaces(2, rate):
            for written, settings in EXCHANGES.items():
                found[rate, written] = _on_hosts(folder / f"{rate}-{len(found)}", settings)
                if written in TORCHS:
                    hooked[rate, written] = _by_hand(folder / f"{rate}-{len(found)}.json", TORCHS[written])
                print(rate, written, found[rate, written], hooked.get((rate, written)), flush=True)
    for written, settings in EXCHANGES.items():
        row = [f"`{written}`"]
        for rate in RATES:
            timed, torchs = found[rate, written], hooked.get((rate, written))
            said = _predicted(folder, settings, rate, alone) if rate else None
            told = f"{1000 * timed.seconds:.0f} ms"
            told += f" ({1000 * said[0]:.0f})" if said else ""
            row += [told, f"{1000 * torchs:.0f} ms" if torchs else ""]
        planned = _predicted(folder, settings, "1gbit", alone)
        row.append(f"{timed.sent / 1e6:.3f} MB ({planned[1] / 1e6:.3f})")
        rows.append("| " + " | ".join(row) + " |")
    head = "| exchange | " + " | ".join(f"{shown} | torch's hook" for shown in RATES.values()) + " | sent in a step |"
    return "\n".join([head, "| --- |" + " --- |" * 7, *rows, ""])


def _run(commands: Sequence[Sequence[str]]) -> None:
    running = [subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT) for command in commands]
    for process in running:
        said, _ = process.communicate(timeout=300)
        if process.returncode:
            sys.exit(said.decode())


def _job(folder: Path) -> Path:
    folder.mkdir(exist_ok=True)
    for file in (HERE / "jobs" / "wide.plt", HELPERS / "counters.py"):
        shutil.copy(file, folder)
    return folder / "wide.plt"


def _on_hosts(folder: Path, settings: Sequence[str]) -> Timed:
    job, out = _job(folder), folder / "run"
    words = ["run", str(job), "--out", str(out), "--rendezvous", "host1"]
    for setting in ('train.hooks=python("counters:Counters", ranks = all)', *settings):
        words += ["--set", setting]
    _run([[str(TOOL), "run", str(n), "taskset", "-c", str(n - 1), *local_command(words)] for n in (1, 2)])
    lines = [json.loads(line) for line in (out / "sent-0.jsonl").read_text().splitlines()]
    first, last = lines[FIRST - 1], lines[STEPS - 1]
    steps = STEPS - FIRST
    return Timed((last["seconds"] - first["seconds"]) / steps, (last["sent"] - first["sent"]) / steps)


def _by_hand(out: Path, kind: str) -> float:
    def command(n: int) -> list[str]:
        meet = [f"RANK={n - 1}", "WORLD_SIZE=2", "MASTER_ADDR=host1", "MASTER_PORT=29400"]
        around = ["env", "GLOO_SOCKET_IFNAME=eth0", "OMP_NUM_THREADS=1", *meet]
        return [*around, sys.executable, str(HERE / "hooked.py"), kind, str(out)]

    _run([[str(TOOL), "run", str(n), "taskset", "-c", str(n - 1), *command(n)] for n in (1, 2)])
    seconds = json.loads(out.read_text())
    return float(seconds[STEPS - 1] - seconds[FIRST - 1]) / (STEPS - FIRST)


def _single_process_seconds(folder: Path) -> float:
    """Returns the seconds of a step of a half batch in one process on one core."""
    job, out = _job(folder / "alone"), folder / "alone" / "run"
    words = ["run", str(job), "--out", str(out), "--set", "devices.nodes=1", "--set", "data.batch=32"]
    _run([["taskset", "-c", "0", *local_command(words)]])
    lines = [json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines()]
    return float(lines[STEPS - 1]["seconds"] - lines[FIRST - 1]["seconds"]) / (STEPS - FIRST)


def _predicted(folder: Path, settings: Sequence[str], rate: str, alone: float) -> tuple[float, float]:
    """Returns the seconds of a step, and the bytes that a host sends in it, by the plan."""
    catalogue = folder / "catalogue.toml"
    network = {"100mbit": "0.1Gbps", "1gbit": "1Gbps"}[rate]

    def plan(fp32: float) -> dict[str, Any]:
        catalogue.write_text(f'[cpu]\nfp32 = "{fp32:.6f}TFLOPS"\nlink = "10GBps"\nnetwork = "{network}"\n')
        words = ["plan", str(HERE / "jobs" / "wide.plt"), "--summary", "--set", f"devices.catalogue={catalogue}"]
        for setting in settings:
            words += ["--set", setting]
        made = subprocess.run(local_command(words), check=True, capture_output=True, text=True)
        found: dict[str, Any] = json.loads(made.stdout)
        return found

    step = plan(1.0)["step"]
    found = plan(step["arithmetic"] / alone)  # the rate at which one process works
    return float(found["step"]["step_time"]), float(found["step"]["between"])


# --------------------------------------------------------------------------------------------------------- results


def _results(folder: Path) -> str:
    rows: list[str] = []
    for written, settings in EXCHANGES.items():
        told = [f"`{_exchange_text(written)}`"]
        for example, changed in EXAMPLES.items():
            out = folder / f"{example}-{len(rows)}"
            words = ["run", str(ROOT / "examples" / f"{example}.plt"), "--out", str(out)]
            own = ("train.steps=300", "devices.cpus=2", *changed, *LONG.get(written, settings))
            if example == "digits" and "adam" in written:
                own = tuple(each.replace("1e-3", "3e-3, eps = 1e-4") for each in own)  # docs/exchanges.md says why
            for setting in own:
                words += ["--set", setting]
            _run([local_command(words)])
            last = [json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines()][-1]
            told.append(f"{last['loss']:.4f}" if example == "gpt_cpu" else f"{100 * last['accuracy']:.1f} %")
        print(*told, flush=True)
        rows.append("| " + " | ".join(told) + " |")
    head = "| exchange | `gpt_cpu`: loss of the validation split | `digits`: accuracy of it |"
    return "\n".join([head, "| --- | --- | --- |", *rows, ""])


def _exchange_text(written: str) -> str:
    changed = LONG.get(written)
    if changed is None:
        return written
    return re.sub(r"^[^=]*=|lr = 1e-3, ", "", changed[0])
