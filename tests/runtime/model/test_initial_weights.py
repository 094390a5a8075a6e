"""Weights from a file: where each tensor goes, and files that do not fit."""

from __future__ import annotations

import argparse
import dataclasses
import os
import pickle
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from helpers.gang import gang
from helpers.launcher import Launcher
from helpers.made_programs import conv_model, gpt_model, images, places, program
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from dslc.compiler.ir import program as p
from dslc.runtime.checkpoint.weights import save_weights
from dslc.runtime.model import initial_weights
from dslc.runtime.model.initial_weights import WeightsError, tensors_of
from dslc.runtime.model.meta_model import build_model
from dslc.runtime.model.tensor_names import named_tensors
from dslc.runtime.process.records import read_metrics


class Runs:
    """Raises when it is unpickled: a weights file of a stranger would run anything there."""

    def __reduce__(self) -> tuple[Any, ...]:
        return os.system, ("exit 1",)


def other(model: p.ModelStep) -> nn.Module:
    """Returns the model with numbers of another seed, in its buffers too."""
    made = build_model(p.ModelStep(root=model.root, inits=model.inits, ties=model.ties, seed=99), "cpu")
    for number, buffer in enumerate(made.buffers()):
        buffer.add_(number + 1)
    return made


def start(model: p.ModelStep, weights: Path) -> p.ModelStep:
    file = weights / "weights.safetensors" if weights.is_dir() else weights
    return dataclasses.replace(model, weights=p.WeightsStep(files=(str(file),), line="made.plt:5:13"))


def loaded(model: p.ModelStep, weights: Path) -> nn.Module:
    step = start(model, weights)
    made = build_model(step, "cpu")
    initial_weights.load(step, made)
    return made


def same(one: nn.Module, two: nn.Module) -> None:
    torch.testing.assert_close(named_tensors(two), named_tensors(one), rtol=0, atol=0)


@pytest.mark.parametrize("model", (conv_model(), gpt_model()), ids=("buffers", "tied"))
def test_a_run_directory_a_file_and_a_torch_file_give_the_same_weights(model: p.ModelStep, tmp_path: Path) -> None:
    made = other(model)
    save_weights(made, str(tmp_path))
    torch.save(made.state_dict(), tmp_path / "weights.pt")  # a tied weight under both its names
    torch.save({"state_dict": made.state_dict(), "epoch": 3}, tmp_path / "checkpoint.pt")
    torch.save(made.state_dict(), tmp_path / "old.pt", _use_new_zipfile_serialization=False)
    for path in ("", "weights.safetensors", "weights.pt", "checkpoint.pt", "old.pt"):
        same(made, loaded(model, tmp_path / path))


def test_numbers_are_converted(tmp_path: Path) -> None:
    made = other(gpt_model())
    file = tmp_path / "half.safetensors"
    save_file({name: tensor.detach().half() for name, tensor in named_tensors(made).items()}, file)
    model = loaded(gpt_model(), file)
    assert {tensor.dtype for tensor in model.parameters()} == {torch.float32}
    same(made.half().float(), model)


def wrong(tensors: dict[str, Tensor]) -> dict[str, dict[str, Tensor]]:
    less = {name: tensor for name, tensor in tensors.items() if not name.startswith("2.mlp.")}
    more = tensors | {"4.weight": torch.zeros(3)}
    shaped = tensors | {"1.weight": torch.zeros(9, 16)}
    differing = tensors | {"3.weight": tensors["0.weight"] + 1}
    return {
        "it lacks `2.mlp.weight`, `2.mlp.bias`": less,
        "it has besides `4.weight`": more,
        "it has unlike tensors: `1.weight` is [9, 16] there and [8, 16] here": shaped,
        "`3.weight` and `0.weight` are one weight in the model, and differ here": differing,
    }


@pytest.mark.parametrize("said", wrong({"0.weight": torch.zeros(1)}))
def test_what_does_not_fit_is_named(said: str, tmp_path: Path) -> None:
    tensors = {name: tensor.detach() for name, tensor in named_tensors(other(gpt_model())).items()}
    file = tmp_path / "weights.safetensors"
    save_file(wrong(tensors)[said], file)
    with pytest.raises(WeightsError, match=f"^made.plt:5:13: .*{re.escape(said)}"):
        loaded(gpt_model(), file)


def test_what_is_no_file_of_weights(tmp_path: Path) -> None:
    (tmp_path / "text.safetensors").write_text("no weights")
    (tmp_path / "text.pt").write_text("no weights")
    torch.save([1, 2], tmp_path / "list.pt")
    for name in ("text.safetensors", "text.pt", "list.pt", "absent.safetensors", "absent.pt"):
        with pytest.raises(WeightsError, match=f"^made.plt:5:13: .*{name} cannot be read as weights: "):
            loaded(gpt_model(), tmp_path / name)


# ------------------------------------------------------------------------------------------------ over processes


def fill_shards(rank: int, folder: str, replicas: int) -> dict[str, Any]:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard
    from torch.distributed.tensor import DTensor

    from dslc.runtime.model.module_builder import skeleton

    step = start(gpt_model(vocab=33), Path(folder))  # 33 rows do not divide
    mesh = init_device_mesh("cpu", (replicas, 4 // replicas), mesh_dim_names=("replicate", "shard"))
    model = skeleton(step)
    for module in (model.get_submodule("2"), model):
        fully_shard(module, mesh=mesh if replicas > 1 else mesh["shard"])
    model.to_empty(device="cpu")
    initial_weights.load(step, model)
    whole = {}
    for name, tensor in model.named_parameters():
        assert isinstance(tensor, DTensor)
        whole[name] = tensor.full_tensor().detach().numpy()
    return whole


@pytest.mark.parametrize("replicas", (1, 2))
def test_each_rank_fills_its_own_rows(replicas: int, tmp_path: Path) -> None:
    save_weights(other(gpt_model(vocab=33)), str(tmp_path))
    expected = load_file(tmp_path / "weights.safetensors")
    for whole in gang(4, fill_shards, str(tmp_path), replicas):
        assert whole.keys() == expected.keys()
        for name, value in whole.items():
            np.testing.assert_array_equal(value, expected[name].numpy())


def test_a_training_goes_on_from_the_weights_of_another(launcher: Launcher, tmp_path: Path) -> None:
    def run(folder: str, ranks: int, model: p.ModelStep, **changed: Any) -> list[float]:
        outcome, _ = launcher.launch(program(ranks, data, model=model, **changed), places(ranks), tmp_path / folder)
        assert outcome.is_complete, outcome
        return [line["loss"] for line in read_metrics(str(tmp_path / folder)) if line["split"] == "train"]

    data = images(tmp_path)
    first = run("first", 1, conv_model())
    one = run("one", 1, start(conv_model(), tmp_path / "first"))
    two = run("two", 2, start(conv_model(), tmp_path / "first"))
    sharded = p.GradientStep(kind="fsdp", units=("4",), reshard=True)
    rows = run("rows", 2, start(conv_model(), tmp_path / "first"), gradients=sharded)
    assert one[0] < first[0] - 0.3
    np.testing.assert_allclose([two, rows], [one, one], rtol=0, atol=1e-5)


STATE = {"0.weight": torch.ones(2, 2), "0.bias": torch.zeros(2)}
OPTIMIZER = {"state": {0: {"exp_avg": torch.ones(2, 2), "step": torch.tensor(1.0)}}, "param_groups": [{"lr": 0.1}]}


@pytest.mark.parametrize(
    "saved",
    [
        {"epoch": 3, "model_state_dict": STATE, "optimizer_state_dict": OPTIMIZER, "loss": 0.5},
        {"net": STATE, "optimizer": OPTIMIZER},
        {"state_dict": {"model": STATE}},
        {"checkpoint": {"training": {"weights": STATE}}, "epoch": 3},
        {"model": STATE, "ema": STATE},
        STATE | {"num_classes": 3},
        {"net": STATE, "best": torch.tensor(0.9), "scaler": {"scale": torch.tensor(4.0)}},
        {
            "weights": STATE,
            "random": {"torch": torch.get_rng_state()},
            "callbacks": {"best": {"score": torch.tensor(1)}},
        },
        {"module": STATE, "param_shapes": [{"0.weight": torch.Size([2, 2])}], "optimizer": None, "ds_version": "0.16"},
        STATE | {"0._extra_state": {"seen": torch.ones(2)}},
    ],
)
def test_the_state_dict_in_a_file_of_a_training_is_found(saved: dict[str, Any], tmp_path: Path) -> None:
    torch.save(saved, tmp_path / "weights.pt")
    found = tensors_of(str(tmp_path / "weights.pt"))
    assert found.keys() == STATE.keys() and all(torch.equal(found[name], STATE[name]) for name in found)


@pytest.mark.parametrize(
    ("content", "said"),
    [
        ("", "it is empty"),
        ("version https://git-lfs.github.com/spec/v1\noid sha256:1\n", "it is a pointer of Git LFS"),
        ("<!DOCTYPE html><html>404</html>", "`torch.save` has not written it: it begins with `<!DOCTYPE html>"),
    ],
)
def test_what_is_no_file_of_torch_is_said(content: str, said: str, tmp_path: Path) -> None:
    (tmp_path / "weights.pt").write_text(content)
    with pytest.raises(ValueError, match=r"^(it|`torch)") as error:
        tensors_of(str(tmp_path / "weights.pt"))
    assert str(error.value).startswith(said)


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_an_archive_of_torchscript_is_refused(tmp_path: Path) -> None:
    torch.jit.save(torch.jit.trace(nn.Linear(2, 2), torch.ones(1, 2)), str(tmp_path / "weights.pt"))
    with pytest.raises(ValueError, match=r"^it is an archive of TorchScript: save the state dict alone"):
        tensors_of(str(tmp_path / "weights.pt"))


@pytest.mark.parametrize(
    ("saved", "said"),
    [
        ({"epoch": 3, "optimizer": OPTIMIZER}, "it holds no state dict: its keys are `epoch`, `optimizer`"),
        ({"generator": STATE, "critic": {"net": STATE}}, "it holds 2 state dicts, `generator`, `critic.net`"),
        ([1, 2], "it holds no state dict: it is a list"),
        ({"args": argparse.Namespace(lr=1), "model_state_dict": STATE}, "it holds an object of `argparse.Namespace`"),
        (nn.Linear(2, 2), "it holds an object of `torch.nn.modules.linear.Linear`"),
        ({"state_dict": Runs()}, "it holds an object of `posix.system`, which may run code"),
    ],
)
def test_what_a_file_without_a_state_dict_holds_is_said(saved: Any, said: str, tmp_path: Path) -> None:
    torch.save(saved, tmp_path / "weights.pt")
    with pytest.raises(ValueError, match=r"^it ") as error:
        tensors_of(str(tmp_path / "weights.pt"))
    assert str(error.value).startswith(said) and "\x1b" not in str(error.value)


@pytest.mark.parametrize("protocol", [0, 2, 4])
@pytest.mark.parametrize("content", [Runs(), {"weight": Runs()}, {"args": argparse.Namespace()}, [[]] * 9])
def test_a_pickle_is_not_run_and_no_message_advises_it(content: Any, protocol: int, tmp_path: Path) -> None:
    """In a file that `torch.save` did not write, and in one of its old format."""
    (tmp_path / "raw.bin").write_bytes(pickle.dumps(content, protocol=protocol))
    torch.save(content, tmp_path / "old.bin", pickle_protocol=protocol, _use_new_zipfile_serialization=False)
    for name in ("raw.bin", "old.bin"):
        with pytest.raises(Exception) as error:  # noqa: PT011 - torch has many
            tensors_of(str(tmp_path / name))
        assert "weights_only" not in str(error.value) and "trusted" not in str(error.value)
