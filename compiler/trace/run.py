"""Runs a module on tensors without memory, and knows at each operation which layer is running.

Model: the tensors pretend to be on the CPU (torch's FakeTensorMode, which is the meta device under another device's
name): the same kernels are chosen as on a CPU, autocast included. An operation of the backward pass belongs to the
layer that was running when its autograd node was made.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from dataclasses import dataclass
from traceback import walk_tb
from typing import Generic, TypeVar

import torch
from torch import nn

from dslc.compiler.ir.tensors import TensorFact
from dslc.compiler.trace.batch import SMALL, Example, batch_of
from dslc.compiler.trace.cut import ModuleCut
from dslc.compiler.trace.fake_tensor_mode import FakeTensorMode
from dslc.compiler.trace.instantiate import TraceError
from dslc.compiler.trace.private_torch import (
    Arguments,
    OperationMode,
    Operator,
    Options,
    next_node_number,
    running_node_number,
    schema_of,
    storage_identity,
    storages_of,
    tree_leaves,
)
from dslc.compiler.trace.structures import call

T = TypeVar("T")

_NO_ORDER = 2**64 - 1  # sequence number of nodes that accumulate gradients


@dataclass(frozen=True)
class TracedModule:
    """A module with its layers, and the source of its batches. Without `mode` it has numbers, and so have batches."""

    model: nn.Module
    cut: ModuleCut
    mode: FakeTensorMode | None
    input: TensorFact | Example

    @property
    def fake(self) -> AbstractContextManager[object]:
        return nullcontext() if self.mode is None else self.mode


class TensorMap(Generic[T]):
    """Values by the identity of a tensor. It keeps the tensors alive, so that no identity is used again."""

    def __init__(self) -> None:
        self._entries: dict[int, tuple[torch.Tensor, T]] = {}

    def __setitem__(self, tensor: torch.Tensor, value: T) -> None:
        self._entries[id(tensor)] = tensor, value

    def __contains__(self, tensor: object) -> bool:
        return id(tensor) in self._entries

    def get(self, tensor: object) -> T | None:
        entry = self._entries.get(id(tensor))
        return None if entry is None else entry[1]

    def fill(self, tensors: Iterable[torch.Tensor], value: T) -> None:
        for tensor in tensors:
            self[tensor] = value

    def remove(self, tensor: torch.Tensor) -> None:
        self._entries.pop(id(tensor), None)


class Run:
    """A run. `now` is the path of the running layer, "" between layers; subclasses observe the operations."""

    def __init__(self, traced: TracedModule, samples: int = SMALL, low: bool = False) -> None:
        self.traced, self.samples, self.low = traced, samples, low
        self.model, self.cut, self.fake = traced.model, traced.cut, traced.fake
        self.input = batch_of(traced.input, samples, traced.mode)
        self.own = {storage(t) for t in (*self.model.parameters(), *self.model.buffers(), *tensors_of(self.input))}
        self.trained = {storage(parameter) for parameter in self.model.parameters() if parameter.requires_grad}
        self.going_back = False
        self._inside: list[str] = []
        self._marks: list[tuple[int, str]] = []  # autograd's first sequence number in a layer

    def operation(self, func: Operator, args: Arguments, kwargs: Options, result: object) -> None:
        """Called after an operation."""

    def enter_module(self, path: str, inputs: object) -> None:
        """Called when a layer begins, with its inputs."""

    def leave_module(self, path: str, output: object) -> None:
        """Called when a layer ends, with its output."""

    def moved(self) -> None:
        """Called when another layer begins to run, or none."""

        self._marks.append((next_node_number(), self.now))

    @property
    def now(self) -> str:
        """Path of the running layer; the outermost if layers call each other, as that one would be recomputed."""
        return self._inside[0] if self._inside else ""

    @contextmanager
    def running(self) -> Iterator[None]:
        """Sets up the contexts of a forward pass."""

        with ExitStack() as stack:
            for path, module in self.cut.layers.items():
                enter = module.register_forward_pre_hook(self._enter(path), with_kwargs=True)
                stack.callback(enter.remove)
                stack.callback(module.register_forward_hook(self._leave(path)).remove)
            stack.enter_context(self.fake)
            stack.enter_context(self._dispatch_mode())
            stack.enter_context(torch.autocast("cpu", dtype=torch.bfloat16, enabled=self.low))
            self.moved()
            yield

    def called(self, **arguments: object) -> object:
        """Returns the model's output, with these arguments besides. Raises TraceError if it makes nested tensors, which
        torch cannot run so.
        """

        def model(*args: object, **kwargs: object) -> object:
            return self.model(*args, **kwargs, **arguments)

        try:
            return call(model, self.model.forward, self.input)
        except Exception as error:  # of the user's code
            if any(
                str(frame.f_globals.get("__name__")).startswith("torch.nested")
                for frame, _ in walk_tb(error.__traceback__)
            ):
                raise _not_traced("a nested tensor", "pad its parts to one length, with a mask").with_traceback(
                    error.__traceback__
                ) from error
            raise

    def backward(self, total: torch.Tensor, *, retain: bool = False) -> None:
        """Runs the backward pass; `retain`: the saved tensors stay."""
        self.going_back = True
        with self.fake, self._dispatch_mode():
            total.backward(retain_graph=retain)

    def of_node(self, otherwise: str = "") -> str:
        """Returns the layer of the backward operation that is running now."""

        number = running_node_number()
        if number is None or number == _NO_ORDER:
            return otherwise
        return self._marks[max(0, bisect_right(self._marks, number, key=lambda mark: mark[0]) - 1)][1]

    def _enter(self, path: str) -> Callable[..., None]:
        def hook(module: nn.Module, args: tuple[object, ...], kwargs: Mapping[str, object]) -> None:
            self._inside.append(path)
            if len(self._inside) == 1:
                self.enter_module(path, (args, kwargs))
                self.moved()

        return hook

    def _leave(self, path: str) -> Callable[..., None]:
        def hook(module: nn.Module, args: tuple[object, ...], output: object) -> None:
            self._inside.pop()
            if not self._inside:
                self.leave_module(path, output)
                self.moved()

        return hook

    def _dispatch_mode(self) -> AbstractContextManager[object]:
        return OperationMode(self.run_operation)

    def run_operation(self, func: Operator, args: Arguments, kwargs: Options) -> object:
        """Does an operation, observes it and returns its result."""
        if func.name().startswith("aten::to_mkldnn"):
            raise _not_traced(
                "a tensor in the layout of mkldnn", "leave `to_mkldnn` out: torch takes oneDNN's kernels itself"
            )
        result = func(*args, **kwargs)
        self.operation(func, args, kwargs, result)
        return result


def _not_traced(kind: str, remedy: str) -> TraceError:
    return TraceError(
        f"its `forward` makes {kind}, and dslc follows plain arrays of numbers and sparse ones", remedy=remedy
    )


def storage(tensor: torch.Tensor) -> int:
    """Returns the identity of a tensor's memory, valid while the tensor is alive."""

    return storage_identity(tensor)


def storage_bytes(tensor: torch.Tensor) -> int:
    """Returns the bytes of a tensor's memory, which a sparse one has in several pieces."""

    return sum(place.nbytes() for place in storages_of(tensor))


def total_of(output: object) -> torch.Tensor | None:
    """Returns the sum of all numbers of an output that depend on a parameter; None if none does."""
    sums = [tensor.sum().real for tensor in tensors_of(output) if tensor.requires_grad]  # some are complex
    return sum(sums[1:], start=sums[0]) if sums else None


def tensors_of(value: object) -> list[torch.Tensor]:
    return [leaf for leaf in tree_leaves(value) if isinstance(leaf, torch.Tensor)]


def written_tensors(func: Operator, args: Arguments, kwargs: Options) -> list[torch.Tensor]:
    """Returns the tensors that an operation writes in place."""

    return tensors_of(
        [
            args[n] if n < len(args) else kwargs.get(argument.name)
            for n, argument in enumerate(schema_of(func).arguments)
            if argument.alias_info is not None and argument.alias_info.is_write
        ]
    )
