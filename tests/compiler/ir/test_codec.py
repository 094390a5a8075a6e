"""Records as JSON and back: all come back equal, and anything else is refused with its place."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass, is_dataclass
from enum import StrEnum
from functools import cache
from types import NoneType, UnionType
from typing import Any, Literal, Union, get_args, get_origin

import pytest
from cattrs import Converter
from helpers.records import values
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from dslc.compiler.graph.stored import restore
from dslc.compiler.ir import program as p
from dslc.compiler.ir.codec import DecodeError, from_json, parse, to_json
from dslc.compiler.ir.facts import SourceFacts
from dslc.compiler.ir.module_facts import ModelFacts
from dslc.compiler.ir.plan import PlanView
from dslc.compiler.ir.tensor_styles import TensorStyle
from dslc.runtime.checkpoint.files import Manifest
from dslc.runtime.process.failure import Outcome


@dataclass(frozen=True, kw_only=True)
class Sum:
    """One of several records, one of which holds others."""

    terms: tuple[Sum | Product | None, ...] = ()
    name: int | str = 0


@dataclass(frozen=True, kw_only=True)
class Product:
    terms: tuple[Sum | Product | None, ...] = ()
    name: int | str = 0


@dataclass(frozen=True, kw_only=True)
class Formula:
    root: Sum | Product
    by_name: Mapping[str, Product | Sum | None]
    kind: Literal["short", "long", 1]


RECORDS = (p.JobProgram, p.RankPlace, PlanView, SourceFacts, ModelFacts, Manifest, Outcome, Formula)


@cache
def cattrs_writer() -> Converter:
    """Returns cattrs' own conversion to JSON, with the name of a record where a field may hold one of several."""
    writer = Converter(unstruct_collection_overrides={tuple: tuple})

    def several(kind: object) -> bool:
        return get_origin(kind) in (UnionType, Union) and len({*get_args(kind)} - {NoneType}) > 1

    def tagged(value: object) -> object:
        data = writer.unstructure(value)
        return {"record": type(value).__name__} | data if is_dataclass(value) else data

    writer.register_unstructure_hook(StrEnum, lambda word: word.value)
    writer.register_unstructure_hook_factory(several, lambda _: tagged)
    return writer


@pytest.mark.slow
@pytest.mark.parametrize("kind", RECORDS, ids=[kind.__name__ for kind in RECORDS])
@settings(max_examples=25, deadline=None, suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large])
@given(data=st.data())
def test_every_record_comes_back_equal(kind: type[Any], data: st.DataObject) -> None:
    value = data.draw(values(kind))
    written = json.dumps(to_json(value))
    assert written == json.dumps(cattrs_writer().unstructure(value))
    again = from_json(kind, parse(written))
    assert again == value
    assert json.dumps(to_json(again)) == written, "whole numbers stay whole, so hashes stay the same"
    assert from_json(kind, to_json(value)) == value, "without JSON between, as between ranks"


def test_a_record_of_several_is_named_in_what_is_written() -> None:
    value = Formula(root=Product(terms=(None, Sum(name="a"))), by_name={}, kind=1)
    assert to_json(value) == {
        "root": {
            "record": "Product",
            "terms": (None, {"record": "Sum", "terms": (), "name": "a"}),
            "name": 0,
        },
        "by_name": {},
        "kind": 1,
    }


def test_a_style_is_read_as_one_and_no_other_word_is() -> None:
    step = p.TensorParallelStep(size=2, sequence=False, styles=(("a", TensorStyle.ROW),), loss_parallel=False)
    data = json.loads(json.dumps(to_json(step)))
    assert data["styles"] == [["a", "row"]]
    assert from_json(p.TensorParallelStep, data).styles[0][1] is TensorStyle.ROW
    with pytest.raises(DecodeError, match="expected one of"):
        from_json(p.TensorParallelStep, data | {"styles": [["a", "rows"]]})


PLACE = {"rank": 1, "node": 0, "local_rank": 1, "coordinates": {"data": 1}, "data_rank": 1, "data_ranks": 2}
DEEP: Any = 0
for _ in range(100_000):
    DEEP = [DEEP]


@pytest.mark.parametrize(
    ("kind", "data", "message"),
    [
        (p.RankPlace, PLACE | {"rank": "1"}, "RankPlace.rank: expected a whole number, found '1'"),
        (p.RankPlace, PLACE | {"rank": True}, "RankPlace.rank: expected a whole number, found True"),
        (p.RankPlace, PLACE | {"rank": 1.0}, "RankPlace.rank: expected a whole number, found 1.0"),
        (p.RankPlace, PLACE | {"coordinates": []}, "RankPlace.coordinates: expected an object, found []"),
        (
            p.RankPlace,
            PLACE | {"coordinates": {"a": None}},
            "RankPlace.coordinates['a']: expected a whole number, foun",
        ),
        (p.RankPlace, PLACE | {"__class__": "x"}, "RankPlace has no field '__class__'"),
        (p.RankPlace, {**PLACE} | {"a\x1b[2J": 1}, r"RankPlace has no field 'a\x1b[2J'"),
        (p.RankPlace, {"rank": 1}, "RankPlace.node is missing"),
        (p.RankPlace, [PLACE], "RankPlace: expected an object, found [{"),
        (p.RankPlace, None, "RankPlace: expected an object, found None"),
        (p.ModelStep, {"ties": "ab"}, "ModelStep.ties: expected a list, found 'ab'"),
        (p.ModelStep, {"ties": [["a", "b"], ["a"]]}, "ModelStep.ties[1]: expected a list of 2, found ['a']"),
        (
            p.ModelStep,
            {"root": {"name": "", "kind": "a", "children": [{}]}},
            "ModelStep.root.children[0].name is mis",
        ),
        (p.MetricStep, {"kind": "f1", "name": ""}, 'MetricStep.kind: expected one of "loss", "accuracy", "top_k", '),
        (p.MetricStep, {"kind": ["loss"], "name": ""}, "MetricStep.kind: expected one of "),
        (p.LearningRateStep, {"steps": 1, "floor": "0"}, "LearningRateStep.floor: expected a number, found '0'"),
        (p.LearningRateStep, {"steps": 10**4000, "every": "x"}, "LearningRateStep.every: expected a whole number"),
        (p.InitStep, {"kind": "normal", "parameter": "a" * 10**6}, "InitStep.shape is missing"),
        (p.ModuleStep, {"name": {"a" * 10**6: 1}, "kind": ""}, "ModuleStep.name: expected text, found {'aaaa"),
        (p.ModuleStep, {"name": "", "kind": "", "arguments": {"a": DEEP}}, "it is nested too deeply"),
        (
            p.ModuleStep,
            {"name": "", "kind": "", "arguments": {"a": object()}},
            "ModuleStep.arguments['a']: expected p",
        ),
        (Formula, {"root": {"record": "Quotient"}}, "Formula.root: expected an object whose `record` is one of Sum, "),
        (Formula, {"root": {"record": ["Sum"]}}, "Formula.root: expected an object whose `record` is one of Sum, "),
        (Formula, {"root": {"terms": []}}, "Formula.root: expected an object whose `record` is one of Sum, Product"),
        (Formula, {"root": {"record": "Sum", "name": 1.5}}, "Formula.root.name: expected a whole number or text, fo"),
        (Formula, {"root": {"record": "Sum", "terms": [3]}}, "Formula.root.terms[0]: expected null or an object whose"),
    ],
)
def test_what_is_no_such_record_is_refused(kind: type[Any], data: object, message: str) -> None:
    with pytest.raises(DecodeError) as caught:
        from_json(kind, data)
    assert str(caught.value).startswith(message)
    assert len(str(caught.value)) < 400


def test_a_module_within_a_thousand_others_is_refused() -> None:
    data: dict[str, Any] = {"name": "", "kind": ""}
    for _ in range(1000):
        data = {"name": "", "kind": "", "children": [data]}
    with pytest.raises(DecodeError, match="it is nested too deeply"):
        from_json(p.ModuleStep, data)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("[" * 100_000, "it is nested too deeply"),
        ('{"version": ' + "9" * 5000 + "}", "limit"),
        ("", "Expecting value"),
        ("[1]", "StoredGraph: expected an object"),
        ('{"nodes": []}', "StoredGraph.done is missing"),
        ('{"done": 1, "done": NaN}', "StoredGraph.done: expected a list, found nan"),
    ],
    ids=["deep", "huge", "empty", "a list", "missing", "not a number"],
)
def test_a_plan_that_is_none_is_refused(text: str, message: str) -> None:
    with pytest.raises(DecodeError, match=message):
        restore(parse(text))


def test_data_makes_nothing_but_the_records_that_are_named(monkeypatch: pytest.MonkeyPatch) -> None:
    """A tag is looked up only among the members of the union."""
    made: list[str] = []
    called: Callable[..., None] = lambda *_, **given: made.append(str(given))  # noqa: E731
    monkeypatch.setattr(Manifest, "__init__", called)
    with pytest.raises(DecodeError, match="one of Sum, Product"):
        from_json(Formula, {"root": {"record": "Manifest"}, "by_name": {}, "kind": "short"})
    assert not made
    assert Manifest not in get_args(Formula.__annotations__["root"])
