"""Each fix of a malformed snippet is made: its mistake is gone, and there are no more mistakes than before."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

import pytest
from helpers.paths import ROOT

from dslc.dsl.diagnostics import Diagnostic, Report
from dslc.dsl.editor.edits import apply_fix
from dslc.dsl.source import Source
from dslc.dsl.syntax.parser import parse

SNIPPETS = sorted((ROOT / "grammar" / "malformed").glob("*.plt"))


def mistakes(text: str, name: str) -> list[Diagnostic]:
    report = Report()
    parse(Source(name, text), report)
    return report.found


@pytest.mark.parametrize("snippet", SNIPPETS, ids=lambda path: path.stem)
def test_a_fix_removes_its_mistake(snippet: Path) -> None:
    text = snippet.read_text(encoding="utf-8")
    before = mistakes(text, snippet.name)
    counts = Counter(mistake.code for mistake in before)
    for mistake in before:
        for fix in mistake.fixes:
            changed = apply_fix(text, snippet.name, fix)
            assert changed is not None, f"{mistake.message}: {fix.title} cannot be made"
            after = Counter(other.code for other in mistakes(changed, snippet.name))
            shown = f"{mistake.code} {mistake.message}\n{fix.title}\n{changed}\n{after}"
            assert after[mistake.code] < counts[mistake.code], shown
            assert after.total() <= counts.total(), shown


def test_many_snippets_have_a_fix() -> None:
    fixed = [path for path in SNIPPETS if any(d.fixes for d in mistakes(path.read_text(encoding="utf-8"), path.name))]
    assert len(fixed) >= 25, [path.stem for path in fixed]
