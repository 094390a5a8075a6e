"""The names of parameters. A tied parameter is one tensor with several names, and each name stands for the tensor.

Every field of a job that names parameters asks here: `freeze`, `no_decay`, `groups` and an adapter's `save`. So a
pattern means the same for each plan, also where a pipeline stage has one of the names alone.

Model of adapters: the library `peft` puts a layer with an adapter into the place of a dense layer `x`. The layer itself
becomes `x.base_layer`, the two matrices are `x.lora_A.default.weight` and `x.lora_B.default.weight`. Files know the
weight by its name without the adapter, `x.weight`.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from fnmatch import fnmatchcase
from functools import partial
from typing import TypeVar


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


T = TypeVar("T")

BASE = "base_layer"
FIRST, SECOND = "lora_A.default", "lora_B.default"
_OWN = re.compile(r"(.*\.)?lora_[AB]\.default\.weight")


def targeted(patterns: Sequence[str]) -> Callable[[str], bool]:
    """Returns a function that is True for names of modules that one of the patterns matches, whole or at the end.
    peft's `target_modules` match so: `q_proj` matches `layers.0.q_proj`. `*` is any text.
    """
    return partial(matches, [form for each in patterns for form in (each, f"*.{each}")])


def is_of_adapter(name: str) -> bool:
    """True if a parameter is one of an adapter's own."""
    return _OWN.fullmatch(name) is not None


def base_name(name: str) -> str:
    """Returns the name of a tensor in the network without adapters. The tensor must not be an adapter's own."""
    return name.replace(f".{BASE}.", ".").removeprefix(f"{BASE}.")


def without_adapters(tensors: Mapping[str, T]) -> dict[str, T]:
    """Returns the values by the names of tensors without adapters, except for the adapters' own tensors."""
    return {base_name(name): value for name, value in tensors.items() if not is_of_adapter(name)}


def file_name(name: str) -> str:
    """Returns the name of an adapter's tensor in the file of an adapter alone, without peft's prefix."""
    return name.replace(".default.", ".")
