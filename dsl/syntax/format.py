"""Formats a job file in its one canonical layout.

Two spaces of indentation; one entry a line, its `=` aligned with the `=` of the lines directly above and below; one
empty line between blocks, and at most one anywhere else. Numbers, quantities and strings stay as they were written, and
so do the line breaks inside lists and calls: a list or call with a break between its brackets opens and closes on lines
of its own, its items grouped as they were. Comments stay where they are; one in the middle of an expression moves to
the end of its line.

    parse(format_document(d)) equals d except for spans and the places of comments
    format_document(parse(format_document(d))) == format_document(d)

Limits: takes a document without mistakes; lines that are too long are not wrapped.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TypeVar

from dslc.dsl.source import Span
from dslc.dsl.syntax import tree

INDENT = 2
N = TypeVar("N", bound=tree.Node)


def format_document(document: tree.Document) -> str:
    """Returns the text of a document that was read without a mistake."""
    return _Printer(document).run()


class _Printer:
    def __init__(self, document: tree.Document) -> None:
        self.document = document
        self.text = document.source.text
        self.comments = sorted(document.comments, key=lambda comment: comment.span.start)
        self.taken = 0  # number of comments printed so far
        self.lines: list[str] = []
        self.equals: list[tuple[int, int, str]] = []  # line, column and group of each `=` that may be aligned

    def run(self) -> str:
        end, before = 0, None
        for statement in self.document.statements:
            self.gap(end, statement.span.start, 0, apart=before is not None and _needs_empty_line(before, statement))
            self.statement(statement)
            end, before = statement.span.end, statement
        self.gap(end, len(self.text), 0, last=True)
        self.align()
        return "".join(f"{line.rstrip()}\n" for line in self.lines)

    # ---------------------------------------------------------------------------------------------- statements

    def statement(self, statement: tree.Statement) -> None:
        match statement:
            case tree.Block():
                self.block(statement)
            case tree.Import():
                self.lines.append(f"import {statement.path_span.text()}")
            case tree.Language():
                self.entry("language", statement.value, 0, "setting")
            case tree.BlockValue():
                self.entry(statement.name, statement.value, 0, "setting")
            case tree.Param(value=None):
                self.lines.append(f"param {statement.name}")
            case tree.Param():
                assert statement.value is not None
                self.entry(f"param {statement.name}", statement.value, 0, "param")

    def block(self, block: tree.Block) -> None:
        self.lines.append(f"{block.name} {{")
        end, close = block.name_span.end, block.span.end - 1
        if not block.entries and not self.has_pending_comment(close):
            self.lines[-1] += "}"
            return
        for number, entry in enumerate(block.entries):
            self.gap(end, entry.span.start, INDENT, first=number == 0)
            if isinstance(entry, tree.Comparison):
                value = self.expression(entry.value, INDENT)
                self.lines += f"{'':{INDENT}}{entry.name} {entry.operator} {value}".split("\n")
            else:
                self.entry(".".join(entry.path), entry.value, INDENT, "entry")
            end = entry.span.end
        self.gap(end, close, INDENT, first=not block.entries, last=True)
        self.lines.append("}")

    def entry(self, left: str, value: tree.Expr, indent: int, group: str) -> None:
        lines = f"{'':{indent}}{left} = {self.expression(value, indent)}".split("\n")
        if len(lines) == 1:
            self.equals.append((len(self.lines), indent + len(left) + 1, group))
        self.lines += lines

    def align(self) -> None:
        """Aligns each `=` with those on the lines directly above and below it."""
        run: list[tuple[int, int, str]] = []
        for equals in [*self.equals, (-1, 0, "")]:
            if run and (equals[0] != run[-1][0] + 1 or equals[2] != run[-1][2]):
                widest = max(column for _, column, _ in run)
                for line, column, _ in run:
                    text = self.lines[line]
                    self.lines[line] = text[:column] + " " * (widest - column) + text[column:]
                run = []
            run.append(equals)

    # ------------------------------------------------------------------------------------------------ comments

    def has_pending_comment(self, before: int) -> bool:
        """True if a comment that begins before an offset is not printed yet."""
        return self.taken < len(self.comments) and self.comments[self.taken].span.start < before

    def gap(
        self, end: int, start: int, indent: int, *, apart: bool = False, first: bool = False, last: bool = False
    ) -> None:
        """Prints the gap between the end of one item and the start of the next: comments, and an empty line if there
        was one or, for `apart`, there must be one. No empty line after an opening (`first`) or before a closing
        (`last`).
        """
        found = []
        while self.has_pending_comment(start):
            found.append(self.comments[self.taken])
            self.taken += 1
        if found and not found[0].own_line and self.lines:
            comment = found.pop(0)
            self.lines[-1] += f"  {comment.text}"
            end = max(end, comment.span.end)
        places = [(comment.span.start, comment.span.end, comment.text) for comment in found]
        blanks = []
        for begin, finish, _ in [*places, (start, start, "")]:
            blanks.append(self.text.count("\n", end, begin) > 1)
            end = max(end, finish)
        blanks[0] = (blanks[0] or (apart and not any(blanks))) and not first and bool(self.lines)
        blanks[-1] = blanks[-1] and not last
        for blank, (_, _, text) in zip(blanks, [*places, (0, 0, "")], strict=True):
            if blank:
                self.lines.append("")
            if text:
                self.lines.append(" " * indent + text)

    # --------------------------------------------------------------------------------------------- expressions

    def expression(self, value: tree.Expr, indent: int) -> str:
        """Returns the text of a value on a line indented by `indent`; the lines after the first are indented."""
        match value:
            case tree.List(items=items):
                return self.sequence("[", "]", items, self.expression, value.span, indent)
            case tree.CallOf(arguments=arguments):
                bracket = Span(value.span.source, value.name_span.end, value.span.end)
                return self.sequence(f"{value.name}(", ")", arguments, self.argument, bracket, indent)
            case tree.Group():
                return f"({self.expression(value.inner, indent)})"
            case tree.RangeOf():
                return f"{self.expression(value.first, indent)}..{self.expression(value.last, indent)}"
            case tree.Unary():
                return f"{value.operator}{self.expression(value.operand, indent)}"
            case tree.Binary():
                left = self.expression(value.left, indent)
                return f"{left} {value.operator} {self.expression(value.right, indent)}"
            case tree.NumberWithUnit():
                return f"{value.text}{'' if value.joined else ' '}{value.unit}"
            case tree.UnreadValue():
                raise AssertionError("a document with mistakes has no layout")
            case _:
                return value.span.text()

    def argument(self, argument: tree.Argument, indent: int) -> str:
        value = self.expression(argument.value, indent)
        return f"{argument.name} = {value}" if argument.name else value

    def sequence(
        self, opener: str, closer: str, items: Sequence[N], show: Callable[[N, int], str], span: Span, indent: int
    ) -> str:
        """Returns `opener item, item closer`: on one line, or over several if there is a line break between the items.

        `span` is from the opening bracket (or the space before it) to the closing one.
        """
        close = span.end - 1
        begins, ends = [*(item.span.start for item in items), close], [span.start, *(item.span.end for item in items)]
        breaks = ["\n" in self.text[end:begin] for end, begin in zip(ends, begins, strict=True)]
        if not any(breaks):
            taken = self.taken
            shown = ", ".join(show(item, indent) for item in items)
            if not self.has_pending_comment(close):
                return f"{opener}{shown}{closer}"
            self.taken = taken  # a comment is in the middle of an item: it needs the end of a line
        if not items and not self.has_pending_comment(close):
            return opener + closer
        outer, self.lines = self.lines, [opener]
        inner = indent + INDENT
        self.gap(span.start, begins[0], inner, first=True, last=not items)
        begun = False
        for number, item in enumerate(items):
            shown = show(item, inner)
            if begun:
                self.lines[-1] += f" {shown},"
            else:
                self.lines.append(f"{'':{inner}}{shown},")
            last = number == len(items) - 1
            begun = not last and not breaks[number + 1] and not self.has_pending_comment(begins[number + 1])
            if not begun:
                self.gap(item.span.end, begins[number + 1], inner, last=last)
        self.lines.append(f"{'':{indent}}{closer}")
        outer, self.lines = self.lines, outer
        return "\n".join(outer)


def _needs_empty_line(before: tree.Statement, after: tree.Statement) -> bool:
    """True if an empty line belongs between two statements, whatever was written."""
    return isinstance(before, tree.Block) or type(before) is not type(after)
