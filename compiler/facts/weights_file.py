"""Reads the header of a safetensors file: names, dtypes and shapes, without torch and without reading a number.

The format (github.com/huggingface/safetensors): eight bytes, little-endian, with the length of the header; the header,
a JSON object of `{"dtype", "shape", "data_offsets"}` by name, and `__metadata__`; then the numbers. No other file takes
a header apart: tensors are read by the safetensors library, and written by runtime/checkpoint/tensor_file.py.

Contract: the file need not be trusted. A header that is longer than `HEADER.most`, breaks the format or promises more
than the file holds is Unreadable.
"""

from __future__ import annotations

import json
import os

from dslc.dsl.bounds import HEADER
from dslc.dsl.files import open_file
from dslc.dsl.record import Record, record
from dslc.dsl.words import plural

NAME = "weights.safetensors"  # in a run directory


class Unreadable(Exception):
    """The file does not exist, or is not a safetensors file."""


@record
class TensorEntry(Record):
    dtype: str  # F32, BF16, I64, …
    shape: tuple[int, ...]


def file_of(path: str) -> str:
    """Returns the file that a job's `weights` names: itself, or the weights in a folder."""
    return os.path.join(path, NAME) if os.path.isdir(path) else path


def entries(path: str) -> dict[str, TensorEntry]:
    """Returns the tensors of a safetensors file by name. Raises Unreadable."""
    try:
        with open_file(path) as file:
            size = os.fstat(file.fileno()).st_size
            length = int.from_bytes(file.read(8), "little")
            if not 2 <= length <= size - 8:
                raise Unreadable(f"{path} is not a safetensors file")
            if length > HEADER.most:
                raise Unreadable(f"{path} has a header of {length:,} bytes: {HEADER.most:,} are the most")
            header = json.loads(file.read(length))
            found = {name: _entry(entry) for name, entry in header.items() if name != "__metadata__"}
            end = max((_whole(entry["data_offsets"][1]) for name, entry in header.items() if name in found), default=0)
    except OSError as error:
        raise Unreadable(f"{path}: {error.strerror}" if os.path.exists(path) else f"there is no {path}") from error
    except (ValueError, KeyError, TypeError, AttributeError, IndexError, RecursionError) as error:
        raise Unreadable(f"{path} is not a safetensors file") from error
    if size < 8 + length + end:
        raise Unreadable(f"{path} is cut off: it has {plural(size, 'byte')} of {8 + length + end:,}")
    return found


def _entry(entry: object) -> TensorEntry:
    """Returns one tensor of the header. Raises ValueError, TypeError or KeyError if it breaks the format."""
    if not isinstance(entry, dict) or not isinstance(entry["dtype"], str):
        raise ValueError("a tensor has a dtype")
    if not isinstance(entry["shape"], list):
        raise ValueError("a tensor has a shape")
    return TensorEntry(dtype=entry["dtype"], shape=tuple(map(_whole, entry["shape"])))


def _whole(number: object) -> int:
    if not isinstance(number, int) or not 0 <= number < 2**63:
        raise ValueError("sizes and places are whole numbers of 64 bits")
    return number
