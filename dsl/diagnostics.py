"""What is wrong with a job, said so that the reader can mend it.

A `Diagnostic` has a code, a span, what is wrong with its numbers, and what to do. Mistakes are collected, not raised:
whoever finds one adds it to a `Report` and goes on, so that all mistakes of a file come at once. What follows from
another mistake is not reported: a value that could not be resolved is simply absent, and later checks leave it alone.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field, replace
from typing import Literal

from dslc.dsl.source import Span

Severity = Literal["error", "warning"]


@dataclass(frozen=True, kw_only=True, slots=True)
class Note:
    """A second place that matters, or a fact without a place."""

    message: str
    span: Span | None = None


@dataclass(frozen=True, kw_only=True, slots=True)
class Diagnostic:
    """One mistake (or warning) of a job.

    `label` stands under the marked text. `blocks_run` marks what `check`, `plan` and `render` let pass as a warning
    but `run` does not: data that is not there, and what this version plans but cannot carry out yet.
    """

    code: str
    message: str
    span: Span | None
    label: str = ""
    notes: tuple[Note, ...] = ()
    help: str = ""
    severity: Severity = "error"
    blocks_run: bool = False

    def for_run(self) -> Diagnostic:
        """The same as `run` sees it."""
        return replace(self, severity="error") if self.blocks_run else self


@dataclass
class Report:
    """The diagnostics found so far, in the order of the file."""

    found: list[Diagnostic] = field(default_factory=list)

    def add(
        self,
        code: str,
        message: str,
        span: Span | None,
        *,
        label: str = "",
        notes: Iterable[Note] = (),
        help: str = "",
    ) -> None:
        """Adds an error, or a warning where the code begins with W."""
        severity: Severity = "warning" if code.startswith("W") else "error"
        self.extend(
            [
                Diagnostic(
                    code=code, message=message, span=span, label=label, notes=tuple(notes), help=help, severity=severity
                )
            ]
        )

    def extend(self, diagnostics: Iterable[Diagnostic]) -> None:
        for diagnostic in diagnostics:
            if diagnostic not in self.found:
                self.found.append(diagnostic)

    @property
    def errors(self) -> list[Diagnostic]:
        return [d for d in self.found if d.severity == "error"]

    def __iter__(self) -> Iterator[Diagnostic]:
        def key(diagnostic: Diagnostic) -> tuple[bool, int, str, int]:
            span = diagnostic.span
            name = span.source.name if span else ""
            # Files first; then the settings, `<--set 2>` before `<--set 10>`.
            return (span is None, len(name) if name.startswith("<") else 0, name, span.start if span else 0)

        return iter(sorted(self.found, key=key))

    def __bool__(self) -> bool:
        return bool(self.found)


class JobError(Exception):
    """A job that cannot be used, with everything that is wrong with it. Raised by the public Python API alone."""

    def __init__(self, diagnostics: Iterable[Diagnostic]) -> None:
        self.diagnostics = tuple(diagnostics)
        super().__init__(f"{len(self.diagnostics)} mistakes in the job")


def division(whole: int, parts: int) -> str:
    """A label that shows what is over: `63 = 2 x 31 + 1`."""
    return f"{whole} = {parts} x {whole // parts} + {whole % parts}"
