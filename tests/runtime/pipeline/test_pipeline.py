"""The pipeline axis: a rank's part of the model, and its stages' outputs. Real processes over gloo."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from helpers import made_programs as made
from helpers.gang import gang
from torch import nn

from dslc.compiler.ir.program import InitStep, JobProgram, ModelStep, PipelineStep, RankPlace, StageStep
from dslc.runtime.checkpoint.weights import load_weights, save_weights
from dslc.runtime.model.meta_model import blank, build_model
from dslc.runtime.model.module_builder import initial_value
from dslc.runtime.model.tensor_names import named_tensors
from dslc.runtime.pipeline.input_form import InputForm
from dslc.runtime.pipeline.pipeline import cut
from dslc.runtime.step.assemble import TrainingComponents, assemble

HIDDEN = ((8, 16), "float32")
# The tied GPT of `made_programs`: embedding, positions, a block, and a head that is the embedding.
LOOP = ((0, 0, ("0", "1")), (1, 1, ("2", "3")))
V = ((0, 0, ("0",)), (1, 1, ("1",)), (2, 1, ("2",)), (3, 0, ("3",)))
ROWS = {
    LOOP: (("0F0", "0F1", "0B0", "0B1"), ("1F0", "1B0", "1F1", "1B1")),
    V: (
        ("0F0", "0F1", "3F0", "3B0", "3F1", "3B1", "0B0", "0B1"),
        ("1F0", "2F0", "1F1", "2F1", "2B0", "1B0", "2B1", "1B1"),
    ),
}


def pipelined(stages: Any, folder: Path, **changed: Any) -> JobProgram:
    last = len(stages) - 1
    step = PipelineStep(
        schedule="made",
        stages=tuple(
            StageStep(
                index=index,
                rank=rank,
                modules=modules,
                inputs=(HIDDEN if index else ((8,), "int64"),),
                outputs=(HIDDEN if index < last else ((8, 32), "float32"),),
            )
            for index, rank, modules in stages
        ),
        rows=ROWS[stages],
    )
    common: dict[str, Any] = {
        "model": made.gpt_model(),
        "gradients": made.program(1, made.tokens(folder)).gradients,
        "sync_batch_norm": False,
        "microbatches": 2,
        "pipeline": step,
        "axes": {"pipeline": 2, "data": 1, "context": 1, "tensor": 1},
    }
    return made.program(2, made.tokens(folder), **(common | changed))


def test_a_rank_keeps_its_own_layers_under_their_own_names(tmp_path: Path) -> None:
    job = pipelined(LOOP, tmp_path)
    whole = list(named_tensors(build_model(job.model, "cpu")))
    assert job.pipeline is not None
    kept = []
    for coordinate in (0, 1):
        part = cut(job, blank(job.model), coordinate, InputForm(job.pipeline.stages[0].inputs))
        assert list(part.whole) == whole
        assert part.shared == {"0.weight": (0, 1)}
        part.made.fill(lambda value, _: value.clone(), "cpu")
        part.name_shared()
        kept.append(named_tensors(part.made.module))
    assert [name for name in whole if name in kept[0]] == ["0.weight", "1.weight"]
    assert sorted(kept[0].keys() | kept[1].keys()) == sorted(whole)
    assert kept[0].keys() & kept[1].keys() == {"0.weight"}  # the head's, by its first name
    assert torch.equal(kept[0]["0.weight"], kept[1]["0.weight"])


def test_what_is_not_here_is_not_drawn(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    drawn: list[str] = []

    def noted(init: InitStep, seed: int) -> torch.Tensor:
        drawn.append(init.parameter)
        return initial_value(init, seed)

    monkeypatch.setattr("dslc.runtime.model.meta_model.initial_value", noted)
    job = pipelined(LOOP, tmp_path)
    assert job.pipeline is not None
    part = cut(job, blank(made.gpt_model()), 0, InputForm(job.pipeline.stages[0].inputs))
    part.made.fill(lambda value, _: value, "cpu")
    assert sorted(drawn) == ["0.weight", "1.weight"]


# ------------------------------------------------------------------------------------------------ several processes


def _parts(job: JobProgram) -> TrainingComponents:
    return assemble(job, torch.device("cpu"))


def _forward(rank: int, job: JobProgram, batches: list[Any]) -> list[Any]:
    axis = _parts(job).pipeline
    assert axis is not None
    with torch.no_grad():
        outputs = [axis.forward(torch.from_numpy(batch)) for batch in batches]
    axis.finish()
    return [None if output is None else output.numpy() for output in outputs]


@pytest.mark.parametrize("stages", [LOOP, V], ids=["loop", "v"])
def test_a_batch_of_any_size_goes_through_the_stages(stages: Any, tmp_path: Path) -> None:
    random = np.random.default_rng(0)
    batches = [random.integers(0, 32, (size, 8)) for size in (3, 1, 5)]
    found = gang(2, _forward, pipelined(stages, tmp_path), batches)
    ends = stages[-1][1]
    assert found[1 - ends] == [None] * 3
    model = build_model(made.gpt_model(), "cpu")
    for batch, output in zip(batches, found[ends], strict=True):
        np.testing.assert_allclose(output, model(torch.from_numpy(batch)).detach().numpy(), atol=1e-6)


def _enter(micro: int) -> None:
    """Nothing draws."""


def _gradients(rank: int, job: JobProgram, place: RankPlace, batch: Any) -> Any:
    """Returns, after one step's passes, the rank's gradients by name, those it owns, and the weights written."""
    from dslc.runtime.pipeline.pipeline import ScheduleRun

    parts = _parts(job)
    axis = parts.pipeline
    assert axis is not None
    samples = len(batch[0]) // job.microbatches
    schedule = ScheduleRun(axis, samples, job.microbatches, lambda output, target: parts.loss(output, target))
    inputs, targets = (torch.from_numpy(each).split(samples) for each in batch)
    tensors = named_tensors(parts.plain)
    for _ in range(2):  # the second is not the first's, added up
        parts.optimizer.zero_grad(set_to_none=True)
        schedule.run(list(zip(inputs, targets, strict=True)), _enter)
        axis.add_up_shared(tensors)
    return {name: (tensor.grad.numpy(), axis.owns(name)) for name, tensor in tensors.items() if tensor.grad is not None}


@pytest.mark.parametrize("stages", [LOOP, V], ids=["loop", "v"])
def test_gradients_are_those_of_the_whole_model(stages: Any, tmp_path: Path) -> None:
    random = np.random.default_rng(1)
    batch = random.integers(0, 32, (6, 8)), random.integers(0, 32, (6, 8))
    job = pipelined(stages, tmp_path)
    found = gang(2, _gradients, job, made.places(2)[0], batch)
    model = build_model(job.model, "cpu")
    nn.functional.cross_entropy(
        model(torch.from_numpy(batch[0])).reshape(-1, 32), torch.from_numpy(batch[1]).reshape(-1), reduction="sum"
    ).backward()
    owned: list[str] = []
    for gradients in found:
        for name, (gradient, owns) in gradients.items():
            wanted = model.get_parameter(name).grad
            assert wanted is not None
            np.testing.assert_allclose(gradient, wanted.numpy(), atol=1e-4, err_msg=name)
            owned += [name] if owns else []
    assert sorted(owned) == sorted(named_tensors(model))  # each is counted once
    if stages == LOOP:  # the same to the bit, so that the two copies never part
        assert np.array_equal(found[0]["0.weight"][0], found[1]["0.weight"][0])


def _write(rank: int, job: JobProgram, folder: str) -> None:
    parts = _parts(job)
    save_weights(parts.plain, folder, writes=rank == 0, pipeline=parts.pipeline)


def test_one_file_holds_the_weights_of_all_stages(tmp_path: Path) -> None:
    job = pipelined(LOOP, tmp_path)
    gang(2, _write, job, str(tmp_path))
    whole = build_model(job.model, "cpu")
    wanted = {name: tensor.detach().clone() for name, tensor in named_tensors(whole).items()}
    for tensor in named_tensors(whole).values():
        tensor.detach().zero_()
    load_weights(whole, str(tmp_path))
    assert all(torch.equal(tensor, wanted[name]) for name, tensor in named_tensors(whole).items())


def _frozen(rank: int, job: JobProgram) -> list[str]:
    return [name for name, tensor in named_tensors(_parts(job).plain).items() if tensor.requires_grad]


def test_a_pattern_for_one_stage_is_no_mistake_on_another(tmp_path: Path) -> None:
    model: ModelStep = dataclasses.replace(made.gpt_model(), frozen=("0.*", "2.mlp.*"))
    trained = gang(2, _frozen, pipelined(LOOP, tmp_path, model=model))
    assert trained[0] == ["1.weight"]
    assert "0.weight" not in trained[1] and "2.mlp.bias" not in trained[1] and "2.attention.qkv.bias" in trained[1]
