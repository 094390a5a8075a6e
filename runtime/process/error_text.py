"""The text of an exception: a user's own may be endless, or raise instead of giving a text."""

from __future__ import annotations

READ = 20_000  # letters of an exception's text that are read at most
_WIDE = 400  # letters of a line in a message


def error_text(error: BaseException) -> str:
    """Returns the beginning of an exception's text; "" if it has none."""
    try:
        return str(error)[:READ]
    except Exception:  # a user's own class whose `__str__` fails
        return ""


def narrow(line: str) -> str:
    """Returns a line cut to the width of a message, with the number of letters that are missing."""
    over = len(line) - _WIDE
    return line if over <= 0 else f"{line[:_WIDE]}… ({over:,} letter{'s' * (over > 1)} more)"
