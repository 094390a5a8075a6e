"""Tables on a terminal and in a pipe."""

from __future__ import annotations

from typing import TYPE_CHECKING, TextIO

if TYPE_CHECKING:
    from rich.console import Console

_ANY = 10_000  # columns


def console(screen: TextIO | None = None) -> Console:
    """What prints tables: on a terminal they keep to its width; a pipe or a file takes them whole, nothing cut."""
    from rich.console import Console

    made = Console(file=screen, highlight=False, soft_wrap=True)
    return made if made.is_terminal else Console(file=screen, highlight=False, soft_wrap=True, width=_ANY)
