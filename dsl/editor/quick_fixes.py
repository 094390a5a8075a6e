"""The fixes of diagnostics as changes of the text, or of an imported file, for an editor's list of actions."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from dslc.dsl.diagnostics import Diagnostic
from dslc.dsl.editor.edits import TextEdit, apply_fix, find_fixed_source, text_edits
from dslc.dsl.editor.snapshot import Snapshot
from dslc.dsl.record import Record, record
from dslc.dsl.source import Source


@record
class QuickFix(Record):
    """One way to correct a diagnostic. `source` is the file that it changes."""

    title: str
    diagnostic: Diagnostic
    source: Source
    changes: tuple[TextEdit, ...]


def find_fixes(
    snapshot: Snapshot, found: Iterable[Diagnostic], start: int, end: int, open_texts: Mapping[str, str] | None = None
) -> list[QuickFix]:
    """Returns the fixes of the diagnostics that touch the characters `start` to `end`. `open_texts` are the texts that
    an editor has of other files, by path: a file that it has not saved is not changed.
    """
    fixes = []
    for diagnostic in found:
        place = snapshot.place_of(diagnostic.span) if diagnostic.span is not None else None
        if place is None or place.start > end or place.end < start:
            continue
        for fix in diagnostic.fixes:
            source = find_fixed_source(fix, diagnostic.span, snapshot.source)
            if source is None or (open_texts or {}).get(source.name, source.text) != source.text:
                continue
            text = apply_fix(source.text, source.name, fix)
            if text is not None:
                changes = tuple(text_edits(source.text, text))
                fixes.append(QuickFix(title=fix.title, diagnostic=diagnostic, source=source, changes=changes))
    return fixes
