"""Code of a user's that hangs before any rank runs is named on standard error, with its line."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator

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
