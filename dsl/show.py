"""Formats diagnostics, for a person and for a program.

`render` shows each with its line, carets under the exact characters, and the notes and the help below; `to_json`
returns the same as plain data, one object each. Both take them in the order given: a `Report` iterates in the order of
the file. Nothing in a job or a file name reaches the terminal as a control sequence: control characters are shown as
`\x1b`, in messages as in the lines shown. Nothing in a job makes them long either: a long text loses its middle, a long
line the part far from the marked characters, and a long list its last diagnostics.

Limits: columns are counted in characters, as editors do; the width on the screen is guessed from Unicode's East Asian
width and combining class, which is right for everything but some emoji sequences.
"""

from __future__ import annotations

from collections.abc import Iterable

from dslc.dsl.diagnostics import Diagnostic, Note
from dslc.dsl.json_value import Json
from dslc.dsl.plain import escaped, is_printable, plain
from dslc.dsl.remedy import Edit
from dslc.dsl.source import Span
from dslc.dsl.words import plural

TAB = 4
MAX_LINES = 6  # lines of a span; the middle of a longer one is left out
MAX_SHOWN = 150  # diagnostics
MAX_TEXT = 600  # characters of a message, or of a line of a help
MAX_HELP = 12  # lines of a help
MAX_NOTES = 12
MAX_LINE = 200  # characters of a line of the job, and of the marked text in it
BEFORE = 40  # of them, those before the marked text

BOLD, RED, YELLOW, CYAN, GREEN, BLUE, RESET = (
    "\33[1m",
    "\33[1;31m",
    "\33[1;33m",
    "\33[1;36m",
    "\33[1;32m",
    "\33[1;34m",
    "\33[0m",
)
SEVERITY = {"error": RED, "warning": YELLOW, "note": BLUE}


def render(diagnostics: Iterable[Diagnostic], *, color: bool) -> str:
    """Returns the text of all, an empty line between them, and a last line that counts them; "" for none."""
    all_diagnostics = list(diagnostics)
    if not all_diagnostics:
        return ""
    paint = _Paint(color)
    texts = ["\n".join(_one(diagnostic, paint)) for diagnostic in all_diagnostics[:MAX_SHOWN]]
    left = f", the first {MAX_SHOWN} shown" if len(all_diagnostics) > MAX_SHOWN else ""
    return "\n\n".join([*texts, _count(all_diagnostics) + left]) + "\n"


def to_json(diagnostics: Iterable[Diagnostic]) -> list[dict[str, Json]]:
    """Returns plain data. Lines and columns count from 1; `end_column` is the column after the last character. A
    diagnostic without a place has null there. dsl/remedy.py says what an edit means.
    """
    return [
        {
            "code": diagnostic.code,
            "severity": diagnostic.severity,
            "message": _brief(diagnostic.message),
            **_start(diagnostic.span),
            **_end(diagnostic.span),
            "notes": [{"message": _brief(note.message), **_start(note.span)} for note in diagnostic.notes[:MAX_NOTES]],
            "help": "\n".join(_brief_lines(diagnostic.help)),
            "fixes": [{"title": fix.title, "edits": [_edit(edit) for edit in fix.edits]} for fix in diagnostic.fixes],
        }
        for diagnostic in diagnostics
    ]


def _edit(edit: Edit) -> dict[str, Json]:
    return {"path": edit.path, "value": edit.value, **_start(edit.place), **_end(edit.place)}


def _start(span: Span | None) -> dict[str, Json]:
    line, column = span.source.position(span.start) if span else (None, None)
    return {"file": span.source.name if span else None, "line": line, "column": column}


def _end(span: Span | None) -> dict[str, Json]:
    line, column = span.source.position(span.end) if span else (None, None)
    return {"end_line": line, "end_column": column}


def _count(found: list[Diagnostic]) -> str:
    counted = {what: sum(diagnostic.severity == what for diagnostic in found) for what in SEVERITY}
    return ", ".join(plural(n, what) for what, n in counted.items() if n)


class _Paint:
    def __init__(self, color: bool) -> None:
        self.color = color

    def __call__(self, code: str, text: str) -> str:
        return f"{code}{text}{RESET}" if self.color and text else text


def _one(diagnostic: Diagnostic, paint: _Paint) -> list[str]:
    color = SEVERITY[diagnostic.severity]
    head = paint(color, f"{diagnostic.severity}[{diagnostic.code}]")
    lines = [head + paint(BOLD, f": {plain(_brief(diagnostic.message))}")]
    width = 1
    if diagnostic.span:
        first, last = _rows(diagnostic.span)
        width = len(str(last))
        lines.append(_arrow(diagnostic.span, width, paint))
        lines.append(paint(BLUE, f"{'':{width}} |"))
        label = plain(_brief(diagnostic.label))
        shown = _single_line if first == last else _several_lines
        lines.extend(shown(diagnostic.span, label, width, paint, color))
        if diagnostic.notes or diagnostic.help:
            lines.append(paint(BLUE, f"{'':{width}} |"))
    for note in diagnostic.notes[:MAX_NOTES]:
        lines.extend(_note(note, width, paint))
    if len(diagnostic.notes) > MAX_NOTES:
        lines.append(paint(CYAN, "note") + f": and {len(diagnostic.notes) - MAX_NOTES} more")
    if diagnostic.help:
        summary, *remedies = _brief_lines(diagnostic.help)
        lines.append(paint(GREEN, "help") + f": {plain(summary)}")
        lines.extend(f"  {plain(remedy)}" for remedy in remedies)
    return lines


def _note(note: Note, width: int, paint: _Paint) -> list[str]:
    lines = [paint(CYAN, "note") + f": {plain(_brief(note.message))}"]
    return [*lines, _arrow(note.span, width, paint)] if note.span else lines


def _arrow(span: Span, width: int, paint: _Paint) -> str:
    return f"{'':{width}}{paint(BLUE, '-->')} {plain(str(span))}"


def _rows(span: Span) -> tuple[int, int]:
    """Returns the first and the last line of a span; a span that ends with a line's end belongs to that line."""
    text = span.source.text
    end = max(span.start, span.end)
    while end > span.start and text[end - 1 : end] == "\n":
        end -= 1
    return span.source.position(span.start)[0], span.source.position(end)[0]


def _single_line(span: Span, label: str, width: int, paint: _Paint, color: str) -> list[str]:
    row, column = span.source.position(span.start)
    line = span.source.line(row)
    marked = line[column - 1 : column - 1 + max(0, span.end - span.start)].rstrip("\r")
    line, before, marked = _window(line.rstrip("\r"), column - 1, marked)
    indent = _columns(before)
    carets = "^" * max(1, _columns(marked, indent))
    under = f"{'':{indent}}{paint(color, f'{carets} {label}'.rstrip())}"
    gutter = paint(BLUE, f"{row:>{width}} |")
    return [f"{gutter} {_line(line)}".rstrip(), f"{paint(BLUE, f'{chr(32) * width} |')} {under}"]


def _several_lines(span: Span, label: str, width: int, paint: _Paint, color: str) -> list[str]:
    first, last = _rows(span)
    rows = list(range(first, last + 1))
    if len(rows) > MAX_LINES:
        rows = [*rows[: MAX_LINES // 2], 0, *rows[-(MAX_LINES // 2 - 1) :]]
    lines = []
    for row in rows:
        if row == 0:
            lines.append(f"{paint(BLUE, '.' * width + ' |')} {paint(color, '|')} …")
            continue
        edge = paint(color, "/" if row == first else "|")
        gutter = paint(BLUE, f"{row:>{width}} |")
        lines.append(f"{gutter} {edge} {_line(_window(span.source.line(row), 0, '')[0])}".rstrip())
    text = span.source.line(last)
    end_row, end_column = span.source.position(span.end)
    marked = _window(text, 0, text[: end_column - 1] if end_row == last else text)[2]
    under = f"|{'_' * max(1, _columns(marked.rstrip(chr(13))))}^ {label}".rstrip()
    return [*lines, f"{paint(BLUE, f'{chr(32) * width} |')} {paint(color, under)}"]


# ------------------------------------------------------------------------------------------------------ characters


def _brief(text: str) -> str:
    """Returns the text, or the beginning and the end of a long one."""
    return text if len(text) <= MAX_TEXT else f"{text[: MAX_TEXT * 2 // 3]} … {text[-MAX_TEXT // 3 :]}"


def _brief_lines(help: str) -> list[str]:
    """Returns the lines of a help: a list of remedies has one for each, which is not to be cut by the others."""
    return [_brief(line) for line in help.split("\n")[:MAX_HELP]]


def _window(line: str, start: int, marked: str) -> tuple[str, str, str]:
    """Returns the shown part of a line in which `marked` begins at `start`, the part before the mark, and the mark."""
    if len(line) <= MAX_LINE:
        return line, line[:start], marked
    first = max(0, min(start - BEFORE, len(line) - MAX_LINE))
    last = first + MAX_LINE
    left, right = "…" if first else "", "…" if last < len(line) else ""
    return f"{left}{line[first:last]}{right}", left + line[first:start], marked[: last - start]


def _line(text: str) -> str:
    """Returns a line as it is shown: tabs as spaces, control characters as escapes."""
    text = text.rstrip("\r")
    if "\t" not in text:
        return plain(text)
    shown, at = [], 0
    for char in text:
        piece = " " * (TAB - at % TAB) if char == "\t" else plain(char)
        at += _columns(char, at)
        shown.append(piece)
    return "".join(shown)


def _columns(text: str, start: int = 0) -> int:
    """Returns the width of a text on the screen if it begins at column `start` (from 0), as `_line` shows it."""
    if text.isascii() and text.isprintable():
        return len(text)
    import unicodedata  # only if a line needs it

    at = start
    for char in text:
        if char == "\t":
            at += TAB - at % TAB
        elif not is_printable(char):
            at += len(escaped(char))
        elif unicodedata.combining(char) or char == "\u200d":
            continue
        else:
            at += 2 if unicodedata.east_asian_width(char) in "WF" else 1
    return at - start
