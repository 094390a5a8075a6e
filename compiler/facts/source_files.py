"""Facts of the sources that are files of a known format: `tokens`, `images`, `mnist`, `cifar10`.

Model: headers, sizes and directory listings tell everything. `found` passes the files and their layout to the runtime,
so that it decides nothing.

Contract: all token files are listed and their sizes taken, but the header is read of only `HEADS` of them: some
microseconds a file, however large they are. The runtime reads the header of each when it first maps it, and compares.
For images, every folder is listed and no file opened. For CIFAR-10 in the python format, the pickle before the pixels
of each file is read, without building any object.

Limits: the known layouts are nanoGPT's (16-bit numbers and nothing else), llm.c's (a header of 256 32-bit numbers),
LeCun's, and Krizhevsky's.
"""

from __future__ import annotations

import os
import struct
import zlib
from itertools import islice
from math import prod
from typing import Any

from dslc.compiler.facts.file_patterns import TooManyEntriesError, files_matching
from dslc.compiler.facts.image_files import SUFFIXES, FolderError, images_in
from dslc.compiler.facts.source_look import MissingDataError, UnusableDataError, folders_in, size_of
from dslc.compiler.ir.facts import SourceFacts
from dslc.compiler.ir.tensors import TensorFact
from dslc.dsl.files import open_file
from dslc.dsl.language import calls as c
from dslc.dsl.words import plural

# ------------------------------------------------------------------------------------------------------- tokens

HEADER = 1024  # bytes: 256 32-bit numbers: magic, version, tokens, and, if `dslc tokens` wrote it, vocabulary
FORMS = {(20240520, 1): "uint16", (20240801, 7): "uint32"}  # llm.c: GPT-2's tokens, Llama 3's
HEADS = 64  # files whose header is read, at most
ITEM_BYTES = {"uint16": 2, "uint32": 4}


def tokens(source: c.Tokens, context: int | None) -> SourceFacts:
    """Returns the facts of token files. A sequence does not cross from one file into the next."""
    try:
        files = files_matching(source.files)
        if not files:
            raise MissingDataError(
                f"no file matches {source.files}", f"`dslc tokens FILE… -o {_example(source.files)}` makes one"
            )
        found, vocab = _token_files(files)
    except TooManyEntriesError as error:
        broken = UnusableDataError(
            f"{source.files} cannot be looked up: {error}", "a pattern with fewer `*` for folders"
        )
        return sequences(None, context, None, broken)
    except MissingDataError as absent:
        return sequences(None, context, None, absent)
    return sequences(tuple(found["tokens"]), context, vocab, found=found)


def files_of_pattern(pattern: str) -> list[str]:
    """Returns the files that match. Raises MissingDataError if there are none."""
    try:
        files = files_matching(pattern)
    except TooManyEntriesError as error:
        raise UnusableDataError(
            f"{pattern} cannot be looked up: {error}", "a pattern with fewer `*` for folders"
        ) from error
    if not files:
        raise MissingDataError(f"there is no {pattern}", "paths are relative to the file that wrote them")
    return files


def _example(pattern: str) -> str:
    return os.path.basename(pattern).replace("*", "train").replace("?", "0")


def _token_files(files: list[str]) -> tuple[dict[str, Any], int | None]:
    """Returns the runtime's arguments for mapping these files, and the vocabulary, if each header has it."""
    item, offset, _, _ = _token_header(files[0], size_of(files[0]))
    lengths: list[int] = []
    vocabs: list[int] = []
    looked_at = {0, *range(min(HEADS - 1, len(files))), len(files) - 1}
    for n, file in enumerate(files):
        size = size_of(file)
        if n in looked_at:
            kind, start, held, said = _token_header(file, size)
            if (kind, start) != (item, offset):
                raise UnusableDataError(
                    f"{file} and {files[0]} are files of tokens in different forms",
                    "one form for all files that the pattern matches",
                )
            vocabs.append(said)
        else:
            held = (size - offset) // ITEM_BYTES[item]
        lengths.append(held)
    vocab = max(vocabs) if all(vocabs) else None
    return {"files": tuple(files), "tokens": tuple(lengths), "item": item, "offset": offset}, vocab


def _token_header(file: str, size: int) -> tuple[str, int, int, int]:
    """Returns the type of a token, the offset of the first, their number, and the vocabulary (0 if unknown)."""
    try:
        with open_file(file) as stream:
            head = stream.read(16) or b""  # b"": a pipe that would keep its reader waiting
    except OSError as error:
        raise MissingDataError(f"{error.strerror}: {file}", "a file that can be read") from error
    magic, version, held, vocab = struct.unpack("<4i", head) if len(head) == 16 else (0, 0, 0, 0)
    if magic not in [known for known, _ in FORMS]:
        if size % 2:
            raise UnusableDataError(
                f"{file} holds {plural(size, 'byte')}, and tokens of 16 bits take an even number", "`dslc tokens FILE…`"
            )
        return "uint16", 0, size // 2, 0
    item = FORMS.get((magic, version))
    if item is None:
        raise UnusableDataError(
            f"{file} is a file of tokens of version {version}, which dslc does not know", "`dslc tokens FILE…`"
        )
    expected = HEADER + held * ITEM_BYTES[item]
    if size != expected:
        speaks = f"its header says {plural(held, 'token')}, which take {expected:,}"
        raise UnusableDataError(
            f"{file} holds {plural(size, 'byte')}, and {speaks}",
            "a whole file: it may have been cut off in a copy",
        )
    return item, HEADER, held, vocab


def sequences(
    lengths: tuple[int, ...] | None,
    context: int | None,
    vocab: int | None,
    absent: MissingDataError | None = None,
    found: dict[str, Any] | None = None,
) -> SourceFacts:
    """Returns the facts of streams with `lengths` tokens each, cut into sequences. Their shape is known even if the
    files are absent.
    """
    tokens = None if context is None else TensorFact(shape=(context,), dtype="int64")
    samples = None
    if lengths is not None and context is not None:
        samples = sum(max(0, length - 1) // context for length in lengths)
    return SourceFacts(
        samples=samples,
        input=tokens,
        target=tokens,
        classes=vocab,
        vocab=vocab,
        stream=True,
        found=found or {},
        **fault_fields(absent),
    )


def fault_fields(absent: MissingDataError | None) -> dict[str, Any]:
    """Returns the fields of SourceFacts that describe a fault."""
    return {"missing": str(absent), "help": absent.help, "code": absent.code} if absent else {}


# ------------------------------------------------------------------------------------------------------- images

_HELD_OUT = ("val", "validation", "valid", "test")  # the first of these beside `train` is the validation split
_LAYOUT = "a folder for each class, as in `cats/1.jpg`, or `train` and `val` with such folders in them"


def images(source: c.Images, context: int | None) -> SourceFacts:
    look = TensorFact(shape=(3, source.size, source.size), dtype="float32")
    try:
        names = folders_in(source.folder, _LAYOUT)
        beside = next((name for name in _HELD_OUT if name in names), "")
        parted = names == ["train"] or ("train" in names and bool(beside))
        train = os.path.join(source.folder, "train") if parted else source.folder
        validation = os.path.join(source.folder, beside) if parted and beside else ""
        classes = folders_in(train, _LAYOUT)
        if not classes:
            raise UnusableDataError(f"{train} holds no folder of images", _LAYOUT)
        if validation and (other := folders_in(validation, _LAYOUT)) != classes:
            odd = sorted(set(other) ^ set(classes))
            raise UnusableDataError(f"{train} and {validation} differ in their classes: {', '.join(odd[:5])}", _LAYOUT)
        counts = [_count(train, classes), _count(validation, classes) if validation else None]
    except MissingDataError as absent:
        return SourceFacts(input=look, target=_CLASS, **fault_fields(absent))
    return SourceFacts(
        samples=counts[0],
        validation_samples=counts[1],
        input=look,
        target=_CLASS,
        classes=len(classes),
        found={"train": train, "validation": validation, "classes": tuple(classes)},
    )


_CLASS = TensorFact(shape=(), dtype="int64")


def _count(folder: str, classes: list[str]) -> int:
    """Returns the number of images of all classes. No class may be empty."""
    total = 0
    for name in classes:
        try:
            held = sum(1 for _ in images_in(os.path.join(folder, name)))
        except FolderError as error:
            raise UnusableDataError(str(error), "image files alone, in folders without links that lead back") from error
        except OSError as error:
            raise MissingDataError(f"{error.strerror}: {error.filename}", _LAYOUT) from error
        if held == 0:
            raise UnusableDataError(
                f"{os.path.join(folder, name)} holds no image", f"files that end in {', '.join(SUFFIXES)}"
            )
        total += held
    return total


# -------------------------------------------------------------------------------------------------------- MNIST

_MNIST_URL = "https://ossci-datasets.s3.amazonaws.com/mnist/{train,t10k}-{images-idx3,labels-idx1}-ubyte.gz"


def mnist(source: c.MNIST, context: int | None) -> SourceFacts:
    """Returns the facts of the four files, plain or gzipped, in the folder itself or where torchvision puts them."""
    look = TensorFact(shape=(1, 28, 28), dtype="float32")
    try:
        files = {split: _mnist_pair(source.dir, split) for split in ("train", "t10k")}
        shapes = {split: _mnist_shape(*pair) for split, pair in files.items()}
        if shapes["train"][1:] != shapes["t10k"][1:]:
            raise UnusableDataError(
                f"the images of training and test in {source.dir} differ in size", _mnist_help(source.dir)
            )
    except MissingDataError as absent:
        return SourceFacts(input=look, target=_CLASS, classes=10, **fault_fields(absent))
    return SourceFacts(
        samples=shapes["train"][0],
        validation_samples=shapes["t10k"][0],
        input=TensorFact(shape=(1, *shapes["train"][1:]), dtype="float32"),
        target=_CLASS,
        classes=10,
        found={"train": files["train"], "validation": files["t10k"]},
    )


def _mnist_help(folder: str) -> str:
    return f'`mkdir -p {folder} && cd {folder} && curl -O "{_MNIST_URL}"` fetches them'


def _mnist_pair(folder: str, split: str) -> tuple[str, str]:
    return (
        _mnist_file(folder, f"{split}-images", "idx3-ubyte"),
        _mnist_file(folder, f"{split}-labels", "idx1-ubyte"),
    )


def _mnist_file(folder: str, name: str, form: str) -> str:
    for place in (folder, os.path.join(folder, "raw"), os.path.join(folder, "MNIST", "raw")):
        for between in "-.":
            for ending in ("", ".gz"):
                path = os.path.join(place, f"{name}{between}{form}{ending}")
                if os.path.isfile(path):
                    return path
    raise MissingDataError(f"there is no {os.path.join(folder, name)}-{form}, plain or .gz", _mnist_help(folder))


def _mnist_shape(images: str, labels: str) -> tuple[int, ...]:
    shape, held = _idx_shape(images, 3), _idx_shape(labels, 1)
    if shape[:1] != held:
        raise UnusableDataError(
            f"{images} holds {plural(shape[0], 'image')}, and {labels} {plural(held[0], 'label')}",
            _mnist_help(os.path.dirname(images)),
        )
    return shape


def _idx_shape(file: str, dims: int) -> tuple[int, ...]:
    """Returns the shape in the header of an IDX file of bytes, and checks the file's length against it."""
    import gzip

    packed = file.endswith(".gz")
    help = _mnist_help(os.path.dirname(file))
    length = 4 + 4 * dims
    try:
        with gzip.GzipFile(fileobj=open_file(file)) if packed else open_file(file) as stream:
            head = stream.read(length)
        size = size_of(file)
        if packed:
            with open_file(file) as stream:
                stream.seek(-4, os.SEEK_END)  # the length of the unpacked content, modulo 2^32
                size = struct.unpack("<I", stream.read(4))[0]
    except (OSError, EOFError, zlib.error, struct.error) as error:
        raise UnusableDataError(f"{file} cannot be read: {error}", help) from error
    if len(head) < length or head[:4] != bytes((0, 0, 8, dims)):
        raise UnusableDataError(f"{file} is not an IDX file of {'images' if dims == 3 else 'labels'}", help)
    shape = struct.unpack(f">{dims}I", head[4:])
    expected = length + prod(shape)
    if size != expected:
        raise UnusableDataError(f"{file} holds {plural(size, 'byte')}, and its header says {expected:,}", help)
    return shape


# ------------------------------------------------------------------------------------------------------ CIFAR-10

CIFAR_ROW = 3 * 32 * 32
OPERATIONS = 200_000  # operations of a pickle that are read, at most: a batch has some ten thousand before its shape
_CIFAR_URL = "https://www.cs.toronto.edu/~kriz/cifar-10-python.tar.gz"
_CIFAR_NAMES = (*(f"data_batch_{n}" for n in range(1, 6)), "test_batch")


def cifar10(source: c.CIFAR10, context: int | None) -> SourceFacts:
    """Returns the facts of the python or the binary version, in the folder itself or in the folder of their archive."""
    look = TensorFact(shape=(3, 32, 32), dtype="float32")
    try:
        files = _cifar_files(source.dir)
        counts = [_cifar_rows(file) for file in files]
    except MissingDataError as absent:
        return SourceFacts(input=look, target=_CLASS, classes=10, **fault_fields(absent))
    return SourceFacts(
        samples=sum(counts[:-1]),
        validation_samples=counts[-1],
        input=look,
        target=_CLASS,
        classes=10,
        found={"train": files[:-1], "validation": files[-1:]},
    )


def _cifar_help(folder: str) -> str:
    return f"`mkdir -p {folder} && curl {_CIFAR_URL} | tar xz -C {folder}` fetches them"


def _cifar_files(folder: str) -> tuple[str, ...]:
    for below, ending in (("", ""), ("cifar-10-batches-py", ""), ("", ".bin"), ("cifar-10-batches-bin", ".bin")):
        files = tuple(os.path.join(folder, below, name + ending) for name in _CIFAR_NAMES)
        there = [os.path.isfile(file) for file in files]
        if all(there):
            return files
        if any(there):
            raise MissingDataError(f"there is no {files[there.index(False)]}", _cifar_help(folder))
    raise MissingDataError(f"there is no {os.path.join(folder, _CIFAR_NAMES[0])}", _cifar_help(folder))


def _cifar_rows(file: str) -> int:
    help = _cifar_help(os.path.dirname(file))
    size = size_of(file)
    if file.endswith(".bin"):
        if size % (1 + CIFAR_ROW) or not size:
            raise UnusableDataError(
                f"{file} holds {plural(size, 'byte')}, which is not a whole number of images of {1 + CIFAR_ROW}", help
            )
        return size // (1 + CIFAR_ROW)
    rows = _pickled_rows(file)
    if not rows or size < rows * CIFAR_ROW:
        raise UnusableDataError(f"{file} is not a batch of CIFAR-10 in its python version", help)
    return rows


def _pickled_rows(file: str) -> int:
    """Returns N of the shape (N, 3072) in the pickle, or 0: reads the operations, and builds no object."""
    import pickletools

    before: tuple[object, object] = (None, None)
    try:
        with open_file(file) as stream:
            for operation, argument, _ in islice(pickletools.genops(stream), OPERATIONS):
                if operation.name == "TUPLE2" and before[1] == CIFAR_ROW and isinstance(before[0], int):
                    return before[0]
                if operation.name not in ("MEMOIZE", "PUT", "BINPUT", "LONG_BINPUT"):
                    before = before[1], argument
    except (OSError, ValueError, MemoryError, OverflowError, struct.error):
        return 0
    return 0
