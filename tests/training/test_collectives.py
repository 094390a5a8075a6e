"""The predicted exchanges of a step are those that every rank really ran: kind, count and bytes."""

from __future__ import annotations

from pathlib import Path

import pytest
from helpers.job_texts import job_text
from helpers.launcher import Launcher
from helpers.trained import exchanges_as_planned, filled

GPT = job_text(
    model={
        "network": "gpt(layers = 3, width = 36, heads = 2, context = 16, vocab = 256)",
        "loss": "cross_entropy(ignore = IGNORE)",
        "freeze": "FREEZE",
    },
    data={"source": "stdlib()", "batch": 16},
    train=None,
    log=None,
)
NESTED = GPT.replace(
    "gpt(layers = 3, width = 36, heads = 2, context = 16, vocab = 256)",
    "[embedding(256, 8), residual([attention(heads = 2)]), transformer_block(heads = 2), linear(256)]",
).replace("stdlib()", "stdlib(context = 16)")
LLAMA = GPT.replace(
    "gpt(layers = 3, width = 36, heads = 2, context = 16, vocab = 256)",
    "llama(layers = 2, width = 24, heads = 4, kv_heads = 2, hidden = 40, context = 16, vocab = 256, qk_norm = true)",
)
EXPERTS = GPT.replace(
    "gpt(layers = 3, width = 36, heads = 2, context = 16, vocab = 256)",
    "llama(layers = 2, width = 24, heads = 4, context = 16, vocab = 256, experts = "
    "moe(experts = 4, top_k = 2, hidden = 16, balance = bias(0.01)))",
)
DEEP = GPT.replace("layers = 3, width = 36", "layers = 4, width = 16")
GPT_OF_16S = GPT.replace("width = 36", "width = 32")
GATHERED = "fp8(emulate = true, all_gather = true)"
TENSORWISE, ROWWISE = "fp8(emulate = true)", 'fp8(rowwise, skip = "head", emulate = true)'
TIED = GPT.replace("vocab = 256", "vocab = 256, tie = true")
WIDE = job_text(
    model={
        "network": "[flatten(), linear(600), relu(), linear(700), relu(), linear(650), linear(10)]",
        "freeze": "FREEZE",
    },
    data={"source": "digits()", "batch": 16},
    train=None,
    log=None,
)
# 17 rows, of which two ranks have 9 and 8.
ODD = TIED.replace("vocab = 256", "vocab = 17").replace("stdlib()", "synthetic(vocab = 17)")
LAYERS = WIDE.replace("relu(), linear(650), linear(10)", "residual([linear(700)]), linear(10)")
VIT = job_text(
    model={"network": "vit(layers = 2, width = 16, heads = 2, patch = 4, dropout = DROPOUT)", "freeze": "FREEZE"},
    data={"source": "digits()", "batch": 16},
    train=None,
    log=None,
)
CONV = """
model {
  network = [
    conv2d(5, padding = 1), batch_norm(), relu(),
    residual([conv2d(5, padding = 1), batch_norm(), relu()]),
    residual([conv2d(7, padding = 1), batch_norm()], shortcut = [conv2d(7, kernel = 1, padding = 0), batch_norm()]),
    flatten(), linear(10),
  ]
  loss   = cross_entropy()
  freeze = FREEZE
}
data {
  source = digits()
  batch  = 48
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
  sequence     = SEQUENCE
  tensor_plan  = TENSOR_PLAN
  context      = CONTEXT
  zero         = ZERO
  replicas     = REPLICAS
  microbatches = MICROBATCHES
  gradients    = GRADIENTS
}
memory {
  recompute = RECOMPUTE
}
train {
  steps     = 1
  optimizer = adamw(lr = 1e-3)
  compile   = COMPILE
  no_decay  = NO_DECAY
  precision = PRECISION
  clip      = CLIP
}
log {
  tensorboard = false
}
"""
OWN = job_text(
    model={"network": 'python("own_nets:KIND")'}, data={"source": "digits()", "batch": 16}, train=None, log=None
)
EMBEDDINGS = WIDE.replace("cross_entropy()", "contrastive(over = all)")
WHOLE = WIDE.replace("cross_entropy()", 'python("own_nets:apart", over = all)')
VIEWS = VIT.replace("cross_entropy()", "contrastive(over = all)").replace(
    "vit(layers = 2, width = 16, heads = 2, patch = 4, dropout = DROPOUT)",
    "vit(layers = 2, width = 16, heads = 2, patch = 4)",
)
NORMED = CONV.replace("cross_entropy()", "contrastive(over = all)")
OWN_NETS = """
import torch
from torch import nn


class Net(nn.Module):
    def __init__(self, norm=False, buffer=False, unused=False):
        super().__init__()
        self.inner = nn.ModuleList(nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 64)) for _ in range(3))
        self.wide = nn.Linear(64, 5000)
        self.norm = nn.BatchNorm1d(64) if norm else nn.Identity()
        self.head = nn.Linear(5000, 10)
        self.head.bias.requires_grad_(False)
        if buffer:
            self.register_buffer("shift", torch.zeros(64))
            self.register_buffer("calls", torch.zeros((), dtype=torch.int64))
        if unused:
            self.extra = nn.Linear(3, 3)

    def forward(self, x):
        x = x.flatten(1) + getattr(self, "shift", 0)
        for part in self.inner:
            x = x + part(x)
        return self.head(self.wide(self.norm(x)))


def normed():
    return Net(norm=True)


def buffered():
    return Net(buffer=True)


def unused():
    return Net(unused=True)


def apart(outputs, targets):
    return (outputs @ outputs.T).square().mean()
"""
OWN_PLAN = '["inner.*.0: column", "inner.*.2: row", "wide: column", "head: row"]'
NETWORKS = {
    "gpt": GPT, "llama": LLAMA, "nested": NESTED, "deep": DEEP, "tied": TIED, "odd": ODD, "wide": WIDE,
    "layers": LAYERS, "vit": VIT, "conv": CONV, "embeddings": EMBEDDINGS, "whole": WHOLE, "views": VIEWS,
    "normed embeddings": NORMED, "experts": EXPERTS, "gpt of 16s": GPT_OF_16S,
} | {kind: OWN.replace("KIND", kind) for kind in ("normed", "buffered", "unused")}  # fmt: skip
PLAIN = {
    "network": "gpt",
    "ranks": "2",
    "pipeline": "1",
    "schedule": "1f1b",
    "tensor": "1",
    "sequence": "true",
    "tensor_plan": "none",
    "context": "1",
    "zero": "0",
    "replicas": "1",
    "microbatches": "1",
    "gradients": "allreduce()",
    "recompute": "none",
    "precision": "fp32",
    "clip": "none",
    "ignore": "-100",
    "freeze": "[]",
    "no_decay": "[]",
    "compile": "false",
    "dropout": "0.0",
}
JOBS: list[dict[str, str]] = [
    {"network": "wide", "precision": "bf16", "microbatches": "2"},
    {"ignore": "0", "microbatches": "2", "precision": "fp16", "clip": "1.0"},
    {"network": "conv", "freeze": '["0.*", "1.*", "3.layers.0.*"]'},
    {"zero": "1", "ranks": "4", "microbatches": "2", "no_decay": '["*norm*", "*.bias"]', "clip": "1.0"},
    {"zero": "2", "ranks": "4", "microbatches": "2", "clip": "1.0"},
    {"zero": "3", "microbatches": "2", "recompute": "full", "ignore": "0"},
    {"zero": "3", "ranks": "4", "replicas": "2", "microbatches": "2", "clip": "1.0"},
    {"zero": "3", "precision": "bf16(level = O2)", "clip": "1.0"},
    {"zero": "0", "precision": "fp16(level = O2)", "microbatches": "2"},
    {"zero": "2", "precision": "fp16", "network": "conv", "recompute": "every(2)"},
    {"zero": "3", "freeze": '["embedding*", "position*", "blocks.0.*", "blocks.1.*"]', "microbatches": "2"},
    {"context": "2", "ranks": "4", "zero": "3", "microbatches": "2", "clip": "1.0", "ignore": "0"},
    {"network": "unused", "microbatches": "2"},
    {"network": "buffered", "microbatches": "2"},
    {"tensor": "2", "microbatches": "2", "precision": "bf16", "recompute": "full"},
    {"tensor": "2", "sequence": "false", "network": "tied", "ranks": "4", "zero": "3", "precision": "fp16"},
    {"pipeline": "2", "schedule": "zbv", "network": "deep", "precision": "fp16"},
    {"pipeline": "2", "tensor": "2", "ranks": "4", "network": "tied", "microbatches": "2", "clip": "1.0"},
    {"pipeline": "2", "ranks": "4", "zero": "3", "network": "odd", "microbatches": "2", "clip": "1.0"},
    {"network": "llama", "tensor": "2", "context": "2", "ranks": "4", "recompute": "full", "microbatches": "2"},
    {"network": "embeddings"},
    {"network": "views", "zero": "3", "ranks": "4", "microbatches": "2", "recompute": "full"},
    {"network": "normed embeddings", "microbatches": "2"},
    {"network": "whole", "microbatches": "2", "zero": "2", "clip": "1.0"},
    {"network": "views", "tensor": "2", "ranks": "4", "microbatches": "2"},
    {"gradients": "bytegrad()", "network": "wide", "ranks": "4", "microbatches": "2", "clip": "1.0"},
    {"gradients": "powersgd(rank = 3)", "network": "tied", "ranks": "4", "precision": "fp16", "clip": "1.0"},
    {"gradients": "fp16()", "zero": "3", "ranks": "4", "replicas": "2", "microbatches": "2", "clip": "1.0"},
    {"gradients": "low_precision_decentralized()", "network": "wide"},
    {"gradients": "fp16()", "pipeline": "2", "ranks": "4", "zero": "3", "network": "tied", "clip": "1.0"},
    {"gradients": "local_sgd(period = 1)", "network": "unused", "microbatches": "2"},
    {"network": "experts", "context": "2", "ranks": "4", "zero": "3", "microbatches": "2", "recompute": "full"},
    {"network": "experts", "tensor": "2", "ranks": "4", "microbatches": "2", "recompute": "full"},
    {"network": "gpt of 16s", "tensor": "2", "precision": TENSORWISE, "microbatches": "2", "recompute": "full"},
    {"network": "gpt of 16s", "zero": "3", "precision": GATHERED, "microbatches": "2", "recompute": "full"},
]
MORE: list[dict[str, str]] = [
    {"network": "gpt of 16s", "zero": "3", "ranks": "4", "replicas": "2", "microbatches": "2", "precision": GATHERED},
    {"network": "gpt of 16s", "pipeline": "2", "zero": "3", "ranks": "4", "precision": GATHERED, "clip": "1.0"},
    {"network": "gpt of 16s", "tensor": "2", "precision": ROWWISE},
    {"network": "gpt of 16s", "tensor": "2", "ranks": "4", "zero": "3", "precision": ROWWISE, "recompute": "selective"},
    {"network": "gpt of 16s", "tensor": "2", "sequence": "false", "precision": ROWWISE, "recompute": "full"},
    {"network": "gpt of 16s", "tensor": "2", "context": "2", "ranks": "4", "precision": ROWWISE, "microbatches": "2"},
    {"network": "gpt of 16s", "tensor": "2", "pipeline": "2", "ranks": "4", "precision": TENSORWISE},
    {"network": "gpt of 16s", "tensor": "2", "compile": "true", "precision": TENSORWISE},
    {"network": "experts", "pipeline": "2", "ranks": "4", "clip": "1.0"},
    {"network": "experts", "tensor": "2", "sequence": "false", "precision": "bf16", "freeze": '["*.experts.*"]'},
    {"network": "experts", "tensor": "2", "recompute": "full", "freeze": '["embedding*", "layers.0.*", "*.gate.*"]'},
    {"network": "experts", "tensor": "2", "sequence": "false", "precision": "bf16(level = O2)", "clip": "1.0"},
    {"network": "experts", "tensor": "2", "context": "2", "ranks": "4", "recompute": "selective"},
    {"network": "experts", "tensor": "2", "pipeline": "2", "ranks": "4", "schedule": "gpipe", "recompute": "full"},
    {"gradients": "decentralized(peers = shift_one)", "network": "wide"},
    {"gradients": "fp16()", "zero": "2", "ranks": "4", "microbatches": "2", "clip": "1.0"},
    {"gradients": "bf16()", "zero": "3", "ranks": "4", "replicas": "2", "microbatches": "2", "clip": "1.0"},
    {"gradients": "fp16()", "tensor": "2", "ranks": "4", "microbatches": "2"},
    {"gradients": "fp16()", "pipeline": "2", "ranks": "4", "zero": "0", "network": "tied", "clip": "1.0"},
    {"gradients": "fp16()", "pipeline": "2", "ranks": "4", "schedule": "zbv", "network": "deep", "zero": "0"},
    {"gradients": "bytegrad()", "zero": "1", "ranks": "4", "network": "normed"},
    {"gradients": "powersgd(rank = 2)", "zero": "1", "network": "conv", "freeze": '["0.*", "1.*"]'},
    {"gradients": "powersgd(rank = 2)", "network": "unused", "microbatches": "2"},
    {"gradients": "fp16()", "zero": "1", "clip": "1.0", "precision": "fp16"},
    {"gradients": "fp16()", "tensor": "2", "ranks": "4", "zero": "3", "microbatches": "2"},
    {"gradients": "bf16()", "tensor": "2", "ranks": "4", "microbatches": "2"},
    {"gradients": "bf16()", "context": "2", "ranks": "4", "zero": "3", "recompute": "full"},
    {"gradients": "fp16()", "zero": "3", "precision": "fp16", "freeze": '["embedding*", "position*", "blocks.0.*"]'},
    {"gradients": "fp16()", "zero": "2", "precision": "bf16(level = O2)"},
    {"gradients": "bf16()", "pipeline": "2", "ranks": "4", "network": "tied", "zero": "0"},
    {"gradients": "bf16()", "pipeline": "2", "ranks": "4", "schedule": "zbv", "network": "deep", "zero": "2"},
    {"tensor": "2", "context": "2", "ranks": "4", "ignore": "0", "clip": "1.0"},
    {"pipeline": "2", "ranks": "4", "zero": "3", "clip": "1.0"},
    {"tensor": "2", "network": "vit", "dropout": "0.1", "recompute": "full"},
    {"context": "2", "recompute": "full", "precision": "bf16", "network": "nested"},
    {"network": "conv", "microbatches": "2", "recompute": "full"},
    {"network": "llama", "tensor": "2", "precision": "bf16", "clip": "1.0"},
    {"network": "llama", "tensor": "2", "ranks": "4", "zero": "3", "sequence": "false", "recompute": "selective"},
    {"network": "llama", "context": "2", "precision": "bf16(level = O2)"},
    {"network": "llama", "pipeline": "2", "tensor": "2", "ranks": "4"},
    {"context": "2", "recompute": "full", "precision": "bf16"},
    {"freeze": '["*norm*", "embedding*"]', "recompute": "selective"},
    {"zero": "1", "network": "wide", "ranks": "4", "freeze": '["1.*", "3.*", "5.*", "*.bias"]'},
    {"zero": "1", "ranks": "4", "replicas": "2", "microbatches": "2"},
    {"zero": "3", "network": "wide", "freeze": '["3.*", "*.bias"]'},
    {"zero": "2", "network": "wide", "freeze": '["1.*", "3.*"]', "microbatches": "2", "precision": "fp16"},
    {"network": "normed", "microbatches": "2"},
    {"network": "normed", "zero": "3", "ranks": "4", "replicas": "2", "recompute": "full"},
    {"network": "buffered", "zero": "2", "precision": "bf16(level = O2)", "clip": "1.0"},
    {"compile": "true", "microbatches": "2"},
    {"compile": "true", "zero": "3", "recompute": "full"},
    {"compile": "true", "network": "normed"},
    {"tensor": "2", "recompute": "selective", "freeze": '["embedding*", "position*"]'},
    {"tensor": "2", "recompute": "full", "freeze": '["embedding*", "position*", "blocks.0.*", "*norm*"]'},
    {"tensor": "2", "precision": "bf16(level = O2)", "clip": "1.0"},
    {"tensor": "2", "precision": "bf16(level = O2)", "microbatches": "2", "zero": "2"},
    {"tensor": "2", "network": "layers", "recompute": "full"},
    {"tensor": "2", "network": "wide", "precision": "bf16", "microbatches": "2"},
    {"tensor": "2", "network": "vit", "precision": "bf16"},
    {"tensor": "2", "sequence": "false", "recompute": "full", "network": "tied"},
    {"tensor": "2", "network": "buffered", "tensor_plan": OWN_PLAN, "microbatches": "2", "clip": "1.0"},
    {"tensor": "2", "network": "unused", "tensor_plan": OWN_PLAN, "ranks": "4", "zero": "3", "clip": "1.0"},
    {"context": "2", "network": "odd", "pipeline": "2", "ranks": "4", "zero": "3", "microbatches": "2"},
    *(
        {"tensor": "2", "ranks": "4", "zero": zero, "microbatches": "2", "clip": "1.0", "precision": precision}
        for zero in "0123"
        for precision in ("fp32", "fp16(level = O2)")
    ),
    {"tensor": "2", "context": "2", "ranks": "4", "recompute": "full", "precision": "bf16"},
    {"pipeline": "2", "network": "tied", "precision": "fp16", "clip": "1.0"},
    {"pipeline": "2", "schedule": "gpipe", "recompute": "full", "precision": "bf16"},
    {"pipeline": "2", "schedule": "interleaved_1f1b", "network": "deep", "ranks": "4", "zero": "3"},
    {"pipeline": "2", "schedule": "zbv", "network": "tied", "ranks": "4", "zero": "1"},
    {"pipeline": "2", "schedule": "zbv", "network": "deep", "ranks": "4", "zero": "1"},
    {"pipeline": "2", "microbatches": "2", "ranks": "4", "zero": "0", "network": "tied", "clip": "1.0"},
    {"pipeline": "2", "network": "tied", "ranks": "4", "zero": "1", "precision": "bf16(level = O2)"},
    {"pipeline": "2", "microbatches": "2", "ranks": "4", "zero": "3", "network": "tied", "recompute": "full"},
    {"pipeline": "2", "microbatches": "2", "ranks": "4", "zero": "3", "network": "conv"},
    {"pipeline": "2", "microbatches": "2", "ranks": "4", "zero": "3", "freeze": '["embedding*", "blocks.0.*"]'},
    {"pipeline": "2", "ranks": "4", "tensor": "2", "schedule": "zbv", "network": "deep"},
    {"pipeline": "2", "ranks": "4", "tensor": "2", "sequence": "false", "precision": "bf16"},
    {"pipeline": "2", "microbatches": "2", "ranks": "4", "tensor": "2", "precision": "bf16(level = O2)"},
    {"pipeline": "2", "microbatches": "2", "ranks": "4", "context": "2", "zero": "3", "clip": "1.0"},
]


def _name(choice: dict[str, str]) -> str:
    return ", ".join(f"{name} {value}" for name, value in choice.items())


@pytest.mark.cases(2)
@pytest.mark.parametrize("choice", JOBS, ids=_name)
def test_a_step_exchanges_what_was_planned(launcher: Launcher, tmp_path: Path, choice: dict[str, str]) -> None:
    (tmp_path / "own_nets.py").write_text(OWN_NETS)
    chosen = PLAIN | ({"microbatches": "4"} if "pipeline" in choice else {}) | choice
    job = tmp_path / "made.plt"
    job.write_text(filled(NETWORKS[chosen["network"]] + JOB, chosen))
    exchanges_as_planned(launcher, tmp_path, job)


@pytest.mark.long
@pytest.mark.parametrize("choice", MORE, ids=_name)
def test_and_with_more_of_each(launcher: Launcher, tmp_path: Path, choice: dict[str, str]) -> None:
    test_a_step_exchanges_what_was_planned(launcher, tmp_path, choice)
