"""Explains syntax mistakes to the user.

`explain` looks at the place where the parser stopped and its surroundings, finds what was probably meant, and reports
it with the place to correct. It asks one question after the other, particular ones first; the order matters. Messages
use the words of a person who writes jobs: no message speaks of tokens.
"""

from __future__ import annotations

import re

from dslc.dsl.language.registry import BLOCKS
from dslc.dsl.remedy import Edit, remedy
from dslc.dsl.syntax.mistakes import (
    BEGINS_VALUE,
    COMPARISONS,
    ENDS,
    ENDS_VALUE,
    KEYWORDS,
    OPERATORS,
    Mistakes,
    ParserPosition,
    Token,
)

CONTROL = frozenset(
    ("if", "elif", "else", "unless", "when", "for", "foreach", "while", "match", "switch", "case", "endif", "end")
    + ("def", "class", "function", "fn", "lambda", "return", "try")
)
DECLARES = frozenset({"let", "const", "var", "val", "local", "variable", "set", "parameter"})
# Only for guesses: dsl/language/units.py defines the units.
UNITS = frozenset(
    ("B", "kB", "MB", "GB", "TB", "KiB", "MiB", "GiB", "TiB", "us", "ms", "s", "min", "h", "d")
    + ("step", "steps", "epoch", "epochs", "Gbps", "GBps", "TFLOPS")
)


def other_format(tokens: list[Token], mistakes: Mistakes) -> bool:
    """True if a text without a single brace is YAML or TOML; then only that is reported."""
    if any(token.kind == "LBRACE" for token in tokens):
        return False
    depth = 0
    for at in range(len(tokens) - 2):
        depth += (tokens[at - 1].kind in ("LPAR", "LSQB")) - (tokens[at - 1].kind in ("RPAR", "RSQB")) if at else 0
        if depth or (at > 0 and tokens[at - 1].kind != "_NL"):
            continue
        first, second, third = tokens[at : at + 3]
        yaml = (first.kind, second.text, third.kind) == ("NAME", ":", "_NL")
        if yaml or (first.kind, second.kind, third.kind) == ("LSQB", "NAME", "RSQB"):
            format_name, block = ("YAML", first.text) if yaml else ("TOML", second.text)
            message = f"this looks like {format_name} and not like a job"
            end = (second if yaml else third).end
            mistakes.add("E0002", message, (first.start, end), label=f"a block is written `{block} {{ … }}`")
            return True
    return False


def explain(place: ParserPosition) -> None:
    """Reports the mistake at which the parser stopped."""
    questions = (
        _control,
        _other_sign,
        _header,
        _foreign,
        _statement_word,
        _beginning,
        _top_level,
        _missing_value,
        _name_alone,
        _missing_equals,
        _two_values,
        _comma,
        _comparison,
        _equals_inside,
    )
    if not any(question(place) for question in questions):
        place.report("E0030", f"{_token_text(place.token)} is not expected here", place.token, label=_expected(place))


def _expected(place: ParserPosition) -> str:
    bracket = place.bracket()
    if bracket and place.previous_token and place.previous_token.kind in ENDS_VALUE:
        return f"expected `,` or `{')' if bracket.kind == 'LPAR' else ']'}`"
    if bracket or (place.previous_token and place.previous_token.kind in (OPERATORS | {"EQUAL"})) or place.one_value:
        return "expected a value"
    return "expected `name = value`" if place.in_body else "expected a block, `name { … }`, a `param` or an `import`"


def _token_text(token: Token) -> str:
    """Returns a token as messages name it."""
    if token.kind == "$END":
        return "the end"
    if token.kind == "_NL":
        return "the end of the line"
    return f"`{token.text}`" if len(token.text) <= 40 else f"`{token.text[:40]}…`"


def _reserved(place: ParserPosition, token: Token) -> bool:
    if token.kind in ("PARAM", "IMPORT") and place.in_body:
        message = f"`{token.text}` stands outside of blocks"
        return place.report(
            "E0022", message, token, help=f"move it before the block; a field cannot be called `{token.text}`"
        )
    message = f"`{token.text}` is a word of the language and cannot be a name"
    return place.report("E0021", message, token, help="choose another name")


# ------------------------------------------------------------------------------- words and signs of other languages


def _control(place: ParserPosition) -> bool:
    """Reports `if`, `for`, `$HOME`: the language has neither conditionals nor loops nor the environment."""
    token, before, first = place.token, place.previous_token, place.first_token
    word = None
    if first.kind == "NAME" and first.text in CONTROL and place.at <= place.start + 2:
        word = first
    elif token.kind == "NAME" and token.text in CONTROL and before is not None and place.following().kind != "EQUAL":
        word = token
    elif before and before.kind == "NAME" and before.text in CONTROL and place.at > place.start + 1:
        word = before
    if word:
        message = f"there is no `{word.text}`: a job has no conditionals, loops or functions"
        return place.report("E0020", message, word, help="vary a job by `import`, by a `param` and by `--set`")
    if before and before.kind == "QUANTITY" and before.text.rpartition(" ")[2] in CONTROL:
        message = "a job has no conditionals or loops"
        return place.report("E0020", message, before, help="vary a job by `import`, by a `param` and by `--set`")
    if token.kind == "FOREIGN" and token.text in "$?":
        what = "environment look-ups" if token.text == "$" else "conditionals"
        message = f"`{token.text}` has no meaning here: a job has no {what}"
        return place.report("E0020", message, token, help="write a `param` and give it with `--set`")
    return False


def _other_sign(place: ParserPosition) -> bool:
    """Reports `:`, `==`, `:=`, `+=`, `=>`, `->` in the place of `=`."""
    token, before = place.token, place.previous_token
    if before is None:
        return False
    pair = before.text + token.text if place.adjacent() else ""
    if pair in ("+=", "-=", "*=", "/=", "=>", "->", "//=", "**="):
        place.mistakes.add("E0015", f"`{pair}` stands where `=` belongs", (before.start, token.end), label="write `=`")
        return True
    if token.kind in OPERATORS and place.following().kind == "EQUAL" and place.following().start == token.end:
        place.mistakes.add(
            "E0015", f"`{token.text}=` stands where `=` belongs", (token.start, token.end + 1), label="write `=`"
        )
        return True
    if token.kind == "EQUAL" and before.kind == "EQUAL":
        return place.report("E0015", "`=` stands here twice", token, label="one `=` sets a value")
    colon = token.kind == "FOREIGN" and token.text in (":", ":=")
    named = before.kind == "NAME" and (
        place.at == place.path_end() or place.tokens[place.at - 2].kind in ("LPAR", "COMMA", "PARAM")
    )
    if colon and before.kind in ("NUMBER", "QUANTITY"):
        return place.report("E0026", "a range is written with `..`", token, help="for example `1..4`")
    if not (colon or token.kind == "EQUALS") or not (named or before.kind == "STRING" or before.kind in KEYWORDS):
        return False
    if colon and place.following().kind == "_NL" and place.bracket() is None and not place.in_body:
        help_text = f"write `{before.text} {{`, and `}}` after its last entry"
        return place.report("E0019", "a block's entries stand in braces", token, help=help_text)
    if before.kind == "STRING":
        plain = before.text.strip('"')
        return place.report("E0021", "a name stands without quotes", before, help=f"write `{plain} = …`")
    equals = place.mistakes.replacement(
        token.start, token.end, " =" if place.adjacent() else "=", f"`{before.text} = …`"
    )
    return place.report("E0015", f"`{token.text}` stands where `=` belongs", token, help=remedy("write ", equals))


def _foreign(place: ParserPosition) -> bool:
    token, before = place.token, place.previous_token
    if token.kind != "FOREIGN":
        return False
    if token.text == ";":
        return place.report("E0017", "`;` has no meaning here", token, label="a new line or a comma ends an entry")
    if token.text == "%":
        return place.report("E0026", "`%` stands directly after a number, as in `20%`; there is no remainder", token)
    if token.text == "!=":
        return place.report(
            "E0024", "`!=` is not a comparison of the language", token, help="there are `<`, `<=`, `==`, `>=` and `>`"
        )
    if token.text == ":" and before:
        return place.report("E0026", "`:` has no meaning inside a value", token)
    message = f"`{token.text}` is not an operator of the language"
    return place.report(
        "E0026", message, token, help=_in_quotes(place) or "there are `+`, `-`, `*`, `/`, `//` and `**`"
    )


# --------------------------------------------------------------------------------------------- statements and names


def _header(place: ParserPosition) -> bool:
    """Reports text before the brace of a block that is more than its name."""
    header = place.tokens[place.start : place.end]
    if place.in_body or place.one_value or place.tokens[place.end].kind != "LBRACE":
        return False
    if not header:
        return place.report("E0019", "a block begins with its name", place.token, help="write `name {`")
    if header[0].kind in KEYWORDS:
        return _reserved(place, header[0])
    if header[0].kind != "NAME":
        return place.report("E0019", "a block begins with its name", header[0], help="write `name {`")
    extra = header[1] if len(header) > 1 else header[0]
    message = f"a block has one name and then `{{`, but here is {_token_text(extra)}"
    return place.report("E0019", message, extra, help=f"write `{header[0].text} {{`")


def _statement_word(place: ParserPosition) -> bool:
    """Reports `param …` and `import …` that do not continue as they must."""
    token, before, first = place.token, place.previous_token, place.first_token
    if place.in_body or place.one_value or before is None:
        return False
    if first.kind == "PARAM" and place.at == place.start + 1:
        if token.kind in KEYWORDS:
            return _reserved(place, token)
        message = "a `param` has a name" if token.kind in ENDS else f"{_token_text(token)} is not a name for a `param`"
        where = before if token.kind in ENDS else token
        return place.report("E0021", message, where, help="for example `param width = 256`")
    if first.kind == "PARAM" and place.at == place.start + 2 and token.kind == "DOT":
        return place.report("E0021", "a `param` has a plain name, without dots", token)
    if first.kind == "PARAM" and place.at == place.start + 2 and token.kind in BEGINS_VALUE:
        return place.report_after(
            "E0013",
            f"`=` is missing between `{before.text}` and its value",
            before,
            help=remedy("write ", _equals_after(place, before, f"`param {before.text} = …`")),
        )
    if first.kind == "IMPORT":
        if place.at == place.start + 1:
            where = before if token.kind in ENDS else token
            return place.report(
                "E0023", "what is imported is a file, its path in quotes", where, help='for example `import "base.plt"`'
            )
        return place.report(
            "E0023",
            "the line must end after the path of an `import`",
            token,
            help="each import stands on a line of its own",
        )
    if (
        first.kind == "NAME"
        and first.text in ("from", "include", "require", "use", "source")
        and place.at == place.start + 1
    ):
        return place.report("E0023", f"`{first.text}` does not import a file", first, help='write `import "base.plt"`')
    if first.kind == "NAME" and first.text in DECLARES and token.kind == "NAME":
        return place.report(
            "E0022", "a value of the file is declared with `param`", first, help=f"write `param {token.text} = …`"
        )
    return False


def _beginning(place: ParserPosition) -> bool:
    """Reports tokens that cannot begin an entry or statement."""
    token = place.token
    if place.at != place.start or place.one_value:
        return False
    if token.kind in KEYWORDS:
        return _reserved(place, token)
    if token.kind == "COMMA":
        comma = place.mistakes.replacement(token.start, token.end, "", "remove it")
        return place.report("E0014", "nothing stands before this comma", token, help=remedy(comma))
    if token.kind in ("NUMBER", "QUANTITY") and place.in_body and place.following().kind in COMPARISONS:
        return place.report(
            "E0024",
            "a comparison begins with the name",
            token,
            help="for example `bubble < 2%`; two bounds are two entries",
        )
    if token.kind == "EQUAL":
        return place.report("E0021", "no name stands before this `=`", token)
    if token.kind == "STRING":
        plain = token.text.strip('"')
        return place.report("E0021", "a name stands without quotes", token, help=f"write `{plain} = …`")
    if token.kind in ("NUMBER", "QUANTITY"):
        return place.report("E0021", f"{_token_text(token)} is not a name", token, label="a name begins with a letter")
    if (
        token.kind == "LSQB"
        and not place.in_body
        and place.following().kind == "NAME"
        and place.following(2).kind == "RSQB"
    ):
        return place.report(
            "E0019", "a block's entries stand in braces", token, help=f"write `{place.following().text} {{`"
        )
    if token.kind == "MINUS":
        return place.report(
            "E0030", "an entry begins with its name, not with `-`", token, help="a list is written `[a, b]`"
        )
    return False


def _top_level(place: ParserPosition) -> bool:
    """Reports entries outside of a block."""
    token, before = place.token, place.previous_token
    if place.in_body or place.one_value or before is None or place.at != place.start + 1 or before.kind != "NAME":
        return False
    if token.kind == "DOT":
        path = place.path().split(".")
        return place.report(
            "E0022",
            "a dotted name stands in `--set` and in `sweep`, not here",
            token,
            help=f"write `{path[0]} {{ {path[1]} = … }}`" if len(path) == 2 else "",
        )
    if token.kind in COMPARISONS:
        return place.report(
            "E0022", "a comparison stands in the block `expect`", token, help="write `expect { … }` around it"
        )
    if token.kind in ("_NL", "$END", "RBRACE", "COMMA"):
        message = f"`{before.text}` alone has no meaning"
        return place.report(
            "E0027",
            message,
            before,
            help=f"a block is written `{before.text} {{ … }}`, a value `param {before.text} = …`",
        )
    if token.kind in BEGINS_VALUE:
        return place.report_after(
            "E0013", f"neither `=` nor `{{` stands after `{before.text}`", before, help=f"write `{before.text} {{ … }}`"
        )
    return False


# ---------------------------------------------------------------------------- values within an entry


def _name_alone(place: ParserPosition) -> bool:
    if not place.in_body or place.at != place.path_end() or place.token.kind not in ENDS or place.at == place.start:
        return False
    path = place.path()
    where = place.tokens[place.at - 1]
    return place.report("E0014", f"`{path}` has no value", where, help=f"write `{path} = …`")


def _missing_equals(place: ParserPosition) -> bool:
    token, before = place.token, place.previous_token
    if not place.in_body or before is None or place.at != place.path_end() or token.kind not in BEGINS_VALUE:
        return False
    path = place.path()
    if token.kind == "LPAR" and place.adjacent():
        message = f"`{path}(…)` is a value without a name"
        return place.report("E0013", message, before, help=f"write `name = {path}(…)`")
    return place.report_after(
        "E0013",
        f"`=` is missing between `{path}` and its value",
        before,
        help=remedy("write ", _equals_after(place, before, f"`{path} = …`")),
    )


def _equals_after(place: ParserPosition, name: Token, shown: str) -> Edit:
    return place.mistakes.replacement(name.end, name.end, " =", shown)


def _missing_value(place: ParserPosition) -> bool:
    token, before = place.token, place.previous_token
    if token.kind == "COMMA" and before and before.kind in ("COMMA", "LPAR", "LSQB"):
        return place.report(
            "E0014",
            "nothing stands before this comma",
            token,
            help=remedy(
                "write the value that is missing, or ",
                place.mistakes.replacement(token.start, token.end, "", "remove the comma"),
            ),
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
            return place.report("E0014", message, token, help=_in_quotes(place))
    if before and before.kind == "DOT" and token.kind != "NAME":
        return place.report("E0021", "a name is missing after `.`", before)
    if token.kind in OPERATORS and before and before.kind in ("LPAR", "LSQB", "COMMA"):
        return place.report("E0014", f"a value is missing before `{token.text}`", token, help=_in_quotes(place))
    return place.one_value and before is None and _no_value(place)


# A path at the beginning of a value: `/data/a.txt`, `./runs`, `~/weights`.
_PATH = r"(?:~|\.{1,2})?/[\w./*~-]*"


def _in_quotes(place: ParserPosition) -> str:
    """Returns the quoted form of a path that begins where a value is missing; "" if there is none."""
    match = re.compile(_PATH).match(place.mistakes.source.text, place.token.start)
    return f'a path stands in quotes: `"{match[0]}"`' if match and len(match[0]) in range(2, 200) else ""


def _no_value(place: ParserPosition) -> bool:
    if place.token.kind == "$END":
        return place.report("E0014", "a value is missing here", place.token)
    return False


def _two_values(place: ParserPosition) -> bool:
    """Reports two values with nothing between them."""
    token, before = place.token, place.previous_token
    if before is None or before.kind not in ENDS_VALUE or token.kind not in (BEGINS_VALUE | KEYWORDS):
        return False
    gap = place.mistakes.source.text[before.end : token.start]
    if before.kind == "NUMBER" and token.kind == "NAME" and gap.strip(" \t") == "" and token.text in UNITS:
        message = f"at most one space may stand between a number and its unit: `{before.text} {token.text}`"
        label = "a tab stands here" if "\t" in gap else f"{len(gap)} spaces stand here"
        place.mistakes.add("E0008", message, (before.end, token.start), label=label)
        return True
    if before.kind == "QUANTITY" and before.text.endswith("%"):
        message = "`%` is a unit, as in `20%`; there is no remainder"
        return place.report(
            "E0026", message, before, label=f"a value ends here, and {_token_text(token)} begins another"
        )
    if before.kind == "NAME" and token.kind == "STRING" and not gap:
        return place.report(
            "E0006",
            "a string has no prefix and knows no interpolation",
            before,
            help=remedy(place.mistakes.replacement(before.start, before.end, "", f"remove `{before.text}`")),
        )
    if token.kind == "LSQB" and not gap:
        return place.report("E0026", "a value has no items to pick with `[ ]`", token)
    bracket = place.bracket()
    if bracket:
        what = "items of a list" if bracket.kind == "LSQB" else "arguments" if _is_call(place, bracket) else "values"
        comma = place.mistakes.replacement(before.end, before.end, ",", "write `,` between them")
        help_text = remedy(comma) if what != "values" else "a list is written `[a, b]`"
        return place.report_after(
            "E0016",
            f"a comma is missing between two {what}",
            before,
            label=f"before {_token_text(token)}",
            help=help_text,
        )
    starts_entry = token.kind == "NAME" and place.following().kind in ({"EQUAL", "DOT"} | COMPARISONS)
    if not place.one_value and not place.in_body and (starts_entry or token.kind in KEYWORDS):
        return place.report(
            "E0017",
            f"{_token_text(token)} begins on the line of another statement",
            token,
            help=remedy(place.mistakes.replacement(token.start, token.start, "\n", "begin a new line")),
        )
    return place.report(
        "E0017",
        f"an entry ends after its value, but here is {_token_text(token)}",
        token,
        help="several values are a list: `[a, b]`",
    )


def _is_call(place: ParserPosition, bracket: Token) -> bool:
    index = place.tokens.index(bracket, place.start)
    return index > place.start and place.tokens[index - 1].kind == "NAME"


def _comma(place: ParserPosition) -> bool:
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
        "E0017",
        "outside of blocks no comma stands between statements",
        place.token,
        help=remedy(place.mistakes.replacement(place.token.start, place.token.end, "\n", "begin a new line")),
    )


def _comparison(place: ParserPosition) -> bool:
    token = place.token
    if token.kind not in COMPARISONS:
        return False
    compares = any(other.kind in COMPARISONS for other in place.tokens[place.start : place.at])
    if place.in_body and compares:
        message = f"`{token.text}` is the second comparison of this entry"
        return place.report("E0024", message, token, help="two bounds are two entries")
    message = f"`{token.text}` is not part of a value"
    return place.report("E0024", message, token, help="a comparison is an entry of the block `expect`: `bubble < 2%`")


def _equals_inside(place: ParserPosition) -> bool:
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
