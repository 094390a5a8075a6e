"""Trainings from the folder of a saved model: on every axis as on one rank, whole or in part."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from helpers.job_texts import SENTENCES, model_job
from helpers.launcher import Launcher
from helpers.tiny_llama import save_llama
from helpers.trained import agree, ready, train_job
from safetensors.torch import load_file, save_file

import dslc
from dslc.dsl.diagnostics import Report
from dslc.dsl.meaning.load import load
from dslc.jobs.prepare_run import prepare, write_run_directory
from dslc.main import main

JOB = model_job('transformers("saved")', "weights = WEIGHTS", steps=3)
PLANS = (
    ("parallelism.zero=3", "devices.cpus=2"),
    ("parallelism.pipeline=2", "devices.cpus=2", "parallelism.microbatches=2"),
    ("parallelism.tensor=2", "devices.cpus=2"),
)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a small Llama that `save_pretrained` wrote in several shards, and one in torch's format."""
    made = tmp_path_factory.mktemp("pretrained")
    model = save_llama(made / "saved", max_shard_size="40KB")
    assert len(list((made / "saved").glob("*.safetensors"))) > 1
    (made / "torch").mkdir()
    torch.save(model.state_dict(), made / "torch" / "pytorch_model.bin")
    return made


def job(folder: Path, weights: str) -> Path:
    path = folder / f"job{len(list(folder.glob('*.plt')))}.plt"
    path.write_text(JOB.replace("WEIGHTS", weights))
    return path


def first(folder: Path) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for shard in (folder / "saved").glob("*.safetensors"):
        found |= {name: tensor.numpy() for name, tensor in load_file(shard).items()}
    return found


@pytest.mark.long
def test_a_sharded_folder_on_every_axis(folder: Path, launcher: Launcher) -> None:
    path = job(folder, '"saved"')
    still = train_job(launcher, path, "train.steps=1", "train.optimizer.lr=1e-30")
    for name, value in first(folder).items():
        np.testing.assert_array_equal(still.weights[name], value, err_msg=name)
    one = train_job(launcher, path)
    agree(one, train_job(launcher, job(folder, '"torch"')), losses=0, weights=0)
    for plan in PLANS:
        agree(one, train_job(launcher, path, *plan))


def test_a_part_of_it(folder: Path, launcher: Launcher) -> None:
    """The rest keeps the initial values that the seed gives, on several ranks too, and is named."""
    path = job(folder, 'pretrained("saved", only = ["model.layers.*"])')
    still = ("train.steps=1", "train.optimizer.lr=1e-30")
    for plan in ((), PLANS[0], PLANS[1]):
        found, before = train_job(launcher, path, *still, *plan), first(folder)
        for name, value in found.weights.items():
            if "norm" not in name:  # those begin as ones
                assert np.array_equal(value, before[name]) == ("layers" in name), name
    said = "3 of 21 tensors keep their initial values: model.embed_tokens.weight, lm_head.weight, model.norm.weight"
    assert f"weights: {said.split(': ', maxsplit=1)[0]}: " in found.shown and "tensors of" in found.shown
    log = (found.folder / "logs" / "rank-0.log").read_text()
    assert "are left out: " in log and all(name in log for name in ("model.embed_tokens.weight", "lm_head.weight"))


@pytest.mark.slow
def test_what_does_not_fit_is_found_before_a_rank_starts(folder: Path) -> None:
    path, report = job(folder, '"torch"'), Report()
    assert prepare(load(str(path), ["model.network.num_hidden_layers=3"]), report) is None
    assert [d.code for d in report.errors] == ["E0713"]
    assert any("lacks `model.layers.2." in note.message for note in report.errors[0].notes)
    allowed = job(folder, 'pretrained("torch", allow_missing = ["model.layers.2.*"])')
    assert ready(allowed, "model.network.num_hidden_layers=3").program.model.weights is not None


def test_what_was_trained_is_exported_for_from_pretrained(
    folder: Path, launcher: Launcher, capsys: pytest.CaptureFixture[str]
) -> None:
    """Of the template, on two ranks; a folder that was exported is one to begin from."""
    from transformers import AutoModelForCausalLM

    template = (Path(dslc.__file__).parent / "templates" / "finetune.plt").read_text()
    path, context = folder / "finetune.plt", "data.source.context=16"
    path.write_text(template.replace('"./base"', '"./saved"'))
    found = train_job(launcher, path, context, "train.steps=2", "parallelism.zero=3")
    write_run_directory(ready(path, context), str(found.folder))
    made = folder / "made"
    command = ["export", str(path), "-o", str(made), "--checkpoint", str(found.folder), "--set", context]
    assert main([*command, "--max-shard-size", "40KB"]) == 0, capsys.readouterr().err
    assert len(list(made.glob("*.safetensors"))) > 1
    card = (made / "README.md").read_text()
    assert card.startswith("---\nlibrary_name: transformers\npipeline_tag: text-generation\ntags:\n- dslc\n---\n")
    for part in (
        "weights of `saved`",
        "# --set data.source.context=16",
        "| train | loss | ",
        "\nTopology\n  nodes    1\n",
    ):
        assert part in card, card
    for name, value in AutoModelForCausalLM.from_pretrained(made).state_dict().items():
        np.testing.assert_array_equal(value.numpy(), found.weights[name], err_msg=name)
    assert main(command) == 2 and "made is not an empty folder" in capsys.readouterr().err
    path.write_text(template.replace('"./base"', '"./made"'))
    assert ready(path, context).program.model.weights is not None


def plain(folder: Path, steps: int, batch: int) -> list[float]:
    """Returns the losses of a plain loop of torch that begins from the folder."""
    from transformers import AutoModelForCausalLM

    model, losses = AutoModelForCausalLM.from_pretrained(folder).train(), []
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    space: dict[str, Any] = {}
    exec(SENTENCES, space)
    samples = space["Sentences"]()
    for step in range(steps):
        pairs = [samples[(step * batch + n) % len(samples)] for n in range(batch)]
        tokens, targets = (torch.stack(parts) for parts in zip(*pairs, strict=True))
        loss = torch.nn.functional.cross_entropy(model(tokens).logits.flatten(0, 1), targets.flatten())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


def test_a_job_fine_tunes_as_a_plain_loop_does(folder: Path, launcher: Launcher) -> None:
    (folder / "sentences.py").write_text(SENTENCES)
    path, saving = job(folder, '"saved"'), ("checkpoint.every=2 steps", "train.steps=6")
    text = path.read_text().replace("stdlib(context = 16)", 'python("sentences:Sentences")\n  shuffle = false')
    path.write_text(text.replace("sgd(lr = 0.1, momentum = 0.9)", "adamw(lr = 1e-3)"))
    one = train_job(launcher, path, *saving)
    np.testing.assert_allclose(one.losses(), plain(folder / "saved", 6, 8), rtol=0, atol=1e-5)
    agree(one, train_job(launcher, path, *saving, "devices.cpus=2", "parallelism.zero=2"), weights=0.05 * 1e-3 * 6)
    resumed = train_job(launcher, path, *saving, f'checkpoint.resume="{one.folder}/checkpoints/step-00000004"')
    assert resumed.losses() == one.losses()[4:]


@pytest.mark.slow
@pytest.mark.parametrize("task", ["", ", task = causal_lm"])
def test_a_folder_is_exported_where_the_data_is_the_users(
    folder: Path, task: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """The head follows from `task`, and the data is not needed; else the data is asked."""
    (folder / "sentences.py").write_text(SENTENCES)
    source = "absent" if task else "Sentences"
    path = folder / f"exported{len(task)}.plt"
    path.write_text(
        JOB.replace("WEIGHTS", '"torch"')
        .replace('"saved")', f'"saved"{task})')
        .replace("stdlib(context = 16)", f'python("sentences:{source}")')
    )
    made = folder / f"exported{len(task)}"
    weights = folder / "whole.safetensors"
    save_file(torch.load(folder / "torch" / "pytorch_model.bin"), weights)
    command = ["export", str(path), "--checkpoint", str(weights), "-o", str(made)]
    assert main(command) == 0, capsys.readouterr().err
    assert (made / "config.json").is_file()
