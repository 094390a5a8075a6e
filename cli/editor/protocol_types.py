"""Results of dsl/editor as types of the protocol."""

from __future__ import annotations

import os
from collections.abc import Iterable

from lsprotocol import types
from pygls.uris import from_fs_path

from dslc.dsl.diagnostics import Diagnostic, Note
from dslc.dsl.editor.complete import Completion, CompletionKind
from dslc.dsl.editor.edits import TextEdit
from dslc.dsl.editor.navigation import SourceRange
from dslc.dsl.editor.outline import Fold, Symbol
from dslc.dsl.editor.quick_fixes import QuickFix
from dslc.dsl.editor.semantic_tokens import LEGEND, SemanticToken
from dslc.dsl.editor.snapshot import Snapshot
from dslc.editor.positions import LineTable

KINDS: dict[CompletionKind, types.CompletionItemKind] = {
    "block": types.CompletionItemKind.Module, "field": types.CompletionItemKind.Field,
    "word": types.CompletionItemKind.EnumMember, "call": types.CompletionItemKind.Function,
    "argument": types.CompletionItemKind.Property, "param": types.CompletionItemKind.Variable,
    "keyword": types.CompletionItemKind.Keyword, "unit": types.CompletionItemKind.Unit,
    "file": types.CompletionItemKind.File, "folder": types.CompletionItemKind.Folder,
}  # fmt: skip
SEVERITIES = {
    "error": types.DiagnosticSeverity.Error, "warning": types.DiagnosticSeverity.Warning,
    "note": types.DiagnosticSeverity.Information,
}  # fmt: skip


SYMBOLS = {
    "block": types.SymbolKind.Namespace, "field": types.SymbolKind.Property, "param": types.SymbolKind.Variable,
    "import": types.SymbolKind.File,
}  # fmt: skip


def markdown(text: str) -> types.MarkupContent:
    return types.MarkupContent(types.MarkupKind.Markdown, text)


def show_completion(item: Completion, number: int, lines: LineTable) -> types.CompletionItem:
    """Returns a completion; `number` keeps the order in which they were found."""
    return types.CompletionItem(
        item.label,
        kind=KINDS[item.kind],
        detail=item.detail or None,
        documentation=markdown(item.documentation) if item.documentation else None,
        sort_text=f"{number:04}",
        insert_text_format=types.InsertTextFormat.Snippet,
        text_edit=types.TextEdit(lines.range(item.start, item.end), item.snippet),
    )


def show_diagnostic(diagnostic: Diagnostic, snapshot: Snapshot, lines: LineTable) -> types.Diagnostic:
    """Returns a diagnostic. One that lies in an imported file is shown at the import, and points there."""
    message = diagnostic.message + (f"\nhelp: {diagnostic.help}" if diagnostic.help else "")
    notes = list(diagnostic.notes)
    span = diagnostic.span
    if span is not None and span.source.name != snapshot.path:
        notes.insert(0, Note(diagnostic.message, span))
        span = snapshot.place_of(span)
    return types.Diagnostic(
        lines.range(span.start, span.end) if span else lines.range(0, 0),
        message,
        severity=SEVERITIES[diagnostic.severity],
        code=diagnostic.code,
        source="dslc",
        related_information=[related for note in notes if (related := _related(note, snapshot, lines))] or None,
    )


def _related(note: Note, snapshot: Snapshot, lines: LineTable) -> types.DiagnosticRelatedInformation | None:
    if note.span is None:
        return None
    source = note.span.source
    of_file = lines if source.name == snapshot.path else LineTable(source.text, lines.encoding)
    uri = from_fs_path(os.path.abspath(source.name))
    assert uri is not None
    place = types.Location(uri, of_file.range(note.span.start, note.span.end))
    return types.DiagnosticRelatedInformation(place, note.message)


def show_edits(changes: Iterable[TextEdit], lines: LineTable) -> list[types.TextEdit]:
    return [types.TextEdit(lines.range(change.start, change.end), change.text) for change in changes]


def show_fix(fix: QuickFix, uri: str, snapshot: Snapshot, lines: LineTable) -> types.CodeAction:
    """Returns the action of a fix, which may change another file than the one of `uri`."""
    changed = lines
    if fix.source.name != snapshot.path:
        uri = from_fs_path(os.path.abspath(fix.source.name)) or uri
        changed = LineTable(fix.source.text, lines.encoding)
    return types.CodeAction(
        fix.title,
        kind=types.CodeActionKind.QuickFix,
        diagnostics=[show_diagnostic(fix.diagnostic, snapshot, lines)],
        edit=types.WorkspaceEdit({uri: show_edits(fix.changes, changed)}),
    )


def show_symbol(symbol: Symbol, lines: LineTable) -> types.DocumentSymbol:
    return types.DocumentSymbol(
        symbol.name,
        SYMBOLS[symbol.kind],
        lines.range(symbol.start, symbol.end),
        lines.range(symbol.name_start, symbol.name_end),
        detail=symbol.detail or None,
        children=[show_symbol(child, lines) for child in symbol.children],
    )


def show_fold(fold: Fold, lines: LineTable) -> types.FoldingRange:
    start, end = lines.position(fold.start), lines.position(fold.end)
    kinds = {"region": types.FoldingRangeKind.Region, "comment": types.FoldingRangeKind.Comment,
             "imports": types.FoldingRangeKind.Imports}  # fmt: skip
    last = end.line - 1 if fold.kind == "region" and end.line > start.line + 1 else end.line  # the closing line stays
    return types.FoldingRange(start.line, last, kind=kinds[fold.kind])


def show_tokens(tokens: Iterable[SemanticToken], lines: LineTable) -> types.SemanticTokens:
    """Returns tokens as the protocol has them: lines and columns relative to the token before."""
    data: list[int] = []
    line = column = 0
    for token in tokens:
        start, end = lines.position(token.start), lines.position(token.end)
        by = start.character - column if start.line == line else start.character
        length = end.character - start.character
        data += [start.line - line, by, length, LEGEND.index(token.type), int(token.is_declaration)]
        line, column = start.line, start.character
    return types.SemanticTokens(data)


def show_location(place: SourceRange, encoding: str) -> types.Location:
    uri = from_fs_path(os.path.abspath(place.path))
    assert uri is not None
    return types.Location(uri, LineTable(place.text, encoding).range(place.start, place.end))


def show_rename(locations: Iterable[types.Location], name: str) -> types.WorkspaceEdit:
    changes: dict[str, list[types.TextEdit]] = {}
    for location in locations:
        changes.setdefault(location.uri, []).append(types.TextEdit(location.range, name))
    return types.WorkspaceEdit(changes)
