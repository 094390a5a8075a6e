"""No file in a run directory makes `dslc status` or `dslc stop` wait, fail, write elsewhere or run what it names."""

from __future__ import annotations

import json
import os
import random
import re
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from helpers.commands import dslc
from helpers.limited_process import LimitedProcess, faults_of
from instruments.hostile import written
from instruments.hostile_runs import KEPT, NAMED, PODS, SLURM, VICTIM, WAITING, Forged, drawn, lay

from dslc.launching.run_state import is_own_submission, read_submission
from dslc.runtime.process.run_status import ask_to_stop, is_asked_to_stop, read_status

COMMANDS = (["status", "run"], ["status", "run", "--json"], ["stop", "run", "--no-wait"], ["status", "."])
# What the commands of a cluster are given: names of jobs alone.
HARMLESS = re.compile(
    r"squeue --noheader --array --jobs=\d+ --format=%i\|%T\|%r|scancel \d+(_\d+)?"
    r"|kubectl (get pods|delete (job|jobset),service,configmap,secret) --selector dslc-run=[a-z0-9][a-z0-9-]*"
    r"( --output json)?( --namespace [a-z0-9][a-z0-9-]*)?"
)


class Cluster:
    """Runs commands of dslc in processes with little memory and time, beside commands of a cluster that write down
    their arguments.
    """

    def __init__(self, folder: Path) -> None:
        self.folder, self.log = folder / "at", folder / "log"
        self.folder.mkdir()
        (folder / "bin").mkdir()
        for name, answer in {"scancel": "", "squeue": "12|PENDING|Priority", "kubectl": "{}"}.items():
            script = folder / "bin" / name
            script.write_text(f'#!/bin/sh\necho "{name} $*" >> "{self.log}"\necho "{answer}"\n')
            script.chmod(0o755)
        self._process = LimitedProcess(self.folder, PATH=f"{folder / 'bin'}:{os.environ['PATH']}")
        self.close = self._process.close

    def faults(self, forged: Forged) -> list[str]:
        """Lays down a run directory, and returns what goes wrong when commands look at it."""
        self.lay(forged)
        found = faults_of(self._process.run(COMMANDS))
        found = [
            each for each in found if not each.startswith(("status: it ended with 3\n", "status: it ended with 130"))
        ]
        found += [line for line in self.asked() if not HARMLESS.fullmatch(line)]
        if (self.folder / VICTIM).read_bytes() != KEPT:
            found.append("a file outside of the run directory was written")
        return found

    def lay(self, forged: Forged) -> Path:
        """Puts a run directory in the place of the last one, and returns it."""
        for entry in self.folder.iterdir():
            shutil.rmtree(entry) if entry.is_dir() and not entry.is_symlink() else entry.unlink()
        self.log.write_text("")
        return lay(forged, self.folder)

    def stop(self) -> int:
        """Returns the exit status of `dslc stop`."""
        (result,) = self._process.run([["stop", "run", "--no-wait"]])
        return int(result["code"])

    def asked(self) -> list[str]:
        """Returns the commands that the cluster was given."""
        return self.log.read_text().splitlines()


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    made = Cluster(tmp_path_factory.mktemp("hostile"))
    yield made
    made.close()


@pytest.mark.cases(24)
@pytest.mark.slow
@pytest.mark.parametrize("name", NAMED)
def test_a_forged_run_directory(name: str, cluster: Cluster) -> None:
    assert not cluster.faults(NAMED[name])


def test_ten_that_are_drawn(cluster: Cluster) -> None:
    assert not {seed: found for seed in range(10) if (found := cluster.faults(drawn(seed)))}


@pytest.mark.long
def test_three_hundred(cluster: Cluster) -> None:
    assert not {seed: found for seed in range(10, 310) if (found := cluster.faults(drawn(seed)))}


def test_what_is_valid_is_read(tmp_path: Path) -> None:
    """The checks above would also pass if nothing were read at all."""
    run = lay(Forged({"status.json": WAITING, "submitted.json": json.dumps(SLURM).encode()}), tmp_path)
    found = read_submission(str(run))
    assert found is not None and (found.cluster, found.job) == ("slurm", "12") and is_own_submission(str(run), found)
    status = read_status(str(run))
    assert status is not None and status.state == "waiting"
    ask_to_stop(str(run))
    ask_to_stop(str(run))
    assert is_asked_to_stop(str(run))


VALID = ("through a link", "is a link", "is fifo", "is folder", "is ->", "other folders", "without end")


@pytest.mark.parametrize("name", [name for name in NAMED if not any(word in name for word in VALID)])
def test_what_nobody_has_written_who_runs_or_submits_is_not_read(name: str, tmp_path: Path) -> None:
    run = lay(NAMED[name], tmp_path)
    assert read_submission(str(run)) is None
    assert "submitted.json" in NAMED[name].entries or read_status(str(run)) is None


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can give a file to another user")
@pytest.mark.parametrize("told", [SLURM, PODS], ids=["slurm", "kubernetes"])
def test_the_submission_of_another_user_stops_no_job(cluster: Cluster, told: dict[str, Any]) -> None:
    """And one of this user stops that job."""
    run = cluster.lay(Forged({"status.json": WAITING, "submitted.json": json.dumps(told).encode()}))
    os.chown(run / "submitted.json", 54321, -1)
    assert cluster.stop() == 3, "it is not stopped, and that is said"
    assert not [line for line in cluster.asked() if "scancel" in line or "delete" in line]
    os.chown(run / "submitted.json", os.geteuid(), -1)
    assert cluster.stop() == 0
    assert [line for line in cluster.asked() if "scancel" in line or "delete" in line]


# ------------------------------------------------------------------------------------------- a training goes on there

# What a run writes, and what it was told to write into: pipes that nobody reads, and files elsewhere.
REPLACED = ("job.plt", "report.json", "plan.svg", "logs/draw.log", "logs/rank-0.json", "weights.safetensors.part",
            "status.json.part", "metrics.jsonl.part", "program.json.part", "plan.json.part")  # fmt: skip


def forge(run: Path, entries: dict[str, str]) -> None:
    """Puts pipes and links in the place of files of a run directory."""
    (run / "logs").mkdir(parents=True, exist_ok=True)
    (run / ".dslc-lock").touch()
    for name, kind in entries.items():
        os.mkfifo(run / name) if kind == "fifo" else (run / name).symlink_to(run.parent / VICTIM)


def train_in(run: Path) -> tuple[int, str]:
    """Returns the exit status of a training in a run directory, and its messages."""
    job = run.parent / "job.plt"
    job.write_text(written(steps="2"))
    (run.parent / VICTIM).write_bytes(KEPT)
    ended = dslc("run", job, "--out", run, cwd=run.parent)
    assert (run.parent / VICTIM).read_bytes() == KEPT
    return ended.returncode, ended.stderr


@pytest.mark.slow
@pytest.mark.parametrize("seed", [0, *(pytest.param(n, marks=pytest.mark.long) for n in range(1, 20))])
def test_a_training_writes_into_nothing_that_lies_in_its_folder(tmp_path: Path, seed: int) -> None:
    """Neither does it wait for who would read a pipe."""
    draw = random.Random(seed)
    entries = {name: draw.choice(("fifo", "link")) for name in REPLACED} | {"logs/notes.txt": "fifo"}
    forge(tmp_path / "run", entries)
    status, said = train_in(tmp_path / "run")
    assert status == 0, said
    assert all(not path.is_symlink() and not path.is_fifo() for path in (tmp_path / "run").iterdir())


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["fifo", pytest.param("link", marks=pytest.mark.long)])
def test_a_log_that_is_no_file_ends_a_training_with_the_reason(tmp_path: Path, kind: str) -> None:
    forge(tmp_path / "run", {"logs/rank-0.log": kind})
    status, said = train_in(tmp_path / "run")
    assert status == 3 and "rank-0.log" in said and "it is a device, a pipe or a link" in said, said
