"""Patterns of names that match nothing, and the patterns that were probably meant.

One that matches nothing beside others that match is a warning: a list may serve several networks. If no pattern of the
list matches anything, each is an error.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from fnmatch import fnmatchcase
from itertools import islice

from dslc.dsl.diagnostics import Diagnostic
from dslc.dsl.language.suggest import nearest_choice
from dslc.dsl.remedy import remedy, replace_text
from dslc.dsl.source import Span
from dslc.dsl.words import shorten_list

LIKELY = 2_000  # patterns to compare with one that matches nothing,
MEANT = 20  # and how many may be meant


def any_of(pattern: str, names: Iterable[str]) -> bool:
    return any(fnmatchcase(name, pattern) for name in names)


def unmatched_patterns(
    code: str,
    message: str,
    span: Span | None,
    patterns: Sequence[str],
    names: Sequence[str],
    *,
    what: str = "the parameters",
    is_of: Callable[[str, Iterable[str]], bool] = any_of,
) -> Iterator[Diagnostic]:
    """Yields a diagnostic for each pattern of none of `names`; `@` in `message` is the pattern, `code` a number."""
    unmatched = [pattern for pattern in patterns if not is_of(pattern, names)]
    likely = list(islice(likely_patterns(names), LIKELY)) if unmatched else []
    letter = "E" if len(unmatched) == len(patterns) else "W"
    for number, pattern in enumerate(unmatched):
        meant = nearest_choice(pattern, likely) if number < MEANT else None
        meant = meant if meant is None or is_of(meant, names) else None
        yield Diagnostic(
            letter + code,
            message.replace("@", f"`{pattern}`"),
            entry_at(span, pattern),
            help=_meant_pattern(meant, entry_at(span, pattern)) or f"{what} are called {shorten_list(quoted(names))}",
        )


def _meant_pattern(meant: str | None, place: Span | None) -> str:
    return remedy("did you mean ", replace_text(place, f'"{meant}"', f"`{meant}`"), "?") if meant else ""


def likely_patterns(names: Iterable[str]) -> dict[str, None]:
    """Returns patterns that may be meant: names, names with any number, all in a module, all with an ending."""
    patterns: dict[str, None] = {}
    for name in names:
        for form in (name, re.sub(r"\d+", "*", name)):
            parts = form.split(".")
            for number in range(1, len(parts)):
                patterns[".".join(parts[:number]) + ".*"] = None
                patterns["*." + ".".join(parts[number:])] = None
            patterns[form] = None
    return patterns


def entry_at(span: Span | None, text: str) -> Span | None:
    """Returns the span of `text`, in quotes, within the list at `span`."""
    if span is None or (start := span.text().find(f'"{text}"')) < 0:
        return span
    return Span(span.source, span.start + start, span.start + start + len(text) + 2)


def quoted(names: Iterable[str]) -> list[str]:
    return [f"`{name}`" for name in names]
