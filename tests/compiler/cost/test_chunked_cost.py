"""Cross entropy in chunks in the plan: how many chunks, and what they cost."""

from __future__ import annotations

from pathlib import Path

import pytest
from helpers.planning import compiled

from dslc.compiler.comparison import compare_plans
from dslc.compiler.compile import Compiled
from dslc.compiler.ir.actions import Payload
from dslc.compiler.ir.program import LossStep
from dslc.compiler.show.explain import explain

WIDTH, CLASSES, TOKENS = 64, 4000, 16 * 64
JOB = f"""
model {{
  network = gpt(layers = 2, width = {WIDTH}, heads = 2, context = 64, vocab = {CLASSES})
  loss    = cross_entropy(ARGUMENTS)
}}
data {{
  source = stdlib()
  batch  = 16
}}
devices {{
  cpus = 1
}}
train {{
  steps     = 3
  optimizer = sgd(lr = 0.1)
}}
"""


def _plan(folder: Path, arguments: str, *settings: str) -> Compiled:
    job = folder / "job.plt"
    job.write_text(JOB.replace("ARGUMENTS", arguments))
    return compiled(job, *settings)


def _loss(plan: Compiled) -> LossStep:
    return plan.graph.one(LossStep)


@pytest.mark.parametrize(
    ("chunks", "settings", "number"),
    [
        ("auto", (), TOKENS // 256),
        ("auto", ("parallelism.microbatches=4",), 1),
        ("auto", ("devices.cpus=2", "parallelism.context=2"), TOKENS // 256 // 2),
        ("5", ("parallelism.microbatches=2",), 5),
    ],
)
def test_auto_takes_chunks_of_256_tokens_or_of_a_quarter_of_the_width(
    tmp_path: Path, chunks: str, settings: tuple[str, ...], number: int
) -> None:
    loss = _loss(_plan(tmp_path, f"chunks = {chunks}", *settings))
    assert (loss.head, loss.chunks) == (("head", number) if number > 1 else ("", 1))


def test_a_chunk_costs_a_product_of_the_head_and_saves_whole_logits(tmp_path: Path) -> None:
    plain, chunked = _plan(tmp_path, ""), _plan(tmp_path, "chunks = 8")
    (before,), (after,) = plain.plan.ranks, chunked.plan.ranks
    assert after.flops - before.flops == 2 * TOKENS * WIDTH * CLASSES
    assert before.memory.when == "backward pass of the loss"
    assert before.memory.peak - after.memory.peak > 2 * 4 * TOKENS * CLASSES
    assert "`head` and the loss in 8 chunks of a micro-batch" in explain(chunked.plan)
    changes = [(change.section, change.what) for change in compare_plans(plain.graph, chunked.graph)]
    assert changes[0] == ("placement", "model.loss.chunks") and not any(
        what == "model.loss.head" for _, what in changes
    )


@pytest.mark.parametrize(("more", "reductions"), [("", 3), (", label_smoothing = 0.1", 4)])
def test_ranks_with_some_classes_reduce_each_chunk(tmp_path: Path, more: str, reductions: int) -> None:
    plan = _plan(tmp_path, f"chunks = 8{more}", "devices.cpus=2", "parallelism.tensor=2").plan
    (parts,) = (traffic for traffic in plan.ranks[0].traffic if traffic.what is Payload.LOSS_PARTS)
    assert (parts.operation, parts.count, parts.bytes) == ("all_reduce", 8 * reductions, 4 * TOKENS * reductions)


@pytest.mark.parametrize("chunks", [1, 4])
def test_passes_ahead_reduce_each_chunk_and_no_loss_of_whole_logits(tmp_path: Path, chunks: int) -> None:
    balanced = "model.network=llama(layers = 1, width = 64, heads = 2, context = 64, vocab = 4000, {})"
    mixture = "experts = moe(experts = 4, top_k = 2, hidden = 16, balance = {})"
    settings = ("devices.cpus=2", "parallelism.tensor=2", "parallelism.microbatches=2")
    counts = []
    for balance in ("bias(0.01)", "loss()"):
        network = balanced.format(mixture.format(balance))
        plan = _plan(tmp_path, f"chunks = {chunks}", network, *settings).plan
        counts.append(sum(each.count for each in plan.ranks[0].traffic if each.what is Payload.LOSS_PARTS))
    assert counts == [3 * chunks * 2, 3 * chunks * 2 * (1 if chunks == 1 else 2)]
