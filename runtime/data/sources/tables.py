"""Opens tables by a library (Parquet files by pyarrow, data sets by Hugging Face `datasets`) and says what a column
holds.

Model: the compiler, in a child process, and the runtime open a table by the same functions, and see the same rows and
shapes. This module imports no torch, and the libraries only when it is called. A column holds numbers, lists of numbers
of one shape, or pictures: encoded bytes, alone or with a path as `datasets` stores them.

Contract: facts come from the footers of Parquet files and from the first row. `TableFault` explains a fault as a
diagnostic does.

Limits: only `dslc run` downloads a data set. All other commands use the library's cache and nothing else. Streaming
data sets, whose length is not known, are refused.
"""

from __future__ import annotations

import contextlib
import io
import os
from collections.abc import Iterable, Iterator, Mapping
from typing import TYPE_CHECKING, Any, TypeAlias

import numpy as np
from numpy.typing import NDArray

from dslc.compiler.facts.file_patterns import TooManyEntriesError, files_matching
from dslc.compiler.ir.steps import Arguments
from dslc.compiler.trace.sources.stream_protocol import Shards
from dslc.runtime.data.images import decoded, opened

if TYPE_CHECKING:
    import datasets
    import pyarrow as pa
    import pyarrow.parquet as pq
    from PIL import Image

Numbers: TypeAlias = NDArray[np.float32 | np.int64]
SourceFields: TypeAlias = dict[str, Any]  # of SourceFacts

BLOCK = 8 << 20  # bytes of the two columns, unpacked, that are read as one block; a row group may have more
WINDOW = 64 << 20  # bytes of the blocks that are shuffled together, and so held at once


class TableFault(Exception):
    """Why a table cannot be used. `code` is the code of the diagnostic."""

    def __init__(self, message: str, help: str, code: str = "E0311") -> None:
        super().__init__(message)
        self.help = help
        self.code = code

    def facts(self) -> dict[str, object]:
        return {"missing": str(self), "help": self.help, "code": self.code}


# ------------------------------------------------------------------------------------------------------ columns


def column_fact(name: str, column: pa.Array, size: int | None) -> SourceFields:
    """Returns `kind` (float32, int64, or the mode of a picture) and `shape` of a sample, from a column of one row."""
    import pyarrow.types as t

    column = _plain(column)
    kind: pa.DataType = column.type
    value: Any = column[0].as_py()
    if value is None:
        raise TableFault(f"column `{name}` has no value in its first row", "rows without gaps")
    if t.is_struct(kind) and kind.get_field_index("bytes") >= 0:
        return _picture_fact(name, value["bytes"], value.get("path"), size)
    if t.is_binary(kind) or t.is_large_binary(kind) or t.is_binary_view(kind):
        return _picture_fact(name, value, None, size)
    shape: list[int] = []
    while t.is_list(kind) or t.is_large_list(kind) or t.is_fixed_size_list(kind):
        shape.append(len(value))
        if not value:
            raise TableFault(f"column `{name}` has an empty list in its first row", "lists of one length")
        kind, value = kind.value_type, value[0]
    if t.is_floating(kind):
        return {"kind": "float32", "shape": shape}
    if t.is_integer(kind) or t.is_boolean(kind):
        return {"kind": "int64", "shape": shape}
    if t.is_string(kind) or t.is_large_string(kind) or t.is_string_view(kind):
        raise TableFault(f"column `{name}` holds text", "a model takes numbers: tokens in lists, or `dslc tokens`")
    raise TableFault(f"column `{name}` holds {kind}", "numbers, lists of numbers of one shape, or pictures")


def _picture_fact(name: str, data: bytes | None, path: str | None, size: int | None) -> dict[str, object]:
    from PIL import Image, UnidentifiedImageError

    try:
        with Image.open(io.BytesIO(data) if data is not None else path) as image:  # type: ignore[arg-type]
            mode = "L" if image.mode in ("1", "L") and size is None else "RGB"
            width, height = image.size if size is None else (size, size)
    except (UnidentifiedImageError, OSError, AttributeError) as error:
        raise TableFault(f"column `{name}` holds bytes that are not a picture", f"{error}") from error
    return {"kind": mode, "shape": [1 if mode == "L" else 3, height, width]}


def _plain(column: pa.Array | pa.ChunkedArray) -> pa.Array:
    """Returns one array, of the storage type if it is of an extension type."""
    import pyarrow as pa

    if isinstance(column, pa.ChunkedArray):
        if column.num_chunks == 1:
            column = column.chunk(0)
        elif isinstance(column.type, pa.ExtensionType):
            column = pa.chunked_array([chunk.storage for chunk in column.chunks], column.type.storage_type)
            column = column.combine_chunks()
        else:
            column = column.combine_chunks()
    return column.storage if isinstance(column, pa.ExtensionArray) else column


def column_values(column: pa.Array, kind: str, shape: tuple[int, ...], size: int | None) -> Numbers:
    """Returns a column as an array (n, *shape) of float32 or int64. Raises ValueError for unequal shapes."""
    import pyarrow as pa
    import pyarrow.compute as pc

    column = _plain(column)
    rows = len(column)
    if column.null_count:
        raise ValueError("a row has no value")
    if kind in ("L", "RGB"):
        return _pictures(column, kind, shape, size)
    for length in shape:
        if column.null_count:
            raise ValueError("a list has no value")
        if not pa.types.is_fixed_size_list(column.type):
            lengths = pc.min_max(pc.list_value_length(column))
            if len(column) and (lengths["min"].as_py(), lengths["max"].as_py()) != (length, length):
                raise ValueError(f"lists of {lengths['min']} to {lengths['max']}, and the first row's holds {length}")
        column = _plain(column.flatten())
    if column.null_count:
        raise ValueError("a number is missing")
    values = column.to_numpy(zero_copy_only=False)
    return np.array(values, kind).reshape(rows, *shape)


def _pictures(column: pa.Array, mode: str, shape: tuple[int, ...], size: int | None) -> Numbers:
    made = np.empty((len(column), *shape), np.float32)
    for n, value in enumerate(column.to_pylist()):
        pixels = decoded(_stored(value), mode, size)
        if pixels.shape != shape:
            raise ValueError(
                f"a picture of {_size_text(pixels.shape)}, and the first is {_size_text(shape)}: `size = …` fits them"
            )
        made[n] = pixels
    return made


def picture_of(column: pa.Array, mode: str) -> Image.Image:
    """Returns the picture (of Pillow) in the first row of a column. Raises ValueError if it has none, and as Pillow."""
    value = _plain(column)[0].as_py()
    if value is None:
        raise ValueError("a row has no value")
    return opened(_stored(value), mode)


def _stored(value: bytes | dict[str, Any]) -> io.BytesIO | str:
    """Returns the file of a picture: encoded bytes, or a path as `datasets` stores it."""
    data, path = (value["bytes"], value.get("path")) if isinstance(value, dict) else (value, "")
    return io.BytesIO(data) if data is not None else str(path)


def _size_text(shape: tuple[int, ...]) -> str:
    return f"{shape[1]} x {shape[2]}"


Columns = tuple[str, ...]


def _facts_of(table: pa.Table, input: Columns, target: Columns, size: int | None, classes: int | None) -> SourceFields:
    """Returns the facts of a table with one row."""
    sides = [_side_by_side(table, names, size) for names in (input, target)]
    tensors = [{"shape": side["shape"], "dtype": "int64" if side["kind"] == "int64" else "float32"} for side in sides]
    layout = {
        "columns": (input, target),
        "kinds": tuple(side["kind"] for side in sides),
        "shapes": tuple(tuple(side["shape"]) for side in sides),
    }
    return {"input": tensors[0], "target": tensors[1], "classes": classes, "found": layout}


def _side_by_side(table: pa.Table, names: Columns, size: int | None) -> SourceFields:
    """Returns the fact of one column, or of several of one number each, which make a list."""
    facts = [column_fact(name, table.column(name), size) for name in names]
    if len(facts) == 1:
        return facts[0]
    for name, fact in zip(names, facts, strict=True):
        if fact["shape"]:
            raise TableFault(
                f"column `{name}` holds more than a number, and cannot be combined with others", "a column alone"
            )
    return {"kind": "float32" if any(f["kind"] == "float32" for f in facts) else "int64", "shape": [len(facts)]}


def values_of(table: pa.Table, names: Columns, kind: str, shape: tuple[int, ...], size: int | None) -> Numbers:
    """Returns columns as one array. Raises ValueError as `column_values` does, with the column's name."""
    made = []
    for name in names:
        try:
            made.append(column_values(table.column(name), kind, shape if len(names) == 1 else (), size))
        except Exception as error:  # Pillow raises any exception for a damaged picture
            raise ValueError(f"column `{name}`: {error}") from error
    return made[0] if len(names) == 1 else np.stack(made, 1)


# ------------------------------------------------------------------------------------------------------ Parquet


def parquet_facts(pattern: str, input: Columns, target: Columns, size: int | None) -> SourceFields:
    """Returns the fields of SourceFacts. Raises TableFault."""
    try:
        import pyarrow as pa
        import pyarrow.parquet as pq
    except ImportError as error:
        raise TableFault(
            f"`parquet` needs pyarrow: {error}", "`pip install 'dslc[parquet]'` installs it", "E0803"
        ) from error
    files = _files_of(pattern)
    if not files:
        raise TableFault(f"no file matches {pattern}", "pandas' `frame.to_parquet(FILE)` writes one", "E0309")
    types: dict[str, pa.DataType] = {}
    first: pa.Table = None
    blocks: list[tuple[str, int, int, int, int]] = []  # file, first group, groups, rows, bytes
    for file in files:
        try:
            with pq.ParquetFile(file) as parquet:
                _hold_columns(file, files[0], parquet.schema_arrow, (*input, *target), types)
                blocks += _blocks(file, parquet.metadata, (*input, *target))
                if first is None and parquet.metadata.num_rows:
                    batches = parquet.iter_batches(batch_size=1, columns=list(types), use_threads=False)
                    first = pa.Table.from_batches([next(batches)])
        except (OSError, pa.ArrowException) as error:
            raise TableFault(f"{file} is not a readable Parquet file", str(error).split("\n")[0]) from error
    if first is None:
        raise TableFault(f"{pattern} holds no rows", "files with rows in them")
    facts = _facts_of(first, input, target, size, None)
    largest = max(held for *_, held in blocks)
    facts["samples"] = sum(rows for *_, rows, _ in blocks)
    facts["found"] |= {
        "files": tuple(file for file, *_ in blocks),
        "groups": tuple((start, count) for _, start, count, _, _ in blocks),
        "blocks": tuple(rows for *_, rows, _ in blocks),
        "window": max(1, min(WINDOW // max(1, largest), len(blocks))),
    }
    return facts


def _files_of(pattern: str) -> list[str]:
    """Returns the files that match a pattern. Raises TableFault if one is a device or a pipe, which may never end."""
    try:
        files = files_matching(pattern)
    except TooManyEntriesError as error:
        raise TableFault(f"{pattern} cannot be looked up: {error}", "a pattern with fewer `*` for folders") from error
    for file in files:
        if os.path.exists(file) and not (os.path.isfile(file) or os.path.isdir(file)):
            raise TableFault(f"{file} is a device or a pipe, not a file", "regular files")
    return files


def _hold_columns(file: str, before: str, schema: pa.Schema, columns: Columns, types: dict[str, pa.DataType]) -> None:
    for name in columns:
        if name not in schema.names:
            raise TableFault(f"{file} has no column `{name}`", f"it has {_listed(schema.names)}")
        kind = schema.field(name).type
        if types.setdefault(name, kind) != kind:
            raise TableFault(
                f"column `{name}` holds {kind} in {file}, and {types[name]} in {before}", "one type in all files"
            )


def _blocks(file: str, metadata: pq.FileMetaData, columns: Columns) -> list[tuple[str, int, int, int, int]]:
    """Returns consecutive row groups, together as many as fit into a block."""
    made: list[tuple[str, int, int, int, int]] = []
    wanted = [
        n for n in range(metadata.num_columns) if metadata.schema.column(n).path.split(".")[0] in columns
    ]  # column names may hold dots themselves; then only a size is too small
    for n in range(metadata.num_row_groups):
        group = metadata.row_group(n)
        size = sum(group.column(c).total_uncompressed_size for c in wanted)
        if made and made[-1][4] + size <= BLOCK:
            _, start, count, rows, held = made.pop()
            made.append((file, start, count + 1, rows + group.num_rows, held + size))
        else:
            made.append((file, n, 1, group.num_rows, size))
    return made


def _listed(names: Iterable[str]) -> str:
    return ", ".join(f"`{name}`" for name in list(names)[:12]) or "none"


# ----------------------------------------------------------------------------------------- Hugging Face datasets

_HELD_OUT = ("validation", "val", "valid", "dev", "test")


def open_datasets(arguments: Arguments, *, fetch: bool = False) -> tuple[datasets.Dataset, datasets.Dataset | None]:
    """Returns the data set to train on, and the one held out or None; `fetch` downloads a missing one, which is looked
    for without the network first. Raises TableFault.
    """
    try:
        import datasets
    except ImportError as error:
        raise TableFault(
            f"`datasets` needs the library of that name: {error}", "`pip install 'dslc[datasets]'` installs it", "E0803"
        ) from error
    path, given = arguments["path"], dict(arguments["arguments"])
    more = {name: list(value) if isinstance(value, tuple) else value for name, value in given.items()}
    more |= {name: arguments[name] for name in ("data_files", "data_dir") if arguments[name]}
    if isinstance(more.get("data_files"), tuple):
        more["data_files"] = list(more["data_files"])
    for name in (path, more.get("data_dir"), *_texts_in(more.get("data_files"))):
        if isinstance(name, str):
            _files_of(os.path.join(name, "*") if os.path.isdir(name) else name)
    kept = os.path.isdir(path) and any(
        os.path.isfile(os.path.join(path, name)) for name in ("state.json", "dataset_dict.json")
    )
    try:
        if kept:
            if odd := sorted(set(more) - {"split"}):
                raise TableFault(
                    f"`{path}` is a folder of `save_to_disk`, which takes no {_listed(odd)}", "`split` alone"
                )
            made = datasets.load_from_disk(path)
            if "split" in more and isinstance(made, datasets.DatasetDict):
                made = made[more["split"]]
        else:
            try:
                with _offline():
                    made = datasets.load_dataset(path, **more)
            except Exception as error:
                if not fetch or more.get("streaming") or not _is_absent(error):
                    raise
                made = datasets.load_dataset(path, **more)
    except TableFault:
        raise
    except Exception as error:  # a dozen kinds, of three libraries
        raise _not_loaded(path, more, error) from error
    return _parted(path, made)


def _texts_in(value: Any) -> list[str]:
    """Returns the texts of `data_files`: a name, several, or names by split."""
    if isinstance(value, Mapping):
        return [text for inner in value.values() for text in _texts_in(inner)]
    return [value] if isinstance(value, str) else list(value or ())


@contextlib.contextmanager
def _offline() -> Iterator[None]:
    """Sets the variables that keep both libraries from the network."""
    from datasets import config

    constants = config.constants  # of huggingface_hub
    before = config.HF_HUB_OFFLINE, constants.HF_HUB_OFFLINE
    config.HF_HUB_OFFLINE = constants.HF_HUB_OFFLINE = True
    try:
        yield
    finally:
        config.HF_HUB_OFFLINE, constants.HF_HUB_OFFLINE = before


def _is_absent(error: Exception) -> bool:
    return isinstance(error, OSError) or type(error).__name__ in ("OfflineModeIsEnabled", "LocalEntryNotFoundError")


def _not_loaded(path: str, more: dict[str, object], error: Exception) -> TableFault:
    said = str(error).strip().split("\n")[0] or type(error).__name__
    if not _is_absent(error):
        return TableFault(f"`{path}` cannot be loaded: {said}", "`datasets.load_dataset` says it with its traceback")
    if os.path.isabs(path):
        return TableFault(f"{said}", "a folder of files, or one that `save_to_disk` wrote", "E0309")
    words = "".join(f", {name}={value!r}" for name, value in more.items())
    command = f"python -c \"from datasets import load_dataset; load_dataset('{path}'{words})\""
    return TableFault(
        f"the data set `{path}` is not on this machine: {said}",
        f"`{command}` fetches it, and so does `dslc run`; a folder is written as `./{path}`",
        "E0309",
    )


def _parted(path: str, made: datasets.Dataset) -> tuple[datasets.Dataset, datasets.Dataset | None]:
    if isinstance(made, dict):
        names = list(made)
        beside = next((name for name in _HELD_OUT if name in names), None)
        if "train" in names:
            return made["train"], made[beside] if beside else None
        if len(names) == 1:
            return made[names[0]], None
        raise TableFault(f"`{path}` has the splits {_listed(names)}, and none is `train`", f'`split = "{names[0]}"`')
    return made, None


def datasets_facts(arguments: Arguments, *, fetch: bool) -> SourceFields:
    """Returns the fields of SourceFacts. Raises TableFault."""
    train, validation = open_datasets(arguments, fetch=fetch)
    names = list(train.column_names or next(iter(train), {}))
    input, target = arguments["input"], arguments["target"]
    if input is None and target is None and len(names) == 2:
        input, target = (names[0],), (names[1],)
    if input is None or target is None:
        raise TableFault(
            f"which columns of `{arguments['path']}` are input and target? It has {_listed(names)}",
            '`input = "…", target = "…"`',
        )
    columns = tuple(dict.fromkeys((*input, *target)))
    for name, held in ((name, held) for held in (train, validation) if held is not None for name in columns):
        there = held.column_names or names
        if name not in there:
            raise TableFault(f"`{arguments['path']}` has no column `{name}`", f"it has {_listed(there)}")
    streamed = not hasattr(train, "__len__")
    rows = train.select_columns(list(columns)).with_format("arrow")
    row = next(iter(rows), None) if streamed else rows[:1]
    if row is None or not len(row):
        raise TableFault(f"`{arguments['path']}` holds no rows", "a data set with rows")
    classes = getattr((train.features or {}).get(target[0]), "num_classes", None) if len(target) == 1 else None
    facts = _facts_of(row, input, target, arguments["size"], classes)
    if streamed:
        return facts | {"samples": None, "shards": Shards(train).count} | _validation_facts(validation)
    return facts | {
        "samples": len(train),
        "validation_samples": None if validation is None else len(validation),
    }


def _validation_facts(validation: datasets.Dataset | None) -> SourceFields:
    """Returns the facts of a streamed validation split, which is read whole, to be counted."""
    if validation is None:
        return {}
    shards = Shards(validation)
    counts = tuple(sum(1 for _ in shards.open(number, 0)) for number in range(shards.count))
    return {"validation_samples": sum(counts), "held_shards": counts}
