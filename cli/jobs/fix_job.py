"""`dslc check --fix`: makes the fixes of a job's diagnostics in its file, and in the files that it imports."""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator, Mapping

from dslc.dsl.bounds import MISTAKES
from dslc.dsl.diagnostics import Diagnostic, Report
from dslc.dsl.editor.edits import apply_fix, find_fixed_source
from dslc.dsl.files import overwrite
from dslc.dsl.meaning.load import read_text
from dslc.dsl.source import Source
from dslc.jobs.check_job import check_one

# Warnings that are fixed as errors are: what nothing uses is removed.
NO_EFFECT = frozenset({"W0101", "W0103"})
_FIRST_UNSAFE = "E02"  # codes below are of syntax, names and types: their fixes change no value that the job states


class _JobTexts:
    """The texts of a job and of the files that it imports, as fixes change them, by their names in diagnostics."""

    def __init__(self, path: str, settings: list[str], trace: bool) -> None:
        self.path, self.settings, self.trace = path, settings, trace
        self.raw: dict[str, str] = {}  # as they are on the disk
        self.texts: dict[str, str] = {}

    def read_file(self, name: str) -> bool:
        """Reads a file that has not been read yet; returns False if it cannot be read."""
        if name not in self.raw:
            raw = read_text(os.path.expanduser(name), name, name, None, Report())
            if raw is None:
                return False
            self.raw[name] = raw
            self.texts[name] = _plain_text(raw)
        return True

    def check(self, changed: Mapping[str, str] | None = None) -> list[Diagnostic]:
        """Returns the diagnostics of the job, with other texts for some files."""
        texts = {**self.texts, **(changed or {})}
        text = texts.pop(self.path)
        imported = {os.path.realpath(os.path.expanduser(name)): other for name, other in texts.items()}
        report, _ = check_one(self.path, self.settings, trace=self.trace, text=text, imported=imported)
        return list(report)

    def write(self) -> None:
        """Writes the files whose texts have changed, with the line ends and the byte-order mark that they had."""
        for name, text in self.texts.items():
            raw = self.raw[name]
            if text != _plain_text(raw):
                lines = text.replace("\n", "\r\n") if "\r\n" in raw else text
                overwrite(os.path.expanduser(name), ("\ufeff" if raw.startswith("\ufeff") else "") + lines)


def _plain_text(raw: str) -> str:
    return raw.removeprefix("\ufeff").replace("\r\n", "\n").replace("\r", "\n")


def fix_job(path: str, settings: list[str], *, trace: bool, unsafe: bool = False) -> list[str]:
    """Makes each fix after which its diagnostic is gone, in the job or in the file that it imports, and returns a line
    for each. Fixes are tried in the order of the file, and the whole job is checked after each. The files are written
    once, at the end.

    `unsafe` also makes fixes that set other values than the job states, such as its batch or the width of a layer.
    """
    job, lines = _JobTexts(path, settings, trace), []
    if not job.read_file(path):
        return []  # the check that follows says why
    for _ in range(MISTAKES.most):
        change = next(_changes(job, unsafe), None)
        if change is None:
            break
        name, text, line = change
        job.texts[name] = text
        lines.append(line)
    job.write()
    return lines


def _changes(job: _JobTexts, unsafe: bool) -> Iterator[tuple[str, str, str]]:
    """Yields the name and the text of a file with one more fix, and what the fix changes."""
    diagnostics = job.check()
    main = Source(job.path, job.texts[job.path])
    for diagnostic in diagnostics:
        if not (diagnostic.code in NO_EFFECT or (diagnostic.severity == "error" and (unsafe or _is_safe(diagnostic)))):
            continue
        for fix in diagnostic.fixes:
            source = find_fixed_source(fix, diagnostic.span, main)
            if source is None or not job.read_file(source.name):
                continue
            text = apply_fix(source.text, source.name, fix)
            if text is None or not _corrects(diagnostic, diagnostics, job, {source.name: text}):
                continue
            yield source.name, text, f"{diagnostic.span or job.path}: {fix.title} [{diagnostic.code}]"
            break


def _is_safe(diagnostic: Diagnostic) -> bool:
    return diagnostic.code < _FIRST_UNSAFE


def count_unsafe_fixes(diagnostics: Iterable[Diagnostic]) -> int:
    """Returns the number of errors that only an unsafe fix corrects."""
    return sum(
        diagnostic.severity == "error" and bool(diagnostic.fixes) and not _is_safe(diagnostic)
        for diagnostic in diagnostics
    )


def _corrects(diagnostic: Diagnostic, before: list[Diagnostic], job: _JobTexts, changed: Mapping[str, str]) -> bool:
    """True if the job no longer has the diagnostic, and no mistake of syntax or of a name that was not there before."""
    after = job.check(changed)
    if count(diagnostic, after) >= count(diagnostic, before):
        return False
    codes = {other.code for other in before}
    # A mistake of syntax hides mistakes in names.
    first = "E01" if any(code < "E01" for code in codes) else "E02"
    return not any(other.code < first and other.code not in codes for other in after if other.severity == "error")


def count(diagnostic: Diagnostic, diagnostics: list[Diagnostic]) -> int:
    """Counts the diagnostics that say the same, at any place."""
    return sum((other.code, other.message) == (diagnostic.code, diagnostic.message) for other in diagnostics)
