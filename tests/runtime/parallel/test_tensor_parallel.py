"""Each rank of a tensor axis holds its share of the model and no more, and the tensors that all ranks have stay
equal.
"""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from helpers.gang import gang
from helpers.made_programs import gpt_model, optimizer_step, places, program, tokens

from dslc.compiler.ir import program as p
from dslc.compiler.ir.tensor_styles import TensorStyle
from dslc.runtime.data.batches import StepBatch
from dslc.runtime.model.initial_weights import own_part
from dslc.runtime.model.meta_model import build_model
from dslc.runtime.model.tensor_names import named_tensors
from dslc.runtime.parallel.tensor_parallel import noise_rank
from dslc.runtime.process import random_numbers
from dslc.runtime.step.assemble import TrainingComponents, assemble
from dslc.runtime.step.stepper import StepResult, stepper

CPU = torch.device("cpu")
ADAMW = optimizer_step("AdamW", lr=0.01, weight_decay=0.1, no_decay=("*.bias", "*norm*"))
PLAIN = (
    ("0", "vocabulary"),
    ("2.attention.qkv", "column"),
    ("2.attention.output", "row"),
    ("2.mlp", "gathered"),
    ("3", "scores"),
)
PIECES = (
    ("2", "split"),
    ("0", "vocabulary"),
    ("2.attention_norm", "sequence"),
    ("2.attention.qkv", "column_of_pieces"),
    ("2.attention.output", "row_to_pieces"),
    ("2.mlp_norm", "sequence"),
    ("2.mlp", "sequence"),
    ("3", "scores_of_pieces"),
)
CUT = ("0.weight", "2.attention.qkv.weight", "2.attention.qkv.bias", "2.attention.output.weight")


def noisy(model: p.ModelStep, rate: float) -> p.ModelStep:
    """With dropout after attention."""

    def changed(step: p.ModuleStep) -> p.ModuleStep:
        children = tuple(changed(child) for child in step.children)
        if step.kind == ".Attention":
            children += (p.ModuleStep(name="dropout", kind="Dropout", arguments={"p": rate}),)
        return dataclasses.replace(step, children=children)

    assert model.root is not None
    return dataclasses.replace(model, root=changed(model.root))


def job_of(folder: str, ranks: int, sequence: bool, rate: float = 0.0, zero: int = 3) -> p.JobProgram:
    """Tensor 2, and `ranks` / 2 data ranks."""
    styles = tuple((name, TensorStyle(style)) for name, style in (PIECES if sequence else PLAIN))
    step = p.TensorParallelStep(size=2, sequence=sequence, styles=styles, loss_parallel=True)
    sharded = p.GradientStep(
        kind="fsdp",
        units=("2",),
        replicas=1 if zero else ranks // 2,
        reshard=zero == 3,
        accumulate=zero <= 1,
    )
    model = noisy(gpt_model(), rate)
    job = program(ranks, tokens(Path(folder)), model=model, optimizer=ADAMW, gradients=sharded, clip=0.1)
    axes = {"pipeline": 1, "data": ranks // 2, "context": 1, "tensor": 2}
    return dataclasses.replace(job, tensor=step, axes=axes)


def made(rank: int, job: p.JobProgram) -> tuple[TrainingComponents, Any]:
    parts = assemble(job, CPU)
    data = {"data": rank // 2, "tensor": rank % 2}
    place = dataclasses.replace(places(job.world_size)[rank], coordinates=data, data_rank=rank // 2)
    place = dataclasses.replace(place, data_ranks=job.world_size // 2)
    random_numbers.begin(job.seed, noise_rank(job, rank))
    return parts, stepper(job, place, parts)


def stepped(rank: int, job: p.JobProgram, work: Any, count: int = 3) -> list[StepResult]:
    found = []
    for number in range(count):
        batch = torch.randint(0, 32, (2, 9), generator=torch.Generator().manual_seed(10 * number + rank // 2))
        found.append(work(StepBatch([(batch[:, :-1], batch[:, 1:])], 2 * (job.world_size // 2), 0)))
    return found


def held(rank: int, folder: str) -> list[Any]:
    """Returns a rank's parts at the start, by name, with their places; and its numbers of optimizer state after a
    step.
    """
    job = job_of(folder, 4, sequence=True)
    parts, work = made(rank, job)
    found = {}
    for name, tensor in named_tensors(parts.plain).items():
        local, part = own_part(tensor)
        found[name] = ([(each.start, each.stop) for each in part], local.numpy().copy())
    stepped(rank, job, work, 1)
    state = sum(
        getattr(value, "_local_tensor", value).numel()
        for slot in parts.optimizer.state.values()
        for name, value in slot.items()
        if name != "step"
    )
    return [found, state]


def test_shares_of_both_axes_make_up_each_initial_value(tmp_path: Path) -> None:
    ranks = gang(4, held, str(tmp_path))
    whole = {name: tensor.detach().numpy() for name, tensor in named_tensors(build_model(gpt_model(), CPU)).items()}
    for name, value in whole.items():
        seen = np.zeros(value.shape, dtype=int)
        for found, _ in ranks:
            part, own = found[name]
            place = tuple(slice(*each) for each in part)
            np.testing.assert_array_equal(own, value[place], err_msg=name)
            seen[place] += 1
        assert (seen == (1 if name in CUT else 2)).all(), name
    numbers = sum(value.size for value in whole.values())
    for _, state in ranks:
        assert state < 0.45 * 2 * numbers


def noise(rank: int, folder: str, sequence: bool) -> list[Any]:
    job = job_of(folder, 2, sequence, rate=0.3, zero=0)
    parts, work = made(rank, job)
    done = stepped(rank, job, work)
    same = [
        own_part(tensor)[0].numpy().copy()
        for name, tensor in named_tensors(parts.plain).items()
        if name not in CUT and (sequence or not name.startswith("2.mlp."))
    ]
    drawn = torch.rand(4).numpy().copy()
    return [
        [float(each.total) for each in done],
        [float(each.norm) for each in done if each.norm is not None],
        same,
        drawn,
    ]


@pytest.mark.parametrize("sequence", [False, True])
def test_what_all_ranks_have_stays_the_same_under_dropout(tmp_path: Path, sequence: bool) -> None:
    one, other = gang(2, noise, str(tmp_path), sequence)
    assert one[0] == other[0] and one[1] == other[1] and len(one[1]) == 3
    for ours, theirs in zip(one[2], other[2], strict=True):
        np.testing.assert_array_equal(ours, theirs)
    assert np.array_equal(one[3], other[3]) != sequence, "on pieces each draws for itself"
