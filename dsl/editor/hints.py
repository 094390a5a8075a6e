"""Inlay hints: the shape after each layer, the batch of a rank, and memory and time beside `devices`.

VS Code cuts hints after 43 characters of a line.
"""

from __future__ import annotations

from dslc.dsl.editor.figures import JobFigures
from dslc.dsl.editor.hover import layer_text, placed_layers, rank_text
from dslc.dsl.editor.snapshot import Snapshot
from dslc.dsl.record import Record, record


@record
class Hint(Record):
    """A text shown after a character of the job, and Markdown for its tooltip."""

    offset: int
    label: str
    tooltip: str


def hints(snapshot: Snapshot, figures: JobFigures | None) -> list[Hint]:
    """Returns the hints of a job, in the order of the file; none before the first analysis."""
    if figures is None:
        return []
    found = [
        Hint(offset=end, label=f"→ {layer.output}", tooltip=layer_text(layer))
        for _, end, layer in placed_layers(snapshot, figures)
    ]
    for at, (token, role, scope) in enumerate(snapshot.tokens):
        if role == "block" and token.text == "devices":
            parts = [figures.peak and f"peak {figures.peak}", figures.step_time and f"step {figures.step_time}"]
            label = ", ".join(part for part in parts if part)
            end = snapshot.tokens[at + 1].token.end if at + 1 < len(snapshot.tokens) else token.end
            found += [Hint(offset=end, label=label, tooltip=rank_text(figures))] if label else []
        elif role == "field" and (scope.block, scope.path, token.text) == ("data", (), "batch") and figures.batch:
            label = f"{figures.batch} a rank, {figures.microbatch} at a time"
            found.append(Hint(offset=_line_end(snapshot, at), label=label, tooltip=rank_text(figures)))
    return sorted(found, key=lambda hint: hint.offset)


def _line_end(snapshot: Snapshot, at: int) -> int:
    """Returns the end of the last token of the entry that begins with token `at`."""
    entry = snapshot.tokens[at]
    end = entry.token.end
    for token, _, scope in snapshot.tokens[at + 1 :]:
        if token.kind in ("_NL", "RBRACE", "COMMA") and not scope.brackets:
            break
        end = token.end
    return end
