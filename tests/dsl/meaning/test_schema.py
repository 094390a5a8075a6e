"""The reference page and the JSON schema say what the registry says."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from typing import Any

import pytest
from helpers.paths import ROOT

from dslc.dsl.language.registry import BLOCKS, CALLS, Call, Node, fields
from dslc.dsl.meaning.schema import reference, schema
from dslc.dsl.meaning.write import value_text

PAGE = ROOT / "docs" / "reference.md"
DECLARATIONS = [*BLOCKS.values(), *(call for calls in CALLS.values() for call in calls.values())]


def test_the_reference_page_is_up_to_date() -> None:
    assert PAGE.read_text(encoding="utf-8") == reference(), "run: dslc schema --markdown > docs/reference.md"


@pytest.mark.parametrize("declaration", DECLARATIONS, ids=lambda d: f"{d.__module__.rpartition('.')[2]}.{d.__name__}")
def test_every_field_has_a_kind_a_sentence_and_a_default_of_its_kind(declaration: type[Node]) -> None:
    page = reference()
    for field in fields(declaration):
        assert field.doc and not field.doc.endswith("."), field.name
        assert f"`{field.word}`" in page or field.name in ("arguments", getattr(declaration, "whole", "")), field.name
        if not field.required and field.default is not None and field.name != "arguments":
            assert value_text(field.default, field.kind)
    assert declaration.doc.endswith(".")
    if issubclass(declaration, Call) and declaration.open:
        assert "arguments" in [field.name for field in fields(declaration)]


def _references(node: Any) -> Iterator[str]:
    if isinstance(node, dict):
        yield from [node["$ref"]] if "$ref" in node else []
        for inner in node.values():
            yield from _references(inner)
    elif isinstance(node, list):
        for inner in node:
            yield from _references(inner)


def test_the_schema_is_plain_data_that_names_only_what_it_defines() -> None:
    made = json.loads(json.dumps(schema()))
    assert set(made["properties"]) == {"language", *BLOCKS, "expect", "sweep"}
    assert {ref.removeprefix("#/$defs/") for ref in _references(made)} <= set(made["$defs"]) == set(CALLS)


def test_the_schema_knows_kinds_limits_and_exclusive_fields() -> None:
    properties: Any = schema()["properties"]
    assert properties["data"]["properties"]["batch"] == {
        "type": "integer", "minimum": 1, "description": BLOCKS["data"].__dataclass_fields__["batch"].metadata["doc"],
    }  # fmt: skip
    assert properties["data"]["required"] == ["source", "batch"]
    assert properties["parallelism"]["anyOf"][0] == {"const": "auto"}
    assert properties["train"]["not"] == {"anyOf": [{"required": ["steps", "epochs"]}]}
    every = properties["evaluate"]["properties"]["every"]["pattern"]
    assert re.match(every, "500 steps") and not re.match(every, "500") and not re.match(every, "5GiB")
    assert "with" in properties["launch"]["properties"]
