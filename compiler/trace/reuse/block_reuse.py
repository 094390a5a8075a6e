"""Traces a module without the blocks in its middle, whose facts equal other blocks' facts (repeated_blocks.py).

Model: while the module is traced, a skipped block returns its input: the module is one with fewer blocks. The facts of
the block that stands for it are then written for it too, in its place in the order.

Contract: the facts equal the facts from tracing each block. `BlocksDifferError` is raised where the blocks in the
middle turn out to differ: two groups that follow each other have other figures, a block is called in another way than
recorded, or an attribute that differs is read.
"""

from __future__ import annotations

import copy
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from typing import TypeVar

import torch
from torch import nn

from dslc.compiler.trace.cut import ModuleCut
from dslc.compiler.trace.reuse.repeated_blocks import RepeatedBlocks
from dslc.compiler.trace.structures import UserValue, flatten, unflatten

T = TypeVar("T")


class BlocksDifferError(Exception):
    """Blocks that were taken to be alike differ."""


class BlockReuse:
    """The blocks that are left out, if any: `middle` is None until some are found, and where there are none. They are
    only looked for if that is `wanted`.
    """

    def __init__(self, *, wanted: bool = True) -> None:
        self.wanted = wanted
        self.middle: RepeatedBlocks | None = None

    def remaining(self, cut: ModuleCut) -> ModuleCut:
        """Returns the layers and blocks that are not left out."""
        if self.middle is None:
            return cut
        rest = copy.copy(cut)
        rest.layers = {path: module for path, module in cut.layers.items() if path not in self.middle.stands}
        rest.blocks = cut.blocks - self.middle.stands.keys()
        return rest

    def leaves_out(self, path: str) -> bool:
        return self.middle is not None and path in self.middle.stands

    def has_inside(self, name: str) -> bool:
        """True for a block that is left out, and for a module or parameter in one."""
        return self.middle is not None and bool(_block(name, self.middle.stands))

    @contextmanager
    def skip_blocks(self, model: nn.Module) -> Iterator[None]:
        """Leaves the blocks out of the module's forward passes. Raises BlocksDifferError."""
        if self.middle is None:
            yield
            return
        given: dict[
            str, tuple[str, list[_BlockArgument]]
        ] = {}  # by the block that stands for others: what these are given, besides the chain
        with ExitStack() as around:
            around.enter_context(self.middle.unread.watched())
            around.callback(model.register_forward_pre_hook(lambda *_: given.clear()).remove)
            for path, stand in self.middle.stands.items():
                module: UserValue = model.get_submodule(path)
                own = vars(module).get("forward")
                module.forward = _passing(self.middle, path, stand, given)
                around.callback(_restored, module, own)
            yield
        if self.middle.unread.read:
            kind, name = next(iter(self.middle.unread.read))
            raise BlocksDifferError(f"`{kind.__name__}.{name}` is read, and differs")

    # ------------------------------------------------------------------------------------------------- the facts

    def check(self, *figures: Mapping[str, object]) -> None:
        """Raises BlocksDifferError if figures, by the block's path, differ between the two groups in the middle."""
        for stand, twin in self.middle.twins.items() if self.middle else ():
            for each in figures:
                if each.get(stand) != each.get(twin):
                    raise BlocksDifferError(f"{stand} and {twin} have other figures")

    def check_all(self, figures: Mapping[str, object]) -> None:
        """Raises BlocksDifferError if figures, by names of modules or parameters, differ between a skipped block and
        its representative.
        """
        if self.middle is None:
            return
        blocks = {*self.middle.stands, *self.middle.stands.values(), *self.middle.twins.values()}
        inside: dict[str, dict[str, object]] = {path: {} for path in blocks}
        for name, figure in figures.items():
            if block := _block(name, blocks):
                inside[block][name[len(block) :]] = figure
        for path, stand in (*self.middle.stands.items(), *self.middle.twins.items()):
            if inside[path] != inside[stand]:
                raise BlocksDifferError(f"{path} and {stand} are treated differently")

    def forbid(self, reason: str) -> None:
        """Raises BlocksDifferError if blocks are skipped, because an error message must name the first place of a
        fault.
        """
        if self.middle is not None:
            raise BlocksDifferError(reason)

    def fill(self, *figures: dict[str, UserValue]) -> None:
        """Copies the figures of representatives to the blocks that they stand for."""
        for path, stand in self.middle.stands.items() if self.middle else ():
            for each in figures:
                if stand in each:
                    each[path] = each[stand]

    def named(self, names: Iterable[str]) -> list[str]:
        """Returns names in the order of calls, with the names of skipped blocks."""
        return self.inserted(list(names), lambda name: name, lambda name, path: path)

    def shared_parameters(self, names: list[str]) -> list[str]:
        """Takes `names`, which have all parameters of skipped blocks. Keeps a skipped block's parameter only if its
        representative's is among `names` too. Raises BlocksDifferError if the second representative differs.
        """
        if self.middle is None:
            return names
        present = set(names)
        for stand, twin in self.middle.twins.items():
            one, other = ({name[len(p) :] for name in names if name.startswith(p + ".")} for p in (stand, twin))
            if one != other:
                raise BlocksDifferError(f"{stand} and {twin} use other parameters")
        kept = []
        for name in names:
            block = _block(name, self.middle.stands)
            if not block or self.middle.stands[block] + name[len(block) :] in present:
                kept.append(name)
        return kept

    def inserted(self, entries: list[T], name: Callable[[T], str], renamed: Callable[[T, str], T]) -> list[T]:
        """Returns entries in the order of calls, with entries for the skipped blocks. `renamed` copies an entry under
        another name.
        """
        if self.middle is None:
            return entries
        stands = set(self.middle.stands.values())
        found: dict[str, list[T]] = {}
        last = 0
        for n, entry in enumerate(entries, 1):
            if block := _block(name(entry), stands):
                found.setdefault(block, []).append(entry)
                last = n
        new = [
            renamed(entry, path + name(entry)[len(stand) :])
            for path, stand in self.middle.stands.items()
            for entry in found.get(stand, ())
        ]
        return [*entries[:last], *new, *entries[last:]]


def _block(name: str, blocks: Iterable[str]) -> str:
    """Returns the block that a module or parameter belongs to; "" for none."""
    parts = name.split(".")
    return next((path for n in range(1, len(parts) + 1) if (path := ".".join(parts[:n])) in blocks), "")


def _passing(
    middle: RepeatedBlocks, path: str, stand: str, given: dict[str, tuple[str, list[_BlockArgument]]]
) -> Callable[..., UserValue]:
    """Returns a forward that returns its input in the form of the block's output."""

    output = middle.outputs[path]
    through = next(place for tensor, place in output.leaves if tensor)

    def forward(*args: object, **kwargs: object) -> UserValue:
        leaves, form = flatten((args, kwargs))
        if through >= len(leaves):
            raise BlocksDifferError(f"{path} is called in another way")
        others = [_BlockArgument(leaf) for leaf in leaves if leaf is not leaves[through]]
        said = (str(form), others)
        if given.setdefault(stand, said) != said:
            raise BlocksDifferError(f"{path} is given other things than {stand}")
        return unflatten([leaves[place] if tensor else place for tensor, place in output.leaves], output.form)

    return forward


class _BlockArgument:
    """An argument of a block: a tensor, which is not kept alive, or anything else."""

    def __init__(self, value: UserValue) -> None:
        self._tensor = isinstance(value, torch.Tensor)
        self._value = weakref.ref(value) if self._tensor else value

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, _BlockArgument) or self._tensor != other._tensor:
            return False
        if self._tensor:
            return self._value() is other._value() and self._value() is not None
        return type(self._value) is type(other._value) and bool(self._value == other._value)

    __hash__ = None  # type: ignore[assignment]


def _restored(module: UserValue, own: object) -> None:
    if own is None:
        del module.forward
    else:
        module.forward = own
