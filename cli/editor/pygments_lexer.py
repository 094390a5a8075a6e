"""A lexer for Pygments, which the documentation and Jupyter use. Its tokens come from the editor's room."""

from __future__ import annotations

from collections.abc import Iterator
from typing import ClassVar

from pygments.lexer import Lexer
from pygments.token import Comment, Keyword, Name, Number, Operator, Punctuation, String, Text, _TokenType

from dslc.dsl.editor.scopes import Role, read_tokens, scope_tokens
from dslc.dsl.source import Source

TYPES: dict[Role, _TokenType] = {
    "block": Name.Class, "field": Name.Attribute, "param": Name.Variable, "call": Name.Function,
    "argument": Name.Attribute, "name": Name, "keyword": Keyword, "literal": Keyword.Constant, "number": Number,
    "string": String, "operator": Operator, "comparison": Operator, "bracket": Punctuation,
}  # fmt: skip


class PltLexer(Lexer):
    """Jobs of dslc."""

    name = "dslc job"
    aliases: ClassVar[list[str]] = ["plt"]
    filenames: ClassVar[list[str]] = ["*.plt"]

    def get_tokens_unprocessed(self, text: str) -> Iterator[tuple[int, _TokenType, str]]:
        """Yields all of a text, whatever mistakes it has; what lies between the tokens is text."""
        source = Source("", text)
        lexed = read_tokens(source)
        parts = [(c.span.start, c.span.end, Comment.Single) for c in lexed.comments]
        for token, role, _ in scope_tokens(lexed.tokens, text)[0]:
            parts.append((token.start, token.end, TYPES.get(role, Text)))
        at = 0
        for start, end, kind in sorted(parts, key=lambda part: part[:2]):
            if start > at:
                yield at, Text, text[at:start]
            yield start, kind, text[start:end]
            at = end
        if at < len(text):
            yield at, Text, text[at:]
