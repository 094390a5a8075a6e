"""Finds the files that `model.weights` names, and reads the headers of safetensors files: names, dtypes and shapes,
without torch and without reading a number.

Model: a path is a file, the index of a sharded model (`model.safetensors.index.json`, as `save_pretrained` writes it),
or a folder. A folder holds one of `NAMES`, looked for in this order. What is no safetensors file is one of
`torch.save`, which only torch can read.

The format (github.com/huggingface/safetensors): eight bytes, little-endian, with the length of the header; the header,
a JSON object of `{"dtype", "shape", "data_offsets"}` by name, and `__metadata__`; then the numbers. No other file takes
a header apart: tensors are read by the safetensors library, and written by runtime/checkpoint/tensor_file.py.

Contract: the files need not be trusted. A header is Unreadable if it is longer than `HEADER.most`, breaks the format or
promises more than the file holds. An index that names files outside of its folder is Unreadable too.
"""

from __future__ import annotations

import json
import os

from dslc.compiler.ir.facts import TensorEntry
from dslc.dsl.bounds import HEADER, SHARDS, TENSORS
from dslc.dsl.files import open_file, read_bytes
from dslc.dsl.record import Record, record
from dslc.dsl.words import plural

NAME = "weights.safetensors"  # in a run directory
INDEX = ".index.json"
NAMES = (NAME, "model.safetensors", f"model.safetensors{INDEX}", "pytorch_model.bin", f"pytorch_model.bin{INDEX}")


class Unreadable(Exception):
    """The file does not exist, or is not a safetensors file."""


@record
class WeightFiles(Record):
    """The files of one model: `files` hold tensors, and `index` names them ("" without an index)."""

    path: str  # the file or the index, as messages name it
    files: tuple[str, ...]
    index: str = ""

    @property
    def torchs(self) -> bool:
        """True if `torch.save` wrote them, so that only torch can read them."""
        return any(not file.endswith(".safetensors") for file in self.files)


def files_of(path: str) -> WeightFiles:
    """Returns the files that a job's `weights` names. Raises Unreadable if there are none."""
    if os.path.isdir(path):
        inside = [os.path.join(path, name) for name in NAMES]
        found = next((each for each in inside if os.path.isfile(each)), None)
        if found is None:
            raise Unreadable(f"{path} holds no weights: no {', '.join(NAMES[:3])} or {NAMES[3]}")
        path = found
    if not os.path.isfile(path):
        raise Unreadable(f"there is no {path}")
    if not path.endswith(INDEX):
        return WeightFiles(path=path, files=(path,))
    names = tuple(dict.fromkeys(_map_of(path).values()))
    if len(names) > SHARDS.most:
        raise Unreadable(f"{path} names {len(names):,} files: {SHARDS.most:,} are the most")
    files = tuple(os.path.join(os.path.dirname(path), name) for name in names)
    missing = [file for file in files if not os.path.isfile(file)]
    if missing:
        raise Unreadable(f"there is no {missing[0]}, which {path} names")
    return WeightFiles(path=path, files=files, index=path)


def entries_of(weights: WeightFiles) -> dict[str, TensorEntry]:
    """Returns the tensors of all the files, which are safetensors files, by name. Raises Unreadable."""
    found: dict[str, TensorEntry] = {}
    for file in weights.files:
        for name, entry in entries(file).items():
            if name in found:
                raise Unreadable(f"two files that {weights.path} names hold `{name}`")
            found[name] = entry
        if len(found) > TENSORS.most:
            raise Unreadable(f"{weights.path} leads to more than {TENSORS.most:,} tensors, which are the most")
    if weights.index:
        for name, file in _map_of(weights.index).items():
            if name not in found:
                raise Unreadable(f"{file} does not hold `{name}`, which {weights.index} looks for there")
    return found


def _map_of(index: str) -> dict[str, str]:
    """Returns the file of each tensor that an index names. Raises Unreadable."""
    try:
        told = json.loads(read_bytes(index, HEADER.most).decode())
        places = told["weight_map"]
        plain = all(
            isinstance(name, str) and os.path.basename(name) == name and name not in ("", ".", "..")
            for name in places.values()
        )
        if not places or not plain:
            raise ValueError("it names no files of its folder")
    except OSError as error:
        raise Unreadable(f"{index}: {error.strerror}") from error
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise Unreadable(f"{index} is not the index of a sharded model") from error
    return dict(places)


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
            end = max(
                (_checked_size(entry["data_offsets"][1]) for name, entry in header.items() if name in found), default=0
            )
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
    return TensorEntry(dtype=entry["dtype"], shape=tuple(map(_checked_size, entry["shape"])))


def _checked_size(number: object) -> int:
    if not isinstance(number, int) or not 0 <= number < 2**63:
        raise ValueError("sizes and places are whole numbers of 64 bits")
    return number
