"""The reference model of a loss of pairs: each answer's log-probability under it, computed once before the training.

Model: the network of the training is the reference, before its first step: as it is, with its adapters off, or with
other weights, which the weights of the start replace afterwards. A forward pass over all pairs, under the plan of the
training, gives one number for each row. So a training needs the memory of one model, and no forward pass of another.

Contract: rank 0 keeps the numbers in the run directory, under digests of what they follow from: the tokens, the
network, its files of weights and the precision. A training that resumes takes them from there. All ranks have all
numbers. A note names a damaged file, and its numbers are computed anew. If a digest is another, too; a training
that resumes goes on only if they are the numbers of before to rounding, or those of other pairs.

Limits: a file of weights is known by its size and its time; one that was copied costs a pass.
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
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import NamedTuple

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
from dslc.runtime.process.job_line import mark_errors
from dslc.runtime.process.records import note
from dslc.runtime.step.assemble import TrainingComponents

FILE = "reference.npz"
_SECONDS = 10.0  # between two lines on the progress
# Of a model's numbers on other ranks, relative and absolute: in float32, and in 16 or 8 bits.
_ROUNDING, _LOW_ROUNDING = (1e-4, 1e-3), (1e-2, 0.1)


class ReferenceChangedError(RuntimeError):
    """The weights of the start give a reference that is not the one from the training's beginning."""


def add_reference(
    job: JobProgram,
    place: RankPlace,
    parts: TrainingComponents,
    splits: Splits,
    run_dir: str,
    after_batch: Callable[[], object] = lambda: None,
) -> Callable[[int], None]:
    """Gives the pairs of all splits the reference's log-probabilities, if the loss has a reference. All ranks call it,
    while the network has the weights that the training begins with.

    Returns the function that keeps the numbers. It takes the step after which the training goes on, and raises
    ReferenceChangedError if this step is not the first and the reference not the one of the beginning.
    """
    reference = job.loss.reference
    if reference is None:
        return lambda step: None
    sources, leads = _sources(splits), place.rank == 0
    sizes = [len(source) for source in sources]
    key = _key(job)
    stored = read_table(run_dir) if leads else None
    began = time.monotonic()
    suits = stored is not None and stored.key == key and len(stored.table) == sum(sizes)
    table = _broadcast(stored.table if stored is not None and suits else None, sum(sizes), parts.device)
    if computed := table is None:
        progress = _PairProgress(run_dir if leads else "", sum(sizes), after_batch)
        with _reference_model(job, parts, reference):
            table = torch.cat([_log_probabilities(job, place, parts, source, progress) for source in sources])
        is_same = stored is not None and _is_same(stored, key, table, low=job.precision.dtype != "float32")
        table_of_before = _broadcast(stored.table if stored is not None and is_same else None, len(table), parts.device)
        new_table = table
        table = new_table if table_of_before is None else table_of_before
    for source, part in zip(sources, table.split(sizes), strict=True):
        source.reference = part
    seconds = time_text(time.monotonic() - began)

    def keep(step: int) -> None:
        if not leads or not computed:
            return
        if stored is not None and table is new_table:
            changed = [name for name in key if stored.key.get(name) != key[name]]
            _refuse_or_note(run_dir, stored, changed, new_table, step, reference.line)
        elif stored is not None:
            note(run_dir, f"{FILE} is of other files, whose weights give the same numbers: it is kept")
        elif step:
            note(run_dir, f"there is no {FILE}: the reference is that of the weights of this start")
        write_table(os.path.join(run_dir, FILE), key, table)
        if table is new_table:
            note(run_dir, f"reference: log-probabilities of {sum(sizes):,} pairs in {seconds}, kept in {FILE}")

    return keep


def _refuse_or_note(
    run_dir: str, stored: StoredReference, changed: Sequence[str], table: Tensor, step: int, line: str
) -> None:
    """Raises ReferenceChangedError if a training that goes on would have another reference for the same pairs; else
    notes why it is computed anew.
    """
    what = " and ".join(changed)
    if step and "pairs" not in changed and stored.table.shape == table.shape:
        difference = (stored.table - table).abs().max().item()
        with mark_errors(line):
            raise ReferenceChangedError(
                f"the training began with another reference: {what} changed since, and the log-probabilities of "
                f"answers differ by up to {difference:.3g} from those in {FILE}; put back what it began with, or "
                "delete this file to go on with the reference of now"
            )
    note(run_dir, f"{FILE} is of other {what}: the reference is computed anew, from the weights of this start")


def _is_same(stored: StoredReference, key: Mapping[str, str], table: Tensor, *, low: bool) -> bool:
    """True if the numbers come from the same model and the same pairs, to the rounding of another plan."""
    if stored.key.get("pairs") != key["pairs"] or stored.table.shape != table.shape:
        return False
    relative, absolute = _LOW_ROUNDING if low else _ROUNDING
    return torch.allclose(stored.table, table, rtol=relative, atol=absolute)


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
    """Loads the weights of a file, and puts back afterwards what was there, from a copy on the host."""
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


class StoredReference(NamedTuple):
    """The log-probabilities of a file, (pairs, 2), and digests of what they follow from, by name."""

    table: Tensor
    key: Mapping[str, str]


def _key(job: JobProgram) -> dict[str, str]:
    """Returns digests of what the log-probabilities follow from, by name."""
    assert job.loss.reference is not None
    weights = job.model.weights.files if job.model.weights is not None else ()
    stamps = []
    for file in (*weights, *job.loss.reference.files):
        with contextlib.suppress(OSError):
            status = os.stat(file)
            stamps.append((status.st_size, status.st_mtime_ns))
    known = {
        "pairs": job.data.arguments["digest"],
        "network": _without_lines(to_json(job.model)),
        "weights": (_without_lines(to_json(job.loss.reference)), stamps),
        "precision": _without_lines(to_json(job.precision)),
    }
    return {name: _digest(value) for name, value in known.items()}


def _digest(value: object) -> str:
    return hashlib.sha256(json.dumps(value, sort_keys=True, default=repr).encode()).hexdigest()


def _without_lines(data: object) -> object:
    """Returns data without the lines of the job that it stands in."""
    if isinstance(data, dict):
        return {name: _without_lines(value) for name, value in data.items() if name != "line"}
    return [_without_lines(each) for each in data] if isinstance(data, list | tuple) else data


def read_table(run_dir: str) -> StoredReference | None:
    """Returns what the run directory keeps, if it can be read."""
    try:
        with np.load(os.path.join(run_dir, FILE), allow_pickle=False) as file:
            key, table = json.loads(str(file["key"])), file["log_probabilities"].astype(np.float32)
        if isinstance(key, dict) and table.ndim == 2:
            return StoredReference(torch.from_numpy(table), key)
        fault = "has no numbers of pairs"
    except FileNotFoundError:
        return None
    except (OSError, ValueError, KeyError, EOFError, zipfile.BadZipFile, zlib.error) as error:
        fault = f"cannot be read ({error!r})"
    note(run_dir, f"{FILE} {fault}: the reference is computed anew, from the weights of this start")
    return None


def write_table(path: str, key: Mapping[str, str], table: Tensor) -> None:
    with atomic_write(path) as part, open(recreate_file(part), "wb") as file:
        np.savez(file, key=np.array(json.dumps(key)), log_probabilities=table.numpy())


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
