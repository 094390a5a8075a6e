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
    kept = model.state_dict(keep_vars=True)
    found: dict[str, Tensor] = {}
    seen: set[int] = set()
    for name, tensor in kept.items():
        if isinstance(tensor, Tensor) and id(tensor) not in seen:
            seen.add(id(tensor))
            found[name] = tensor
    return found


def parameter_names(model: nn.Module) -> ParameterNames:
    """Returns the names of the parameters of a model; a tied parameter has several."""
    first: dict[int, str] = {}
    names, ties = [], []
    for name, parameter in model.named_parameters(remove_duplicate=False):
        names.append(name)
        if first.setdefault(id(parameter), name) != name:
            ties.append((name, first[id(parameter)]))
    return ParameterNames(names, ties)
