"""Sequences padded to one length train as they would alone: padding is neither attended to nor a target."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from helpers.job_texts import job_text
from helpers.launcher import Launcher
from helpers.tiny_llama import write_llama
from helpers.trained import agree, ready, train, train_job

from dslc.dsl.diagnostics import Report
from dslc.dsl.meaning.load import load
from dslc.jobs.check_job import inspect
from dslc.runtime.model.meta_model import build_model

BERT = (
    'transformers("bert", num_hidden_layers = 2, hidden_size = 32, num_attention_heads = 4, intermediate_size = 48, '
    "vocab_size = 64, max_position_embeddings = 32, hidden_dropout_prob = 0.0, attention_probs_dropout_prob = 0.0)"
)
LLAMA = 'transformers("tiny", vocab_size = 64)'
PAD, LONGEST = 3, 12
JOB = job_text(
    model={"network": "NETWORK"},
    data={"source": 'arrays("padded.npz")', "batch": 8, "shuffle": "false", "pad": 3},
    train={"steps": 4, "optimizer": "sgd(lr = 0.1, momentum = 0.9)"},
)


def sequences(seed: int = 0) -> list[np.ndarray[Any, Any]]:
    """32 of them, of 3 to 12 tokens, none of which is the padding."""
    random = np.random.default_rng(seed)
    return [random.integers(4, 64, length) for length in random.integers(3, LONGEST + 1, 32)]


def write_job(folder: Path, network: str, classes: bool = False) -> Path:
    """Filled up at the end, targets too: those of a language model are what follows, those of BERT the tokens."""
    write_llama(folder / "tiny", architectures=["LlamaForCausalLM"])
    inputs, targets = np.full((32, LONGEST), PAD), np.full((32, LONGEST), PAD)
    for row, tokens in enumerate(sequences()):
        inputs[row, : len(tokens)] = tokens
        following = tokens[1:] if network == LLAMA else tokens
        targets[row, : len(following)] = following
    labels = np.arange(32) % 2
    np.savez(folder / "padded.npz", x=inputs, y=labels if classes else targets)
    job = folder / "job.plt"
    job.write_text(JOB.replace("NETWORK", network))
    return job


def librarys(model: torch.nn.Module) -> Any:
    """Its own forward pass, which takes more than the input."""
    kind: Any = type(model).__mro__[1]
    return kind.forward


def alone(program: Any, network: str) -> float:
    """The loss of the first batch, sequence by sequence, each as long as it is and given to the library's own forward
    pass without a mask.
    """
    model = build_model(program.model, "cpu")
    whole = librarys(model)
    total, number = 0.0, 0
    for tokens in sequences()[:8]:
        input = torch.from_numpy(tokens)
        target = input[1:] if network == LLAMA else input
        with torch.no_grad():
            scores = whole(model, input_ids=input[None]).logits[0, : len(target)]
        total += torch.nn.functional.cross_entropy(scores, target, reduction="sum").item()
        number += len(target)
    return total / number


PLANS = {
    "ddp": ("devices.cpus=2",),
    "zero 3": ("devices.cpus=2", "parallelism.zero=3"),
    "tensor": ("devices.cpus=2", "parallelism.tensor=2", "parallelism.data=1"),
    "pipeline": ("devices.cpus=2", "parallelism.pipeline=2", "parallelism.data=1", "parallelism.microbatches=2"),
}


@pytest.mark.parametrize(
    ("network", "plan"),
    [(BERT, "ddp"), *((LLAMA, plan) for plan in PLANS)],
    ids=["bert ddp", *(f"llama {plan}" for plan in PLANS)],
)
def test_a_padded_batch_has_the_loss_of_its_sequences(
    launcher: Launcher, tmp_path: Path, network: str, plan: str
) -> None:
    job = write_job(tmp_path, network)
    made = ready(job)
    one = train(launcher, tmp_path / "one", made.program, made.places)
    assert one.losses()[0] == pytest.approx(alone(made.program, network), abs=1e-5)
    agree(one, train_job(launcher, job, *PLANS[plan]))


def test_what_the_padding_is_made_of_does_not_matter(launcher: Launcher, tmp_path: Path) -> None:
    """Two more columns of padding change no number; without `pad` they do."""
    job = write_job(tmp_path, BERT)
    one = train_job(launcher, job)
    stored = np.load(tmp_path / "padded.npz")
    wider = {name: np.pad(stored[name], ((0, 0), (0, 2)), constant_values=PAD) for name in ("x", "y")}
    np.savez(tmp_path / "padded.npz", x=wider["x"], y=wider["y"])
    agree(one, train_job(launcher, job))
    job.write_text(job.read_text().replace("  pad     = 3\n", ""))
    assert train_job(launcher, job).losses()[0] != pytest.approx(one.losses()[0], abs=1e-3)


def test_a_classifier_of_llama_finds_the_last_token(launcher: Launcher, tmp_path: Path) -> None:
    job = write_job(tmp_path, LLAMA, classes=True)
    made = ready(job)
    one = train(launcher, tmp_path / "one", made.program, made.places)
    model, total = build_model(made.program.model, "cpu"), 0.0
    for row, tokens in enumerate(sequences()[:8]):
        with torch.no_grad():
            scores = librarys(model)(model, input_ids=torch.from_numpy(tokens)[None]).logits
        total += torch.nn.functional.cross_entropy(scores, torch.tensor([row % 2])).item()
    assert one.losses()[0] == pytest.approx(total / 8, abs=1e-5)


def looked_at(job: Path, *settings: str) -> Report:
    loaded, report = load(str(job), list(settings)), Report()
    inspect(loaded, report, trace=True)
    return report


@pytest.mark.slow
def test_a_model_that_would_need_a_mask_is_warned_of(tmp_path: Path) -> None:
    job = write_job(tmp_path, BERT)
    assert [d.code for d in looked_at(job)] == []
    job.write_text(job.read_text().replace("  pad     = 3\n", ""))
    (found,) = looked_at(job)
    assert found.code == "W0612" and "by its configuration that is the token 0" in found.message
    assert found.help is not None and "`pad = 0`" in found.help
    streamed = looked_at(job, "data.source=stdlib(context = 12)", "model.network.vocab_size=256")
    assert [d.code for d in streamed] == [], "a stream has no padding"


def test_a_padding_that_is_no_token_is_refused(tmp_path: Path) -> None:
    (found,) = looked_at(write_job(tmp_path, BERT), "data.pad=64")
    assert found.code == "E0805" and "a vocabulary of 64 does not hold the padding, `data.pad = 64`" in found.message
