"""The text of an exception, and the exceptions behind it. A user's own may have an endless text, or none, or be its own
cause.
"""

from __future__ import annotations

from collections.abc import Iterator

READ = 20_000  # letters of an exception's text that are read at most
_WIDE = 400  # letters of a line in a message


def error_text(error: BaseException) -> str:
    """Returns the beginning of an exception's text; "" if it has none."""
    try:
        return str(error)[:READ]
    except Exception:  # a user's own class whose `__str__` fails
        return ""


def causes(error: BaseException, *, contexts: bool = False) -> Iterator[BaseException]:
    """Yields an exception and the exceptions that it was raised from, each once: `raise error from error` makes a ring.
    `contexts`: also those that were handled when it was raised.
    """
    seen: set[int] = set()
    cause: BaseException | None = error
    while cause is not None and id(cause) not in seen:
        yield cause
        seen.add(id(cause))
        cause = cause.__cause__ or (cause.__context__ if contexts else None)


def narrow(line: str) -> str:
    """Returns a line cut to the width of a message, with the number of letters that are missing."""
    over = len(line) - _WIDE
    return line if over <= 0 else f"{line[:_WIDE]}… ({over:,} letter{'s' * (over > 1)} more)"
