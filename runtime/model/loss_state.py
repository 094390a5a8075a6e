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
        shown = ", ".join(f"`{name}`" for name in names)
        what = f"changes {shown} in a call" if moves else f"has parameters of its own that would train: {shown}"
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


def try_state(function: Loss, name: str, output: Structure, target: Structure, *, again: bool = False) -> Structure:
    """Returns what the loss gives. Raises LossStateError if it has parameters that would train, or changes a buffer or,
    with `again`, anything by which a second call differs.
    """
    nodes = {each.grad_fn for each in tensors(output)} | {None}
    leaves = {id(each) for each in tensors((output, target))}
    held = dict(held_tensors(function))
    before = {path: (each, _times_written(each)) for path, (each, _) in held.items()}
    numbers = _held_numbers(function) if again else {}
    if again:
        seed_host(0)
    found = function(output, target)
    parameters = {id(each): each for loss in tensors(found) for each in _leaves(loss, nodes)}
    if own := parameters.keys() - leaves:
        names = {id(each): path for path, (each, _) in reversed(held.items()) if id(each) in own}
        unnamed = [f"a parameter of shape {tuple(parameters[each].shape)}" for each in own - names.keys()]
        raise LossStateError(name, [*reversed(names.values()), *unnamed], moves=False)
    now = dict(held_tensors(function))
    moved = [path for path, (each, _) in now.items() if _has_changed(each, *before.get(path, (None, 0)))]
    buffers = [path for path in moved if now[path][1]]
    if again:
        moved += [path for path, number in _held_numbers(function).items() if number != numbers.get(path)]
    if not buffers and moved and again:
        seed_host(0)
        second = function(output, target)
        if not all(map(_same, tensors(found), tensors(second))):
            buffers = moved
    if buffers:
        raise LossStateError(name, buffers, moves=True)
    return found


def _has_changed(tensor: Tensor, before: Tensor | None, written: int) -> bool:
    if before is tensor:
        return _times_written(tensor) != written
    return before is None or not _same(before, tensor)


def _times_written(tensor: Tensor) -> int:
    return 0 if tensor.is_inference() else times_written(tensor)


def _same(one: Tensor, other: Tensor) -> bool:
    return one.shape == other.shape and torch.equal(one.nan_to_num(), other.to(one.device).nan_to_num())


def _leaves(loss: Tensor, outputs: set[Node | None]) -> Iterator[Tensor]:
    """Yields the leaves that a loss depends on, except the leaves behind the outputs."""
    seen, waiting = set(outputs), [loss.grad_fn]
    while waiting:
        node = waiting.pop()
        if node is None or node in seen:
            continue
        seen.add(node)
        if hasattr(node, "variable"):
            yield getattr(node, "variable")  # noqa: B009 - of the nodes of leaves alone
        waiting.extend(each for each, _ in node.next_functions)


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
    seen: set[int] = set()
    waiting: list[tuple[str, object, int]] = [("", function, 0)]
    while waiting and len(seen) < _MOST:
        path, owner, depth = waiting.pop(0)
        if id(owner) in seen or depth > _DEPTH:
            continue
        seen.add(id(owner))
        for name, value, buffer in _parts(owner):
            inner = ".".join(filter(None, (path, name)))
            if isinstance(value, Tensor | int | float):
                yield inner, value, buffer
            elif not isinstance(value, type | str | bytes | None):
                waiting.append((inner, value, depth + 1))


def _parts(owner: UserObject) -> Iterator[tuple[str, object, bool]]:
    """Yields the objects that an object holds: their names, and whether each is a buffer."""
    if isinstance(owner, functools.partial):
        yield from (("", each, False) for each in (owner.func, *owner.args))
        yield from ((name, each, False) for name, each in owner.keywords.items())
    elif isinstance(owner, nn.Module):
        yield from ((name, each, False) for name, each in owner.named_parameters())
        yield from ((name, each, True) for name, each in owner.named_buffers())
        for path, module in owner.named_modules():
            hidden = vars(nn.Module()).keys()
            prefix = f"{path}." if path else ""
            yield from ((prefix + name, each, False) for name, each in vars(module).items() if name not in hidden)
    elif hasattr(owner, "__self__"):  # a method
        yield "", owner.__self__, False
    elif hasattr(owner, "__code__"):
        code, names = owner.__code__, owner.__globals__
        cells = zip(code.co_freevars, owner.__closure__ or (), strict=True)
        yield from ((name, cell.cell_contents, False) for name, cell in cells if _filled(cell))
        yield from ((name, names[name], False) for name in code.co_names if name in names)
        defaults = owner.__defaults__ or ()
        arguments = code.co_varnames[code.co_argcount - len(defaults) : code.co_argcount]
        yield from ((name, each, False) for name, each in zip(arguments, defaults, strict=True))
        yield from ((name, each, False) for name, each in (owner.__kwdefaults__ or {}).items())
    elif isinstance(owner, Mapping):
        yield from ((str(name), each, False) for name, each in owner.items())
    elif isinstance(owner, list | tuple):
        yield from ((str(number), each, False) for number, each in enumerate(owner))
    elif type(owner).__module__ not in ("builtins", "torch") and hasattr(owner, "__dict__"):
        yield from ((name, each, False) for name, each in vars(owner).items())


def _filled(cell: CellType) -> bool:
    try:
        return cell.cell_contents is not cell
    except ValueError:
        return False
