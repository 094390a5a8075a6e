"""The state of a user's own optimizer by name: its tensors and numbers for each parameter.

Model: `optimizer.<name>.<state>` is a tensor, or a number of Python as a tensor without a dim. A tensor of a class that
is made of inner tensors (a block-quantised one) is stored as these, `<state>:<inner>`. An entry of a group that updates
change is kept for each of its parameters, `group:<entry>`: another plan has other groups on a rank.

To load, `make` has the optimizer make its state by steps without a gradient, after which the parameters get their
values back; the tensors of this state then take the numbers that are read.

An optimizer with a closure may keep anything under any parameter, as LBFGS keeps lists under the first one. Its whole
state is one tensor of bytes, `optimizer.<first name>.packed`, as `torch.save` writes it. Each rank has all of it.

Limits: what an optimizer keeps in attributes of its own is not kept; runtime/loop/optimizer_trial.py finds whether a
training depends on it.
"""

from __future__ import annotations

import io
from collections.abc import Callable, Collection, Iterator, Mapping, MutableMapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from dslc.compiler.trace.private_torch import is_distributed
from dslc.runtime.optimizer.local_parts import like_part
from dslc.runtime.parallel.custom_optimizer import OptimizerError, OwnOptimizer

_GROUP = "group"
_PACKED = "packed"
_STEPS = 3  # within which a state that is in a checkpoint has to be made


class Piece(NamedTuple):
    """A tensor to write or to read into; `taken` takes what was read, if the state is a number of Python."""

    parameter: str
    state: str
    tensor: Tensor
    taken: Callable[[Tensor], None] | None = None


class OwnState:
    """The state of `optimizer`, whose parameters have `names`; `group_state` are entries of groups to keep."""

    def __init__(self, optimizer: OwnOptimizer, names: Mapping[int, str], group_state: Sequence[str]) -> None:
        self._optimizer, self._group_state = optimizer, group_state
        self._pairs = [(names[id(parameter)], parameter, part) for parameter, part in optimizer.pairs]

    def pieces(self) -> Iterator[Piece]:
        """Yields what there is now, in an order that is the same on all ranks that update the same parameters."""
        optimizer = self._optimizer.own
        if optimizer is None:
            return
        if self._optimizer.needs_closure:
            yield Piece(self._pairs[0][0], _PACKED, pack(self._packed_state(optimizer)), self._unpack)
            return
        groups = {id(part): group for group in optimizer.param_groups for part in group["params"]}
        for name, parameter, part in self._pairs:
            entries = optimizer.state.get(part)
            if not entries:
                continue
            for state, value in sorted(entries.items()):
                yield from _pieces(name, state, value, parameter, entries, state)
            group = groups[id(part)]
            for entry in self._group_state:
                yield from _pieces(name, f"{_GROUP}:{entry}", group[entry], parameter, group, entry)

    @torch.no_grad()
    def make(self, states: Mapping[str, Collection[str]], size: Callable[[str, str], Sequence[int]]) -> list[Piece]:
        """Makes the state of each parameter of `states`, which names the states of each, and returns the tensors to
        read. `size` gives a state's size. Raises OptimizerError if the optimizer makes other states.
        """
        optimizer = self._optimizer.own
        pairs = self._requested_pairs(states)
        if optimizer is None or not pairs:
            return []
        if self._optimizer.needs_closure:
            name = self._pairs[0][0]
            if pairs != {(name, _PACKED)}:
                raise OptimizerError(f"the checkpoint has no `{_PACKED}` state of `{name}`, which the optimizer needs")
            return [Piece(name, _PACKED, torch.empty(tuple(size(name, _PACKED)), dtype=torch.uint8), self._unpack)]
        old_values = [(part, part.detach().clone()) for _, _, part in self._pairs]
        pieces: list[Piece] = []
        for _ in range(_STEPS):
            for part, _ in old_values:
                part.grad = torch.zeros_like(part)
            optimizer.step()
            pieces = list(self.pieces())
            if {(piece.parameter, piece.state) for piece in pieces} >= pairs:
                break
        for part, value in old_values:
            part.data.copy_(value)
            part.grad = None
        for name, _, part in self._pairs:
            if name not in states:
                optimizer.state.pop(part, None)
        missing_pairs = pairs - {(piece.parameter, piece.state) for piece in pieces}
        if missing_pairs:
            parameter, state = min(missing_pairs)
            raise OptimizerError(f"the optimizer makes no state `{state}` of `{parameter}`, which the checkpoint has")
        return [piece for piece in pieces if (piece.parameter, piece.state) in pairs]

    def _packed_state(self, optimizer: torch.optim.Optimizer) -> dict[str, object]:
        numbers = {id(part): number for number, (_, _, part) in enumerate(self._pairs)}
        states = [
            (numbers[id(key)] if isinstance(key, Tensor) else key, state) for key, state in optimizer.state.items()
        ]
        groups = [{entry: group[entry] for entry in self._group_state} for group in optimizer.param_groups]
        return {"states": states, "groups": groups}

    def _unpack(self, stored: Tensor) -> None:
        optimizer = self._optimizer.own
        assert optimizer is not None
        content = unpack(stored, self._pairs[0][2].device)
        optimizer.state.clear()
        for key, state in content["states"]:
            optimizer.state[self._pairs[key][2] if isinstance(key, int) else key] = state
        for group, entries in zip(optimizer.param_groups, content["groups"], strict=True):
            group.update(entries)

    def _requested_pairs(self, states: Mapping[str, Collection[str]]) -> set[tuple[str, str]]:
        return {(name, state) for name, _, _ in self._pairs for state in states.get(name, ())}


def _pieces(
    name: str, state: str, value: object, parameter: Tensor, into: MutableMapping[str, Any], key: str
) -> Iterator[Piece]:
    if value is None:  # a momentum before the first gradient
        return
    if isinstance(value, Tensor):
        for suffix, tensor in inner_tensors(value):
            yield Piece(name, state + suffix, like_part(tensor, parameter))
    elif isinstance(value, int | float):
        kind = type(value)
        tensor = torch.tensor(value, dtype=torch.float64 if isinstance(value, float) else torch.int64)

        def store_number(stored: Tensor) -> None:
            into[key] = kind(stored.item())

        yield Piece(name, state, tensor, store_number)
    else:
        raise OptimizerError(f"it keeps `{key}` of `{name}` as a {type(value).__name__}, and not as a tensor or number")


def pack(state: object) -> Tensor:
    """Returns a state as bytes, after trying that it can be read back. Raises UnpicklingError, or as the state does."""
    file = io.BytesIO()
    torch.save(state, file)
    torch.load(io.BytesIO(file.getvalue()), weights_only=True)
    return torch.frombuffer(bytearray(file.getvalue()), dtype=torch.uint8)


def unpack(content: Tensor, device: torch.device) -> Any:
    """Returns the state from the bytes of `pack`. Tensors of any GPU go to `device`; tensors of the host stay there."""

    def place(storage: Any, location: str) -> Any:
        return storage if location == "cpu" else storage.to(device=device)

    return torch.load(io.BytesIO(content.numpy().tobytes()), map_location=place, weights_only=True)


def inner_tensors(value: Tensor) -> Iterator[tuple[str, Tensor]]:
    """Yields the plain tensors that a tensor is made of, each with the suffix of its name ("" for a plain tensor)."""
    if not hasattr(value, "__tensor_flatten__") or is_distributed(value):
        yield "", value
        return
    for attribute in value.__tensor_flatten__()[0]:
        for suffix, tensor in inner_tensors(getattr(value, attribute)):
            yield f":{attribute}{suffix}", tensor
