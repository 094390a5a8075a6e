"""`check`, `plan` and `render` send nothing anywhere: they open no socket."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
from helpers.paths import EXAMPLES

# Python reports each socket that is made and each name that is looked up, whoever asks for it.
WATCHED = """
import sys

opened = []
sys.addaudithook(lambda event, arguments: opened.append((event, arguments)) if event.startswith("socket.") else None)

from dslc.main import main

status = main(sys.argv[1:])
assert not opened, opened
sys.exit(status)
"""


@pytest.mark.slow
@pytest.mark.parametrize(
    "words",
    [
        ("check", "digits.plt", "cluster.plt"),
        ("check", "--trace", "own/own.plt"),
        ("plan", "digits.plt"),
        ("plan", "pipeline.plt", "--json"),
        ("render", "digits.plt", "-o", "OUT/plan.svg"),
    ],
    ids=" ".join,
)
def test_no_socket_is_opened(words: tuple[str, ...], tmp_path: Path) -> None:
    command = [sys.executable, "-c", WATCHED, *(word.replace("OUT", str(tmp_path)) for word in words)]
    run = subprocess.run(command, cwd=EXAMPLES, capture_output=True, text=True)
    assert run.returncode == 0, run.stderr


def test_a_socket_would_be_seen(tmp_path: Path) -> None:
    command = [sys.executable, "-c", WATCHED.replace("status = main", "import socket; socket.socket(); status = main")]
    run = subprocess.run([*command, "check", "digits.plt"], cwd=EXAMPLES, capture_output=True, text=True)
    assert run.returncode == 1 and "socket.__new__" in run.stderr
