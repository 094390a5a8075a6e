"""Trainings of adapters: as a plain loop with `peft`, on every axis as on one rank, and what is exported of them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from helpers.job_texts import SENTENCES, job_text
from helpers.launcher import Launcher
from helpers.measured_memory import measure
from helpers.tiny_llama import begin_adapters, save_llama
from helpers.trained import Trained, agree, train_job
from safetensors.torch import load_file, load_model

from dslc.dsl.diagnostics import Report
from dslc.dsl.meaning.load import load
from dslc.jobs.prepare_run import prepare
from dslc.main import main

JOB = job_text(
    model={
        "network": 'transformers("saved")',
        "weights": '"saved"',
        "adapter": 'lora(4, ["q_proj", "o_proj", "*.0.mlp.*_proj"], alpha = 8, save = "lm_head")',
    },
    data={"source": 'python("sentences:Sentences")', "batch": 8, "shuffle": "false"},
    train={"steps": 4, "optimizer": "adamw(lr = 1e-2)"},
    checkpoint={"every": "2 steps"},
)
TWO, FOUR = "devices.cpus=2", "devices.cpus=4"
PLANS = {
    "zero 0": (TWO,),
    "zero 1": (TWO, "parallelism.zero=1"),
    "zero 2": (TWO, "parallelism.zero=2", "parallelism.microbatches=2"),
    "zero 3": (TWO, "parallelism.zero=3"),
    "pipeline": (TWO, "parallelism.pipeline=2", "parallelism.microbatches=2"),
    "tensor": (TWO, "parallelism.tensor=2"),
    "all": (FOUR, "parallelism.tensor=2", "parallelism.sequence=true", "parallelism.zero=3"),
}
QUICK = ("pipeline", "all")  # which the shortest tests try
ADAM = 0.05 * 1e-2 * 4  # the tolerance of parameters after 4 steps of Adam at this rate


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    made = tmp_path_factory.mktemp("adapters")
    save_llama(made / "saved")
    (made / "sentences.py").write_text(SENTENCES)
    return made


def job(folder: Path, text: str = JOB) -> Path:
    path = folder / f"job{len(list(folder.glob('*.plt')))}.plt"
    path.write_text(text)
    return path


def train_plainly(model: Any, steps: int, batch: int) -> list[float]:
    """Trains what of a model trains in a plain loop, and returns the losses."""
    model.train()
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    optimizer = torch.optim.AdamW(trained, lr=1e-2)
    space: dict[str, Any] = {}
    exec(SENTENCES, space)
    samples, losses = space["Sentences"](), []
    for step in range(steps):
        pairs = [samples[(step * batch + n) % len(samples)] for n in range(batch)]
        tokens, targets = (torch.stack(parts) for parts in zip(*pairs, strict=True))
        loss = torch.nn.functional.cross_entropy(model(tokens).logits.flatten(0, 1), targets.flatten())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


def plain(folder: Path, steps: int, batch: int) -> tuple[list[float], Any]:
    """Returns the losses of a plain loop with peft, and its model."""
    from peft import LoraConfig, get_peft_model
    from transformers import AutoModelForCausalLM

    base = AutoModelForCausalLM.from_pretrained(folder / "saved")
    layers = r".*\.(q_proj|o_proj)|model\.layers\.0\.mlp\..*_proj"
    model = get_peft_model(base, LoraConfig(r=4, lora_alpha=8, target_modules=layers, modules_to_save=["lm_head"]))
    begin_adapters(model)
    return train_plainly(model, steps, batch), model


@pytest.fixture(scope="module")
def alone(folder: Path, launcher: Launcher) -> Trained:
    """The training on one rank."""
    return train_job(launcher, job(folder))


def test_a_job_trains_as_a_plain_loop_with_peft(folder: Path, launcher: Launcher, alone: Trained) -> None:
    losses, model = plain(folder, 4, 8)
    np.testing.assert_allclose(alone.losses(), losses, rtol=0, atol=1e-5)
    trained = {name: parameter for name, parameter in model.named_parameters() if parameter.requires_grad}
    assert len(trained) == 2 * (2 * 2 + 3) + 1
    for name, parameter in trained.items():
        own = name.removeprefix("base_model.model.").replace(".modules_to_save.default", "")
        np.testing.assert_allclose(alone.weights[own], parameter.detach().numpy(), rtol=0, atol=ADAM, err_msg=name)
    resumed = train_job(launcher, job(folder), f'checkpoint.resume="{alone.folder}/checkpoints/step-00000002"')
    assert resumed.losses() == alone.losses()[2:]


@pytest.mark.core
def test_it_is_exported_merged_and_alone(folder: Path, alone: Trained, capsys: pytest.CaptureFixture[str]) -> None:
    """The merged weights are those of peft's own merge, bit for bit."""
    from peft import PeftModel
    from transformers import AutoModelForCausalLM

    newest = str(alone.folder / "checkpoints" / "step-00000004")
    command = ["export", str(job(folder)), "--checkpoint", newest, "-o"]
    for output in (["merged"], ["adapter", "--adapter"]):
        assert main([*command, str(folder / output[0]), *output[1:]]) == 0, capsys.readouterr().err
    base = AutoModelForCausalLM.from_pretrained(folder / "saved")
    theirs = PeftModel.from_pretrained(base, folder / "adapter").merge_and_unload().eval()
    merged = AutoModelForCausalLM.from_pretrained(folder / "merged").eval()
    tokens = torch.randint(0, 256, (2, 16))
    assert torch.equal(merged(tokens).logits, theirs(tokens).logits)
    wanted, found = theirs.state_dict(), load_file(folder / "merged" / "model.safetensors")
    assert found.keys() == wanted.keys() and all(torch.equal(found[name], wanted[name]) for name in wanted)
    assert not torch.equal(
        wanted["lm_head.weight"], load_file(folder / "saved" / "model.safetensors")["lm_head.weight"]
    )
    assert main([*command, str(folder / "a.pt"), "--adapter"]) == 2 and "into a folder" in capsys.readouterr().err


@pytest.mark.long
def test_a_tied_head_is_saved_under_both_names(
    folder: Path, launcher: Launcher, capsys: pytest.CaptureFixture[str]
) -> None:
    """peft makes a copy of each module to save, so the file has the tied weight twice; its model gives our outputs."""
    from peft import PeftModel
    from transformers import AutoConfig, AutoModelForCausalLM

    config = AutoConfig.from_pretrained(folder / "saved", tie_word_embeddings=True)
    torch.manual_seed(0)
    AutoModelForCausalLM.from_config(config).save_pretrained(folder / "tied")
    text = JOB.replace('"saved"', '"tied"').replace('save = "lm_head"', 'save = ["lm_head", "embed_tokens"]')
    assert "tied" in text and "embed_tokens" in text
    path = job(folder, text)
    trained = train_job(launcher, path, "checkpoint.every=4 steps")
    newest = str(trained.folder / "checkpoints" / "step-00000004")
    for output in ("tied.safetensors", "tied_adapter"):
        more = () if "." in output else ("--adapter",)
        assert main(["export", str(path), "--checkpoint", newest, "-o", str(folder / output), *more]) == 0
    assert "`lm_head.weight` is `model.embed_tokens.weight`" in capsys.readouterr().out
    base = AutoModelForCausalLM.from_pretrained(folder / "tied")
    adapted = PeftModel.from_pretrained(base, folder / "tied_adapter").eval()
    merged = AutoModelForCausalLM.from_config(config)
    before = merged.lm_head.weight.detach().clone()
    load_model(merged, folder / "tied.safetensors")
    assert not torch.equal(merged.lm_head.weight, before)
    tokens = torch.randint(0, 256, (2, 16))
    ours, theirs = merged.eval()(tokens).logits, adapted(tokens).logits
    assert torch.allclose(ours, theirs, rtol=0, atol=1e-5)


@pytest.mark.core
@pytest.mark.parametrize(
    "plan", [pytest.param(plan, marks=() if plan in QUICK else pytest.mark.long) for plan in PLANS]
)
def test_each_plan_as_one_rank(folder: Path, launcher: Launcher, alone: Trained, plan: str) -> None:
    other = train_job(launcher, job(folder), *PLANS[plan])
    agree(alone, other, weights=ADAM)
    held = [name for name in alone.weights if "base_layer" in name or "norm" in name or "embed" in name]
    assert held
    for name in held:
        np.testing.assert_array_equal(alone.weights[name], other.weights[name], err_msg=name)


OWN = """
import torch
from torch import nn
from transformers import GPT2Config, GPT2LMHeadModel


SIZES = {"n_layer": 1, "n_embd": 16, "n_head": 2, "vocab_size": 256, "n_positions": 16}
SIZES |= dict.fromkeys(("resid_pdrop", "embd_pdrop", "attn_pdrop"), 0.0)


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.inner = GPT2LMHeadModel(GPT2Config(**SIZES))
        self.head = nn.Linear(256, 256)

    def forward(self, tokens):
        return self.head(self.inner(tokens).logits)
"""


def own_job(folder: Path, adapter: str) -> Path:
    (folder / "nets.py").write_text(OWN)
    text = JOB.replace('transformers("saved")', 'python("nets:Net")').replace('  weights = "saved"\n', "")
    before, _, after = text.partition("  adapter = ")
    return job(folder, f"{before}  adapter = {adapter}\n{after.partition(chr(10))[2]}")


@pytest.mark.core
def test_a_network_of_ones_own_with_layers_that_lie_transposed(folder: Path, launcher: Launcher) -> None:
    """GPT-2's square `c_proj` keeps its weight the other way round, which its shape does not tell."""
    path = own_job(folder, 'lora(2, ["*.attn.c_*", "head"], rslora = true)')
    trained = train_job(launcher, path, "train.steps=2")
    assert main(["export", str(path), "--checkpoint", str(trained.folder), "-o", str(folder / "own.safetensors")]) == 0
    merged = load_file(folder / "own.safetensors")
    for name, transposed in (("inner.transformer.h.0.attn.c_proj", True), ("head", False)):
        first, second = (torch.from_numpy(trained.weights[f"{name}.lora_{part}.default.weight"]) for part in "AB")
        change = second @ first * (8 / 2**0.5)
        base = torch.from_numpy(trained.weights[f"{name}.base_layer.weight"])
        assert torch.equal(merged[f"{name}.weight"], base + (change.T if transposed else change)), name


@pytest.mark.slow
@pytest.mark.parametrize("plan", [(), pytest.param((TWO, "parallelism.zero=2"), marks=pytest.mark.long)], ids=str)
def test_the_account_has_gradients_and_states_of_what_trains_alone(folder: Path, plan: tuple[str, ...]) -> None:
    text = JOB.replace('"saved"', f'"{folder}/saved"').replace('"sentences:', f'"{folder}/sentences:')
    for setting in plan:
        block, value = setting.split("=")
        text += f"{block.replace('.', ' { ')} = {value} }}\n"
    found = measure(text)
    for kind in ("parameters", "gradients", "optimizer", "buffers"):
        assert found.at_rest[kind] == pytest.approx(getattr(found.predicted, kind), rel=0.001), kind
    assert abs(found.error) <= 0.2, (found.error, found.predicted, found.at_peak)


@pytest.mark.slow
def test_what_would_keep_random_numbers_is_found(folder: Path) -> None:
    report = Report()
    text = JOB.replace('weights = "saved"', 'weights = pretrained("saved", only = ["model.layers.*"])')
    assert prepare(load(str(job(folder, text.replace(', save = "lm_head"', ""))), []), report) is None
    (found,) = report.errors
    assert found.code == "E0729" and "`model.embed_tokens.weight`" in found.message
