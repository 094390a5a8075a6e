"""Frozen, keyword-only dataclasses that share their methods.

`dataclass` compiles the methods of each class anew, which takes half a millisecond: over the hundred and fifty nodes
and declarations of the language that is a third of the time that a whole `dslc check` may take. A record has the same
fields, and so works with `dataclasses.fields`, `replace` and `asdict`, but one set of methods reads them.
"""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING, Any, ClassVar, TypeVar, dataclass_transform

T = TypeVar("T")


def _set(record: Record, name: str, value: object) -> None:
    raise dataclasses.FrozenInstanceError(f"cannot assign to field {name!r}")


def _delete(record: Record, name: str) -> None:
    raise dataclasses.FrozenInstanceError(f"cannot delete field {name!r}")


@dataclass_transform(kw_only_default=True, frozen_default=True, field_specifiers=(dataclasses.field,))
def record(cls: type[T]) -> type[T]:
    """Makes a dataclass of a subclass of `Record`."""
    made: Any = dataclasses.dataclass(init=False, repr=False, eq=False, kw_only=True)(cls)
    made.record_fields = dataclasses.fields(made)
    return made


@dataclass_transform(frozen_default=True, field_specifiers=(dataclasses.field,))
def positional(cls: type[T]) -> type[T]:
    """Makes the same with fields that may be given by position."""
    made: Any = dataclasses.dataclass(init=False, repr=False, eq=False)(cls)
    made.record_fields = dataclasses.fields(made)
    return made


class Record:
    """The shared methods of records: equality by class and by the fields that compare, and a matching hash."""

    record_fields: ClassVar[tuple[dataclasses.Field[Any], ...]] = ()

    if not TYPE_CHECKING:

        def __init__(self, *in_order: Any, **given: Any) -> None:
            values = self.__dict__
            if in_order:
                names = self.__match_args__[: len(in_order)]
                if len(names) < len(in_order) or given.keys() & names:
                    raise TypeError(f"{type(self).__name__} takes its fields by name, each once")
                given |= zip(names, in_order, strict=True)
            for f in self.record_fields:
                name = f.name
                if name in given:
                    values[name] = given.pop(name)
                elif f.default is not dataclasses.MISSING:
                    values[name] = f.default
                elif f.default_factory is not dataclasses.MISSING:
                    values[name] = f.default_factory()
                else:
                    raise TypeError(f"{type(self).__name__} needs {name!r}")
            if given:
                raise TypeError(f"{type(self).__name__} takes no {', '.join(map(repr, given))}")

        __setattr__ = _set
        __delattr__ = _delete

    def _compared(self) -> tuple[Any, ...]:
        return tuple(getattr(self, f.name) for f in self.record_fields if f.compare)

    def __eq__(self, other: object) -> bool:
        if type(other) is not type(self):
            return NotImplemented
        assert isinstance(other, Record)
        return self._compared() == other._compared()

    def __hash__(self) -> int:
        return hash((type(self), self._compared()))

    def __repr__(self) -> str:
        shown = (f"{f.name}={getattr(self, f.name)!r}" for f in self.record_fields if f.repr)
        return f"{type(self).__name__}({', '.join(shown)})"
