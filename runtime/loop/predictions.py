"""The files of a prediction: the part of each rank, and the one file made of them.

Model: a rank appends its outputs and the numbers of its samples as bytes to files, one for each array. `join` writes
the header of the requested file and appends the bytes of one rank after another: nothing is ever in memory whole.

Contract: `.npz` (uncompressed) or `.safetensors`, with `output` of shape (n, …), or `output.NAME` for each tensor of a
structure, float32, or int64 for whole numbers; and `index`, int64: the number of each sample in the source. It is
written beside its place and renamed. Needs no torch.
"""

from __future__ import annotations

import json
import os
import shutil
import zipfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import IO, NamedTuple

import numpy as np
from numpy.typing import NDArray

from dslc.compiler.facts.untrusted_files import atomic_write, naming, replacing
from dslc.runtime.checkpoint.tensor_file import StoredTensor, writing

SUFFIXES = (".npz", ".safetensors")
_KINDS = {"float": ("<f4", "F32"), "whole": ("<i8", "I64")}  # the names of their dtypes in numpy and in safetensors
INDEX = "index"


@dataclass(frozen=True)
class PredictionRows:
    """An array of a prediction: the shape of one row, and a kind of `_KINDS`."""

    shape: tuple[int, ...]
    kind: str


class PredictionPart:
    """The files that one rank writes."""

    def __init__(self, run_dir: str, rank: int) -> None:
        self._stem = os.path.join(run_dir, f"part-{rank}")
        self._rows = 0
        self._arrays: dict[str, PredictionRows] = {}
        self._files: list[IO[bytes]] = []

    def __enter__(self) -> PredictionPart:
        return self

    def add(self, outputs: Mapping[str, NDArray[np.generic]], index: NDArray[np.generic]) -> None:
        """Appends a row of each output for each of `index`. Raises ValueError for names or shapes unlike before."""
        arrays = {**outputs, INDEX: index}
        rows = {name: PredictionRows(array.shape[1:], _kind(array)) for name, array in arrays.items()}
        if not self._arrays:
            self._arrays = rows
            self._files = [open(f"{self._stem}.{n}", "wb") for n, _ in enumerate(rows)]  # noqa: SIM115
        for name in (*rows, *self._arrays):
            now, previous = rows.get(name), self._arrays.get(name)
            if now != previous:
                raise ValueError(
                    f"`{name}` is {_text(now)} in this batch, and was {_text(previous)} before: a prediction needs one "
                    "shape, as of samples that are padded to one length"
                )
        self._rows += len(index)
        for file, (name, array) in zip(self._files, arrays.items(), strict=True):
            with naming(file.name):
                file.write(np.ascontiguousarray(array, _KINDS[rows[name].kind][0]).data)

    def __exit__(self, *_: object) -> None:
        for file in self._files:
            with naming(file.name):
                file.close()
        arrays = [(name, part.shape, part.kind) for name, part in self._arrays.items()]
        with replacing(f"{self._stem}.json") as record_file:
            json.dump({"rows": self._rows, "arrays": arrays}, record_file)


def _kind(array: NDArray[np.generic]) -> str:
    return "float" if np.issubdtype(array.dtype, np.floating) else "whole"


def _text(rows: PredictionRows | None) -> str:
    if rows is None:
        return "not there"
    return f"{'numbers' if rows.kind == 'float' else 'whole numbers'} of shape {rows.shape} for each sample"


def join(run_dir: str, ranks: int, path: str) -> dict[str, tuple[int, ...]]:
    """Joins all ranks' parts into `path`; returns the shapes. Raises OSError, or ValueError for unequal outputs."""
    parts: list[tuple[int, dict[str, PredictionRows]]] = []
    for rank in range(ranks):
        with open(os.path.join(run_dir, f"part-{rank}.json"), encoding="utf-8") as file:
            part = json.load(file)
        parts.append((part["rows"], {name: PredictionRows(tuple(shape), kind) for name, shape, kind in part["arrays"]}))
    rows, full = sum(rows for rows, _ in parts), [(rank, part) for rank, (rows, part) in enumerate(parts) if rows]
    arrays = full[0][1] if full else {"output": PredictionRows((), "float"), INDEX: PredictionRows((), "whole")}
    for rank, other_arrays in full:
        if other_arrays != arrays:
            name = next(name for name in (*arrays, *other_arrays) if arrays.get(name) != other_arrays.get(name))
            kind_here, kind_there = _text(other_arrays.get(name)), _text(arrays.get(name))
            raise ValueError(f"`{name}` is {kind_here} on rank {rank}, and {kind_there} on rank {full[0][0]}")
    joined_arrays = [
        PredictionArray(
            name, (rows, *array.shape), array.kind, [os.path.join(run_dir, f"part-{rank}.{n}") for rank, _ in full]
        )
        for n, (name, array) in enumerate(arrays.items())
    ]
    (_write_npz if path.endswith(".npz") else _write_safetensors)(path, joined_arrays)
    return {array.name: array.shape for array in joined_arrays if array.name != INDEX}


class PredictionArray(NamedTuple):
    """An array of the whole prediction, and the files that hold its rows."""

    name: str
    shape: tuple[int, ...]
    kind: str
    files: list[str]


def _write_npz(path: str, arrays: Sequence[PredictionArray]) -> None:
    with atomic_write(path) as part, zipfile.ZipFile(part, "w", zipfile.ZIP_STORED) as archive:
        for array in arrays:
            with archive.open(f"{array.name}.npy", "w", force_zip64=True) as entry:
                about = {"descr": _KINDS[array.kind][0], "fortran_order": False, "shape": array.shape}
                np.lib.format.write_array_header_1_0(entry, about)
                _copy(array.files, entry)


def _write_safetensors(path: str, arrays: Sequence[PredictionArray]) -> None:
    with writing(
        path, {array.name: StoredTensor(dtype=_KINDS[array.kind][1], shape=array.shape) for array in arrays}
    ) as file:
        for tensor in arrays:
            _copy(tensor.files, file)


def _copy(sources: Sequence[str], target: IO[bytes]) -> None:
    for source in sources:
        with open(source, "rb") as file:
            shutil.copyfileobj(file, target, 1 << 20)
