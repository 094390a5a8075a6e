"""Offloading to the host's memory changes no number; here the host is the device, with the same code."""

from __future__ import annotations

import contextlib
import dataclasses
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from helpers.gang import gang
from helpers.launcher import Launcher
from helpers.made_programs import gpt_model, images, places, program, tokens
from helpers.trained import agree, train
from torch import Tensor, nn

from dslc.compiler.ir import program as p
from dslc.runtime.technique import offload

CPU = torch.device("cpu")


def asked(folder: Path, *what: str) -> p.JobProgram:
    return dataclasses.replace(program(1, images(folder)), offload=what)


def test_activations_move_and_parameters_stay(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    moved: list[Tensor] = []
    plain = offload._moved

    def noted(tensor: Tensor, pin_memory: bool) -> offload._HostCopy:
        moved.append(tensor)
        return plain(tensor, pin_memory)

    monkeypatch.setattr(offload, "_moved", noted)
    model = nn.Sequential(nn.Linear(4, 4), nn.LayerNorm(4), nn.Linear(4, 3, bias=False))
    input = torch.randn(5, 4)
    with offload.activations(asked(tmp_path, "activations"), CPU)():
        model(input).sum().backward()
    gradients = [parameter.grad for parameter in model.parameters()]
    # The inputs of the three modules, and mean and deviation of each row.
    assert sorted(tuple(tensor.shape) for tensor in moved) == [(5, 1), (5, 1), (5, 4), (5, 4), (5, 4)]
    model.zero_grad()
    model(input).sum().backward()
    assert all(torch.equal(one, two.grad) for one, two in zip(gradients, model.parameters(), strict=True))  # type: ignore[arg-type]


def test_what_comes_back_lies_in_memory_as_before() -> None:
    """Strides are kept, as compiled backward passes rely on them."""
    whole = torch.randn(2, 3, 4, 6)
    for tensor in (
        whole,
        whole.permute(3, 0, 2, 1),
        whole.to(memory_format=torch.channels_last),
        whole[:, :, 1::2, :3],  # with gaps
        whole[0].expand(5, 3, 4, 6),  # the same numbers five times
        whole[:, :1].permute(2, 1, 3, 0).expand(4, 7, 6, 2),
        whole.sum(),
        whole[:0],
    ):
        back = offload._back(offload._moved(tensor, pin_memory=False))
        assert torch.equal(back, tensor) and back.stride() == tensor.stride()
    assert offload._moved(whole[0].expand(5, 3, 4, 6), pin_memory=False).numbers.numel() == 72


def _moved_share(rank: int) -> list[float]:
    """Returns the error of gradients if the saved tensors of a tensor axis are moved."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

    torch.manual_seed(0)
    mesh, model = init_device_mesh("cpu", (2,)), nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, 4))
    parallelize_module(model, mesh, {"0": ColwiseParallel(use_local_output=False), "2": RowwiseParallel()})
    input, found = torch.randn(5, 4, requires_grad=True), []
    for around in (contextlib.nullcontext(), offload._Activations(pin_memory=False)):
        with around:
            output = model(input)
        gradients: Any = torch.autograd.grad(output.sum(), [input, *model.parameters()])
        found.append([getattr(each, "_local_tensor", each) for each in gradients])
    return [float((one - other).abs().max()) for one, other in zip(*found, strict=True)]


def test_a_share_of_a_tensor_moves() -> None:
    assert gang(2, _moved_share) == [[0.0] * 5] * 2


def test_what_torch_is_told(tmp_path: Path) -> None:
    from torch.distributed.fsdp import CPUOffloadPolicy

    both = asked(tmp_path, "optimizer", "parameters")
    cuda = torch.device("cuda", 0)
    assert offload.policy(both, CPU) == CPUOffloadPolicy(pin_memory=False)
    assert offload.policy(both, cuda) == CPUOffloadPolicy(pin_memory=True)
    assert offload.home(both, cuda) == CPU and not offload.moves_optimizer(both)
    alone = asked(tmp_path, "optimizer")
    assert offload.home(alone, cuda) == cuda and offload.moves_optimizer(alone)
    assert not isinstance(offload.policy(alone, cuda), CPUOffloadPolicy)


def test_a_machine_without_torchao_is_told_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "torchao.optim", None)
    with pytest.raises(offload.OffloadError, match="needs torchao"):
        offload.optimizer(torch.optim.AdamW, [{"params": [nn.Parameter(torch.zeros(2))]}], {})


def test_a_training_on_two_ranks_with_everything_moved(launcher: Launcher, tmp_path: Path) -> None:
    data = tokens(tmp_path)
    common: dict[str, Any] = {"model": gpt_model(), "microbatches": 2, "clip": 0.5}
    sharded = p.GradientStep(kind="fsdp", units=("2",), reshard=True)
    everything = ("optimizer", "parameters", "activations")
    late = dataclasses.replace(sharded, accumulate=True)
    runs: tuple[tuple[str, int, dict[str, Any]], ...] = (
        ("plain", 1, {}),
        ("moved", 2, {"gradients": sharded, "offload": everything}),
        ("moved, summed at last", 2, {"gradients": late, "offload": everything}),
    )
    plain, *moved = (
        train(launcher, tmp_path / name, program(ranks, data, **common, **changed), places(ranks))
        for name, ranks, changed in runs
    )
    for other in moved:
        agree(plain, other)
