"""The count of numbers in a `.npy` file that has one for each sample, its weight or length. Only its header is read."""

from __future__ import annotations

import os

from dslc.compiler.facts.source_look import MissingDataError, UnusableDataError, size_of
from dslc.compiler.facts.sources import npy_header
from dslc.dsl.files import open_file


def count_of(path: str, name: str) -> int:
    """Returns the number of entries. Raises MissingDataError, which names the file as `name`."""
    help = '`numpy.save("weights.npy", array)` writes one, of one number for each sample'
    size_of(path)
    try:
        with open_file(path) as stream:
            shape, kind = npy_header(stream, os.fstat(stream.fileno()).st_size)
    except OSError as error:
        raise MissingDataError(f"{error.strerror}: {name}", "a file that can be read") from error
    except Exception as error:  # any kind: the bytes of another format lead anywhere
        raise UnusableDataError(f"{name} is not a `.npy` file", help) from error
    if len(shape) != 1 or kind not in "fiub":
        held = "numbers" if kind in "fiub" else "something else than numbers"
        raise UnusableDataError(f"{name} holds {held} of shape {' x '.join(map(str, shape)) or 'none'}", help)
    return shape[0]
