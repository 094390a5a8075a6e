"""Hostile run directories: files that another user may have left where a run writes its own.

NAMED                  run directories by name
drawn(seed)            returns a run directory; the same for the same seed
lay(forged, folder)    writes one
"""

from __future__ import annotations

import json
import os
import random
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

FILES = ("status.json", "submitted.json", "metrics.jsonl", "sweep.json", "program.json", "plan.json", ".dslc-lock",
         ".stop", ".restarts", ".launcher", "status.json.part", "sweep.csv", "sweep.csv.part", "report.json",
         "checkpoints", "checkpoints/step-00000001/manifest.json", "checkpoints/step-00000001/.metadata",
         "job.plt", "weights.safetensors", "logs")  # fmt: skip
VICTIM = "victim"  # a file beside the run directory, which no command may change
KEPT = b"kept as it is\n"


@dataclass(frozen=True)
class Forged:
    """The entries of a run directory: bytes, "fifo", "folder", or the target of a link behind "-> "."""

    entries: dict[str, bytes | str]


def lay(forged: Forged, folder: Path) -> Path:
    """Writes the run directory into an empty folder, beside the victim, and returns it."""
    (folder / VICTIM).write_bytes(KEPT)
    run = folder / "run"
    run.mkdir()
    for name, entry in forged.entries.items():
        path = run / name
        if not path.parent.is_dir():
            continue  # another entry takes the place of its folder
        if isinstance(entry, bytes):
            path.write_bytes(entry)
        elif entry == "fifo":
            os.mkfifo(path)
        elif entry == "folder":
            path.mkdir()
        else:
            os.symlink(entry.removeprefix("-> "), path)
    return run


STATUS = {"state": "running", "step": 5, "steps": 10, "metrics": {"loss": 1.5}, "host": "h", "process": 1}
SLURM = {"cluster": "slurm", "job": "12", "script": "/s"}
PODS = {"cluster": "kubernetes", "job": "job-0a1b2c", "script": "/s", "space": "ml"}
SWEEP = {"job": "j", "paths": ["train.seed"], "runs": [["seed=1", ["1"]]], "highest": {"loss": False}}
RECORD = {"step": 1, "split": "train", "samples": 8, "seconds": 1.0, "loss": 1.0}
WAITING = json.dumps({"state": "waiting"}).encode()
DEEP = b'{"a":' * 100_000


def _status(**changes: Any) -> Forged:
    return Forged({"status.json": json.dumps(STATUS | changes).encode()})


def _forge_submission(told: dict[str, Any], **changes: Any) -> Forged:
    return Forged({"status.json": WAITING, "submitted.json": json.dumps(told | changes).encode()})


NAMED: dict[str, Forged] = {
    "a deep status": Forged({"status.json": DEEP}),
    "a metric of text": _status(metrics={"a": "x"}),
    "metrics in a list": _status(metrics=[1]),
    "a metric of many digits": Forged({"status.json": b'{"state": "done", "metrics": {"a": ' + b"9" * 400 + b"}}"}),
    "a metric that is true": _status(metrics={"a": True}),
    "a step before the first": _status(step=-5),
    "a step that is true": _status(step=True),
    "seconds of nothing": _status(within="soon"),
    "another user's job": _forge_submission(SLURM, job="--user=root"),
    "another user's job behind one": _forge_submission(SLURM, job="12 --user=root"),
    "all jobs": _forge_submission(PODS, job="x", kind="--all pods"),
    "a name that is an option": _forge_submission(PODS, job="--all"),
    "a namespace that is an option": _forge_submission(PODS, space="--all-namespaces"),
    "a selector of all": _forge_submission(PODS, job="a,dslc-run!=a"),
    "another cluster": _forge_submission(SLURM, cluster="lsf"),
    "a stop that is a link": Forged({"status.json": json.dumps(STATUS).encode(), ".stop": "-> ../victim"}),
    "a status that is written through a link": Forged({"status.json": WAITING, "submitted.json":
        json.dumps(SLURM).encode(), "status.json.part": "-> ../victim"}),
    "a table that is written through a link": Forged({"sweep.json": json.dumps(SWEEP).encode(),
        "status.json": WAITING, "sweep.csv.part": "-> ../victim"}),
    "a sweep of other folders": Forged({"status.json": WAITING, "sweep.json": json.dumps(
        SWEEP | {"runs": [["../../..", ["1"]]]}).encode()}),
    "a lock that is a link": Forged({"status.json": WAITING, ".dslc-lock": "-> ../victim"}),
    "a line without end": Forged({"sweep.json": json.dumps(SWEEP | {"runs": [["checkpoints", ["1"]]]}).encode(),
        "status.json": WAITING, "checkpoints": "folder", "metrics.jsonl": b"x" * (3 << 20)}),
    **{f"{name} is {entry}": Forged({"status.json": json.dumps(STATUS).encode(), name: entry})
       for name in FILES[:7] for entry in ("fifo", "folder", "-> /dev/zero", f"-> {'run/' * 3}{'x' * 20}")},
}  # fmt: skip


def drawn(seed: int) -> Forged:
    """Draws a run directory whose files are each valid, damaged, or of another kind than a file."""
    draw = random.Random(seed)
    valid = {
        "status.json": STATUS, "submitted.json": draw.choice((SLURM, PODS)), "sweep.json": SWEEP,
        "metrics.jsonl": RECORD, "program.json": {},
        "plan.json": {"hash": "0", "graph": {"nodes": [["nodes", {"count": 1}]]}},
    }  # fmt: skip
    entries: dict[str, bytes | str] = {"checkpoints": "folder", "checkpoints/step-00000001": "folder"}
    for name in draw.sample(FILES, draw.randrange(2, len(FILES))):
        told = valid.get(name, {})
        kinds: tuple[Callable[[], bytes | str], ...] = (
            lambda told=told: json.dumps(told).encode() + b"\n",  # type: ignore[misc]
            lambda told=told: json.dumps(_forged(told, draw)).encode() + b"\n",  # type: ignore[misc]
            lambda told=told: json.dumps(_forged(told, draw)).encode() + b"\n",  # type: ignore[misc]
            lambda: draw.choice((DEEP, b"", b"\xff\xfe", b"9" * 10_000, b"[]", b"null", b"\0" * 100_000)),
            lambda: draw.choice(("fifo", "folder", "-> /dev/zero", "-> ../victim", "-> run", "-> /proc/self/mem")),
        )
        entries[name] = draw.choice(kinds)()
    if isinstance(entries["checkpoints"], bytes):
        entries.pop("checkpoints/step-00000001")
    return Forged(dict(sorted(entries.items(), key=lambda item: item[0].count("/"))))


_VALUES: tuple[Any, ...] = (
    *(None, True, -1, 0, 2**70, 1e308, float("nan"), float("inf"), [], {}, [[["x"]]], {"a": "x"}),
    *("", "--all", "a\nb", "../x", "\x1b[31m", "x" * 10_000),
)


def _forged(told: dict[str, Any], draw: random.Random) -> Any:
    """Changes some fields of valid JSON to values of any kind."""
    changed = dict(told) or {"a": 1}
    for name in draw.sample(list(changed), draw.randrange(1, len(changed) + 1)):
        if draw.random() < 0.2:
            del changed[name]
        else:
            changed[name] = draw.choice(_VALUES)
    return changed
