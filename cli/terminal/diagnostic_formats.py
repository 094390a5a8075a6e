"""Formats diagnostics for other programs: annotations of GitHub, SARIF 2.1.0, JUnit's XML.

Rules are the codes. Paths are relative to the current folder, with `/` between their parts, as a job of a CI system
checks out a repository and runs in it.
"""

from __future__ import annotations

import hashlib
import os
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from urllib.parse import quote

from dslc.dsl.codes import explain, titles
from dslc.dsl.diagnostics import Diagnostic
from dslc.dsl.editor.edits import TextEdit, apply_fix, find_fixed_source, text_edits
from dslc.dsl.json_value import Json
from dslc.dsl.plain import plain, plain_lines
from dslc.dsl.show import render
from dslc.dsl.source import Source, Span
from dslc.terminal.version import __version__

Reports = Mapping[str, Sequence[Diagnostic]]  # by the job
HOMEPAGE = "https://pypi.org/project/dslc/"
_GITHUB = {"error": "error", "warning": "warning", "note": "notice"}


def relative_path(name: str) -> str:
    """Returns a path from the current folder if it is in that; "" for a `--set`, which no file holds."""
    if name.startswith("<"):
        return ""
    full, here = os.path.abspath(os.path.expanduser(name)), os.getcwd()
    return (os.path.relpath(full, here) if full.startswith(here + os.sep) else full).replace(os.sep, "/")


def _text(diagnostic: Diagnostic, separator: str = "\n") -> str:
    """Returns message, notes and help, one after another."""
    parts = [diagnostic.message + (f" ({diagnostic.label})" if diagnostic.label else "")]
    parts += [f"note: {note.message}" for note in diagnostic.notes if note.span is None]
    parts += [f"help: {diagnostic.help}"] if diagnostic.help else []
    return plain_lines(separator.join(parts))


# ---------------------------------------------------------------------------------------------------------- GitHub


def github(reports: Reports) -> str:
    """Returns a workflow command for each diagnostic, which GitHub shows beside the line."""
    return "".join(
        f"::{_GITHUB[diagnostic.severity]} {_properties(job, diagnostic)}::{_data(_text(diagnostic))}\n"
        for job, diagnostics in reports.items()
        for diagnostic in diagnostics
    )


def _properties(job: str, diagnostic: Diagnostic) -> str:
    span = diagnostic.span
    path = relative_path(span.source.name) if span else ""
    found: dict[str, object] = {"file": path or relative_path(job)}
    if span is not None and path:
        line, column = span.source.position(span.start)
        end_line, end_column = span.source.position(span.end)
        found |= {"line": line, "endLine": end_line}
        if line == end_line:  # GitHub takes columns of one line alone
            found |= {"col": column, "endColumn": max(column + 1, end_column)}
    found["title"] = f"dslc {diagnostic.code}"
    return ",".join(f"{name}={_property(str(value))}" for name, value in found.items())


def _data(text: str) -> str:
    return text.replace("%", "%25").replace("\r", "%0D").replace("\n", "%0A")


def _property(text: str) -> str:
    return _data(text).replace(":", "%3A").replace(",", "%2C")


# ----------------------------------------------------------------------------------------------------------- SARIF


def sarif(reports: Reports) -> dict[str, Json]:
    """Returns a log of one run, with a rule for each code of it and the fixes of each result."""
    codes = sorted({diagnostic.code for diagnostics in reports.values() for diagnostic in diagnostics})
    seen: Counter[str] = Counter()
    results: list[Json] = [
        _result(job, diagnostic, codes.index(diagnostic.code), seen)
        for job, diagnostics in reports.items()
        for diagnostic in diagnostics
    ]
    rules: list[Json] = [_rule(code) for code in codes]
    driver: dict[str, Json] = {
        "name": "dslc",
        "informationUri": HOMEPAGE,
        "semanticVersion": __version__,
        "rules": rules,
    }
    run: dict[str, Json] = {"tool": {"driver": driver}, "columnKind": "unicodeCodePoints", "results": results}
    return {"$schema": "https://json.schemastore.org/sarif-2.1.0.json", "version": "2.1.0", "runs": [run]}


def _rule(code: str) -> dict[str, Json]:
    title, page = titles().get(code, code), explain(code) or ""
    body = page.partition("\n")[2].strip() or title
    level = {"E": "error", "W": "warning", "N": "note"}[code[0]]
    return {
        "id": code,
        "shortDescription": {"text": title},
        "help": {"text": body, "markdown": body},
        "defaultConfiguration": {"level": level},
    }


def _result(job: str, diagnostic: Diagnostic, rule: int, seen: Counter[str]) -> dict[str, Json]:
    span = diagnostic.span if diagnostic.span and relative_path(diagnostic.span.source.name) else None
    related: list[Json] = [
        {"message": {"text": plain(note.message)}, **_location(note.span)}
        for note in diagnostic.notes
        if note.span is not None and relative_path(note.span.source.name)
    ]
    place = _location(span) if span else {"physicalLocation": {"artifactLocation": _artifact(job)}}
    result: dict[str, Json] = {
        "ruleId": diagnostic.code,
        "ruleIndex": rule,
        "level": diagnostic.severity,
        "message": {"text": _text(diagnostic)},
        "locations": [place],
        "partialFingerprints": {"dslc/v1": _fingerprint(job, diagnostic, span, seen)},
    }
    fixes = [fix for fix in _fixes(diagnostic, span) if fix]
    return result | ({"relatedLocations": related} if related else {}) | ({"fixes": fixes} if fixes else {})


def _fingerprint(job: str, diagnostic: Diagnostic, span: Span | None, seen: Counter[str]) -> str:
    """Returns a hash of code, file and line text, which stays when lines above it come and go, and numbers change."""
    line = " ".join(span.source.line(span.source.position(span.start)[0]).split()) if span else ""
    name = relative_path(span.source.name if span else job)
    key = "\0".join((diagnostic.code, name, line))
    seen[key] += 1
    return hashlib.sha256(f"{key}\0{seen[key]}".encode()).hexdigest()[:32]


def _location(span: Span | None) -> dict[str, Json]:
    assert span is not None
    return {"physicalLocation": {"artifactLocation": _artifact(span.source.name), "region": _region(span)}}


def _artifact(name: str) -> dict[str, Json]:
    return {"uri": quote(relative_path(name))}


def _region(span: Span) -> dict[str, Json]:
    line, column = span.source.position(span.start)
    end_line, end_column = span.source.position(span.end)
    return {"startLine": line, "startColumn": column, "endLine": end_line, "endColumn": end_column}


def _fixes(diagnostic: Diagnostic, span: Span | None) -> Iterator[Json]:
    """Yields the fixes as replacements of whole lines, each in the file that it changes."""
    for fix in diagnostic.fixes if span is not None else ():
        source = find_fixed_source(fix, span, span.source) if span is not None else None
        made = apply_fix(source.text, source.name, fix) if source and relative_path(source.name) else None
        if source is not None and made is not None:
            replacements: list[Json] = [_replacement(source, edit) for edit in text_edits(source.text, made)]
            change: Json = {"artifactLocation": _artifact(source.name), "replacements": replacements}
            yield {"description": {"text": plain(fix.title)}, "artifactChanges": [change]}


def _replacement(source: Source, edit: TextEdit) -> dict[str, Json]:
    return {"deletedRegion": _region(Span(source, edit.start, edit.end)), "insertedContent": {"text": edit.text}}


# ----------------------------------------------------------------------------------------------------------- JUnit


def junit(reports: Reports) -> str:
    """Returns a suite for each job, a case for each error or one that passes; warnings and notes are its output."""
    suites = [_suite(job, diagnostics) for job, diagnostics in reports.items()]
    return (
        '<?xml version="1.0" encoding="utf-8"?>\n<testsuites name="dslc check">\n' + "".join(suites) + "</testsuites>\n"
    )


def _suite(job: str, diagnostics: Sequence[Diagnostic]) -> str:
    name = _attribute(relative_path(job))
    errors = [diagnostic for diagnostic in diagnostics if diagnostic.severity == "error"]
    others = [diagnostic for diagnostic in diagnostics if diagnostic.severity != "error"]
    cases = "".join(
        f"    <testcase classname={name} name={_attribute(_case_name(error))}>\n"
        f"      <failure type={_attribute(error.code)} message={_attribute(error.message)}>"
        f"{_escaped(render([error], color=False).rsplit(chr(10), 3)[0])}</failure>\n"
        "    </testcase>\n"
        for error in errors
    )
    cases = cases or f"    <testcase classname={name} name={_attribute('check')}/>\n"
    output = f"    <system-out>{_escaped(render(others, color=False))}</system-out>\n" if others else ""
    counts = f'tests="{max(1, len(errors))}" failures="{len(errors)}" errors="0" skipped="0"'
    return f"  <testsuite name={name} {counts}>\n{cases}{output}  </testsuite>\n"


def _case_name(error: Diagnostic) -> str:
    if error.span is None:
        return error.code
    line, column = error.span.source.position(error.span.start)
    return f"{error.code} at {line}:{column}"


def _attribute(text: str) -> str:
    from xml.sax.saxutils import quoteattr

    return quoteattr(plain(text))


def _escaped(text: str) -> str:
    from xml.sax.saxutils import escape

    return escape(text)
