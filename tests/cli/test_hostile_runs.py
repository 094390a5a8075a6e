"""No file in a run directory makes `dslc status` or `dslc stop` wait, fail, write elsewhere or run what it names."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from helpers.hostile_runs import KEPT, NAMED, SLURM, VICTIM, WAITING, Forged, drawn, lay
from helpers.paths import HELPERS

from dslc.launching.submission import is_own_submission, read_submission
from dslc.runtime.process.run_status import ask_to_stop, is_asked_to_stop, read_status

COMMANDS = (["status", "run"], ["status", "run", "--json"], ["stop", "run", "--no-wait"], ["status", "."])
# What the commands of a cluster are given: names of jobs alone.
HARMLESS = re.compile(
    r"squeue --noheader --array --jobs=\d+ --format=%i\|%T\|%r|scancel \d+(_\d+)?"
    r"|kubectl (get pods|delete (job|jobset),service,configmap,secret) --selector dslc-run=[a-z0-9-]+( --output json)?"
    r"( --namespace [a-z0-9-]+)?"
)


class Cluster:
    """Runs commands of dslc in processes with little memory and time, beside commands of a cluster that write down
    their arguments.
    """

    def __init__(self, folder: Path) -> None:
        self.folder, self.log = folder / "at", folder / "log"
        self.folder.mkdir()
        (folder / "bin").mkdir()
        for name in ("scancel", "squeue", "kubectl"):
            script = folder / "bin" / name
            script.write_text(f'#!/bin/sh\necho "{name} $*" >> "{self.log}"\necho "{{}}"\n')
            script.chmod(0o755)
        path = f"{folder / 'bin'}:{os.environ['PATH']}"
        self.process = subprocess.Popen(
            [sys.executable, str(HELPERS / "limited.py"), str(self.folder)],
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env={**os.environ, "PATH": path},
        )  # fmt: skip

    def faults(self, forged: Forged) -> list[str]:
        """Lays down a run directory, and returns what goes wrong when commands look at it."""
        assert self.process.stdin and self.process.stdout
        for entry in self.folder.iterdir():
            shutil.rmtree(entry) if entry.is_dir() and not entry.is_symlink() else entry.unlink()
        self.log.write_text("")
        lay(forged, self.folder)
        self.process.stdin.write(json.dumps(COMMANDS) + "\n")
        self.process.stdin.flush()
        told: list[dict[str, Any]] = json.loads(self.process.stdout.readline())
        found = [f"{each['command']}: {', '.join(each['faults'])}\n{each['end']}" for each in told if each["faults"]]
        found = [
            each for each in found if not each.startswith(("status: it ended with 3\n", "status: it ended with 130"))
        ]
        found += [line for line in self.log.read_text().splitlines() if not HARMLESS.fullmatch(line)]
        if (self.folder / VICTIM).read_bytes() != KEPT:
            found.append("a file outside of the run directory was written")
        return found

    def close(self) -> None:
        assert self.process.stdin and self.process.stdout
        self.process.stdin.close()
        self.process.wait()
        self.process.stdout.close()


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    made = Cluster(tmp_path_factory.mktemp("hostile"))
    yield made
    made.close()


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


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can give a file to another user")
def test_the_submission_of_another_user_stops_no_job(cluster: Cluster, tmp_path: Path) -> None:
    run = lay(Forged({"status.json": WAITING, "submitted.json": json.dumps(SLURM).encode()}), tmp_path)
    os.chown(run / "submitted.json", 54321, -1)
    found = read_submission(str(run))
    assert found is not None and not is_own_submission(str(run), found)
