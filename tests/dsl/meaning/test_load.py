"""Bad jobs with the codes they deserve beside the line, and their whole messages in a file beside them.

A line `#! E0107` says what the line deserves; lines `#: NAME=VALUE` at the top are given as `--set`, and what these
deserve is only in the messages. `UPDATE_GOLDEN=1 pytest tests/dsl/meaning/test_load.py` writes the messages anew; read
the difference.
"""

from __future__ import annotations

import os
import random
import re
import subprocess
import sys
from pathlib import Path

import pytest

from dslc.dsl.codes import FOLDER, explain
from dslc.dsl.meaning.load import load, load_text
from dslc.dsl.show import render

BAD = Path(__file__).parent / "bad"
JOBS = sorted(BAD.glob("*.plt"))
GOOD = (BAD / "base" / "good.plt").read_text(encoding="utf-8")
PAGES = sorted(page for page in Path(FOLDER).glob("[EW]01*.md"))


def deserved(text: str) -> list[tuple[int, str]]:
    """(line, code) of every `#! CODE …` in a job."""
    return sorted(
        (number, code)
        for number, line in enumerate(text.splitlines(), 1)
        for codes in re.findall(r"#!((?: [EW]\d{4})+)", line)
        for code in codes.split()
    )


@pytest.mark.parametrize("job", JOBS, ids=lambda path: path.stem)
def test_a_bad_job_gets_the_diagnostics_it_deserves(job: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(BAD)
    text = job.read_text(encoding="utf-8")
    loaded = load(job.name, re.findall(r"^#: (.*)$", text, re.MULTILINE))
    found = {(d.span.source.position(d.span.start)[0], d.code) for d in loaded.report
             if d.span and d.span.source.name == job.name}  # fmt: skip
    golden = job.with_suffix(".txt")
    shown = render(loaded.report, color=False)
    if os.environ.get("UPDATE_GOLDEN"):
        golden.write_text(shown, encoding="utf-8")
    assert sorted(found) == sorted(set(deserved(text)))
    assert shown == golden.read_text(encoding="utf-8")


def test_every_code_of_loading_is_met_by_a_bad_job() -> None:
    met = set(re.findall(r"\[([EW]01\d\d)\]", "".join(job.with_suffix(".txt").read_text() for job in JOBS)))
    met |= {"E0138", "E0143", "E0145"}  # in the pages, below, and in tests/bad
    assert {page.stem for page in PAGES} - met == set()


def test_every_code_that_is_reported_has_its_page() -> None:
    folder = Path(FOLDER).parent
    used = {code for file in folder.rglob("*.py") for code in re.findall(r'"([EW]01\d\d)"', file.read_text())}
    assert used == {page.stem for page in PAGES}


def examples(page: Path) -> list[str]:
    return re.findall(r"```plt\n(.*?)```", page.read_text(encoding="utf-8"), re.DOTALL)


@pytest.mark.parametrize("page", [p for p in PAGES if examples(p)], ids=lambda page: page.stem)
def test_the_examples_of_a_page_are_wrong_and_right(page: Path, tmp_path: Path) -> None:
    (tmp_path / "base.plt").write_text(GOOD)
    wrong, right = (text if "import" in text else f'import "base.plt"\n{text}' for text in examples(page))
    if "language" in wrong:
        wrong, right = wrong.replace("import", "# import"), right.replace("import", "# import")
    for text, there in ((wrong, True), (right, False)):
        codes = {d.code for d in load_text(text, folder=str(tmp_path)).report}
        assert (page.stem in codes) is there, (text, codes)
    assert explain(page.stem)


def test_a_file_that_cannot_be_read_is_a_diagnostic(tmp_path: Path) -> None:
    (tmp_path / "job.plt").write_text(GOOD)
    (tmp_path / "latin.plt").write_bytes(b"# caf\xe9\n")

    def said(name: str) -> str:
        loaded = load(str(tmp_path / name))
        assert loaded.job is None
        (found,) = loaded.report
        assert found.code == "E0101" and (found.span is None) is (name != "latin.plt")
        return f"{found.span} {found.message} {found.help}"

    assert "no such file" in said("jib.plt") and "did you mean `job.plt`?" in said("jib.plt")
    assert "UTF-8" in said("latin.plt") and "latin.plt:1:6" in said("latin.plt")
    assert "directory" in said("")
    assert "no folder" in said("nowhere/job.plt")
    assert "cannot be read" in said("a\0b")


def test_marks_and_line_ends_of_other_systems_do_no_harm(tmp_path: Path) -> None:
    (tmp_path / "job.plt").write_bytes(b"\xef\xbb\xbf" + GOOD.replace("\n", "\r\n").encode())
    loaded = load(str(tmp_path / "job.plt"))
    assert loaded.job is not None and not loaded.report


def test_another_version_of_the_language() -> None:
    (found,) = load_text("language = 2\n" + GOOD).report
    assert found.code == "E0112" and str(found.span) == "job.plt:1:12"
    assert not load_text("language = 1\n" + GOOD).report


def _mutated(rng: random.Random, text: str) -> str:
    """Returns the text with pieces of it cut, doubled, swapped and replaced."""
    pieces = re.findall(r"\s+|\w+|[^\w\s]", text)
    odd = [*pieces, "none", "1f1b", "-1", "10 ** 99", "[", ")", "3GiB", "..", '"', "rate", "a.b", "é", "e = ", "param"]
    for _ in range(rng.randint(1, 6)):
        at = rng.randrange(len(pieces) + 1)
        pieces[at : at + rng.randint(0, 2)] = [rng.choice(odd) for _ in range(rng.randint(0, 2))]
    return "".join(pieces)


def test_mutated_jobs_never_raise() -> None:
    rng = random.Random(0)
    texts = [GOOD, *((job.read_text(encoding="utf-8")) for job in JOBS)]
    settings = ["train.optimizer.lr=0.1", "expect.bubble<3%", "rate=2*3", "sweep.rate=[1]"]
    for _ in range(600):
        text = _mutated(rng, rng.choice(texts))
        setting = _mutated(rng, rng.choice(settings))
        loaded = load_text(text, folder=str(BAD), settings=[setting])
        render(loaded.report, color=False)
        assert loaded.job is not None or loaded.report.errors, (text, setting)


def test_a_value_nested_without_end_is_a_diagnostic() -> None:
    for value in ("(" * 5000 + "1" + ")" * 5000, "-" * 5000 + "1", "[" * 3000, "1" + "+1" * 20_000):
        loaded = load_text(GOOD.replace("64", value))
        assert loaded.report.errors, value[:10]
    chain = "\n".join(f"param p{i} = p{i + 1} + 1" for i in range(3000)) + "\nparam p3000 = 1\n"
    loaded = load_text(chain + GOOD.replace("batch  = 64", "batch = p0"))
    assert loaded.report.errors


@pytest.mark.processes
def test_loading_needs_no_heavy_module() -> None:
    code = "import sys; from dslc.dsl.meaning.load import load; load(sys.argv[1]); print(*sys.modules)"
    run = subprocess.run([sys.executable, "-c", code, str(BAD / "base" / "good.plt")], capture_output=True, text=True,
                         check=True)  # fmt: skip
    loaded = set(run.stdout.split())
    assert not loaded & {"torch", "networkx", "numpy", "rich", "decimal", "fractions", "argparse", "asyncio"}
