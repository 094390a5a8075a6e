"""The rules of torch's engines that predicted collectives depend on, compared with torch itself."""

from __future__ import annotations

import random
from typing import Any

import pytest
import torch
import torch.distributed as dist
from helpers.gang import gang
from helpers.networks_drawn import built, classes, of, tokens
from torch import nn

from dslc.compiler.ir.facts import SourceFacts
from dslc.compiler.ir.program import ModelStep
from dslc.compiler.operations.buckets import FIRST_BUCKET_BYTES, buckets, ready
from dslc.compiler.placement.sharding import BUCKET_BYTES, zero1_partition
from dslc.dsl.language import layers as s
from dslc.runtime.model.meta_model import build_model


def _sizes(seed: int, most: int) -> list[int]:
    drawn = random.Random(seed)
    return [drawn.choice((1, 3, 7, 7, 64, 700, drawn.randint(1, most))) for _ in range(drawn.randint(1, 60))]


@pytest.mark.parametrize("seed", range(20))
def test_buckets_are_those_of_torch(seed: int) -> None:
    sizes = _sizes(seed, 4_000_000)
    tensors = [torch.empty(size, device="meta") for size in sizes]
    limits = [FIRST_BUCKET_BYTES, BUCKET_BYTES]
    indices, _ = dist._compute_bucket_assignment_by_size(tensors, limits, [False] * len(sizes), list(range(len(sizes))))
    assert buckets(4 * size for size in sizes) == [4 * sum(sizes[n] for n in each) for each in indices]
    assert dist._DEFAULT_FIRST_BUCKET_BYTES == FIRST_BUCKET_BYTES


def _dealt(rank: int, cases: list[list[list[int]]]) -> list[list[list[int]]]:
    from torch.distributed.optim import ZeroRedundancyOptimizer

    found = []
    for sizes in cases:
        groups = [[nn.Parameter(torch.zeros(size)) for size in group] for group in sizes]
        made: Any = ZeroRedundancyOptimizer([{"params": group} for group in groups], torch.optim.SGD, lr=0.1)
        found.append([[made._param_to_rank[parameter] for parameter in group] for group in groups])
    return found


@pytest.mark.parametrize("ranks", [2, 3])
def test_the_partition_is_that_of_torch(ranks: int) -> None:
    cases = [[_sizes(10 * n + k, 500) for k in range(1 + n % 2)] for n in range(8)]
    found = gang(ranks, _dealt, cases)
    ours = [[list(owners) for owners in zero1_partition(sizes, ranks)] for sizes in cases]
    assert found == [ours] * ranks


IMAGES = classes(7, 3, 16, 16)
TEXT = tokens(8, 20)
NETWORKS: dict[str, tuple[Any, SourceFacts]] = {
    "layers": (
        (
            of(s.Conv2d, channels=4),
            of(s.BatchNorm),
            of(s.ReLU),
            of(s.Residual, layers=(of(s.Conv2d, channels=4, kernel=3, padding=1), of(s.BatchNorm))),
            of(s.Flatten),
            of(s.Linear, features=9),
            of(s.LayerNorm),
            of(s.Linear, features=7, bias=False),
        ),
        IMAGES,
    ),
    "resnet": (of(s.ResNet, depth=18), IMAGES),
    "vit": (of(s.ViT, patch=4, width=16, layers=2, heads=2), IMAGES),
    "gpt": (of(s.GPT, layers=2, width=16, heads=2, context=8, vocab=20), TEXT),
    "lstm": (
        (of(s.Embedding, width=8), of(s.LSTM, width=6, layers=2, bidirectional=True), of(s.Linear, features=20)),
        TEXT,
    ),
}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "autocast"),
    [(name, autocast) for name in NETWORKS for autocast in (False, True) if (name, autocast) != ("lstm", True)],
)
def test_gradients_are_ready_in_the_order_that_is_said(name: str, autocast: bool) -> None:
    network, source = NETWORKS[name]
    graph = built(network, source)
    model = build_model(ModelStep(root=graph.root, inits=graph.inits, ties=graph.ties), "cpu")
    seen: list[str] = []
    for path, parameter in model.named_parameters():
        parameter.register_post_accumulate_grad_hook(lambda _, path=path: seen.append(path))
    assert source.input is not None
    batch = torch.zeros(2, *source.input.shape, dtype=getattr(torch, source.input.dtype))
    with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
        output = model(batch)
    output.float().sum().backward()
    sizes = {path: parameter.numel() for path, parameter in model.named_parameters()}
    expected = [parameter.name for parameter in ready(graph.layers, autocast=autocast)]
    assert set(expected) == set(seen) == set(sizes)
    # Two biases of an LSTM are alike, and torch takes them either way round: the order of sizes is what buckets see.
    assert [(path.rpartition(".")[0], sizes[path]) for path in expected] == [
        (path.rpartition(".")[0], sizes[path]) for path in seen
    ]
