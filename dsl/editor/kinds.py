"""The kind of the value at a place, and the calls and words that it may be."""

from __future__ import annotations

from collections.abc import Iterator

from dslc.dsl.editor.scopes import OpenBracket, Scope
from dslc.dsl.language.registry import (
    BLOCKS,
    CALLS,
    Call,
    CallOf,
    Either,
    Field,
    Float,
    Kind,
    ListOf,
    Node,
    fields,
    measure,
)  # fmt: skip
from dslc.dsl.meaning.resolve import PROMISES


def field_of(block: str, name: str) -> Field | None:
    return named_field(BLOCKS[block], name) if block in BLOCKS else None


def named_field(declaration: type[Node], name: str) -> Field | None:
    return next((f for f in fields(declaration) if f.word == name), None)


def flat_kinds(kind: Kind | None) -> Iterator[Kind]:
    if isinstance(kind, Either):
        for inner in kind.kinds:
            yield from flat_kinds(inner)
    elif kind is not None:
        yield kind
        if isinstance(kind, ListOf) and kind.single:
            yield from flat_kinds(kind.item)


def call_of(kind: Kind | None, name: str) -> type[Call] | None:
    """Returns the call of this name that the kind takes; failing that, the only one of this name."""
    for inner in flat_kinds(kind):
        for category in inner.categories if isinstance(inner, CallOf) else ():
            if name in CALLS[category]:
                return CALLS[category][name]
    everywhere = [calls[name] for calls in CALLS.values() if name in calls]
    return everywhere[0] if everywhere else None


def value_kind(scope: Scope) -> Kind | None:
    """Returns the kind of the value at a scope inside a value; None if it is unknown."""
    brackets = list(scope.brackets)
    kind = entry_kind(scope)
    if scope.block == "sweep" and brackets and brackets[0].name == "[":
        del brackets[0]  # the list of the alternatives
    for bracket in brackets:
        kind = _inside(kind, bracket)
    return kind


def entry_kind(scope: Scope) -> Kind | None:
    """Returns the kind of the whole value of the entry."""
    if scope.block == "expect":
        dimension = PROMISES.get(scope.path[0]) if scope.path else None
        return measure(dimension) if dimension else Float()
    path = scope.path if scope.block == "sweep" else (scope.block, *scope.path)
    return path_kind(path)


def path_kind(path: tuple[str, ...]) -> Kind | None:
    """Returns the kind of `block.field` or `block.field.argument`."""
    field = field_of(path[0], path[1]) if len(path) > 1 else None
    if field is None or len(path) == 2:
        return field.kind if field else None
    found = [argument.kind for argument in path_arguments(path[0], path[1]) if argument.word == path[2]]
    return found[0] if found else None


def path_arguments(block: str, name: str) -> list[Field]:
    """Returns the arguments of all calls that a field takes."""
    field = field_of(block, name)
    categories = [c for kind in flat_kinds(field.kind if field else None) if isinstance(kind, CallOf)
                  for c in kind.categories]  # fmt: skip
    return [f for c in categories for call in CALLS[c].values() for f in fields(call)]


def open_call(scope: Scope) -> type[Call] | None:
    """Returns the call whose arguments stand at a scope."""
    if not scope.brackets or scope.brackets[-1].name in ("[", "("):
        return None
    outer = scope._replace(brackets=scope.brackets[:-1])
    return call_of(value_kind(outer), scope.brackets[-1].name)


def _inside(kind: Kind | None, bracket: OpenBracket) -> Kind | None:
    """Returns the kind of a value in a bracket that stands where a value of `kind` is taken."""
    if bracket.name == "(":
        return kind
    if bracket.name == "[":
        return next((inner.item for inner in flat_kinds(kind) if isinstance(inner, ListOf)), None)
    call = call_of(kind, bracket.name)
    if call is None:
        return None
    if bracket.argument:
        field = named_field(call, bracket.argument)
        return field.kind if field else None
    declared = fields(call)
    return declared[bracket.commas].kind if bracket.commas < len(declared) else None
