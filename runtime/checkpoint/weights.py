"""The final weights, as safetensors under the model's own names.

Contract: `save_weights` writes parameters and persistent buffers, a tied weight once under the name it has first in the
model, contiguous; the file is whole or not there (tensor_file.py). No rank ever holds more than one whole tensor that
is sharded. `load_weights` puts them into a model of the same shape, not sharded.

Limits: extra state that a user's module keeps outside its tensors is not written.
"""

from __future__ import annotations

import contextlib
import os
from typing import TYPE_CHECKING, BinaryIO

import torch
from torch import Tensor, nn

from dslc.runtime.checkpoint.tensor_file import StoredTensor, writing
from dslc.runtime.model.row_order import as_named
from dslc.runtime.model.tensor_names import WEIGHTS, named_tensors

if TYPE_CHECKING:
    from dslc.runtime.pipeline.pipeline import Pipeline

DTYPES = {
    torch.float64: "F64",
    torch.float32: "F32",
    torch.float16: "F16",
    torch.bfloat16: "BF16",
    torch.int64: "I64",
    torch.int32: "I32",
    torch.int16: "I16",
    torch.int8: "I8",
    torch.uint8: "U8",
    torch.bool: "BOOL",
    torch.complex64: "C64",
    torch.uint64: "U64",
    torch.uint32: "U32",
    torch.uint16: "U16",
    torch.float8_e4m3fn: "F8_E4M3",
    torch.float8_e5m2: "F8_E5M2",
    torch.float8_e8m0fnu: "F8_E8M0",
}
METADATA = {"format": "pt"}  # what libraries look for before they read it as torch's


@torch.no_grad()
def save_weights(model: nn.Module, run_dir: str, writes: bool = True, pipeline: Pipeline | None = None) -> str:
    """Writes `weights.safetensors` into `run_dir` and returns its path. `model` is the plain one. Raises OSError.

    All ranks call it, as sharded tensors are gathered and the stages of a `pipeline` send theirs; one rank `writes`.
    """
    path = os.path.join(run_dir, WEIGHTS)
    local_tensors = named_tensors(model)
    tensors = pipeline.whole if pipeline is not None else local_tensors
    entries = {name: entry(tensor) for name, tensor in tensors.items()}
    with writing(path, entries, METADATA) if writes else contextlib.nullcontext() as file:
        for name in tensors:
            if pipeline is None:
                full_tensor = _full_tensor(name, local_tensors[name], writes)
            else:
                local_full = (
                    _full_tensor(name, local_tensors[name], pipeline.is_first_rank)
                    if pipeline.owner(name) == pipeline.coordinate
                    else None
                )
                full_tensor = pipeline.to_rank_0(name, local_full)
            if file is not None and full_tensor is not None:
                write_tensor(file, full_tensor)
    return path


def entry(tensor: Tensor) -> StoredTensor:
    """Returns the entry of a tensor in the header; it may be on the meta device."""
    return StoredTensor(dtype=DTYPES[tensor.dtype], shape=tuple(tensor.shape))


def _full_tensor(name: str, tensor: Tensor, is_needed: bool) -> Tensor | None:
    """Returns the whole of a tensor that may be sharded; every rank takes part in gathering it."""
    if hasattr(tensor, "full_tensor"):
        tensor = tensor.full_tensor()
        return as_named(name, tensor) if is_needed else None
    return tensor if is_needed else None


def write_tensor(file: BinaryIO, tensor: Tensor) -> None:
    plain = tensor.detach().cpu().contiguous().reshape(-1)
    file.write(plain.view(torch.uint8).numpy().data)


@torch.no_grad()
def load_weights(model: nn.Module, run_dir: str) -> None:
    """Loads the weights of `run_dir` into `model`, in place. Raises OSError, or ValueError if they do not fit."""
    from safetensors.torch import load_file

    stored_tensors = load_file(os.path.join(run_dir, WEIGHTS))
    model_tensors = named_tensors(model)
    bad_names = sorted(stored_tensors.keys() ^ model_tensors.keys())
    bad_names += [
        name
        for name in model_tensors.keys() & stored_tensors.keys()
        if model_tensors[name].shape != stored_tensors[name].shape
    ]
    if bad_names:
        raise ValueError(f"{WEIGHTS} in {run_dir} is not of this model: {', '.join(bad_names[:5])}")
    for name, tensor in model_tensors.items():
        tensor.copy_(stored_tensors[name])
