"""Parameters that do not train stay as they were, whatever else the training does."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import numpy as np
import pytest
import torch
from helpers.launcher import Launcher
from helpers.made_programs import conv_model, gpt_model, images, places, program, tokens
from safetensors.torch import load_file

from dslc.compiler.ir import program as p
from dslc.runtime.model.meta_model import build_model
from dslc.runtime.technique import frozen
from dslc.runtime.technique.frozen import FreezeError


def freezing(model: p.ModelStep, *patterns: str) -> p.ModelStep:
    return dataclasses.replace(model, frozen=patterns)


def test_patterns_name_parameters() -> None:
    step = freezing(gpt_model(), "2.attention*.weight", "3.*")
    model = build_model(step, "cpu")
    frozen.freeze(step, model)
    fixed = {name for name, parameter in model.named_parameters() if not parameter.requires_grad}
    assert fixed == {"0.weight", "2.attention_norm.weight", "2.attention.qkv.weight", "2.attention.output.weight"}
    assert not model.get_parameter("3.weight").requires_grad  # the same tensor


@pytest.mark.parametrize(
    ("pattern", "said"), (("blocks.*", "no parameter is called `blocks.*`"), ("*", "nothing to train"))
)
def test_patterns_that_match_nothing_or_everything(pattern: str, said: str) -> None:
    step = freezing(gpt_model(), pattern)
    with pytest.raises(FreezeError, match=said.replace("*", r"\*")):
        frozen.freeze(step, build_model(step, "cpu"))


@pytest.mark.parametrize(
    ("model", "patterns"),
    ((conv_model(), ("0.*", "1.*", "4.bias")), (gpt_model(), ("0.weight", "2.attention*"))),
    ids=("the first layers", "a tied weight"),
)
def test_what_is_frozen_stays_and_the_rest_trains_alike(
    launcher: Launcher, tmp_path: Path, model: p.ModelStep, patterns: tuple[str, ...]
) -> None:
    data = tokens(tmp_path) if model.ties else images(tmp_path)
    step = freezing(model, *patterns)
    trained = []
    for ranks, microbatches in ((1, 1), (2, 2 if model.ties else 1)):
        made = program(ranks, data, model=step, microbatches=microbatches, clip=1.0)
        outcome, _ = launcher.launch(made, places(ranks), tmp_path / str(ranks))
        assert outcome.is_complete, outcome
        trained.append(load_file(tmp_path / str(ranks) / "weights.safetensors"))
    before = build_model(step, "cpu")
    frozen.freeze(step, before)
    for name, parameter in before.named_parameters():
        assert torch.equal(trained[0][name], parameter.detach()) == (not parameter.requires_grad), name
    for name, value in trained[0].items():
        np.testing.assert_allclose(trained[1][name], value, rtol=0, atol=1e-5, err_msg=name)
