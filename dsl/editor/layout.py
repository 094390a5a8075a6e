"""The canonical layout of a text, as changes of it."""

from __future__ import annotations

from dslc.dsl.diagnostics import Report
from dslc.dsl.editor.edits import TextEdit, text_edits
from dslc.dsl.editor.snapshot import Snapshot
from dslc.dsl.syntax.format import format_document
from dslc.dsl.syntax.parser import parse


def format_text(snapshot: Snapshot) -> list[TextEdit]:
    """Returns the changes that `dslc fmt` makes: none if the text has its layout, or has syntax mistakes."""
    report = Report()
    document = parse(snapshot.source, report)
    return [] if document is None or report.errors else text_edits(snapshot.text, format_document(document))
