"""The form of the batches that a recorded forward pass takes: one tensor, or a structure of tensors.

Model: stages exchange plain tensors, and a batch that is a structure enters a pipeline as its tensors. A recording
restores the structure once, for the call of the user's module.

Contract: the tensors of all micro-batches have the shapes and dtypes of the recording, samples first. What is no tensor
is a constant. Other batches raise InputFormError.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor, nn

from dslc.compiler.trace.structures import Structure, call, flatten, paths, unflatten

Leaf = tuple[tuple[int, ...], str]  # shape of one sample, and dtype


class InputFormError(RuntimeError):
    """A batch that differs in form from the batch that stages were recorded with."""

    def __init__(self, message: str, remedy: str) -> None:
        super().__init__(message)
        self.remedy = remedy


_REMEDY = "let each batch have the same parts and shapes, as by padding to one length; or use the data axis"


@dataclass(frozen=True)
class InputForm:
    """`leaves` are the tensors of a batch. `example` is any batch of the data, None where a batch is one tensor."""

    leaves: tuple[Leaf, ...]
    example: object = None

    def __post_init__(self) -> None:
        if self.example is not None and (count := len(self._places(self.example)[0])) != len(self.leaves):
            raise InputFormError(f"a batch has {count} tensors, and the plan {len(self.leaves)}", _REMEDY)

    def tensors_of(self, batch: Structure) -> tuple[Tensor, ...]:
        """Returns the tensors of a batch, in the order of the example."""
        if self.example is None:
            return (batch,)
        (tensors, constants), (expected_tensors, expected_constants) = self._places(batch), self._places(self.example)
        if tensors.keys() != expected_tensors.keys() or constants != expected_constants:
            raise InputFormError(
                f"a batch has {_named(tensors, constants)}, not {_named(expected_tensors, expected_constants)}", _REMEDY
            )
        inputs = tuple(tensors[place] for place in expected_tensors)
        samples = len(inputs[0]) if inputs[0].dim() else 0
        for place, tensor, (shape, dtype) in zip(expected_tensors, inputs, self.leaves, strict=True):
            if tuple(tensor.shape) != (samples, *shape) or tensor.dtype != getattr(torch, dtype):
                raise InputFormError(
                    f"{_name(place)} of a batch has shape {tuple(tensor.shape)} and {tensor.dtype}, and its stages "
                    f"were recorded for {(samples, *shape)} and torch.{dtype}",
                    _REMEDY,
                )
        return inputs

    def empty(self, samples: int, low: torch.dtype | None) -> tuple[Tensor, ...]:
        """Returns tensors of this form; floating-point tensors have the dtype `low`, if it is given."""
        dtypes = [getattr(torch, dtype) for _, dtype in self.leaves]
        return tuple(
            torch.empty((samples, *shape), dtype=low if low is not None and dtype.is_floating_point else dtype)
            for (shape, _), dtype in zip(self.leaves, dtypes, strict=True)
        )

    def run(self, module: nn.Module, tensors: tuple[Tensor, ...]) -> object:
        """Returns what the module gives for a batch with these tensors."""
        if self.example is None:
            return module(*tensors)
        leaves, form = flatten(self.example)
        tensor_iterator = iter(tensors)
        batch = unflatten([next(tensor_iterator) if isinstance(leaf, Tensor) else leaf for leaf in leaves], form)
        return call(module, module.forward, batch)

    @staticmethod
    def _places(batch: object) -> tuple[dict[str, Tensor], dict[str, object]]:
        places = dict(zip(paths(batch), flatten(batch)[0], strict=True))
        tensors = {place: leaf for place, leaf in places.items() if isinstance(leaf, Tensor)}
        return tensors, {place: leaf for place, leaf in places.items() if place not in tensors}


def _named(tensors: dict[str, Tensor], constants: dict[str, object]) -> str:
    parts = [_name(place) for place in tensors] + [f"{_name(place)} = {leaf!r}" for place, leaf in constants.items()]
    return ", ".join(parts) or "nothing"


def _name(place: str) -> str:
    return f"`{place}`" if place else "the one tensor"
