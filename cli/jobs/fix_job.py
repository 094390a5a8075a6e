"""`dslc check --fix`: makes the fixes of a job's diagnostics in its file."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from dslc.dsl.bounds import MISTAKES
from dslc.dsl.diagnostics import Diagnostic, Report
from dslc.dsl.editor.edits import apply_fix
from dslc.dsl.files import overwrite
from dslc.dsl.meaning.load import read_text
from dslc.jobs.check_job import check_one

# Warnings that are fixed as errors are: what nothing uses is removed.
NO_EFFECT = frozenset({"W0101", "W0103"})
_FIRST_UNSAFE = "E02"  # codes below are of syntax, names and types: their fixes change no value that the job states


def fix_job(path: str, settings: list[str], *, trace: bool, unsafe: bool = False) -> list[str]:
    """Makes each fix after which its diagnostic is gone, and returns a line for each. Fixes are tried in the order of
    the file, and the whole job is checked after each. The file is written once, at the end.

    `unsafe` also makes fixes that set other values than the job states, such as its batch or the width of a layer.
    """
    raw = read_text(path, path, path, None, Report())
    if raw is None:
        return []  # the check that follows says why
    before = raw.removeprefix("\ufeff").replace("\r\n", "\n").replace("\r", "\n")
    text, lines = before, []
    for _ in range(MISTAKES.most):
        change = next(_changes(path, text, settings, trace, unsafe), None)
        if change is None:
            break
        text, line = change
        lines.append(line)
    if text != before:
        made = text.replace("\n", "\r\n") if "\r\n" in raw else text
        overwrite(path, ("\ufeff" if raw.startswith("\ufeff") else "") + made)
    return lines


def _changes(path: str, text: str, settings: list[str], trace: bool, unsafe: bool) -> Iterator[tuple[str, str]]:
    """Yields each text of the job with one more fix, and what the fix changes."""
    report, _ = check_one(path, settings, trace=trace, text=text)
    diagnostics = list(report)
    for diagnostic in diagnostics:
        if not (diagnostic.code in NO_EFFECT or (diagnostic.severity == "error" and (unsafe or _is_safe(diagnostic)))):
            continue
        for fix in diagnostic.fixes:
            made = apply_fix(text, path, fix)
            if made is None or not _corrects(diagnostic, diagnostics, path, made, settings, trace):
                continue
            yield made, f"{diagnostic.span or path}: {fix.title} [{diagnostic.code}]"
            break


def _is_safe(diagnostic: Diagnostic) -> bool:
    return diagnostic.code < _FIRST_UNSAFE


def count_unsafe_fixes(diagnostics: Iterable[Diagnostic]) -> int:
    """Returns the number of errors that only an unsafe fix corrects."""
    return sum(
        diagnostic.severity == "error" and bool(diagnostic.fixes) and not _is_safe(diagnostic)
        for diagnostic in diagnostics
    )


def _corrects(
    diagnostic: Diagnostic, before: list[Diagnostic], path: str, text: str, settings: list[str], trace: bool
) -> bool:
    """True if a text no longer has the diagnostic, and no mistake of syntax or of a name that was not there before."""
    report, _ = check_one(path, settings, trace=trace, text=text)
    after = list(report)
    if count(diagnostic, after) >= count(diagnostic, before):
        return False
    codes = {other.code for other in before}
    # A mistake of syntax hides mistakes in names.
    first = "E01" if any(code < "E01" for code in codes) else "E02"
    return not any(other.code < first and other.code not in codes for other in after if other.severity == "error")


def count(diagnostic: Diagnostic, diagnostics: list[Diagnostic]) -> int:
    """Counts the diagnostics that say the same, at any place."""
    return sum((other.code, other.message) == (diagnostic.code, diagnostic.message) for other in diagnostics)
