"""Adapters beside stacks of experts: as a plain loop with `peft`, on every axis as on one rank, and their export."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from helpers.job_texts import SENTENCES, job_text
from helpers.launcher import Launcher
from helpers.measured_memory import measure
from helpers.tiny_llama import begin_adapters, save_mixtral
from helpers.trained import Trained, agree, exchanges_as_planned, train_job
from safetensors.torch import load_file
from test_adapters import ADAM, job, train_plainly

from dslc.main import main

pytest.importorskip("peft")

STACKS = ("experts.gate_up_proj", "experts.down_proj")
JOB = job_text(
    model={
        "network": 'transformers("saved")',
        "weights": '"saved"',
        "adapter": 'lora(4, ["q_proj", "experts.gate_up_proj", "experts.down_proj"], alpha = 8)',
    },
    data={"source": 'python("sentences:Sentences")', "batch": 8, "shuffle": "false"},
    train={"steps": 4, "optimizer": "adamw(lr = 1e-2)"},
    checkpoint={"every": "2 steps"},
)
# The same network of dslc's own layers, with an adapter also beside a dense layer that the tensor axis cuts by columns.
NETWORK = (
    "llama(layers = 2, width = 32, heads = 4, kv_heads = 2, context = 16, vocab = 256, norm_eps = 1e-5, "
    "rope_theta = 1e6, experts = moe(experts = 4, top_k = 2, hidden = 48))"
)
OWN = JOB.replace('transformers("saved")', NETWORK)
OWN_DENSE = OWN.replace('"experts.gate_up_proj", "experts.down_proj"', '"o_proj", "lm_head"')
ALONE = JOB.replace('["q_proj", "experts.gate_up_proj", "experts.down_proj"]', '"experts.gate_up_proj"')
TWO, FOUR = ("devices.cpus=2",), ("devices.cpus=4",)
AXIS = ("parallelism.expert=2",)
TENSOR = ("parallelism.tensor=2",)
PIECES = (*TENSOR, "parallelism.sequence=true")
PLANS = {
    "expert, zero 3": (*TWO, *AXIS, "parallelism.zero=3"),
    "expert": (*TWO, *AXIS),
    "zero 1": (*TWO, "parallelism.zero=1"),
    "zero 2": (*TWO, "parallelism.zero=2", "parallelism.microbatches=2"),
    "zero 3": (*TWO, "parallelism.zero=3"),
    "expert, zero 1": (*FOUR, *AXIS, "parallelism.zero=1"),
    "expert, zero 2": (*FOUR, *AXIS, "parallelism.zero=2", "parallelism.microbatches=2", "memory.recompute=full"),
    "expert, pipeline": (*FOUR, *AXIS, "parallelism.pipeline=2", "parallelism.microbatches=2"),
}


OWN_PLANS = {
    **PLANS,
    "dense, in pieces, zero 3": (*FOUR, *PIECES, "parallelism.zero=3"),
    "dense, whole": (*TWO, *TENSOR),
    "tensor": (*TWO, *PIECES),
    "tensor, whole, micro-batches": (*TWO, *TENSOR, "parallelism.microbatches=2"),
    "tensor, zero 1": (*FOUR, *PIECES, "parallelism.zero=1"),
    "tensor, zero 2": (*FOUR, *PIECES, "parallelism.zero=2", "parallelism.microbatches=2", "memory.recompute=full"),
    "tensor, zero 3": (*FOUR, *PIECES, "parallelism.zero=3"),
    "tensor, pipeline": (*FOUR, *PIECES, "parallelism.pipeline=2", "parallelism.microbatches=2"),
    "expert, tensor": (*FOUR, *AXIS, *PIECES),
    "expert, tensor, zero 3": (*FOUR, *AXIS, *TENSOR, "parallelism.zero=3"),
    "bf16": (*TWO, *AXIS, "train.precision=bf16"),
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("expert_adapters")
    save_mixtral(folder / "saved")
    (folder / "sentences.py").write_text(SENTENCES)
    return folder


def train_with_peft(folder: Path, modules: list[str], parameters: Iterable[str]) -> tuple[list[float], Any]:
    """Returns the losses of a plain loop with peft over 4 batches of 8, and its model."""
    from peft import LoraConfig, get_peft_model
    from transformers import AutoModelForCausalLM

    base = AutoModelForCausalLM.from_pretrained(folder / "saved")
    stacks = [f"mlp.{name}" for name in parameters]
    model = get_peft_model(base, LoraConfig(r=4, lora_alpha=8, target_modules=modules, target_parameters=stacks))
    begin_adapters(model)
    return train_plainly(model, 4, 8), model


@pytest.fixture(scope="module")
def one_rank(folder: Path, launcher: Launcher) -> Trained:
    return train_job(launcher, job(folder, JOB))


def compare_with_peft(trained: Trained, losses: list[float], model: Any) -> None:
    np.testing.assert_allclose(trained.losses(), losses, rtol=0, atol=1e-5)
    parameters = {name: parameter for name, parameter in model.named_parameters() if parameter.requires_grad}
    for name, parameter in parameters.items():
        own = trained.weights[name.removeprefix("base_model.model.")]
        np.testing.assert_allclose(own, parameter.detach().numpy(), rtol=0, atol=ADAM, err_msg=name)


def test_a_job_trains_as_a_plain_loop_with_peft(folder: Path, launcher: Launcher, one_rank: Trained) -> None:
    losses, model = train_with_peft(folder, ["q_proj"], STACKS)
    assert sum(parameter.requires_grad for parameter in model.parameters()) == 2 * 2 * (1 + 2)
    compare_with_peft(one_rank, losses, model)
    resumed = train_job(
        launcher, job(folder, JOB), f'checkpoint.resume="{one_rank.folder}/checkpoints/step-00000002"', *PLANS["expert"]
    )
    np.testing.assert_allclose(resumed.losses(), one_rank.losses()[2:], rtol=0, atol=1e-5)


@pytest.mark.long
def test_one_stack_alone_trains_as_a_plain_loop_does(folder: Path, launcher: Launcher) -> None:
    """peft puts one wrapper around the experts, so that names differ from those of two stacks."""
    compare_with_peft(train_job(launcher, job(folder, ALONE)), *train_with_peft(folder, [], STACKS[:1]))


@pytest.mark.slow
@pytest.mark.parametrize("name", [*PLANS])
def test_every_plan_trains_as_one_rank_does(launcher: Launcher, folder: Path, one_rank: Trained, name: str) -> None:
    agree(one_rank, train_job(launcher, job(folder, JOB), *PLANS[name]), weights=ADAM)


@pytest.mark.slow
def test_what_is_exchanged_is_planned(launcher: Launcher, folder: Path, tmp_path: Path) -> None:
    """Each token goes to all experts, so that the routing is even."""
    even = job(folder, JOB.replace('"saved")', '"saved", num_experts_per_tok = 4)', 1))
    exchanges_as_planned(launcher, tmp_path, even, *PLANS["expert, zero 3"], "train.steps=6")


@pytest.mark.slow
@pytest.mark.parametrize("text", [JOB, ALONE], ids=["both", "one"])
def test_it_is_exported_merged_and_alone(
    folder: Path, launcher: Launcher, text: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The merged weights are those of peft's own merge, bit for bit."""
    from peft import PeftModel
    from transformers import AutoModelForCausalLM

    path = job(folder, text)
    newest = train_job(launcher, path).folder / "checkpoints" / "step-00000004"
    command = ["export", str(path), "--checkpoint", str(newest), "-o"]
    for output in (["merged"], ["adapter", "--adapter"], ["merged.safetensors"]):
        assert main([*command, str(tmp_path / output[0]), *output[1:]]) == 0, capsys.readouterr().err
    base = AutoModelForCausalLM.from_pretrained(folder / "saved")
    theirs = PeftModel.from_pretrained(base, tmp_path / "adapter").merge_and_unload().eval()
    merged = AutoModelForCausalLM.from_pretrained(tmp_path / "merged").eval()
    tokens = torch.randint(0, 256, (2, 16))
    assert torch.equal(merged(tokens).logits, theirs(tokens).logits)
    wanted, exported = theirs.state_dict(), load_file(tmp_path / "merged.safetensors")
    assert exported.keys() == wanted.keys() and all(torch.equal(exported[name], wanted[name]) for name in wanted)
    first = "model.layers.0.mlp.experts.gate_up_proj"
    assert not torch.equal(wanted[first], AutoModelForCausalLM.from_pretrained(folder / "saved").state_dict()[first])


# ------------------------------------------------------------------------------------------------ dslc's own layers


@pytest.mark.core
def test_own_layers_train_as_those_of_the_library(folder: Path, launcher: Launcher, one_rank: Trained) -> None:
    """Names and first numbers are the same too, so that each resumes the other's training."""
    own = train_job(launcher, job(folder, OWN), *PLANS["expert, zero 3"])
    np.testing.assert_allclose(own.losses(), one_rank.losses(), rtol=0, atol=1e-5)
    assert own.weights.keys() == one_rank.weights.keys()
    for name, value in one_rank.weights.items():
        np.testing.assert_allclose(own.weights[name], value, rtol=0, atol=ADAM, err_msg=name)


@pytest.fixture(scope="module")
def own_ranks(folder: Path, launcher: Launcher) -> dict[str, Trained]:
    return {text: train_job(launcher, job(folder, text)) for text in (OWN, OWN_DENSE)}


@pytest.mark.slow
@pytest.mark.parametrize("name", [*OWN_PLANS])
def test_every_plan_of_own_layers_trains_as_one_rank_does(
    launcher: Launcher, folder: Path, own_ranks: dict[str, Trained], name: str
) -> None:
    text = OWN_DENSE if "dense" in name else OWN
    trained = train_job(launcher, job(folder, text), *OWN_PLANS[name])
    if name == "bf16":
        np.testing.assert_allclose(trained.losses(), own_ranks[text].losses(), rtol=0, atol=3e-2)
    else:
        agree(own_ranks[text], trained, weights=ADAM)


@pytest.mark.slow
def test_own_layers_are_exported_as_those_of_the_library(
    folder: Path, own_ranks: dict[str, Trained], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """peft puts the adapter onto the library's network, and merges it to the same bits."""
    from peft import PeftModel
    from transformers import AutoModelForCausalLM

    newest = own_ranks[OWN].folder / "checkpoints" / "step-00000004"
    command = ["export", str(job(folder, OWN)), "--checkpoint", str(newest), "-o"]
    for output in (["adapter", "--adapter"], ["merged.safetensors"]):
        assert main([*command, str(tmp_path / output[0]), *output[1:]]) == 0, capsys.readouterr().err
    base = AutoModelForCausalLM.from_pretrained(folder / "saved")
    wanted = PeftModel.from_pretrained(base, tmp_path / "adapter").merge_and_unload().state_dict()
    exported = load_file(tmp_path / "merged.safetensors")
    assert exported.keys() == wanted.keys() and all(torch.equal(exported[name], wanted[name]) for name in wanted)


@pytest.mark.slow
def test_a_training_over_a_tensor_axis_resumes_on_other_ranks_and_is_exported(
    launcher: Launcher, folder: Path, own_ranks: dict[str, Trained], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path, one = job(folder, OWN), own_ranks[OWN]
    cut = train_job(launcher, path, *OWN_PLANS["expert, tensor"])
    half = f'checkpoint.resume="{cut.folder}/checkpoints/step-00000002"'
    np.testing.assert_allclose(train_job(launcher, path, half).losses(), one.losses()[2:], rtol=0, atol=1e-5)
    half = f'checkpoint.resume="{one.folder}/checkpoints/step-00000002"'
    resumed = train_job(launcher, path, half, *OWN_PLANS["tensor"])
    np.testing.assert_allclose(resumed.losses(), one.losses()[2:], rtol=0, atol=1e-5)
    for output in ("merged.safetensors", "adapter"):
        files = []
        for name, trained in (("one", one), ("cut", cut)):
            newest = trained.folder / "checkpoints" / "step-00000004"
            command = ["export", str(path), "--checkpoint", str(newest), "-o", str(tmp_path / f"{name}_{output}")]
            assert main([*command, *(["--adapter"] if output == "adapter" else [])]) == 0, capsys.readouterr().err
            files.append(tmp_path / f"{name}_{output}" / ("adapter_model.safetensors" if output == "adapter" else ""))
        wanted, exported = map(load_file, files)
        assert exported.keys() == wanted.keys()
        for name, tensor in wanted.items():
            np.testing.assert_allclose(exported[name], tensor, rtol=0, atol=ADAM, err_msg=name)


@pytest.mark.slow
@pytest.mark.parametrize("plan", ["expert, zero 3", "expert, tensor"])
def test_exchanges_and_memory_of_own_layers_are_planned(
    launcher: Launcher, folder: Path, tmp_path: Path, plan: str
) -> None:
    """Each token goes to all experts, so that the routing is even."""
    even = job(folder, OWN.replace("top_k = 2", "top_k = 4"))
    exchanges_as_planned(launcher, tmp_path, even, *OWN_PLANS[plan], "train.steps=6")
    sources = {'"saved"': f'"{folder}/saved"', '"sentences:': f'"{folder}/sentences:'}
    text = OWN
    for old, new in sources.items():
        text = text.replace(old, new)
    assert abs(measure(text).error) <= 0.02
