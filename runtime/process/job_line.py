"""Which line of the job an exception concerns: said by the code that works for that line.

Model: `with at(step.line):` marks an exception that leaves the block with the line, and a mark that is there already,
of an inner block, stays. `line_of` reads it, through exceptions that were raised from a marked one.

Limits: exceptions that refuse attributes stay unmarked. A module of the model is not called by this code; which of them
raised an exception is found by failure.py.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Iterator
from typing import TypeVar

_MARK = "_dslc_line"

T = TypeVar("T")


class at(contextlib.ContextDecorator):
    """Marks exceptions with a line of the job, as a `with` statement or a decorator. An empty line marks nothing."""

    def __init__(self, line: str) -> None:
        self._line = line

    def __enter__(self) -> None:
        pass

    def __exit__(self, kind: object, error: BaseException | None, traceback: object) -> None:
        if error is not None and self._line and not line_of(error):
            with contextlib.suppress(Exception):  # one of the user's own classes may refuse it
                setattr(error, _MARK, self._line)


def each_at(line: str, items: Iterable[T]) -> Iterator[T]:
    """The same items; an exception in making one is marked."""
    with at(line):
        yield from items


def line_of(error: BaseException) -> str:
    """The line that an exception, or one that it was raised from, is marked with; "" where none is."""
    seen: BaseException | None = error
    while seen is not None:
        line = vars(seen).get(_MARK, "")
        if line:
            return str(line)
        seen = seen.__cause__
    return ""
