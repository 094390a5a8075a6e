"""The meaning of each word of a text, for colours."""

from __future__ import annotations

from typing import NamedTuple

from dslc.dsl.editor.scopes import TOP_WORDS, Role, ScopedToken
from dslc.dsl.editor.snapshot import Snapshot

# The types of the protocol, by role; a role without a type has no colour of its own.
TYPES: dict[Role, str] = {
    "block": "namespace", "field": "property", "param": "variable", "call": "function", "argument": "parameter",
    "name": "enumMember", "keyword": "keyword", "literal": "keyword", "number": "number", "string": "string",
    "operator": "operator", "comparison": "operator",
}  # fmt: skip
LEGEND = (*dict.fromkeys(TYPES.values()), "comment")
DECLARATION = "declaration"


class SemanticToken(NamedTuple):
    """Characters `start` to `end`; `is_declaration` for the name of a `param` where it is declared."""

    start: int
    end: int
    type: str
    is_declaration: bool = False


def tokens(snapshot: Snapshot) -> list[SemanticToken]:
    """Returns the tokens of any text, in order; none of them spans a line end."""
    found = [
        SemanticToken(scoped.token.start, scoped.token.end, kind, scoped.role == "param")
        for scoped in snapshot.tokens
        if (kind := _type(scoped, snapshot)) and "\n" not in snapshot.text[scoped.token.start : scoped.token.end]
    ]
    comments = [SemanticToken(c.span.start, c.span.end, "comment") for c in snapshot.comments]
    return sorted(found + comments)


def _type(scoped: ScopedToken, snapshot: Snapshot) -> str:
    token, role, scope = scoped
    if role == "name" and token.text in snapshot.params:
        return TYPES["param"]
    if role == "block" and not scope.block and token.text == "language":
        return TYPES["keyword"]
    if role == "field" and scope.block == "sweep" and not scope.path and token.text in TOP_WORDS:
        return TYPES["block"]
    return TYPES.get(role, "")
