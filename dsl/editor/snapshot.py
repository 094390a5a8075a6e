"""A text as an editor has it: its tokens, its top-level statements, and the job that it describes.

Tokens always exist. Each top-level statement has a tree of its own, parsed when its text changes. One that cannot be
parsed keeps the last tree of its name, so that a half-written block hides nothing of the others.
"""

from __future__ import annotations

import os
from functools import cached_property

from dslc.dsl.diagnostics import Report
from dslc.dsl.editor.scopes import TOP_WORDS, Scope, ScopedToken, read_tokens, scope_tokens
from dslc.dsl.meaning.load import LoadResult, load_text
from dslc.dsl.record import Record, record
from dslc.dsl.source import Source
from dslc.dsl.syntax import tree
from dslc.dsl.syntax.mistakes import Token
from dslc.dsl.syntax.parser import parse


@record
class Region(Record):
    """One top-level statement: `name` is `model`, `param rate` or `import "base.plt"`; characters `start` to `end`.

    `document` is its tree, whose spans count from `start`; of a broken statement it is the last good tree of its name,
    or None.
    """

    name: str
    start: int
    end: int
    text: str
    document: tree.Document | None
    is_broken: bool


class Snapshot:
    """A text with everything that is known of it at once, without the compiler."""

    def __init__(self, text: str, path: str, previous: Snapshot | None = None) -> None:
        self.source, self.path, self.folder = Source(path, text), path, os.path.dirname(os.path.abspath(path))
        tokens, self.comments = read_tokens(self.source)
        self.tokens, self.last_scope = scope_tokens(tokens, text)
        self.regions: list[Region] = _regions(self.tokens, text, previous.regions if previous else ())
        self.loaded: LoadResult = load_text(text, path, self.folder)
        # A job that lacks something required has no values: those of the text before serve.
        self.last_good: LoadResult | None = self.loaded if self.loaded.job else previous.last_good if previous else None

    @property
    def text(self) -> str:
        return self.source.text

    def repaired(self) -> str:
        """Returns the text with each broken statement as it last was."""
        parts, at = [], 0
        for region in self.regions:
            text = region.document.source.text if region.is_broken and region.document else region.text
            parts += [self.text[at : region.start], text]
            at = region.end
        return "".join([*parts, self.text[at:]])

    def token_at(self, offset: int) -> ScopedToken | None:
        """Returns the token that holds the offset or ends there; of two that touch, a word before a sign."""
        touching = [t for t in self.tokens if t.token.start <= offset <= t.token.end and t.token.kind != "_NL"]
        words = [t for t in touching if t.role not in ("bracket", "operator", "unknown", "comparison")]
        return next(iter(words or touching), None)

    def scope_at(self, offset: int) -> tuple[Scope, Token | None]:
        """Returns the scope of the word that ends at or holds the offset, and that word; None if there is none."""
        starts = [comment.span.start for comment in self.comments if comment.span.start < offset]
        if starts and "\n" not in self.text[starts[-1] : offset]:
            return Scope(statement="#"), None
        for scoped in self.tokens:
            token = scoped.token
            is_sign = token.kind in ("_NL", "FOREIGN") or scoped.role in ("bracket", "operator", "comparison")
            if token.start < offset <= token.end and not is_sign:
                return scoped.scope, token
            if token.end > offset or (token.kind == "_NL" and token.start >= offset):
                return scoped.scope, None
        return self.last_scope, None

    @cached_property
    def params(self) -> dict[str, str]:
        """Returns the params of the job and its imports, with the text of their values where this file has them."""
        loaded = self.last_good or self.loaded
        params = {name: "" for name in loaded.origins if "." not in name}
        for region in self.regions:
            for statement in region.document.statements if region.document else ():
                if isinstance(statement, tree.Param):
                    params[statement.name] = statement.value.span.text() if statement.value else ""
        return params


def _regions(tokens: list[ScopedToken], text: str, before: tuple[Region, ...] | list[Region]) -> list[Region]:
    by_text = {region.text: region for region in before if not region.is_broken}
    by_name = {region.name: region.document for region in before if region.document}
    regions = []
    for name, start, end in _statements(tokens):
        part = text[start:end]
        same = by_text.get(part)
        document = same.document if same else _parse(part)
        regions.append(
            Region(
                name=name, start=start, end=end, text=part, document=document or by_name.get(name),
                is_broken=document is None,
            )
        )  # fmt: skip
    return regions


def _parse(text: str) -> tree.Document | None:
    report = Report()
    document = parse(Source("", text), report)
    return document if document is not None and document.complete and not report else None


def _statements(tokens: list[ScopedToken]) -> list[tuple[str, int, int]]:
    """Returns name, start and end of each top-level statement."""
    found: list[tuple[str, int, int]] = []
    is_open = False
    for at, (token, role, scope) in enumerate(tokens):
        if token.kind == "_NL":
            is_open = is_open and bool(scope.block or scope.brackets or _opens_later(tokens, at))
            continue
        starts = role in ("keyword", "block") and scope == Scope()
        if (starts or not is_open) and not (found and token.kind in ("LBRACE", "RBRACE") and not is_open):
            found.append((_name(tokens, at), token.start, token.end))
            is_open = True
        name, start, _ = found[-1] if found else ("", token.start, 0)
        found[-1:] = [(name, start, token.end)]
        if token.kind == "RBRACE":
            is_open = False
    return found


def _opens_later(tokens: list[ScopedToken], at: int) -> bool:
    return at + 1 < len(tokens) and tokens[at + 1].token.kind == "LBRACE"


def _name(tokens: list[ScopedToken], at: int) -> str:
    token, role, _ = tokens[at]
    following = tokens[at + 1].token.text if at + 1 < len(tokens) else ""
    if role == "keyword":
        return f"{token.text} {following.strip()}"
    return token.text if role == "block" or token.text in TOP_WORDS else ""
