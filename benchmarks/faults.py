"""Faults of a training on three hosts, a job beside a hand-written loop under torchrun: which trainings survive them.

Each training is hit by one fault, or by two that follow each other, of the same draws on both sides; the hosts are
network namespaces (tests/instruments/drawn_faults.py). It is `trained` if every launcher ends with 0, and
`metrics.jsonl` has every step once with the losses of the undisturbed training, to 1e-5. One that has not ended
`LIMIT` seconds after its last fault `hangs`.
"""

from __future__ import annotations

import json
import os
import random
import subprocess
import sys
import tempfile
from collections import Counter
from collections.abc import Sequence
from contextlib import ExitStack, suppress
from functools import partial
from itertools import chain, count, islice
from pathlib import Path

HERE = Path(__file__).parent
sys.path.insert(0, str(HERE.parent / "tests"))

from helpers.hosts import TOOL, local_command, namespaces, why_none  # noqa: E402
from helpers.launcher import Command  # noqa: E402
from instruments.drawn_faults import KINDS, Fault, Struck, drawn, started_ranks_of  # noqa: E402

HOSTS, STEPS, LIMIT = 3, {"dslc": 500, "torchrun": 2000}, 90.0
JOB = """
model {
  network = [flatten(), linear(16), relu(), linear(10)]
  loss    = cross_entropy()
}
data {
  source = digits()
  batch  = 48
}
devices {
  nodes = 3
  cpus  = 1
}
train {
  steps     = 500
  optimizer = sgd(lr = 0.1, momentum = 0.9)
}
log {
  every       = 1 step
  tensorboard = false
}
checkpoint {
  every = 20 steps
}
launch {
  restarts = 100
  timeout  = 25s
}
"""


def command(side: str, folder: Path) -> list[str]:
    if side == "dslc":
        job = folder / "job.plt"
        job.write_text(JOB)
        return local_command(["run", str(job), "--out", str(folder / "run"), "--rendezvous", "host1"])
    agent = [sys.executable, "-m", "torch.distributed.run", "--nnodes", "3", "--nproc-per-node", "1"]
    agent += ["--max-restarts", "100"]
    meet = ["--rdzv-backend", "c10d", "--rdzv-endpoint", "host1:29400", "--rdzv-id", "faults"]
    return [*agent, *meet, str(HERE / "surviving.py"), str(folder / "run"), str(STEPS[side])]


def ranks(launcher: Command) -> list[int]:
    """Returns the processes of the ranks that a launcher, of either side, has started and that have begun."""
    with suppress(OSError):
        children = Path(f"/proc/{launcher.process.pid}/task/{launcher.process.pid}/children").read_text().split()
        loops = [int(c) for c in children if b"surviving.py" in Path(f"/proc/{c}/cmdline").read_bytes()]
        return loops or started_ranks_of(launcher)
    return []


def losses(run: Path) -> list[tuple[int, float]]:
    lines = map(json.loads, (run / "metrics.jsonl").read_text().splitlines())
    return [(line["step"], line["loss"]) for line in lines if line.get("split", "train") == "train"]


def train(side: str, folder: Path, faults: Sequence[Fault], wanted: list[tuple[int, float]]) -> str:
    """Returns what a training under these faults comes to."""
    (folder / "run").mkdir(parents=True)
    words = [[str(TOOL), "run", str(n), *command(side, folder)] for n in range(1, HOSTS + 1)]
    with namespaces(HOSTS), ExitStack() as around:
        struck = Struck(
            words, folder / "run", STEPS[side] - 60, folder / "said", around, ranks, ends_ranks=side == "dslc"
        )
        for fault in faults:
            struck.strike(fault)
        if len(struck.hit) < len(faults):
            print(f"{side}: only {len(struck.hit)} of {len(faults)} faults came in time", file=sys.stderr)
        try:
            ends = struck.ends(LIMIT)
        except subprocess.TimeoutExpired:
            return "hangs"
        left = struck.left()
    if any(ends):
        return "fails"
    found = losses(folder / "run")
    same = [step for step, _ in found] == list(range(1, STEPS[side] + 1)) and all(
        abs(one - other) <= 1e-5 for (_, one), (_, other) in zip(found, wanted or found, strict=True)
    )
    return ("trained, with processes left" if left else "trained") if same else "ends with a wrong curve"


def drawn_cases(seed: int) -> list[list[Fault]]:
    """Returns 14 cases: a single fault of each kind, and then two of each, of which the second follows at once, or hits
    the restart.
    """
    draw, single, double = random.Random(seed), list[list[Fault]](), list[list[Fault]]()
    for kind in KINDS:
        single.append([drawn(draw, HOSTS, {kind: 1}, first=True)])
        second = drawn(draw, HOSTS)
        while second.moment not in ("restart", "at once"):
            second = drawn(draw, HOSTS)
        double.append([drawn(draw, HOSTS, {kind: 1}, first=True), second])
    return [*single, *double]


def compare(most: int, sides: Sequence[str] = ("dslc", "torchrun")) -> None:
    """Prints how each training ends under the first `most` of the cases, and the counts."""
    if why := why_none():
        sys.exit(f"faults: {why}")
    os.environ["OMP_WAIT_POLICY"] = "PASSIVE"
    show = partial(print, flush=True)
    counts = {side: Counter[str]() for side in sides}
    wanted = dict[str, list[tuple[int, float]]]()
    with tempfile.TemporaryDirectory() as folder:
        for side in sides:
            whole = Path(folder, f"{side}-whole")
            show(f"{side}, undisturbed: {train(side, whole, [], [])}")
            wanted[side] = losses(whole / "run")
        for n, faults in enumerate(islice(chain.from_iterable(map(drawn_cases, count())), most)):
            for side in sides:
                end = train(side, Path(folder, f"{side}-{n}"), faults, wanted[side])
                counts[side][end] += 1
                show(f"{side}: {' + '.join(map(str, faults))}: {end}")
    for side, ends in counts.items():
        show(f"{side}: " + ", ".join(f"{times} of {ends.total()} {end}" for end, times in ends.most_common()))
