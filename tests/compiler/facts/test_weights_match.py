"""Which tensor of a file goes where: renames, partial loading, and the names of what does not fit."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dslc.compiler.facts.weights_match import WeightMatch, faults, fit

NETWORK = {"embedding.weight": (8, 4), "blocks.0.up.weight": (4, 4), "norm.weight": (4,)}
TIES = {"head.weight": "embedding.weight"}


def fitted(found: Mapping[str, tuple[int, ...]], **patterns: Any) -> WeightMatch:
    return fit(found, NETWORK, TIES, **patterns)


def test_all_of_it() -> None:
    found = fitted(NETWORK)
    assert found.is_complete and found.taken == tuple((name, name) for name in NETWORK)
    assert not (found.copies or found.initial or found.left_out)


def test_a_tied_weight_goes_by_any_of_its_names() -> None:
    last = {"head.weight" if name == "embedding.weight" else name: shape for name, shape in NETWORK.items()}
    assert ("embedding.weight", "head.weight") in fitted(last).taken
    both = fitted(NETWORK | {"head.weight": (8, 4)})
    assert both.is_complete and both.copies == (("embedding.weight", "head.weight"),)
    assert fitted(NETWORK | {"head.weight": (9, 4)}).unlike == (("embedding.weight", "head.weight"),)


@pytest.mark.parametrize(
    ("there", "rename"),
    [
        ({f"model.{name}": shape for name, shape in NETWORK.items()}, ("model.* -> *",)),
        (
            {name.replace("blocks.0.up", "h.0.fc"): s for name, s in NETWORK.items()},
            ("h.*.fc.* -> blocks.*.up.*",),
        ),
        ({name.replace("norm", "ln_f"): shape for name, shape in NETWORK.items()}, ("ln_f.weight -> norm.weight",)),
        (
            {f"a.{name}.b": shape for name, shape in NETWORK.items()},
            ("a.norm.weight.b -> norm.weight", "a.*.b -> *"),  # the first that matches counts
        ),
    ],
)
def test_renames(there: dict[str, tuple[int, ...]], rename: tuple[str, ...]) -> None:
    assert not fitted(there).is_complete
    found = fitted(there, rename=rename)
    assert found.is_complete and len(found.taken) == len(NETWORK)


def test_two_tensors_for_one_name() -> None:
    there = NETWORK | {"model.norm.weight": (4,)}
    found = fitted(there, rename=("model.* -> *",))
    assert found.twice == (("model.norm.weight", "norm.weight"),)
    assert ("has two tensors for one name:", ["`model.norm.weight` would be `norm.weight` too"]) in faults(
        found, there, NETWORK
    )


def test_what_may_be_missing_or_over() -> None:
    there = {"embedding.weight": (9, 4), "blocks.0.up.weight": (4, 4), "pooler.weight": (4, 4)}
    found = fitted(there)
    assert found.missing == ("norm.weight",) and found.unused == ("pooler.weight",)
    assert found.unlike == (("embedding.weight", "embedding.weight"),)
    found = fitted(there, allow_missing=("norm.*", "head.*"), allow_unused=("pooler.*",))
    assert found.is_complete and found.taken == (("blocks.0.up.weight",) * 2,)
    assert found.initial == ("embedding.weight", "norm.weight") and found.left_out == ("pooler.weight",)


def test_what_only_leaves_out_is_no_fault() -> None:
    found = fitted(NETWORK | {"pooler.weight": (4, 4)}, only=("blocks.*", "embed*"))
    assert (
        found.is_complete and found.initial == ("norm.weight",) and found.left_out == ("norm.weight", "pooler.weight")
    )


NAMES = st.text("ab.", min_size=1, max_size=4)
SHAPES = st.dictionaries(NAMES, st.sampled_from([(1,), (2,)]), max_size=6)
PATTERNS = st.lists(st.text("ab.*", min_size=1, max_size=4), max_size=2)
RENAMES = st.lists(st.builds("{} -> {}".format, NAMES, NAMES) | st.just("*a -> *b"), max_size=2)


@given(SHAPES, SHAPES, PATTERNS, RENAMES, PATTERNS, PATTERNS)
def test_each_tensor_has_one_fate(
    found: dict[str, tuple[int, ...]],
    wanted: dict[str, tuple[int, ...]],
    only: list[str],
    rename: list[str],
    missing: list[str],
    unused: list[str],
) -> None:
    made = fit(found, wanted, {}, only=only, rename=rename, allow_missing=missing, allow_unused=unused)
    here = [*(name for name, _ in (*made.taken, *made.unlike)), *made.initial, *made.missing]
    assert sorted(here) == sorted(wanted)
    there = [*(name for _, name in (*made.taken, *made.unlike)), *made.left_out, *made.unused]
    there += [name for name, _ in made.twice]
    assert len(set(there)) == len(there) and set(there) <= found.keys()
    assert all(found[there] == wanted[name] for name, there in made.taken)
