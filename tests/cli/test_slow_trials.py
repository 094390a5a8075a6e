"""Code of a user's that hangs before any rank runs is named on standard error, with its line; and while a child works
long, its parent imports what it needs later.
"""

from __future__ import annotations

import contextlib
import os
import select
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from dslc.probe import child


@contextlib.contextmanager
def readable_messages(monkeypatch: pytest.MonkeyPatch) -> Iterator[int]:
    """Makes standard error a pipe, from which a user's code reads what is said of it, and so waits for it."""
    monkeypatch.setattr(child, "PATIENCE", 0.01)
    reading, writing = os.pipe()
    before = os.dup(2)
    os.dup2(writing, 2)
    try:
        yield reading
    finally:
        os.dup2(before, 2)
        for file in (before, reading, writing):
            os.close(file)


class WaitingSamples:
    def __init__(self, messages: int) -> None:
        self._messages = messages

    def __getitem__(self, index: int) -> str:
        return os.read(self._messages, 1000).decode()


def test_a_sample_that_hangs_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    with readable_messages(monkeypatch) as messages:
        answer = child.in_child(lambda: WaitingSamples(messages)[17])
    line = WaitingSamples.__getitem__.__code__.co_firstlineno + 1
    place = f"test_slow_trials.py:{line}, in __getitem__"
    expected = f"dslc: no rank has started: a trial of your code reads sample 17 ({place}), for 0.01 s\n"
    assert answer["made"].startswith(expected)


def test_other_code_that_hangs_is_named_again_and_again(monkeypatch: pytest.MonkeyPatch) -> None:
    def wait(messages: int) -> str:
        text = ""
        while text.count("\n") < 2:
            text += os.read(messages, 1000).decode()
        return text

    with readable_messages(monkeypatch) as messages:
        lines = child.in_child(lambda: wait(messages))["made"].splitlines()
    place = wait.__code__.co_firstlineno + 3
    assert all(f"a trial of your code is at test_slow_trials.py:{place}, in wait, for 0." in line for line in lines)


def test_the_parent_imports_while_a_child_works(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    reading, writing = os.pipe()
    for name, text in (("imported_first", f"import os; os.write({writing}, b'1')"), ("imported_later", "")):
        (tmp_path / f"{name}.py").write_text(text)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setattr(child, "_to_import", [])
    child.import_while_children_work("imported_first", "os", "absent_module", "imported_later")
    try:
        answer = child.in_child(lambda: bool(select.select([reading], [], [], 60)[0]))  # ends by the import alone
        assert answer["made"] is True
        assert child._to_import in (["absent_module", "imported_later"], ["imported_later"], [])
        assert child.in_child(lambda: 7)["made"] == 7
    finally:
        sys.modules.pop("imported_first", None)
        sys.modules.pop("imported_later", None)
        os.close(reading)
        os.close(writing)
