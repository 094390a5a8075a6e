"""Exports the whole weights of a checkpoint to a file that torch reads without dslc.

Model: a checkpoint of any plan holds each tensor of the model under `model.<name>` (state.py), in pieces; one tensor
after another is put together and written. `.safetensors` is written directly. `.pt`, which torch writes from a state
dict, is made from such a file mapped into memory.

Contract: one process, no launch, one tensor in memory at a time. Names are those of the unwrapped model. A tied weight
stands in a `.safetensors` file once, as the format requires, and in a `.pt` under each of its names, so that
`load_state_dict` takes it. The file is written beside its place and renamed.
"""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Mapping
from typing import Any, cast

import numpy as np
import torch
from torch import Tensor

from dslc.runtime.checkpoint.state import keys_of, read
from dslc.runtime.checkpoint.weights import DTYPES, header, write_tensor

SUFFIXES = (".safetensors", ".pt")


def export(source: str, ties: Mapping[str, str], path: str) -> int:
    """Writes the weights of `source`, a checkpoint or a `.safetensors` file, to `path`; returns the number of tensors.

    `ties` maps a parameter to the one whose tensor it is. Raises CheckpointError and OSError.
    """
    plain = path + ".part"
    if os.path.isdir(source):
        _write(source, plain)
    else:
        shutil.copyfile(source, plain)
    try:
        tensors = _mapped(plain)
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


def _write(checkpoint: str, path: str) -> None:
    kept = {key.removeprefix("model."): about for key, about in keys_of(checkpoint).items() if key.startswith("model.")}
    blank = {name: torch.empty(each.size, dtype=each.properties.dtype, device="meta") for name, each in kept.items()}
    with open(path, "wb") as file:
        file.write(header(blank))
        for name, tensor in blank.items():
            whole = torch.empty(tensor.shape, dtype=tensor.dtype)
            read(checkpoint, {f"model.{name}": whole})
            write_tensor(file, whole)


def _mapped(path: str) -> dict[str, Tensor]:
    """Returns the tensors of a safetensors file, each with a storage of its own, in the order of their bytes."""
    with open(path, "rb") as file:
        begin = 8 + int.from_bytes(file.read(8), "little")
        entries: dict[str, Any] = json.loads(file.read(begin - 8))
    entries.pop("__metadata__", None)
    dtypes = {name: dtype for dtype, name in DTYPES.items()}
    found: dict[str, Tensor] = {}
    for name, entry in sorted(entries.items(), key=lambda item: cast(int, item[1]["data_offsets"][0])):
        start, stop = entry["data_offsets"]
        if start == stop:
            found[name] = torch.empty(entry["shape"], dtype=dtypes[entry["dtype"]])
            continue
        raw = np.memmap(path, np.uint8, "c", begin + start, (stop - start,))
        found[name] = torch.from_numpy(raw).view(dtypes[entry["dtype"]]).reshape(entry["shape"])
    return found
