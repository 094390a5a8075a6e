"""`parquet` and `datasets`: columns of tables, read a block at a time or mapped.

Model: tables.py opens the tables and decides on the kinds of columns; this module makes batches of rows. A block of a
Parquet file, a run of row groups, is read at the first use of one of its rows. As many blocks are held as the sampler
shuffles together, and one more. Data sets of `datasets` are Arrow files, which that library maps into memory.

Limits: worker processes decode images, and each worker reads the blocks it needs for itself.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from dslc.compiler.ir.program import DataStep
from dslc.compiler.trace.sources.stream_protocol import Shards
from dslc.runtime.data.samples import ConcatenatedSamples, Samples, SourceError
from dslc.runtime.data.sources import tables
from dslc.runtime.data.streams import stream_samples

if TYPE_CHECKING:
    import pyarrow as pa
    from PIL import Image


class Rows:
    """Batches of rows: `gather` returns the rows at some indices as an Arrow table; messages have `name`."""

    def __init__(self, count: int, gather: Callable[[Tensor], pa.Table], step: DataStep, name: str) -> None:
        self.count, self.gather, self.step, self.name = count, gather, step, name
        self.by_process = _has_pictures(step)
        self.is_structure = False

    def __len__(self) -> int:
        return self.count

    def batch(self, indices: Tensor, epoch: int = 0) -> tuple[Tensor, Tensor]:
        return values(self.step, self.gather(indices), self.name)

    def picture(self, index: int) -> tuple[Image.Image, Tensor]:
        found, table = self.step.arguments, self.gather(torch.tensor([index]))
        (inputs, targets), (mode, kind), (_, shape) = found["columns"], found["kinds"], found["shapes"]
        try:
            image = tables.picture_of(table.column(inputs[0]), mode)
            values = tables.values_of(table, targets, kind, shape, found["size"])
        except Exception as error:  # Pillow raises any exception for a damaged picture
            raise SourceError(f"{self.step.line}: {self.name}: {error}") from error
        return image, torch.from_numpy(values)[0]


def values(step: DataStep, table: object, name: str) -> tuple[Tensor, Tensor]:
    """Returns the rows of a table as a batch; `name` is the source's in messages."""
    found, made = step.arguments, []
    for columns, kind, shape in zip(found["columns"], found["kinds"], found["shapes"], strict=True):
        try:
            read = tables.values_of(table, columns, kind, shape, found["size"])
        except ValueError as error:
            raise SourceError(f"{step.line}: {name}: {error}") from error
        made.append(torch.from_numpy(read))
    return made[0], made[1]


def _has_pictures(step: DataStep) -> bool:
    return any(kind in ("L", "RGB") for kind in step.arguments["kinds"])


def _columns(step: DataStep) -> list[str]:
    input, target = step.arguments["columns"]
    return list(dict.fromkeys((*input, *target)))


class ParquetFiles(ConcatenatedSamples):
    """The blocks of all files, one after another."""

    def __init__(self, step: DataStep) -> None:
        self.files, groups, counts = (step.arguments[name] for name in ("files", "groups", "blocks"))
        self.reads = 0  # blocks read so far

        def opened(n: int) -> Rows:
            self.reads += 1
            table = _read_row_groups(self.files[n], groups[n], counts[n], step)
            return Rows(len(table), lambda indices: table.take(indices.numpy()), step, self.files[n])

        keep = step.arguments["window"] + 1
        super().__init__(counts, opened, keep=keep, by_process=_has_pictures(step))

    def place(self, indices: Tensor) -> list[str]:
        return [self.files[part] for part in self.part_of(indices).tolist()]


def _read_row_groups(file: str, groups: tuple[int, int], planned: int, step: DataStep) -> pa.Table:
    import pyarrow.parquet as pq

    start, count = groups
    columns = _columns(step)
    # Without threads of its own: ranks and their workers share the cores already.
    with pq.ParquetFile(file, memory_map=True) as opened:
        table = opened.read_row_groups(range(start, start + count), columns=columns, use_threads=False)
    if len(table) != planned:
        raise SourceError(f"{step.line}: {file} is not the file that the plan was made for")
    return table.combine_chunks()


def datasets(step: DataStep) -> Samples | tuple[Samples, Samples]:
    import datasets as library

    library.disable_progress_bars()
    columns = _columns(step)
    try:
        train, validation = tables.open_datasets(step.arguments)
    except tables.TableFault as fault:
        raise SourceError(f"{step.line}: {fault}") from fault

    name = f"the data set {step.arguments['path']}"

    def concatenate_rows(rows: list[object]) -> tuple[Tensor, Tensor]:
        import pyarrow as pa

        return values(step, pa.concat_tables(rows), name)

    def samples(made: library.Dataset, part: str) -> Samples:
        rows = made.select_columns(columns).with_format("arrow")
        if step.stream is not None:
            return stream_samples(step, Shards(rows), part, concatenate_rows)
        return Rows(len(rows), lambda indices: rows[indices.tolist()], step, name)

    if validation is None:
        return samples(train, "train")
    return samples(train, "train"), samples(validation, "validation")
