"""The canonical layout: its fixed points, what it moves and what it leaves, and that it never changes the meaning of a
job.
"""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given, settings
from instruments.texts import JOBS, job_texts

from dslc.dsl.diagnostics import Report
from dslc.dsl.show import render
from dslc.dsl.source import Source
from dslc.dsl.syntax import tree
from dslc.dsl.syntax.format import format_document
from dslc.dsl.syntax.parser import parse


def read(text: str) -> tree.Document:
    report = Report()
    document = parse(Source("job.plt", text), report)
    assert document is not None
    assert not report, render(report, color=False)
    return document


def shape(node: object) -> Any:
    """Returns a tree without its places, as nested tuples."""
    if isinstance(node, tree.Node):
        apart = ("span", "source", "comments", "words")
        kept = [name for name in vars(node) if name not in apart and not name.endswith("_span")]
        return (type(node).__name__, *(shape(getattr(node, name)) for name in kept))
    return tuple(map(shape, node)) if isinstance(node, tuple) else node


def formatted(text: str) -> str:
    return format_document(read(text))


@pytest.mark.parametrize("job", JOBS)
def test_the_jobs_of_the_language_are_fixed_points(job: str) -> None:
    assert formatted(job) == job


@pytest.mark.slow
@given(job_texts())
@settings(max_examples=300)
def test_layout_says_the_same_and_is_stable(text: str) -> None:
    document = read(text)
    laid = format_document(document)
    again = read(laid)
    assert shape(again) == shape(document)
    assert [c.text for c in again.comments] == [c.text for c in document.comments]
    assert format_document(again) == laid
    assert all(line == line.rstrip() for line in laid.split("\n"))
    assert laid.endswith("\n")
    assert not laid.startswith("\n")
    assert not laid.endswith("\n\n")
    assert "\n\n\n" not in laid


CASES = {
    "entries become lines": ("data{batch=64,shuffle  = true}", "data {\n  batch   = 64\n  shuffle = true\n}\n"),
    "an empty line ends a run of aligned lines": (
        "a {\n  x = 1\n  long = 2\n\n\n  y = 3\n}",
        "a {\n  x    = 1\n  long = 2\n\n  y = 3\n}\n",
    ),
    "a comment ends a run of aligned lines": (
        "a {\n  x = 1\n  # c\n  long = 2\n}",
        "a {\n  x = 1\n  # c\n  long = 2\n}\n",
    ),
    "a value of several lines stands by itself": (
        "a {\n  x = 1\n  long = [\n  1, 2 ]\n  yy = 3\n  z = 4\n}",
        "a {\n  x = 1\n  long = [\n    1, 2,\n  ]\n  yy = 3\n  z  = 4\n}\n",
    ),
    "params are aligned and blocks set apart": (
        "param a = 1\nparam bcd = 2\nb { }\n\n\n\nc { }\nd { }",
        "param a   = 1\nparam bcd = 2\n\nb {}\n\nc {}\n\nd {}\n",
    ),
    "comparisons are not aligned": ("expect { a==1, bcd  <2% }", "expect {\n  a == 1\n  bcd < 2%\n}\n"),
    "numbers, units and strings stay": (
        r'a { b = [1_000, 1e3, 007, 20 %, 20%, 1  , 1f1b, "\"\t"] }',
        "a {\n" + r'  b = [1_000, 1e3, 007, 20 %, 20%, 1, 1f1b, "\"\t"]' + "\n}\n",
    ),
    "operators": ("a { b = -(1+2)*-3**2..4//x }", "a {\n  b = -(1 + 2) * -3 ** 2..4 // x\n}\n"),
    "items stay as they are grouped on lines": (
        "a { b = [\n1,2,\n\n\n3\n,4 ] }",
        "a {\n  b = [\n    1, 2,\n\n    3,\n    4,\n  ]\n}\n",
    ),
    "a list on one line stays on one": ("a { b = [1,2,] }", "a {\n  b = [1, 2]\n}\n"),
    "brackets that hug": (
        "a { b = f([\n1], x = 2) }",
        "a {\n  b = f([\n    1,\n  ], x = 2)\n}\n",
    ),
    "comments stay where they are": (
        "# one\nparam x = 1# two\n# three\n\n# four\na { # five\n# six\nb = 1 # seven\n# eight\n} # nine\n# ten",
        "# one\nparam x = 1  # two\n# three\n\n# four\na {  # five\n  # six\n  b = 1  # seven\n  # eight\n}  # nine\n"
        "# ten\n",
    ),
    "comments inside lists": (
        "a { b = [ # one\n1, # two\n# three\n2 # four\n] }",
        "a {\n  b = [  # one\n    1,  # two\n    # three\n    2,  # four\n  ]\n}\n",
    ),
    "a comment inside an expression moves to the end of its line": (
        "a { b = (1 + # one\n2), c = f(x = # two\n3, 4) }",
        "a {\n  b = (1 + 2)  # one\n  c = f(\n    x = 3,  # two\n    4,\n  )\n}\n",
    ),
    "an empty list may hold a comment": ("a { b = [ # one\n] }", "a {\n  b = [  # one\n  ]\n}\n"),
    "a block of comments": ("a {\n\n# one\n\n\n# two\n\n}", "a {\n  # one\n\n  # two\n}\n"),
    "a brace on the next line": ("a # one\n\n{\nb = 1 }", "a {  # one\n  b = 1\n}\n"),
    "line ends of Windows": ("a {\r\n  b = 1 # c\r\n}\r\n", "a {\n  b = 1  # c\n}\n"),
    "what belongs together": (
        'language=1\nimport "a.plt"\nimport "b.plt"\nparallelism=auto\nparam x\n\nparam y\n',
        'language = 1\n\nimport "a.plt"\nimport "b.plt"\n\nparallelism = auto\n\nparam x\n\nparam y\n',
    ),
    "paths": ("sweep { a . b . c = [1] , d = 2 }", "sweep {\n  a.b.c = [1]\n  d     = 2\n}\n"),
}


@pytest.mark.parametrize(("text", "expected"), CASES.values(), ids=CASES.keys())
def test_layout(text: str, expected: str) -> None:
    assert formatted(text) == expected
    assert formatted(expected) == expected
