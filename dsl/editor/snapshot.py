"""A text as an editor has it: its tokens, its top-level statements, and the job that it describes.

Tokens always exist. Each top-level statement has a tree of its own, parsed when it is asked for. One that cannot be
parsed keeps the last tree of its name, so that a half-written block hides nothing of the others.
"""

from __future__ import annotations

import functools
import os

from dslc.dsl.diagnostics import Report
from dslc.dsl.editor.scopes import TOP_WORDS, Scope, ScopedToken, read_tokens, scope_tokens
from dslc.dsl.meaning.load import LoadResult, load_text
from dslc.dsl.record import Record, record
from dslc.dsl.source import Source, Span
from dslc.dsl.syntax import tree
from dslc.dsl.syntax.mistakes import Token
from dslc.dsl.syntax.parser import parse


@record
class Region(Record):
    """One top-level statement: `name` is `model`, `param rate` or `import "base.plt"`; characters `start` to `end`.

    `good_text` is the text of its tree: its own, of a broken statement the last one of its name, or "".
    """

    name: str
    start: int
    end: int
    text: str
    good_text: str

    @property
    def document(self) -> tree.Document | None:
        """The tree of `good_text`, whose spans count from its beginning."""
        return parse_statement(self.good_text)


@functools.lru_cache(maxsize=512)
def parse_statement(text: str) -> tree.Document | None:
    """Returns the tree of one statement; None if it has a syntax mistake."""
    report = Report()
    document = parse(Source("", text), report)
    return document if document is not None and document.complete and not report else None


class Snapshot:
    """A text with everything that is known of it at once, without the compiler."""

    def __init__(self, text: str, path: str, previous: Snapshot | None = None) -> None:
        self.source, self.path, self.folder = Source(path, text), path, os.path.dirname(os.path.abspath(path))
        tokens, self.comments = read_tokens(self.source)
        self.tokens, self.last_scope = scope_tokens(tokens, text)
        self.loaded: LoadResult = load_text(text, path, self.folder)
        self.regions: list[Region] = self.read_regions(previous.regions if previous else [])
        # A job that lacks something required has no values: those of the text before serve.
        self.last_good: LoadResult | None = self.loaded if self.loaded.job else previous.last_good if previous else None

    @property
    def text(self) -> str:
        return self.source.text

    def place_of(self, span: Span) -> Span | None:
        """Returns where this text shows a span: one that lies in an imported file is shown at its import, or at the
        first import where another file imports it.
        """
        if span.source.name == self.path:
            return span
        imports = [region for region in self.regions if region.name.startswith("import ")]
        named = [region for region in imports if os.path.basename(span.source.name) in region.text]
        region = next(iter(named or imports), None)
        return Span(self.source, region.start, region.end) if region else None

    def repaired(self) -> str:
        """Returns the text with each broken statement as it last was."""
        parts, at = [], 0
        for region in self.regions:
            parts += [self.text[at : region.start], region.good_text or region.text]
            at = region.end
        return "".join([*parts, self.text[at:]])

    def read_regions(self, before: list[Region]) -> list[Region]:
        """Returns the statements, parsed one by one, each when it changes, only if the text has syntax mistakes."""
        document = self.loaded.document
        is_whole = document is not None and document.complete and not any(
            d.code.startswith("E00") and d.span is not None and d.span.source.name == self.path
            for d in self.loaded.report
        )  # fmt: skip
        texts = {region.good_text for region in before}
        by_name = {region.name: region.good_text for region in before if region.good_text}
        regions = []
        for name, start, end in _statements(self.tokens):
            text = self.text[start:end]
            is_good = is_whole or text in texts or parse_statement(text) is not None
            good = text if is_good else by_name.get(name, "")
            regions.append(Region(name=name, start=start, end=end, text=text, good_text=good))
        return regions

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

    @functools.cached_property
    def params(self) -> dict[str, str]:
        """Returns the params of the job and its imports, with the text of their values where this file has them."""
        loaded = self.last_good or self.loaded
        params = {name: "" for name in loaded.origins if "." not in name}
        for region in self.regions:
            document = region.document if region.name.startswith("param ") else None
            for statement in document.statements if document else ():
                if isinstance(statement, tree.Param):
                    params[statement.name] = statement.value.span.text() if statement.value else ""
        return params


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
