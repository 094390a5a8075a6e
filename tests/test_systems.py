"""The page of systems: each of the rows is there, and what it names is run by continuous integration."""

from __future__ import annotations

import ast
import re

import pytest
from helpers.paths import ROOT

PAGE = ROOT / "docs" / "systems.md"
ROWS = [line.strip("| \n").split(" | ") for line in PAGE.read_text().splitlines() if re.match(r"\| \d", line)]


def is_long(function: ast.FunctionDef) -> bool:
    return any(ast.unparse(each).startswith("pytest.mark.long") for each in function.decorator_list)


def test_every_row_is_there() -> None:
    assert [int(number) for number, *_ in ROWS] == list(range(1, len(ROWS) + 1)) and len(ROWS) >= 36


@pytest.mark.parametrize("row", ROWS, ids=lambda row: row[0])
def test_what_it_names_is_run(row: list[str]) -> None:
    _, _, _, tried = row
    named = re.findall(r"`((?:tests|examples)/[^`]+)`", tried)
    assert any(name.startswith("tests/") for name in named) or tried == "not yet"
    for path, _, test in (name.partition("::") for name in named):
        assert (ROOT / path).is_file(), path
        if test:
            tree = ast.parse((ROOT / path).read_text())
            (found,) = (each for each in tree.body if isinstance(each, ast.FunctionDef) and each.name == test)
            assert not is_long(found), test
