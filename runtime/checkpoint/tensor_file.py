"""Writes safetensors files one tensor after another, so that no two tensors need be in memory.

The library of that name writes tensors that are all in memory; it cannot stream tensors that ranks gather one by one,
or that lie in pieces in other files. All files are read by the library (`safe_open`), or by
compiler/facts/weights_file.py, which needs no torch and reads the header alone.

Model: a safetensors file is the length of a header (8 bytes, little-endian), the header (JSON: for each name dtype,
shape, and the range of its bytes), and the bytes of one tensor after another
(https://github.com/huggingface/safetensors#format).

Contract: the file is whole or not there. What is written must be as long as the header says. Needs no torch.
"""

from __future__ import annotations

import contextlib
import itertools
import json
import math
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import BinaryIO

from dslc.compiler.facts.untrusted_files import atomic_write, recreate_file


@dataclass(frozen=True, kw_only=True)
class StoredTensor:
    dtype: str
    shape: tuple[int, ...]

    @property
    def bytes(self) -> int:
        bits = re.search(r"\d+", self.dtype)  # `F8_E4M3` has 8; BOOL is a byte
        return math.prod(self.shape) * (int(bits[0]) // 8 if bits else 1)


@contextlib.contextmanager
def writing(
    path: str, entries: Mapping[str, StoredTensor], metadata: Mapping[str, str] | None = None
) -> Iterator[BinaryIO]:
    """The file, to which the caller writes the bytes of each of `entries` in their order. Raises OSError."""
    head = _header(entries, metadata)
    with atomic_write(path) as part, open(recreate_file(part), "wb") as file:
        file.write(head)
        yield file
        bytes_written, expected_bytes = file.tell() - len(head), sum(entry.bytes for entry in entries.values())
        assert bytes_written == expected_bytes, (
            f"{bytes_written:,} bytes were written, and the header says {expected_bytes:,}"
        )


def _header(entries: Mapping[str, StoredTensor], metadata: Mapping[str, str] | None) -> bytes:
    ends = itertools.accumulate((entry.bytes for entry in entries.values()), initial=0)
    fields: dict[str, object] = {"__metadata__": dict(metadata)} if metadata else {}
    for (name, entry), place in zip(entries.items(), itertools.pairwise(ends), strict=True):
        fields[name] = {"dtype": entry.dtype, "shape": entry.shape, "data_offsets": place}
    header = json.dumps(fields, separators=(",", ":")).encode()
    header += b" " * (-len(header) % 8)
    return len(header).to_bytes(8, "little") + header
