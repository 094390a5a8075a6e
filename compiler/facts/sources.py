"""Facts of a data source, found without reading the data and without running a user's code.

Model: sizes come from `stat`, shapes and dtypes of arrays from their headers, and everything else from the declaration
itself. The dtypes are those a model sees: floats as float32, integers and booleans as int64.

Contract: the standard library alone, a few milliseconds, no exception for files that are absent or broken: these fill
`missing`, `help` and `code`. The runtime counts again when it opens the source and refuses a different number.

Limits: `stdlib` depends on the version of Python. The number of classes in arrays is not known. `dslc.probe` opens
sources that need a library or the user's code, `parquet(…)`, `datasets(…)`, `chat(…)`, `preferences(…)` and
`python(…)`, in a child process.
"""

from __future__ import annotations

import ast
import math
import os
import struct
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import IO, Any

from dslc.compiler.facts import source_files as sources_files
from dslc.compiler.facts.source_files import fault_fields, sequences
from dslc.compiler.facts.source_look import MissingDataError, UnusableDataError, size_of
from dslc.compiler.ir.facts import SourceFacts
from dslc.compiler.ir.tensors import TensorFact
from dslc.dsl.language import calls as c
from dslc.dsl.language.job import JobSpec
from dslc.dsl.language.preferences import Preferences
from dslc.dsl.language.registry import Call, fields
from dslc.dsl.remedy import remedy, remove_argument

DIGITS = 1797
BYTES = 256  # the vocabulary of text
FOUND_PATHS = frozenset({"files", "train", "validation"})  # names under which `found` has paths
PREPARATION = frozenset({"augment", "transform", "normalize"})  # arguments that say what pictures go through
NPY_HEADER = 10_000  # bytes; numpy's own limit
CLASSES = 2  # of `synthetic(shape = …)` without `classes`


def source_facts(source: Call, context: int | None) -> SourceFacts:
    """Returns the facts of `source`. `context` is the length of a sequence if the source does not give one, or None."""
    if isinstance(source, c.Mixture):
        return mixture_facts([source_facts(each, context) for each in source.sources])
    find = _FACTS.get(type(source))
    if find is None:
        return SourceFacts()
    length = getattr(source, "context", None)
    return find(source, context if length is None else length)


def mixture_facts(parts: Sequence[SourceFacts]) -> SourceFacts:
    """Returns the facts of all sources together: what one sample is, by the first that tells, and how many there are.

    `parts` keeps the facts of each.
    """
    told = next((part for part in parts if part.input is not None or part.structures is not None), parts[0])
    faulty = next((part for part in parts if part.missing), SourceFacts())
    known = all(part.samples is not None for part in parts)
    return replace(
        told,
        samples=sum(part.samples or 0 for part in parts) if known else None,
        validation_samples=None,
        test_samples=None,
        shards=None,
        classes=max((part.classes for part in parts if part.classes is not None), default=None),
        vocab=max((part.vocab for part in parts if part.vocab is not None), default=None),
        stream=False,
        changes=next((part.changes for part in parts if part.changes is not None), None),
        loss_counts=any(part.loss_counts for part in parts),
        found={},
        missing=faulty.missing,
        help=faulty.help,
        code=faulty.code,
        parts=tuple(replace(part, parts=()) for part in parts),
    )


def context_of(job: JobSpec) -> int | None:
    """Returns the length of a sequence: the source's own, else the model's."""
    contexts = (getattr(source, "context", None) for source in c.parts_of(job.data.source))
    written = next((context for context in contexts if context is not None), None)
    network = job.model.network
    return written if written is not None else getattr(network, "context", None)


def each_source(job: JobSpec, source: SourceFacts) -> Iterator[tuple[JobSpec, SourceFacts]]:
    """Yields the job with each source of a mixture alone, and the facts of that; any other job as it is."""
    if not isinstance(job.data.source, c.Mixture):
        yield job, source
        return
    for call, facts in zip(job.data.source.sources, source.parts, strict=True):
        yield replace(job, data=replace(job.data, source=call)), facts


def source_key(source: Call) -> tuple[str, dict[str, Any]]:
    """Returns `source` and `arguments` of the rank program's DataStep. For `python(…)`, the arguments are in its
    function; what pictures go through is its `pictures`.
    """
    if isinstance(source, c.PythonSource | c.Mixture):
        return source.word, {}
    arguments = {f.name: getattr(source, f.name) for f in fields(type(source)) if f.name not in PREPARATION}
    if isinstance(source, c.Chat | Preferences):
        return source.word, _chat_arguments(source, arguments)
    if isinstance(source, c.Synthetic):
        arguments["classes"] = _classes(source)
    return source.word, arguments


# ------------------------------------------------------------------------------------------------- one of each kind


def _digits(source: c.Digits, context: int | None) -> SourceFacts:
    return SourceFacts(
        samples=DIGITS,
        input=TensorFact(shape=(1, 8, 8), dtype="float32"),
        target=TensorFact(shape=(), dtype="int64"),
        classes=10,
    )


def _stdlib(source: c.Stdlib, context: int | None) -> SourceFacts:
    return sequences((stdlib_bytes(),), context, BYTES)


_stdlib_bytes: int | None = None


def stdlib_bytes() -> int:
    """Returns the bytes of the text of the standard library."""
    if _stdlib_bytes is not None:
        return _stdlib_bytes
    with os.scandir(os.path.dirname(os.__file__)) as entries:
        return sum(entry.stat().st_size for entry in entries if entry.name.endswith(".py") and entry.is_file())


def use_stdlib_bytes(size: int) -> None:
    """Takes this as the size of the standard library from now on, where this Python has no files of it."""
    global _stdlib_bytes
    _stdlib_bytes = size


def _text(source: c.Text, context: int | None) -> SourceFacts:
    try:
        return sequences((size_of(source.file),), context, BYTES)
    except MissingDataError as absent:
        return sequences(None, context, BYTES, absent)


def _synthetic(source: c.Synthetic, context: int | None) -> SourceFacts:
    if source.vocab is not None:
        tokens = None if context is None else TensorFact(shape=(context,), dtype="int64")
        return SourceFacts(
            samples=source.samples, input=tokens, target=tokens, classes=source.vocab, vocab=source.vocab
        )
    if source.shape is None:
        return SourceFacts(samples=source.samples)
    classes = _classes(source)
    return SourceFacts(
        samples=source.samples,
        input=TensorFact(shape=source.shape, dtype="float32"),
        target=TensorFact(shape=source.targets or (), dtype="float32" if classes is None else "int64"),
        classes=classes,
    )


def _datasets(source: c.Datasets, context: int | None) -> SourceFacts:
    """Returns the facts that need no library."""
    here = os.path.isabs(source.path) or source.data_files is not None or source.data_dir is not None
    if dict(source.arguments).get("streaming") and not here:
        return SourceFacts(
            missing=f"`{source.path}` would be streamed from the network, and only files on this machine are",
            help=remedy(
                remove_argument(source.span, "streaming"),
                ": files are mapped into memory, and a step reads only what it needs",
            ),
            code="E0315",
        )
    return SourceFacts()


def _chat(source: c.Chat | Preferences, context: int | None) -> SourceFacts:
    """Returns the facts that need no tokenizer."""
    tokens = None if context is None else TensorFact(shape=(context,), dtype="int64")
    facts = SourceFacts(input=tokens, target=tokens)
    if isinstance(source.conversations, Call):
        return facts
    try:
        files = sources_files.files_of_pattern(source.conversations)
        for file in files:
            size_of(file)
    except MissingDataError as absent:
        return replace(facts, **fault_fields(absent))
    return replace(facts, found={"files": tuple(files)})


def _chat_arguments(source: c.Chat | Preferences, arguments: dict[str, Any]) -> dict[str, Any]:
    """Returns the arguments of `chat` or `preferences`, and of its data set beside them."""
    apart = ("conversations", "pairs", "max_length")
    chosen = {name: value for name, value in arguments.items() if name not in apart}
    if isinstance(source, Preferences):
        chosen |= {"train_on": "answers", "pack": None}
    chosen["template"] = None if source.template == "default" else source.template
    if isinstance(source.conversations, Call):
        return source_key(source.conversations)[1] | chosen
    return chosen | {"conversations": source.conversations}


def _classes(source: c.Synthetic) -> int | None:
    if source.shape is None or source.targets is not None:
        return None
    return source.classes or CLASSES


# ------------------------------------------------------------------------------------------------------- arrays


def _arrays(source: c.Arrays, context: int | None) -> SourceFacts:
    try:
        inputs, input_kind = _header(source.file, source.input)
        targets, target_kind = _header(source.file, source.target)
        if inputs[:1] != targets[:1] or not inputs:
            shapes = (
                f"`{source.input}` has shape {_shape_text(inputs)} and `{source.target}` has {_shape_text(targets)}"
            )
            raise UnusableDataError(f"{source.file}: {shapes}", "both need one row for each sample")
    except MissingDataError as absent:
        return SourceFacts(**fault_fields(absent))
    return SourceFacts(
        samples=inputs[0],
        input=TensorFact(shape=inputs[1:], dtype="float32" if input_kind == "f" else "int64"),
        target=TensorFact(shape=targets[1:], dtype="float32" if target_kind == "f" else "int64"),
    )


def _header(file: str, name: str) -> tuple[tuple[int, ...], str]:
    """Returns shape and kind (f, i, u or b) of an array in an `.npz` file."""
    import zipfile

    size_of(file)
    broken = f"{file} is not a readable `.npz` file"
    try:
        with zipfile.ZipFile(file) as archive:
            names = [entry.removesuffix(".npy") for entry in archive.namelist()]
            if name not in names:
                raise UnusableDataError(
                    f"{file} has no array `{name}`", f"it has {', '.join(f'`{n}`' for n in names) or 'none'}"
                )
            size = archive.getinfo(name + ".npy").file_size
            with archive.open(name + ".npy") as stream:
                shape, kind = npy_header(stream, size)
    except MissingDataError:
        raise
    except Exception as error:  # any kind: zipfile and zlib raise many for a file of another format
        raise UnusableDataError(broken, f"{error}" or "`numpy.savez` writes one") from error
    if kind not in "fiub":
        raise UnusableDataError(
            f"`{name}` of {file} does not hold numbers", "arrays of floats, whole numbers or truth values"
        )
    return shape, kind


def npy_header(stream: IO[bytes], size: int) -> tuple[tuple[int, ...], str]:
    """Returns shape and kind of an array in a file of `size` bytes in the NPY format. Raises the errors that any text
    in another format raises: https://numpy.org/doc/stable/reference/generated/numpy.lib.format.html.
    """
    magic = stream.read(8)
    if magic[:6] != b"\x93NUMPY":
        raise ValueError("an entry is no array")
    length = struct.unpack("<H", stream.read(2)) if magic[6] == 1 else struct.unpack("<I", stream.read(4))
    if length[0] > NPY_HEADER:
        raise ValueError(f"an array with a header of {length[0]:,} bytes")
    header = ast.literal_eval(stream.read(length[0]).decode("latin1" if magic[6] < 3 else "utf8"))
    if not all(isinstance(size, int) and size >= 0 for size in header["shape"]):
        raise ValueError("a shape that is none")
    kind = header["descr"][1] if isinstance(header["descr"], str) else "V"  # "<f4", "|u1", "|b1"
    content, wanted = size - stream.tell(), math.prod(header["shape"])
    if kind in "fiub" and content < wanted * (width := int(header["descr"][2:])):
        raise ValueError(f"an array of {content:,} bytes, whose header says {wanted:,} numbers of {width} bytes")
    return tuple(header["shape"]), kind


def _shape_text(shape: tuple[int, ...]) -> str:
    return " x ".join(map(str, shape)) or "no shape"


_FACTS: dict[type[Call], Callable[[Any, int | None], SourceFacts]] = {
    c.Digits: _digits,
    c.Stdlib: _stdlib,
    c.Text: _text,
    c.Arrays: _arrays,
    c.Synthetic: _synthetic,
    c.Datasets: _datasets,
    c.Chat: _chat,
    Preferences: _chat,
    c.Tokens: sources_files.tokens,
    c.Images: sources_files.images,
    c.MNIST: sources_files.mnist,
    c.CIFAR10: sources_files.cifar10,
}
