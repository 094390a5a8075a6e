"""What the soundness tests have found of structures and of networks that look at numbers, each by itself."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
from helpers.job_texts import job_text
from helpers.launcher import Launcher
from helpers.paths import HELPERS
from helpers.trained import agree, filled, train_job

JOB = job_text(
    model={"network": 'python("own_parts:NETWORK)', "loss": 'python("own_parts:LOSS")'},
    data={"source": 'python("own_parts:SOURCE)', "batch": 4, "shuffle": "false"},
    train={"steps": 5, "optimizer": "sgd(lr = 0.1, momentum = 0.9)"},
    log={"tensorboard": None},
)
POINTS = 'Points", named = true'


@pytest.mark.core
@pytest.mark.parametrize(
    ("network", "loss", "source", "plan"),
    [
        # Some experts get their first sample, and so their momentum, in a later step than others.
        ('Mixed", looks = true', "each_told", 'Points"', "parallelism.zero=1"),
        # The loss leaves out a part of the output, on ranks that look for parameters without a gradient, or shard them.
        ('Mixed", named = true', "weighed", POINTS, "parallelism.zero=0"),
        ('Mixed", named = true', "weighed", POINTS, "parallelism.zero=3"),
        # One loss for each token of sentences that each rank pads for itself.
        ('Tagger"', "classified", 'Sentences")\n  collate = python("own_parts:padded"', "parallelism.microbatches=2"),
        # A parameter in the output, a constant loss on some ranks, and an object of another class.
        ('Uncertain"', "balanced", POINTS, "parallelism.zero=0"),
        ('Mixed", named = true', "seldom", POINTS, "parallelism.zero=1"),
        ('Mixed", named = true', "seldom", POINTS, "parallelism.zero=3"),
        ('Told"', "", 'Texts"', "parallelism.zero=2"),
        # Which parameters were used is asked of all ranks, also where each pair of them shards a replica.
        ('Mixed", looks = true', "each_told", 'Points"', "devices.cpus=4 parallelism.zero=3 parallelism.replicas=2"),
    ],
)
def test_some_ranks_train_as_one_process(
    launcher: Launcher, tmp_path: Path, network: str, loss: str, source: str, plan: str
) -> None:
    shutil.copy(HELPERS / "own_parts.py", tmp_path)
    job = tmp_path / "job.plt"
    own = () if loss else ("model.loss=own()",)
    job.write_text(filled(JOB, {"network": network, "loss": loss or "classified", "source": source}))
    decay = "train.optimizer.weight_decay=0.5"  # moves what has a gradient of zeros, and leaves what has none
    one = train_job(launcher, job, decay, *own)
    agree(one, train_job(launcher, job, decay, *own, "devices.cpus=2", *plan.split()))
