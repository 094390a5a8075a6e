"""Experts of networks of `transformers` on the expert axis: they train as the library's own forward pass does in one
process, and exchange what the plan says.
"""

from __future__ import annotations

from functools import cache
from pathlib import Path

import pytest
from helpers.launcher import Launcher
from helpers.trained import Trained, agree, exchanges_as_planned, ready, train_job

pytest.importorskip("transformers")

FAMILIES = {
    "mixtral": "intermediate_size = 32, num_local_experts = 4, sliding_window = none",
    "qwen3_moe": "intermediate_size = 32, moe_intermediate_size = 24, num_experts = 4, num_experts_per_tok = 2",
    "olmoe": "intermediate_size = 32, num_experts = 4, num_experts_per_tok = 2",
}
JOB = """
model {
  network = transformers(
    "FAMILY", vocab_size = 32, hidden_size = 16, num_hidden_layers = 2, num_attention_heads = 2,
    num_key_value_heads = 2, max_position_embeddings = 16, MORE,
  )
  loss = cross_entropy()
}
data {
  source = synthetic(samples = 64, context = 8, vocab = 32)
  batch  = 16
}
devices {
  cpus = 1
}
train {
  steps     = 4
  optimizer = sgd(lr = 0.1, momentum = 0.9)
  clip      = 0.5
}
log {
  every       = 1 step
  tensorboard = false
}
"""
TWO = ("devices.cpus=2", "parallelism.expert=2")
FOUR = ("devices.cpus=4", "parallelism.expert=2")
PLANS = {
    "zero 0": ("mixtral", TWO),
    "zero 3, recomputed": ("mixtral", (*FOUR, "parallelism.zero=3", "memory.recompute=full")),
    "pipeline": ("mixtral", (*FOUR, "parallelism.pipeline=2", "parallelism.microbatches=2")),
    "qwen3_moe, zero 2": ("qwen3_moe", (*FOUR, "parallelism.zero=2", "parallelism.microbatches=2")),
    "olmoe": ("olmoe", TWO),
    "compiled": ("mixtral", (*TWO, "train.compile=true")),
}


@cache
def job(folder: Path, family: str) -> Path:
    path = folder / f"{family}.plt"
    path.write_text(JOB.replace("FAMILY", family).replace("MORE", FAMILIES[family]))
    return path


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("library_experts")


@cache
def one_process(launcher: Launcher, job: Path) -> Trained:
    return train_job(launcher, job)


@pytest.mark.slow
@pytest.mark.parametrize("name", [*PLANS])
def test_the_axis_trains_as_one_process_does(launcher: Launcher, folder: Path, name: str) -> None:
    family, plan = PLANS[name]
    path = job(folder, family)
    agree(one_process(launcher, path), train_job(launcher, path, *plan))


@pytest.mark.slow
def test_a_stated_skew_adds_rows_to_the_experts(folder: Path) -> None:
    """The busiest of two ranks works on twice the 2 rows of each of its 8 x 8 tokens."""
    even, twice = (
        ready(job(folder, "mixtral"), *TWO, f"parallelism.expert_skew={skew}").compiled.plan.ranks[0] for skew in (1, 2)
    )
    width, hidden, rows, layers = 16, 32, 2 * 8 * 8, 2
    assert even.memory == even.even_memory == twice.even_memory
    assert twice.flops - even.flops == 3 * layers * rows * 6 * width * hidden
    assert twice.memory.activations - even.memory.activations >= layers * 4 * rows * (width + 4 * hidden)


@pytest.mark.slow
def test_what_is_exchanged_is_planned(launcher: Launcher, folder: Path, tmp_path: Path) -> None:
    """Each token goes to all experts, so that the routing is even."""
    even = tmp_path / "even.plt"
    even.write_text(job(folder, "olmoe").read_text().replace("num_experts_per_tok = 2", "num_experts_per_tok = 4"))
    exchanges_as_planned(launcher, tmp_path, even, *TWO, "parallelism.zero=3", "train.steps=6")
