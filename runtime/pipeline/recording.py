"""A forward pass as a list of calls: the data types, and how a call is repeated.

A tensor argument is a reference: to the result of an earlier call, to a parameter or buffer by its name, or to a
constant. A whole number that grows with the batch is recorded as a multiple of the samples.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from dslc.compiler.trace.private_torch import tree_leaves
from dslc.compiler.trace.structures import unflatten
from dslc.runtime.technique.sample_pass import DrawingLayer

SMALL, LARGE = 2, 4  # samples of the two runs that are compared; a single one would make batch norm fail


class CaptureError(Exception):
    """Why a module cannot be recorded. `where` is the line of the user's own code, as far as it is known."""

    def __init__(self, reason: str, line: str = "") -> None:
        super().__init__(reason)
        self.where = line


class RecordedValue(NamedTuple):
    """Stands for a tensor: the result of a call."""

    number: int


class ModuleTensor(NamedTuple):
    """Stands for a tensor: a parameter or buffer, by the path of its module and its name there."""

    path: str
    name: str


class SampleMultiple(NamedTuple):
    """Stands for a whole number: `times` per sample."""

    times: int


class Constant(NamedTuple):
    """Stands for a tensor that the module keeps besides its parameters and buffers."""

    tensor: Tensor


@dataclass(kw_only=True)
class Call:
    """One call. `what` is the path of a layer, or a function of torch's."""

    what: Any
    layer: bool
    args: Any
    kwargs: Any
    gives: tuple[int, ...]  # numbers of the tensors in its result
    takes: frozenset[int]
    held: frozenset[ModuleTensor]
    changes: frozenset[int]  # values into whose memory it writes
    own: bool
    grad: bool  # true if gradients were on
    cast: tuple[bool, torch.dtype] | None  # autocast, if the module itself has changed it
    where: str
    drawing: DrawingLayer | None = None  # the module that draws by sample, if one runs
    drawn: int = 0  # draws of this module before the call


@dataclass(kw_only=True)
class Fact:
    """The known facts of a value: its shapes in both runs, and whether every stage can compute it."""

    small: tuple[int, ...]
    large: tuple[int, ...] = ()
    dtype: torch.dtype
    memory: int  # values with one memory are views of each other
    own: bool


class Result(NamedTuple):
    """The output of a forward pass: its leaves, with references in the place of tensors, and its form."""

    leaves: list[Any]
    form: Any

    @property
    def is_tensor(self) -> bool:
        return self.form is not None and self.form.is_leaf()

    def restored(self, values: Mapping[int, Tensor], samples: int) -> Any:
        """Returns the output with these tensors, of a batch of `samples` samples."""
        return unflatten(filled(self.leaves, values, {}, samples, None), self.form)


@dataclass(kw_only=True)
class Recording:
    """The calls of one forward pass, in order. `starts` is the index of each layer's first call; `repeated` are the
    parameters that are used again after other parameters, each with the layers of both uses and one of the other
    parameters.

    The first `inputs` values are the tensors of a batch. `result` is the output, `outputs` are its tensors.
    """

    calls: list[Call] = field(default_factory=list)
    starts: dict[str, int] = field(default_factory=dict)
    facts: dict[int, Fact] = field(default_factory=dict)
    inputs: int = 1
    outputs: tuple[int, ...] = ()
    result: Result = field(default_factory=lambda: Result([], None))
    repeated: tuple[tuple[str, ...], ...] = ()


def full(reference: ModuleTensor) -> str:
    """Returns the name of a parameter or buffer in the whole module."""
    return f"{reference.path}.{reference.name}" if reference.path else reference.name


def touches(recording: Recording, call: Call, values: set[int]) -> bool:
    """True if a call returns one of these values, or writes into the memory of one."""
    if not values.isdisjoint(call.gives):
        return True
    if not call.changes:
        return False
    memories = {recording.facts[number].memory for number in values}
    return any(recording.facts[number].memory in memories for number in call.changes)


def filled(
    value: Any,
    values: Mapping[int, Tensor],
    places: Mapping[ModuleTensor, tuple[nn.Module, str]],
    samples: int,
    device: torch.device | None,
) -> Any:
    """Returns a recorded value with tensors in the place of references."""
    match value:
        case RecordedValue(number):
            return values[number]
        case ModuleTensor():
            return getattr(*places[value])
        case SampleMultiple(times):
            return times * samples
        case Constant(tensor):
            return tensor
        case torch.device():
            return device or value
        case _:
            return map_parts(lambda part: filled(part, values, places, samples, device), value)


def map_parts(function: Callable[[Any], object], value: Any) -> Any:
    """Returns a slice or a collection with `function` of each of its parts; any other value as it is."""
    match value:
        case slice():
            return slice(*map(function, (value.start, value.stop, value.step)))
        case tuple() if hasattr(value, "_fields"):
            items: list[Any] = list(map(function, value))
            return type(value)(*items)
        case tuple():  # a torch.Size would take no references
            return tuple(map(function, value))
        case list():
            return list(map(function, value))
        case dict():
            return {key: function(part) for key, part in value.items()}
        case _:
            return value


def tensors_of(value: object) -> list[Tensor]:
    """Returns the tensors within a value, in the order in which calls number them."""
    return [leaf for leaf in tree_leaves(value) if isinstance(leaf, Tensor)]


# -------------------------------------------------------------------------------------------- two runs made one


def merged(small_run: Recording, large_run: Recording) -> Recording:
    """Returns the calls of both runs as one list, with numbers that grow with the batch as multiples of the samples."""
    for small_call, large_call in zip(small_run.calls, large_run.calls, strict=False):
        if (
            small_call.what != large_call.what
            or small_call.gives != large_call.gives
            or small_call.takes != large_call.takes
        ):
            raise CaptureError("its forward does different things for different numbers of samples", small_call.where)
        small_call.args = _merge_values(small_call.args, large_call.args, small_call.where)
        small_call.kwargs = _merge_values(small_call.kwargs, large_call.kwargs, small_call.where)
    if len(small_run.calls) != len(large_run.calls) or small_run.outputs != large_run.outputs:
        raise CaptureError("its forward does different things for different numbers of samples")
    if small_run.result.form != large_run.result.form:
        raise CaptureError("its output has another form for another number of samples")
    small_run.result = Result(
        _merge_values(small_run.result.leaves, large_run.result.leaves, ""), small_run.result.form
    )
    for number, fact in small_run.facts.items():
        fact.large = large_run.facts[number].small
    _settle(small_run)
    return small_run


def _merge_values(small_value: Any, large_value: Any, line: str) -> Any:
    if isinstance(small_value, int) and not isinstance(small_value, bool) and small_value != large_value:
        if isinstance(large_value, int) and small_value * LARGE == large_value * SMALL and small_value % SMALL == 0:
            return SampleMultiple(small_value // SMALL)
        reason = f"a number in its forward is {small_value} for {SMALL} samples and {large_value} for {LARGE}"
        raise CaptureError(reason, line)
    if isinstance(small_value, Constant):
        return small_value
    if isinstance(small_value, RecordedValue | ModuleTensor) and small_value == large_value:
        return small_value
    if isinstance(small_value, slice):
        parts = zip(
            (small_value.start, small_value.stop, small_value.step),
            (large_value.start, large_value.stop, large_value.step),
            strict=True,
        )
        return slice(*(_merge_values(small_part, large_part, line) for small_part, large_part in parts))
    if isinstance(small_value, dict) and isinstance(large_value, dict) and list(small_value) == list(large_value):
        return {key: _merge_values(small_value[key], large_value[key], line) for key in small_value}
    if (
        isinstance(small_value, tuple | list)
        and type(small_value) is type(large_value)
        and len(small_value) == len(large_value)
    ):
        items = [
            _merge_values(small_part, large_part, line)
            for small_part, large_part in zip(small_value, large_value, strict=True)
        ]
        if hasattr(small_value, "_fields"):
            return type(small_value)(*items)
        return items if isinstance(small_value, list) else tuple(items)
    if small_value is not large_value and small_value != large_value:
        raise CaptureError(f"in its forward `{small_value}` is `{large_value}` for other numbers of samples", line)
    return small_value


def _settle(recording: Recording) -> None:
    """Assigns values that a call of one stage alone writes, and all that follows from them, to that stage."""
    facts = recording.facts
    while True:
        spoilt = {facts[number].memory for call in recording.calls if not call.own for number in call.changes}
        spoilt_numbers = [
            n for n, fact in facts.items() if fact.own and fact.memory in spoilt and n >= recording.inputs
        ]
        for number in spoilt_numbers:
            facts[number].own = False
        has_changed = False
        for call in recording.calls:
            if call.own and not all(facts[number].own for number in (*call.takes, *call.gives)):
                call.own, has_changed = False, True
                for number in call.gives:
                    facts[number].own = False
        if not has_changed:
            return
