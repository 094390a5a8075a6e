"""Frozen, keyword-only dataclasses that share their methods.

`dataclass` compiles the methods of each class anew, which takes half a millisecond: over the two hundred classes of
the language and the compiler that would be a third of the time of a whole `dslc check`. A record has the same fields,
and so works with `dataclasses.fields`, `replace` and `asdict`, but one set of methods reads them.
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
    _finish(cls, kw_only=True)
    return cls


@dataclass_transform(frozen_default=True, field_specifiers=(dataclasses.field,))
def positional(cls: type[T]) -> type[T]:
    """Makes the same with fields that may be given by position."""
    _finish(cls, kw_only=False)
    return cls


def _finish(cls: Any, *, kw_only: bool) -> None:
    cls.__doc__ = cls.__doc__ or cls.__name__  # dataclass would work out a signature, which is slow
    dataclasses.dataclass(init=False, repr=False, eq=False, kw_only=kw_only)(cls)
    fields = dataclasses.fields(cls)
    cls.record_names = {f.name for f in fields}
    cls.record_shown = tuple(f.name for f in fields if f.repr)
    cls.record_compared = tuple(f.name for f in fields if f.compare)
    cls.record_defaults = {f.name: f.default for f in fields if f.default is not dataclasses.MISSING}


class Record:
    """The shared methods of records: equality by class and by the fields that compare, and a matching hash."""

    record_names: ClassVar[set[str]] = set()
    record_shown: ClassVar[tuple[str, ...]] = ()
    record_compared: ClassVar[tuple[str, ...]] = ()
    record_defaults: ClassVar[dict[str, object]] = {}

    if not TYPE_CHECKING:

        def __init__(self, *in_order: object, **by_name: object) -> None:
            if in_order:
                names = self.__match_args__[: len(in_order)]
                if len(names) < len(in_order) or by_name.keys() & names:
                    raise TypeError(f"{type(self).__name__} takes its fields by name, each once")
                by_name |= zip(names, in_order, strict=True)
            values = self.__dict__
            values |= self.record_defaults
            values |= by_name
            if values.keys() != self.record_names:
                self._complete(values)

        __setattr__ = _set
        __delattr__ = _delete

    def _complete(self, values: dict[str, object]) -> None:
        """Calls the factories of the fields that have no value. Raises TypeError for fields too many or too few."""
        for f in dataclasses.fields(self):  # type: ignore[arg-type]
            if f.name not in values:
                if f.default_factory is dataclasses.MISSING:
                    raise TypeError(f"{type(self).__name__} needs {f.name!r}")
                values[f.name] = f.default_factory()
        if unknown := values.keys() - self.record_names:
            raise TypeError(f"{type(self).__name__} takes no {', '.join(map(repr, sorted(unknown)))}")

    def _compared(self) -> list[object]:
        values = self.__dict__
        return [values[name] for name in self.record_compared]

    def __eq__(self, other: object) -> bool:
        if type(other) is not type(self):
            return NotImplemented
        assert isinstance(other, Record)
        return self._compared() == other._compared()

    def __hash__(self) -> int:
        return hash((type(self), *self._compared()))

    def __repr__(self) -> str:
        shown = (f"{name}={getattr(self, name)!r}" for name in self.record_shown)
        return f"{type(self).__name__}({', '.join(shown)})"
