"""Fine-tunes of `transformers` models with batches that are dicts: they train as a plain loop of torch does, on one
rank and on several.
"""

from __future__ import annotations

import importlib
import json
import shutil
from pathlib import Path

import numpy as np
import pytest
import torch
from helpers.job_texts import job_text
from helpers.launcher import Launcher
from helpers.paths import HELPERS
from helpers.trained import Trained, agree, train_job
from safetensors.torch import save_file

from dslc.compiler.ir.program import TransformersStep
from dslc.runtime.model.transformers_model import build_transformers

STEPS, BATCH, RATE = 4, 8, 0.05
JOB = job_text(
    model={"network": 'transformers("CONFIG", task = TASK)', "loss": "own()", "weights": "WEIGHTS"},
    data={
        "source": 'python("fine_tunes:Sentences", task = "TASK")',
        "collate": 'python("fine_tunes:COLLATE)',
        "batch": 8,
        "shuffle": "false",
    },
    train={"steps": 4, "optimizer": "sgd(lr = 0.05)"},
)
BERT = {
    "model_type": "bert", "hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "vocab_size": 40,
    "intermediate_size": 24, "max_position_embeddings": 32, "hidden_dropout_prob": 0.0,
    "attention_probs_dropout_prob": 0.0, "pad_token_id": 0, "num_labels": 3,
}  # fmt: skip
T5 = {
    "model_type": "t5", "d_model": 16, "d_kv": 8, "d_ff": 24, "num_layers": 1, "num_decoder_layers": 1, "num_heads": 2,
    "vocab_size": 40, "dropout_rate": 0.0, "pad_token_id": 0, "decoder_start_token_id": 0,
}  # fmt: skip
LLAMA = {
    "model_type": "llama", "hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 2,
    "num_attention_heads": 2, "vocab_size": 40, "max_position_embeddings": 32, "pad_token_id": 0,
}  # fmt: skip
TASKS = {
    "sequence_classification": (BERT, 'by_sample"'),
    "token_classification": (BERT, 'by_token"'),
    "masked_lm": (BERT, 'by_token"'),
    "question_answering": (BERT | {"num_labels": 2}, 'Padded", multiple = 16'),
    "causal_lm": (LLAMA, 'by_token"'),
    "seq2seq_lm": (T5, 'pairs"'),
}
FURTHER = ("token_classification", "masked_lm")  # tried in the long tests alone


class Jobs:
    """Writes jobs, and trains them."""

    def __init__(self, folder: Path, launcher: Launcher) -> None:
        self.folder, self.launcher = folder, launcher
        shutil.copy(HELPERS / "fine_tunes.py", folder)

    def write(self, task: str) -> tuple[Path, torch.nn.Module]:
        """Returns a job, and the model that it begins with."""
        config, collate = TASKS[task]
        folder = self.folder / task
        folder.mkdir(exist_ok=True)
        (folder / "config.json").write_text(json.dumps(config))
        torch.manual_seed(3)
        step = TransformersStep(name="config.json", kind=task, structured=True, folder=str(folder))  # type: ignore[arg-type]
        model = build_transformers(step)
        save_file({name: p.detach().clone() for name, p in model.named_parameters()}, folder / "w.safetensors")
        text = JOB.replace("CONFIG", f"./{task}").replace("COLLATE", collate).replace("TASK", task)
        path = self.folder / f"{task}.plt"
        path.write_text(text.replace("WEIGHTS", json.dumps(str(folder / "w.safetensors"))))
        return path, model

    def train(self, path: Path, *settings: str) -> Trained:
        return train_job(self.launcher, path, *settings)


@pytest.fixture(scope="module")
def jobs(tmp_path_factory: pytest.TempPathFactory, launcher: Launcher) -> Jobs:
    return Jobs(tmp_path_factory.mktemp("tunes"), launcher)


def plain(task: str, model: torch.nn.Module) -> list[float]:
    """Trains as a loop in plain torch does, and returns the losses."""
    tunes = importlib.import_module("helpers.fine_tunes")
    samples, (_, name) = tunes.Sentences(task), TASKS[task]
    collate = tunes.Padded(16) if name.startswith("Padded") else getattr(tunes, name.strip('"'))
    optimizer, losses = torch.optim.SGD(model.parameters(), lr=RATE), []
    for step in range(STEPS):
        batch = collate([samples[n] for n in range(step * BATCH, (step + 1) * BATCH)])
        loss = model(**batch).loss
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


PLANS = {
    "causal_lm": ("parallelism.tensor=2", "parallelism.zero=2", "parallelism.microbatches=2"),
    "sequence_classification": (
        "parallelism.tensor=2",
        'parallelism.tensor_plan=["bert.encoder.layer.*.intermediate.dense: column", '
        '"bert.encoder.layer.*.output.dense: row", "bert.encoder.layer.*.attention.self.[qkv]*: column", '
        '"bert.encoder.layer.*.attention.output.dense: row"]',
    ),
    "question_answering": ("parallelism.zero=1", "parallelism.microbatches=2"),
}


@pytest.mark.long
@pytest.mark.parametrize("task", PLANS)
def test_and_on_four_ranks(task: str, jobs: Jobs) -> None:
    path, _ = jobs.write(task)
    agree(jobs.train(path), jobs.train(path, "devices.cpus=4", *PLANS[task]))


@pytest.mark.core
@pytest.mark.parametrize(
    "task", [pytest.param(task, marks=pytest.mark.long if task in FURTHER else ()) for task in TASKS]
)
def test_a_fine_tune_trains_as_a_plain_loop_does(task: str, jobs: Jobs) -> None:
    path, model = jobs.write(task)
    one = jobs.train(path)
    np.testing.assert_allclose(one.losses(), plain(task, model), rtol=1e-5, atol=1e-5)
    if task in ("masked_lm", "seq2seq_lm"):
        agree(one, jobs.train(path, "devices.cpus=2", "parallelism.zero=3", "parallelism.microbatches=2"))
    if task == "causal_lm":
        agree(one, jobs.train(path, "devices.cpus=2", "parallelism.tensor=2"))
