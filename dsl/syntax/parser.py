"""Parses text to a tree: Lark parses the tokens of lexer.py and bracket_matching.py.

    parse               a job file
    parse_expression    the text of one value
    parse_setting       `path = value`, as `--set` gives it

grammar.py runs Lark, builder.py makes the nodes, and explain.py explains the mistake at which Lark stops.

When Lark cannot go on, the mistake is explained, and its unit (one entry or statement) is completed: Lark's interactive
parser gets the tokens missing for `name = <broken>`, and reading goes on after the unit. A unit without a name is left
out. Within one unit only the first cause is reported.

Limits: a syntax mistake costs the whole of its entry; a block header with a mistake costs the whole block.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from lark import UnexpectedInput, UnexpectedToken

from dslc.dsl.bounds import WORDS
from dslc.dsl.diagnostics import Report
from dslc.dsl.record import Record, record
from dslc.dsl.source import Source, Span
from dslc.dsl.syntax import tree
from dslc.dsl.syntax.bracket_matching import BracketLayout, TokenRange, lay_out
from dslc.dsl.syntax.builder import Builder, path_of
from dslc.dsl.syntax.explain import explain, other_format
from dslc.dsl.syntax.grammar import Words, lark_token, run
from dslc.dsl.syntax.lexer import lex
from dslc.dsl.syntax.mistakes import (
    COMPARISONS,
    PAIRS,
    Mistakes,
    ParseAbortedError,
    ParserPosition,
    Token,
    open_brackets,
)

if TYPE_CHECKING:
    from lark import UnexpectedInput
    from lark.parsers.lalr_interactive_parser import InteractiveParser


class Recovery:
    """Explains the mistakes of one text, whose `words` Lark reads, and recovers from them.

    `builder` is None for a text of one value, which is read no further than to the first mistake.
    """

    def __init__(self, laid: BracketLayout, mistakes: Mistakes, builder: Builder | None) -> None:
        self.laid, self.mistakes, self.builder = laid, mistakes, builder
        self.words = Words(laid.tokens)
        self.complete = True
        self.tangled: set[int] = set()  # units that begin with a value: the next such one is part of the same mistake

    def __call__(self, error: UnexpectedInput) -> bool:
        """Explains why the current token cannot follow, and moves Lark behind its unit; False stops reading."""
        assert isinstance(error, UnexpectedToken)
        at = len(self.laid.tokens) - 1 if error.token.type == "$END" else self.words.at
        number = self.laid.unit_of[at]
        unit, tokens = self.laid.units[number], self.laid.tokens
        if not self.mistakes.within(tokens[unit.start].start, tokens[unit.end].start) and not self.goes_on(at, number):
            explain(ParserPosition(self.mistakes, tokens, at, unit.start, unit.end, unit.in_body, self.builder is None))
        if self.builder is None or tokens[unit.start].kind in ("$END", "RBRACE"):
            return False
        drops = at == unit.start or tokens[unit.end].kind == "LBRACE" or not self.has_name(unit)
        self.complete = self.complete and not drops
        if at > unit.start:
            self.builder.mending, self.builder.dropping = tokens[unit.end - 1].end, drops
            self.finish(error.interactive_parser, unit, at)
            self.builder.mending, self.builder.dropping = None, False
        self.words.at = self.last_token_of_unit(unit, at > unit.start)
        return True

    def finish(self, parser: InteractiveParser, unit: TokenRange, at: int) -> None:
        """Gives Lark the missing tokens of a unit, after it has read the tokens before `at`."""
        tokens = self.laid.tokens
        where = tokens[unit.end - 1].end
        header = tokens[unit.end].kind == "LBRACE"
        brackets = open_brackets(tokens[unit.start : at])
        ends = [Token(PAIRS[bracket.kind], "", where, where) for bracket in reversed(brackets)]
        ends.append(Token("_NL", "", where, where) if header else tokens[unit.end])
        while kind := _missing(parser, ends[0].kind):
            parser.feed_token(lark_token(Token(kind, "", where, where)))
        for end in ends:
            parser.feed_token(lark_token(end))

    def last_token_of_unit(self, unit: TokenRange, finished: bool) -> int:
        """Returns the last token of a unit and of the part that is left out with it; Lark continues with the next."""
        tokens, last = self.laid.tokens, unit.end
        if tokens[last].kind == "LBRACE":
            while tokens[last].kind != "RBRACE":
                last += 1
            return last + (tokens[last + 1].kind == "_NL")
        if finished or tokens[last].kind == "_NL":
            return last
        if tokens[last].kind == "COMMA":
            return last + (tokens[last + 1].kind == "_NL")
        return last - 1

    def has_name(self, unit: TokenRange) -> bool:
        """True if the entry or statement is worth keeping: if the name that it sets or imports is known."""
        kinds = [token.kind for token in self.laid.tokens[unit.start : unit.end]]
        if unit.in_body:
            return kinds[0] == "NAME"
        if kinds[0] == "NAME":
            return kinds[1:2] in (["EQUAL"], ["EQUALS"], ["FOREIGN"])
        return kinds[:2] in (["PARAM", "NAME"], ["IMPORT", "STRING"])

    def goes_on(self, at: int, number: int) -> bool:
        """True if the tokens after a mistake, which are no entry, are part of the same mistake: because brackets went
        wrong before them, or because nothing begins like this.
        """
        units, tokens = self.laid.units, self.laid.tokens
        unit, previous = units[number], number - 1
        while previous > 0 and units[previous].start == units[previous].end:
            previous -= 1
        if previous < 0:
            return False
        start, end = tokens[units[previous].start].start, tokens[units[previous].end].start
        odd = at == unit.start and tokens[at].kind not in ("NAME", "STRING", "COMMA", "PARAM", "IMPORT")
        tangled = previous in self.tangled or self.mistakes.tangled(start, end)
        kinds = [token.kind for token in tokens[unit.start : unit.start + 2]]
        nameless = kinds[0] not in ("NAME", "STRING") or kinds == ["NAME", "LPAR"]
        begins = self.begins_entry(unit)
        if not begins and (tangled or nameless):
            self.tangled.add(number)
        return (tangled and not begins) or (odd and self.mistakes.within(start, end))

    def begins_entry(self, unit: TokenRange) -> bool:
        kinds = [token.kind for token in self.laid.tokens[unit.start : unit.end + 1]]
        while kinds[:2] == ["NAME", "DOT"]:
            del kinds[:2]
        return kinds[:1] in (["PARAM"], ["IMPORT"]) or (
            kinds[:1] == ["NAME"] and kinds[1] in ("EQUAL", "LBRACE", "FOREIGN", *COMPARISONS)
        )


def _missing(parser: InteractiveParser, end: str) -> str | None:
    """Returns the next token needed before a unit or bracket can end: `=` after a name, and a value after that."""
    choices = parser.choices()
    if "EQUAL" in choices:
        return "EQUAL"
    return None if end in choices else "NAME" if "NAME" in choices else "STRING"


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
