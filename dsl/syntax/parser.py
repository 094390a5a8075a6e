"""Parses text to a tree: Lark parses the tokens of lexer.py and bracket_matching.py, and recovery.py continues after a
mistake.

    parse               a job file
    parse_expression    the text of one value
    parse_setting       `path = value`, as `--set` gives it

grammar.py runs Lark, builder.py makes the nodes, and explain.py explains the mistake at which Lark stops.
"""

from __future__ import annotations

from typing import Any

from lark import UnexpectedInput

from dslc.dsl.bounds import WORDS
from dslc.dsl.diagnostics import Report
from dslc.dsl.record import Record, record
from dslc.dsl.source import Source, Span
from dslc.dsl.syntax import tree
from dslc.dsl.syntax.bracket_matching import lay_out
from dslc.dsl.syntax.builder import Builder, path_of
from dslc.dsl.syntax.explain import other_format
from dslc.dsl.syntax.grammar import run
from dslc.dsl.syntax.lexer import lex
from dslc.dsl.syntax.mistakes import Mistakes, ParseAbortedError
from dslc.dsl.syntax.recovery import Recovery


@record
class SettingText(Record):
    """`train.optimizer.lr = 1e-3`.

    `value` is None if the text right of `=` is no expression; `mistakes` has the reasons. If the target takes a string,
    that text is taken as it is: `text`, at `text_span`.
    """

    path: tuple[str, ...]
    path_span: Span
    value: tree.Expr | None
    text: str
    text_span: Span
    mistakes: Report


def parse(source: Source, report: Report, words: int = WORDS.most) -> tree.Document | None:
    """Returns the tree of a job file, or None if the text is no job at all. Mistakes go into `report`.

    It may have at most `words` words, signs and comments. After mistakes the document is the readable part: an
    unreadable value is `tree.UnreadValue`, and `complete` is false if something was left out.
    """
    mistakes = Mistakes(source, report)
    try:
        return _document(source, mistakes, words)
    except ParseAbortedError:
        return None


def _document(source: Source, mistakes: Mistakes, words: int) -> tree.Document | None:
    if "\0" in source.text:
        at = source.text.index("\0")
        mistakes.add("E0001", "this is not a text file", (at, at + 1), label="this is a zero byte")
        return None
    lexed = lex(source, mistakes, words=words)
    if not any(token.kind != "_NL" for token in lexed.tokens):
        if not mistakes.offsets:
            what = "nothing but comments" if lexed.comments else "empty"
            mistakes.add("E0001", f"the file is {what}", (0, 0), help="`dslc new NAME` writes a job to start from")
        return None
    if other_format(lexed.tokens, mistakes):
        return None
    laid = lay_out(lexed.tokens, mistakes)
    builder = Builder(mistakes)
    recovery = Recovery(laid, mistakes, builder)
    try:
        statements = run(recovery.words, "start", builder.make, recovery).what
    except UnexpectedInput:
        return None
    return tree.Document(
        span=Span(source, 0, len(source.text)),
        source=source,
        statements=tuple(statements),
        comments=tuple(lexed.comments),
        complete=laid.complete and recovery.complete and builder.complete,
        words=len(lexed.tokens) + len(lexed.comments),
    )


def parse_expression(source: Source, report: Report, start: int = 0) -> tree.Expr | None:
    """Returns the value that `source` has from `start` on, or None with the reason in `report`."""
    mistakes = Mistakes(source, report, start)
    value = _one(source, mistakes, "value", start)
    return None if mistakes.offsets else value


def parse_setting(source: Source, report: Report) -> SettingText | None:
    """Returns one `--set`: its path and its value; None if the path is none, with the reason in `report`."""
    text = source.text
    equals = text.find("=")
    mistakes = Mistakes(source, report)
    if equals < 0:
        name, _, meant = text.strip().partition(":")
        mistakes.add(
            "E0013",
            "`--set` takes `name=value`, and there is no `=` here",
            (0, len(text)),
            help=f"write `{name.strip() or 'name'}={meant.strip() or '…'}`",
        )
        return None
    left = Source(source.name, text[:equals])
    if not left.text.strip():
        mistakes.add("E0021", "no name stands before this `=`", (equals, equals + 1))
        return None
    path = _one(left, Mistakes(left, Report()), "path", 0)
    if path is None:
        start = len(left.text) - len(left.text.lstrip())
        shown = left.text.strip()
        mistakes.add(
            "E0021",
            f"`{shown}` names nothing that could be set",
            (start, start + len(shown)),
            help="write the name of a `param`, `block.field`, or `block.field.argument`",
        )
        return None
    right = text[equals + 1 :]
    text_start = equals + 1 + len(right) - len(right.lstrip())
    value_report = Report()
    names, span = path_of(path)
    value = parse_expression(source, value_report, equals + 1)
    return SettingText(
        path=names,
        path_span=Span(source, span.start, span.end),
        value=value,
        text=right.strip(),
        text_span=Span(source, text_start, text_start + len(right.strip())),
        mistakes=value_report,
    )


def _one(source: Source, mistakes: Mistakes, start_rule: str, start: int) -> Any:
    """Returns the value or path of a text in which line ends do not count; None after a mistake."""
    try:
        laid = lay_out(lex(source, mistakes, start).tokens, mistakes, one_value=True)
        recovery = Recovery(laid, mistakes, None)
        node = run(recovery.words, start_rule, Builder(mistakes).make, recovery).what
    except (ParseAbortedError, UnexpectedInput):
        return None
    return None if mistakes.offsets else node
