"""Offsets of a text as positions of the protocol, which counts lines and, in a line, code units of an encoding.

Only `\\n`, `\\r\\n` and `\\r` end a line there; Python's `splitlines`, which pygls uses, knows more line ends.
"""

from __future__ import annotations

import bisect
import re
from collections.abc import Sequence

from lsprotocol import types

_WIDTHS = {"utf-8": ("utf-8", 1), "utf-16": ("utf-16-le", 2), "utf-32": ("utf-32-le", 4)}


class LineTable:
    def __init__(self, text: str, encoding: str = "utf-16") -> None:
        self.text, self.encoding = text, encoding
        self.codec, self.width = _WIDTHS[encoding]
        self.starts = [0, *(found.end() for found in re.finditer(r"\r\n|\n|\r", text))]

    def position(self, offset: int) -> types.Position:
        line = bisect.bisect_right(self.starts, offset) - 1
        return types.Position(line, self.units(self.text[self.starts[line] : offset]))

    def range(self, start: int, end: int) -> types.Range:
        return types.Range(self.position(start), self.position(end))

    def offset(self, position: types.Position) -> int:
        """Returns the offset of a position, or of the end of its line or text if it lies behind that."""
        if position.line >= len(self.starts):
            return len(self.text)
        start = self.starts[position.line]
        line = self.text[start : self.starts[position.line + 1]] if position.line + 1 < len(self.starts) else ""
        line = line.rstrip("\r\n") if line else self.text[start:]
        count = 0
        for at, char in enumerate(line):
            if count >= position.character:
                return start + at
            count += self.units(char)
        return start + len(line)

    def units(self, text: str) -> int:
        return len(text) if text.isascii() else len(text.encode(self.codec, "surrogatepass")) // self.width


def apply_changes(text: str, changes: Sequence[types.TextDocumentContentChangeEvent], encoding: str) -> str:
    """Returns the text after the changes; the places of each change count in the text after the one before it."""
    for change in changes:
        if isinstance(change, types.TextDocumentContentChangePartial):
            lines = LineTable(text, encoding)
            start, end = lines.offset(change.range.start), lines.offset(change.range.end)
            text = text[:start] + change.text + text[max(start, end) :]
        else:
            text = change.text
    return text
