"""The features of the language server: each asks a function of dsl/editor about the snapshot of a job."""

from __future__ import annotations

from lsprotocol import types
from pygls.exceptions import JsonRpcInvalidParams
from pygls.uris import to_fs_path

from dslc.dsl.editor.complete import complete
from dslc.dsl.editor.edits import format_text
from dslc.dsl.editor.hints import hints
from dslc.dsl.editor.hover import hover
from dslc.dsl.editor.navigation import RenameError, find_declaration, find_uses, rename
from dslc.dsl.editor.outline import folds, symbols
from dslc.dsl.editor.quick_fixes import find_fixes
from dslc.dsl.editor.semantic_tokens import DECLARATION, LEGEND, tokens
from dslc.dsl.editor.snapshot import Snapshot
from dslc.editor.open_jobs import JobServer, OpenJob
from dslc.editor.positions import apply_changes
from dslc.editor.protocol_types import (
    markdown,
    show_completion,
    show_edits,
    show_fix,
    show_fold,
    show_location,
    show_rename,
    show_symbol,
    show_tokens,
)

server = JobServer()


@server.feature(types.INITIALIZED)
async def on_initialized(ls: JobServer, params: types.InitializedParams) -> None:
    async with ls.worker.lock:
        await ls.worker.start()


@server.feature(types.TEXT_DOCUMENT_DID_OPEN)
async def on_open(ls: JobServer, params: types.DidOpenTextDocumentParams) -> None:
    opened = params.text_document
    snapshot = Snapshot(opened.text, to_fs_path(opened.uri) or opened.uri)
    job = OpenJob(opened.uri, ls.workspace.position_encoding or "utf-16", opened.version, snapshot)
    ls.jobs[opened.uri] = job
    ls.check(job)


@server.feature(types.TEXT_DOCUMENT_DID_CHANGE)
async def on_change(ls: JobServer, params: types.DidChangeTextDocumentParams) -> None:
    job = ls.job(params)
    text = apply_changes(job.snapshot.text, params.content_changes, job.encoding)
    job.update(params.text_document.version, Snapshot(text, job.snapshot.path, job.snapshot))
    ls.check(job)


@server.feature(types.TEXT_DOCUMENT_DID_SAVE)
async def on_save(ls: JobServer, params: types.DidSaveTextDocumentParams) -> None:
    """Reads the other jobs again, which may import the saved job."""
    for job in ls.jobs.values():
        if job.uri != params.text_document.uri:
            job.update(job.version, Snapshot(job.snapshot.text, job.snapshot.path, job.snapshot))
            ls.check(job)


@server.feature(types.TEXT_DOCUMENT_DID_CLOSE)
def on_close(ls: JobServer, params: types.DidCloseTextDocumentParams) -> None:
    ls.publish(ls.jobs.pop(params.text_document.uri), ())


@server.feature(types.SHUTDOWN)
async def on_shutdown(ls: JobServer, params: None) -> None:
    await ls.worker.close()


@server.feature(types.TEXT_DOCUMENT_COMPLETION, types.CompletionOptions(trigger_characters=[".", "(", '"', "/"]))
def on_completion(ls: JobServer, params: types.CompletionParams) -> list[types.CompletionItem]:
    job = ls.job(params)
    items = complete(job.snapshot, job.lines.offset(params.position))
    return [show_completion(item, number, job.lines) for number, item in enumerate(items)]


@server.feature(types.TEXT_DOCUMENT_HOVER)
def on_hover(ls: JobServer, params: types.HoverParams) -> types.Hover | None:
    job = ls.job(params)
    found = hover(job.snapshot, job.lines.offset(params.position), job.figures)
    return types.Hover(markdown(found.text), job.lines.range(found.start, found.end)) if found else None


@server.feature(types.TEXT_DOCUMENT_INLAY_HINT)
def on_inlay_hints(ls: JobServer, params: types.InlayHintParams) -> list[types.InlayHint]:
    job = ls.job(params)
    start, end = job.lines.offset(params.range.start), job.lines.offset(params.range.end)
    return [
        types.InlayHint(job.lines.position(hint.offset), hint.label, tooltip=markdown(hint.tooltip), padding_left=True)
        for hint in hints(job.snapshot, job.figures)
        if start <= hint.offset <= end
    ]


@server.feature(types.TEXT_DOCUMENT_DOCUMENT_SYMBOL)
def on_symbols(ls: JobServer, params: types.DocumentSymbolParams) -> list[types.DocumentSymbol]:
    job = ls.job(params)
    return [show_symbol(symbol, job.lines) for symbol in symbols(job.snapshot)]


@server.feature(types.TEXT_DOCUMENT_FOLDING_RANGE)
def on_folds(ls: JobServer, params: types.FoldingRangeParams) -> list[types.FoldingRange]:
    job = ls.job(params)
    return [show_fold(fold, job.lines) for fold in folds(job.snapshot)]


@server.feature(types.TEXT_DOCUMENT_SEMANTIC_TOKENS_FULL, types.SemanticTokensLegend(LEGEND, [DECLARATION]))
def on_tokens(ls: JobServer, params: types.SemanticTokensParams) -> types.SemanticTokens:
    job = ls.job(params)
    return show_tokens(tokens(job.snapshot), job.lines)


@server.feature(types.TEXT_DOCUMENT_FORMATTING)
def on_formatting(ls: JobServer, params: types.DocumentFormattingParams) -> list[types.TextEdit]:
    job = ls.job(params)
    return show_edits(format_text(job.snapshot.text), job.lines)


@server.feature(types.TEXT_DOCUMENT_DEFINITION)
def on_definition(ls: JobServer, params: types.DefinitionParams) -> list[types.Location]:
    job = ls.job(params)
    found = find_declaration(job.snapshot, job.lines.offset(params.position))
    return [show_location(place, job.encoding) for place in found]


@server.feature(types.TEXT_DOCUMENT_REFERENCES)
def on_references(ls: JobServer, params: types.ReferenceParams) -> list[types.Location]:
    job = ls.job(params)
    found = find_uses(job.snapshot, job.lines.offset(params.position), ls.neighbours(job))
    return [show_location(place, job.encoding) for place in found]


@server.feature(types.TEXT_DOCUMENT_RENAME)
def on_rename(ls: JobServer, params: types.RenameParams) -> types.WorkspaceEdit:
    job = ls.job(params)
    try:
        found = rename(job.snapshot, job.lines.offset(params.position), params.new_name, ls.neighbours(job))
    except RenameError as error:
        raise JsonRpcInvalidParams(str(error)) from None
    return show_rename([show_location(place, job.encoding) for place in found], params.new_name)


@server.feature(types.TEXT_DOCUMENT_CODE_ACTION, types.CodeActionOptions([types.CodeActionKind.QuickFix]))
def on_code_actions(ls: JobServer, params: types.CodeActionParams) -> list[types.CodeAction]:
    job = ls.job(params)
    start, end = job.lines.offset(params.range.start), job.lines.offset(params.range.end)
    texts = {other.snapshot.path: other.snapshot.text for other in ls.jobs.values()}
    fixes = find_fixes(job.snapshot, job.published, start, end, texts)
    return [show_fix(fix, job.uri, job.snapshot, job.lines) for fix in fixes]
