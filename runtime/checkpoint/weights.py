"""The final weights, as safetensors under the model's own names.

Model: a safetensors file is the length of a header (8 bytes, little-endian), the header (JSON: for each name dtype,
shape, and the range of its bytes), and the bytes of one tensor after another
(https://github.com/huggingface/safetensors#format). So it can be written while the tensors are gathered one by one.

Contract: `save_weights` writes parameters and persistent buffers, a tied weight once under the name it has first in the
model, contiguous; the file is written beside its place and renamed, so that it is whole or not there. No rank ever
holds more than one whole tensor that is sharded. `load_weights` puts them into a model of the same shape, not sharded;
a name missing, left over, or of another shape is an error.

Limits: extra state that a user's module keeps outside its tensors is not written.
"""

from __future__ import annotations

import contextlib
import itertools
import json
import os
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, BinaryIO

import torch
from torch import Tensor, nn

from dslc.runtime.model.names import WEIGHTS, named_tensors
from dslc.runtime.process.records import naming

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
}


@torch.no_grad()
def save_weights(model: nn.Module, run_dir: str, writes: bool = True, pipeline: Pipeline | None = None) -> str:
    """Writes `weights.safetensors` into `run_dir` and returns its path. `model` is the plain one. Raises OSError.

    All ranks call it, as sharded tensors are gathered and those of other stages of a `pipeline` are sent; one `writes`.
    """
    path = os.path.join(run_dir, WEIGHTS)
    own = named_tensors(model)
    tensors = pipeline.whole if pipeline is not None else own
    with naming(path), open(path + ".part", "wb") if writes else contextlib.nullcontext() as file:
        if file is not None:
            file.write(header(tensors))
        for name in tensors:
            if pipeline is None:
                whole = _whole(own[name], writes)
            else:
                there = _whole(own[name], pipeline.first) if pipeline.owner(name) == pipeline.coordinate else None
                whole = pipeline.to_rank_0(name, there)
            if file is not None and whole is not None:
                write_tensor(file, whole)
    if writes:
        os.replace(path + ".part", path)
    return path


def header(tensors: Mapping[str, Tensor]) -> bytes:
    """Returns the header of a file of these tensors, which may be on the meta device."""
    ends = itertools.accumulate(tensor.numel() * tensor.element_size() for tensor in tensors.values())
    places = itertools.pairwise(itertools.chain((0,), ends))
    entries: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    for (name, tensor), place in zip(tensors.items(), places, strict=True):
        entries[name] = {"dtype": DTYPES[tensor.dtype], "shape": list(tensor.shape), "data_offsets": place}
    header = json.dumps(entries, separators=(",", ":")).encode()
    header += b" " * (-len(header) % 8)
    return len(header).to_bytes(8, "little") + header


def _whole(tensor: Any, wanted: bool) -> Tensor | None:
    """Returns the whole of a tensor that may be sharded; every rank takes part in gathering it."""
    whole: Tensor | None = tensor if wanted else None
    if hasattr(tensor, "full_tensor"):
        gathered = tensor.full_tensor()
        whole = gathered if wanted else None
    return whole


def write_tensor(file: BinaryIO, tensor: Tensor) -> None:
    """Writes the bytes of the next tensor, in the order of the header."""
    plain = tensor.detach().cpu().contiguous().reshape(-1)
    file.write(plain.view(torch.uint8).numpy().data)


@torch.no_grad()
def load_weights(model: nn.Module, run_dir: str) -> None:
    """Loads the weights of `run_dir` into `model`, in place. Raises OSError, or ValueError if they do not fit."""
    from safetensors.torch import load_file

    loaded = load_file(os.path.join(run_dir, WEIGHTS))
    wanted = named_tensors(model)
    wrong = sorted(loaded.keys() ^ wanted.keys())
    wrong += [name for name in wanted.keys() & loaded.keys() if wanted[name].shape != loaded[name].shape]
    if wrong:
        raise ValueError(f"{WEIGHTS} in {run_dir} is not of this model: {', '.join(wrong[:5])}")
    for name, tensor in wanted.items():
        tensor.copy_(loaded[name])
