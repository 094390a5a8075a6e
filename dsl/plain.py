"""Text that others wrote, so that it may be shown: nothing in it steers a terminal or a viewer of pictures."""

from __future__ import annotations


def plain(text: str) -> str:
    """Control characters, and those that turn the direction of writing, as escapes such as `\\x1b`."""
    if text.isascii() and text.isprintable():
        return text
    return "".join(char if is_shown(char) else escaped(char) for char in text)


def plain_lines(text: str) -> str:
    """The same of a text of several lines, which stay."""
    return "\n".join(map(plain, text.split("\n")))


def is_shown(char: str) -> bool:
    return char.isprintable() or char in "\u3000\u00a0\u200d"


def escaped(char: str) -> str:
    code = ord(char)
    return f"\\x{code:02x}" if code < 0x100 else f"\\u{code:04x}" if code < 0x10000 else f"\\U{code:08x}"
