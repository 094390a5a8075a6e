"""Writes down what each rank did in each step, for `dslc verify`, and reads it back for the comparison.

Model: a training with `observe` records for each step of each rank:

- the samples that the order of the data gave it, and a digest of every sample that its model really saw;
- the sum of its losses, its divisor, and the norm of the gradient;
- whether the step drew random numbers.

Before the first step and after the last each rank writes its part of every tensor of the model, with its place.

    observed/rank-N.json                the steps
    observed/start-N.safetensors        the tensors before the first step; `end-N` after the last; `first-N` after the
                                        first, if the training is in float64

Contract: dropout stays on where it is drawn by sample. Elsewhere, unless the job says `noise`, it is switched off in
torch's dropout modules, as no two ranks draw the same; remaining noise shows as `noise` of a step. On a GPU
convolutions in float32 keep all their bits. All else is the unchanged training.

Limits: the host waits for the device in every step. Each rank writes what it holds twice, in float32 (float64 where it
trains in that) or its integers.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from dslc.compiler.ir.codec import from_json, to_json
from dslc.compiler.ir.program import DataStep, JobProgram, RankPlace
from dslc.compiler.trace.private_torch import AnyDropout
from dslc.compiler.trace.structures import map_tensors, tensors
from dslc.runtime.data.batches import StepBatch
from dslc.runtime.data.sampler import micro_batches, steps_per_epoch
from dslc.runtime.model.initial_weights import Part, own_part
from dslc.runtime.model.losses import token_targets
from dslc.runtime.model.row_order import as_named, is_permuted
from dslc.runtime.model.tensor_names import named_tensors
from dslc.runtime.process import random_numbers
from dslc.runtime.step.stepper import StepResult
from dslc.runtime.step.tensor_summaries import TensorSummary, read_summaries

OBSERVED = "observed"  # the folder, in a run directory
Array = np.ndarray[Any, Any]


@dataclass(frozen=True, kw_only=True)
class StepObservation:
    """One step of one rank: indices of its training samples, with a digest of each that arrived, and its sums."""

    step: int  # from 1
    samples: tuple[int, ...]  # () if another rank has them too, and reports them
    digests: tuple[str, ...]
    total: float  # the sum of this rank's losses; equal ranks of a tensor axis leave it to the first
    number: float  # divisor of the sum over all ranks
    norm: float  # norm of the whole gradient, before it is clipped
    lr: float
    noise: bool  # true if random numbers were drawn


class Observer:
    """Observes one rank. To be made after the model has its initial values, and before the first step."""

    def __init__(
        self,
        job: JobProgram,
        place: RankPlace,
        model: nn.Module,
        optimizer: torch.optim.Optimizer,
        device: torch.device,
        run_dir: str,
        step: int,
    ) -> None:
        self._job, self._place, self._optimizer, self._device, self._step = job, place, optimizer, device, step
        assert job.observation is not None
        self._mode = job.observation
        fixed_axes = {axis: number for axis, number in place.coordinates.items() if axis != "data"}
        self._first, self._leads = not any(fixed_axes.values()), not fixed_axes.get("tensor", 0)
        self._folder = os.path.join(run_dir, OBSERVED)
        self._seen: list[StepObservation] = []
        os.makedirs(self._folder, exist_ok=True)
        if not self._mode.noise and job.draws is None:
            silence_dropout(model)
        self._tensors = named_tensors(model)
        torch.backends.cudnn.allow_tf32 = False  # TF32 has 10 bits, which round differently for each shape
        self._write_tensors("start")

    def wrap(self, work: Callable[[StepBatch], StepResult]) -> Callable[[StepBatch], StepResult]:
        """Returns `work`, which does one step, wrapped so that it is recorded."""

        def watched(batch: StepBatch) -> StepResult:
            data = self._job.data
            chunks = micro_batches(
                data, self._place, self._job.microbatches, *divmod(self._step, steps_per_epoch(data))
            )
            digests: tuple[str, ...] = ()
            if self._first:  # of the ranks that share samples, which reports them
                pairs = zip(batch.micro, chunks, strict=True)
                digests = tuple(
                    digest
                    for (input, target), own_indices in pairs
                    for digest in _digests(data, input, token_targets(target), len(own_indices))
                )
            if self._mode.exact:
                batch = replace(batch, micro=[_wide_pair(*pair) for pair in batch.micro])
            if self._mode.reorder:
                batch = self._reordered(batch)
            state_before = random_numbers.state(self._device)
            groups = self._optimizer.param_groups
            result = work(batch)
            if self._mode.exact and not self._seen:
                self._write_tensors("first")
            state_after = random_numbers.state(self._device)
            assert result.norm is not None
            self._step += 1
            self._seen.append(
                StepObservation(
                    step=self._step,
                    samples=tuple(index for indices in chunks for index in indices.tolist()) if self._first else (),
                    digests=digests,
                    total=float(result.total.double()) * self._leads,
                    number=float(result.number),
                    norm=float(result.norm),
                    lr=float(groups[0]["lr"]),
                    noise=any(
                        state_before[name].numpy().tobytes() != state_after[name].numpy().tobytes()
                        for name in state_before
                    ),
                )
            )
            return result

        return watched

    def _reordered(self, batch: StepBatch) -> StepBatch:
        if self._job.data.structured:
            return batch  # its first dim need not be the samples
        pairs, orders = [], []
        for input, target in batch.micro:
            generator = torch.Generator().manual_seed(self._mode.reorder + 1000 * self._step)
            rows = self._job.loss.rows
            orders.append(torch.randperm(len(input) // rows, generator=generator).to(input.device))
            order = (orders[-1].unsqueeze(1) * rows + torch.arange(rows, device=input.device)).view(-1)
            pairs.append(map_tensors(_RowSelection(order), (input, target)))
        return replace(batch, micro=pairs, orders=tuple(orders))

    def leave(self) -> None:
        """Ends the observation, after the last step."""
        self._write_tensors("end")
        with open(os.path.join(self._folder, f"rank-{self._place.rank}.json"), "w", encoding="utf-8") as file:
            json.dump(to_json(self._seen), file)

    @torch.no_grad()
    def _write_tensors(self, moment: str) -> None:
        if self._mode.tensors:  # summaries take their place
            return
        from safetensors.torch import save_file

        arrays, places = {}, {}
        dtype = torch.float64 if self._mode.exact else torch.float32
        for name, tensor in self._tensors.items():
            local, part = own_part(tensor)
            if is_permuted(name):
                local = as_named(name, tensor.full_tensor())  # type: ignore[attr-defined]
                part = tuple(slice(0, size) for size in local.shape)
            if local.is_complex():
                local = torch.view_as_real(local.resolve_conj())
            wide = local.cpu().to(dtype) if local.is_floating_point() else local.cpu()
            arrays[name] = wide.clone(memory_format=torch.contiguous_format)
            places[name] = [(piece.start, piece.stop) for piece in part]
        parameters = [name for name, tensor in self._tensors.items() if isinstance(tensor, nn.Parameter)]
        low = [name for name in parameters if self._tensors[name].dtype in (torch.bfloat16, torch.float16)]
        metadata = {"parts": json.dumps(places), "parameters": json.dumps(parameters), "low": json.dumps(low)}
        save_file(arrays, _tensor_file(self._folder, moment, self._place.rank), metadata)


def _tensor_file(folder: str, moment: str, rank: int) -> str:
    return os.path.join(folder, f"{moment}-{rank}.safetensors")


def _wide(tensor: Tensor) -> Tensor:
    if tensor.is_complex():
        return tensor.to(torch.complex128)
    return tensor.double() if tensor.is_floating_point() else tensor


class _RowSelection:
    """Takes the rows of a tensor in an order."""

    def __init__(self, order: Tensor) -> None:
        self._order = order

    def __call__(self, tensor: Tensor) -> Tensor:
        return tensor[self._order]


def _wide_pair(input: object, target: object) -> tuple[object, object]:
    """Returns a pair in float64; a batch that is input and target at once stays one."""
    wide = map_tensors(_wide, input)
    return wide, wide if target is input else map_tensors(_wide, target)


def silence_dropout(model: nn.Module) -> None:
    for module in model.modules():
        if isinstance(module, AnyDropout):
            module.p = 0.0
        elif isinstance(module, nn.RNNBase | nn.MultiheadAttention):
            module.dropout = 0.0


def _digests(data: DataStep, input: object, target: object, samples: int) -> Iterator[str]:
    """Yields a digest for each sample; "" where the user's function collates, which may pad otherwise elsewhere."""
    all_tensors = tensors(input) + (tensors(target) if target is not input else [])
    if data.collate is not None or (data.structured and any(tensor.shape[:1] != (samples,) for tensor in all_tensors)):
        yield from [""] * samples
        return
    if samples and len(all_tensors[0]) > samples:  # a pair is several rows
        all_tensors = [tensor.reshape(samples, -1) for tensor in all_tensors]
    for rows in zip(*(tensor.cpu().contiguous() for tensor in all_tensors), strict=True):
        digest = hashlib.blake2b(digest_size=8)
        for tensor in rows:
            digest.update(tensor.contiguous().reshape(-1).view(torch.uint8).numpy().data)
        yield digest.hexdigest()


# ---------------------------------------------------------------------------------------------------- reading it back


class Observation:
    """The observations that the `ranks` ranks of a training wrote to `run_dir`."""

    def __init__(self, run_dir: str, ranks: int) -> None:
        self._folder = os.path.join(run_dir, OBSERVED)
        self.ranks = [self._read_rank(rank) for rank in range(ranks)]

    def _read_rank(self, rank: int) -> tuple[StepObservation, ...]:
        with open(os.path.join(self._folder, f"rank-{rank}.json"), encoding="utf-8") as file:
            records = json.load(file)
        return tuple(from_json(StepObservation, record) for record in records)

    @property
    def low_parameters(self) -> tuple[str, ...]:
        return tuple(sorted({name for rank in range(len(self.ranks)) for name in self._file("start", rank).low}))

    def summaries(self, rank: int) -> tuple[list[TensorSummary], Array]:
        """Returns the summaries of a rank's tensors, and their sums, where the training recorded them."""
        return read_summaries(self._folder, rank)

    def _file(self, moment: str, rank: int) -> _Tensors:
        return _Tensors(_tensor_file(self._folder, moment, rank))

    def tensors(self, moment: str, rank: int) -> Mapping[str, tuple[Part, Array, bool]]:
        """Returns by name, of `start`, `first` or `end`: the rank's part, its values, and whether it is a parameter."""
        return self._file(moment, rank)


class _Tensors(Mapping[str, tuple[Part, Array, bool]]):
    """A file of tensors, each read when it is asked for."""

    def __init__(self, path: str) -> None:
        from safetensors import safe_open

        self._file: Any = safe_open(path, framework="np")
        metadata: dict[str, str] = self._file.metadata()  # type: ignore[no-untyped-call]
        self._parts, self._parameters = json.loads(metadata["parts"]), set(json.loads(metadata["parameters"]))
        self.low: list[str] = json.loads(metadata.get("low", "[]"))

    def __getitem__(self, name: str) -> tuple[Part, Array, bool]:
        part = tuple(slice(start, stop) for start, stop in self._parts[name])
        return part, self._file.get_tensor(name), name in self._parameters

    def __iter__(self) -> Iterator[str]:
        return iter(self._parts)

    def __len__(self) -> int:
        return len(self._parts)
