"""Tensors that the modules of a network keep as plain attributes, which a recording takes as constants.

Contract: a constant has the same numbers in each step. One that shares memory with a parameter or buffer, or that has a
gradient, is none: stages would go on with the numbers that it had when the network was made.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from dslc.compiler.trace.private_torch import FakeTensorMode, own_buffers, own_parameters, storage_identity
from dslc.compiler.trace.structures import attribute_tensors

ATTRIBUTE = "is a plain attribute: a buffer of a layer (`register_buffer`) may be changed by that layer"


class Attributes:
    """The attributes of a module before its forward pass is recorded."""

    def __init__(self, model: nn.Module, fake: FakeTensorMode) -> None:
        """`fake` is the mode of the recording, in which a tensor with numbers has another that stands for it."""
        self._kept: list[Tensor] = []  # alive, so that no other tensor has their identity
        self._names: dict[int, str] = {}  # by a tensor, and by its memory
        self._memory: dict[int, str] = {}
        self._faults: dict[int, str] = {}
        owners: dict[int, str] = {}
        for path, module in model.named_modules():
            for name, tensor in (*own_parameters(module).items(), *own_buffers(module).items()):
                if tensor is not None:
                    self._kept.append(tensor)
                    owners.setdefault(storage_identity(tensor), _full(path, name))
        own = {id(tensor) for tensor in self._kept}
        for path, module in model.named_modules():
            for name, tensor in attribute_tensors(module):
                if id(tensor) in own:
                    continue
                full = _full(path, name)
                self._kept.append(tensor)
                self._names[id(tensor)] = full
                attribute = f"`{full}`, a plain attribute,"
                if tensor.layout is not torch.strided:
                    self._faults[id(tensor)] = f"{attribute} is no array of numbers: make it in `forward`, of buffers"
                    continue
                owner = owners.get(storage_identity(tensor))
                if owner is not None:
                    self._faults[id(tensor)] = f"{attribute} is a view of `{owner}`: take it in `forward`"
                elif tensor.requires_grad:
                    self._faults[id(tensor)] = f"{attribute} has a gradient: compute it in `forward`"
                else:
                    self._kept.append(fake.from_tensor(tensor))
                    self._memory |= {storage_identity(each): full for each in self._kept[-2:]}

    def name_of(self, tensor: Tensor) -> str:
        """Returns the name of the attribute whose memory this is; "" for none."""
        return self._memory.get(storage_identity(tensor), "")

    def fault(self, tensor: Tensor, model: nn.Module) -> str:
        """Returns why a tensor that no torch function has returned is no constant; "" if it is one."""
        if id(tensor) in self._names:
            return self._faults.get(id(tensor), "")
        if getattr(tensor, "fake_mode", None) is None:
            return ""
        for path, module in model.named_modules():
            for name, each in attribute_tensors(module):
                if each is tensor:
                    return f"it uses the tensor of an earlier forward pass that it keeps in `{_full(path, name)}`"
        return (
            f"it uses a tensor of shape {tuple(tensor.shape)} that no torch function has returned, and no module keeps"
        )


def _full(path: str, name: str) -> str:
    return f"{path}.{name}" if path else name
