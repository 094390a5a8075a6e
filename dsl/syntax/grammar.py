"""Lark's LALR(1) parser of `grammar/plt.lark`, and one run of it over the tokens of a text.

Lark compiles the grammar once; the result is kept in the user's cache (dsl/cache.py) and loaded from there. Importing
lark takes longer than that: only the commands that read a job import this room.
"""

from __future__ import annotations

import functools
import io
import os
import sys
from collections.abc import Callable, Iterator
from contextvars import ContextVar
from typing import Any, TypeVar

import lark
from lark.lexer import Lexer, LexerState

import dslc.grammar
from dslc.dsl import cache
from dslc.dsl.syntax.mistakes import Token

STARTS = ["start", "value", "path"]  # start rules: a job, one value, or the path of a `--set`

T = TypeVar("T")
# Makes the result of a rule from its name and its children: tokens, and earlier results.
Make = Callable[[str, list[Any]], T]

_make: ContextVar[Make[object]] = ContextVar("make")  # for the text being read


class Words:
    """The tokens of a text for Lark. `at` is the last that Lark took; setting it moves Lark there."""

    def __init__(self, tokens: list[Token]) -> None:
        assert tokens[-1].kind == "$END"  # Lark adds it itself
        self.tokens, self.at = tokens, -1

    def __iter__(self) -> Iterator[lark.Token]:
        while self.at + 2 < len(self.tokens):
            self.at += 1
            yield lark_token(self.tokens[self.at])


class _TokenReader(Lexer):
    """Gives Lark the tokens of lexer.py and bracket_matching.py, as its own lexer cannot explain mistakes."""

    __future_interface__ = 2  # `lex` takes Lark's state, whose `text` is the argument of `parse`

    def __init__(self, conf: object) -> None:
        pass

    def lex(self, lexer_state: LexerState, parser_state: object) -> Iterator[lark.Token]:
        words: Any = lexer_state.text
        return iter(words)


class _Rules(lark.Transformer[lark.Token, object]):
    """Calls the `Make` of the text being read, for every rule with a result."""

    def __getattr__(self, rule: str) -> Callable[[list[object]], object]:
        if rule.startswith("_") or not rule.islower():
            raise AttributeError(rule)
        return lambda children: _make.get()(rule, children)


def lark_token(token: Token) -> lark.Token:
    return lark.Token(token.kind, token.text, start_pos=token.start, end_pos=token.end)


def run(words: Words, start: str, make: Make[T], on_error: Callable[[lark.UnexpectedInput], bool]) -> T:
    """Returns the result of the rule `start` on the words. At a mistake it calls `on_error`, as `lark.Lark.parse`
    describes.

    Raises `lark.UnexpectedInput` if that returns False.
    """
    before = _make.set(make)
    try:
        made: T = load().parse(words, start=start, on_error=on_error)  # type: ignore[assignment]
        return made  # made by `make` for the rule `start`
    finally:
        _make.reset(before)


@functools.cache
def load() -> lark.Lark:
    """Returns Lark's parser of the grammar, from the cache if it is there."""
    with open(os.path.join(next(iter(dslc.grammar.__path__)), "plt.lark"), encoding="utf-8") as file:
        grammar = file.read()
    path = cache.path_of(f"{lark.__version__} {sys.version} {_TokenReader} {_Rules} {STARTS} {grammar}")
    kept = cache.read_checked(path) if path else None
    if kept:
        return lark.Lark.load(io.BytesIO(kept))
    made = lark.Lark(grammar, parser="lalr", lexer=_TokenReader, transformer=_Rules(), start=STARTS)
    if path:
        saved = io.BytesIO()
        made.save(saved)
        cache.write(path, saved.getvalue())
    return made


def terminals() -> list[tuple[str, str]]:
    """Returns name and regular expression of every terminal, in the order in which they are tried."""
    # Priorities decide, then length: `**` before `*`. Regular expressions of one priority do not overlap.
    ordered = sorted(load().terminals, key=lambda t: (-t.priority, -len(t.pattern.value), t.name))
    return [(terminal.name, terminal.pattern.to_regexp()) for terminal in ordered]
