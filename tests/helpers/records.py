"""Records of a kind, drawn from the declared types of its fields."""

from __future__ import annotations

import types
import typing
from collections.abc import Mapping
from dataclasses import fields, is_dataclass
from enum import StrEnum
from typing import Any, Literal

from hypothesis import strategies as st

_texts = st.text(max_size=6)
_scalars = st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | _texts
_plain = st.recursive(
    _scalars,
    lambda inner: st.lists(inner, max_size=3).map(tuple) | st.dictionaries(_texts, inner, max_size=3),
    max_leaves=6,
)
_SCALARS: dict[Any, st.SearchStrategy[Any]] = {
    Any: _plain,
    bool: st.booleans(),
    float: st.floats(allow_nan=False) | st.integers(),
    int: st.integers(),
    str: _texts,
    types.NoneType: st.none(),
}


def values(kind: Any, depth: int = 4) -> st.SearchStrategy[Any]:
    """Draws values of a type, with records at most `depth` deep in fields that may hold many or none of them."""
    arguments = typing.get_args(kind)
    match typing.get_origin(kind):
        case _ if is_dataclass(kind):
            return _record(kind, depth)
        case _ if isinstance(kind, type) and issubclass(kind, StrEnum):
            return st.sampled_from(list(kind))
        case origin if origin is Literal:
            return st.sampled_from(arguments)
        case typing.Union | types.UnionType:
            shallow = [each for each in arguments if depth > 0 or not is_dataclass(each)]
            return st.one_of([values(each, depth) for each in shallow or arguments])
        case origin if origin is tuple and arguments[1:] == (Ellipsis,):
            if is_dataclass(arguments[0]) and depth <= 0:
                return st.just(())
            return st.lists(values(arguments[0], depth), max_size=2).map(tuple)
        case origin if origin is tuple:
            return st.tuples(*(values(each, depth) for each in arguments))
        case origin if origin is Mapping:
            return st.dictionaries(values(arguments[0]), values(arguments[1], depth), max_size=2)
        case _:
            return _SCALARS[kind]


def _record(kind: Any, depth: int) -> st.SearchStrategy[Any]:
    hints = typing.get_type_hints(kind)
    return st.builds(kind, **{each.name: values(hints[each.name], depth - 1) for each in fields(kind)})
