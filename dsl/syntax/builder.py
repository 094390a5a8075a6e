"""Makes the nodes of the tree, rule by rule, while Lark reads.

`Builder.make` is called for each rule with a result, with its children. An entry in which a mistake was reported gets a
`UnreadValue` value, so that nothing is reported twice.
"""

from __future__ import annotations

import re
from typing import Any, NamedTuple, TypeAlias, cast

import lark

from dslc.dsl.bounds import NESTING
from dslc.dsl.remedy import remedy, replace_text
from dslc.dsl.source import Span
from dslc.dsl.syntax import tree
from dslc.dsl.syntax.lexer import NUMBER_PART, UNREAD
from dslc.dsl.syntax.mistakes import ENVIRONMENT, OTHER_LITERALS, Mistakes, Token

ESCAPES = {'"': '"', "\\": "\\", "n": "\n", "t": "\t"}
NESTS = frozenset({"binary", "call", "group", "list", "range", "unary"})  # rules whose values contain values
SETS = frozenset({"comparison", "entry", "param", "setting"})
Children: TypeAlias = list[Any]  # tokens and nodes, as the rule of the grammar has them
VALUES = NESTS | {"boolean", "measured", "name", "nothing", "number", "text"}


class ParsedItem(NamedTuple):
    """A token or the result of a rule, with its place and its nesting depth."""

    what: Any
    start: int
    end: int
    depth: int


class Builder:
    """Makes the nodes of one text.

    While `Recovery` completes an entry with a mistake, `mending` is the end of that entry: its value is broken, and
    nothing more is reported. `dropping` is set too if the entry must be left out. `complete` is false if any entry was
    left out.
    """

    def __init__(self, mistakes: Mistakes) -> None:
        self.mistakes = mistakes
        self.complete = True
        self.mending: int | None = None
        self.dropping = False

    def make(self, rule: str, children: list[lark.Token | ParsedItem]) -> ParsedItem:
        parts = [child if isinstance(child, ParsedItem) else _token(child) for child in children]
        start, end = (parts[0].start, parts[-1].end) if parts else (0, 0)
        if self.mending is not None and rule in SETS:
            end = self.mending
        span = self.mistakes.span(start, end)
        depth = max((part.depth for part in parts), default=0)
        if self.mending is not None and rule in VALUES:
            return ParsedItem(tree.UnreadValue(span=span), start, end, 0)
        if depth >= NESTING.most and rule in NESTS:
            return ParsedItem(self.too_deep(span), start, end, 0)
        node = getattr(self, f"make_{rule}")([part.what for part in parts], span)
        return ParsedItem(node, start, end, depth + 1)

    def token_span(self, token: Token) -> Span:
        return self.mistakes.span(token.start, token.end)

    def unread(self, *names: str) -> bool:
        """True if a name could not be read: nothing named by it can then be kept."""
        self.complete = self.complete and UNREAD not in names and not self.dropping
        return UNREAD in names or self.dropping

    def value(self, written: tree.Expr, named: Span, whole: Span) -> tree.Expr:
        """Returns the value of the entry `named`, broken if a mistake lies in the `whole`."""
        if self.mending is not None:
            return tree.UnreadValue(span=self.mistakes.span(named.end, self.mending))
        if self.mistakes.offsets and self.mistakes.within(whole.start, whole.end):
            return tree.UnreadValue(span=written.span)
        return written

    # ---------------------------------------------------------------------------------------------- statements

    def make_start(self, children: Children, span: Span) -> list[tree.Node]:
        return [child for child in children if isinstance(child, tree.Node)]

    def make_block(self, children: Children, span: Span) -> tree.Block | None:
        if self.unread(children[0].text):
            return None
        entries = tuple(child for child in children if isinstance(child, tree.Entry | tree.Comparison))
        return tree.Block(span=span, name=children[0].text, name_span=self.token_span(children[0]), entries=entries)

    def make_setting(self, children: Children, span: Span) -> tree.Statement | None:
        name, _, value = children
        if self.unread(name.text):
            return None
        named = self.token_span(name)
        if name.text == "language":
            return tree.Language(span=span, value=self.value(value, named, span))
        return tree.BlockValue(span=span, name=name.text, name_span=named, value=self.value(value, named, span))

    def make_param(self, children: Children, span: Span) -> tree.Param | None:
        name = children[1]
        if self.unread(name.text):
            return None
        named = self.token_span(name)
        value = self.value(children[3], named, span) if len(children) > 2 else None
        return tree.Param(span=span, name=name.text, name_span=named, value=value)

    def make_import(self, children: Children, span: Span) -> tree.Import | None:
        if self.dropping or self.mistakes.within(span.start, span.end):
            self.complete = False
            return None
        return tree.Import(span=span, path=unescaped(children[1].text), path_span=self.token_span(children[1]))

    def make_entry(self, children: Children, span: Span) -> tree.Entry | None:
        path, _, value = children
        names, name_span = path_of(path)
        if self.unread(*names):
            return None
        return tree.Entry(span=span, path=names, name_span=name_span, value=self.value(value, name_span, span))

    def make_comparison(self, children: Children, span: Span) -> tree.Comparison | None:
        name, operator, value = children
        if self.unread(name.text):
            return None
        named = self.token_span(name)
        value = self.value(value, named, span)
        return tree.Comparison(span=span, name=name.text, name_span=named, operator=operator.text, value=value)

    def make_path(self, children: Children, span: Span) -> tree.List:
        # A list of names, taken apart by the entry: the tree itself has no node for a path.
        names = [child for child in children if child.kind == "NAME" and child.text]  # no text: `a. = 1` is mended
        items = tuple(tree.Name(span=self.token_span(name), name=name.text) for name in names)
        return tree.List(span=self.mistakes.span(names[0].start, names[-1].end), items=items)

    # --------------------------------------------------------------------------------------------- expressions

    def make_number(self, children: Children, span: Span) -> tree.Number:
        text = children[0].text
        return tree.Number(span=span, value=number(text), text=text)

    def make_measured(self, children: Children, span: Span) -> tree.NumberWithUnit:
        token = children[0]
        match = NUMBER_PART.match(token.text)
        assert match
        text, rest = match.group(), token.text[match.end() :]
        unit = rest.lstrip(" ")
        return tree.NumberWithUnit(
            span=span,
            value=number(text),
            text=text,
            unit=unit,
            joined=unit == rest,
            unit_span=self.mistakes.span(token.end - len(unit), token.end),
        )

    def make_text(self, children: Children, span: Span) -> tree.Text:
        return tree.Text(span=span, value=unescaped(children[0].text))

    def make_boolean(self, children: Children, span: Span) -> tree.Boolean:
        return tree.Boolean(span=span, value=children[0].kind == "TRUE")

    def make_nothing(self, children: Children, span: Span) -> tree.NoneLiteral:
        return tree.NoneLiteral(span=span)

    def make_name(self, children: Children, span: Span) -> tree.Name:
        name = children[0].text
        if name in OTHER_LITERALS:
            ours = OTHER_LITERALS[name]
            help = remedy("write ", replace_text(span, ours))
            self.mistakes.add("E0025", f"`{name}` is written `{ours}` here", span, help=help)
        return tree.Name(span=span, name=name)

    def make_call(self, children: Children, span: Span) -> tree.CallOf:
        name = children[0]
        if name.text in ENVIRONMENT:
            message = f"there is no `{name.text}`: a job does not look into the environment"
            help_text = "write a `param` and give it with `--set`"
            self.mistakes.add("E0020", message, name, help=help_text)
        arguments = tuple(child for child in children if isinstance(child, tree.Argument))
        return tree.CallOf(span=span, name=name.text, name_span=self.token_span(name), arguments=arguments)

    def make_argument(self, children: Children, span: Span) -> tree.Argument:
        if len(children) == 1:
            return tree.Argument(span=span, name=None, name_span=None, value=children[0])
        name, _, value = children
        return tree.Argument(span=span, name=name.text, name_span=self.token_span(name), value=value)

    def make_list(self, children: Children, span: Span) -> tree.List:
        return tree.List(span=span, items=tuple(child for child in children if not isinstance(child, Token)))

    def make_group(self, children: Children, span: Span) -> tree.Group:
        return tree.Group(span=span, inner=children[1])

    def make_range(self, children: Children, span: Span) -> tree.RangeOf:
        return tree.RangeOf(span=span, first=children[0], last=children[2])

    def make_unary(self, children: Children, span: Span) -> tree.Unary:
        return tree.Unary(span=span, operator=children[0].text, operand=children[1])

    def make_binary(self, children: Children, span: Span) -> tree.Binary:
        return tree.Binary(span=span, operator=children[1].text, left=children[0], right=children[2])

    def too_deep(self, span: Span) -> tree.UnreadValue:
        message = f"this value is nested more than {NESTING.most} deep"
        self.mistakes.add("E0028", message, (span.start, span.start), help="take parts of it out into a `param`")
        return tree.UnreadValue(span=span)


def _token(read: lark.Token) -> ParsedItem:
    start, end = cast(int, read.start_pos), cast(int, read.end_pos)
    return ParsedItem(Token(read.type, read.value, start, end), start, end, 0)


def path_of(path: tree.List) -> tuple[tuple[str, ...], Span]:
    return tuple(cast(tree.Name, item).name for item in path.items), path.span


def number(text: str) -> int | float:
    plain = text.replace("_", "")
    return int(plain) if plain.isdigit() else float(plain)


def unescaped(quoted: str) -> str:
    """Returns the value of a quoted string."""
    return re.sub(r"\\(.)", lambda found: ESCAPES.get(found.group(1), found.group()), quoted[1:-1])
