"""Jobs with a pipeline train as one process does, under every schedule and with every setting that it allows.

Each is compared with the same job in one process, without stages or micro-batches. In fp32 losses and weights agree to
1e-5; in 16 bits the order of sums is seen.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from pathlib import Path

import pytest
from helpers.job_texts import job_text
from helpers.launcher import Launcher
from helpers.paths import ROOT
from helpers.trained import Trained, agree, ready, staged, train

from dslc.compiler.ir.program import CheckpointStep

PIPELINE = ROOT / "examples" / "pipeline.plt"
# The example, made so small that a training takes a second.
SMALL = (
    "model.network.layers=6",
    "model.network.width=32",
    "model.network.heads=2",
    "model.network.context=16",
    "memory.recompute=none",
    "data.validation=0.02%",
    "train.precision=fp32",
    "train.steps=20",
    "train.lr_schedule=warmup_cosine(warmup = 3 steps)",
    "evaluate.every=10 steps",
    "checkpoint.every=none",
)
MLP = job_text(model={"network": "mlp(widths = [24, 24, 16])"}, train=None, log=None)
CONVNET = """
model {
  network = [
    conv2d(8, kernel = 3, padding = 1), relu(), max_pool2d(2),
    residual([conv2d(8, kernel = 3, padding = 1), relu()]),
    flatten(), linear(24), relu(), linear(10),
  ]
  loss = cross_entropy()
}
"""
DIGITS = """
data {
  source     = digits()
  batch      = 32
  validation = 20%
}
devices {
  cpus = 1
}
train {
  steps     = 12
  optimizer = sgd(lr = 0.1, momentum = 0.9)
  clip      = 0.5
  no_decay  = ["*.bias"]
}
"""

EVERY = "log.every=1 steps"

Settings = tuple[str, ...]
Run = Callable[..., Trained]


@pytest.fixture(scope="module")
def launched(launcher: Launcher, tmp_path_factory: pytest.TempPathFactory) -> Run:
    """Trains a job with settings, each once."""

    @cache
    def run(path: Path, *settings: str) -> Trained:
        made = ready(path, *settings, EVERY)
        return train(launcher, tmp_path_factory.mktemp("run"), made.program, made.places)

    return run


def one(*settings: str) -> Settings:
    alone = ("devices.cpus=1", "parallelism.data=1", "parallelism.pipeline=1", "parallelism.microbatches=1")
    return (*SMALL, *alone, "parallelism.schedule=1f1b", *settings)


# The cases of each schedule: micro-batches, ranks and other settings.
PLANS = [
    staged("gpipe", 4, 1, 2),
    staged("1f1b", 2, 2, 4, "parallelism.zero=0"),
    staged("interleaved_1f1b", 2, 2, 2, "parallelism.zero=1"),
    staged("looped_bfs", 2, 2, 4, "parallelism.zero=3"),
    staged("zero_bubble", 2, 2, 4, "parallelism.zero=2"),
    staged("zbv", 4, 1, 8),
    staged("dualpipev", 4, 1, 8),
]


@pytest.mark.parametrize("plan", PLANS, ids=lambda plan: plan[3].partition("=")[2])
def test_every_schedule_of_the_example_agrees_with_one_process(plan: Settings, launched: Run) -> None:
    agree(launched(PIPELINE, *SMALL, *plan), launched(PIPELINE, *one()))


TIED = "model.network.tie=true"


@pytest.mark.parametrize(
    "plan",
    [staged("1f1b", 4, 1, 4), staged("zero_bubble", 2, 2, 4, "parallelism.zero=1"), staged("zbv", 2, 2, 4)],
    ids=["on two ranks", "on two ranks, in rows", "on one rank, in two stages"],
)
def test_a_tied_weight_stays_one(plan: Settings, launched: Run) -> None:
    agree(launched(PIPELINE, *SMALL, TIED, *plan), launched(PIPELINE, *one(TIED)))


ODD = job_text(
    model={"network": "gpt(layers = 2, width = 16, heads = 2, context = 16, vocab = 17, tie = true)"},
    data={"source": "synthetic(vocab = 17)", "batch": 16},
    train={"steps": 4, "optimizer": "sgd(lr = 0.5, momentum = 0.9, weight_decay = 0.1)"},
    log=None,
)


def test_a_tied_weight_whose_rows_do_not_divide(tmp_path_factory: pytest.TempPathFactory, launched: Run) -> None:
    """One rank has 9 of its 17 rows, the other 8."""
    path = tmp_path_factory.mktemp("jobs") / "odd.plt"
    path.write_text(ODD)
    plan = staged("1f1b", 2, 2, 2, "parallelism.zero=3")
    agree(launched(path, *plan), launched(path, "devices.cpus=1"))


def test_stages_recompute(launched: Run) -> None:
    plan = staged("zero_bubble", 2, 1, 4, "memory.recompute=full")
    agree(launched(PIPELINE, *SMALL, *plan), launched(PIPELINE, *one()))


@pytest.mark.parametrize(
    ("plan", "moved"),
    [
        (staged("zero_bubble", 2, 1, 4), ["activations"]),
        (staged("1f1b", 2, 2, 4, "parallelism.zero=3", TIED), ["optimizer", "parameters"]),
        (staged("zbv", 2, 2, 4, "parallelism.zero=1", TIED), ["optimizer", "parameters", "activations"]),
    ],
    ids=["activations", "all but activations", "all"],
)
def test_stages_whose_numbers_are_moved(
    plan: Settings, moved: list[str], launcher: Launcher, launched: Run, tmp_path: Path
) -> None:
    """Runs the code for GPUs, which a job for CPUs does not need."""
    made = ready(PIPELINE, *SMALL, *plan, "memory.offload=[optimizer, parameters]", EVERY)
    done = train(launcher, tmp_path, made.program, made.places, offload=tuple(moved))
    agree(done, launched(PIPELINE, *one(*[TIED] * (TIED in plan))))


@pytest.mark.parametrize("precision", ["bf16", "bf16(level = O2)", "fp16"])
def test_stages_in_16_bits(precision: str, launched: Run) -> None:
    plan, same = staged("1f1b", 2, 1, 4), (f"train.precision={precision}", "train.steps=8", "model.network.layers=2")
    agree(launched(PIPELINE, *one(*same)), launched(PIPELINE, *SMALL, *plan, *same), losses=2e-2, weights=None)


def test_frozen_layers_and_targets_that_are_ignored(launched: Run) -> None:
    same = ('model.freeze=["embed*", "blocks.0.*"]', "model.loss=cross_entropy(ignore = 32)", "train.steps=10")
    plan = staged("zbv", 2, 1, 4)
    agree(launched(PIPELINE, *SMALL, *plan, *same), launched(PIPELINE, *one(*same)))


@pytest.mark.parametrize("network", [MLP, CONVNET], ids=["mlp", "convnet"])
def test_networks_of_images(network: str, tmp_path_factory: pytest.TempPathFactory, launched: Run) -> None:
    path = tmp_path_factory.mktemp("jobs") / "images.plt"
    path.write_text(network + DIGITS)
    expected = launched(path)
    agree(launched(path, *staged("dualpipev", 2, 1, 4)), expected)
    agree(launched(path, *staged("gpipe", 2, 2, 2)), expected)


def test_a_stage_may_end_with_a_view(tmp_path_factory: pytest.TempPathFactory, launched: Run) -> None:
    """The second of four ends with `flatten`: what it sends lies in the memory of what comes before."""
    path = tmp_path_factory.mktemp("jobs") / "images.plt"
    path.write_text(CONVNET + DIGITS)
    plan = staged("zero_bubble", 2, 1, 4, "parallelism.stages=[2, 3, 1, 2]", "train.steps=3")
    agree(launched(path, *plan), launched(path, "train.steps=3"))


def test_stages_by_hand(launched: Run) -> None:
    plan = staged("1f1b", 2, 1, 4, "parallelism.stages=[3, 7]")
    agree(launched(PIPELINE, *SMALL, *plan), launched(PIPELINE, *one()))


CHAIN = [
    one(TIED)[len(SMALL) :],
    staged("1f1b", 2, 1, 4, TIED),
    staged("zbv", 2, 2, 4, TIED, "parallelism.zero=1"),
    ("devices.cpus=2", "parallelism.data=2", "parallelism.pipeline=1", "parallelism.zero=3", TIED),
    staged("gpipe", 4, 1, 4, TIED),
]


def test_a_checkpoint_goes_from_any_plan_to_any_other(tmp_path: Path, launcher: Launcher, launched: Run) -> None:
    for part, plan in enumerate(CHAIN):
        made = ready(PIPELINE, *SMALL, *plan, EVERY)
        last = 20 if part + 1 == len(CHAIN) else 4 * (part + 1)
        resume = "auto" if part else "none"
        checkpoint = CheckpointStep(every=4, folder=str(tmp_path / "checkpoints"), resume=resume, keep=9)
        folder = tmp_path / str(part)
        done = train(launcher, folder, made.program, made.places, checkpoint=checkpoint, steps=last)
    got, expected = done.records, launched(PIPELINE, *one(TIED)).records
    assert ("train", 17) in got and ("train", 16) not in got  # the last plan began after step 16
    for key, record in got.items():
        assert record["loss"] == pytest.approx(expected[key]["loss"], abs=1e-5), key
