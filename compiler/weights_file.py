"""What the header of a safetensors file says: names, dtypes and shapes, without torch and without reading a number.

The format (github.com/huggingface/safetensors): eight bytes, little-endian, with the length of the header; the header,
a JSON object of `{"dtype", "shape", "data_offsets"}` by name, and `__metadata__`; then the numbers.
"""

from __future__ import annotations

import json
import os
from dataclasses import dataclass

from dslc.dsl.describe import plural

NAME = "weights.safetensors"  # of a run directory
_LONGEST_HEADER = 100_000_000  # bytes; what the format's own library allows


class Unreadable(Exception):
    """There is no such file, or it is not what its name says."""


@dataclass(frozen=True, kw_only=True)
class TensorEntry:
    dtype: str  # F32, BF16, I64, …
    shape: tuple[int, ...]


def file_of(path: str) -> str:
    """The file that a job's `weights` names: itself, or the weights in a folder."""
    return os.path.join(path, NAME) if os.path.isdir(path) else path


def entries(path: str) -> dict[str, TensorEntry]:
    """The tensors of a safetensors file by name. Raises Unreadable."""
    try:
        with open(path, "rb") as file:
            size = os.fstat(file.fileno()).st_size
            length = int.from_bytes(file.read(8), "little")
            if not 2 <= length <= min(size - 8, _LONGEST_HEADER):
                raise Unreadable(f"{path} is not a safetensors file")
            header = json.loads(file.read(length))
            found = {
                name: TensorEntry(dtype=entry["dtype"], shape=tuple(entry["shape"]))
                for name, entry in header.items()
                if name != "__metadata__"
            }
            end = max((entry["data_offsets"][1] for name, entry in header.items() if name in found), default=0)
    except OSError as error:
        raise Unreadable(f"{path}: {error.strerror}" if os.path.exists(path) else f"there is no {path}") from error
    except (ValueError, KeyError, TypeError, AttributeError, IndexError) as error:
        raise Unreadable(f"{path} is not a safetensors file") from error
    if size < 8 + length + end:
        raise Unreadable(f"{path} is cut off: it has {plural(size, 'byte')} of {8 + length + end:,}")
    return found
