"""Words what a conversion has found: the batch first, then the keys, as text or as annotations of GitHub."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from dslc.conversion.draft import Draft
from dslc.conversion.recognize import TOOLS
from dslc.dsl.diagnostics import Diagnostic
from dslc.dsl.words import plural

_WIDTH = 46  # of the column of keys
_LEVELS = {"error": "error", "warning": "warning", "note": "notice"}


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


def github_annotations(diagnostics: Iterable[Diagnostic]) -> list[str]:
    """Returns one workflow command of GitHub for each diagnostic."""
    lines = []
    for diagnostic in diagnostics:
        properties = [f"title={_escape(diagnostic.code, property=True)}"]
        if diagnostic.span is not None:
            line, column = diagnostic.span.source.position(diagnostic.span.start)
            name = _escape(diagnostic.span.source.name, property=True)
            properties = [f"file={name}", f"line={line}", f"col={column}", *properties]
        text = diagnostic.message + (f"; {diagnostic.help}" if diagnostic.help else "")
        lines.append(f"::{_LEVELS[diagnostic.severity]} {','.join(properties)}::{_escape(text)}")
    return lines


def _escape(text: str, *, property: bool = False) -> str:
    """Escapes a text as workflow commands want it."""
    for char, code in (("%", "%25"), ("\r", "%0D"), ("\n", "%0A")):
        text = text.replace(char, code)
    if property:
        text = text.replace(":", "%3A").replace(",", "%2C")
    return text
