"""The facts of a mixture, computed from the facts of its sources."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from dslc.compiler.ir.facts import SourceFacts


def mixed(parts: Sequence[SourceFacts]) -> SourceFacts:
    """Returns the facts of all sources together: what one sample is, by the first that tells, and how many there are.

    `parts` keeps the facts of each.
    """
    told = next((part for part in parts if part.input is not None or part.structures is not None), parts[0])
    faulty = next((part for part in parts if part.missing), SourceFacts())
    known = all(part.samples is not None for part in parts)
    return replace(
        told,
        samples=sum(part.samples or 0 for part in parts) if known else None,
        validation_samples=None,
        test_samples=None,
        shards=None,
        classes=next((part.classes for part in parts if part.classes is not None), None),
        vocab=next((part.vocab for part in parts if part.vocab is not None), None),
        stream=False,
        changes=next((part.changes for part in parts if part.changes is not None), None),
        loss_counts=any(part.loss_counts for part in parts),
        found={},
        missing=faulty.missing,
        help=faulty.help,
        code=faulty.code,
        parts=tuple(replace(part, parts=()) for part in parts),
    )
