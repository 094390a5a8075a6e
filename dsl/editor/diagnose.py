"""Diagnostics of a snapshot: syntax and names at once, and what an analysis found before, where its text still stands.

Analysis takes longer than a keystroke. Until its next answer, the diagnostics that only it finds stay where the
statement around them has not changed.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace

from dslc.dsl.diagnostics import Diagnostic, has_errors
from dslc.dsl.editor.snapshot import Snapshot
from dslc.dsl.source import Span


def diagnose(snapshot: Snapshot) -> list[Diagnostic]:
    """Returns the mistakes in syntax, names and values, in the order of the file."""
    return list(snapshot.loaded.report)


def carry_over(analysed: Iterable[Diagnostic], before: Snapshot, now: Snapshot) -> list[Diagnostic]:
    """Returns the diagnostics of `now`, and those of the analysis of `before` whose statement is still the same.

    A job with mistakes in its names has no analysis: the earlier job's diagnostics are then left out.
    """
    found = diagnose(now)
    if has_errors(found):
        return found
    regions = {region.text: region for region in now.regions}
    keys = {diagnostic.text_key() for diagnostic in found}
    for diagnostic in analysed:
        span = diagnostic.span
        region = None
        if span is not None and span.source.name == before.path:
            holds = (r for r in before.regions if r.start <= span.start and span.end <= r.end)
            region = next(holds, None)
        same = regions.get(region.text) if region else None
        if span is None or region is None or same is None:
            continue
        by = same.start - region.start
        moved = replace(diagnostic, span=Span(now.source, span.start + by, span.end + by))
        if moved.text_key() not in keys:
            found.append(moved)
    return found
