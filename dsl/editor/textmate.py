"""The TextMate grammar, made from the terminals of grammar/plt.lark. VS Code and GitHub colour texts by it.

A TextMate grammar knows no tree: a name is a call before `(`, a block before `{`, a field or an argument before `=`.
"""

from __future__ import annotations

from dslc.dsl.editor.scopes import terminal_role
from dslc.dsl.json_value import Json
from dslc.dsl.syntax.grammar import terminals

SCOPE = "source.plt"
# The scope of each role, in the terms of TextMate's convention.
_SCOPES = {
    "keyword": "keyword.control.plt", "literal": "constant.language.plt", "number": "constant.numeric.plt",
    "string": "string.quoted.double.plt", "operator": "keyword.operator.plt",
    "comparison": "keyword.operator.comparison.plt", "bracket": "punctuation.plt",
}  # fmt: skip
# What follows a name, and its scope then.
_NAMES = (
    (r"[ \t]*\(", "entity.name.function.plt"),
    (r"[ \t]*\{", "entity.name.type.plt"),
    (r"[ \t]*=(?!=)", "variable.other.member.plt"),
    (r"", "variable.other.plt"),
)


def textmate_grammar() -> dict[str, Json]:
    """Returns the grammar as plain data: one pattern for each terminal, in the order in which the lexer tries them."""
    patterns: list[Json] = [{"name": "string.quoted.double.plt", "match": r'"[^"\n]*$'}]  # a string that is not closed
    for name, pattern in terminals():
        if name in ("_NL", "SPACE"):
            continue
        if name == "COMMENT":
            patterns.insert(0, {"name": "comment.line.number-sign.plt", "match": pattern})
        elif name == "NAME":
            patterns += [
                {"name": scope, "match": f"{pattern}(?={follows})" if follows else pattern} for follows, scope in _NAMES
            ]
        else:
            patterns.append({"name": _SCOPES[terminal_role(name)], "match": pattern})
    return {
        "$comment": "made by `dslc schema --textmate`",
        "name": "dslc job",
        "scopeName": SCOPE,
        "fileTypes": ["plt"],
        "patterns": patterns,
    }
