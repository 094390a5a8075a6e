"""Syntax mistakes and their places, used by explain.py and explain_values.py.

`Mistakes` collects the reports on one text, so that further mistakes in the same entry count as consequences and are
not reported. `ParserPosition` is the point where the parser stopped, with its surroundings.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple

from dslc.dsl.diagnostics import Note, Report
from dslc.dsl.source import Source, Span

MAX_MISTAKES = 50  # of one text; nobody reads more

# Strings and brackets that are not closed correctly: the text after them is probably read at the wrong depth.
TANGLES = frozenset({"E0004", "E0010", "E0011", "E0012"})

OPERATORS = frozenset({"PLUS", "MINUS", "STAR", "SLASH", "DOUBLE_SLASH", "DOUBLE_STAR", "RANGE"})
COMPARISONS = frozenset({"LESS", "AT_MOST", "EQUALS", "AT_LEAST", "MORE"})
KEYWORDS = frozenset({"PARAM", "IMPORT", "TRUE", "FALSE", "NONE"})
BEGINS_VALUE = frozenset({"NUMBER", "QUANTITY", "STRING", "NAME", "LPAR", "LSQB", "TRUE", "FALSE", "NONE"})
ENDS_VALUE = frozenset({"NUMBER", "QUANTITY", "STRING", "NAME", "RPAR", "RSQB", "TRUE", "FALSE", "NONE"})
ENDS = frozenset({"_NL", "COMMA", "RBRACE", "RPAR", "RSQB", "$END"})
CONTROL = frozenset(
    ("if", "elif", "else", "unless", "when", "for", "foreach", "while", "match", "switch", "case", "endif", "end")
    + ("def", "class", "function", "fn", "lambda", "return", "try")
)
ENVIRONMENT = frozenset({"env", "getenv", "environ", "ENV"})
DECLARES = frozenset({"let", "const", "var", "val", "local", "variable", "set", "parameter"})
OTHER_LITERALS = {"True": "true", "False": "false", "None": "none", "null": "none", "nil": "none", "NULL": "none"}
# Only for guesses: dsl/language/units.py defines the units.
UNITS = frozenset(
    ("B", "kB", "MB", "GB", "TB", "KiB", "MiB", "GiB", "TiB", "us", "ms", "s", "min", "h", "d")
    + ("step", "steps", "epoch", "epochs", "Gbps", "GBps", "TFLOPS")
)


class Token(NamedTuple):
    """A word of the text. `kind` is the grammar's terminal, or `FOREIGN`."""

    kind: str
    text: str
    start: int
    end: int


class ParseAbortedError(Exception):
    """The text is no job, or has more mistakes than anyone would read; the rest is not read. The mistakes are
    reported.
    """


class Mistakes:
    """The syntax mistakes of one text, added to a report, with their places."""

    def __init__(self, source: Source, report: Report, start: int = 0) -> None:
        self.source, self.report, self.start = source, report, start
        self.offsets: list[int] = []
        self.tangles: list[int] = []

    def add(
        self,
        code: str,
        message: str,
        start: int,
        end: int,
        *,
        label: str = "",
        notes: Iterable[Note] = (),
        help: str = "",
    ) -> None:
        if len(self.offsets) == MAX_MISTAKES:
            raise ParseAbortedError
        self.report.add(code, message, self.span(start, end), label=label, notes=notes, help=help)
        self.offsets.append(start)
        if code in TANGLES:
            self.tangles.append(start)

    def span(self, start: int, end: int) -> Span:
        return Span(self.source, start, end)

    def column(self, offset: int) -> int:
        return self.source.position(offset)[1]

    def within(self, start: int, end: int) -> bool:
        """True if a mistake lies there; its end counts, as something missing is reported there."""
        return any(start <= offset <= end for offset in self.offsets)

    def tangled(self, start: int, end: int) -> bool:
        """True if a mistake lies there after which brackets cannot be trusted."""
        return any(start <= offset <= end for offset in self.tangles)


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
        depth = 0
        for token in reversed(self.tokens[self.start : self.at]):
            depth += (token.kind in ("RPAR", "RSQB")) - (token.kind in ("LPAR", "LSQB"))
            if depth < 0:
                return token
        return None

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
        self.mistakes.add(code, message, where.start, where.end, label=label, help=help)
        return True

    def report_after(self, code: str, message: str, where: Token, *, label: str = "", help: str = "") -> bool:
        """Reports something missing after a token."""
        self.mistakes.add(code, message, where.end, where.end, label=label, help=help)
        return True


def token_text(token: Token) -> str:
    """Returns a token as messages name it."""
    if token.kind == "$END":
        return "the end"
    if token.kind == "_NL":
        return "the end of the line"
    return f"`{token.text}`" if len(token.text) <= 40 else f"`{token.text[:40]}…`"


def reserved(place: ParserPosition, token: Token) -> bool:
    if token.kind in ("PARAM", "IMPORT") and place.in_body:
        message = f"`{token.text}` stands outside of blocks"
        return place.report(
            "E0022", message, token, help=f"move it before the block; a field cannot be called `{token.text}`"
        )
    message = f"`{token.text}` is a word of the language and cannot be a name"
    return place.report("E0021", message, token, help="choose another name")
