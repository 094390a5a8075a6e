"""Batches of structures: what torch's own pytrees make of the samples, whatever they are made of."""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from helpers.own_samples import Ragged, padded
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor
from torch.utils import _pytree

from dslc.runtime.data.collating import UnevenSamples, stacked
from dslc.runtime.data.samples import FetchedSamples, Part, concatenate_samples


class Boxes(NamedTuple):
    corners: Any
    label: Any


SHAPES = st.recursive(
    st.sampled_from([(), (3,), (2, 2)]),
    lambda inner: st.one_of(
        st.lists(inner, max_size=3),
        st.lists(inner, max_size=3).map(tuple).map(lambda parts: ("tuple", *parts)),
        st.dictionaries(st.sampled_from("abc"), inner, max_size=3),
        st.dictionaries(st.sampled_from("abc"), inner, max_size=3).map(OrderedDict),
        st.tuples(inner, inner).map(lambda pair: Boxes(*pair)),
    ),
    max_leaves=6,
)


def filled(shape: Any, number: int) -> Any:
    """Returns the structure with a tensor in place of each shape."""
    match shape:
        case dict():
            return type(shape)((key, filled(each, number)) for key, each in shape.items())
        case list():
            return [filled(each, number) for each in shape]
        case Boxes():
            return Boxes(*(filled(each, number) for each in shape))
        case ("tuple", *parts):
            return tuple(filled(each, number) for each in parts)
    return torch.full(shape, float(number))


@given(SHAPES, st.integers(1, 4))
def test_samples_stack_as_pytrees_do(shape: Any, number: int) -> None:
    samples = [filled(shape, n) for n in range(number)]
    wanted = _pytree.tree_map(lambda *rows: torch.stack(rows), *samples)
    found, form = _pytree.tree_flatten(stacked(samples))
    leaves, other = _pytree.tree_flatten(wanted)
    assert form == other and all(map(torch.equal, found, leaves))


def test_texts_stay_in_a_list() -> None:
    assert stacked([(np.str_("a"), 1), (np.str_("b"), 2)])[0] == ["a", "b"]


@pytest.mark.parametrize(
    ("one", "other", "said"),
    [
        (torch.zeros(2), torch.zeros(3), r"^one has shape \(3,\), and others \(2,\)"),
        ({"a": [torch.zeros(2)]}, {"a": [torch.zeros(3)]}, r"^\['a'\]\[0\] has shape"),
        ((1, Boxes(torch.zeros(2), 1)), (1, Boxes(torch.zeros(3), 1)), r"^\[1\]\.corners has shape"),
        ({"a": 1}, {"b": 1}, "^their structures differ"),
        ({"a": (1, 2)}, {"a": (1, 2, 3)}, r"^the structures of \['a'\] differ"),
    ],
)
def test_samples_that_do_not_stack_are_named_by_their_place(one: Any, other: Any, said: str) -> None:
    with pytest.raises(UnevenSamples, match=said):
        stacked([one, other])


def test_a_batch_of_structures_may_have_samples_of_several_parts() -> None:
    """Sets for validation, and all splits together, are put together by the user's function once for each batch."""
    ragged = Ragged()
    parts = []
    for start in (0, 8, 16):
        parts.append(FetchedSamples([ragged[n] for n in range(start, start + 8)], "job.plt:1:1", collate=padded))
    validation = concatenate_samples([Part(parts[1], start=2, length=6), Part(parts[2], start=0, length=5)], True)
    whole = concatenate_samples([parts[0], validation, Part(parts[2], start=5, length=3)], True)
    numbers = [3, 9, 17, 18, 8, 0]
    inputs, targets = whole.batch(torch.tensor(numbers))
    wanted = [ragged[n if n < 8 else n + 2] for n in numbers]
    assert inputs["lengths"].tolist() == [len(values) for values, _ in wanted]
    assert inputs["values"].shape == (6, max(len(values) for values, _ in wanted))
    assert targets.tolist() == [target for _, target in wanted]


def test_numbers_become_tensors_and_texts_lists() -> None:
    batch = stacked([{"n": n, "x": n / 2, "ok": True, "text": str(n)} for n in range(2)])
    assert batch["n"].dtype == torch.int64 and batch["x"].dtype == torch.float32 and batch["ok"].dtype == torch.bool
    assert isinstance(batch["x"], Tensor) and batch["text"] == ["0", "1"]


@dataclass
class Pair:
    left: Any
    right: Any = None


@dataclass
class Counted:
    values: Any
    number: int = field(init=False, default=0)


def test_dataclasses_stack_field_by_field() -> None:
    rows = [Pair(torch.full((2,), float(n)), {"n": n}) for n in range(3)]
    found = stacked(rows)
    assert type(found) is Pair and found.left.shape == (3, 2) and found.right["n"].tolist() == [0, 1, 2]
    assert stacked([Pair(torch.zeros(2)), Pair(torch.ones(2))]).right is None
    assert stacked([Counted(torch.zeros(2)), Counted(torch.ones(2))]).values.shape == (2, 2)
    with pytest.raises(UnevenSamples, match="structures differ"):
        stacked([Pair(torch.zeros(2)), Pair(torch.zeros(2), 1)])
    with pytest.raises(UnevenSamples, match=r"^\.left has shape"):
        stacked([Pair(torch.zeros(2)), Pair(torch.zeros(3))])
