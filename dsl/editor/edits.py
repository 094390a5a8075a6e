"""Makes the fixes of diagnostics in the text of a job.

    find_fixed_source(fix, span, main)  the file that the fix changes: the job itself, or one that it imports
    apply_fix(text, name, fix)      the new text, or None if the fix cannot be made in this text
    text_edits(old, new)            the same as replacements of ranges, for an editor
    format_text(text)               the layout of `dslc fmt`, as such replacements

Comments and the layout of everything else stay. A text that has the layout of `dslc fmt` has it afterwards as well.

A call is changed where it is written, also in an imported file. A field is changed in the job if the job states it,
and otherwise in the imported file where the mistake is.
"""

from __future__ import annotations

import difflib
import itertools
import re
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence

from dslc.dsl.diagnostics import Report
from dslc.dsl.language import blocks  # noqa: F401  (`blocks` fills the registry)
from dslc.dsl.language.registry import BLOCKS, CALLS, PATH_BLOCKS, fields
from dslc.dsl.record import Record, positional
from dslc.dsl.remedy import Edit, Fix
from dslc.dsl.source import Source, Span
from dslc.dsl.syntax import tree
from dslc.dsl.syntax.format import INDENT, format_document
from dslc.dsl.syntax.parser import parse


@positional
class TextEdit(Record):
    """The characters from `start` to `end` (not included) become `text`."""

    start: int
    end: int
    text: str


def find_fixed_source(fix: Fix, span: Span | None, main: Source) -> Source | None:
    """Returns the file that a fix of the mistake at `span` changes: `main`, or one that it imports. None if the fix has
    places in several files, or in a setting of the command line.
    """
    places = {place.source.name: place.source for edit in fix.edits if (place := edit.place) is not None}
    if len(places) > 1:
        return None
    other = next(iter(places.values()), span.source if span is not None else main)
    if other.name == main.name:
        return main
    if other.name.startswith("<"):  # the name of a setting
        return main if not places else None
    paths = [edit.path for edit in fix.edits if edit.place is None]
    is_there = not places and (any(_states(main.text, path) for path in paths) or not all(
        _states(other.text, path) for path in paths))  # fmt: skip
    return main if is_there else other


def _states(text: str, path: str) -> bool:
    """True if a text has the param, the block or the field of a path."""
    document = _parse(text)
    name, _, field = path.partition(".")
    if document is None:
        return False
    if field:
        return _entry(document, name, field.partition(".")[0]) is not None
    return any(getattr(statement, "name", None) == name for statement in document.statements)


def apply_fix(text: str, name: str, fix: Fix) -> str | None:
    """Returns the text with the fix made; None if it cannot be made here or changes nothing. `name` is the name that
    the text has in the spans of diagnostics.
    """
    made = _at_places(text, name, [edit for edit in fix.edits if edit.place is not None])
    # What is set may stand where the only entry of a block is removed.
    for edit in sorted((edit for edit in fix.edits if edit.place is None), key=lambda edit: edit.value is None):
        change = _change(_parse(made), edit) if made is not None else None
        made = _apply_changes([change], made) if change is not None and made is not None else None
    return None if made is None or made == text else _formatted_alike(text, made)


def with_fields(text: str, values: Mapping[str, str | None]) -> str:
    """Returns the text with these fields set, by path. A field whose value is None is removed, and so is a value of its
    whole block (`parallelism = auto`).
    """
    before = text
    for path, value in values.items():
        block, _, field = path.partition(".")
        document = _parse(text)
        if document is None:
            break
        whole = next((s for s in document.statements if isinstance(s, tree.BlockValue) and s.name == block), None)
        if whole is not None:
            text = _apply_changes([_without_lines(document, whole.span)], text)
            document = _parse(text)
        if document is not None and (value is not None or _entry(document, block, field) is not None):
            change = _field(document, block, field, value)
            text = _apply_changes([change], text) if change is not None else text
    return _formatted_alike(before, text)


def _at_places(text: str, name: str, edits: Sequence[Edit]) -> str | None:
    """Returns the text with edits made whose places are in it; None if one is not, or if two overlap."""
    changes: list[TextEdit] = []
    for edit in edits:
        place = edit.place
        if place is None or place.source.name != name or place.source.text != text:
            return None
        if not edit.path and edit.value is not None:
            changes.append(TextEdit(place.start, place.end, edit.value))
            continue
        change = _change(_parse(text), edit)
        if change is None:
            return None
        changes.append(change)
    changes = _merged(changes)
    if any(first.end > second.start for first, second in itertools.pairwise(changes)):
        return None
    return _apply_changes(changes, text)


def _apply_changes(changes: Sequence[TextEdit], text: str) -> str:
    for change in reversed(changes):
        text = text[: change.start] + change.text + text[change.end :]
    return text


def text_edits(old: str, new: str) -> list[TextEdit]:
    """Returns the replacements that make `new` of `old`, whole lines each, in order."""
    before, after = old.splitlines(keepends=True), new.splitlines(keepends=True)
    starts = [0]
    for line in before:
        starts.append(starts[-1] + len(line))
    matcher = difflib.SequenceMatcher(None, before, after, autojunk=False)
    return [
        TextEdit(starts[first], starts[last], "".join(after[begin:end]))
        for kind, first, last, begin, end in matcher.get_opcodes()
        if kind != "equal"
    ]


def _parse(text: str) -> tree.Document | None:
    return parse(Source("", text), Report())


def _merged(changes: Sequence[TextEdit]) -> list[TextEdit]:
    """Returns the changes in order, several insertions at one place as one."""
    merged: list[TextEdit] = []
    for change in sorted(changes, key=lambda change: (change.start, change.end)):
        if merged and merged[-1].start == merged[-1].end == change.start == change.end:
            change = TextEdit(change.start, change.end, merged.pop().text + change.text)
        merged.append(change)
    return merged


def format_text(text: str) -> list[TextEdit]:
    """Returns the changes that `dslc fmt` makes: none if the text has its layout, or has syntax mistakes."""
    formatted = _formatted(text)
    return [] if formatted is None else text_edits(text, formatted)


def _formatted(text: str) -> str | None:
    """Returns a text in the layout of `dslc fmt`; None if it has syntax mistakes."""
    report = Report()
    document = parse(Source("", text), report)
    return None if document is None or report.errors else format_document(document)


def _formatted_alike(old: str, new: str) -> str:
    """Returns the new text in the layout of `dslc fmt` if the old one has it."""
    formatted = _formatted(new) if _formatted(old) == old else None
    return new if formatted is None else formatted


# ------------------------------------------------------------------------------------------------------ the change


def _change(document: tree.Document | None, edit: Edit) -> TextEdit | None:
    if document is None:
        return None
    if not edit.path:
        assert edit.place is not None
        return _removal_at(document, edit.place)
    if edit.place is not None:
        call = _call_at(document, edit.place)
        return None if call is None else _argument(document, call, edit.path, edit.value)
    match edit.path.split("."):
        case [name]:
            return _statement(document, name, edit.value)
        case [block, field]:
            return _field(document, block, field, edit.value)
        case [block, field, argument]:
            entry = _entry(document, block, field)
            value = _behind(document, entry.value) if entry is not None else None
            return None if value is None else _argument(document, value, argument, edit.value)
    return None


def _statement(document: tree.Document, name: str, value: str | None) -> TextEdit | None:
    """Changes a param, the language's version, or a block as a whole."""
    for statement in document.statements:
        match statement:
            case tree.Param() if statement.name == name and statement.value is not None and value is not None:
                return _replacement(statement.value.span, value)
            case tree.Param() | tree.Block() | tree.BlockValue() if statement.name == name:
                if value is None:
                    return _without_lines(document, statement.span)
                return _replacement(statement.span, f"{name} = {value}")
            case tree.Language() if name == "language" and value is not None:
                return _replacement(statement.value.span, value)
    return None if value is None else _new_statement(document, name, f"{name} = {value}")


def _field(document: tree.Document, block: str, field: str, value: str | None) -> TextEdit | None:
    """Changes a field of a block. A value that a sweep gives stays, because it would lose its alternatives."""
    if any(path == (block, field) for path, _ in _entries(document, "sweep")):
        return None
    entry = _entry(document, block, field)
    if entry is not None:
        return _removal(document, entry) if value is None else _replacement(_source_of(document, entry.value), value)
    text = f"{field} = {value if value is not None else 'none'}"  # `none` drops what an import sets
    opened = [s for s in document.statements if isinstance(s, tree.Block) and s.name == block]
    if any(isinstance(s, tree.BlockValue) and s.name == block for s in document.statements):
        return None
    return _new_entry(document, opened[-1], text) if opened else _new_statement(
        document, block, f"{block} {{\n{'':{INDENT}}{text}\n}}"
    )  # fmt: skip


def _argument(document: tree.Document, call: tree.Expr, name: str, value: str | None) -> TextEdit | None:
    """Changes an argument of a call, which may be a word without brackets."""
    if isinstance(call, tree.Name):
        return None if value is None else TextEdit(call.span.end, call.span.end, f"({name} = {value})")
    if not isinstance(call, tree.CallOf):
        return None
    argument = next((argument for argument in call.arguments if argument.name == name), None)
    argument = argument or _positional(call, name)
    if argument is not None:
        if value is None:
            return _without_item(document, argument.span, [a.span for a in call.arguments])
        return _replacement(argument.value.span, value)
    if value is None:
        return None
    if not call.arguments:
        return TextEdit(call.name_span.end, call.span.end, f"({name} = {value})")
    end = call.arguments[-1].span.end
    return TextEdit(end, end, f", {name} = {value}")


def _positional(call: tree.CallOf, name: str) -> tree.Argument | None:
    """Returns the argument that is given by its place in a call of the language."""
    by_place = [argument for argument in call.arguments if argument.name is None]
    declared = next((calls[call.name] for calls in CALLS.values() if call.name in calls), None)
    names = [field.word for field in fields(declared)] if declared is not None else []
    return next((argument for word, argument in zip(names, by_place, strict=False) if word == name), None)


def _replacement(span: Span, value: str) -> TextEdit:
    return TextEdit(span.start, span.end, value)


# --------------------------------------------------------------------------------------------------------- finding


def _entries(document: tree.Document, block: str) -> Iterator[tuple[tuple[str, ...], tree.Entry]]:
    for statement in document.statements:
        if isinstance(statement, tree.Block) and statement.name == block:
            yield from ((entry.path, entry) for entry in statement.entries if isinstance(entry, tree.Entry))


def _entry(document: tree.Document, block: str, field: str) -> tree.Entry | None:
    """Returns the last entry of this name, which counts."""
    return next((entry for path, entry in [*_entries(document, block)][::-1] if path == (field,)), None)


def _params(document: tree.Document) -> dict[str, tree.Param]:
    return {s.name: s for s in document.statements if isinstance(s, tree.Param) and s.value is not None}


def _behind(document: tree.Document, value: tree.Expr) -> tree.Expr:
    """Returns the expression behind parentheses and the params of this file."""
    params, names = _params(document), set[str]()
    while True:
        if isinstance(value, tree.Group):
            value = value.inner
        elif isinstance(value, tree.Name) and value.name in params and value.name not in names:
            names.add(value.name)
            inner = params[value.name].value
            assert inner is not None
            value = inner
        else:
            return value


def _source_of(document: tree.Document, value: tree.Expr) -> Span:
    """Returns the text to replace for another value: a param's if nothing else uses the param."""
    params = _params(document)
    if isinstance(value, tree.Name) and value.name in params:
        uses = Counter(node.name for node in _nodes(document) if isinstance(node, tree.Name))
        inner = params[value.name].value
        if uses[value.name] == 1 and inner is not None:
            return inner.span
    return value.span


def _nodes(document: tree.Document) -> Iterator[tree.Node]:
    """Yields every node of a document, the outer before the inner."""
    stack: list[object] = [*reversed(document.statements)]
    while stack:
        node = stack.pop()
        if isinstance(node, tuple):
            stack.extend(reversed(node))
        elif isinstance(node, tree.Node):
            yield node
            stack.extend(reversed([value for key, value in vars(node).items() if key != "span"]))


def _same(one: Span | None, other: Span) -> bool:
    return one is not None and (one.start, one.end) == (other.start, other.end)


def _call_at(document: tree.Document, place: Span) -> tree.Expr | None:
    """Returns the call or the bare word at a place, or whose name or entry is there."""
    for node in _nodes(document):
        match node:
            case tree.CallOf() if _same(node.span, place) or _same(node.name_span, place):
                return node
            case tree.Name() if _same(node.span, place):
                return node
            case tree.Entry() if _same(node.name_span, place):
                return _behind(document, node.value)
    return None


# -------------------------------------------------------------------------------------------------------- removing


def _removal_at(document: tree.Document, place: Span) -> TextEdit | None:
    for node in _nodes(document):
        match node:
            case tree.Entry() | tree.Comparison():
                if any(_same(span, place) for span in (node.name_span, node.span, node.value.span)):
                    return _removal(document, node)
            case tree.Block() | tree.BlockValue() | tree.Param() | tree.Import() | tree.Language():
                named = getattr(node, "name_span", None) or getattr(node, "path_span", None)
                if _same(node.span, place) or _same(named, place):
                    return _without_lines(document, node.span)
            case tree.CallOf():
                for argument in node.arguments:
                    if any(_same(s, place) for s in (argument.name_span, argument.span, argument.value.span)):
                        return _without_item(document, argument.span, [a.span for a in node.arguments])
            case tree.List():
                for item in node.items:
                    if _same(item.span, place):
                        return _without_item(document, item.span, [i.span for i in node.items])
    return None


def _removal(document: tree.Document, entry: tree.Entry | tree.Comparison) -> TextEdit:
    """Removes an entry; with the last one its block."""
    block = next(s for s in document.statements if isinstance(s, tree.Block) and entry in s.entries)
    if len(block.entries) == 1 and not any(
        comment.own_line and block.span.start < comment.span.start < block.span.end for comment in document.comments
    ):
        return _without_lines(document, block.span)
    if _fills_lines(document, entry.span):
        return _without_lines(document, entry.span)
    return _without_item(document, entry.span, [e.span for e in block.entries])


def _fills_lines(document: tree.Document, span: Span) -> bool:
    """True if only a comment and a comma stand beside a node on its lines."""
    text = document.source.text
    begin = text.rfind("\n", 0, span.start) + 1
    end = text.find("\n", span.end)
    rest = text[span.end : end if end >= 0 else len(text)]
    return not text[begin : span.start].strip() and re.fullmatch(r"[ \t]*,?[ \t]*(#.*)?", rest) is not None


def _without_lines(document: tree.Document, span: Span) -> TextEdit:
    """Removes a node with the rest of its lines, and one of the empty lines around it."""
    text = document.source.text
    if not _fills_lines(document, span):
        return TextEdit(span.start, span.end, "")
    begin = text.rfind("\n", 0, span.start) + 1
    end = text.find("\n", span.end)
    end = len(text) if end < 0 else end + 1
    if (begin == 0 or text[:begin].endswith("\n\n")) and text[end : end + 1] == "\n":
        end += 1
    elif end == len(text) and text[:begin].endswith("\n\n"):
        begin -= 1
    return TextEdit(begin, end, "")


def _without_item(document: tree.Document, span: Span, items: Sequence[Span]) -> TextEdit:
    """Removes one of several items with the comma after it, or the last with the comma before it."""
    at = next(n for n, item in enumerate(items) if _same(item, span))
    if at + 1 < len(items):
        return TextEdit(span.start, items[at + 1].start, "")
    if at:
        return TextEdit(items[at - 1].end, span.end, "")
    comma = re.compile(r"\s*,").match(document.source.text, span.end)
    return TextEdit(span.start, comma.end() if comma else span.end, "")


# ---------------------------------------------------------------------------------------------------------- adding


def _new_entry(document: tree.Document, block: tree.Block, text: str) -> TextEdit:
    """Adds an entry at the end of a block, on a line of its own unless the block is on one line."""
    source = document.source.text
    close = block.span.end - 1
    if block.entries and "\n" not in source[block.span.start : block.span.end]:
        end = block.entries[-1].span.end
        return TextEdit(end, end, f", {text}")
    if not block.entries:
        at = len(source[:close].rstrip(" \t"))
        if source[at - 1 : at] == "\n":
            return TextEdit(at, at, f"{'':{INDENT}}{text}\n")
        return TextEdit(block.name_span.end, block.span.end, f" {{\n{'':{INDENT}}{text}\n}}")
    last = block.entries[-1].span
    line = source[source.rfind("\n", 0, last.start) + 1 : last.start]
    indent = line if not line.strip() else " " * INDENT
    end = source.find("\n", last.end)
    if end < 0 or end > close:
        return TextEdit(last.end, close, f"\n{indent}{text}\n")
    return TextEdit(end, end, f"\n{indent}{text}")


def _new_statement(document: tree.Document, block: str, text: str) -> TextEdit:
    """Adds a block after the last of those that usually stand before it."""
    source = document.source.text
    order = [*BLOCKS, *PATH_BLOCKS]
    before = order[: order.index(block)] if block in order else []
    ends = [
        statement.span.end
        for statement in document.statements
        if not isinstance(statement, tree.Block | tree.BlockValue) or statement.name in before
    ]
    if not ends:
        return TextEdit(0, 0, f"{text}\n\n")
    end = source.find("\n", ends[-1])
    if end < 0:
        return TextEdit(len(source), len(source), f"\n\n{text}\n")
    return TextEdit(end, end, f"\n\n{text}")
