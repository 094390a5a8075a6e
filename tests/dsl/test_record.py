"""Records: dataclasses in all but the code of their methods."""

from __future__ import annotations

import copy
import pickle
from dataclasses import FrozenInstanceError, asdict, field, replace

import pytest

from dslc.dsl.record import Record, positional, record


@record
class Box(Record):
    width: int
    height: int = 1
    tags: list[str] = field(default_factory=list)
    note: str = field(default="", compare=False, repr=False)


@positional
class Point(Record):
    x: int
    y: int = 0


def test_fields_have_the_values_given_and_their_defaults() -> None:
    assert asdict(Box(width=2)) == {"width": 2, "height": 1, "tags": [], "note": ""}
    assert Box(width=2).tags is not Box(width=2).tags
    assert (Point(1), Point(1, 2), Point(x=1, y=2)) == (Point(x=1, y=0), Point(x=1, y=2), Point(1, y=2))


def test_what_is_missing_unknown_or_given_twice_is_refused() -> None:
    with pytest.raises(TypeError, match="Box needs 'width'"):
        Box(height=2)  # type: ignore[call-arg]
    with pytest.raises(TypeError, match="Box takes no 'depth', 'size'"):
        Box(width=1, size=2, depth=3)  # type: ignore[call-arg]
    for wrong in ({"x": 2}, {"z": 2}):
        with pytest.raises(TypeError, match="Point takes"):
            Point(1, **wrong)
    with pytest.raises(TypeError, match="Point takes its fields by name, each once"):
        Point(1, 2, 3)  # type: ignore[call-arg]


def test_records_compare_by_class_and_by_the_fields_that_compare() -> None:
    assert Box(width=2, note="a") == Box(width=2, note="b") != Box(width=3)
    assert hash(Point(1)) == hash(Point(1, 0))
    assert Point(1) != (1, 0)
    assert repr(Box(width=2, note="hidden")) == "Box(width=2, height=1, tags=[])"


def test_records_are_frozen_and_can_be_copied() -> None:
    box = Box(width=2, tags=["a"])
    with pytest.raises(FrozenInstanceError):
        box.width = 3  # type: ignore[misc]
    with pytest.raises(FrozenInstanceError):
        del box.width
    assert replace(box, width=3) == Box(width=3, tags=["a"])
    assert copy.deepcopy(box) == pickle.loads(pickle.dumps(box)) == box
