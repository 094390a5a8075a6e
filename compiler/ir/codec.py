"""Records as JSON, and back: `to_json`, and `from_json` by cattrs.

A record is a frozen dataclass of numbers, text, tuples, mappings and other records. An object of JSON has the names of
its fields. Where a field may hold one of several records, the object also has the name of its class, under `record`.

Contract: `from_json(kind, to_json(value))` is equal to a `value` of `kind`, also after `json.dumps` and `parse`. The
JSON need not be trusted: reading it creates only `kind` and the records that its fields name, converts no value to
another kind, and refuses missing and unknown fields. Every fault is a `DecodeError`, which says where it is.

msgspec is quicker, but reads no union of dataclasses and passes over fields that a dataclass does not have. cattrs is
imported at the first reading, since `dslc check` needs none of this. Writing follows the values, and asks the types of
a class only which fields hold one of several records: cattrs makes a function for each class, 0.13 s for a run.
"""

from __future__ import annotations

import dataclasses
import json
import re
import reprlib
import sys
import types
import typing
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import is_dataclass
from enum import StrEnum
from functools import cache
from typing import TYPE_CHECKING, Any, Literal, TypeVar

if TYPE_CHECKING:
    from cattrs import Converter

    from dslc.dsl.record import Record

TAG = "record"
_SCALARS = {int: "a whole number", float: "a number", str: "text", bool: "true or false", types.NoneType: "null"}

_COMPOSED, _NAME = re.compile(r"[|.]|Union"), re.compile(r"[A-Za-z_]\w*")

T = TypeVar("T")
Hook = Callable[..., object]  # cattrs' hooks: of the data and the type


class DecodeError(ValueError):
    """JSON that is not of the kind asked for; the text says where and why."""


def to_json(value: object) -> Any:
    """Records as dicts, and all else as it is, for `json.dumps`, which writes tuples as lists."""
    return _to_plain(value, frozenset())


def from_json(kind: type[T], data: object) -> T:
    """Returns the `kind` that `to_json` wrote as `data`. Raises DecodeError."""
    try:
        made: T = _converter().structure(data, kind)
    except Exception as error:
        raise DecodeError(_in_words(error, kind.__name__)) from None
    return made


def parse(text: str) -> Any:
    """Returns the data in a text of JSON, for `from_json`. Raises DecodeError."""
    try:
        return json.loads(text)
    except RecursionError:
        raise DecodeError("it is nested too deeply") from None
    except ValueError as error:
        raise DecodeError(str(error)) from None


# ---------------------------------------------------------------------------------------------------------- writing


def _to_plain(value: object, choices: frozenset[type]) -> object:
    """Returns a value as JSON; a record of the classes `choices` has the name of its class."""
    kind: type = type(value)
    if kind in _SCALARS:
        return value
    if kind is tuple:  # before other kinds, as most values are one of these two
        return tuple([_to_plain(each, choices) for each in value])  # type: ignore[attr-defined]
    if is_dataclass(kind):
        plain: dict[str, object] = {TAG: kind.__name__} if kind in choices else {}
        for name, inner in fields_of(kind):
            plain[name] = _to_plain(getattr(value, name), inner)
        return plain
    if isinstance(value, StrEnum):
        return value.value
    if isinstance(value, list):
        return [_to_plain(each, choices) for each in value]
    if isinstance(value, tuple):
        return tuple(_to_plain(each, choices) for each in value)
    if isinstance(value, Mapping):
        return {_to_plain(key, choices): _to_plain(each, choices) for key, each in value.items()}
    return value


def changed_fields(record: Record) -> dict[str, object]:
    """Returns the name of a record's class and, as `to_json` does, the fields that have not their default."""
    kind: type = type(record)
    defaults = record.record_defaults
    plain: dict[str, object] = {TAG: kind.__name__}
    for name, choices in fields_of(kind):
        value = getattr(record, name)
        if name in defaults and type(value) is type(defaults[name]) and value == defaults[name]:
            continue
        plain[name] = _to_plain(value, choices)
    return plain


@cache
def fields_of(kind: type) -> tuple[tuple[str, frozenset[type]], ...]:
    """Returns the fields of a record that may hold one of several classes, with the classes."""
    names: dict[str, object] = {}
    for base in reversed(kind.__mro__):
        names |= vars(sys.modules[base.__module__])
    return tuple((f.name, frozenset(_choices_in(f.type, names))) for f in dataclasses.fields(kind))


def _choices_in(annotation: object, names: dict[str, object]) -> Iterator[type]:
    """Yields the records that a field may hold, by its type, if it has several."""
    if isinstance(annotation, str):
        if not _COMPOSED.search(annotation.replace(" | None", "")):
            # A type without a choice of its own, whose names may be of choices; evaluating it takes longer.
            for name in _NAME.findall(annotation):
                yield from _choices_in(names.get(name), names)
            return
        annotation = eval(annotation, names)
    if _is_choice(annotation):
        yield from filter(is_dataclass, _choices(annotation))
    for part in typing.get_args(annotation):
        yield from _choices_in(part, names)


# -------------------------------------------------------------------------------------------------------- the kinds


class _Wrong(Exception):
    """A value of an unexpected kind."""

    def __init__(self, expected: str, found: object) -> None:
        super().__init__(f"expected {expected}, found {_short.repr(found)}")


_short = reprlib.Repr()
_short.maxstring = _short.maxlong = _short.maxother = 60
_short.maxlevel = 2


@cache
def _converter() -> Converter:
    from cattrs import Converter
    from cattrs.cols import homogenous_tuple_structure_factory, is_mapping, mapping_structure_factory

    made = Converter(forbid_extra_keys=True)

    def strictly(
        applies: Callable[[object], bool], taken: tuple[type, ...], words: str, factory: Callable[..., Hook]
    ) -> None:
        """Structures as cattrs does, but from values of the types `taken` alone."""

        def hooked(kind: object) -> Hook:
            inner = factory(kind)

            def hook(data: object, _: object) -> object:
                if not isinstance(data, taken):
                    raise _Wrong(words, data)
                return inner(data, kind)

            return hook

        made.register_structure_hook_factory(applies, hooked)

    strictly(is_dataclass, (dict,), "an object", made.gen_structure_attrs_fromdict)
    strictly(is_mapping, (dict,), "an object", lambda kind: mapping_structure_factory(kind, made))
    strictly(_is_sequence, (list, tuple), "a list", lambda kind: homogenous_tuple_structure_factory(kind, made))
    strictly(_is_fixed, (list, tuple), "a list", lambda kind: _of_length(kind, made.gen_structure_hetero_tuple(kind)))
    for kind in _SCALARS:
        made.register_structure_hook(kind, _scalar(kind))
    made.register_structure_hook(StrEnum, _word)  # before text, of which cattrs takes it to be a kind
    made.register_structure_hook_factory(_is_literal, _literal)
    made.register_structure_hook_func(lambda kind: kind is Any, lambda data, _: _plain(data))
    made.register_structure_hook_factory(_is_choice, lambda union: _choose(union, made))
    return made


def _is_literal(kind: object) -> bool:
    origin: object = typing.get_origin(kind)
    return origin is Literal


def _is_sequence(kind: object) -> bool:
    return typing.get_origin(kind) is tuple and typing.get_args(kind)[1:] == (Ellipsis,)


def _is_fixed(kind: object) -> bool:
    return typing.get_origin(kind) is tuple and not _is_sequence(kind)


def _is_choice(kind: object) -> bool:
    """Returns True for unions of several kinds, and False for a kind that may be None, as cattrs reads these."""
    return typing.get_origin(kind) in (types.UnionType, typing.Union) and len(_choices(kind)) > 1


def _choices(union: object) -> tuple[type, ...]:
    return tuple(kind for kind in typing.get_args(union) if kind is not types.NoneType)


def _of_length(kind: object, inner: Hook) -> Hook:
    length = len(typing.get_args(kind))

    def hook(data: Sequence[object], _: object) -> object:
        if len(data) != length:
            raise _Wrong(f"a list of {length}", data)
        return inner(data, kind)

    return hook


def _scalar(kind: type) -> Hook:
    """Structures a scalar. A `float` may be a whole number, which stays whole, to be written as it was read."""
    taken = (float, int) if kind is float else (kind,)

    def hook(data: object, _: object) -> object:
        if type(data) not in taken:  # True is an instance of int
            raise _Wrong(_SCALARS[kind], data)
        return data

    return hook


def _literal(kind: object) -> Hook:
    values = typing.get_args(kind)

    def hook(data: object, _: object) -> object:
        if not any(data == value and type(data) is type(value) for value in values):
            raise _Wrong(f"one of {', '.join(map(json.dumps, values))}", data)
        return data

    return hook


def _word(data: object, kind: type[StrEnum]) -> StrEnum:
    found = next((each for each in kind if type(data) is str and data == each), None)
    if found is None:
        raise _Wrong(f"one of {', '.join(map(json.dumps, kind))}", data)
    return found


def _plain(data: object) -> object:
    """Structures a field of any kind: scalars, tuples and mappings of these."""
    if isinstance(data, list | tuple):
        return tuple(map(_plain, data))
    if isinstance(data, dict):
        return {key: _plain(value) for key, value in data.items()}
    if type(data) in _SCALARS:
        return data
    raise _Wrong("plain data", data)


def _choose(union: object, converter: Converter) -> Hook:
    """Reads one of several records by its tag, and one of several scalars by its type."""
    records: dict[str, type] = {kind.__name__: kind for kind in _choices(union) if is_dataclass(kind)}
    scalars = tuple(kind for kind in typing.get_args(union) if kind in _SCALARS)
    if len(records) + len(scalars) < len(typing.get_args(union)):
        raise TypeError(f"{union} has members that are neither records nor scalars, or are called alike")

    def hook(data: object, _: object) -> object:
        if type(data) in scalars:
            return data
        tag = data.get(TAG) if isinstance(data, dict) else None
        if not isinstance(data, dict) or not isinstance(tag, str) or tag not in records:
            wanted = [_SCALARS[kind] for kind in scalars]
            wanted += [f"an object whose `{TAG}` is one of {', '.join(records)}"] if records else []
            raise _Wrong(" or ".join(wanted), data)
        return converter.structure({key: value for key, value in data.items() if key != TAG}, records[tag])

    return hook


# ---------------------------------------------------------------------------------------------------- errors in words


def _in_words(error: BaseException, path: str) -> str:
    """Returns the first fault and its place: follows the groups that cattrs raises down to it."""
    from cattrs.errors import ForbiddenExtraKeysError

    while isinstance(error, BaseExceptionGroup):
        error = error.exceptions[0]
        path += next(_steps(error), "")
    if isinstance(error, RecursionError):
        return "it is nested too deeply"
    if isinstance(error, KeyError):
        return f"{path} is missing"
    if isinstance(error, ForbiddenExtraKeysError):
        names = ", ".join(map(_short.repr, sorted(error.extra_fields)[:3]))
        return f"{path} has no field {names}"
    if isinstance(error, _Wrong):
        return f"{path}: {error}"
    raise error  # a fault of ours: not of the data


def _steps(error: BaseException) -> Iterator[str]:
    """Yields the steps to the place of an error, from cattrs' notes on it."""
    from cattrs.errors import AttributeValidationNote, IterableValidationNote

    for note in getattr(error, "__notes__", ()):
        if isinstance(note, AttributeValidationNote):
            yield f".{note.name}"
        elif isinstance(note, IterableValidationNote):
            yield f"[{_short.repr(note.index)}]"
