"""Offsets and positions of the protocol: every encoding, every line end, and changes one after another."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st
from lsprotocol import types

from dslc.editor.positions import LineTable, apply_changes

TEXTS = st.text(alphabet="ab \n\rµ😀\u2028\x0b", max_size=30)
ENCODINGS = st.sampled_from(["utf-8", "utf-16", "utf-32"])


@given(TEXTS, ENCODINGS, st.integers(min_value=0))
def test_a_position_leads_back_to_its_offset(text: str, encoding: str, number: int) -> None:
    lines = LineTable(text, encoding)
    offset = number % (len(text) + 1)
    inside_line_end = text[offset - 1 : offset + 1] == "\r\n" and offset > 0
    if not inside_line_end:
        assert lines.offset(lines.position(offset)) == offset


@pytest.mark.parametrize(
    ("encoding", "units"),
    (("utf-8", 7), ("utf-16", 4), ("utf-32", 3)),
)
def test_columns_are_units_of_the_encoding(encoding: str, units: int) -> None:
    assert LineTable("x\nµ😀a", encoding).position(5) == types.Position(1, units)


def test_only_the_line_ends_of_the_protocol_count() -> None:
    lines = LineTable("a\u2028b\x0bc\r\nd\re")
    assert [lines.position(at).line for at in (4, 7, 9)] == [0, 1, 2]
    assert lines.offset(types.Position(0, 99)) == 5
    assert lines.offset(types.Position(99, 0)) == len(lines.text)


def test_each_change_counts_on_the_text_after_the_one_before() -> None:
    def change(line: int, start: int, end: int, text: str) -> types.TextDocumentContentChangePartial:
        return types.TextDocumentContentChangePartial(
            types.Range(types.Position(line, start), types.Position(line, end)), text
        )

    changes = [change(0, 0, 0, "x\n"), change(1, 2, 4, ""), change(1, 0, 1, "b")]
    assert apply_changes("a \U0001f600c", changes, "utf-16") == "x\nb c"
    assert apply_changes("old", [types.TextDocumentContentChangeWholeDocument("new")], "utf-16") == "new"
