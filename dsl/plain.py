"""Makes untrusted text safe to print: nothing in it controls a terminal or a viewer of pictures."""

from __future__ import annotations


def plain(text: str) -> str:
    """Escapes control characters, and characters that turn the direction of writing: `\x1b`."""
    if text.isascii() and text.isprintable():
        return text
    return "".join(char if is_printable(char) else escaped(char) for char in text)


def plain_lines(text: str) -> str:
    """Escapes a text of several lines, and keeps the line ends."""
    return "\n".join(map(plain, text.split("\n")))


def is_printable(char: str) -> bool:
    return char.isprintable() or char in "\u3000\u00a0\u200d"


def escaped(char: str) -> str:
    code = ord(char)
    return f"\\x{code:02x}" if code < 0x100 else f"\\u{code:04x}" if code < 0x10000 else f"\\U{code:08x}"
