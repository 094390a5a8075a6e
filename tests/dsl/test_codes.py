"""Codes of diagnostics: the letter says whether it is an error, and each has its page."""

from __future__ import annotations

import re

import pytest
from helpers.paths import ROOT

from dslc.dsl.codes import explain, titles
from dslc.dsl.diagnostics import BLOCKING, PASSED_OVER, Diagnostic

SOURCES = sorted(path for floor in ("dsl", "compiler", "cli", "runtime") for path in (ROOT / floor).rglob("*.py"))
PRINTED = [*ROOT.glob("*.md"), *ROOT.glob("docs/**/*.md"), *ROOT.glob("dsl/codes/*.md"), *ROOT.glob("tests/**/*.txt")]


def test_the_letter_of_a_code_is_the_severity() -> None:
    assert Diagnostic(code="E0309", message="", span=None).severity == "error"
    assert Diagnostic(code="E0309", message="", span=None).as_warning().severity == "warning"


@pytest.mark.parametrize("code", sorted(BLOCKING))
def test_a_warning_that_blocks_a_run_is_an_error_of_the_same_number(code: str) -> None:
    found = Diagnostic(code=code, message="", span=None).for_run()
    assert (found.code, found.severity) == (f"E{code[1:]}", "error")
    assert found.for_run() == found


def test_other_warnings_let_a_run_begin() -> None:
    warning = Diagnostic(code="W0103", message="", span=None)
    assert warning.for_run() == warning


@pytest.mark.parametrize("code", sorted(BLOCKING | PASSED_OVER))
def test_a_warning_and_its_error_share_a_page(code: str) -> None:
    page = explain(code)
    assert page is not None and page == explain(f"E{code[1:]}")
    assert titles()[code] == titles()[f"E{code[1:]}"]


def test_every_code_of_the_sources_has_a_page() -> None:
    codes = {code for path in SOURCES for code in re.findall(r'"([EWN]\d{4})"', path.read_text(encoding="utf-8"))}
    assert len(codes) > 100
    assert not {code for code in codes if explain(code) is None}
    of_both = {f"{other}{code[1:]}" for code in codes for other in "EW"}  # a page of a warning and of its error
    assert not titles().keys() - of_both - codes, "pages of codes that are no more"


def test_no_text_shows_a_warning_with_the_code_of_an_error() -> None:
    wrong = re.compile(r"warning\[E|error\[W")
    shown = [path for path in PRINTED if wrong.search(path.read_text(encoding="utf-8", errors="replace"))]
    assert len(PRINTED) > 200 and not shown


def test_pages_have_one_form() -> None:
    """A title begins in lower case, and code is indented, as a terminal shows both."""
    for path in sorted((ROOT / "dsl" / "codes").glob("*.md")):
        title, blank, *_ = path.read_text(encoding="utf-8").splitlines()
        assert re.match(r"# (?![A-Z][a-z]*\b)", title) and not blank, f"{path.name}: {title}"
        assert "```" not in path.read_text(encoding="utf-8"), f"{path.name}: indent code by four spaces"
