"""Continues after a syntax mistake.

When Lark cannot go on, the mistake is explained, and its unit (one entry or statement) is completed: Lark's interactive
parser gets the tokens missing for `name = <broken>`, and reading goes on after the unit. A unit without a name is left
out. Within one unit only the first cause is reported.

Limits: a syntax mistake costs the whole of its entry; a block header with a mistake costs the whole block.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from lark import UnexpectedToken

from dslc.dsl.syntax.bracket_matching import BracketLayout, TokenRange
from dslc.dsl.syntax.builder import Builder
from dslc.dsl.syntax.explain import explain
from dslc.dsl.syntax.grammar import Words, lark_token
from dslc.dsl.syntax.mistakes import COMPARISONS, PAIRS, Mistakes, ParserPosition, Token, open_brackets

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
