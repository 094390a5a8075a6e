"""Completions: blocks, fields, words, calls, arguments, params, units and paths, documented from the registry."""

from __future__ import annotations

import os
from collections.abc import Iterator
from typing import Literal

from dslc.dsl.editor import documentation
from dslc.dsl.editor.kinds import field_of, flat_kinds, open_call, path_arguments, value_kind
from dslc.dsl.editor.scopes import Scope
from dslc.dsl.editor.snapshot import Snapshot
from dslc.dsl.language.registry import BLOCKS, CALLS, PATH_BLOCKS, Bool, CallOf, Field, Measure, Path, Word, fields
from dslc.dsl.language.units import UNITS
from dslc.dsl.meaning.describe import describe
from dslc.dsl.meaning.resolve import PROMISES
from dslc.dsl.meaning.schema import visible_fields
from dslc.dsl.record import Record, record
from dslc.dsl.syntax.lexer import NUMBER_PART

MAX_FILES = 200  # of a folder
CompletionKind = Literal["block", "field", "word", "call", "argument", "param", "keyword", "unit", "file", "folder"]


@record
class Completion(Record):
    """A text for the characters `start` to `end`. `snippet` has placeholders as in `adamw($1)`."""

    label: str
    kind: CompletionKind
    start: int
    end: int
    snippet: str
    detail: str = ""
    documentation: str = ""


def complete(snapshot: Snapshot, offset: int) -> list[Completion]:
    """Returns what may stand at an offset, the likeliest first."""
    scope, token = snapshot.scope_at(offset)
    if scope.statement == "#":
        return []
    if token is not None and token.kind == "STRING":
        return list(_paths(snapshot, scope, offset, token.start + 1))
    if token is None and (start := _open_string(snapshot.text, offset)) is not None:
        return list(_paths(snapshot, scope, offset, start))
    start, end = (token.start, token.end) if token else (offset, offset)
    if token is not None and token.kind in ("NUMBER", "QUANTITY"):
        number = NUMBER_PART.match(token.text)
        start += number.end() if number else 0
        return list(_units(scope, start, end))
    if not scope.in_value:
        candidates = _names(snapshot, scope, start, end)
    else:
        candidates = _values(snapshot, scope, start, end)
    return list(candidates)


def _names(snapshot: Snapshot, scope: Scope, start: int, end: int) -> Iterator[Completion]:
    """Yields blocks and statements, or the fields of a block."""
    if scope.block in BLOCKS and not scope.path:
        taken = {t.token.text for t in snapshot.tokens if t.role == "field" and t.scope.block == scope.block
                 and not t.scope.path and t.token.start != start}  # fmt: skip
        for field in visible_fields(BLOCKS[scope.block]):
            if field.word not in taken:
                yield _field(field, f"{scope.block}.", "field", start, end)
    elif scope.block == "expect" and not scope.path:
        for name in PROMISES:
            yield Completion(label=name, kind="field", start=start, end=end, snippet=f"{name} < $0",
                             documentation=documentation.promise_text(name))  # fmt: skip
    elif scope.block == "sweep":
        yield from _sweep_names(snapshot, scope.path, start, end)
    elif not scope.block and scope.statement in ("", snapshot.text[start:end]):
        yield from _statements(snapshot, start, end)


def _statements(snapshot: Snapshot, start: int, end: int) -> Iterator[Completion]:
    present = {region.name for region in snapshot.regions if region.start != start}
    for word in [*BLOCKS, *PATH_BLOCKS]:
        if word not in present:
            yield Completion(label=word, kind="block", start=start, end=end, snippet=f"{word} {{\n  $0\n}}",
                             documentation=documentation.block_text(word))  # fmt: skip
    for word, snippet in (("param", "param ${1:name} = $0"), ("import", 'import "$0"'), ("language", "language = 1")):
        yield Completion(label=word, kind="keyword", start=start, end=end, snippet=snippet,
                         documentation=documentation.KEYWORD_DOCS[word])  # fmt: skip
    for word, declaration in BLOCKS.items():
        if declaration.whole and word not in present:
            text = f"{word} = {declaration.whole}"
            yield Completion(label=text, kind="block", start=start, end=end, snippet=text,
                             documentation=documentation.block_text(word))  # fmt: skip


def _sweep_names(snapshot: Snapshot, path: tuple[str, ...], start: int, end: int) -> Iterator[Completion]:
    if not path:
        for word in BLOCKS:
            yield Completion(label=word, kind="block", start=start, end=end, snippet=f"{word}.",
                             documentation=documentation.block_text(word))  # fmt: skip
        for name, value in snapshot.params.items():
            yield Completion(label=name, kind="param", start=start, end=end, snippet=f"{name} = [$0]", detail=value)
    elif len(path) == 1 and path[0] in BLOCKS:
        for field in visible_fields(BLOCKS[path[0]]):
            yield _field(field, f"{path[0]}.", "field", start, end, " = [$0]")
    elif len(path) == 2:
        for field in {field.word: field for field in path_arguments(path[0], path[1])}.values():
            if field.word != "arguments":
                yield _field(field, f"{path[1]}.", "argument", start, end, " = [$0]")


def _values(snapshot: Snapshot, scope: Scope, start: int, end: int) -> Iterator[Completion]:
    """Yields the arguments of the call, then the words, calls and params that the value may be."""
    call = open_call(scope)
    if call is not None and not scope.brackets[-1].argument:
        names = scope.brackets[-1].names
        for field in visible_fields(call)[scope.brackets[-1].commas - len(names) :]:
            if field.word not in names:
                yield _field(field, f"{call.word}.", "argument", start, end)
    if scope.statement == "import":
        return
    kind = value_kind(scope)
    for inner in flat_kinds(kind):
        if isinstance(inner, Word):
            for word in inner.choices:
                yield Completion(label=word, kind="word", start=start, end=end, snippet=word)
        elif isinstance(inner, Bool):
            for word in ("true", "false"):
                yield Completion(label=word, kind="word", start=start, end=end, snippet=word)
        elif isinstance(inner, CallOf):
            yield from _calls(inner, start, end)
    for name, value in snapshot.params.items():
        yield Completion(label=name, kind="param", start=start, end=end, snippet=name, detail=value)
    entry = field_of(scope.block, scope.path[0]) if scope.path and not scope.brackets else None
    if entry is not None and not entry.required:
        yield Completion(label="none", kind="word", start=start, end=end, snippet="none", detail="the default")


def _calls(kind: CallOf, start: int, end: int) -> Iterator[Completion]:
    for category in kind.categories:
        for word, call in CALLS[category].items():
            needs = any(f.required for f in fields(call)) or bool(call.one_of) or call.open
            yield Completion(label=word, kind="call", start=start, end=end, snippet=f"{word}($0)" if needs else
                             f"{word}()$0", detail=category, documentation=documentation.call_text(call))  # fmt: skip


def _units(scope: Scope, start: int, end: int) -> Iterator[Completion]:
    dimensions = [d for kind in flat_kinds(value_kind(scope)) if isinstance(kind, Measure) for d in kind.dimensions]
    for unit, (dimension, _, _) in UNITS.items():
        if dimension in dimensions:
            text = f" {unit}" if dimension in ("steps", "epochs") else unit
            yield Completion(label=unit, kind="unit", start=start, end=end, snippet=text,
                             documentation=documentation.unit_text(unit))  # fmt: skip


def _paths(snapshot: Snapshot, scope: Scope, offset: int, start: int) -> Iterator[Completion]:
    """Yields the files and folders that a text in quotes may name."""
    if scope.statement != "import" and not any(isinstance(kind, Path) for kind in flat_kinds(value_kind(scope))):
        return
    folder, _, _ = snapshot.text[start:offset].rpartition("/")
    begin = offset - len(snapshot.text[start:offset].rpartition("/")[2])
    full = os.path.join(snapshot.folder, os.path.expanduser(folder + "/" if folder else ""))
    try:
        with os.scandir(full) as entries:
            names = sorted((entry.name, entry.is_dir()) for entry in entries if not entry.name.startswith("."))
    except (OSError, ValueError):
        return
    for name, is_folder in names[:MAX_FILES]:
        if is_folder or scope.statement != "import" or name.endswith(".plt"):
            yield Completion(label=name, kind="folder" if is_folder else "file", start=begin, end=offset,
                             snippet=f"{name}/" if is_folder else name)  # fmt: skip


def _open_string(text: str, offset: int) -> int | None:
    """Returns where a string begins that is not closed on the line of the offset."""
    line = text[text.rfind("\n", 0, offset) + 1 : offset]
    quotes = [at for at, char in enumerate(line) if char == '"' and (at == 0 or line[at - 1] != "\\")]
    return offset - len(line) + quotes[-1] + 1 if len(quotes) % 2 and "#" not in line[: quotes[0]] else None


def _field(field: Field, owner: str, kind: CompletionKind, start: int, end: int, follows: str = " = $0") -> Completion:
    """Returns the completion of a field of a block, or of an argument of a call."""
    return Completion(
        label=field.word, kind=kind, start=start, end=end, snippet=f"{field.word}{follows}",
        detail="required" if field.required else describe(field.kind),
        documentation=documentation.field_text(field, owner),
    )  # fmt: skip
