"""Unpickles plain values, tensors, and the records of torch's distributed checkpoints, and runs nothing else.

Model: a pickle may name any function of any module and have it called. Torch makes a rank read the `.metadata` of a
checkpoint, which anyone who can write to its folder may have forged. It also makes a rank read the objects that ranks
send one another (`all_gather_object` and its like). `PlainUnpickler` resolves only the names listed here: plain values,
exceptions of Python's own, numbers' types, tensors, and the dataclasses of `torch.distributed.checkpoint`
(https://docs.python.org/3/library/pickle.html#restricting-globals).

Contract: `loads` and `load` raise pickle.UnpicklingError for a pickle that names anything else. `guard()`, called in
each rank before its process group is opened, makes torch's object collectives do so too.

Limits: a pickle may still ask for more memory than there is. A user's own code can send plain values and tensors
between ranks, not instances of its own classes.
"""

from __future__ import annotations

import builtins
import dataclasses
import enum
import io
import pickle
import sys
from typing import Any, BinaryIO

import torch

from dslc.compiler.trace.private_torch import PICKLED_STORAGE, PICKLED_TENSORS, unpickle_objects_with

_CHECKPOINTS = "torch.distributed.checkpoint."
_PLAIN = {
    "builtins": {"bytearray", "complex", "frozenset", "range", "set", "slice"},
    "collections": {"OrderedDict", "deque"},
    "pathlib": {"PosixPath", "PurePosixPath", "WindowsPath", "PureWindowsPath"},
    "torch": {"Size", "device"},
    **PICKLED_TENSORS,
    "torch.distributed.checkpoint.api": {"CheckpointException"},
    "traceback": {"FrameSummary", "StackSummary"},  # of an exception from another rank
}


class PlainUnpickler(pickle.Unpickler):
    """A pickle.Unpickler that resolves only the names in the module's docstring."""

    def find_class(self, module: str, name: str) -> object:
        if (module, name) == PICKLED_STORAGE:
            return _storage
        module = "builtins" if module == "__builtin__" else module  # its name in pickles of protocol 2 and below
        if name in _PLAIN.get(module, ()) or _is_data(module, name):
            return super().find_class(module, name)
        raise pickle.UnpicklingError(f"it names {module}.{name}, which could run code")


def _is_data(module: str, name: str) -> bool:
    """Returns True for exceptions of Python's own, torch's dtypes, and the dataclasses and enums of checkpoints."""
    if module == "builtins":
        found = vars(builtins).get(name)
        return isinstance(found, type) and issubclass(found, Exception)
    if module == "torch":
        return isinstance(vars(torch).get(name), torch.dtype | torch.layout | torch.memory_format)
    if module.startswith(_CHECKPOINTS) and module in sys.modules:
        found = vars(sys.modules[module]).get(name)
        return isinstance(found, type) and (dataclasses.is_dataclass(found) or issubclass(found, enum.Enum))
    return False


def _storage(content: bytes) -> object:
    """Returns the storage of a tensor that was sent. Torch's own function would load a pickle of any kind."""
    return torch.load(io.BytesIO(content), weights_only=True)


def load(file: BinaryIO) -> Any:
    """Returns the plain value that was pickled. Raises pickle.UnpicklingError if it is none."""
    return PlainUnpickler(file).load()


def loads(content: bytes) -> Any:
    return load(io.BytesIO(content))


def guard() -> None:
    """Makes torch's object collectives unpickle only plain values, in this process."""
    unpickle_objects_with(PlainUnpickler)
