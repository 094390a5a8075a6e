"""Texts that a network writes during its training: those of a loop by hand, the same on every plan."""

from __future__ import annotations

import json
import shutil
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from helpers.launcher import Launcher
from helpers.trained import agree, ready, train, train_job
from safetensors.torch import load_file
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

import dslc
from dslc.runtime.model.meta_model import build_model
from dslc.runtime.process.failure import describe

# 24 tokens behind a prompt leave the 16 positions of the network.
JOB = """
model {
  network = gpt(layers = 2, width = 32, heads = 4, context = 16, vocab = 256)
  loss    = cross_entropy()
}
data {
  source = stdlib()
  batch  = 8
}
train {
  steps     = 6
  optimizer = sgd(lr = 0.5)
}
log {
  every       = 1 steps
  tensorboard = TENSORBOARD
}
generate {
  every       = 3 steps
  prompts     = ["def ", "ä", "import os, sys and more\\n"]
  max_tokens  = 24
  temperature = TEMPERATURE
}
"""
PLANS = (
    "devices.cpus=2 parallelism.zero=3",
    "devices.cpus=4 parallelism.pipeline=2 parallelism.context=2",
    "devices.cpus=4 parallelism.tensor=2 parallelism.sequence=true parallelism.zero=1",
    "devices.cpus=2 parallelism.tensor=2",
)


def _job(folder: Path, temperature: float = 0.0, tensorboard: str = "false") -> Path:
    folder.mkdir(exist_ok=True)
    job = folder / "job.plt"
    job.write_text(JOB.replace("TEMPERATURE", str(temperature)).replace("TENSORBOARD", tensorboard))
    return job


def _texts(folder: Path) -> list[dict[str, Any]]:
    lines = (folder / "samples.jsonl").read_text(encoding="utf-8").splitlines()
    return [{k: v for k, v in json.loads(line).items() if k not in ("seconds", "took")} for line in lines]


def _continued(model: torch.nn.Module, prompt: str) -> str:
    tokens = list(prompt.encode())
    for _ in range(24):
        logits = model(torch.tensor([tokens[-16:]]))
        tokens.append(int(logits[0, -1].argmax()))
    return bytes(tokens[len(prompt.encode()) :]).decode(errors="replace")


def test_texts_are_those_of_a_loop_by_hand_and_change_no_training(launcher: Launcher, tmp_path: Path) -> None:
    job = _job(tmp_path, tensorboard="true")
    made, trained = ready(job), train_job(launcher, job)
    assert made.program.generate is not None
    (plain := tmp_path / "plain").mkdir()
    agree(train(launcher, plain, made.program, made.places, generate=None), trained, 0.0, 0.0)
    assert "generate: 1 of 3 prompts with more tokens than the context, continued from the last 16" in trained.shown
    model = build_model(made.program.model, torch.device("cpu")).eval()
    model.load_state_dict(load_file(trained.folder / "weights.safetensors"), strict=False)
    texts = _texts(trained.folder)
    prompts = made.program.generate.prompts
    assert [(text["step"], text["number"]) for text in texts] == [(3, 0), (3, 1), (3, 2), (6, 0), (6, 1), (6, 2)]
    assert [text["text"] for text in texts[3:]] == [_continued(model, prompt) for prompt in prompts]
    events = EventAccumulator(str(trained.folder / "tensorboard"))
    events.Reload()
    assert [event.step for event in events.Tensors("texts/2/text_summary")] == [3, 6]
    assert [event.step for event in events.Scalars("phases/texts")] == [3, 6]


@cache
def _reference(launcher: Launcher, folder: Path, temperature: float) -> list[dict[str, Any]]:
    return _texts(train_job(launcher, _job(folder, temperature)).folder)


@pytest.mark.core
@pytest.mark.parametrize(("plan", "temperature"), [*zip(PLANS, (1.5, 0.0, 0.7, 0.0), strict=True)])
def test_texts_are_the_same_on_every_plan(launcher: Launcher, tmp_path: Path, plan: str, temperature: float) -> None:
    texts = _texts(train_job(launcher, _job(tmp_path, temperature), *plan.split()).folder)
    assert texts == _reference(launcher, tmp_path / "reference", temperature)
    assert len({text["text"] for text in texts}) == len(texts) or not temperature


@pytest.mark.slow
def test_a_resumed_training_keeps_the_texts_before_its_checkpoint(launcher: Launcher, tmp_path: Path) -> None:
    job, folder = _job(tmp_path, 1.0), tmp_path / "run"
    folder.mkdir()
    train_job(launcher, job, "checkpoint.every=3 steps", folder=folder)
    expected = _texts(folder)
    (folder / "samples.jsonl").write_text((folder / "samples.jsonl").read_text() + "cut o")
    shutil.rmtree(folder / "checkpoints" / "step-00000006")
    train_job(launcher, job, "checkpoint.every=3 steps", "checkpoint.resume=auto", folder=folder)
    assert _texts(folder) == expected


@pytest.mark.parametrize(
    ("name", "content", "prompts"),
    [
        ("prompts.txt", "def \n\nclass\n", ("def ", "class")),
        ("prompts.jsonl", '{"prompt": "a\\nb", "id": 1}\n"c"\n', ("a\nb", "c")),
        ("prompts.jsonl", '{"text": "a"}\n', None),
        ("prompts.jsonl", "a\n", None),
        ("prompts.txt", " \n", None),
        ("prompts.txt", "a\n" * 257, None),
    ],
)
def test_prompts_are_lines_of_a_file(tmp_path: Path, name: str, content: str, prompts: tuple[str, ...] | None) -> None:
    (tmp_path / name).write_text(content)
    job = _job(tmp_path)
    setting = f'generate.prompts="{tmp_path / name}"'
    if prompts is None:
        assert [found.code for found in dslc.check(str(job), [setting])] == ["E0354"]
        return
    step = ready(job, setting).program.generate
    assert step is not None and (step.prompts, step.every, step.max_tokens, step.context) == (prompts, 3, 24, 16)


# A network whose ranks differ in the order of their blocks from the 7th step on, which is no power of two.
DIFFERS = """
import os

import torch
from torch import nn


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.steps = 0
        self.embedding, self.head = nn.Embedding(256, 16), nn.Linear(16, 256)
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(16, 16)) for _ in range(2))

    def forward(self, tokens):
        self.steps += int(self.training and torch.is_grad_enabled())
        turned = self.steps > 6 and os.environ.get("RANK") == "1"
        hidden = self.embedding(tokens)
        for block in reversed(self.blocks) if turned else self.blocks:
            hidden = block(hidden)
        return self.head(hidden)
"""


@pytest.mark.slow
def test_the_order_of_the_step_after_texts_is_compared(launcher: Launcher, tmp_path: Path) -> None:
    job = _job(tmp_path)
    network = JOB[JOB.index("gpt(") : JOB.index("\n  loss")]
    text = job.read_text().replace(network, 'python("differs:Net")').replace("stdlib()", "stdlib(context = 16)")
    job.write_text(text)
    (tmp_path / "differs.py").write_text(DIFFERS)
    settings = ("devices.cpus=2", "parallelism.zero=3", "train.steps=7", "generate.every=6 steps", "log.every=7 steps")
    made = ready(job, *settings, "generate.max_tokens=2", "launch.timeout=30s")
    (tmp_path / "run").mkdir()
    outcome, shown = launcher.launch(made.program, made.places, tmp_path / "run")
    assert outcome is not None and outcome.failure is not None, shown
    message = describe(outcome)
    assert "at step 7 " in message and "rank 0 calls `blocks.0`" in message and "rank 1 calls `blocks.1`" in message
