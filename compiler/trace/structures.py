"""Structures of tensors: batches, samples and outputs that are more than one tensor.

Model: torch's pytrees, nested dicts, lists and tuples; dataclasses and mappings of other classes, such as a tokenizer's
`BatchEncoding`, are registered with torch as soon as one is met. Anything else is a leaf, a tensor or not.
"""

from __future__ import annotations

import dataclasses
import inspect
import re
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import lru_cache, partial
from types import FunctionType, MethodType, ModuleType, SimpleNamespace
from typing import Any, TypeAlias

import torch
from torch import Tensor, nn

from dslc.compiler.trace.private_torch import (
    MODULE_MAPPINGS,
    TreeSpec,
    path_text,
    register_dataclass,
    register_mapping,
    register_namespace,
    tree_flatten,
    tree_flatten_with_path,
    tree_unflatten,
)
from dslc.dsl.files import naming, reveal_os_error

UserValue: TypeAlias = Any  # a value of the user's code, of any class: a sample, a batch, an output, an attribute
# A batch, a sample or an output: a tensor, or tensors in whatever classes the user's code puts them.
Structure: TypeAlias = UserValue


def save(value: Structure, path: str) -> None:
    """Writes a file that `torch.load` reads. Raises OSError, with the file's name, and as what pickles the value."""
    with naming(path), open(path, "wb") as file, reveal_os_error():
        torch.save(value, file)


def flatten(value: object) -> tuple[list[UserValue], TreeSpec]:
    """Returns the leaves, and the form for `unflatten`."""
    leaves, form = tree_flatten(value)
    while new := {type(leaf) for leaf in leaves if _is_structure(leaf)}:
        for kind in new:
            if dataclasses.is_dataclass(kind):
                register_dataclass(kind)
            elif issubclass(kind, SimpleNamespace):
                register_namespace(kind)
            else:
                register_mapping(kind)
        leaves, form = tree_flatten(value)
    return leaves, form


def unflatten(leaves: Sequence[object], form: TreeSpec) -> UserValue:
    """Returns the structure of this form with other leaves."""
    return tree_unflatten(list(leaves), form)


def tensors(value: object) -> list[Tensor]:
    """Returns the tensors among the leaves."""
    if isinstance(value, Tensor):
        return [value]
    return [leaf for leaf in flatten(value)[0] if isinstance(leaf, Tensor)]


def count_numbers(value: object) -> int:
    """Returns how many numbers a sample has."""
    import numpy as np

    sized = (Tensor, np.ndarray)
    return sum(int(np.prod(leaf.shape)) if isinstance(leaf, sized) else 1 for leaf in flatten(value)[0])


def paths(value: object) -> list[str]:
    """Returns the place of each leaf, as in `["boxes"][0]`; "" for a value that is a leaf."""
    flatten(value)
    return [path_text(path) for path, _ in tree_flatten_with_path(value)[0]]


def named(value: object) -> dict[str, Tensor]:
    """Returns the tensors by their places in words, as in `boxes.0`; "" for a value that is a tensor."""
    places = [".".join(re.findall(r"[^\[\]'.]+", place)) for place in paths(value)]
    pairs = zip(places, flatten(value)[0], strict=True)
    return {place: leaf for place, leaf in pairs if isinstance(leaf, Tensor)}


def map_tensors(function: Callable[[Tensor], object], value: object) -> UserValue:
    """Returns the structure with `function` of each tensor in its place; other leaves stay."""
    if isinstance(value, Tensor):
        return function(value)
    leaves, form = flatten(value)
    return unflatten([function(leaf) if isinstance(leaf, Tensor) else leaf for leaf in leaves], form)


def attribute_tensors(module: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """Yields the tensors that a module keeps as plain attributes, or within one, by name: `table`, `tables["a"][0]`,
    `rope.table` of an object that is no module.
    """
    visited: set[int] = set()
    for name, value in vars(module).items():
        if name not in MODULE_MAPPINGS:
            yield from _tensors_inside(value, name, visited)


_DEPTH = 6  # of objects within objects


def _tensors_inside(value: object, path: str, visited: set[int], depth: int = 0) -> Iterator[tuple[str, Tensor]]:
    """Yields the tensors in a collection, in the attributes of an object, or kept by a function, by their path."""
    if isinstance(value, Tensor):
        yield path, value
        return
    if id(value) in visited or depth > _DEPTH:
        return
    for place, part in _parts_of(value):
        visited.add(id(value))
        yield from _tensors_inside(part, path + place, visited, depth + 1)


def _parts_of(value: object) -> Iterable[tuple[str, object]]:
    """Returns what a collection, an object that is no module, or a function with values of its own holds, by place."""
    if isinstance(value, Mapping):
        return [(f"[{key!r}]", part) for key, part in value.items()]
    if isinstance(value, list | tuple | deque | set | frozenset):
        return [(f"[{number}]", part) for number, part in enumerate(value)]
    if isinstance(value, partial):
        return [(".func", value.func), (".args", value.args), (".keywords", value.keywords)]
    if isinstance(value, MethodType):
        return [(".__self__", value.__self__)]
    if isinstance(value, FunctionType):
        variables = inspect.getclosurevars(value).nonlocals
        return [(f".{name}", part) for name, part in variables.items()]
    if isinstance(value, nn.Module | type | ModuleType):
        return []
    if dataclasses.is_dataclass(value):
        names = [field.name for field in dataclasses.fields(value)]
    else:
        slots = (getattr(kind, "__slots__", ()) for kind in type(value).__mro__)
        names = [name for entry in slots for name in ([entry] if isinstance(entry, str) else entry)]
        names += getattr(value, "__dict__", ())
    return [(f".{name}", getattr(value, name, None)) for name in names]


def call(module: Callable[..., UserValue], forward: Callable[..., object], batch: object) -> UserValue:
    """Returns `module` of a batch. What its `forward` takes decides how: a mapping becomes keyword arguments and a list
    or tuple positional ones where it takes them, else the batch is its one argument.
    """
    if isinstance(batch, Mapping) and _takes(forward, 0, tuple(batch)):
        return module(**batch)
    if isinstance(batch, tuple | list) and _takes(forward, len(batch), ()):
        return module(*batch)
    return module(batch)


@lru_cache(maxsize=16)
def _takes(forward: Callable[..., object], count: int, names: tuple[str, ...]) -> bool:
    try:
        inspect.signature(forward).bind(*range(count), **dict.fromkeys(names))
    except (TypeError, ValueError):  # other arguments; a function of C, which has no signature
        return False
    return True


def _is_structure(leaf: object) -> bool:
    return isinstance(leaf, Mapping | SimpleNamespace) or (
        dataclasses.is_dataclass(leaf) and not isinstance(leaf, type)
    )


def class_name(kind: type) -> str:
    """Returns the name of a class with its module's, as in "nets.DropPath"."""
    return f"{kind.__module__}.{kind.__qualname__}"
