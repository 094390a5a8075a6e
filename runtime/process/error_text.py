"""What an exception says: a user's own may have no end of it, or fail to say anything."""

from __future__ import annotations

READ = 20_000  # letters of the text of an exception that are looked at
_WIDE = 400  # letters of a line, in a message


def error_text(error: BaseException) -> str:
    """The beginning of an exception's text; "" where it has none to give."""
    try:
        return str(error)[:READ]
    except Exception:  # a user's own, whose text fails
        return ""


def narrow(line: str) -> str:
    """A line as far as a message shows it, and how much more there is."""
    over = len(line) - _WIDE
    return line if over <= 0 else f"{line[:_WIDE]}… ({over:,} letter{'s' * (over > 1)} more)"
