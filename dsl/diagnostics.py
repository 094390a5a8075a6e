"""Diagnostics: the mistakes of a job, worded so that the reader can correct them.

A `Diagnostic` has a code, a span, a message with numbers, and a remedy. Mistakes are collected, not raised: a check
yields each and continues, so that all mistakes of a file come at once in a `Report`. Consequences of another
mistake are not reported: a value that could not be resolved is simply absent, and later checks ignore it.
"""

from __future__ import annotations

from collections.abc import Generator, Hashable, Iterable, Iterator
from dataclasses import dataclass, field, replace
from typing import Literal, TypeAlias, TypeVar

from dslc.dsl.bounds import MISTAKES
from dslc.dsl.record import Record, positional
from dslc.dsl.remedy import Fix, fixes_of
from dslc.dsl.source import Span

Severity = Literal["error", "warning", "note"]

# Warnings of `check`, `plan` and `render` that are errors, with the same number, for `run`: facts that may differ on
# another machine, and features that this version plans but cannot run yet.
BLOCKING = frozenset({"W0309", "W0712", "W0801", "W0803", "W0806", "W0811", "W0812"})
# Patterns that match nothing, beside others of their list that match.
BESIDE = frozenset({"W0426", "W0710", "W0724", "W0742"})
# Checkpoints that `check --resume` passes over because an older one will do.
PASSED_OVER = frozenset({"W0902", "W0903", "W0904", "W0905", "W0906"})


_SEVERITIES: dict[str, Severity] = {"E": "error", "W": "warning", "N": "note"}


@positional
class Note(Record):
    """A second place that matters, or a fact without a place."""

    message: str
    span: Span | None = None


@positional
class Diagnostic(Record):
    """One mistake of a job, a warning, or a note on a job that is good: the letter of its code tells which. `label`
    stands under the marked text; `subject` is short for the message where several are shown as one.
    """

    code: str
    message: str
    span: Span | None
    label: str = ""
    notes: tuple[Note, ...] = ()
    help: str = ""
    subject: str = ""

    @property
    def fixes(self) -> tuple[Fix, ...]:
        """Returns the changes that the help names, the likeliest first. Each of them corrects the mistake."""
        return fixes_of(self.help)

    @property
    def severity(self) -> Severity:
        return _SEVERITIES[self.code[0]]

    def for_run(self) -> Diagnostic:
        """Returns the diagnostic as `run` sees it: a blocking warning is an error."""
        return replace(self, code=f"E{self.code[1:]}") if self.code in BLOCKING else self

    def as_warning(self) -> Diagnostic:
        """Returns the diagnostic as a warning, whose code has the same number."""
        return replace(self, code=f"W{self.code[1:]}")

    def text_key(self) -> Hashable:
        """Returns the text that a reader sees: two diagnostics with the same text at the same place are one."""
        place = (self.span.source.name, self.span.start, self.span.end) if self.span else None
        return (self.code, self.severity, self.message, place, self.label, self.help)


T = TypeVar("T")
# A check that yields diagnostics and returns a value, as `yield from` and `Report.collect` take it.
Findings: TypeAlias = Generator[Diagnostic, None, T]


def has_errors(diagnostics: Iterable[Diagnostic]) -> bool:
    return any(diagnostic.severity == "error" for diagnostic in diagnostics)


def recorded(findings: Findings[T]) -> Findings[tuple[T, list[Diagnostic]]]:
    """Yields what a check yields; returns its value, and the diagnostics."""
    found: list[Diagnostic] = []
    while True:
        try:
            diagnostic = next(findings)
        except StopIteration as end:
            return end.value, found
        found.append(diagnostic)
        yield diagnostic


def judge(findings: Findings[T]) -> Findings[tuple[T, bool]]:
    """Yields what a check yields; returns its value, and True if no diagnostic is an error."""
    value, found = yield from recorded(findings)
    return value, not has_errors(found)


def passes(diagnostics: Iterable[Diagnostic]) -> Findings[bool]:
    """Yields the diagnostics; returns True if none is an error."""
    return (yield from judge(diagnostic for diagnostic in diagnostics))[1]


class TooManyErrors(Exception):
    """A report has as many mistakes as anyone would read, and the search ends. It has the diagnostics found so far."""


@dataclass
class Report:
    """The diagnostics found so far, in the order of the file. Raises `TooManyErrors` after `MISTAKES` mistakes."""

    found: list[Diagnostic] = field(default_factory=list)
    _said: set[Hashable] = field(default_factory=set, init=False, repr=False, compare=False)
    _mistakes: int = field(default=0, init=False, repr=False, compare=False)

    def add(
        self, code: str, message: str, span: Span | None, *, label: str = "", notes: Iterable[Note] = (), help: str = ""
    ) -> None:
        """Adds an error, a warning if the code begins with W, or a note if it begins with N."""
        self.extend([Diagnostic(code=code, message=message, span=span, label=label, notes=tuple(notes), help=help)])

    def extend(self, diagnostics: Iterable[Diagnostic]) -> None:
        for diagnostic in diagnostics:
            key = diagnostic.text_key()
            if key in self._said:
                continue
            if diagnostic.severity == "error" and diagnostic.code != MISTAKES.code:
                if self._mistakes == MISTAKES.most:
                    self.extend([_FULL])
                    raise TooManyErrors
                self._mistakes += 1
            self._said.add(key)
            self.found.append(diagnostic)

    def collect(self, findings: Findings[T]) -> T:
        """Adds what a check yields; returns the value that it returns."""
        while True:
            try:
                diagnostic = next(findings)
            except StopIteration as end:
                value: T = end.value
                return value
            self.extend([diagnostic])

    def accepts(self, diagnostics: Iterable[Diagnostic]) -> bool:
        """Adds the diagnostics; returns True if none is an error."""
        return self.collect(passes(diagnostics))

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


_FULL = Diagnostic(
    code=MISTAKES.code,
    message=f"the job has more than {MISTAKES.most} mistakes: the rest is not looked for",
    span=None,
    help="mend these first",
)


class JobError(Exception):
    """A job that cannot be used, with all its mistakes. Raised only by the public Python API."""

    def __init__(self, diagnostics: Iterable[Diagnostic], shown: str) -> None:
        """`shown` is the text of all of them, as the command prints them (show.py)."""
        self.diagnostics, self._shown = tuple(diagnostics), shown
        super().__init__(self.diagnostics, shown)

    def __str__(self) -> str:
        return self._shown

    def _render_traceback_(self) -> list[str]:
        """Returns what IPython shows instead of a traceback: the mistakes are in the job, not in the caller."""
        return self._shown.splitlines()


def division(whole: int, parts: int) -> str:
    """Returns a label with the remainder: `63 = 2 x 31 + 1`."""
    return f"{whole} = {parts} x {whole // parts} + {whole % parts}"
