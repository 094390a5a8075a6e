"""`dslc completion`: shells complete commands, options, choices and files by the script."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import pytest

from dslc.main import main

# Prints what bash completes of the words that it is given.
BASH = """
source ./script
COMP_WORDS=("$@"); COMP_CWORD=$(($# - 1)); COMP_LINE="$*"; COMP_POINT=${#COMP_LINE}
_shtab_dslc
printf '%s\\n' "${COMPREPLY[@]}"
"""


def script(shell: str, capsys: pytest.CaptureFixture[str]) -> str:
    assert main(["completion", shell]) == 0
    return capsys.readouterr().out


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    for name in ("job.plt", "notes.txt", "deep/other.plt"):
        Path(name).parent.mkdir(exist_ok=True)
        Path(name).touch()
    return tmp_path


@pytest.mark.parametrize(
    "words, found, absent",
    [
        (["dslc", ""], {"check", "run", "plan", "completion"}, set()),
        (["dslc", "ch"], {"check", "choose"}, {"run"}),
        (["dslc", "check", "--f"], {"--fix", "--format"}, {"--json"}),
        (["dslc", "check", "--format", ""], {"text", "json", "github", "sarif", "junit"}, set()),
        (["dslc", "check", ""], {"job.plt", "deep"}, {"notes.txt"}),
        (["dslc", "check", "job.plt", "de"], {"deep"}, {"notes.txt"}),
        (["dslc", "run", "job.plt", "--out", ""], {"deep"}, {"notes.txt"}),
        (["dslc", "run", "--pro"], {"--profile", "--profile=trace"}, {"--out"}),
        (["dslc", "completion", ""], {"bash", "zsh", "fish"}, set()),
    ],
    ids=lambda words: " ".join(words if isinstance(words, list) else sorted(words)),
)
def test_bash_completes(
    words: list[str], found: set[str], absent: set[str], folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    Path("script").write_text(script("bash", capsys))
    run = subprocess.run(["bash", "-c", BASH, "bash", *words], capture_output=True, text=True, check=True)
    completed = {word.strip() for word in run.stdout.splitlines()}
    assert found <= completed and not absent & completed, run.stdout + run.stderr


@pytest.mark.parametrize("shell", ["zsh", "fish"])
def test_other_shells_read_their_script(shell: str, folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    text = script(shell, capsys)
    assert ".plt" in text and "locked" in text
    if shutil.which(shell):
        Path("script").write_text(text)
        subprocess.run([shell, "-n", "script"], check=True)
