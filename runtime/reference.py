"""The reference model of a loss of pairs: each answer's log-probability under it, computed once before the training.

Model: the network of the training is the reference, before its first step: as it is, with its adapters off, or with
other weights, which the weights of the start replace afterwards. A forward pass over all pairs, under the plan of the
training, gives one number for each row. So a training needs the memory of one model, and no forward pass of another.

Contract: rank 0 keeps the numbers in the run directory, under a key of what they follow from: the tokens, the network,
its files of weights and the precision. A training that resumes takes them from there. All ranks have all numbers. A
file that is damaged or of another key is said so, and its numbers are computed anew.

Limits: a file of weights is known by its size and its time.
"""

from __future__ import annotations

import contextlib
import dataclasses
import hashlib
import json
import os
import time
import zipfile
import zlib
from collections.abc import Callable, Iterator

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

from dslc.compiler.facts.untrusted_files import atomic_write, recreate_file
from dslc.compiler.ir.codec import to_json
from dslc.compiler.ir.number_text import time_text
from dslc.compiler.ir.program import JobProgram, RankPlace, ReferenceStep, WeightsStep
from dslc.compiler.placement.shares import largest, piece
from dslc.runtime.data.batches import read_batches
from dslc.runtime.data.samples import DerivedSamples, Samples, Splits
from dslc.runtime.data.sources.chat_samples import PairSamples
from dslc.runtime.loop.evaluate import batch_size, evaluating, forward
from dslc.runtime.model import adapters, initial_weights
from dslc.runtime.model.losses import row_log_probabilities, token_targets
from dslc.runtime.model.tensor_names import named_tensors
from dslc.runtime.parallel.context_parallel import piece_of
from dslc.runtime.parallel.mesh import mesh_of
from dslc.runtime.process.records import naming, note
from dslc.runtime.step.assemble import TrainingComponents

FILE = "reference.npz"
_SECONDS = 10.0  # between two lines on the progress


def add_reference(
    job: JobProgram,
    place: RankPlace,
    parts: TrainingComponents,
    splits: Splits,
    run_dir: str,
    after_batch: Callable[[], object] = lambda: None,
) -> None:
    """Gives the pairs of all splits the reference's log-probabilities, if the loss has a reference. All ranks call it,
    while the network has the weights that the training begins with.
    """
    reference = job.loss.reference
    if reference is None:
        return
    sources = _sources(splits)
    sizes = [len(source) for source in sources]
    path, key = os.path.join(run_dir, FILE), _key(job)
    table = _broadcast(read_table(run_dir, key, sum(sizes)) if place.rank == 0 else None, sum(sizes), parts.device)
    if table is None:
        began = time.monotonic()
        progress = _PairProgress(run_dir if place.rank == 0 else "", sum(sizes), after_batch)
        with _reference_model(job, parts, reference):
            table = torch.cat([_log_probabilities(job, place, parts, source, progress) for source in sources])
        if place.rank == 0:
            write_table(path, key, table)
            seconds = time_text(time.monotonic() - began)
            note(run_dir, f"reference: log-probabilities of {sum(sizes):,} pairs in {seconds}, kept in {FILE}")
    for source, part in zip(sources, table.split(sizes), strict=True):
        source.reference = part


def _sources(splits: Splits) -> list[PairSamples]:
    """Returns the pairs behind the splits, each source once."""
    sources: dict[int, PairSamples] = {}
    for samples in (splits.train, splits.validation, splits.test):
        source: Samples | None = samples
        while isinstance(source, DerivedSamples):
            source = source.samples
        if source is not None:
            assert isinstance(source, PairSamples)
            sources[id(source)] = source
    return list(sources.values())


@torch.no_grad()
def _log_probabilities(
    job: JobProgram, place: RankPlace, parts: TrainingComponents, pairs: PairSamples, progress: _PairProgress
) -> Tensor:
    """Returns the log-probabilities of the two answers of each pair, (pairs, 2), on the CPU."""
    count, size, mesh, cut = len(pairs), batch_size(job, place), mesh_of(job), piece_of(job)
    table = torch.zeros(count, 2, dtype=torch.float64, device=parts.device)
    start, stop = piece(count, place.data_ranks, place.data_rank)
    chunks = list(torch.arange(start, stop).split(size)) if stop > start else []
    passes = -(-largest(count, place.data_ranks) // size) if parts.engine.lockstep else len(chunks)
    chunks += [torch.tensor([0])] * (passes - len(chunks))  # computed with the others, and not kept
    with evaluating(parts):
        for chunk, (input, target) in zip(
            chunks, read_batches(job.data, pairs, place, chunks, parts.device), strict=True
        ):
            targets = token_targets(cut(target))
            output = forward(job, parts, cut(input), targets)
            if output is not None and start <= int(chunk[0]) < stop:
                table[chunk.to(parts.device)] = row_log_probabilities(job.loss, output, targets).double().view(-1, 2)
            progress.add(len(chunk) * place.data_ranks)
    if job.world_size > 1:
        table *= mesh.leads  # ranks that have pieces of the answers add what their tokens give
        dist.all_reduce(table)
    return table.float().cpu()


class _PairProgress:
    """Says now and then how many pairs are done."""

    def __init__(self, run_dir: str, pairs: int, after_batch: Callable[[], object]) -> None:
        self._run_dir, self._pairs, self._after_batch = run_dir, pairs, after_batch
        self._done, self._said = 0, time.monotonic()

    def add(self, pairs: int) -> None:
        self._after_batch()
        self._done = min(self._pairs, self._done + pairs)
        if self._run_dir and time.monotonic() - self._said > _SECONDS:
            self._said = time.monotonic()
            note(self._run_dir, f"reference: {self._done:,} of {self._pairs:,} pairs")


# -------------------------------------------------------------------------------------------------------- the model


@contextlib.contextmanager
def _reference_model(job: JobProgram, parts: TrainingComponents, reference: ReferenceStep) -> Iterator[None]:
    """Makes the network the reference while the context lasts."""
    match reference.kind:
        case "initial":
            yield
        case "adapter_off":
            with adapters.switched_off(parts.plain):
                yield
        case "weights":
            with _other_weights(job, parts, reference):
                yield


@contextlib.contextmanager
def _other_weights(job: JobProgram, parts: TrainingComponents, reference: ReferenceStep) -> Iterator[None]:
    """Loads the weights of a file, and puts back afterwards those that were there, of which the host keeps a copy."""
    tensors = [_local(tensor) for tensor in named_tensors(parts.plain).values()]
    saved = [tensor.to("cpu", copy=True) for tensor in tensors]
    weights = WeightsStep(files=reference.files, path=reference.path, line=reference.line)
    unsharded = parts.pipeline.whole if parts.pipeline is not None else None
    initial_weights.load(dataclasses.replace(job.model, weights=weights), parts.plain, unsharded)
    try:
        yield
    finally:
        with torch.no_grad():
            for tensor, values in zip(tensors, saved, strict=True):
                tensor.copy_(values)


def _local(tensor: Tensor) -> Tensor:
    """Returns the part of a tensor that this rank has."""
    local: Tensor = tensor.to_local() if hasattr(tensor, "to_local") else tensor
    return local.detach()


# --------------------------------------------------------------------------------------------------------- the file


def _key(job: JobProgram) -> str:
    """Returns a digest of what the log-probabilities follow from."""
    assert job.loss.reference is not None
    weights = job.model.weights.files if job.model.weights is not None else ()
    stamps = []
    for file in (*weights, *job.loss.reference.files):
        with contextlib.suppress(OSError):
            status = os.stat(file)
            stamps.append((status.st_size, status.st_mtime_ns))
    data = job.data.arguments["digest"]
    known = [data, to_json(job.model), to_json(job.loss.reference), to_json(job.precision), stamps]
    return hashlib.sha256(json.dumps(known, sort_keys=True, default=repr).encode()).hexdigest()


def read_table(run_dir: str, key: str, pairs: int) -> Tensor | None:
    """Returns the numbers that the run directory keeps under this key, if any."""
    path = os.path.join(run_dir, FILE)
    try:
        with np.load(path, allow_pickle=False) as file:
            if str(file["key"]) == key and file["log_probabilities"].shape == (pairs, 2):
                return torch.from_numpy(file["log_probabilities"].astype(np.float32))
        fault = "is of other weights, data or precision"
    except FileNotFoundError:
        return None
    except (OSError, ValueError, KeyError, EOFError, zipfile.BadZipFile, zlib.error) as error:
        fault = f"cannot be read ({error!r})"
    note(run_dir, f"{FILE} {fault}: the reference is computed anew, from the weights of this start")
    return None


def write_table(path: str, key: str, table: Tensor) -> None:
    with naming(path), atomic_write(path) as part, open(recreate_file(part), "wb") as file:
        np.savez(file, key=np.array(key), log_probabilities=table.numpy())


def _broadcast(table: Tensor | None, pairs: int, device: torch.device) -> Tensor | None:
    """Returns what rank 0 has, on all ranks."""
    if not dist.is_initialized() or dist.get_world_size() == 1:
        return table
    there = torch.tensor(int(table is not None), device=device)
    dist.broadcast(there, 0)
    if not there:
        return None
    values = torch.empty(pairs, 2, device=device) if table is None else table.to(device)
    dist.broadcast(values, 0)
    return values.cpu()
