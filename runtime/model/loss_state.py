"""Finds the state of a user's loss: parameters that would train, and tensors that a call changes.

Model: the parameters of the network alone are updated, averaged, sharded and saved. No optimizer has a parameter of a
loss, whose gradient would grow from step to step. A buffer that its calls change would differ from rank to rank and be
lost at a resume. `load_loss` returns a loss whose first call in a training raises LossStateError for either.

A parameter is found by the graph of gradients, wherever the loss keeps it: in an attribute, a closure, an argument, or
a module. Its name is found by a search of these places.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Mapping, Sequence
from types import CellType

import torch
from torch import Tensor, nn
from torch.autograd.graph import Node

from dslc.compiler.ir.program import PythonFunction
from dslc.compiler.trace.private_torch import times_written
from dslc.compiler.trace.structures import Structure, tensors
from dslc.runtime.model.errors import LossError
from dslc.runtime.process.random_numbers import seed_host
from dslc.runtime.process.user_code import UserObject, load_function

_DEPTH = 6  # of attributes within attributes that are searched
_MOST = 10_000  # objects that are searched

Loss = Callable[[Structure, Structure], Structure]


class LossStateError(LossError):
    """A loss has parameters that train, or tensors or numbers that its calls change (`moves`). `names` are theirs."""

    def __init__(self, function: str, names: Sequence[str], *, moves: bool) -> None:
        self.names, self.moves = tuple(names), moves
        names_text = ", ".join(f"`{name}`" for name in names)
        what = (
            f"changes {names_text} in a call" if moves else f"has parameters of its own that would train: {names_text}"
        )
        why = "a checkpoint keeps the network alone" if moves else "the optimizer has those of the network alone"
        super().__init__(f"the loss `{function}` {what}, and {why}: put it into the network, and use `own()`")


def load_loss(named: PythonFunction) -> Loss:
    """Returns the user's loss. Its first call that makes a gradient raises LossStateError if the loss has state."""
    function, tried = load_function(named), False

    def loss(output: object, target: object) -> object:
        nonlocal tried
        if tried or not torch.is_grad_enabled():
            return function(output, target)
        tried = True
        return try_state(function, named.function, output, target)

    return loss


def try_state(
    function: Loss, name: str, output: Structure, target: Structure, *, is_repeated: bool = False
) -> Structure:
    """Returns what the loss gives. Raises LossStateError if it has parameters that would train, or changes a buffer or,
    with `is_repeated`, anything by which a second call differs.
    """
    nodes = {tensor.grad_fn for tensor in tensors(output)} | {None}
    leaves = {id(tensor) for tensor in tensors((output, target))}
    state = dict(held_tensors(function))
    state_before = {path: (tensor, _times_written(tensor)) for path, (tensor, _) in state.items()}
    numbers = _held_numbers(function) if is_repeated else {}
    if is_repeated:
        seed_host(0)
    result = function(output, target)
    parameters = {id(parameter): parameter for loss in tensors(result) for parameter in _leaves(loss, nodes)}
    if own_parameters := parameters.keys() - leaves:
        names = {id(tensor): path for path, (tensor, _) in reversed(state.items()) if id(tensor) in own_parameters}
        unnamed = [f"a parameter of shape {tuple(parameters[key].shape)}" for key in own_parameters - names.keys()]
        raise LossStateError(name, [*reversed(names.values()), *unnamed], moves=False)
    now = dict(held_tensors(function))
    moved = [path for path, (tensor, _) in now.items() if _has_changed(tensor, *state_before.get(path, (None, 0)))]
    buffers = [path for path in moved if now[path][1]]
    if is_repeated:
        moved += [path for path, number in _held_numbers(function).items() if number != numbers.get(path)]
    if not buffers and moved and is_repeated:
        seed_host(0)
        second = function(output, target)
        if not all(map(_same, tensors(result), tensors(second))):
            buffers = moved
    if buffers:
        raise LossStateError(name, buffers, moves=True)
    return result


def _has_changed(tensor: Tensor, tensor_before: Tensor | None, written: int) -> bool:
    if tensor_before is tensor:
        return _times_written(tensor) != written
    return tensor_before is None or not _same(tensor_before, tensor)


def _times_written(tensor: Tensor) -> int:
    return 0 if tensor.is_inference() else times_written(tensor)


def _same(one: Tensor, another: Tensor) -> bool:
    return one.shape == another.shape and torch.equal(one.nan_to_num(), another.to(one.device).nan_to_num())


def _leaves(loss: Tensor, outputs: set[Node | None]) -> Iterator[Tensor]:
    """Yields the leaves that a loss depends on, except the leaves behind the outputs."""
    visited, queue = set(outputs), [loss.grad_fn]
    while queue:
        node = queue.pop()
        if node is None or node in visited:
            continue
        visited.add(node)
        if hasattr(node, "variable"):
            yield getattr(node, "variable")  # noqa: B009 - of the nodes of leaves alone
        queue.extend(node_before for node_before, _ in node.next_functions)


def held_tensors(function: object) -> Iterator[tuple[str, tuple[Tensor, bool]]]:
    """Yields the tensors that a function can reach, each by its path, and whether a module has it as a buffer."""
    for path, value, buffer in _held_values(function):
        if isinstance(value, Tensor):
            yield path, (value, buffer)


def _held_numbers(function: object) -> dict[str, int | float]:
    """Returns the numbers that a function can reach, by their paths."""
    return {path: value for path, value, _ in _held_values(function) if isinstance(value, int | float)}


def _held_values(function: object) -> Iterator[tuple[str, object, bool]]:
    """Yields tensors and numbers that a function can reach, each with its path, and whether it is a buffer."""
    visited: set[int] = set()
    queue: list[tuple[str, object, int]] = [("", function, 0)]
    while queue and len(visited) < _MOST:
        path, owner, depth = queue.pop(0)
        if id(owner) in visited or depth > _DEPTH:
            continue
        visited.add(id(owner))
        for name, value, buffer in _parts(owner):
            inner = ".".join(filter(None, (path, name)))
            if isinstance(value, Tensor | int | float):
                yield inner, value, buffer
            elif not isinstance(value, type | str | bytes | None):
                queue.append((inner, value, depth + 1))


def _parts(owner: UserObject) -> Iterator[tuple[str, object, bool]]:
    """Yields the objects that an object holds: their names, and whether each is a buffer."""
    if isinstance(owner, functools.partial):
        yield from (("", part, False) for part in (owner.func, *owner.args))
        yield from ((name, part, False) for name, part in owner.keywords.items())
    elif isinstance(owner, nn.Module):
        yield from ((name, part, False) for name, part in owner.named_parameters())
        yield from ((name, part, True) for name, part in owner.named_buffers())
        for path, module in owner.named_modules():
            hidden = vars(nn.Module()).keys()
            prefix = f"{path}." if path else ""
            yield from ((prefix + name, part, False) for name, part in vars(module).items() if name not in hidden)
    elif hasattr(owner, "__self__"):  # a method
        yield "", owner.__self__, False
    elif hasattr(owner, "__code__"):
        code, names = owner.__code__, owner.__globals__
        cells = zip(code.co_freevars, owner.__closure__ or (), strict=True)
        yield from ((name, cell.cell_contents, False) for name, cell in cells if _filled(cell))
        yield from ((name, names[name], False) for name in code.co_names if name in names)
        defaults = owner.__defaults__ or ()
        arguments = code.co_varnames[code.co_argcount - len(defaults) : code.co_argcount]
        yield from ((name, part, False) for name, part in zip(arguments, defaults, strict=True))
        yield from ((name, part, False) for name, part in (owner.__kwdefaults__ or {}).items())
    elif isinstance(owner, Mapping):
        yield from ((str(name), part, False) for name, part in owner.items())
    elif isinstance(owner, list | tuple):
        yield from ((str(number), part, False) for number, part in enumerate(owner))
    elif type(owner).__module__ not in ("builtins", "torch") and hasattr(owner, "__dict__"):
        yield from ((name, part, False) for name, part in vars(owner).items())


def _filled(cell: CellType) -> bool:
    try:
        return cell.cell_contents is not cell
    except ValueError:
        return False
