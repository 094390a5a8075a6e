"""The tree of a job file: the text as written, before anything is known about blocks, fields or names.

parser.py makes it, format.py prints it, dsl/meaning merges and resolves it. Every node has its span.
"""

from __future__ import annotations

import dataclasses
from typing import Literal

from dslc.dsl.record import Record, record
from dslc.dsl.source import Source, Span


@record
class Node(Record):
    span: Span


# --------------------------------------------------------------------------------------------------- expressions


@record
class Number(Node):
    """`20_000`, `3e-4`. `text` is how it was written."""

    value: int | float
    text: str


@record
class NumberWithUnit(Node):
    """A number and the word after it: `76GiB`, `20 %`, `1 epoch`, and also `1f1b`, which a field may accept as a word.

    `unit` is checked later, when the dimension is known. `joined` is true if there is no space between them.
    """

    value: int | float
    text: str
    unit: str
    unit_span: Span
    joined: bool


@record
class Text(Node):
    """A string; `value` has its escapes replaced."""

    value: str


@record
class Boolean(Node):
    value: bool


@record
class NoneLiteral(Node):
    """`none`."""


@record
class Name(Node):
    """A param, or a word that the field accepts."""

    name: str


@record
class List(Node):
    items: tuple[Expr, ...]


@record
class RangeOf(Node):
    first: Expr
    last: Expr


@record
class Argument(Node):
    """`0.1` or `lr = 0.1`."""

    name: str | None
    name_span: Span | None
    value: Expr


@record
class CallOf(Node):
    name: str
    name_span: Span
    arguments: tuple[Argument, ...]


@record
class Unary(Node):
    operator: Literal["-", "+"]
    operand: Expr


@record
class Binary(Node):
    operator: Literal["+", "-", "*", "/", "//", "**"]
    left: Expr
    right: Expr


@record
class Group(Node):
    """`( … )`: kept, so that `format` prints what was written."""

    inner: Expr


@record
class UnreadValue(Node):
    """A value that could not be read. The mistake is reported already, and nothing more is reported for it."""


Expr = (
    Number
    | NumberWithUnit
    | Text
    | Boolean
    | NoneLiteral
    | Name
    | List
    | RangeOf
    | CallOf
    | Unary
    | Binary
    | Group
    | UnreadValue
)


# ------------------------------------------------------------------------------------------------------ statements


@record
class Entry(Node):
    """`batch = 64`; in `sweep` the name is a path, `train.optimizer.lr`."""

    path: tuple[str, ...]
    name_span: Span
    value: Expr


@record
class Comparison(Node):
    """`peak_memory < 76GiB`: an entry of `expect`."""

    name: str
    name_span: Span
    operator: Literal["<", "<=", "==", ">=", ">"]
    value: Expr


@record
class Block(Node):
    name: str
    name_span: Span
    entries: tuple[Entry | Comparison, ...]


@record
class BlockValue(Node):
    """`parallelism = auto`: a block set as a whole."""

    name: str
    name_span: Span
    value: Expr


@record
class Param(Node):
    """`param width = 256`, or `param width`, which must be given."""

    name: str
    name_span: Span
    value: Expr | None


@record
class Import(Node):
    path: str
    path_span: Span


@record
class Language(Node):
    """`language = 1`."""

    value: Expr


Statement = Language | Import | Param | Block | BlockValue


@record
class Comment(Node):
    """`# …`, without its line end. `own_line` is true if nothing stands before it on its line."""

    text: str
    own_line: bool


@record
class Document(Node):
    """A file, in the order in which it was written.

    `complete` is false if a syntax mistake left statements or entries out: an entry that seems missing may have been
    written. `words` is the number of words, signs and comments.
    """

    source: Source
    statements: tuple[Statement, ...]
    comments: tuple[Comment, ...]
    complete: bool = True
    words: int = dataclasses.field(default=0, compare=False)
