"""Explains mistakes inside an entry: missing values, missing commas, two values, comparisons.

Each function asks one question about the place where the parser stopped; if the answer is yes it reports and returns
True. explain.py decides their order.
"""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

from dslc.dsl.language.registry import BLOCKS
from dslc.dsl.syntax.mistakes import (
    BEGINS_VALUE,
    COMPARISONS,
    ENDS,
    ENDS_VALUE,
    KEYWORDS,
    OPERATORS,
    UNITS,
    ParserPosition,
    token_text,
)

if TYPE_CHECKING:
    from dslc.dsl.syntax.mistakes import Token


def name_alone(place: ParserPosition) -> bool:
    if not place.in_body or place.at != place.path_end() or place.token.kind not in ENDS or place.at == place.start:
        return False
    path = place.path()
    where = place.tokens[place.at - 1]
    return place.report("E0014", f"`{path}` has no value", where, help=f"write `{path} = …`")


def missing_equals(place: ParserPosition) -> bool:
    token, before = place.token, place.previous_token
    if not place.in_body or before is None or place.at != place.path_end() or token.kind not in BEGINS_VALUE:
        return False
    path = place.path()
    if token.kind == "LPAR" and place.adjacent():
        message = f"`{path}(…)` is a value without a name"
        return place.report("E0013", message, before, help=f"write `name = {path}(…)`")
    return place.report_after(
        "E0013", f"`=` is missing between `{path}` and its value", before, help=f"write `{path} = …`"
    )


def missing_value(place: ParserPosition) -> bool:
    token, before = place.token, place.previous_token
    if token.kind == "COMMA" and before and before.kind in ("COMMA", "LPAR", "LSQB"):
        return place.report(
            "E0014",
            "nothing stands before this comma",
            token,
            help="write the value that is missing, or remove the comma",
        )
    if token.kind == "RPAR" and before and before.kind == "LPAR":
        return place.report("E0014", "nothing stands between these brackets", token)
    if before and before.kind in (OPERATORS | COMPARISONS | {"EQUAL"}):
        if token.kind in ENDS:
            return place.report("E0014", f"a value is missing after `{before.text}`", before)
        if token.kind in KEYWORDS:
            return place.report("E0021", f"`{token.text}` is a word of the language and not a value", token)
        if token.kind in (OPERATORS | {"DOT"}):
            message = f"a value is missing between `{before.text}` and `{token.text}`"
            return place.report("E0014", message, token, help=in_quotes(place))
    if before and before.kind == "DOT" and token.kind != "NAME":
        return place.report("E0021", "a name is missing after `.`", before)
    if token.kind in OPERATORS and before and before.kind in ("LPAR", "LSQB", "COMMA"):
        return place.report("E0014", f"a value is missing before `{token.text}`", token, help=in_quotes(place))
    return place.one_value and before is None and _no_value(place)


# A path at the beginning of a value: `/data/a.txt`, `./runs`, `~/weights`.
_PATH = re.compile(r"(?:~|\.{1,2})?/[\w./*~-]*")


def in_quotes(place: ParserPosition) -> str:
    """Returns the quoted form of a path that begins where a value is missing; "" if there is none."""
    found = _PATH.match(place.mistakes.source.text, place.token.start)
    return f'a path stands in quotes: `"{found[0]}"`' if found and len(found[0]) in range(2, 200) else ""


def _no_value(place: ParserPosition) -> bool:
    if place.token.kind == "$END":
        return place.report("E0014", "a value is missing here", place.token)
    return False


def two_values(place: ParserPosition) -> bool:
    """Reports two values with nothing between them."""
    token, before = place.token, place.previous_token
    if before is None or before.kind not in ENDS_VALUE or token.kind not in (BEGINS_VALUE | KEYWORDS):
        return False
    gap = place.mistakes.source.text[before.end : token.start]
    if before.kind == "NUMBER" and token.kind == "NAME" and gap.strip(" \t") == "" and token.text in UNITS:
        message = f"at most one space may stand between a number and its unit: `{before.text} {token.text}`"
        place.mistakes.add("E0008", message, before.end, token.start, label=_gap_text(gap))
        return True
    if before.kind == "QUANTITY" and before.text.endswith("%"):
        message = "`%` is a unit, as in `20%`; there is no remainder"
        return place.report(
            "E0026", message, before, label=f"a value ends here, and {token_text(token)} begins another"
        )
    if before.kind == "NAME" and token.kind == "STRING" and not gap:
        return place.report(
            "E0006", "a string has no prefix and knows no interpolation", before, help=f"remove `{before.text}`"
        )
    if token.kind == "LSQB" and not gap:
        return place.report("E0026", "a value has no items to pick with `[ ]`", token)
    bracket = place.bracket()
    if bracket:
        what = "items of a list" if bracket.kind == "LSQB" else "arguments" if _is_call(place, bracket) else "values"
        help_text = "write `,` between them" if what != "values" else "a list is written `[a, b]`"
        return place.report_after(
            "E0016",
            f"a comma is missing between two {what}",
            before,
            label=f"before {token_text(token)}",
            help=help_text,
        )
    starts_entry = token.kind == "NAME" and place.following().kind in ({"EQUAL", "DOT"} | COMPARISONS)
    if not place.one_value and not place.in_body and (starts_entry or token.kind in KEYWORDS):
        return place.report(
            "E0017", f"{token_text(token)} begins on the line of another statement", token, help="begin a new line"
        )
    return place.report(
        "E0017",
        f"an entry ends after its value, but here is {token_text(token)}",
        token,
        help="several values are a list: `[a, b]`",
    )


def _gap_text(gap: str) -> str:
    return "a tab stands here" if "\t" in gap else f"{len(gap)} spaces stand here"


def _is_call(place: ParserPosition, bracket: Token) -> bool:
    index = place.tokens.index(bracket, place.start)
    return index > place.start and place.tokens[index - 1].kind == "NAME"


def comma(place: ParserPosition) -> bool:
    bracket = place.bracket()
    if place.token.kind == "COMMA" and bracket and bracket.kind == "LPAR" and not _is_call(place, bracket):
        message = "brackets without a name hold one value, and here is a comma"
        return place.report("E0017", message, place.token, help="several values are a list: `[a, b]`")
    if place.token.kind != "COMMA" or place.in_body or bracket:
        return False
    if place.one_value:
        return place.report(
            "E0017", "here is one value, and a comma", place.token, help="several values are a list: `[a, b]`"
        )
    return place.report(
        "E0017", "outside of blocks no comma stands between statements", place.token, help="begin a new line"
    )


def comparison(place: ParserPosition) -> bool:
    token = place.token
    if token.kind not in COMPARISONS:
        return False
    compares = any(other.kind in COMPARISONS for other in place.tokens[place.start : place.at])
    if place.in_body and compares:
        message = f"`{token.text}` is the second comparison of this entry"
        return place.report("E0024", message, token, help="two bounds are two entries")
    message = f"`{token.text}` is not part of a value"
    return place.report("E0024", message, token, help="a comparison is an entry of the block `expect`: `bubble < 2%`")


def equals_inside(place: ParserPosition) -> bool:
    token, bracket = place.token, place.bracket()
    if token.kind == "DOT" and place.previous_token and place.previous_token.kind == "NAME":
        name, after = place.previous_token.text, place.tokens[place.at + 1 : place.at + 3]
        help = "text stands in quotes"
        if [part.kind for part in after] == ["NAME", "LPAR"]:
            help = f"a call is one name, without its module: `{after[0].text}(…)`"
        elif name in BLOCKS:
            help = "a value cannot refer to a field: use one `param` in both"
        return place.report("E0030", f"a value has no parts: `{name}.…`", token, help=help)
    if token.kind != "EQUAL":
        return False
    if bracket and bracket.kind == "LSQB":
        return place.report(
            "E0030", "the items of a list have no names", token, help="named values are a call's: `name(a = 1)`"
        )
    return place.report("E0030", "`=` sets the value of one name, and stands directly after it", token)
