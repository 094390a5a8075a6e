"""A sequence of several documents gives each what it would give it alone: outputs, gradients and losses."""

from __future__ import annotations

from itertools import pairwise
from pathlib import Path

import pytest
import torch
from helpers.launcher import Launcher
from helpers.trained import agree, ready, train_job
from torch import Tensor

from dslc.jobs.check_job import check_one
from dslc.runtime.data.sources.open_sources import open_source
from dslc.runtime.model import documents
from dslc.runtime.model.losses import count, loss_sum
from dslc.runtime.model.meta_model import build_model

END = 10  # the byte of a new line
JOB = """
model {
  network = NETWORK
  loss    = cross_entropy()
}
data {
  source     = text("lines.txt", context = 24)
  batch      = 4
  documents  = 10
  validation = 20%
}
devices { cpus = 1 }
train {
  steps     = 4
  optimizer = sgd(lr = 0.1)
}
evaluate {
  metrics = [loss, accuracy]
}
log {
  every       = 1 step
  tensorboard = false
}
"""
NETWORKS = {
    "gpt": "gpt(layers = 2, width = 16, heads = 2, context = 24, vocab = 256)",
    "llama": "llama(layers = 2, width = 16, heads = 4, kv_heads = 2, hidden = 24, context = 24, window = 5)",
    "layers": "[embedding(width = 16), positional_embedding(), attention(heads = 2), layer_norm(), linear(256)]",
}


def job_with(folder: Path, network: str) -> Path:
    lines = [f"a line of {n} words " * (n % 3 + 1) for n in range(40)]
    (folder / "lines.txt").write_text("\n".join(line[: 3 + n * 5 % 19] for n, line in enumerate(lines)))
    job = folder / "job.plt"
    job.write_text(JOB.replace("NETWORK", NETWORKS[network]))
    return job


@pytest.mark.parametrize("network", NETWORKS)
def test_the_loss_and_the_gradient_are_those_of_each_document_alone(tmp_path: Path, network: str) -> None:
    program = ready(job_with(tmp_path, network)).program
    assert program.loss.counts == "kept"
    model = build_model(program.model, "cpu")
    documents.apply(program.model.documents, model)
    total = loss_sum(program.loss)
    inputs, targets = open_source(program.data).train.batch(torch.arange(4))
    assert (inputs == END).any(1).all() and torch.equal(targets == -100, inputs == END)

    def trained(pairs: list[tuple[Tensor, Tensor]]) -> tuple[float, int, list[Tensor]]:
        model.zero_grad()
        losses, kept = 0.0, 0
        for input, target in pairs:
            loss = total(model(input), target)
            loss.backward()
            losses, kept = losses + loss.item(), kept + int(count(program.loss, target))
        return losses, kept, [parameter.grad.clone() for parameter in model.parameters() if parameter.grad is not None]

    alone = []
    for input, target in zip(inputs, targets, strict=True):
        bounds = [0, *((input == END).nonzero().flatten() + 1).tolist(), len(input)]
        alone += [(input[None, a:b], target[None, a:b]) for a, b in pairwise(bounds) if b > a]
    assert len(alone) > 6
    whole, each = trained([(inputs, targets)]), trained(alone)
    assert whole[1] == each[1] and whole[0] == pytest.approx(each[0], rel=1e-5)
    for found, expected in zip(whole[2], each[2], strict=True):
        torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize(
    ("network", "plan"),
    [
        ("gpt", ("devices.cpus=4", "parallelism.tensor=2", "parallelism.microbatches=2")),
        ("llama", ("devices.cpus=2", "parallelism.zero=3", "memory.recompute=full")),
    ],
)
def test_documents_train_over_ranks_as_in_one_process(
    launcher: Launcher, tmp_path: Path, network: str, plan: tuple[str, ...]
) -> None:
    job = job_with(tmp_path, network)
    one = train_job(launcher, job)
    agree(one, train_job(launcher, job, *plan))


def test_the_mask_is_in_the_account(tmp_path: Path) -> None:
    job = job_with(tmp_path, "gpt")
    found = [check_one(str(job), list(settings))[1] for settings in ((), ("data.documents=none",))]
    one, other = (analysis.costs[0].memory.peak for analysis in found if analysis is not None)
    assert one - other == 4 * 24 * 24 * 4  # samples, pairs of positions, bytes
