"""What each rule of the grammar makes: the nodes of the tree.

`Builder` has one method for each rule that makes something, called with the children in order, tokens among them, and
the span of the whole. An entry in which a mistake was reported gets a `Broken` value, so that nothing is said of it
twice.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any, cast

from dslc.dsl.bounds import NESTING
from dslc.dsl.source import Span
from dslc.dsl.syntax import tree
from dslc.dsl.syntax.lexer import NUMBER_PART, UNREAD
from dslc.dsl.syntax.mistakes import ENVIRONMENT, OTHER_LITERALS, Mistakes, Token

Child = Token | tree.Node
Made = tree.Node | list[Any] | None

ESCAPES = {'"': '"', "\\": "\\", "n": "\n", "t": "\t"}


class Builder:
    def __init__(self, mistakes: Mistakes) -> None:
        self.mistakes = mistakes
        self.complete = True

    def rules(self, names: set[str]) -> dict[str, Callable[[list[Any], Span], Made]]:
        """The method of each rule; a rule without one would be a mistake of ours."""
        return {name: getattr(self, f"make_{name}") for name in names if not name.startswith("_") and name}

    def at(self, token: Token) -> Span:
        return self.mistakes.span(token.start, token.end)

    def unread(self, *names: str) -> bool:
        """Whether a name could not be read: then nothing can be kept of what it names."""
        self.complete = self.complete and UNREAD not in names
        return UNREAD in names

    def value(self, written: tree.Expr, whole: Span) -> tree.Expr:
        if self.mistakes.offsets and self.mistakes.within(whole.start, whole.end):
            return tree.Broken(span=written.span)
        return written

    # ---------------------------------------------------------------------------------------------- statements

    def make_start(self, children: list[Any], span: Span) -> list[Any]:
        return [child for child in children if isinstance(child, tree.Node)]

    def make_block(self, children: list[Any], span: Span) -> tree.Block | None:
        if self.unread(children[0].text):
            return None
        entries = tuple(child for child in children if isinstance(child, tree.Entry | tree.Comparison))
        return tree.Block(span=span, name=children[0].text, name_span=self.at(children[0]), entries=entries)

    def make_setting(self, children: list[Any], span: Span) -> tree.Statement | None:
        name, _, value = children
        if self.unread(name.text):
            return None
        if name.text == "language":
            return tree.Language(span=span, value=self.value(value, span))
        return tree.Whole(span=span, name=name.text, name_span=self.at(name), value=self.value(value, span))

    def make_param(self, children: list[Any], span: Span) -> tree.Param | None:
        name = children[1]
        if self.unread(name.text):
            return None
        value = self.value(children[3], span) if len(children) > 2 else None
        return tree.Param(span=span, name=name.text, name_span=self.at(name), value=value)

    def make_import(self, children: list[Any], span: Span) -> tree.Import | None:
        if self.mistakes.within(span.start, span.end):
            self.complete = False
            return None
        return tree.Import(span=span, path=unescaped(children[1].text), path_span=self.at(children[1]))

    def make_entry(self, children: list[Any], span: Span) -> tree.Entry | None:
        path, _, value = children
        names, name_span = path_of(path)
        if self.unread(*names):
            return None
        return tree.Entry(span=span, path=names, name_span=name_span, value=self.value(value, span))

    def make_comparison(self, children: list[Any], span: Span) -> tree.Comparison | None:
        name, operator, value = children
        if self.unread(name.text):
            return None
        return tree.Comparison(
            span=span, name=name.text, name_span=self.at(name), operator=operator.text, value=self.value(value, span)
        )

    def make_path(self, children: list[Any], span: Span) -> tree.List:
        # A list of names, taken apart by the entry: the tree itself has no node for a path.
        names = [child for child in children if child.kind == "NAME"]
        return tree.List(span=span, items=tuple(tree.Name(span=self.at(name), name=name.text) for name in names))

    # --------------------------------------------------------------------------------------------- expressions

    def make_number(self, children: list[Any], span: Span) -> tree.Number:
        text = children[0].text
        return tree.Number(span=span, value=number(text), text=text)

    def make_measured(self, children: list[Any], span: Span) -> tree.Measured:
        token = children[0]
        found = NUMBER_PART.match(token.text)
        assert found
        text, rest = found.group(), token.text[found.end() :]
        unit = rest.lstrip(" ")
        return tree.Measured(
            span=span,
            value=number(text),
            text=text,
            unit=unit,
            joined=unit == rest,
            unit_span=self.mistakes.span(token.end - len(unit), token.end),
        )

    def make_text(self, children: list[Any], span: Span) -> tree.Text:
        return tree.Text(span=span, value=unescaped(children[0].text))

    def make_boolean(self, children: list[Any], span: Span) -> tree.Boolean:
        return tree.Boolean(span=span, value=children[0].kind == "TRUE")

    def make_nothing(self, children: list[Any], span: Span) -> tree.Nothing:
        return tree.Nothing(span=span)

    def make_name(self, children: list[Any], span: Span) -> tree.Name:
        name = children[0].text
        if name in OTHER_LITERALS:
            ours = OTHER_LITERALS[name]
            self.mistakes.add(
                "E0025", f"`{name}` is written `{ours}` here", span.start, span.end, help=f"write `{ours}`"
            )
        return tree.Name(span=span, name=name)

    def make_call(self, children: list[Any], span: Span) -> tree.CallOf:
        name = children[0]
        if name.text in ENVIRONMENT:
            message = f"there is no `{name.text}`: a job does not look into the environment"
            help_text = "write a `param` and give it with `--set`"
            self.mistakes.add("E0020", message, name.start, name.end, help=help_text)
        arguments = tuple(child for child in children if isinstance(child, tree.Argument))
        return tree.CallOf(span=span, name=name.text, name_span=self.at(name), arguments=arguments)

    def make_argument(self, children: list[Any], span: Span) -> tree.Argument:
        if len(children) == 1:
            return tree.Argument(span=span, name=None, name_span=None, value=children[0])
        name, _, value = children
        return tree.Argument(span=span, name=name.text, name_span=self.at(name), value=value)

    def make_list(self, children: list[Any], span: Span) -> tree.List:
        return tree.List(span=span, items=tuple(child for child in children if not isinstance(child, Token)))

    def make_group(self, children: list[Any], span: Span) -> tree.Group:
        return tree.Group(span=span, inner=children[1])

    def make_range(self, children: list[Any], span: Span) -> tree.RangeOf:
        return tree.RangeOf(span=span, first=children[0], last=children[2])

    def make_unary(self, children: list[Any], span: Span) -> tree.Unary:
        return tree.Unary(span=span, operator=children[0].text, operand=children[1])

    def make_binary(self, children: list[Any], span: Span) -> tree.Binary:
        return tree.Binary(span=span, operator=children[1].text, left=children[0], right=children[2])

    def too_deep(self, span: Span) -> tree.Broken:
        message = f"this value is nested more than {NESTING.most} deep"
        self.mistakes.add("E0028", message, span.start, span.start, help="take parts of it out into a `param`")
        return tree.Broken(span=span)


def path_of(path: tree.List) -> tuple[tuple[str, ...], Span]:
    return tuple(cast(tree.Name, item).name for item in path.items), path.span


def number(text: str) -> int | float:
    plain = text.replace("_", "")
    return int(plain) if plain.isdigit() else float(plain)


def unescaped(quoted: str) -> str:
    """What a string in its quotes stands for."""
    return re.sub(r"\\(.)", lambda found: ESCAPES.get(found.group(1), found.group()), quoted[1:-1])
