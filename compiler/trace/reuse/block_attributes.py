"""The attributes of blocks: compared between two blocks, before and after a run, and watched.

Model: what a forward pass of a module does follows from its class, its attributes and its input. Two blocks with equal
attributes, except attributes that no forward pass reads, do the same.
"""

from __future__ import annotations

import functools
import types
from collections import defaultdict
from collections.abc import Hashable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from enum import Enum
from typing import TypeGuard

import torch
from torch import nn

from dslc.compiler.trace.cut import ModuleCut
from dslc.compiler.trace.private_torch import own_buffers, own_children, own_parameters
from dslc.compiler.trace.structures import UserValue

FEWEST = 8  # blocks from which on they are compared
_PLAIN = (bool, int, float, complex, str, bytes, type(None), type(Ellipsis))
_MAPPINGS = ("_parameters", "_buffers", "_modules")  # which the structure compares


def by_structure(cut: ModuleCut) -> dict[Hashable, list[str]]:
    """Returns the blocks with the same modules, parameters and buffers; none with hooks, and only where there are
    enough.
    """
    groups: dict[Hashable, list[str]] = defaultdict(list)
    for path in cut.layers:
        if path in cut.blocks and not _hooked(cut.layers[path]):
            groups[_structure(cut.layers[path])].append(path)
    return groups if sum(map(len, groups.values())) >= FEWEST else {}


def _structure(module: nn.Module) -> Hashable:
    parts = []
    for name, one in module.named_modules(remove_duplicate=False):
        tensors = tuple(
            (each, None if tensor is None else (form_of(tensor), type(tensor)))
            for each, tensor in (*own_parameters(one).items(), *own_buffers(one).items())
        )
        parts.append((name, type(one), tuple(own_children(one)), tuple(sorted(vars(one))), tensors))
    return tuple(parts)


def _hooked(module: nn.Module) -> bool:
    return any(
        value for one in module.modules() for name, value in vars(one).items() if "hooks" in name and "_hooks" in name
    )


def differences(one: nn.Module, other: nn.Module) -> Iterator[tuple[nn.Module, str]]:
    """Yields the attributes, each with its module of `one`, that differ between two blocks of the same structure."""
    places = {
        id(mine): id(theirs)
        for (_, mine), (_, theirs) in zip(
            one.named_modules(remove_duplicate=False), other.named_modules(remove_duplicate=False), strict=True
        )
    }
    for mine, theirs in zip(one.modules(), other.modules(), strict=True):
        for name, value in vars(mine).items():
            if name in _MAPPINGS or _same(value, vars(theirs)[name], places):
                continue
            yield mine, name


def _same(one: UserValue, other: UserValue, places: Mapping[int, int]) -> bool:
    """True if two values are the same in two blocks: equal, or each its own block's module at the same place."""
    if one is other:
        return id(one) not in places  # a block that holds a module of another
    if type(one) is not type(other):
        return False
    if id(one) in places:
        return places[id(one)] == id(other)
    if isinstance(one, functools.partial):
        return all(
            _same(mine, theirs, places)
            for mine, theirs in ((one.func, other.func), (one.args, other.args), (one.keywords, other.keywords))
        )
    if isinstance(one, types.MethodType):
        return one.__func__ is other.__func__ and (
            one.__self__ is other.__self__ or _same(one.__self__, other.__self__, places)
        )
    if type(one) in (tuple, list):
        return len(one) == len(other) and all(_same(a, b, places) for a, b in zip(one, other, strict=True))
    if isinstance(one, dict):
        return list(one) == list(other) and all(_same(one[key], other[key], places) for key in one)
    mine, theirs = content(one), content(other)
    return mine is not None and mine == theirs


def content(value: UserValue) -> Hashable:
    """Returns plain values so that equal ones compare equal, with their types; None for any other object."""

    kind = type(value)
    if kind in _PLAIN:
        return (kind, repr(value))
    if kind in (tuple, list, torch.Size):
        parts = tuple(content(each) for each in value)
        return None if None in parts else (kind, parts)
    if kind is dict:
        return content(tuple(value.items()))
    if kind in (set, frozenset):
        parts = tuple(content(each) for each in sorted(value, key=repr))
        return None if None in parts else (kind, parts)
    if kind is slice:
        return content((value.start, value.stop, value.step))
    if isinstance(value, torch.dtype | torch.device | torch.layout | torch.memory_format | Enum):
        return (kind, str(value))
    if isinstance(value, type | types.FunctionType | types.BuiltinFunctionType):
        return (kind, id(value))
    return None


def values_of(module: nn.Module, names: Sequence[str]) -> tuple[Hashable, ...]:
    """Returns the values of those attributes in a block."""
    return tuple(
        (path, name, id(vars(one)[name]) if (value := content(vars(one)[name])) is None else value)
        for path, one in module.named_modules()
        for name in names
        if name in vars(one)
    )


class State:
    """The attributes of all modules, to be compared later; keeps them alive, so that each keeps its identity."""

    def __init__(self, model: nn.Module) -> None:
        self._held = [dict(vars(module)) for module in model.modules()]
        self._inside = [_holdings(value) for held in self._held for value in held.values()]
        self._before = _described(model)

    def changed(self, model: nn.Module) -> bool:
        return _described(model) != self._before


def _described(model: nn.Module) -> list[Hashable]:
    return [(name, _shallow(value)) for module in model.modules() for name, value in vars(module).items()]


def _holdings(value: object) -> list[object]:
    """Returns what a container or an object holds."""
    if isinstance(value, dict):
        return list(value.values())
    if isinstance(value, list | tuple):
        return list(value)
    held = getattr(value, "__dict__", None)
    return list(held.values()) if isinstance(held, dict) else []


def _shallow(value: object) -> Hashable:
    """Returns a value's content: of containers and of objects the identities of what they hold."""
    plain = content(value) if isinstance(value, (*_PLAIN, set, frozenset)) else None
    if plain is not None:
        return plain
    if isinstance(value, dict):
        return (id(value), tuple((repr(key), _one(each)) for key, each in value.items()))
    if isinstance(value, list | tuple):
        return (id(value), tuple(map(_one, value)))
    held = getattr(value, "__dict__", None)
    inside = tuple((key, _one(each)) for key, each in held.items()) if isinstance(held, dict) else ()
    return (id(value), () if is_tensor(value) else inside)


def _one(value: object) -> Hashable:
    return content(value) if isinstance(value, _PLAIN) else id(value)


class Unread:
    """Attributes of classes that differ between blocks, and the attributes among them that a forward pass has read."""

    def __init__(self, attributes: set[tuple[type, str]]) -> None:
        self.watchable = attributes
        self.read: set[tuple[type, str]] = set()

    @contextmanager
    def watched(self) -> Iterator[None]:
        """Notes what is read. A data descriptor in the class takes precedence over an object's own attributes."""
        missing = object()
        before = []
        try:
            for kind, name in self.watchable:
                if kind.__module__.partition(".")[0] == "torch" or isinstance(vars(kind).get(name), property):
                    self.read.add((kind, name))  # which cannot be seen: taken to be
                    continue
                before.append((kind, name, vars(kind).get(name, missing)))
                setattr(kind, name, _recording_property(self.read, kind, name))
            yield
        finally:
            for kind, name, value in before:
                if value is missing:
                    delattr(kind, name)
                else:
                    setattr(kind, name, value)


def _recording_property(read: set[tuple[type, str]], kind: type, name: str) -> property:
    def get(self: object) -> object:
        read.add((kind, name))
        if name not in vars(self):
            raise AttributeError(f"`{type(self).__name__}` has no attribute `{name}`")
        return vars(self)[name]

    def put(self: object, value: object) -> None:
        read.add((kind, name))
        vars(self)[name] = value

    return property(get, put)


def is_tensor(value: object) -> TypeGuard[torch.Tensor]:
    return isinstance(value, torch.Tensor)


def form_of(tensor: torch.Tensor) -> Hashable:
    return (
        type(tensor),
        tuple(tensor.shape),
        tensor.dtype,
        tensor.device,
        tensor.stride(),
        tensor.storage_offset(),
        tensor.requires_grad,
        tensor.untyped_storage().nbytes(),
    )
