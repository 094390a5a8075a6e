"""The task of a `transformers` network, by its configuration file."""

from __future__ import annotations

from pathlib import Path

import pytest

from dslc.compiler.facts.transformers_file import written_task
from dslc.dsl.language.layers import TransformersNetwork


@pytest.mark.parametrize(
    ("written", "task"),
    [
        ('{"architectures": ["BertForMaskedLM"]}', "masked_lm"),
        ('{"architectures": [7, "GPT2LMHeadModel"]}', "causal_lm"),
        ('{"architectures": 5}', None),
        ('{"architectures": null}', None),
        ("[1]", None),
        ("{", None),
    ],
)
def test_the_task_is_of_the_file_if_it_has_one(tmp_path: Path, written: str, task: str | None) -> None:
    (tmp_path / "config.json").write_text(written)
    assert written_task(TransformersNetwork(path="."), str(tmp_path)) == task
