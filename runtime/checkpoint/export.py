"""Exports the whole weights of a checkpoint to a file that torch reads without dslc.

Model: a checkpoint of any plan holds each tensor of the model under `model.<name>` (state.py), in pieces; one tensor
after another is put together and written. `.safetensors` is written directly. `.pt`, which torch writes from a state
dict, is made from such a file, which the safetensors library maps into memory.

Contract: one process, no launch, one tensor in memory at a time. Names are those of the unwrapped model. A tied weight
stands in a `.safetensors` file once, as the format requires, and in a `.pt` under each of its names, so that
`load_state_dict` takes it. The file is written beside its place and renamed.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from dslc.runtime.checkpoint.state import CheckpointError, key_of, keys_of, read
from dslc.runtime.checkpoint.tensor_file import writing
from dslc.runtime.checkpoint.weights import METADATA, entry, write_tensor

SUFFIXES = (".safetensors", ".pt")


def export(source: str, ties: Mapping[str, str], path: str, *, raw: bool = False) -> int:
    """Writes the weights of `source`, a checkpoint or a `.safetensors` file, to `path`; returns the number of tensors.
    Of a checkpoint with an average of the weights that is written, but with `raw` the weights themselves.

    `ties` maps a parameter to the one whose tensor it is. Raises CheckpointError and OSError.
    """
    plain = path + ".plain"
    try:
        if os.path.isdir(source):
            _write(source, plain, raw)
        else:
            shutil.copyfile(source, plain)
        tensors = _mapped(plain, source)
        if path.endswith(".safetensors"):
            os.replace(plain, path)
            return len(tensors)
        state = tensors | {name: tensors[whose] for name, whose in ties.items() if whose in tensors}
        torch.save(state, path + ".saved")
        os.replace(path + ".saved", path)
        return len(state)
    finally:
        if os.path.exists(plain):
            os.remove(plain)


def _write(checkpoint: str, path: str, raw: bool) -> None:
    kept = {key.removeprefix("model."): about for key, about in keys_of(checkpoint).items() if key.startswith("model.")}
    blank = {name: torch.empty(each.size, dtype=each.properties.dtype, device="meta") for name, each in kept.items()}
    taken = key_of(checkpoint, raw)
    with writing(path, {name: entry(tensor) for name, tensor in blank.items()}, METADATA) as file:
        for name, tensor in blank.items():
            whole = torch.empty(tensor.shape, dtype=tensor.dtype)
            read(checkpoint, {taken(name): whole})
            write_tensor(file, whole)


def _mapped(path: str, source: str) -> dict[str, Tensor]:
    """Returns the tensors of a safetensors file made of `source`, each with a storage of its own, in the order of their
    bytes."""
    from safetensors import SafetensorError, safe_open

    try:
        opened: Any = safe_open(path, framework="pt", device="cpu")
        with opened as file:
            tensors = {name: file.get_tensor(name) for name in file.offset_keys()}
    except SafetensorError as error:
        raise CheckpointError(f"{source} cannot be read as safetensors: {error}") from error
    # An empty one lies where the next begins, and torch saves no two that begin at one place and are of unequal dtypes.
    return {name: tensor if tensor.numel() else torch.empty_like(tensor) for name, tensor in tensors.items()}
