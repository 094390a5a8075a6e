"""The final weights, as safetensors under the model's own names.

Contract: `save_weights` writes parameters and persistent buffers, a tied weight once under the name it has first in the
model, contiguous, on the CPU; beside the file's place first, then renamed, so that a file is whole or not there.
`load_weights` puts them into a model of the same shape; a name missing, left over, or of another shape is an error.

Limits: extra state that a user's module keeps outside its tensors is not written.
"""

from __future__ import annotations

import os

import torch
from torch import Tensor, nn

NAME = "weights.safetensors"


def named_tensors(model: nn.Module) -> dict[str, Tensor]:
    """Parameters and persistent buffers by name, each tensor once, in the model's order."""
    kept = model.state_dict(keep_vars=True)
    found: dict[str, Tensor] = {}
    seen: set[int] = set()
    for name, tensor in kept.items():
        if isinstance(tensor, Tensor) and id(tensor) not in seen:
            seen.add(id(tensor))
            found[name] = tensor
    return found


def save_weights(model: nn.Module, run_dir: str) -> str:
    """Writes `weights.safetensors` into `run_dir`; its path. `model` is the plain one. Raises OSError."""
    from safetensors.torch import save_file

    tensors, storages = {}, set()
    for name, tensor in named_tensors(model).items():
        plain = tensor.detach().cpu().contiguous()
        if plain.untyped_storage().data_ptr() in storages:
            plain = plain.clone()  # a view of another tensor, which the format has no words for
        storages.add(plain.untyped_storage().data_ptr())
        tensors[name] = plain
    path = os.path.join(run_dir, NAME)
    save_file(tensors, path + ".part", metadata={"format": "pt"})
    os.replace(path + ".part", path)
    return path


@torch.no_grad()
def load_weights(model: nn.Module, run_dir: str) -> None:
    """Puts the weights of `run_dir` into `model`, in place. Raises OSError, or ValueError where they do not fit."""
    from safetensors.torch import load_file

    loaded = load_file(os.path.join(run_dir, NAME))
    wanted = named_tensors(model)
    wrong = sorted(loaded.keys() ^ wanted.keys())
    wrong += [name for name in wanted.keys() & loaded.keys() if wanted[name].shape != loaded[name].shape]
    if wrong:
        raise ValueError(f"{NAME} in {run_dir} is not of this model: {', '.join(wrong[:5])}")
    for name, tensor in wanted.items():
        tensor.copy_(loaded[name])
