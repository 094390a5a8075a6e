"""Text and places in it.

A `Source` is one text that can hold a mistake: a job file, or one `--set` of the command line. A `Span` is a half-open
range of character offsets in it. Everything that a diagnostic points at carries a span.
"""

from __future__ import annotations

import bisect
from dataclasses import dataclass, field


@dataclass(frozen=True, eq=False)
class Source:
    """A text with a name. `name` is shown in messages: the path as the user gave it, or `<--set 2>`."""

    name: str
    text: str
    _starts: list[int] = field(default_factory=list, repr=False)

    def starts(self) -> list[int]:
        """Returns the offset at which each line begins."""
        if not self._starts:
            self._starts.append(0)
            self._starts.extend(i + 1 for i, char in enumerate(self.text) if char == "\n")
        return self._starts

    def position(self, offset: int) -> tuple[int, int]:
        """Returns line and column of an offset, both counted from 1, columns in characters."""
        line = bisect.bisect_right(self.starts(), offset)
        return line, offset - self.starts()[line - 1] + 1

    def line(self, number: int) -> str:
        """Returns the text of line `number` (from 1), without its line end."""
        start = self.starts()[number - 1]
        end = self.text.find("\n", start)
        return self.text[start:] if end < 0 else self.text[start:end]


@dataclass(frozen=True, slots=True)
class Span:
    """Characters `start` to `end` (not included) of a source."""

    source: Source
    start: int
    end: int

    def text(self) -> str:
        return self.source.text[self.start : self.end]

    def to(self, other: Span) -> Span:
        """Returns the span from the beginning of this one to the end of the other."""
        return Span(self.source, self.start, max(self.end, other.end))

    def __str__(self) -> str:
        line, column = self.source.position(self.start)
        return f"{self.source.name}:{line}:{column}"


def short_line(span: Span | None) -> str:
    """Formats a span as `digits.plt:6:5`: the same on any machine."""
    if span is None:
        return ""
    return str(span).replace("\\", "/").rsplit("/", 1)[-1]
