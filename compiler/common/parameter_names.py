"""The names of parameters. A tied parameter is one tensor with several names, each of which stands for the tensor.

Every field of a job that names parameters asks here: `freeze`, `no_decay`, `groups` and an adapter's `save`. So a
pattern means the same for each plan, also where a pipeline stage has one of the names alone.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from fnmatch import fnmatchcase


def matches(patterns: Iterable[str], name: str) -> bool:
    """True if one of the patterns is of this name."""
    return any(fnmatchcase(name, pattern) for pattern in patterns)


class ParameterNames:
    """All names of each parameter of a network. The first name in the network's order identifies the parameter."""

    def __init__(self, names: Iterable[str], ties: Iterable[tuple[str, str]] = ()) -> None:
        """`ties` are pairs of a further name and the first name of the same tensor."""
        self._first = dict(ties)
        self._all: dict[str, list[str]] = {}
        for name in (*names, *self._first):
            own = self._all.setdefault(self.first_name(name), [])
            if name not in own:
                own.append(name)

    def first_name(self, name: str) -> str:
        """Returns the first name of the parameter that `name` is a name of."""
        return self._first.get(name, name)

    def all_names(self, name: str) -> tuple[str, ...]:
        """Returns all names of the parameter that `name` is a name of, the first name first."""
        first = self.first_name(name)
        return tuple(sorted(self._all.get(first, (first,)), key=lambda each: each != first))

    def match(self, patterns: Sequence[str], name: str) -> bool:
        """True if one of the patterns is of any name of the parameter that `name` is a name of."""
        return any(matches(patterns, each) for each in self.all_names(name))

    def matching(self, patterns: Sequence[str]) -> frozenset[str]:
        """Returns the first names of the parameters that a pattern is of, by any of their names."""
        return frozenset(first for first in self._all if patterns and self.match(patterns, first))

    def group(self, groups: Sequence[Sequence[str]], name: str) -> int:
        """Returns the number, from 1, of the first of some lists of patterns that matches a parameter; 0 if none does.

        Any name of the parameter counts. Where two names are in two groups, the group that is written first has the
        parameter.
        """
        return next((number for number, patterns in enumerate(groups, 1) if self.match(patterns, name)), 0)
