"""Restores a model after passes that are no part of its training."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import torch

from dslc.compiler.trace.code_place import restored_generators
from dslc.compiler.trace.private_torch import local_part
from dslc.compiler.trace.structures import Structure
from dslc.runtime.process import random_numbers
from dslc.runtime.step.assemble import TrainingComponents

NUMBERS = 1 << 25  # parameters of a rank, up to which a model is small


def is_small(parts: TrainingComponents) -> bool:
    """True if this rank's parameters may be copied."""
    return sum(local_part(parameter).numel() for parameter in parts.plain.parameters()) <= NUMBERS


@contextlib.contextmanager
def preserve_model(parts: TrainingComponents) -> Iterator[None]:
    """Restores on leaving whatever a forward pass of a user's module may change: parameters, buffers, generators and
    plain attributes.
    """
    plain, device = parts.plain, parts.device
    generators = random_numbers.state(device)
    tensors_held = [local_part(tensor.detach()) for tensor in (*plain.parameters(), *plain.buffers())]
    copies = [tensor.clone() for tensor in tensors_held]
    parts.engine.agree_on_buffers()
    attributes = [(vars(module), dict(vars(module)), _contents(vars(module))) for module in plain.modules()]
    with restored_generators(plain):
        yield
    for values, values_before, contents in attributes:
        values.clear()
        values.update(values_before)
        for value, content in contents:
            value.clear()
            value.update(content) if isinstance(value, dict) else value.extend(content)
    with torch.no_grad():
        for tensor, copy in zip(tensors_held, copies, strict=True):
            tensor.copy_(copy)
    random_numbers.restore(generators, device)


def _contents(values: dict[str, Any]) -> list[tuple[Structure, Structure]]:
    """Returns the plain lists and dictionaries among the attributes of a module, its buffers too, each with a copy."""
    restored = ("_parameters", "_modules")  # a pass that shards parameters changes them, and changes them back
    return [
        (value, type(value)(value))
        for name, value in values.items()
        if type(value) in (list, dict) and name not in restored
    ]
