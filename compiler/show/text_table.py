"""Text in aligned columns, for a terminal."""

from __future__ import annotations

import io
from collections.abc import Iterable, Sequence

Row = Sequence[str]
_ANY = 1_000_000  # columns: as many as a table has


def table(
    rows: Iterable[Row], right_columns: Sequence[int] = (), head: Row | None = None, limit: int | None = None
) -> list[str]:
    """Formats rows as columns two spaces apart, by rich. Columns in `right_columns` are set to the right; none is cut.
    Of more than `limit` lines the beginning and the end are shown.
    """
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    all_rows = [*([head] if head else []), *rows]
    hidden = len(all_rows) - limit if limit and len(all_rows) > limit + 1 else 0
    if limit and hidden:
        all_rows = [*all_rows[: limit - 2], *all_rows[-2:]]
    columns = max(map(len, all_rows), default=0)
    grid = Table.grid(padding=(0, 2, 0, 0))
    for n in range(columns):
        grid.add_column(justify="right" if n in right_columns else "left", no_wrap=True)
    for row in all_rows:
        grid.add_row(*map(Text, row))
    console = Console(file=io.StringIO(), color_system=None, width=_ANY)
    segments = console.render_lines(grid, pad=False) if all_rows else []
    lines = ["".join(piece.text for piece in line).rstrip() for line in segments]
    if limit and hidden:
        lines.insert(limit - 2, _more(hidden))
    return lines


def _more(hidden: int) -> str:
    return f"… {hidden} more"


def sectioned_text(title: str, sections: Iterable[tuple[str, list[str]]], width: int | None) -> str:
    """Returns a title and the sections that have lines. Lines longer than `width`, if any, are cut with `…`."""
    lines = [title]
    for heading, body in sections:
        if body:
            lines += ["", heading, *("  " + line for line in body)]
    cut = (line.rstrip() for line in lines)
    return "\n".join(line if width is None or len(line) <= width else line[: width - 1] + "…" for line in cut) + "\n"


def wrap_words(words: Sequence[str], width: int = 92) -> list[str]:
    """Returns words in lines of at most `width` columns."""
    lines: list[str] = []
    for word in words:
        if lines and len(lines[-1]) + 1 + len(word) <= width:
            lines[-1] += " " + word
        else:
            lines.append(word)
    return lines


def shorten_lines(lines: list[str], limit: int) -> list[str]:
    """Returns the beginning and the end of more than `limit` lines."""
    if len(lines) <= limit + 1:
        return lines
    hidden = len(lines) - limit
    return [*lines[: limit - 2], _more(hidden), *lines[-2:]]
