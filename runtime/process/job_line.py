"""Marks an exception with the line of the job that it concerns, in the code that works for that line.

Model: `with mark_errors(step.line):` marks an exception that leaves the block; the mark of an inner block stays.
`line_of` reads the mark, also through exceptions that were raised from a marked one. failure.py finds which of the
model's modules raised an exception.

Limits: exceptions that refuse attributes stay unmarked.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Iterator
from typing import TypeVar

from dslc.runtime.process.error_text import causes

_MARK, _DURING = "_dslc_line", "_dslc_during"

T = TypeVar("T")


class mark_errors(contextlib.ContextDecorator):
    """Marks exceptions with a line of the job, and with the part at work, as a `with` statement or a decorator; not
    with "".
    """

    def __init__(self, line: str, during: str = "") -> None:
        self._line, self._during = line, during

    def __enter__(self) -> None:
        pass

    def __exit__(self, kind: object, error: BaseException | None, traceback: object) -> None:
        if error is None:
            return
        with contextlib.suppress(Exception):  # a user's own class may refuse the attribute
            if self._line and not line_of(error):
                setattr(error, _MARK, self._line)
            if self._during and not during(error):
                setattr(error, _DURING, self._during)


def mark_item_errors(line: str, items: Iterable[T]) -> Iterator[T]:
    """Yields the same items; marks an exception raised while making one."""
    with mark_errors(line):
        yield from items


def mark_line(error: BaseException, line: str) -> None:
    with contextlib.suppress(Exception):  # a user's own class may refuse the attribute
        setattr(error, _MARK, line)


def mark_during(error: BaseException, during_what: str) -> None:
    """Marks an exception with the part at work, in place of the mark of an inner block."""
    with contextlib.suppress(Exception):  # a user's own class may refuse the attribute
        setattr(error, _DURING, during_what)


def line_of(error: BaseException) -> str:
    """Returns the line with which an exception, or one that it was raised from, is marked; "" if there is none."""
    return _mark_of(error, _MARK)


def during(error: BaseException) -> str:
    """Returns what was at work when an exception was raised, if it is marked with that; "" if not."""
    return _mark_of(error, _DURING)


def _mark_of(error: BaseException, mark: str) -> str:
    marks = (vars(cause).get(mark, "") for cause in causes(error))
    return next((str(found) for found in marks if found), "")
