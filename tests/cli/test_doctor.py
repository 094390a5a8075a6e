"""`dslc doctor`: it knows every extra, names what is missing with its remedy, and changes nothing."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest
from helpers.paths import ROOT

from dslc.commands.doctor import EXTRAS, FOR_DEVELOPERS, _is_within, examine
from dslc.main import main


def test_every_extra_has_its_purpose() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    assert EXTRAS.keys() == project["optional-dependencies"].keys() - set(FOR_DEVELOPERS)


def test_what_is_here_is_shown(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["doctor"]) == 0
    text = capsys.readouterr().out
    assert [line for line in text.splitlines() if line and not line.startswith(" ")] == [
        "machine",
        "libraries",
        "programs",
    ]
    assert f"  {sys.version.split()[0]}, {sys.executable}" in text
    found = [line for line in text.splitlines() if line.startswith("  ") and "missing" not in line]
    assert len(found) == len(set(found))  # also of a library that several extras need
    assert main(["doctor", "--json"]) == 0
    rows = json.loads(capsys.readouterr().out)
    assert {row["name"] for row in rows} >= {"torch", "CPU", "GPUs", "hypothesis", "git", "kubectl"}
    assert all(bool(row["remedy"]) == row["missing"] for row in rows)


def test_what_is_missing_has_a_remedy(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path))
    rows = {finding.name: finding for finding in examine()}
    assert all(rows[name].missing for name in ("git", "ssh", "cc", "calibration"))
    assert rows["git"].remedy == "install git, by the names that Debian has for it"
    assert rows["calibration"].remedy == "dslc calibrate"
    (tmp_path / "apt-get").touch(0o755)
    (tmp_path / "clang").touch(0o755)
    rows = {finding.name: finding for finding in examine()}
    assert rows["ssh"].remedy == "apt-get install openssh-client" and rows["cc"].found == str(tmp_path / "clang")


# The command, where the metadata of a library in the current folder goes before that of the installed one.
OLD = """
import sys
sys.path.insert(0, ".")
from dslc.main import main
sys.exit(main(["doctor"]))
"""


def test_a_library_that_is_too_old_is_named(tmp_path: Path) -> None:
    folder = tmp_path / "hypothesis-6.9.dist-info"
    folder.mkdir()
    (folder / "METADATA").write_text("Metadata-Version: 2.1\nName: hypothesis\nVersion: 6.9\n")
    run = subprocess.run([sys.executable, "-c", OLD], cwd=tmp_path, capture_output=True, text=True, check=True)
    lines = [line.split(maxsplit=1) for line in run.stdout.splitlines()]
    assert ["hypothesis", "6.9, and >=6.100 is needed, for `dslc.testing`: properties of jobs"] in lines
    assert ["->", "pip install 'dslc[testing]'"] in lines


@pytest.mark.parametrize(
    "version, bound, fits",
    [("6.100", ">=6.100", True), ("6.99.1", ">=6.100", False), ("7", ">=6.100", True), ("2.13.0+cpu", ">=2.13", True),
     ("3.0", "<3", False), ("2.9.9", "<3", True), ("1.0", "!=1", True)],
)  # fmt: skip
def test_versions_are_compared_by_their_numbers(version: str, bound: str, fits: bool) -> None:
    assert _is_within(version, bound) is fits


def test_nothing_is_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path / "config"))
    assert main(["doctor"]) == 0
    assert not os.listdir(tmp_path)
