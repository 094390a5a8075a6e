"""Runs that record each operation by the shapes of its tensors, with the shares that ranks have of them.

Model: a rank's run is compared with the run of one process. Both have to do the same operations, with the same numbers;
the tensors of the rank are the shares of the others.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass

import torch
from torch import nn

from dslc.compiler.trace.code_place import names_of
from dslc.compiler.trace.draws import running_modules
from dslc.compiler.trace.private_torch import Arguments, Operator, Options, schema_of, tree_leaves
from dslc.compiler.trace.run import Run, TensorMap, TracedModule
from dslc.compiler.trace.sharding.propagation import TensorShare

VIEWS = ("view", "_unsafe_view", "reshape", "_reshape_alias")
SAME = ("clone", "detach", "alias", "contiguous", "lift_fresh")  # operations that depend on strides alone


@dataclass(frozen=True, kw_only=True)
class OperationRecord:
    """An operation: its inputs and outputs by shape, with their shares; and its other arguments.

    `starts` are of slices: the dim, the step, and where each begins. `constants` are inputs with known numbers, by
    their place among the inputs. `layer` is the module whose `forward` runs, which draws (draws.py).
    """

    name: str
    module: str
    shapes: tuple[tuple[tuple[int, ...], TensorShare | None], ...]
    numbers: tuple[str, ...]
    line: str = ""
    starts: tuple[int, ...] = ()
    constants: tuple[tuple[int, torch.Tensor], ...] = ()
    layer: str = ""

    @property
    def place(self) -> str:
        """Returns the module and its line in words."""
        return place_text(self.module, self.line)


def place_text(module: str, line: str) -> str:
    return (f"`{module}`" if module else "its forward") + (f" ({line})" if line else "")


class ShareRun(Run):
    """A run that records operations, and knows which tensors are shares and which module runs."""

    def __init__(self, traced: TracedModule) -> None:
        super().__init__(traced)
        self.records: list[OperationRecord] = []
        self.shares = TensorMap[TensorShare]()
        self.path: list[str] = []
        self._module_names, self._running = names_of(self.model), list[nn.Module]()

    @property
    def module(self) -> str:
        """Path of the innermost module that runs."""
        return self.path[-1] if self.path else ""

    @contextmanager
    def hooked(self) -> Iterator[None]:
        """Sets up the contexts of a forward pass whose modules are followed."""
        with ExitStack() as around, self.running(), running_modules(self.model) as self._running:
            for path, module in self.model.named_modules():
                around.callback(module.register_forward_pre_hook(self._entering(path), prepend=True).remove)
                around.callback(module.register_forward_hook(lambda *_: self._leaving()).remove)
            yield

    def _entering(self, path: str) -> Callable[[nn.Module, object], None]:
        return lambda module, args: self.path.append(path)

    def _leaving(self) -> None:
        self.path.pop()

    def record(
        self,
        name: str,
        given: Sequence[torch.Tensor],
        made: Sequence[torch.Tensor],
        numbers: tuple[str, ...],
        *,
        line: str = "",
        starts: tuple[int, ...] = (),
        constants: tuple[tuple[int, torch.Tensor], ...] = (),
    ) -> None:
        """Records an operation, unless it depends on strides alone."""
        unchanged = given and made and given[0].shape == made[0].shape
        if name in SAME or (unchanged and name in (*VIEWS, "expand", "slice")):
            return
        record = OperationRecord(
            name="view" if name in VIEWS else name,
            module=self.module,
            shapes=tuple((tuple(tensor.shape), self.shares.get(tensor)) for tensor in (*given, *made)),
            numbers=() if name in (*VIEWS, "expand") else numbers,
            line=line,
            starts=starts,
            constants=constants,
            layer=self._module_names.get(id(self._running[-1]), "") if self._running else "",
        )
        self.records.append(record)


def operation_name(func: Operator) -> str:
    return str(schema_of(func).name).removeprefix("aten::")


def numbers_of(args: Arguments, kwargs: Options) -> tuple[str, ...]:
    """Returns the arguments that are no tensors."""

    return tuple(repr(leaf) for leaf in tree_leaves((args, kwargs)) if not isinstance(leaf, torch.Tensor))


def share_shape(shape: tuple[int, ...], share: TensorShare | None, ranks: int) -> tuple[int, ...] | None:
    """Returns the shape of one of the shares; None if the pieces are not equal."""
    if share is None:
        return shape
    if not share.divides_into(ranks):
        return None
    return (*shape[: share.dim], shape[share.dim] // ranks, *shape[share.dim + 1 :])
