"""Networks that a function makes, cut over the tensor axis by a plan of the job's or of their library: they train as in
one process, or the plan is refused before any process starts.
"""

from __future__ import annotations

import json
import shutil
from functools import cache
from pathlib import Path
from typing import Any

import pytest
from launcher import Launcher
from trained import Trained, agree, load_what_traces, ready, train, train_job

OWN = Path(__file__).parent / "own_transformer.py"
PLAN = """[
    "blocks.*.attention.[qkv]: column",
    "blocks.*.attention.norm: summed",
    "blocks.*.attention.out: row",
    "blocks.*.up: column",
    "blocks.*.gate: column",
    "blocks.*.down: row",
    "table: vocabulary",
    "head: gathered",
  ]"""
LLAMA = {
    "model_type": "llama",
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 256,
    "max_position_embeddings": 32,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
JOB = """
model {
  network = NETWORK
  loss    = cross_entropy()
}
data {
  source     = stdlib(context = 16)
  batch      = 8
  validation = 0.1%
}
devices {
  cpus = 1
}
train {
  steps     = 8
  optimizer = sgd(lr = 0.05, momentum = 0.9)
  clip      = 0.5
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
    "own": 'python("own_transformer:network")',
    "by hand": 'python("own_transformer:network", tie = false, by_hand = true)',
    "plain": 'python("own_transformer:plain")',
    "llama": 'transformers("llama")',
    "tied": 'transformers("llama", tie_word_embeddings = true)',
    "qwen3": 'transformers("qwen3", head_dim = 8)',
    "phi3": 'transformers("phi3", pad_token_id = 0)',
}
TENSOR = ("devices.cpus=2", "parallelism.tensor=2")
FOUR = ("devices.cpus=4", "parallelism.tensor=2")
ZERO_3 = (*FOUR, "parallelism.zero=3")


class Jobs:
    """Writes jobs, and trains each network once in one process."""

    def __init__(self, folder: Path) -> None:
        load_what_traces()
        self.folder, self.launcher = folder, Launcher("transformers")
        self.plain = cache(lambda name, *settings: train_job(self.launcher, self.write(name), *settings))

    def write(self, name: str) -> Path:
        folder = self.folder / name.replace(" ", "_")
        path = folder / "job.plt"
        if not folder.exists():
            folder.mkdir()
            shutil.copy(OWN, folder)
            kind = NETWORKS[name].partition('"')[2].partition('"')[0]
            if "transformers" in NETWORKS[name]:
                (folder / kind).mkdir()
                (folder / kind / "config.json").write_text(json.dumps(LLAMA | {"model_type": kind}))
            path.write_text(JOB.replace("NETWORK", NETWORKS[name]))
        return path

    def settings(self, name: str) -> tuple[str, ...]:
        return (f"parallelism.tensor_plan={PLAN}",) if "own" in NETWORKS[name] else ()

    def train(self, name: str, *settings: str) -> Trained:
        return train_job(self.launcher, self.write(name), *self.settings(name), *settings)


@pytest.fixture(scope="module")
def jobs(tmp_path_factory: pytest.TempPathFactory) -> Any:
    made = Jobs(tmp_path_factory.mktemp("plans"))
    yield made
    made.launcher.close()


TRAINED = [
    ("own", TENSOR),
    ("llama", TENSOR),
    ("own", (*ZERO_3, "memory.recompute=full", "parallelism.microbatches=2")),
    ("llama", ZERO_3),
]
MORE = [
    ("by hand", (*ZERO_3, "memory.recompute=selective")),
    ("by hand", ("devices.cpus=4", "parallelism.tensor=4", "parallelism.microbatches=4")),
    ("own", (*FOUR, "parallelism.zero=2", "parallelism.microbatches=2")),
    ("own", (*FOUR, 'model.freeze=["blocks.0.*", "table*"]')),
    ("tied", (*FOUR, "parallelism.zero=1", "parallelism.microbatches=2")),
    ("llama", (*FOUR, "parallelism.zero=2", "memory.recompute=full")),
    ("qwen3", (*FOUR, "parallelism.microbatches=2")),
    ("phi3", TENSOR),
]


def _name(value: Any) -> str:
    return value if isinstance(value, str) else ", ".join(each.partition(".")[2] for each in value)


@pytest.mark.parametrize("name, settings", TRAINED, ids=_name)
def test_a_cut_network_trains_as_in_one_process(jobs: Jobs, name: str, settings: tuple[str, ...]) -> None:
    same = [each for each in settings if each.startswith("model.")]
    agree(jobs.plain(name, *same), jobs.train(name, *settings))


@pytest.mark.long
@pytest.mark.parametrize("name, settings", MORE, ids=_name)
def test_and_in_more_ways(jobs: Jobs, name: str, settings: tuple[str, ...]) -> None:
    test_a_cut_network_trains_as_in_one_process(jobs, name, settings)


def test_no_rank_makes_what_is_too_large_for_one(jobs: Jobs) -> None:
    """Each module gives its parameters their numbers, of which a rank keeps its share."""
    path = jobs.write("plain")
    same = ("data.batch=2", "data.source=stdlib(context = 4)", "data.validation=0")
    plan = 'parallelism.tensor_plan=["0: vocabulary", "1: column", "3: row", "4: gathered"]'
    one = ready(path, *same)
    cut = ready(path, *same, "devices.cpus=4", "parallelism.tensor=4", plan, "memory.limit=190 kB")
    assert cut.program.model.reset and not one.program.model.reset
    whole = train(jobs.launcher, path.parent / "one", one.program, one.places, model=cut.program.model)
    agree(whole, train(jobs.launcher, path.parent / "cut", cut.program, cut.places))


def test_a_plan_of_the_library_is_carried_out(jobs: Jobs) -> None:
    step = ready(jobs.write("tied"), *TENSOR).program.tensor
    assert step is not None and step.loss_parallel and not step.sequence
    styles = dict(step.styles)
    assert styles["model.layers.1.self_attn.k_proj"] == "column"
    assert styles["model.layers.0.mlp.down_proj"] == "row"
    assert styles["model.embed_tokens"] == "vocabulary" and styles["lm_head"] == "scores"
