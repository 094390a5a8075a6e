"""The fixes of diagnostics as changes of the text, for an editor's list of actions."""

from __future__ import annotations

from collections.abc import Iterable

from dslc.dsl.diagnostics import Diagnostic
from dslc.dsl.editor.edits import TextEdit, apply_fix, text_edits
from dslc.dsl.editor.snapshot import Snapshot
from dslc.dsl.record import Record, record


@record
class QuickFix(Record):
    """One way to correct a diagnostic."""

    title: str
    diagnostic: Diagnostic
    changes: tuple[TextEdit, ...]


def find_fixes(snapshot: Snapshot, found: Iterable[Diagnostic], start: int, end: int) -> list[QuickFix]:
    """Returns the fixes of the diagnostics that touch the characters `start` to `end`."""
    fixes = []
    for diagnostic in found:
        span = diagnostic.span
        if span is None or span.source.name != snapshot.path or span.start > end or span.end < start:
            continue
        for fix in diagnostic.fixes:
            text = apply_fix(snapshot.text, snapshot.path, fix)
            if text is not None:
                changes = tuple(text_edits(snapshot.text, text))
                fixes.append(QuickFix(title=fix.title, diagnostic=diagnostic, changes=changes))
    return fixes
