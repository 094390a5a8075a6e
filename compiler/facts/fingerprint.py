"""Fingerprints of the files that a plan rests on: enough to notice that one was changed or is another.

Model: a file is its size and a SHA-256 over its bytes; of a large one, over blocks spread evenly from its first to its
last byte. A folder is the names of all files below it.

Limits: a change between two blocks of a large file is not noticed, nor one inside a folder's files; the counts and
shapes that the plan was made with are compared as facts of their own.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Iterable, Iterator

from dslc.compiler.facts.file_patterns import files_matching
from dslc.dsl.files import open_file
from dslc.dsl.record import Record, record

BLOCK = 2**16
BLOCKS = 128  # read of all files together, and two of each


@record
class FileFact(Record):
    """One file, or folder of files; `size` is in bytes, of a folder the number of its files."""

    path: str
    size: int
    digest: str


def fingerprints(paths: Iterable[str]) -> Iterator[FileFact]:
    """Yields the facts of files, folders and patterns of files; none for what is not there."""
    found = sorted({name for path in paths for name in ([path] if os.path.exists(path) else files_matching(path))})
    for path in found:
        yield _folder(path) if os.path.isdir(path) else _file(path, max(2, BLOCKS // len(found)))


def _file(path: str, blocks: int) -> FileFact:
    digest = hashlib.sha256()
    try:
        with open_file(path) as file:
            size = os.fstat(file.fileno()).st_size
            starts = range(0, size, BLOCK)
            if len(starts) > blocks:
                starts = [(size - BLOCK) * n // (blocks - 1) for n in range(blocks)]  # type: ignore[assignment]
            for start in starts:
                file.seek(start)
                digest.update(file.read(BLOCK))
    except OSError:  # a rule reports that it cannot be read
        return FileFact(path=path, size=-1, digest="")
    return FileFact(path=path, size=size, digest=digest.hexdigest()[:16])


def _folder(path: str) -> FileFact:
    names = sorted(
        os.path.relpath(os.path.join(folder, name), path)
        for folder, _, files in os.walk(path)
        for name in files
        if not name.startswith(".")
    )
    digest = hashlib.sha256("\0".join(names).encode(errors="surrogateescape"))
    return FileFact(path=path, size=len(names), digest=digest.hexdigest()[:16])
