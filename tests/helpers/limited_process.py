"""A process that runs commands of `dslc` with little memory and time, for tests: `limited.py`, and what it answers."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from helpers.paths import HELPERS


class LimitedProcess:
    """Runs commands in a folder. `environment` is added to that of this process."""

    def __init__(self, folder: Path, **environment: str) -> None:
        command = [sys.executable, str(HELPERS / "limited.py"), str(folder)]
        self._process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env={**os.environ, **environment}
        )

    def run(self, commands: Sequence[Sequence[str]]) -> list[dict[str, Any]]:
        """Returns what each command took, and what is wrong with it."""
        assert self._process.stdin and self._process.stdout
        self._process.stdin.write(json.dumps(commands) + "\n")
        self._process.stdin.flush()
        results: list[dict[str, Any]] = json.loads(self._process.stdout.readline())
        return results

    def close(self) -> None:
        assert self._process.stdin and self._process.stdout
        self._process.stdin.close()
        self._process.wait()
        self._process.stdout.close()


def faults_of(results: Sequence[dict[str, Any]]) -> list[str]:
    return [f"{each['command']}: {', '.join(each['faults'])}\n{each['end']}" for each in results if each["faults"]]
