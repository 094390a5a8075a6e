"""The `dslc` command as a user types it, in a process of its own."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path

DSLC = Path(sys.executable).parent / "dslc"


def dslc(
    *arguments: object, cwd: Path | None = None, input: str | None = None, env: Mapping[str, str] | None = None
) -> subprocess.CompletedProcess[str]:
    """Runs the command with `input` on standard input, and returns its result, whatever its exit status; `env` replaces
    the environment.
    """
    command = [str(DSLC), *map(str, arguments)]
    return subprocess.run(command, cwd=cwd, input=input, env=env, capture_output=True, text=True, check=False)
