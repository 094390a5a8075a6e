"""The tensor axis and the context axis, alone, together, beside every way to shard over the data axis, and beside a
pipeline, train as one process does.

Each job is compared with the same job in one process: losses of every step and of the validation split, and the weights
after SGD, to 1e-5 in fp32. In 16 bits the order of sums is seen.
"""

from __future__ import annotations

import itertools
from functools import cache
from pathlib import Path

import numpy as np
import pytest
from helpers.launcher import Launcher
from helpers.trained import Trained, agree, filled, train_job

Choice = dict[str, str]

STEPS = 8
# The last batch of an evaluation is one sample.
GPT = """
model {
  network = gpt(layers = 2, width = 32, heads = 4, context = 16, vocab = 256, tie = TIE)
  loss    = cross_entropy(SETTING)
  freeze  = FREEZE
}
data {
  source = synthetic(samples = 1000, vocab = 256, context = 16)
  batch  = 8
  validation = 1.7%
}
"""
# Norms, a dense pair and attention by itself in a list; the layers before and after work on the whole sequence.
LIST = """
model {
  network = [
    embedding(width = 24),
    positional_embedding(),
    residual([rms_norm(), linear(20), gelu(), linear(24)]),
    attention(heads = 4, causal = true),
    layer_norm(),
    transformer_block(heads = 2),
    linear(36), silu(), linear(24), linear(256),
  ]
  loss = cross_entropy(SETTING)
}
data {
  source = stdlib(context = 12)
  batch  = 8
  validation = 0.1%
}
"""
# A block is handed the vectors of the table as the ranks add them up.
TABLE = """
model {
  network = [embedding(width = 24), transformer_block(heads = 2), linear(256)]
  loss    = cross_entropy(SETTING)
}
data {
  source = stdlib(context = 12)
  batch  = 8
  validation = 0.1%
}
"""
LLAMA = GPT.replace(
    "gpt(layers = 2, width = 32, heads = 4, context = 16, vocab = 256, tie = TIE)",
    """llama(
    layers = 2, width = 32, heads = 4, kv_heads = 2, hidden = 48, context = 16, vocab = 256, qk_norm = true,
    rope_theta = 500, rope_scaling = llama3(factor = 4, original_context = 8), tie = true, window = 11,
    max_window_layers = 1,
  )""",
)
EXPERTS = GPT.replace(
    "gpt(layers = 2, width = 32, heads = 4, context = 16, vocab = 256, tie = TIE)",
    """llama(
    layers = 2, width = 32, heads = 4, kv_heads = 2, hidden = 48, context = 16, vocab = 256, dense_layers = 1,
    experts = moe(experts = 6, top_k = 2, hidden = 32, shared = 1, score = sigmoid, scale = 2.5, balance = bias(0.01)),
  )""",
)
# The same by hand: the norms, attention and gated network of a list, whose last layer is tied.
LLAMAS = """
model {
  network = [
    embedding(width = 24),
    residual([rms_norm(), attention(heads = 4, causal = true, kv_heads = 2, rope_theta = 100, bias = false)]),
    gated_mlp(20), attention(heads = 2, causal = true, window = 5), gated_mlp(20, activation = gelu),
    layer_norm(), gelu(), linear(256, bias = false, tie = true),
  ]
  loss = cross_entropy(SETTING)
}
data {
  source = stdlib(context = 12)
  batch  = 8
  validation = 0.1%
}
"""
VIT = """
model {
  network = vit(layers = 2, width = 16, heads = 4, patch = 2)
  loss    = cross_entropy(SETTING)
}
data {
  source = digits()
  batch  = 32
  validation = 20%
}
"""
JOB = """
devices {
  cpus = RANKS
}
parallelism {
  pipeline     = PIPELINE
  schedule     = SCHEDULE
  tensor       = TENSOR
  context      = CONTEXT
  zero         = ZERO
  replicas     = REPLICAS
  sequence     = SEQUENCE
  microbatches = MICROBATCHES
}
memory {
  recompute = RECOMPUTE
}
train {
  steps     = STEPS
  optimizer = OPTIMIZER
  precision = PRECISION
  clip      = CLIP
  compile   = COMPILE
}
evaluate {
  metrics = [loss, accuracy]
}
log {
  every       = 1 step
  tensorboard = false
}
"""
MLP = VIT.replace("vit(layers = 2, width = 16, heads = 4, patch = 2)", "mlp(widths = [32, 24, 16])")
NETWORKS = {
    "mlp": MLP,
    "gpt": GPT.replace("TIE", "false"),
    "tied": GPT.replace("TIE", "true"),
    "list": LIST,
    "table": TABLE,
    "vit": VIT,
    "llama": LLAMA,
    "llamas": LLAMAS,
    "experts": EXPERTS,
}
PLAIN = {
    "network": "tied",
    "ranks": "1",
    "pipeline": "1",
    "schedule": "1f1b",
    "tensor": "1",
    "context": "1",
    "zero": "0",
    "replicas": "1",
    "sequence": "true",
    "microbatches": "1",
    "recompute": "none",
    "optimizer": "sgd(lr = 0.05, momentum = 0.9)",
    "precision": "fp32",
    "clip": "0.5",
    "setting": "",
    "freeze": "[]",
    "compile": "false",
}
SAME = ("network", "optimizer", "precision", "clip", "setting", "freeze")  # settings that one process shares
ADAMW = "adamw(lr = 1e-3, weight_decay = 0.1)"
TOLERANCE = {"fp32": 1e-5, "bf16": 2e-2, "bf16(level = O2)": 2e-2, "fp16": 5e-3, "fp16(level = O2)": 5e-3}

JOBS: list[Choice] = [
    {"ranks": "2", "tensor": "2", "clip": "value(0.001)"},
    {"ranks": "2", "context": "2", "microbatches": "2"},
    {"ranks": "4", "tensor": "2", "microbatches": "2", "freeze": '["*norm*", "blocks.0.*.bias"]'},
    {"ranks": "4", "tensor": "2", "zero": "3", "recompute": "full", "network": "gpt", "setting": "ignore = 32"},
    {"ranks": "4", "tensor": "2", "context": "2", "zero": "2", "microbatches": "2", "network": "list"},
    {"ranks": "4", "tensor": "4", "sequence": "false", "network": "vit", "setting": "label_smoothing = 0.1"},
    {"ranks": "4", "tensor": "2", "zero": "2", "precision": "fp16", "microbatches": "2"},
    {"ranks": "2", "tensor": "2", "compile": "true", "network": "mlp"},
    {"ranks": "4", "pipeline": "2", "tensor": "2", "microbatches": "4", "schedule": "zbv", "precision": "bf16"},
    {"ranks": "4", "pipeline": "2", "context": "2", "microbatches": "2", "setting": "ignore = 32"},
    {"ranks": "4", "tensor": "2", "context": "2", "network": "llama", "microbatches": "2", "recompute": "full"},
    {"ranks": "4", "pipeline": "2", "tensor": "2", "network": "llama", "microbatches": "2"},
    {"ranks": "4", "tensor": "2", "zero": "3", "network": "llamas"},
    {"ranks": "4", "context": "2", "zero": "3", "network": "experts", "microbatches": "2", "recompute": "full"},
    {"ranks": "4", "tensor": "2", "zero": "3", "network": "experts", "microbatches": "2"},
]
MORE: list[Choice] = [
    {"ranks": "2", "network": "experts", "zero": "1", "recompute": "selective"},
    {"ranks": "4", "network": "experts", "zero": "2", "precision": "bf16", "microbatches": "2"},
    {"ranks": "4", "pipeline": "2", "network": "experts", "microbatches": "4", "schedule": "zero_bubble"},
    {"ranks": "2", "network": "experts", "optimizer": ADAMW},
    {"ranks": "2", "network": "experts", "compile": "true", "zero": "3", "recompute": "full"},
    {"ranks": "2", "tensor": "2", "network": "experts", "compile": "true", "recompute": "full"},
    {"ranks": "2", "tensor": "2", "network": "experts", "recompute": "full", "freeze": '["*.gate.*", "*norm*"]'},
    {"ranks": "4", "tensor": "2", "network": "experts", "zero": "2", "sequence": "false", "recompute": "selective"},
    {"ranks": "4", "tensor": "4", "network": "experts", "precision": "bf16(level = O2)", "microbatches": "2"},
    {"ranks": "4", "tensor": "2", "context": "2", "network": "experts", "precision": "bf16"},
    {"ranks": "4", "pipeline": "2", "tensor": "2", "network": "experts", "microbatches": "4", "schedule": "zbv"},
    {"ranks": "2", "network": "experts", "precision": "fp16(level = O2)", "zero": "3"},
    {"ranks": "4", "pipeline": "2", "tensor": "2", "microbatches": "2", "schedule": "zero_bubble"}
    | {"clip": "value(0.001)"},
    {"ranks": "4", "context": "2", "zero": "3", "microbatches": "2", "setting": "ignore = 32"},
    {"ranks": "2", "tensor": "2", "network": "llama"},
    {"ranks": "2", "tensor": "2", "network": "llama", "sequence": "false", "precision": "bf16"},
    {"ranks": "4", "context": "4", "network": "llama", "recompute": "selective"},
    {"ranks": "4", "context": "2", "zero": "3", "network": "llamas"},
    {"ranks": "4", "tensor": "2", "zero": "2", "network": "llama", "microbatches": "2", "optimizer": ADAMW},
    {"ranks": "4", "pipeline": "2", "context": "2", "network": "llama", "microbatches": "4", "schedule": "zbv"},
    {"ranks": "8", "pipeline": "2", "tensor": "2", "context": "2", "network": "llama", "microbatches": "2"},
    {"ranks": "16", "pipeline": "2", "tensor": "2", "context": "2", "network": "llama", "microbatches": "2"}
    | {"zero": "3"},
    {"ranks": "2", "tensor": "2", "compile": "true", "network": "llama"},
    {"ranks": "4", "pipeline": "2", "tensor": "2", "microbatches": "4", "sequence": "false", "network": "list"},
    {"ranks": "4", "pipeline": "2", "tensor": "2", "microbatches": "4", "schedule": "interleaved_1f1b"},
    {"ranks": "4", "pipeline": "2", "tensor": "2", "microbatches": "4", "schedule": "zbv", "network": "gpt"},
    {"ranks": "4", "pipeline": "2", "context": "2", "microbatches": "4", "schedule": "dualpipev"},
    {"ranks": "4", "pipeline": "2", "tensor": "2", "microbatches": "2", "precision": "fp16", "schedule": "gpipe"},
    {"ranks": "4", "pipeline": "2", "tensor": "2", "microbatches": "2", "precision": "fp16", "schedule": "zero_bubble"},
    {"ranks": "4", "pipeline": "2", "tensor": "2", "microbatches": "4", "schedule": "dualpipev"}
    | {"precision": "bf16(level = O2)"},
    {"ranks": "4", "pipeline": "2", "tensor": "2", "microbatches": "2", "network": "mlp", "schedule": "gpipe"},
    {"ranks": "4", "tensor": "2", "zero": "3", "freeze": '["embedding*", "blocks.0.*"]', "network": "gpt"},
    {"ranks": "4", "tensor": "2", "network": "mlp", "zero": "3"},
    {"ranks": "4", "tensor": "2", "zero": "1", "microbatches": "2", "recompute": "selective"},
    {"ranks": "4", "tensor": "2", "zero": "2", "microbatches": "2", "optimizer": ADAMW},
    {"ranks": "4", "tensor": "2", "zero": "2", "replicas": "2", "microbatches": "4", "network": "gpt"},
    {"ranks": "4", "context": "2", "microbatches": "4", "recompute": "full"},
    {"ranks": "4", "context": "2", "zero": "1", "network": "list"},
    {"ranks": "4", "context": "2", "zero": "2", "replicas": "2", "optimizer": ADAMW, "network": "gpt"},
    {"ranks": "4", "context": "4", "zero": "3", "microbatches": "2"},
    {"ranks": "4", "tensor": "4", "microbatches": "4", "network": "gpt", "clip": "none"},
    {"ranks": "4", "tensor": "2", "network": "list", "sequence": "false", "setting": "label_smoothing = 0.1"},
    {"ranks": "4", "tensor": "2", "context": "2", "zero": "3", "recompute": "full", "network": "gpt"},
    {"ranks": "4", "tensor": "2", "network": "vit", "zero": "3", "microbatches": "2"},
    {"ranks": "4", "tensor": "2", "zero": "3", "precision": "bf16(level = O2)"},
    {"ranks": "4", "tensor": "2", "zero": "0", "precision": "bf16", "recompute": "full"},
    {"ranks": "4", "context": "2", "zero": "2", "precision": "fp16(level = O2)", "microbatches": "2"},
    {"ranks": "4", "tensor": "2", "context": "2", "precision": "fp16"},
    {"ranks": "2", "tensor": "2", "precision": "fp16", "microbatches": "2"},
    {"ranks": "2", "tensor": "2", "precision": "bf16(level = O2)", "clip": "none"},
    {"ranks": "4", "tensor": "2", "zero": "3", "microbatches": "2", "compile": "true", "precision": "bf16"},
    {"ranks": "4", "pipeline": "2", "tensor": "2", "microbatches": "2", "compile": "true", "sequence": "false"},
    {"ranks": "4", "tensor": "2", "compile": "true", "network": "list", "recompute": "full"},
    {"ranks": "2", "tensor": "2", "compile": "true", "recompute": "selective"},
    {"ranks": "2", "tensor": "2", "compile": "true", "network": "gpt", "recompute": "every(2)", "microbatches": "8"},
    {"ranks": "2", "tensor": "2", "compile": "true", "network": "table", "sequence": "false"},
]


class Trainer:
    """Trains choices, and keeps the result of one process for each kind."""

    def __init__(self, launcher: Launcher, folder: Path) -> None:
        self._launcher, self._folder, self._runs = launcher, folder, itertools.count()
        self.plain = cache(self._plain)

    def train(self, choice: Choice, *settings: str) -> Trained:
        folder = self._folder / str(next(self._runs))
        folder.mkdir()
        text = NETWORKS[choice["network"]] + JOB
        (folder / "made.plt").write_text(filled(text, choice | {"steps": str(STEPS)}))
        return train_job(self._launcher, folder / "made.plt", *settings, folder=folder)

    def _plain(self, *same: str) -> Trained:
        return self.train(PLAIN | dict(zip(SAME, same, strict=True)))


@pytest.fixture(scope="module")
def trainer(launcher: Launcher, tmp_path_factory: pytest.TempPathFactory) -> Trainer:
    return Trainer(launcher, tmp_path_factory.mktemp("axes"))


def _name(choice: Choice) -> str:
    return ", ".join(f"{name} {value}" for name, value in choice.items())


@pytest.mark.core
@pytest.mark.parametrize("choice", JOBS, ids=_name)
def test_the_axes_train_as_one_process(trainer: Trainer, choice: Choice) -> None:
    whole = PLAIN | choice
    one, found = trainer.plain(*(whole[name] for name in SAME)), trainer.train(whole)
    assert len(one.losses()) == STEPS and one.losses("validation")
    bound = 1e-5 if whole["optimizer"] == PLAIN["optimizer"] else 0.05 * 1e-3 * STEPS
    weights = bound if whole["precision"] == "fp32" else None
    agree(one, found, losses=TOLERANCE[whole["precision"]], weights=weights)


@pytest.mark.long
@pytest.mark.parametrize("choice", MORE, ids=_name)
def test_and_in_more_ways(trainer: Trainer, choice: Choice) -> None:
    test_the_axes_train_as_one_process(trainer, choice)


def test_a_checkpoint_of_one_plan_goes_on_under_another(trainer: Trainer, tmp_path: Path) -> None:
    """From pipeline 2 x tensor 2, under ZeRO-3 on 2 ranks, to the end of a training in one process."""
    kept = [f'checkpoint.dir="{tmp_path}/kept"', "checkpoint.every=4 steps"]
    first = PLAIN | {"ranks": "4", "pipeline": "2", "tensor": "2", "microbatches": "2", "optimizer": ADAMW}
    second = PLAIN | {"ranks": "2", "zero": "3", "optimizer": ADAMW}
    begun = trainer.train(first, *kept, "train.steps=8")
    assert len(begun.losses()) == STEPS
    goes_on = trainer.train(second, *kept, "train.steps=12", "checkpoint.resume=auto")
    whole = trainer.train(PLAIN | {"optimizer": ADAMW}, "train.steps=12")
    np.testing.assert_allclose([*begun.losses(), *goes_on.losses()], whole.losses(), rtol=0, atol=1e-5)
    for name, value in whole.weights.items():
        np.testing.assert_allclose(goes_on.weights[name], value, rtol=0, atol=0.05 * 1e-3 * 12, err_msg=name)
