"""With dropout, every plan has the curve of one process: on each axis, with micro-batches, recomputation, sharding, and
resumed on other ranks.
"""

from __future__ import annotations

import re
from functools import cache
from pathlib import Path

import pytest
from helpers.launcher import Launcher
from helpers.trained import Trained, agree, ready, train, train_job, write_job_with_helper

from dslc.jobs.check_job import check_one

JOB = """
model {{ network = {network}, loss = cross_entropy(){more} }}
data  {{ source = {source}, batch = 8 }}
devices {{ cpus = 1 }}
train {{ steps = 6, optimizer = sgd(lr = 0.1) }}
log   {{ every = 1 step }}
"""
GPT2 = """{"model_type": "gpt2", "architectures": ["GPT2LMHeadModel"], "n_layer": 2, "n_head": 2, "n_embd": 16,
"n_positions": 16, "vocab_size": 256, "bos_token_id": 0, "eos_token_id": 0}"""
NETWORKS = {
    "layers": ("[flatten(), linear(32), dropout(0.3), linear(10)]", "digits()"),
    "gpt": ("gpt(layers = 2, width = 16, heads = 2, context = 16, vocab = 256, dropout = 0.1)", "stdlib()"),
    "vit": ("vit(layers = 2, width = 16, heads = 2, patch = 2, dropout = 0.1)", "digits()"),
    "own": ('python("own_draws:network")', "stdlib(context = 16)"),
    "transformers": ('transformers("./gpt2")', "stdlib(context = 16)"),
    "adapter": ('transformers("./gpt2")', "stdlib(context = 16)"),
    "cut": ('python("own_cut_draws:Network")', "stdlib(context = 16)"),
    "helpers": ('python("own_helper_draws:Network")', "stdlib(context = 16)"),
    "joined rows": ('python("own_joined_draws:Network")', "stdlib(context = 16)"),
    "flat": ('python("own_flat_draws:Network")', "digits()"),
    "mixed": ('python("own_mixed_draws:Network")', "stdlib(context = 16)"),
    "joined": ('python("own_cut_draws:Network", joined = true)', "stdlib(context = 16)"),
    "llama": (
        'transformers("llama", num_hidden_layers = 2, hidden_size = 16, intermediate_size = 24, vocab_size = 256, '
        "num_attention_heads = 4, num_key_value_heads = 2, max_position_embeddings = 32, attention_dropout = 0.2)",
        "stdlib(context = 16)",
    ),
}
OUT = '"blocks.*.out: row", "blocks.*.down: row"'
CUT = f'parallelism.tensor_plan=["blocks.*.[qkv]: column", "blocks.*.up: column", {OUT}]'
JOINED = (
    'parallelism.tensor_plan=["blocks.*.qkv: column in 3 parts", "blocks.*.both: column in parts [1, 1]", ' + OUT + "]"
)
MIXED = 'parallelism.tensor_plan=["blocks.*.up: column", "blocks.*.out: row"]'
HOOKED = 'parallelism.tensor_plan=["blocks.*.inner.up: column", "blocks.*.inner.down: row"]'
FROM_SHAPE = "model.network.from_shape=true"
LARGE = "model.network.rows=2100000"  # 34 million numbers, which no trial takes
TWO, FOUR, RECOMPUTED = "devices.cpus=2", "devices.cpus=4", "memory.recompute=full"
PIECES = "parallelism.sequence=true"
DATA = (TWO, "parallelism.microbatches=2", "parallelism.zero=3", "memory.recompute=full")
PIPELINE = (TWO, "parallelism.pipeline=2", "parallelism.microbatches=4", "memory.recompute=selective")
PLANS = [
    ("gpt", ("parallelism.microbatches=4", "memory.recompute=full")),
    ("gpt", DATA),
    ("gpt", PIPELINE),
    ("gpt", (TWO, "parallelism.tensor=2", PIECES)),
    ("gpt", (TWO, "parallelism.tensor=2")),
    ("gpt", (TWO, "parallelism.context=2", "memory.recompute=full")),
    ("gpt", (FOUR, "parallelism.tensor=2", "parallelism.context=2")),
    ("gpt", (FOUR, "parallelism.tensor=2", "parallelism.pipeline=2", "parallelism.microbatches=2", PIECES)),
    ("gpt", (FOUR, "parallelism.context=2", "parallelism.pipeline=2", "parallelism.microbatches=2")),
    ("gpt", (FOUR, "parallelism.tensor=2", "parallelism.zero=2", "parallelism.microbatches=2")),
    ("gpt", (FOUR, "parallelism.context=2", "parallelism.zero=2", "parallelism.microbatches=2")),
    ("gpt", (FOUR, "parallelism.pipeline=2", "parallelism.zero=1", "parallelism.microbatches=2")),
    ("gpt", (TWO, "train.compile=true", "parallelism.microbatches=2", "parallelism.zero=3")),
    (
        "gpt",
        (FOUR, "train.compile=true", "parallelism.context=2", "parallelism.pipeline=2", "parallelism.microbatches=2"),
    ),
    ("gpt", (FOUR, "train.compile=true", "parallelism.tensor=2", "parallelism.zero=2", RECOMPUTED, PIECES)),
    ("layers", (TWO, "train.compile=true", "parallelism.pipeline=2", "parallelism.microbatches=2")),
    ("own", (TWO, "train.compile=true", RECOMPUTED, "parallelism.zero=3")),
    ("own", (TWO, "train.compile=true", RECOMPUTED, "parallelism.pipeline=2", "parallelism.microbatches=2")),
    ("own", (TWO, "train.compile=true", "parallelism.microbatches=2", "parallelism.zero=3")),
    ("vit", DATA),
    ("vit", PIPELINE),
    ("own", DATA),
    ("own", PIPELINE),
    ("helpers", DATA),
    ("helpers", PIPELINE),
    ("helpers", (FOUR, "parallelism.tensor=2", "parallelism.context=2", HOOKED)),
    ("helpers", (TWO, "train.compile=true", "parallelism.microbatches=2", "parallelism.zero=3")),
    ("flat", (TWO, "parallelism.pipeline=2", "parallelism.microbatches=2")),
    ("flat", (TWO, "train.compile=true", "parallelism.pipeline=2", "parallelism.microbatches=2")),
    ("joined rows", DATA),
    ("joined rows", PIPELINE),
    ("joined rows", (TWO, "parallelism.microbatches=2", "model.network.order=between")),
    ("joined rows", (TWO, "train.compile=true", "parallelism.zero=3")),
    ("transformers", DATA),
    ("transformers", PIPELINE),
    ("adapter", DATA),
    ("cut", (FOUR, "parallelism.tensor=2", "parallelism.context=2", CUT)),
    ("cut", (FOUR, "parallelism.tensor=2", "parallelism.pipeline=2", "parallelism.microbatches=2", CUT)),
    ("cut", (FOUR, "parallelism.context=2", "parallelism.zero=3", "parallelism.microbatches=2", RECOMPUTED)),
    ("joined", (FOUR, "parallelism.tensor=2", "parallelism.zero=2", "parallelism.microbatches=2", JOINED)),
    ("mixed", DATA),
    ("mixed", (FOUR, "parallelism.tensor=2", "parallelism.pipeline=2", "parallelism.microbatches=2", MIXED)),
    ("mixed", (FOUR, "parallelism.tensor=2", "parallelism.microbatches=2", RECOMPUTED, MIXED)),
    ("llama", (FOUR, "parallelism.tensor=2", "parallelism.context=2", PIECES)),
    ("llama", (FOUR, "parallelism.context=2", "parallelism.pipeline=2", "parallelism.microbatches=2")),
    ("llama", (FOUR, "parallelism.tensor=2", "parallelism.zero=1", RECOMPUTED)),
]


@cache
def in_one_process(launcher: Launcher, folder: Path, name: str) -> Trained:
    return train_job(launcher, job_of(folder, name))


def job_of(folder: Path, name: str) -> Path:
    network, source = NETWORKS[name]
    (folder / "gpt2").mkdir(parents=True, exist_ok=True)
    (folder / "gpt2" / "config.json").write_text(GPT2)
    more = ', adapter = lora(4, ["c_attn"], dropout = 0.1)' if name == "adapter" else ""
    helper = re.search(r"own_(cut_|flat_|helper_|joined_|mixed_)?draws|$", network).group() or "own_draws"  # type: ignore[union-attr]
    return write_job_with_helper(f"{helper}.py", folder, JOB.format(network=network, source=source, more=more))


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("one")


@pytest.mark.cases(2)
@pytest.mark.slow
@pytest.mark.parametrize(("name", "settings"), PLANS)
def test_a_plan_draws_what_one_process_draws(
    launcher: Launcher, folder: Path, tmp_path: Path, name: str, settings: tuple[str, ...]
) -> None:
    one = in_one_process(launcher, folder / name, name)
    agree(one, train_job(launcher, job_of(tmp_path, name), *settings))


@pytest.mark.slow
def test_a_training_that_resumes_on_other_ranks_goes_on_with_the_next_numbers(
    launcher: Launcher, folder: Path, tmp_path: Path
) -> None:
    one = in_one_process(launcher, folder / "gpt", "gpt")
    job, place = job_of(tmp_path, "gpt"), tmp_path / "run"
    kept = ("checkpoint.every=3 steps", "checkpoint.resume=auto")
    for steps, settings in (("3", (TWO, "parallelism.tensor=2")), ("6", DATA)):
        made = ready(job, f"train.steps={steps}", *kept, *settings)
        place.mkdir(exist_ok=True)
        end = train(launcher, place, made.program, made.places)
    assert end.losses() == pytest.approx(one.losses(), abs=1e-5)


@pytest.mark.slow
def test_torchs_generators_draw_if_the_job_says_so(launcher: Launcher, folder: Path, tmp_path: Path) -> None:
    one = in_one_process(launcher, folder / "gpt", "gpt")
    job = job_of(tmp_path, "gpt")
    by_torch = [
        train_job(launcher, job, "train.dropout_generator=torch", *settings).losses() for settings in ((), (TWO,))
    ]
    assert len({tuple(losses) for losses in (one.losses(), *by_torch)}) == 3


@pytest.mark.slow
def test_a_draw_in_a_hook_of_a_module_that_is_cut_is_warned_of(tmp_path: Path) -> None:
    settings = (TWO, "parallelism.tensor=2", HOOKED)
    for hooked, is_warned in (("act", False), ("up", True)):
        found = check_one(str(job_of(tmp_path, "helpers")), [*settings, f"model.network.hooked={hooked}"], trace=True)[
            0
        ].found
        assert [each.code for each in found if each.code == "W0608"] == ["W0608"] * is_warned


@pytest.mark.parametrize(
    ("settings", "reason"),
    [
        ((LARGE, "model.network.order=between"), ""),
        ((LARGE, FROM_SHAPE), "no trial tells whether its rows go sample by sample"),
        pytest.param((FROM_SHAPE,), "", marks=pytest.mark.slow),
        pytest.param((FROM_SHAPE, "model.network.order=between"), "a pass over a part", marks=pytest.mark.slow),
        pytest.param(("model.network.order=between",), "", marks=pytest.mark.slow),
    ],
)
def test_rows_in_no_known_order_are_warned_of(tmp_path: Path, settings: tuple[str, ...], reason: str) -> None:
    found = check_one(str(job_of(tmp_path, "joined rows")), [TWO, *settings], trace=True)[0].found
    warned = [f"{each.message}: {each.label}" for each in found if each.code == "W0608"]
    assert len(warned) == bool(reason)
    assert all("own_joined_draws.py:" in each and reason in each for each in warned)


def test_compiled_code_draws_by_sample(tmp_path: Path) -> None:
    job = job_of(tmp_path, "gpt")
    for settings in ((), ("parallelism.context=2",), ("parallelism.tensor=2",), (RECOMPUTED,)):
        found = check_one(str(job), [TWO, "train.compile=true", *settings])[0].found
        assert not [each for each in found if each.code == "W0608"]
