"""No configuration ends the command with a traceback: what cannot be read or carried is reported."""

from __future__ import annotations

import json
from typing import Any

import pytest
import yaml
from helpers.paths import TESTS
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

from dslc.conversion.config_file import MAX_DEPTH, parse_config, read_config
from dslc.conversion.convert import convert_files
from dslc.conversion.draft import Draft
from dslc.conversion.job_text import job_text
from dslc.conversion.key_table import key_table
from dslc.conversion.recognize import TOOLS, recognize_tool
from dslc.dsl.diagnostics import Report, TooManyErrors
from dslc.dsl.meaning.load import load_text

CASES = (TESTS / "conversion" / "cases").glob("*/*")
FILES = {path.parent.name: file for path in sorted(CASES) if (file := read_config(str(path), Report()))}
KEYS = sorted(
    {key for tool in TOOLS for key in (*key_table(tool).implied, *key_table(tool).named)}
    | {key for file in FILES.values() for key, _ in file.values()}
)
SCALARS = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(-5, 100),
    st.integers(),
    st.floats(),
    st.text(max_size=8),
    st.sampled_from(["auto", "1e-4", "adamw", "WarmupLR", "WarmupDecayLR", "cpu", "bf16", "no", "linear", "cosine"]),
)
VALUES = SCALARS | st.lists(SCALARS, max_size=3) | st.dictionaries(st.text(max_size=3), SCALARS, max_size=2)


# Each line holds the line before it 99 times.
BOMB = "a: &a [1,1]\n" + "".join(f"{b}: &{b} [{', '.join([f'*{a}'] * 99)}]\n" for a, b in ("ab", "bc", "cd", "de"))


def nest(flat: dict[str, Any]) -> dict[str, Any]:
    """Returns a configuration of dotted keys."""
    root: dict[str, Any] = {}
    for path, value in flat.items():
        section = root
        *parts, last = path.split(".")
        for part in parts:
            inner = section.setdefault(part, {})
            section = inner if isinstance(inner, dict) else section
        section[last] = value
    return root


def convert_text(path: str, text: str, tool: str) -> Report:
    draft = Draft()
    file = parse_config(path, text, draft.report)
    if file is not None:
        try:
            convert_files([(tool or recognize_tool(file, draft.report), file)], draft)
        except TooManyErrors:
            return draft.report
        if not draft.report.errors:
            loaded = load_text(job_text(draft, "drawn"))
            refused = [d.message for d in loaded.report.errors if d.code != "E0138"]  # torch refuses it too
            assert not refused
    return draft.report


@given(st.dictionaries(st.sampled_from(KEYS), VALUES, max_size=8), st.sampled_from(sorted(TOOLS)))
@settings(max_examples=100, deadline=None, suppress_health_check=[HealthCheck.too_slow])
def test_drawn_values_are_carried_or_reported(flat: dict[str, Any], tool: str) -> None:
    config = nest(flat)
    convert_text("drawn.json", json.dumps(config, allow_nan=True), tool)
    convert_text("drawn.yaml", yaml.safe_dump(config), tool)


@given(st.sampled_from(sorted(FILES)), st.integers(0, 50), VALUES)
@settings(max_examples=100, deadline=None)
def test_one_value_of_a_good_file_is_replaced(case: str, number: int, value: Any) -> None:
    flat = dict(FILES[case].values())
    flat[sorted(flat)[number % len(flat)]] = value
    convert_text("drawn.json", json.dumps(nest(flat)), "")


@given(st.text(max_size=60), st.sampled_from(["a.json", "a.yaml", "a.toml", "a"]))
@settings(max_examples=50, deadline=None)
@example("{" * 5000, "a.json")
@example("[" * 600, "a.yaml")
@example('{"a": ' * 5000, "a.json")
@example(BOMB, "a.yaml")
@example("a: 2020-99-99", "a.yaml")
@example("? [1]\n: 2", "a.yaml")
@example("a: !!python/object:os.system x", "a.yaml")
@example('{"a": ' + "9" * 5000 + "}", "a.json")
@example("a: " + "9" * 5000, "a.yaml")
@example('{"train_batch_size": ' + "9" * 400 + "}", "a.json")
@example('{"train_batch_size": 8, "optimizer": {"type": "\\ud800"}}', "a.json")
@example('per_device_train_batch_size: 4\nmodel_name_or_path: "a\\0b"', "a.yaml")
def test_drawn_text_is_reported(text: str, name: str) -> None:
    report = convert_text(name, text, "")
    assert report.errors


def test_comments_of_a_job_turn_no_direction_of_writing() -> None:
    draft = Draft()
    file = parse_config("a.json", '{"train_batch_size": 8, "optimizer": {"type": "x\\u202ey\\u0007"}}', draft.report)
    assert file is not None
    convert_files([("deepspeed", file)], draft)
    assert "# x\\u202ey\\x07 is not there" in job_text(draft, "drawn")


def test_a_file_that_is_not_there_is_reported(tmp_path: Any) -> None:
    from dslc.conversion.convert import convert

    assert [d.code for d in convert([str(tmp_path / "none.json"), str(tmp_path)]).report.errors] == ["E1101", "E1101"]


@pytest.mark.parametrize("depth", [MAX_DEPTH - 10, MAX_DEPTH + 10])
def test_depth_is_bounded(depth: int) -> None:
    report = Report()
    file = parse_config("a.yaml", "a: " + "[" * depth + "]" * depth, report)
    assert (file is None) == bool(report.errors) == (depth > MAX_DEPTH)
