"""The tensors of a model by their plain names, the name of their file, and the seed of each."""

from __future__ import annotations

import hashlib

from torch import Tensor, nn

from dslc.compiler.ir.parameter_names import ParameterNames

WEIGHTS = "weights.safetensors"  # in a run directory


def seed_of(seed: int, name: str) -> int:
    """Returns the seed of one tensor or module, which follows from the job's and its name."""
    return int.from_bytes(hashlib.sha256(f"{seed}:{name}".encode()).digest()[:8], "big") >> 1


def named_tensors(model: nn.Module) -> dict[str, Tensor]:
    """Returns parameters and persistent buffers by name, each tensor once, in the model's order."""
    saved = model.state_dict(keep_vars=True)
    by_name: dict[str, Tensor] = {}
    visited: set[int] = set()
    for name, tensor in saved.items():
        if isinstance(tensor, Tensor) and id(tensor) not in visited:
            visited.add(id(tensor))
            by_name[name] = tensor
    return by_name


def parameter_names(model: nn.Module) -> ParameterNames:
    """Returns the names of the parameters of a model; a tied parameter has several."""
    first_name: dict[int, str] = {}
    names, ties = [], []
    for name, parameter in model.named_parameters(remove_duplicate=False):
        names.append(name)
        if first_name.setdefault(id(parameter), name) != name:
            ties.append((name, first_name[id(parameter)]))
    return ParameterNames(names, ties)
