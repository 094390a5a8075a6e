"""The tasks of the ranks besides training: evaluate a checkpoint, or write its model's predictions.

Model: the parts are a training's, with the weights of a checkpoint (`mode.use`) instead of initial values. For a
prediction the samples are put into the order of the source and split over the ranks, one contiguous piece each. A rank
writes its outputs batch by batch into a file of its own; the launcher joins these (predictions.py).

Contract: rank 0 leaves `evaluation.json`. Every sample is used once. No rank holds the outputs of more than one batch.

Limits: only a second Ctrl-C ends a task. A prediction fetches its samples in line, whatever `data.workers` says.
"""

from __future__ import annotations

import dataclasses
import json
import os
from collections.abc import Iterator
from itertools import accumulate

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from dslc.compiler.facts.untrusted_files import naming
from dslc.compiler.ir.program import DataStep, EvaluateMode, JobProgram, PredictMode, RankPlace, WeightsStep
from dslc.compiler.trace.structures import map_tensors
from dslc.compiler.trace.structures import named as named_tensors
from dslc.runtime.checkpoint import files as checkpoint_files
from dslc.runtime.checkpoint.state import load_model
from dslc.runtime.data.sampler import share_of
from dslc.runtime.data.samples import Samples, Splits, batch_aside, concatenate_samples
from dslc.runtime.data.splits import evaluated, for_test, held_out
from dslc.runtime.loop.evaluate import batch_size, evaluate, evaluating, forward, most_batches, named
from dslc.runtime.loop.predictions import PredictionPart
from dslc.runtime.model import initial_weights
from dslc.runtime.parallel import context_parallel
from dslc.runtime.parallel.mesh import mesh_of
from dslc.runtime.step.assemble import TrainingComponents

EVALUATION = "evaluation.json"


class OutputError(RuntimeError):
    """The outputs of a model do not make one array of real numbers."""


def work_off(job: JobProgram, place: RankPlace, parts: TrainingComponents, splits: Splits, run_dir: str) -> None:
    """Evaluates or predicts, by the mode of the job. Raises CheckpointError and WeightsError for the weights."""
    mode = job.mode
    assert isinstance(mode, EvaluateMode | PredictMode)
    if os.path.isdir(mode.use):
        load_model(mode.use, checkpoint_files.read_manifest(mode.use), parts.plain, parts.pipeline, raw=mode.raw)
    else:
        unsharded = parts.pipeline.whole if parts.pipeline is not None else None
        weights = WeightsStep(files=(mode.use,))
        # The file of a run has all tensors under the model's own names, those of adapters too.
        initial_weights.load(dataclasses.replace(job.model, weights=weights, adapter=None), parts.plain, unsharded)
    if isinstance(mode, PredictMode):
        _predict(job, mode, place, parts, splits, run_dir)
        return
    requested = ("test",) if mode.split == "test" else evaluated(job.data)
    values = named({split: evaluate(job, place, parts, splits, split) for split in requested})
    if place.rank == 0:
        path = os.path.join(run_dir, EVALUATION)
        with naming(path), open(path, "w", encoding="utf-8") as file:
            json.dump(values, file)


# ------------------------------------------------------------------------------------------------------- predictions


@torch.no_grad()
def _predict(
    job: JobProgram, mode: PredictMode, place: RankPlace, parts: TrainingComponents, splits: Splits, run_dir: str
) -> None:
    samples, split_samples, numbers = in_order(job.data, splits, mode.split)
    mesh, cut = mesh_of(job), context_parallel.input_piece_of(job, parts.plain)
    tells = mesh.leads and mesh.coordinates["context"] == 0
    with PredictionPart(run_dir, place.rank) as part, evaluating(parts):
        for indices, counts in _batches(job, place, parts, len(split_samples)):
            input, _ = batch_aside(samples, split_samples[indices])
            output = forward(job, parts, cut(map_tensors(lambda tensor: tensor.to(parts.device), input)))
            if output is None:
                continue
            output = context_parallel.gather_output(job, output)
            rows = _rows(output, len(indices))
            if counts and tells:
                part.add(rows, numbers[indices].numpy())


def _rows(output: object, samples: int) -> dict[str, NDArray[np.generic]]:
    """Returns the tensors of an output with `samples` rows, by name. Raises OutputError if there is none."""
    rows = {}
    for name, tensor in named_tensors(output).items():
        if tensor.shape[:1] == (samples,):
            if tensor.is_complex():
                part = f"`{name}` of the output has" if name else "the output has"
                raise OutputError(f"{part} complex numbers, and a prediction holds real ones: `torch.view_as_real`")
            wide = tensor.float() if tensor.is_floating_point() else tensor
            rows[f"output.{name}" if name else "output"] = wide.cpu().numpy()
    if not rows:
        what = f"one of shape {tuple(output.shape)}" if isinstance(output, Tensor) else type(output).__name__
        raise OutputError(f"a prediction needs a tensor with a row for each sample, {samples} here, and got {what}")
    return rows


def in_order(step: DataStep, splits: Splits, split: str) -> tuple[Samples, Tensor, Tensor]:
    """Returns (samples, their indices in the order of the source, the number of each in the source).

    If the splits are sources of their own, their order is training, validation, test.
    """
    sizes = {"train": step.train_samples, "validation": step.validation_samples, "test": step.test_samples}
    own_indices = {name: torch.arange(size) for name, size in sizes.items()}
    if step.split == "random":
        numbers = dict(zip(sizes, (*held_out(step), for_test(step)), strict=True))
    else:
        offsets = accumulate(sizes.values(), initial=0)
        numbers = {
            name: indices + offset for (name, indices), offset in zip(own_indices.items(), offsets, strict=False)
        }
    opened = {"train": splits.train, "validation": splits.validation} | ({"test": splits.test} if splits.test else {})
    if split != "all":
        return opened[split], own_indices[split], numbers[split]
    all_numbers = torch.cat(list(numbers.values()))
    order = all_numbers.argsort()
    return concatenate_samples(list(opened.values()), step.structured), order, all_numbers[order]


def _batches(job: JobProgram, place: RankPlace, parts: TrainingComponents, count: int) -> Iterator[tuple[Tensor, bool]]:
    """Yields this rank's samples in batches, and whether they count; in lockstep its first sample fills up."""
    size = batch_size(job, place)
    start, stop = share_of(job.data, place, count)
    sample_chunks = list(torch.arange(start, stop).split(size)) if stop > start else []
    for indices in sample_chunks:
        yield indices, True
    if parts.engine.lockstep:
        for _ in range(most_batches(job, count, place, size) - len(sample_chunks)):
            yield torch.tensor([0]), False
