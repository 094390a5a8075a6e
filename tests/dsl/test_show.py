"""Diagnostics as they are shown: the layout to the character, and the plain data."""

from __future__ import annotations

import re
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dslc.dsl.diagnostics import Diagnostic, Note, Report
from dslc.dsl.show import render, to_json
from dslc.dsl.source import Source, Span


def found(
    text: str, start: int, end: int, *, message: str = "wrong", label: str = "", help: str = "", name: str = "a.plt"
) -> Diagnostic:
    span = Span(Source(name, text), start, end)
    return Diagnostic(code="E0301", message=message, span=span, label=label, help=help)


def shown(*diagnostics: Diagnostic) -> str:
    return render(diagnostics, color=False)


def marked(text: str, start: int, end: int, label: str = "") -> str:
    """Returns only the lines of the snippet."""
    return "\n".join(shown(found(text, start, end, label=label)).split("\n")[3:-3])


def test_the_layout_of_the_language_page() -> None:
    lines = [""] * 13 + ["  batch = 64"] + [""] * 5 + ["  data = 3"]
    source = Source("digits.plt", "\n".join(lines))
    value, axis = source.text.index("64"), source.text.index("= 3") - 1
    diagnostic = Diagnostic(
        code="E0301",
        message="a global batch of 64 cannot be shared out over 3 data-parallel ranks",
        span=Span(source, value, value + 2),
        label="64 = 3 x 21 + 1",
        notes=(Note(message="`parallelism.data` is set here", span=Span(source, axis + 3, axis + 4)),),
        help="use 63 or 66",
    )
    assert shown(diagnostic) == (
        "error[E0301]: a global batch of 64 cannot be shared out over 3 data-parallel ranks\n"
        "  --> digits.plt:14:11\n"
        "   |\n"
        "14 |   batch = 64\n"
        "   |           ^^ 64 = 3 x 21 + 1\n"
        "   |\n"
        "note: `parallelism.data` is set here\n"
        "  --> digits.plt:20:10\n"
        "help: use 63 or 66\n"
        "\n"
        "1 error\n"
    )


def test_several_stand_apart_and_are_counted() -> None:
    error = found("a = 1\n", 0, 1)
    warning = Diagnostic(code="W0001", message="odd", span=Span(Source("a.plt", "a = 1\n"), 4, 5))
    assert shown(error, error, warning) == (
        "error[E0301]: wrong\n --> a.plt:1:1\n  |\n1 | a = 1\n  | ^\n\n"
        "error[E0301]: wrong\n --> a.plt:1:1\n  |\n1 | a = 1\n  | ^\n\n"
        "warning[W0001]: odd\n --> a.plt:1:5\n  |\n1 | a = 1\n  |     ^\n\n"
        "2 errors, 1 warning\n"
    )
    assert shown(warning).endswith("\n\n1 warning\n")
    assert shown() == ""


def test_each_of_many_remedies_is_shown_whole() -> None:
    remedies = [f"`field = {n}`: {'a long price, ' * 10}" for n in range(8)]
    diagnostic = found("batch = 64", 0, 5, help="\n".join(["any of these", *remedies]))
    assert all(remedy in shown(diagnostic) for remedy in remedies)
    assert to_json([diagnostic])[0]["help"] == diagnostic.help


def test_without_a_place_there_is_no_snippet() -> None:
    note = Note(message="a fact")
    diagnostic = Diagnostic(code="E0801", message="no device", span=None, notes=(note,), help="use a CPU", label="x")
    assert shown(diagnostic) == "error[E0801]: no device\nnote: a fact\nhelp: use a CPU\n\n1 error\n"


@pytest.mark.parametrize(
    ("text", "start", "end", "expected"),
    [
        ("ab = cd", 5, 7, "1 | ab = cd\n  |      ^^ here"),
        ("ab = cd", 5, 5, "1 | ab = cd\n  |      ^ here"),
        ("ab =\n}", 4, 4, "1 | ab =\n  |     ^ here"),
        ("ab =\n}", 4, 5, "1 | ab =\n  |     ^ here"),
        ("ab =\r\n}", 3, 5, "1 | ab =\n  |    ^ here"),
        ("ab\n", 3, 3, "2 |\n  | ^ here"),
        ("", 0, 0, "1 |\n  | ^ here"),
        ("\tab = \tcd", 7, 9, "1 |     ab =    cd\n  |             ^^ here"),
        ("x = 日本語", 4, 6, "1 | x = 日本語\n  |     ^^^^ here"),
        ("日本 = 3", 5, 6, "1 | 日本 = 3\n  |        ^ here"),
        ("e\u0301 = 3", 5, 6, "1 | e\u0301 = 3\n  |     ^ here"),
        ("a\x1b[31m = 3", 8, 9, "1 | a\\x1b[31m = 3\n  |            ^ here"),
        ("\u202ea = 3", 5, 6, "1 | \\u202ea = 3\n  |           ^ here"),
    ],
)
def test_carets_stand_under_the_characters(text: str, start: int, end: int, expected: str) -> None:
    assert marked(text, start, end, "here") == expected


def test_a_span_of_several_lines_is_bracketed() -> None:
    text = "model {\n  a = [\n    1,\n  ]\n}\n"
    assert marked(text, text.index("["), text.index("]") + 1, "this list") == (
        "2 | /   a = [\n3 | |     1,\n4 | |   ]\n  | |___^ this list"
    )


def test_the_middle_of_a_long_span_is_left_out() -> None:
    text = "".join(f"line{number}\n" for number in range(1, 21))
    assert marked(text, 0, len(text), "all") == (
        " 1 | / line1\n 2 | | line2\n 3 | | line3\n.. | | …\n19 | | line19\n20 | | line20\n   | |______^ all"
    )


def test_the_gutter_is_as_wide_as_the_last_line_number() -> None:
    text = "\n" * 8 + "(\n)\n"
    assert marked(text, 8, 11) == " 9 | / (\n10 | | )\n   | |_^"


def test_colours_add_nothing_but_colours() -> None:
    diagnostics = [found("a = [\n]", 0, 7, label="x", help="h"), found("a = 1", 0, 1, label="l")]
    warning = Diagnostic(code="W0001", message="odd", span=None, notes=(Note(message="n"),))
    coloured = render([*diagnostics, warning], color=True)
    assert re.sub("\33\\[[0-9;]*m", "", coloured) == shown(*diagnostics, warning)
    assert coloured.startswith("\33[1;31merror[E0301]\33[0m\33[1m: wrong\33[0m\n")
    assert "\33[1;33mwarning[W0001]\33[0m" in coloured
    assert "\33[1;32mhelp\33[0m: h" in coloured
    assert "\33[1;36mnote\33[0m: n" in coloured


def test_nothing_of_a_job_controls_the_terminal() -> None:
    bad = "\x1b]0;title\x07"
    text = shown(found(f"a = {bad}", 4, 5, message=bad, label=bad, help=bad, name=f"{bad}.plt"))
    assert "\x1b" not in text
    assert "\x07" not in text


@given(st.text(max_size=30), st.data())
def test_any_span_of_any_text_is_shown(text: str, data: st.DataObject) -> None:
    start = data.draw(st.integers(0, len(text)))
    end = data.draw(st.integers(start, len(text)))
    lines = shown(found(text, start, end, label="here")).split("\n")
    assert any("^ here" in line for line in lines)
    entries: list[Any] = to_json([found(text, start, end)])
    assert 1 <= entries[0]["line"] <= entries[0]["end_line"]


def test_json_has_the_keys_of_the_language_page() -> None:
    source = Source("a.plt", "a = 1\nb = [\n]\n")
    report = Report()
    notes = [Note(message="there", span=Span(source, 0, 1)), Note(message="a fact")]
    report.add("E0301", "wrong", Span(source, 10, 13), label="here", notes=notes, help="mend it")
    report.add("W0001", "odd", None)
    assert to_json(report) == [
        {
            "code": "E0301",
            "severity": "error",
            "message": "wrong",
            "file": "a.plt",
            "line": 2,
            "column": 5,
            "end_line": 3,
            "end_column": 2,
            "notes": [
                {"message": "there", "file": "a.plt", "line": 1, "column": 1},
                {"message": "a fact", "file": None, "line": None, "column": None},
            ],
            "help": "mend it",
            "fixes": [],
        },
        {
            "code": "W0001",
            "severity": "warning",
            "message": "odd",
            "file": None,
            "line": None,
            "column": None,
            "end_line": None,
            "end_column": None,
            "notes": [],
            "help": "",
            "fixes": [],
        },
    ]
