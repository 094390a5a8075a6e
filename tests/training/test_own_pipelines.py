"""Networks of a user's own and of the `transformers` library, cut into stages: they train as in one process.

Networks that are cut: sequences of blocks; a module whose skip connections cross every cut, which passes views of its
input on and computes with numbers that grow with the batch; one with parameters and buffers of its own that belong to
no layer; decoders, whose masks and tables of positions each stage computes for itself.
"""

from __future__ import annotations

import dataclasses
import shutil
from collections.abc import Callable
from functools import cache
from pathlib import Path

import pytest
from helpers.job_texts import job_text
from helpers.launcher import Launcher
from helpers.paths import HELPERS
from helpers.tiny_llama import write_llama
from helpers.trained import Trained, agree, beside_own_networks, exchanges_as_planned, ready, staged, train, train_job

from dslc.compiler.ir.program import CheckpointStep

GPT2 = (
    'transformers("gpt2", n_layer = 4, n_embd = 32, n_head = 2, vocab_size = 256, n_positions = 32, '
    "resid_pdrop = 0.0, embd_pdrop = 0.0, attn_pdrop = 0.0)"
)
DIGITS = "inputs = 64, width = 24, outputs = 10"
NETWORKS = {
    "sequence": (f'python("own_networks:network", {DIGITS}, depth = 3)', "digits()", 0.01),
    "skips": (f'python("own_networks:Skips", {DIGITS})', "digits()", 0.1),
    "shifted": (f'python("own_networks:Shifted", {DIGITS})', "digits()", 0.1),
    "turned": ('python("own_networks:Turned")', "digits()", 0.1),
    "repeated": ('python("own_networks:RepeatedBlocks")', "digits()", 0.05),
    "decoder": ('python("own_networks:Decoder", width = 32, blocks = 4)', "stdlib(context = 16)", 0.1),
    "gpt2": (GPT2, "stdlib(context = 16)", 0.1),
    "llama": ('transformers("tiny")', "stdlib(context = 16)", 0.1),
}
JOB = job_text(
    model={"network": "NETWORK"},
    data={"source": "SOURCE", "batch": 16, "validation": "0.2%"},
    devices={"cpus": 1},
    train={"steps": 8, "optimizer": "sgd(lr = RATE, momentum = 0.9)", "clip": "1.0", "no_decay": '["*0.*"]'},
)

Run = Callable[..., Trained]


@pytest.fixture(scope="module")
def job(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    folder = tmp_path_factory.mktemp("own")
    shutil.copy(HELPERS / "own_networks.py", folder)
    write_llama(folder / "tiny", num_hidden_layers=4)

    def written(name: str) -> Path:
        network, source, rate = NETWORKS[name]
        text = JOB.replace("NETWORK", network).replace("SOURCE", source).replace("RATE", str(rate))
        (folder / f"{name}.plt").write_text(text)
        return folder / f"{name}.plt"

    return written


@pytest.fixture(scope="module")
def trained(job: Callable[[str], Path], launcher: Launcher) -> Run:
    @cache
    def run(name: str, *settings: str) -> Trained:
        return train_job(launcher, job(name), *settings)

    return run


PLANS = [
    ("sequence", staged("interleaved_1f1b", 2, 1, 2)),
    ("skips", staged("zbv", 2, 1, 4)),
    ("turned", staged("1f1b", 2, 1, 2)),
    ("repeated", staged("zbv", 2, 1, 4)),
    ("repeated", staged("zero_bubble", 2, 1, 4)),
    ("decoder", staged("1f1b", 2, 2, 2, "parallelism.zero=3", "memory.recompute=full")),
    ("llama", staged("1f1b", 2, 1, 2)),
]
MORE = [
    ("repeated", staged("zero_bubble", 2, 2, 4, "parallelism.zero=2")),
    ("repeated", staged("dualpipev", 2, 1, 4)),
    ("sequence", staged("1f1b", 2, 1, 4)),
    ("sequence", staged("interleaved_1f1b", 2, 2, 2)),
    ("skips", staged("1f1b", 2, 2, 4, "parallelism.stages=[4, 3]")),
    ("decoder", staged("zero_bubble", 2, 1, 4)),
    ("gpt2", staged("1f1b", 2, 2, 2, "parallelism.zero=1")),
    ("gpt2", staged("zbv", 2, 1, 4)),
    ("llama", staged("interleaved_1f1b", 2, 2, 2)),
]


def _ids(plans: list[tuple[str, tuple[str, ...]]]) -> list[str]:
    return [f"{name}-{plan[3].partition('=')[2]}" for name, plan in plans]


@pytest.mark.parametrize("name, plan", PLANS, ids=_ids(PLANS))
def test_it_trains_as_in_one_process(name: str, plan: tuple[str, ...], trained: Run) -> None:
    one = trained(name)
    assert len(set(one.losses())) == 8
    agree(one, trained(name, *plan))


@pytest.mark.long
@pytest.mark.parametrize("name, plan", MORE, ids=_ids(MORE))
def test_and_in_more_ways(name: str, plan: tuple[str, ...], trained: Run) -> None:
    test_it_trains_as_in_one_process(name, plan, trained)


@pytest.mark.long
@pytest.mark.parametrize("precision", ["bf16", "bf16(level = O2)"])
def test_stages_in_16_bits(precision: str, trained: Run) -> None:
    same = (f"train.precision={precision}", "train.steps=4")
    agree(trained("llama", *same), trained("llama", *staged("1f1b", 2, 1, 2), *same), losses=2e-2, weights=None)


@pytest.mark.long
@pytest.mark.parametrize("name", ["sequence", "skips", "decoder", "llama"])
def test_compiled_stages(name: str, trained: Run) -> None:
    agree(trained(name), trained(name, *staged("1f1b", 2, 1, 2), "train.compile=true"))


FIRST_BLOCKS = '"table*", "blocks.0.*", "blocks.1.*"'  # with the table, all of the first of four stages


@pytest.mark.parametrize(
    "frozen, schedule",
    [
        ('"table*", "position", "blocks.0.*"', "zbv"),
        (f'"position", {FIRST_BLOCKS}', "zero_bubble"),
        (FIRST_BLOCKS, "zero_bubble"),  # the positions train, which the first stage uses outside of its layers
        *(
            pytest.param(FIRST_BLOCKS, schedule, marks=pytest.mark.long)
            for schedule in ("interleaved_1f1b", "zbv", "dualpipev")
        ),
    ],
)
def test_a_frozen_table_and_blocks(frozen: str, schedule: str, trained: Run) -> None:
    same = (f"model.freeze=[{frozen}]", "train.steps=4", "train.no_decay=none")
    agree(trained("decoder", *same), trained("decoder", *staged(schedule, 2, 1, 4), *same))


def test_modules_of_a_stage_make_their_own_numbers(
    tmp_path: Path, job: Callable[[str], Path], launcher: Launcher
) -> None:
    """They start as in one process, also if the module itself belongs to another stage."""
    runs = []
    for name, plan in (("one", ()), ("two", staged("1f1b", 2, 1, 2))):
        made = ready(job("shifted"), *plan)
        model = dataclasses.replace(made.program.model, reset=True)
        runs.append(train(launcher, tmp_path / name, made.program, made.places, model=model))
    agree(runs[0], runs[1])


CHAIN = [
    staged("1f1b", 2, 1, 4),
    staged("zbv", 2, 2, 4, "parallelism.zero=1"),
    ("devices.cpus=2", "parallelism.zero=3"),
    staged("gpipe", 2, 1, 2),
]


@pytest.mark.long
def test_a_checkpoint_goes_from_any_plan_to_any_other(
    tmp_path: Path, job: Callable[[str], Path], launcher: Launcher, trained: Run
) -> None:
    for part, plan in enumerate(CHAIN):
        made = ready(job("decoder"), *plan)
        checkpoint = CheckpointStep(
            every=2, folder=str(tmp_path / "checkpoints"), resume="auto" if part else "none", keep=9
        )
        done = train(
            launcher, tmp_path / str(part), made.program, made.places, checkpoint=checkpoint, steps=2 * part + 2
        )
    got, expected = done.records, trained("decoder").records
    assert ("train", 8) in got and ("train", 6) not in got  # the last plan began after step 6
    for key, record in got.items():
        assert record["loss"] == pytest.approx(expected[key]["loss"], abs=1e-5), key


@pytest.mark.parametrize("name, schedule", [("skips", "zbv"), ("decoder", "1f1b")])
def test_a_step_exchanges_what_was_planned(
    name: str, schedule: str, tmp_path: Path, job: Callable[[str], Path], launcher: Launcher
) -> None:
    """All tensors that cross a cut, and the gradient of the weight that two stages share."""
    exchanges_as_planned(launcher, tmp_path, job(name), *staged(schedule, 2, 1, 4))


TIED = """
model { network = python("own_networks:Tied", first = "FIRST"), loss = cross_entropy() }
data { source = synthetic(vocab = 11, context = 5, samples = 32), batch = 8, validation = 25% }
devices { cpus = 1 }
train { steps = 3, optimizer = OPTIMIZER, clip = 1.0, ema = 0.5 }
checkpoint { every = 3 steps }
log { every = 1 step, tensorboard = false }
"""
ADAMW = "adamw(lr = 0.05, weight_decay = 0.9)"
SECOND_NAMES = {
    "group": ("embed", f'{ADAMW}, groups = [group("head.weight", lr = 0.5)]'),
    "no decay, head first": ("head", f'{ADAMW}, no_decay = ["embed.*"]'),
    "own optimizer": ("head", 'python("own_networks:decays_head", lr = 0.05)'),
}
MORE_NAMES = {
    "three names": ("embed", f'{ADAMW}, groups = [group("blocks.3.0.weight", lr = 0.5)], no_decay = ["blocks.1.*"]'),
    "two groups": ("embed", f'{ADAMW}, groups = [group("head.*", lr = 0.5), group("embed.*", lr = 0.01)]'),
    "freeze": ("embed", ADAMW, 'model.freeze=["head.weight", "blocks.1.0.weight"]'),
    "three names, the last": ("head", f'{ADAMW}, groups = [group("blocks.1.0.weight", lr = 0.5)]'),
}


@pytest.mark.parametrize("name", [*SECOND_NAMES, *(pytest.param(name, marks=pytest.mark.long) for name in MORE_NAMES)])
def test_any_name_of_a_tied_weight_is_of_the_weight(name: str, tmp_path: Path, launcher: Launcher) -> None:
    first, optimizer, *same = (SECOND_NAMES | MORE_NAMES)[name]
    path = beside_own_networks(tmp_path, TIED.replace("FIRST", first).replace("OPTIMIZER", optimizer))
    one, two = (train_job(launcher, path, *plan, *same) for plan in ((), staged("1f1b", 2, 1, 2)))
    agree(one, two, weights=2e-5)
