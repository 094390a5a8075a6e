"""Numbers and lists in words, for messages."""

from __future__ import annotations

from collections.abc import Iterable, Sequence


def article(noun: str) -> str:
    return f"{'an' if noun.lstrip('`')[0].lower() in 'aeio' else 'a'} {noun}"


def plural(count: int, noun: str) -> str:
    """Formats a count with its noun: `1 node`, `2 nodes`, `1,797 batches`."""
    return f"{count} {noun}" if count == 1 else f"{count:,} {noun}{'es' if noun.endswith(('ch', 's', 'x')) else 's'}"


def quoted(text: str) -> str:
    escaped = text.replace("\\", "\\\\").replace('"', '\\"').replace("\n", "\\n").replace("\t", "\\t")
    return f'"{escaped}"'


def listed(choices: Iterable[str], limit: int = 16) -> str:
    """Joins choices: `a`, `b` or `c`."""
    quoted = [f"`{choice}`" for choice in choices]
    if len(quoted) > limit:
        return shorten_list(quoted, limit)
    return either(quoted)


def either(choices: Iterable[object]) -> str:
    """Joins choices as they are: `1, 2 or 4`."""
    texts = list(map(str, choices))
    return " or ".join([", ".join(texts[:-1]), texts[-1]] if len(texts) > 1 else texts)


def shorten_list(texts: Sequence[str], most: int = 3) -> str:
    """Joins texts, of many the first alone: `a, b, c and 2 more`."""
    more = f" and {len(texts) - most} more" if len(texts) > most else ""
    return ", ".join(texts[:most]) + more
