"""Logits with a cache of keys and values are those of a pass over all positions."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from helpers.job_texts import job_text
from helpers.trained import ready

from dslc.runtime.model.meta_model import build_model
from dslc.runtime.step.key_value_cache import KeyValueCache

CONTEXT = 16
NETWORKS = {
    "gpt": "gpt(layers = 2, width = 16, heads = 2, context = 16, vocab = 32)",
    "llama": "llama(layers = 2, width = 16, heads = 4, kv_heads = 2, hidden = 24, context = 16, vocab = 32)",
    "window": "llama(layers = 2, width = 16, heads = 4, kv_heads = 2, hidden = 24, window = 5, context = 16, "
    "vocab = 32)",
    "experts": "llama(layers = 2, width = 16, heads = 2, context = 16, vocab = 32, "
    "experts = moe(experts = 4, top_k = 2, hidden = 16))",
}


@pytest.mark.parametrize("network", NETWORKS)
@torch.no_grad()
def test_logits_are_those_of_a_pass_over_all_positions(tmp_path: Path, network: str) -> None:
    job = tmp_path / "job.plt"
    job.write_text(
        job_text(
            model={"network": NETWORKS[network]},
            data={"source": "synthetic(vocab = 32)", "batch": 4},
            train={"steps": 1, "optimizer": "sgd()"},
        )
    )
    model = build_model(ready(job).program.model, torch.device("cpu")).eval()
    for parameter in model.parameters():
        parameter.mul_(3)  # so that attention is no mean
    tokens = torch.randint(0, 32, (3, CONTEXT), generator=torch.Generator().manual_seed(0))
    lengths = torch.tensor([3, 7, 10])
    rows = torch.arange(3)
    before = model(tokens)
    cache = KeyValueCache(model)
    torch.testing.assert_close(model(tokens * (torch.arange(CONTEXT) < lengths[:, None]))[0, 2], before[0, 2])
    for step in range(CONTEXT - 10):
        places = lengths + step
        cache.enter(places)
        found = model(tokens[rows, places][:, None])[:, 0]
        torch.testing.assert_close(found, before[rows, places], rtol=1e-4, atol=1e-5)
    cache.remove()
    torch.testing.assert_close(model(tokens), before, rtol=0, atol=0)
