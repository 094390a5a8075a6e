"""Tables on a terminal and in a pipe."""

from __future__ import annotations

from typing import TYPE_CHECKING, TextIO

if TYPE_CHECKING:
    from rich.console import Console

_ANY = 10_000  # columns


def console(screen: TextIO | None = None) -> Console:
    """Returns a console for tables, which keep to the width of a terminal, and are whole in a pipe or a file."""
    from rich.console import Console

    made = Console(file=screen, highlight=False, soft_wrap=True)
    return made if made.is_terminal else Console(file=screen, highlight=False, soft_wrap=True, width=_ANY)
