"""The sources of data: opened once per process, then gathered a whole micro-batch at a time.

Contract: a source that does not hold as many samples as the plan was made for raises before the first step.

Limits: `stdlib` is read whole (a byte a token). A Fortran-ordered, compressed or otherwise unmappable array is read
whole too. Samples of `python(…)` are fetched one at a time.
"""

from __future__ import annotations

import gzip
import os
import struct
import zipfile
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from dslc.compiler.facts.untrusted_files import open_file
from dslc.compiler.ir.program import DataStep
from dslc.compiler.trace.sources.stream_protocol import Shards, StreamError, is_stream
from dslc.runtime.data.augmentation import plain_pictures, training_pictures
from dslc.runtime.data.collating import collate
from dslc.runtime.data.samples import (
    BoundaryMaskedSamples,
    Checked,
    FetchedSamples,
    Padded,
    Part,
    Samples,
    SourceError,
    Splits,
    TensorSamples,
    as_seen,
    concatenate_samples,
)
from dslc.runtime.data.sources import array_files, chat_samples, image_folder, table_sources
from dslc.runtime.data.sources.synthetic import synthetic_samples
from dslc.runtime.data.splits import for_test, held_out, total
from dslc.runtime.data.streams import Stream, stream_samples
from dslc.runtime.process.user_code import UserObject, load_function

# ------------------------------------------------------------------------------------------------------- opening


def open_source(step: DataStep, *, training: bool = True) -> Splits:
    """Returns the samples of `step`, by their splits; those for training as a `training` sees them, or as an evaluation
    does.

    Raises SourceError if the source does not have the samples that the plan counted, or cannot be read as the plan
    says; OSError if a file does not exist.
    """
    if step.parts:
        return _mixed([open_source(part, training=training) for part in step.parts], step.structured)
    opened = _open(step)
    seen = training_pictures if training else plain_pictures
    if isinstance(opened, tuple):
        looked_at = [seen(step, opened[0]), *(plain_pictures(step, part) for part in opened[1:])]
        words = ("", "validation ", "test ")
        parts = [_checked(step, part, word) for part, word in zip(looked_at, words, strict=False)]
        plain_train = _checked(step, plain_pictures(step, opened[0]))
        splits = Splits(parts[0], parts[1], test=parts[2] if len(parts) == 3 else None, plain_train=plain_train)
    else:
        _check(step, "samples", len(opened), total(step))
        splits = _split(step, _checked(step, seen(step, opened)), _checked(step, plain_pictures(step, opened)))
    _check(step, "training samples", len(splits.train), step.train_samples)
    _check(step, "validation samples", len(splits.validation), step.validation_samples)
    _check(step, "test samples", 0 if splits.test is None else len(splits.test), step.test_samples)
    train = opened[0] if isinstance(opened, tuple) else opened
    return replace(splits, stream=train) if isinstance(train, Stream) else splits


def _mixed(parts: list[Splits], structured: bool) -> Splits:
    """Returns the samples of all sources of a mixture, one source after another."""
    test = [part.test for part in parts if part.test is not None]
    return Splits(
        concatenate_samples([part.train for part in parts], structured),
        concatenate_samples([part.validation for part in parts], structured),
        test=concatenate_samples(test, structured) if test else None,
        plain_train=concatenate_samples([part.samples_of_split("training") for part in parts], structured),
    )


def _open(step: DataStep) -> Samples | tuple[Samples, ...]:
    arguments = step.arguments
    match step.source:
        case "digits":
            return digits()
        case "stdlib":
            return text(stdlib_bytes(), arguments["context"])
        case "text":
            return text(mapped_bytes(arguments["file"]), arguments["context"])
        case "arrays":
            return arrays(step)
        case "synthetic":
            made = synthetic_samples(step)
            return TensorSamples(*made) if isinstance(made, tuple) else made
        case "python":
            return _python(step)
        case "tokens":
            return array_files.tokens(step)
        case "mnist":
            return array_files.mnist(step)
        case "cifar10":
            return array_files.cifar10(step)
        case "images":
            return image_folder.images(step)
        case "parquet":
            return table_sources.ParquetFiles(step)
        case "chat" | "preferences":
            return chat_samples.open_chat(step)
        case "datasets":
            return table_sources.datasets(step)
    raise SourceError(f"{step.line}: there is no source `{step.source}` in this version")


def _checked(step: DataStep, samples: Samples, part: str = "") -> Samples:
    """Masks the targets of padding, and checks the numbers against the network's limits if the plan names them."""
    name = step.python.function if step.python is not None else step.source
    place = getattr(samples, "place", None) or (lambda indices: [f"`{name}`"] * len(indices))
    if step.pad is not None:
        samples = Padded(samples, step.pad, step.ignore)
    if step.documents is not None:
        samples = BoundaryMaskedSamples(samples, step.documents, step.ignore)
    vocab, classes = step.arguments.get("model_vocab"), step.arguments.get("model_classes")
    if vocab is None and classes is None:
        return samples
    return Checked(samples, step.line, vocab, classes, step.arguments["ignore"], place, part)


def _check(step: DataStep, what: str, found: int, planned: int) -> None:
    if found != planned:
        raise SourceError(f"{step.line}: `{step.source}` holds {found} {what}, and the plan was made for {planned}")


def _split(step: DataStep, samples: Samples, plain: Samples) -> Splits:
    """Returns parts of `samples` for training, and of the same samples as an evaluation sees them."""
    if step.split == "random":
        train, validation = held_out(step)
        test = Part(plain, for_test(step), split="test") if step.test_samples else None
        own, held = Part(samples, train, split="training"), Part(plain, validation, split="validation")
        return Splits(own, held, test=test, plain_train=Part(plain, train, split="training"))
    first = step.train_samples + step.validation_samples
    return Splits(
        Part(samples, start=0, length=step.train_samples, split="training"),
        Part(plain, start=step.train_samples, length=step.validation_samples, split="validation"),
        test=Part(plain, start=first, length=step.test_samples, split="test") if step.test_samples else None,
        plain_train=Part(plain, start=0, length=step.train_samples, split="training"),
    )


# ----------------------------------------------------------------------------------------------- one of each kind


def digits() -> TensorSamples:
    """Returns 1,797 handwritten digits: inputs (1, 8, 8) float32 in 0 … 1, targets 0 … 9.

    E. Alpaydin and C. Kaynak (1998), Optical Recognition of Handwritten Digits, UCI Machine Learning Repository,
    https://doi.org/10.24432/C50P49, CC BY 4.0.
    """
    packed = gzip.decompress(Path(__file__).parents[1].joinpath("digits", "digits.gz").read_bytes())
    raw = torch.frombuffer(bytearray(packed), dtype=torch.uint8)
    count = raw.numel() // 65
    images = raw[: count * 64].view(count, 1, 8, 8)
    return TensorSamples(images.to(torch.float32).div_(16), raw[count * 64 :].to(torch.int64))


def stdlib_bytes() -> NDArray[np.uint8]:
    """Returns the modules (not packages) of Python's standard library, `*.py` sorted by name, one after another."""
    files = sorted(Path(os.__file__).parent.glob("*.py"))
    return np.frombuffer(bytearray(b"".join(file.read_bytes() for file in files if file.is_file())), np.uint8)


def mapped_bytes(file: str) -> NDArray[np.uint8]:
    """Returns the bytes of a file, mapped copy-on-write."""
    return np.memmap(file, np.uint8, "c") if os.path.getsize(file) else np.empty(0, np.uint8)


def text(stream: NDArray[np.uint8], context: int) -> TensorSamples:
    """Cuts a stream of n bytes into (n - 1) // context sequences without overlap; targets are the bytes that follow."""
    tokens = torch.from_numpy(stream)
    used = max(0, tokens.numel() - 1) // context * context
    return TensorSamples(tokens[:used].view(-1, context), tokens[1 : used + 1].view(-1, context))


def arrays(step: DataStep) -> TensorSamples:
    """Returns the two arrays of an `.npz` file, memory-mapped if they are stored uncompressed."""
    file, names = step.arguments["file"], (step.arguments["input"], step.arguments["target"])
    found = []
    for name in names:
        try:
            found.append(npz_array(file, name))
        except KeyError:
            raise SourceError(f"{step.line}: {file} has no array `{name}`") from None
    inputs, targets = found
    if inputs.shape[:1] != targets.shape[:1] or not inputs.shape:
        raise SourceError(f"{step.line}: the arrays of {file} are of unequal length: {inputs.shape}, {targets.shape}")
    return TensorSamples(inputs, targets)


def npz_array(file: str, name: str) -> Tensor:
    """Returns array `name` of an `.npz` file, mapped copy-on-write if it is stored as it would lie in memory."""
    with zipfile.ZipFile(file) as archive:
        entry = archive.getinfo(name + ".npy")
        if entry.compress_type == zipfile.ZIP_STORED:
            mapped = _mapped(file, archive, entry)
            if mapped is not None:
                return mapped
    with np.load(file, allow_pickle=False) as loaded:
        return _tensor(loaded[name])


def _mapped(file: str, archive: zipfile.ZipFile, entry: zipfile.ZipInfo) -> Tensor | None:
    with archive.open(entry) as stream:
        version = np.lib.format.read_magic(stream)
        read = np.lib.format.read_array_header_1_0 if version == (1, 0) else np.lib.format.read_array_header_2_0
        shape, fortran, dtype = read(stream)
        header = stream.tell()
    with open_file(file) as raw:
        # The local header repeats the name and has extra fields of its own: their lengths are at bytes 26 and 28.
        raw.seek(entry.header_offset + 26)
        name_length, extra_length = struct.unpack("<HH", raw.read(4))
    offset = entry.header_offset + 30 + name_length + extra_length + header
    if fortran or dtype.hasobject or 0 in shape or _unknown_to_torch(dtype):
        return None
    return torch.from_numpy(np.memmap(file, dtype, "c", offset, shape))


def _tensor(array: NDArray[np.generic]) -> Tensor:
    if _unknown_to_torch(array.dtype):
        # Other byte orders, floats of more than 64 bits, and the unsigned integers for which torch has few operations.
        wide = np.int64 if array.dtype.kind == "u" else np.float64 if array.dtype.itemsize > 8 else None
        array = array.astype(wide or array.dtype.newbyteorder("="))
    return torch.from_numpy(np.ascontiguousarray(array))


def _unknown_to_torch(dtype: np.dtype[np.generic]) -> bool:
    is_long = dtype.kind == "f" and dtype.itemsize > 8
    return is_long or not dtype.isnative or dtype.name in ("uint16", "uint32", "uint64")


def _python(step: DataStep) -> Samples | tuple[Samples, ...]:
    assert step.python is not None
    made = load_function(step.python)()
    if step.split == "given":
        names = ("train", "validation", "test")[: 3 if step.test_samples else 2]
        if not isinstance(made, Sequence) or len(made) != len(names):
            kind = "pair" if len(names) == 2 else "triple"
            raise SourceError(f"{step.line}: `{step.python.function}` should give a {kind} ({', '.join(names)})")
        return tuple(_part(step, part, name) for part, name in zip(made, names, strict=True))
    return _dataset(step, made, "train")


def _part(step: DataStep, made: object, part: str) -> Samples:
    """Wraps one of a user's data sets; that for validation may be several, by name."""
    if part != "validation" or not step.validation_sets:
        return _dataset(step, made, part)
    sets = dict(step.validation_sets)
    if not isinstance(made, dict) or {name: len(each) for name, each in made.items()} != sets:
        raise SourceError(f"{step.line}: the validation sets are not those that the plan was made for")
    opened = [_dataset(step, made[name], f"{part} {name}") for name in sets]
    return concatenate_samples(opened, step.structured)


def _dataset(step: DataStep, made: UserObject, part: str) -> Samples:
    """Wraps a user's data set: tensors and arrays are taken whole, anything else sample by sample."""
    if step.stream is not None and is_stream(made):
        return _stream(step, made, part)
    if step.structured:
        return _structures(step, made, part)
    if isinstance(made, torch.utils.data.TensorDataset):
        made = made.tensors
    if is_pair_of_arrays(made):
        inputs, targets = (as_seen(item if isinstance(item, Tensor) else _tensor(item)).detach() for item in made)
        if inputs.shape[0] != targets.shape[0]:
            raise SourceError(f"{step.line}: inputs and targets are of unequal length: {len(inputs)}, {len(targets)}")
        return TensorSamples(inputs.contiguous(), targets.contiguous())
    return FetchedSamples(_indexed(step, made), step.line, step.seed, part)


def _stream(step: DataStep, made: object, part: str) -> Samples:
    own = FetchedSamples((), step.line, collate=collate(step.collate) if step.structured else None, whole=step.whole)
    try:
        return stream_samples(step, Shards(made), part, own.make_batch, is_structure=own.is_structure)
    except StreamError as error:
        raise SourceError(f"{step.line}: {error}") from error


def _structures(step: DataStep, made: UserObject, part: str) -> Samples:
    """Wraps a user's data set whose batches are structures of tensors."""
    if is_pair_of_arrays(made):
        made = list(zip(*made, strict=True))
    return FetchedSamples(
        _indexed(step, made), step.line, step.seed, part, collate=collate(step.collate), whole=step.whole
    )


def _indexed(step: DataStep, made: object) -> object:
    if not hasattr(made, "__len__") or not hasattr(made, "__getitem__"):
        raise SourceError(
            f"{step.line}: a data set needs `len` and indexing, and {type(made).__name__} lacks one of them"
        )
    return made


def is_pair_of_arrays(made: object) -> bool:
    """True if `made` is (inputs, targets) rather than a pair of data sets."""
    kinds = (Tensor, np.ndarray)
    return isinstance(made, tuple | list) and len(made) == 2 and all(isinstance(i, kinds) and i.ndim for i in made)
