"""Networks that a function makes, over the context axis: they train as in one process, alone and beside the other axes,
or are refused before any process starts.
"""

from __future__ import annotations

import json
import shutil
from functools import cache
from pathlib import Path

import pytest
from helpers.job_texts import LANGUAGE_JOB
from helpers.launcher import Launcher
from helpers.paths import HELPERS
from helpers.tiny_llama import TINY_LLAMA
from helpers.trained import Trained, agree, exchanges_as_planned, train_job
from safetensors.torch import save_file

from dslc.compiler.ir.program import TransformersStep
from dslc.runtime.model.transformers_model import build_transformers

SIZES = ", ".join(f"{name} = {value}" for name, value in TINY_LLAMA.items() if isinstance(value, int))
NETWORKS = {
    "own": 'python("own_attention:Model")',
    "full": 'python("own_attention:Model", kind = "full")',
    "encoder": 'python("own_attention:Encoder")',
    "reference llama": 'python("reference_models:llama", positions = true)',
    "llama": f'transformers("llama", {SIZES})',
    "qwen3": f'transformers("qwen3", {SIZES}, head_dim = 8)',
    "gpt2": 'transformers("gpt2", n_layer = 2, n_embd = 32, n_head = 2, vocab_size = 256, n_positions = 32, '
    "resid_pdrop = 0.0, embd_pdrop = 0.0, attn_pdrop = 0.0)",
    "bert": 'transformers("bert", hidden_size = 32, num_hidden_layers = 2, num_attention_heads = 4, vocab_size = 256, '
    "intermediate_size = 48, max_position_embeddings = 64, hidden_dropout_prob = 0.0, "
    "attention_probs_dropout_prob = 0.0, is_decoder = true)",
}
CONTEXT = ("devices.cpus=2", "parallelism.context=2")


def over(**sizes: int) -> tuple[str, ...]:
    ranks = 1
    for size in sizes.values():
        ranks *= size
    return (f"devices.cpus={ranks}", *(f"parallelism.{axis}={size}" for axis, size in sizes.items()))


class Jobs:
    """Writes jobs, and trains each network once in one process."""

    def __init__(self, folder: Path, launcher: Launcher) -> None:
        self.folder, self.launcher = folder, launcher
        for module in ("own_attention.py", "reference_models.py"):
            shutil.copy(HELPERS / module, folder)
        self.plain = cache(lambda name, *settings: train_job(self.launcher, self.write(name), *settings))

    def write(self, name: str) -> Path:
        path = self.folder / f"{name}.plt"
        path.write_text(LANGUAGE_JOB.replace("NETWORK", NETWORKS[name]))
        return path

    def train(self, name: str, *settings: str) -> Trained:
        return train_job(self.launcher, self.write(name), *settings)


@pytest.fixture(scope="module")
def jobs(tmp_path_factory: pytest.TempPathFactory, launcher: Launcher) -> Jobs:
    return Jobs(tmp_path_factory.mktemp("context"), launcher)


PLANS = [
    ("own", CONTEXT),
    ("encoder", CONTEXT),
    ("reference llama", CONTEXT),
    ("qwen3", (*CONTEXT, "memory.recompute=full", "parallelism.zero=3")),
    ("own", (*over(context=2, pipeline=2), "parallelism.microbatches=2", "parallelism.schedule=1f1b")),
]
MORE = [
    ("own", (*over(context=4), "memory.recompute=selective")),
    ("own", (*CONTEXT, "train.compile=true")),
    ("own", (*over(context=2, data=2), "parallelism.zero=2", "parallelism.microbatches=2")),
    ("full", (*over(context=2, data=2), "parallelism.zero=1")),
    ("llama", (*CONTEXT, "train.compile=true", "memory.recompute=full")),
    ("gpt2", CONTEXT),
    ("bert", CONTEXT),
    ("llama", (*over(context=2, pipeline=2), "parallelism.microbatches=2", "parallelism.schedule=zbv")),
]


@pytest.mark.parametrize("name, plan", PLANS)
def test_it_trains_as_in_one_process(name: str, plan: tuple[str, ...], jobs: Jobs) -> None:
    one = jobs.plain(name)
    assert len(set(one.losses())) == 8
    agree(one, jobs.train(name, *plan))


LAYERS = (
    "llama(layers = 2, width = 32, heads = 4, kv_heads = 2, hidden = 48, context = 32, vocab = 256, rope_theta = 10000)"
)


def begun(jobs: Jobs) -> str:
    """Returns the setting of weights that dslc's own layers and the library's model begin with."""
    weights = jobs.folder / "llama.safetensors"
    if not weights.exists():
        made = build_transformers(TransformersStep(name="llama", kind="causal_lm", labels=0, arguments=TINY_LLAMA))
        save_file(made.state_dict(), weights)
    NETWORKS["layers"] = LAYERS
    return f"model.weights={json.dumps(str(weights))}"


def agree_in_one_order(one: Trained, other: Trained) -> None:
    other.weights = {name: other.weights[name] for name in one.weights}
    agree(one, other)


def test_it_trains_as_dslcs_own_layers_do(jobs: Jobs) -> None:
    start = begun(jobs)
    agree_in_one_order(jobs.plain("layers", start), jobs.train("llama", start, *over(context=2, tensor=2)))


@pytest.mark.long
@pytest.mark.parametrize("name, plan", MORE)
def test_and_in_more_ways(name: str, plan: tuple[str, ...], jobs: Jobs) -> None:
    test_it_trains_as_in_one_process(name, plan, jobs)


PIPELINED = ("parallelism.microbatches=2", "parallelism.schedule=1f1b")


@pytest.mark.long
@pytest.mark.parametrize(
    "plan",
    [
        over(context=2, tensor=2),
        (*over(context=2, tensor=2, pipeline=2), *PIPELINED),
        (*over(context=2, data=2, pipeline=2), *PIPELINED, "parallelism.zero=1"),
        (*over(context=2, data=2, tensor=2), "parallelism.zero=3"),
        (*over(context=2, data=2, tensor=2, pipeline=2), *PIPELINED),
    ],
)
def test_on_all_axes_as_dslcs_own_layers_do(plan: tuple[str, ...], jobs: Jobs) -> None:
    start = begun(jobs)
    layers = jobs.plain("layers", start)
    agree_in_one_order(layers, jobs.plain("llama", start))
    for name in ("llama", "layers"):
        agree_in_one_order(layers, jobs.train(name, start, *plan))


@pytest.mark.parametrize("name, plan", [("llama", (*CONTEXT, "memory.recompute=full"))])
def test_its_exchanges_are_those_of_the_plan(name: str, plan: tuple[str, ...], jobs: Jobs, tmp_path: Path) -> None:
    exchanges_as_planned(jobs.launcher, tmp_path, jobs.write(name), *plan)
