"""Loads weights from a file instead of initial values.

Model: the file holds one tensor for each parameter and persistent buffer of the unwrapped model, under its name: a
`.safetensors` file, a folder with a `weights.safetensors` (a run directory is one), or a file in which `torch.save` has
put a state dict. Of a sharded parameter a rank reads only its own part: safetensors files are read piece by piece,
torch files are mapped into memory.

Contract: names and shapes fit exactly, or a WeightsError names those that do not. A tied weight is in the file once, or
under all its names with the same values. Numbers are converted to the dtype of the model's tensor.

Limits: torch files are read with `weights_only=True`, so that nothing in them runs; one written before torch 1.6 cannot
be mapped and is read whole.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from typing import Any

import torch
from torch import Tensor, nn

from dslc.compiler.ir.program import ModelStep
from dslc.compiler.trace.private_torch import part_in_whole
from dslc.runtime.model.names import WEIGHTS, named_tensors

Part = tuple[slice, ...]
_WRAPPINGS = ("state_dict", "model", "module")  # keys under which training scripts keep the state dict


class WeightsError(RuntimeError):
    """A file of weights cannot be read or does not fit; the message begins with the line of the job."""


@torch.no_grad()
def load(step: ModelStep, model: nn.Module, whole: Mapping[str, Tensor] | None = None) -> None:
    """Loads the values of `step.weights` into `model`, whose tensors may be sharded. Raises WeightsError.

    If `model` is a part of a model, `whole` are all its tensors by name.
    """
    if not step.weights:
        return
    path = os.path.join(step.weights, WEIGHTS) if os.path.isdir(step.weights) else step.weights
    where = f"{step.weights_line}: " if step.weights_line else ""
    with ExitStack() as open_files:
        try:
            shapes, read = (_safetensors if path.endswith(".safetensors") else _torch)(path, open_files)
        except Exception as error:  # unpickling and two libraries have errors of their own
            raise WeightsError(f"{where}{path} cannot be read as weights: {error}") from error
        _put(shapes, read, named_tensors(model), whole, dict(step.ties), f"{where}{path}")


def _put(
    shapes: Mapping[str, tuple[int, ...]],
    read: Callable[[str, Part], Tensor],
    tensors: Mapping[str, Tensor],
    whole: Mapping[str, Tensor] | None,
    ties: Mapping[str, str],
    what: str,
) -> None:
    wanted = whole or tensors
    wrong = _misfits(shapes, {name: tuple(tensor.shape) for name, tensor in wanted.items()}, ties)
    if wrong:
        raise WeightsError(f"{what} is not of this model: {'; '.join(wrong)}")
    for name, tensor in tensors.items():
        local, part = own_part(tensor)
        if 0 not in local.shape:
            local.copy_(read(name, part))
    for name in shapes.keys() - wanted.keys():
        if ties[name] not in tensors:
            continue
        local, part = own_part(tensors[ties[name]])
        if 0 not in local.shape and not torch.equal(local.cpu(), read(name, part).to(local.dtype)):
            raise WeightsError(f"{what}: `{name}` and `{ties[name]}` are one weight in the model, and differ here")


def _misfits(
    found: Mapping[str, tuple[int, ...]], wanted: Mapping[str, tuple[int, ...]], ties: Mapping[str, str]
) -> list[str]:
    missing = [name for name in wanted if name not in found]
    over = [name for name in found if ties.get(name, name) not in wanted]
    shaped = [
        f"`{name}` is {list(found[name])} there and {list(shape)} here"
        for name, shape in wanted.items()
        if name in found and found[name] != shape
    ]
    parts = (("it lacks", _quoted(missing)), ("it has besides", _quoted(over)), ("shapes differ:", shaped))
    return [f"{what} {_first(names)}" for what, names in parts if names]


def _quoted(names: list[str]) -> list[str]:
    return [f"`{name}`" for name in names]


def _first(names: list[str], count: int = 3) -> str:
    return ", ".join(names[:count]) + (f" and {len(names) - count} more" if len(names) > count else "")


def own_part(tensor: Tensor) -> tuple[Tensor, Part]:
    """Returns this rank's part of `tensor`, and its place in the whole."""
    local: Tensor = tensor.to_local() if hasattr(tensor, "to_local") else tensor
    return local.detach(), part_of(tensor)


def part_of(tensor: Tensor) -> Part:
    """Returns the place in the whole of this rank's part of `tensor`."""
    if not hasattr(tensor, "placements"):
        return tuple(slice(0, size) for size in tensor.shape)
    shape, offset = part_in_whole(tensor)
    return tuple(slice(o, o + n) for o, n in zip(offset, shape, strict=True))


def _safetensors(path: str, open_files: ExitStack) -> tuple[dict[str, tuple[int, ...]], Callable[[str, Part], Tensor]]:
    from safetensors import safe_open

    file: Any = open_files.enter_context(safe_open(path, framework="pt", device="cpu"))
    shapes = {name: tuple(file.get_slice(name).get_shape()) for name in file.keys()}  # noqa: SIM118 - no mapping

    def read(name: str, part: Part) -> Tensor:
        tensor: Tensor = file.get_slice(name)[part] if part else file.get_tensor(name)
        return tensor

    return shapes, read


def _torch(path: str, open_files: ExitStack) -> tuple[dict[str, tuple[int, ...]], Callable[[str, Part], Tensor]]:
    try:
        loaded = torch.load(path, map_location="cpu", weights_only=True, mmap=True)
    except RuntimeError as error:
        if "mmap" not in str(error):
            raise
        loaded = torch.load(path, map_location="cpu", weights_only=True)
    for key in _WRAPPINGS:
        if isinstance(loaded, Mapping) and isinstance(loaded.get(key), Mapping):
            loaded = loaded[key]
    if not isinstance(loaded, Mapping) or not any(isinstance(value, Tensor) for value in loaded.values()):
        raise ValueError("it holds no state dict")
    tensors = {name: value for name, value in loaded.items() if isinstance(value, Tensor)}
    return {name: tuple(tensor.shape) for name, tensor in tensors.items()}, lambda name, part: tensors[name][part]
