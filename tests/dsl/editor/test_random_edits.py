"""Random edits of real jobs, after each of which every function of the room answers.

An edit deletes, inserts, repeats or moves a piece of the text, as typing and pasting do.
"""

from __future__ import annotations

import random
from itertools import pairwise
from pathlib import Path

import pytest
from helpers.paths import EXAMPLES, TESTS

from dslc.dsl.editor.complete import complete
from dslc.dsl.editor.diagnose import carry_over, diagnose
from dslc.dsl.editor.edits import format_text
from dslc.dsl.editor.figures import JobFigures, LayerFigures
from dslc.dsl.editor.hints import hints
from dslc.dsl.editor.hover import hover
from dslc.dsl.editor.navigation import RenameError, find_declaration, rename
from dslc.dsl.editor.outline import Symbol, folds, symbols
from dslc.dsl.editor.quick_fixes import find_fixes
from dslc.dsl.editor.semantic_tokens import tokens
from dslc.dsl.editor.snapshot import Snapshot

JOBS = [*sorted(EXAMPLES.glob("*.plt")), *sorted((TESTS / "bad").glob("*.plt"))]
PIECES = (
    *"\"{}()[]=,.\n #µ😀\u2028\0\r'",
    *("param ", "import ", "train {", "sgd(", "64", "64 ", "//", "1e999", "none", "a.b", "language = 1\n", "sweep {\n"),
    'python("a:b")',
)


def edited(text: str, draw: random.Random) -> str:
    start = draw.randint(0, len(text))
    end = min(len(text), start + draw.choice((0, 1, 1, 3, 20, 200)))
    match draw.randrange(4):
        case 0:
            return text[:start] + text[end:]
        case 1:
            return text[:start] + draw.choice(PIECES) + text[start:]
        case 2:
            return text[:end] + text[start:end] + text[end:]
        case _:
            at = draw.randint(0, len(text))
            piece, rest = text[start:end], text[:start] + text[end:]
            return rest[:at] + piece + rest[at:]


def ask_everything(snapshot: Snapshot, before: Snapshot, draw: random.Random) -> None:
    text = snapshot.text
    figures = JobFigures(
        layers=tuple(
            LayerFigures(region=r.text, start=0, end=len(r.text), kind="linear", count=1, input="2", output="3",
                         parameters="6", forward="1 FLOP", backward="1 FLOP", saved="1 B")
            for r in before.regions
        ),
        batch="2 samples", microbatch="1 sample", peak="1 GiB",
    )  # fmt: skip
    for diagnostic in [*diagnose(snapshot), *carry_over(diagnose(before), before, snapshot)]:
        assert diagnostic.message and diagnostic.code
    for _ in range(5):
        offset = draw.randint(0, len(text))
        for item in complete(snapshot, offset):
            assert 0 <= item.start <= item.end <= len(text)
        hover(snapshot, offset, figures)
        find_declaration(snapshot, offset)
        try:
            places = rename(snapshot, offset, "another_name")
        except RenameError:
            places = []
        assert all(place.text[place.start : place.end] == places[0].text[places[0].start : places[0].end]
                   for place in places)  # fmt: skip
    find_fixes(snapshot, diagnose(snapshot), 0, len(text))
    found = tokens(snapshot)
    assert all(a.end <= b.start for a, b in pairwise(found)), "tokens overlap"
    for symbol in symbols(snapshot):
        check_symbol(symbol, 0, len(text))
    assert all(0 <= fold.start < fold.end <= len(text) for fold in folds(snapshot))
    assert all(0 <= hint.offset <= len(text) for hint in hints(snapshot, figures))
    laid_out = text
    for change in reversed(format_text(text)):
        laid_out = laid_out[: change.start] + change.text + laid_out[change.end :]
    assert format_text(laid_out) == []
    assert [snapshot.text[r.start : r.end] for r in snapshot.regions] == [r.text for r in snapshot.regions]


def check_symbol(symbol: Symbol, start: int, end: int) -> None:
    """An editor refuses a whole outline in which a name lies outside its symbol."""
    assert start <= symbol.start <= symbol.name_start <= symbol.name_end <= symbol.end <= end
    for child in symbol.children:
        check_symbol(child, symbol.start, symbol.end)


def edit_at_random(job: Path, seed: str, count: int) -> None:
    draw = random.Random(seed)
    first = snapshot = Snapshot(job.read_text(), str(job))
    for number in range(count):
        before = first if number % 10 == 0 else snapshot  # of ten edits in a row, the last meets a broken text
        snapshot = Snapshot(edited(before.text, draw), str(job), before)
        ask_everything(snapshot, before, draw)


@pytest.mark.parametrize("number", range(5))
def test_no_edit_of_a_job_is_an_exception(number: int) -> None:
    edit_at_random(JOBS[number * 7], f"few {number}", 10)


@pytest.mark.cases(15)
@pytest.mark.slow
@pytest.mark.parametrize("number", range(100))
def test_no_edit_of_a_thousand_is_an_exception(number: int) -> None:
    edit_at_random(JOBS[number * len(JOBS) // 100], f"many {number}", 10)
