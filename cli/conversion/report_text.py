"""Words what a conversion has found: the batch first, then the keys."""

from __future__ import annotations

from collections.abc import Sequence

from dslc.conversion.draft import Draft
from dslc.conversion.recognize import TOOLS
from dslc.dsl.words import plural

_WIDTH = 46  # of the column of keys


def head_line(paths: Sequence[str], draft: Draft) -> str:
    """Returns the line with the tools and the global batch."""
    tools = ", ".join(TOOLS[tool] for tool in draft.tools)
    return f"{', '.join(paths)} ({tools}): global batch {draft.batch.describe()}"


def key_lines(draft: Draft) -> list[str]:
    """Returns the list of keys that the job states or implies, and the list of the rest with the reasons."""
    lines: list[str] = []
    counts = {outcome: len(list(draft.verdicts_of(outcome))) for outcome in ("carried", "implied", "named")}
    for title, outcomes in (
        (f"{counts['carried']} carried, {counts['implied']} implied", ("carried", "implied")),
        (f"{plural(counts['named'], 'key')} that the job does not have", ("named",)),
    ):
        rows = [
            f"  {verdict.key:{_WIDTH}} {'-> ' if outcome == 'carried' else ''}{verdict.text}"
            for outcome in outcomes
            for _, verdict in draft.verdicts_of(outcome)
        ]
        if rows:
            lines += ["", f"{title}:", *rows]
    return lines
