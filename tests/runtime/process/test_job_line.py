"""Marks of the job's lines on exceptions, and the owner of a traceback's line."""

from __future__ import annotations

import json
from collections.abc import Iterator
from types import SimpleNamespace

import networkx
import pytest
import torch
from helpers.paths import ROOT

import dslc
from dslc.runtime.loop import out_of_range
from dslc.runtime.loop.hooks import is_of_service
from dslc.runtime.process import frame_ownership
from dslc.runtime.process.failure import message_of
from dslc.runtime.process.job_line import line_of, mark_errors, mark_item_errors
from dslc.runtime.process.vision_library import true_cause


class Closed(Exception):
    """Takes no attributes."""

    def __setattr__(self, name: str, value: object) -> None:
        raise TypeError("no attributes")


def test_the_innermost_line_counts() -> None:
    with (
        pytest.raises(KeyError) as found,
        mark_errors("job.plt:1:1"),
        mark_errors(""),
        mark_errors("job.plt:2:2"),
        mark_errors(""),
    ):
        raise KeyError
    assert line_of(found.value) == "job.plt:2:2"


def test_a_line_is_that_of_the_cause() -> None:
    cause, error = KeyError(), RuntimeError()
    with pytest.raises(KeyError), mark_errors("job.plt:1:1"):
        raise cause
    error.__cause__ = cause
    assert line_of(error) == "job.plt:1:1"


def test_an_exception_that_is_its_own_cause_is_read_once() -> None:
    ring = RuntimeError("index out of range")
    ring.__cause__ = ring  # as `raise error from error` does
    job = SimpleNamespace(data=SimpleNamespace(arguments={}))
    out_of_range.explain(ring, job, None, None, 1)  # type: ignore[arg-type]
    assert line_of(ring) == "" and message_of(ring) == "RuntimeError: index out of range"
    assert not is_of_service(ring) and true_cause(ring) is ring


def test_items_are_made_for_a_line_and_used_for_none() -> None:
    def items() -> Iterator[int]:
        yield 1
        raise KeyError

    made = mark_item_errors("job.plt:1:1", items())
    assert next(made) == 1
    with pytest.raises(KeyError) as found:
        next(made)
    assert line_of(found.value) == "job.plt:1:1"

    def use() -> None:
        for _ in mark_item_errors("job.plt:1:1", items()):
            raise RuntimeError

    with pytest.raises(RuntimeError) as other:
        use()
    assert line_of(other.value) == ""


def test_an_exception_that_takes_no_mark_goes_through() -> None:
    with pytest.raises(Closed) as found, mark_errors("job.plt:1:1"):
        raise Closed
    assert line_of(found.value) == ""


def test_whose_code_it_is() -> None:
    whose = {
        dslc.__file__: "ours",
        frame_ownership.__file__: "ours",
        torch.nn.Module.__init__.__code__.co_filename: "torch's",
        json.__file__: "Python's",
        networkx.__file__: "",
        str(ROOT / "train.py"): "the user's",
        __file__: "the user's",
        "<string>": "",
    }
    for file, owner in whose.items():
        assert frame_ownership.is_ours(file) == (owner == "ours"), file
        assert frame_ownership.is_torchs(file) == (owner == "torch's"), file
        assert frame_ownership.is_pythons(file) == (owner == "Python's"), file
        assert frame_ownership.is_users(file) == (owner == "the user's"), file
