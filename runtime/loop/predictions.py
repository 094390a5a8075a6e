"""The files of a prediction: the part of each rank, and the one file made of them.

Model: a rank appends its outputs (float32) and the numbers of its samples (int64) as bytes to two files, and writes
beside them the number and the shape of the rows. `join` writes the header of the requested file and appends the bytes
of one rank after another, so that nothing is ever in memory whole;
checkpoint/tensor_file.py writes a `.safetensors`.

Contract: `.npz` (uncompressed) or `.safetensors`, with `output` of shape (n, …), float32, and `index`, int64: the
number of each sample in the source. It is written beside its place and renamed. Needs no torch.
"""

from __future__ import annotations

import json
import os
import shutil
import zipfile
from collections.abc import Sequence
from typing import IO

import numpy as np
from numpy.typing import NDArray

from dslc.runtime.checkpoint.tensor_file import Entry, writing

SUFFIXES = (".npz", ".safetensors")
_NAMES = {"output": ("<f4", "F32"), "index": ("<i8", "I64")}  # the names of their dtypes in numpy and in safetensors


class Part:
    """The file that one rank writes."""

    def __init__(self, run_dir: str, rank: int) -> None:
        self._stem = os.path.join(run_dir, f"part-{rank}")
        self._rows = 0
        self._shape: tuple[int, ...] | None = None

    def __enter__(self) -> Part:
        self._files = {name: open(f"{self._stem}.{name}", "wb") for name in _NAMES}  # noqa: SIM115
        return self

    def add(self, output: NDArray[np.generic], index: NDArray[np.generic]) -> None:
        """Appends one row of `output` for each of `index`. Raises ValueError if a row's shape differs from the earlier
        ones.
        """
        if self._shape is not None and self._shape != output.shape[1:]:
            raise ValueError(f"the model gives outputs of shape {output.shape[1:]} here, and gave {self._shape} before")
        self._shape = output.shape[1:]
        self._rows += len(index)
        for name, array in (("output", output), ("index", index)):
            self._files[name].write(np.ascontiguousarray(array, _NAMES[name][0]).data)

    def __exit__(self, *_: object) -> None:
        for file in self._files.values():
            file.close()
        with open(f"{self._stem}.json", "w", encoding="utf-8") as told:
            json.dump({"rows": self._rows, "shape": self._shape}, told)


def join(run_dir: str, ranks: int, path: str) -> tuple[int, ...]:
    """Joins the parts of all ranks into `path`; returns the shape of `output`. Raises OSError, or ValueError if the
    ranks' outputs differ in shape.
    """
    parts = []
    for rank in range(ranks):
        with open(os.path.join(run_dir, f"part-{rank}.json"), encoding="utf-8") as file:
            parts.append(json.load(file))
    shapes = {tuple(part["shape"]) for part in parts if part["rows"]}
    if len(shapes) > 1:
        raise ValueError(f"the ranks' outputs are of unequal shape: {sorted(shapes)}")
    rows = sum(part["rows"] for part in parts)
    shape = (rows, *(shapes.pop() if shapes else ()))
    wanted = {"output": shape, "index": (rows,)}
    files = {name: [os.path.join(run_dir, f"part-{rank}.{name}") for rank in range(ranks)] for name in _NAMES}
    (_write_npz if path.endswith(".npz") else _write_safetensors)(path, wanted, files)
    return shape


def _write_npz(path: str, shapes: dict[str, tuple[int, ...]], files: dict[str, list[str]]) -> None:
    with zipfile.ZipFile(path + ".part", "w", zipfile.ZIP_STORED) as archive:
        for name, shape in shapes.items():
            with archive.open(f"{name}.npy", "w", force_zip64=True) as entry:
                about = {"descr": _NAMES[name][0], "fortran_order": False, "shape": shape}
                np.lib.format.write_array_header_1_0(entry, about)
                _copy(files[name], entry)
    os.replace(path + ".part", path)


def _write_safetensors(path: str, shapes: dict[str, tuple[int, ...]], files: dict[str, list[str]]) -> None:
    entries = {name: Entry(dtype=_NAMES[name][1], shape=shape) for name, shape in shapes.items()}
    with writing(path, entries) as file:
        for name in shapes:
            _copy(files[name], file)


def _copy(sources: Sequence[str], target: IO[bytes]) -> None:
    for source in sources:
        with open(source, "rb") as file:
            shutil.copyfileobj(file, target, 1 << 20)
