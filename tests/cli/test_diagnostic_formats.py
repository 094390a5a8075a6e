"""`dslc check --format`: what GitHub, a reader of SARIF and a reader of JUnit's XML get.

`UPDATE_GOLDEN=1 pytest tests/cli/test_diagnostic_formats.py` writes the files of tests/cli/formats anew.
"""

from __future__ import annotations

import json
import os
import shutil
import xml.etree.ElementTree as ElementTree
from pathlib import Path
from typing import Any

import pytest
from helpers.paths import TESTS

from dslc.main import main

JOBS = ("jobs/many_at_once.plt", "jobs/axes_over_devices.plt", "jobs/zero_without_ranks.plt", "jobs/base/digits.plt")
GOLDEN = TESTS / "cli" / "formats"


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    (tmp_path / "jobs").mkdir()
    shutil.copytree(TESTS / "bad" / "base", tmp_path / "jobs" / "base")
    for job in JOBS[:3]:
        shutil.copy(TESTS / "bad" / Path(job).name, tmp_path / job)
    monkeypatch.chdir(tmp_path)
    return tmp_path


def printed(capsys: pytest.CaptureFixture[str], chosen: str, *jobs: str) -> str:
    assert main(["check", *jobs, "--format", chosen]) == 1
    out = capsys.readouterr()
    assert out.err == ""
    return out.out


@pytest.mark.parametrize("chosen, name", [("github", "github.txt"), ("sarif", "sarif.json"), ("junit", "junit.xml"),
                                          ("json", "json.json")])  # fmt: skip
def test_each_format_is_as_it_was(chosen: str, name: str, folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    text = printed(capsys, chosen, *JOBS)
    if os.environ.get("UPDATE_GOLDEN"):
        GOLDEN.mkdir(exist_ok=True)
        (GOLDEN / name).write_text(text)
    assert text == (GOLDEN / name).read_text()


def test_json_is_a_format(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    text = printed(capsys, "json", *JOBS)
    assert main(["check", *JOBS, "--json"]) == 1
    assert capsys.readouterr().out == text


def run_of(text: str) -> Any:
    return json.loads(text)["runs"][0]


def test_sarif_follows_its_standard(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    from sarif_pydantic import Sarif

    text = printed(capsys, "sarif", *JOBS)
    log = Sarif.model_validate_json(text)
    assert log.version == "2.1.0" and log.runs[0].results
    run = run_of(text)
    rules = [rule["id"] for rule in run["tool"]["driver"]["rules"]]
    for result in run["results"]:
        assert rules[result["ruleIndex"]] == result["ruleId"]
        assert len(result["partialFingerprints"]["dslc/v1"]) == 32
        for location in result["locations"]:
            assert not location["physicalLocation"]["artifactLocation"]["uri"].startswith(("/", ".", "<"))


def test_a_fix_of_sarif_makes_the_text_of_the_fix(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run = run_of(printed(capsys, "sarif", JOBS[0]))
    result = next(each for each in run["results"] if each["ruleId"] == "E0130")
    [change] = result["fixes"][0]["artifactChanges"]
    lines = Path(change["artifactLocation"]["uri"]).read_text().splitlines(keepends=True)
    for replacement in reversed(change["replacements"]):
        region = replacement["deletedRegion"]
        assert region["startColumn"] == region["endColumn"] == 1, "whole lines"
        lines[region["startLine"] - 1 : region["endLine"] - 1] = [replacement["insertedContent"]["text"]]
    assert "".join(lines) == Path(JOBS[0]).read_text().replace("liner", "linear")


def test_paths_of_sarif_are_addresses(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    shutil.copy(JOBS[0], "odd 100%.plt")
    results = run_of(printed(capsys, "sarif", "odd 100%.plt"))["results"]
    places = {result["locations"][0]["physicalLocation"]["artifactLocation"]["uri"] for result in results}
    changes = [change for result in results for fix in result.get("fixes", ()) for change in fix["artifactChanges"]]
    assert places | {change["artifactLocation"]["uri"] for change in changes} == {"odd%20100%25.plt"} and changes


def test_fingerprints_stay_when_lines_move(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    def fingerprints() -> dict[str, str]:
        run = run_of(printed(capsys, "sarif", JOBS[0]))
        return {each["message"]["text"]: each["partialFingerprints"]["dslc/v1"] for each in run["results"]}

    before = fingerprints()
    assert len(set(before.values())) == len(before) == 6
    job = Path(JOBS[0])
    job.write_text("# One line more.\n\n" + job.read_text())
    assert fingerprints() == before
    job.write_text(job.read_text().replace("bach = 64", "bach = 32"))
    changed = fingerprints()
    assert {text for text in before if before[text] != changed[text]} == {
        "`data` has no field `bach`\nhelp: did you mean `batch`?"
    }


def test_two_mistakes_on_lines_of_one_text_differ(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    Path("two.plt").write_text("model {\n  netwrk = 1\n}\n\nevaluate {\n  netwrk = 1\n}\n")
    run = run_of(printed(capsys, "sarif", "two.plt"))
    found = [each["partialFingerprints"]["dslc/v1"] for each in run["results"] if each["ruleId"] == "E0107"]
    assert len(found) == len(set(found)) == 2


def test_github_escapes_what_would_end_a_command(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    Path("odd, 100%.plt").write_text('data {\n  source = "a\nb"\n}\n')
    lines = printed(capsys, "github", "odd, 100%.plt").splitlines()
    assert lines and all(line.startswith("::error file=odd%2C 100%25.plt,line=") for line in lines)


def test_a_setting_is_reported_at_its_job(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for chosen, place in (("github", "file=jobs/base/digits.plt,title="), ("sarif", '"uri": "jobs/base/digits.plt"')):
        assert main(["check", JOBS[3], "--set", "data.bach=1", "--format", chosen]) == 1
        text = capsys.readouterr().out
        assert place in text and "<--set" not in text


def test_junit_counts_cases(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    root = ElementTree.fromstring(printed(capsys, "junit", *JOBS))
    suites = {suite.get("name"): suite for suite in root}
    assert list(suites) == list(JOBS)
    for name, failures in ((JOBS[0], 6), (JOBS[1], 1), (JOBS[3], 0)):
        suite = suites[name]
        assert suite.get("failures") == str(failures) and suite.get("tests") == str(max(1, failures))
        assert len(suite.findall("testcase")) == max(1, failures) and len(suite.findall(".//failure")) == failures
    output = suites[JOBS[2]].findtext("system-out")
    assert output is not None and "W0402" in output


def test_a_good_job_prints_no_annotation(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["check", JOBS[3], "--format", "github"]) == 0
    assert capsys.readouterr().out == ""
