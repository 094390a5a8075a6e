"""The command where the streams it writes to are closed, full or of another encoding, and where Ctrl-C comes early;
and how it ends.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
from helpers.paths import EXAMPLES
from helpers.small_disk import fill, small_disk

JOB = EXAMPLES / "digits.plt"
COMMAND = "import sys; from dslc.main import main; sys.exit(main(sys.argv[1:]))"


def dslc(redirected: str, *arguments: str, **environment: str) -> tuple[int, str]:
    """Returns the exit status of a command in a shell that redirects its streams, and its output on the others."""
    done = subprocess.run(
        ["sh", "-c", f'exec "$@" {redirected}', "sh", sys.executable, "-c", COMMAND, *arguments],
        capture_output=True,
        env={**os.environ, **environment},
        check=False,
    )
    return done.returncode, (done.stdout + done.stderr).decode()


@pytest.mark.parametrize("redirected", [">&-", "<&-", "2>&-", "<&- >&- 2>&-"])
def test_closed_streams(redirected: str) -> None:
    status, said = dslc(redirected, "check", str(JOB))
    assert status == 0 and "Traceback" not in said


def test_a_full_standard_output() -> None:
    assert dslc(">/dev/full", "plan", str(JOB)) == (2, "dslc: standard output: no space left on device\n")
    assert dslc(">/dev/full 2>&1", "plan", str(JOB)) == (2, "")


def test_letters_that_an_encoding_lacks() -> None:
    status, said = dslc("", "plan", str(JOB), PYTHONIOENCODING="ascii")
    assert status == 0 and "?" in said


EARLY = """
import os, signal, sys

class Early:
    def find_spec(self, name, path=None, target=None):
        if name == {name!r}:
            sys.meta_path.remove(self)
            os.kill(os.getpid(), signal.SIGINT)

early = Early()
sys.meta_path.insert(0, early)
from dslc.main import main
for name in [name for name in sys.modules if name.partition(".")[0] == "argparse"]:
    del sys.modules[name]
sys.exit(main(["check", {job!r}]))
"""


@pytest.mark.parametrize(
    "name", ["argparse", "dslc.commands.check", "dslc.dsl.meaning.load", "dslc.compiler.rules.analyse"]
)
def test_an_early_ctrl_c(name: str) -> None:
    """Sends Ctrl-C while modules are loaded, from the first that takes noticeably long."""
    code = EARLY.format(name=name, job=str(JOB))
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout, done.stderr) == (130, "", "interrupted\n")


def test_a_run_on_a_full_disk_has_its_own_exit_status(tmp_path: Path) -> None:
    """Even before the training begins."""
    with small_disk(tmp_path / "disk", "1m") as disk:
        (disk / "run").mkdir()
        fill(disk)
        status, said = dslc("", "run", str(JOB), "--out", str(disk / "run"))
    assert (status, "Traceback" in said) == (3, False), said
    assert "no space left on device" in said and str(disk / "run") in said


@pytest.mark.parametrize(
    ("arguments", "name"),
    [
        (["render", str(JOB), "-o"], "a.svg"),
        (["render", str(JOB), "-o"], "a.html"),
        (["new"], "a.plt"),
        (["plan", str(JOB), "--chakra"], "digits.0.et"),
    ],
)
def test_a_full_disk_names_the_file(tmp_path: Path, arguments: list[str], name: str) -> None:
    with small_disk(tmp_path / "disk", "1m") as disk:
        fill(disk)
        output = disk if arguments[-1] == "--chakra" else disk / name
        status, said = dslc("", *arguments, str(output))
    assert (status, said) == (2, f"dslc: {disk / name}: no space left on device\nhelp: make room there\n")


def test_a_job_on_a_full_disk_stays_as_it_was(tmp_path: Path) -> None:
    with small_disk(tmp_path / "disk", "1m") as disk:
        path = disk / "job.plt"
        text = JOB.read_text().replace("  ", "   ")
        path.write_text(text)
        fill(disk)
        status, said = dslc("", "fmt", str(path))
        assert (status, said) == (2, f"dslc: {path}: no space left on device\nhelp: make room there\n")
        assert path.read_text() == text and sorted(os.listdir(disk)) == ["filling", "job.plt"]


def test_a_command_ends_without_a_search_for_cycles() -> None:
    frozen = (
        "import atexit, gc; atexit.register(lambda: print('frozen', gc.get_freeze_count() > 10_000)); "  # runs last
    )
    done = subprocess.run([sys.executable, "-c", frozen + COMMAND, "check", str(JOB)], capture_output=True, check=True)
    assert done.stdout.decode().endswith("frozen True\n")
