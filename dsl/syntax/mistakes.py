"""Syntax mistakes and their places, used by explain.py.

`Mistakes` collects the reports on one text, so that further mistakes in the same entry count as consequences and are
not reported. `ParserPosition` is the point where the parser stopped, with its surroundings.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple

from dslc.dsl.diagnostics import Note, Report
from dslc.dsl.remedy import Edit
from dslc.dsl.source import Source, Span

MAX_MISTAKES = 50  # of one text; nobody reads more

# Strings and brackets that are not closed correctly: the text after them is probably read at the wrong depth.
TANGLES = frozenset({"E0004", "E0010", "E0011", "E0012"})

PAIRS = {"LPAR": "RPAR", "LSQB": "RSQB", "LBRACE": "RBRACE"}
OPENERS = {closer: opener for opener, closer in PAIRS.items()}
OPERATORS = frozenset({"PLUS", "MINUS", "STAR", "SLASH", "DOUBLE_SLASH", "DOUBLE_STAR", "RANGE"})
COMPARISONS = frozenset({"LESS", "AT_MOST", "EQUALS", "AT_LEAST", "MORE"})
KEYWORDS = frozenset({"PARAM", "IMPORT", "TRUE", "FALSE", "NONE"})
BEGINS_VALUE = frozenset({"NUMBER", "QUANTITY", "STRING", "NAME", "LPAR", "LSQB", "TRUE", "FALSE", "NONE"})
ENDS_VALUE = frozenset({"NUMBER", "QUANTITY", "STRING", "NAME", "RPAR", "RSQB", "TRUE", "FALSE", "NONE"})
ENDS = frozenset({"_NL", "COMMA", "RBRACE", "RPAR", "RSQB", "$END"})
ENVIRONMENT = frozenset({"env", "getenv", "environ", "ENV"})
OTHER_LITERALS = {"True": "true", "False": "false", "None": "none", "null": "none", "nil": "none", "NULL": "none"}


class Token(NamedTuple):
    """A word of the text. `kind` is the grammar's terminal, or `FOREIGN`."""

    kind: str
    text: str
    start: int
    end: int


class ParseAbortedError(Exception):
    """The text is no job, or has too many mistakes, which are reported; the rest is not read."""


class Mistakes:
    """The syntax mistakes of one text, added to a report, with their places."""

    def __init__(self, source: Source, report: Report, start: int = 0) -> None:
        self.source, self.report, self.start = source, report, start
        self.offsets: list[int] = []
        self.tangles: list[int] = []

    def add(
        self, code: str, message: str, where: Token | Span | tuple[int, int], *, label: str = "",
        notes: Iterable[Note] = (), help: str = "",
    ) -> None:  # fmt: skip
        """Reports a mistake at a token or span, or from the first to the second offset."""
        if len(self.offsets) == MAX_MISTAKES:
            raise ParseAbortedError
        start, end = (where.start, where.end) if isinstance(where, Token | Span) else where
        self.report.add(code, message, self.span(start, end), label=label, notes=notes, help=help)
        self.offsets.append(start)
        if code in TANGLES:
            self.tangles.append(start)

    def span(self, start: int, end: int) -> Span:
        return Span(self.source, start, end)

    def replacement(self, start: int, end: int, text: str, shown: str = "") -> Edit:
        """Returns the edit that replaces the text between two offsets; `shown` is how the help calls it."""
        return Edit("", text, self.span(start, end), shown or f"`{text}`")

    def column(self, offset: int) -> int:
        return self.source.position(offset)[1]

    def within(self, start: int, end: int) -> bool:
        """True if a mistake lies there; its end counts, as something missing is reported there."""
        return any(start <= offset <= end for offset in self.offsets)

    def tangled(self, start: int, end: int) -> bool:
        """True if a mistake lies there after which brackets cannot be trusted."""
        return any(start <= offset <= end for offset in self.tangles)


def open_brackets(tokens: list[Token]) -> list[Token]:
    """Returns the brackets that are opened among these tokens and not closed."""
    brackets: list[Token] = []
    for token in tokens:
        if token.kind in PAIRS:
            brackets.append(token)
        elif token.kind in OPENERS and brackets:
            brackets.pop()
    return brackets


class ParserPosition(NamedTuple):
    """The point where the parser stopped: `tokens[at]`, in the unit from `start` to `end` (its last token)."""

    mistakes: Mistakes
    tokens: list[Token]
    at: int
    start: int
    end: int
    in_body: bool
    one_value: bool

    @property
    def token(self) -> Token:
        return self.tokens[self.at]

    @property
    def previous_token(self) -> Token | None:
        return self.tokens[self.at - 1] if self.at > self.start else None

    @property
    def first_token(self) -> Token:
        return self.tokens[self.start]

    def following(self, ahead: int = 1) -> Token:
        return self.tokens[min(self.at + ahead, len(self.tokens) - 1)]

    def bracket(self) -> Token | None:
        """The innermost bracket of the unit that is open here."""
        brackets = open_brackets(self.tokens[self.start : self.at])
        return brackets[-1] if brackets else None

    def path_end(self) -> int:
        """The index after the name or path with which the unit begins."""
        at = self.start
        if self.tokens[at].kind != "NAME":
            return at
        while self.tokens[at + 1].kind == "DOT" and self.tokens[at + 2].kind == "NAME":
            at += 2
        return at + 1

    def path(self) -> str:
        return "".join(token.text for token in self.tokens[self.start : self.path_end()])

    def adjacent(self) -> bool:
        return self.previous_token is not None and self.previous_token.end == self.token.start

    def report(self, code: str, message: str, where: Token, *, label: str = "", help: str = "") -> bool:
        self.mistakes.add(code, message, where, label=label, help=help)
        return True

    def report_after(self, code: str, message: str, where: Token, *, label: str = "", help: str = "") -> bool:
        self.mistakes.add(code, message, (where.end, where.end), label=label, help=help)
        return True
