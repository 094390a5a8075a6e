"""Summarizes the tensors of each step for `dslc bisect`: the outputs of modules, gradients, and the state afterwards.

Model: a summary is a count sketch (Charikar et al. 2002, https://doi.org/10.1007/3-540-45465-9_59). A hash of its place
in the whole tensor gives each number a sign and one of `BUCKETS` sums. So the summary of a tensor is the sum of the
summaries of its parts, and plans that cut the tensor in other ways compare. The norm of the difference of two summaries
estimates the norm of the difference of two tensors, to about 9%.

The place of a number in an output is its sample's place in the global batch, and its place within the sample. Ranks of
a context axis have pieces of the samples. Over a tensor axis a module's output may be whole, a piece of the sequence or
a share of the features. The rank writes a summary for each layout, and the reader chooses by the size of the whole
(cli/verification/recordings.py).

    observed/tensors-N.safetensors      one row of `BUCKETS` sums for each summary, and its tensor

Contract: the training is unchanged. Gradients are those before clipping, without the loss scale.

Limits: outputs of modules within a compiled module have no summary, nor has that of a head that computes losses in
chunks, of modules whose first dim does not go sample by sample, and of columns in parts (model/row_order.py). Passes of
a recomputation are passed over.
"""

from __future__ import annotations

import json
import os
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

import numpy as np
import torch
from torch import Tensor, nn

from dslc.compiler.ir.codec import from_json, to_json
from dslc.compiler.ir.program import JobProgram, RankPlace
from dslc.compiler.trace.private_torch import part_in_whole, running_node_number
from dslc.compiler.trace.structures import tensors
from dslc.runtime.data.batches import StepBatch
from dslc.runtime.model.initial_weights import own_part
from dslc.runtime.model.row_order import as_named, is_permuted
from dslc.runtime.model.tensor_names import named_tensors
from dslc.runtime.step.assemble import TrainingComponents
from dslc.runtime.step.stepper import Between, StepResult
from dslc.runtime.technique import sample_pass

BUCKETS = 256
_CHUNK = 1 << 20  # numbers that are hashed at once
Kind = Literal["output", "gradient", "state"]
Layout = Literal["whole", "piece", "share"]
Array = np.ndarray[Any, Any]


@dataclass(frozen=True, kw_only=True)
class TensorSummary:
    """The tensor of one row of sums: a rank's part of a tensor in one step."""

    step: int  # from 1
    kind: Kind
    name: str  # of an output, with a number from the second call or tensor on: "blocks.0#1"
    layout: Layout
    part: tuple[tuple[int, int], ...]  # its place in the whole; of an output, first the samples of each micro-batch
    shape: tuple[int, ...]  # of this rank's part; of an output: of one sample
    numbers: int
    nonfinite: int  # of these, numbers that are infinite or nan, which count as 0


@dataclass(kw_only=True)
class _OutputRow:
    """The summaries of one output over the micro-batches so far, by layout."""

    shape: tuple[int, ...]
    ranges: list[tuple[int, int]] = field(default_factory=list)
    sums: dict[Layout, tuple[Tensor, tuple[int, int]]] = field(default_factory=dict)
    numbers: int = 0
    nonfinite: Tensor


class TensorRecorder:
    """Summarizes the tensors of one rank. To be made before the first step."""

    def __init__(self, job: JobProgram, place: RankPlace, parts: TrainingComponents, folder: str, step: int) -> None:
        self._job, self._place, self._parts, self._step = job, place, parts, step
        assert job.observation is not None
        self._first, self._on = job.observation.tensors, False
        self._path = tensor_file(folder, place.rank)
        self._names = named_tensors(parts.plain)
        self._rows: list[Tensor] = []
        self._summaries: list[TensorSummary] = []
        self._outputs: dict[str, _OutputRow] = {}
        self._calls: Counter[tuple[int, str]] = Counter()
        tensor = job.tensor
        self._in_parts = {module for module, _ in tensor.parts} if tensor is not None else set()
        for name, module in parts.plain.named_modules():
            if name not in self._in_parts and not _is_inside(name, job.compiled) and not _has_head(name, job.loss.head):
                module.register_forward_hook(self._hook(name))

    def wrap(self, work: Callable[[StepBatch], StepResult]) -> Callable[[StepBatch], StepResult]:
        """Returns `work`, which does one step, wrapped so that outputs and the state after the step are summarized."""

        def recorded(batch: StepBatch) -> StepResult:
            self._step += 1
            self._on = self._step >= self._first
            self._outputs.clear()
            self._calls.clear()
            result = work(batch)
            self._keep_outputs()
            for name, tensor in self._names.items() if self._on else ():
                self._add("state", name, tensor)
            return result

        return recorded

    def wrap_between(self, work: Between) -> Between:
        """Returns `work`, which is called between passes and update, wrapped so that gradients are summarized."""
        scaler = self._parts.scaler

        def recorded(batch: StepBatch, total: Tensor, number: int | Tensor) -> None:
            scale = 1 / scaler.get_scale() if scaler.is_enabled() else 1.0
            for name, tensor in self._names.items() if self._on else ():
                if tensor.grad is not None:
                    self._add("gradient", name, tensor.grad, scale)
            work(batch, total, number)

        return recorded

    def leave(self) -> None:
        """Writes the file, after the last step."""
        from safetensors.torch import save_file

        rows = torch.stack(self._rows) if self._rows else torch.zeros(0, BUCKETS, dtype=torch.float64)
        text = json.dumps(to_json(self._summaries)).encode()  # may be too long for metadata
        described = torch.frombuffer(bytearray(text), dtype=torch.uint8)
        save_file({"sums": rows.cpu(), "summaries": described}, self._path)

    @torch.no_grad()
    def _add(self, kind: Kind, name: str, tensor: Tensor, scale: float = 1.0) -> None:
        if any(placement.is_partial() for placement in getattr(tensor, "placements", ())):
            tensor = tensor.full_tensor()  # type: ignore[attr-defined]
        if is_permuted(name):
            tensor = as_named(name, tensor.full_tensor())  # type: ignore[attr-defined]
        local, part = own_part(tensor)
        if not (local.is_floating_point() or local.is_complex()):
            return
        sums, nonfinite = summarize(local, part, tuple(tensor.shape))
        self._append(
            TensorSummary(
                step=self._step,
                kind=kind,
                name=name,
                layout="whole",
                part=tuple((each.start, each.stop) for each in part),
                shape=tuple(local.shape),
                numbers=local.numel(),
                nonfinite=int(nonfinite),
            ),
            sums * scale,
        )

    def _append(self, summary: TensorSummary, sums: Tensor) -> None:
        self._summaries.append(summary)
        self._rows.append(sums.cpu())

    def _hook(self, name: str) -> Callable[[nn.Module, object, object], None]:
        def summarize_output(module: nn.Module, args: object, output: object) -> None:
            samples = sample_pass.current_pass()
            if samples is None or not self._on or not torch.is_grad_enabled() or running_node_number() is not None:
                return
            for tensor in tensors(output):
                call = self._calls[samples.first, name]
                self._calls[samples.first, name] += 1
                self._summarize_output(f"{name}#{call}" if call else name, tensor, samples)

        return summarize_output

    @torch.no_grad()
    def _summarize_output(self, name: str, output: Tensor, samples: sample_pass.SamplePass) -> None:
        share = None
        if hasattr(output, "placements"):
            share = part_in_whole(output)[1][-1]
            output = output.to_local()  # type: ignore[attr-defined]
        output = torch.view_as_real(output) if output.is_complex() else output
        count = samples.samples
        if not output.is_floating_point() or not output.numel() or output.dim() == 0 or output.shape[0] % count:
            return
        shape = (output.shape[0] // count, *output.shape[1:])
        rows = output.reshape(count, -1)
        if samples.order is not None:
            rows = rows[torch.argsort(samples.order).to(rows.device)]
        row = self._outputs.setdefault(
            name, _OutputRow(shape=shape, nonfinite=torch.zeros((), dtype=torch.int64, device=output.device))
        )
        if row.shape != shape:
            return
        row.ranges.append((samples.first, samples.first + count))
        row.numbers += rows.numel()
        for layout, (starts, widths, place) in self._layouts(shape, share).items():
            columns = _columns(shape, starts, widths, rows.device)
            sums, nonfinite = _sketch(rows, samples.first, columns)
            before = row.sums.get(layout)
            row.sums[layout] = (sums if before is None else before[0] + sums, place)
        row.nonfinite += nonfinite

    def _layouts(
        self, shape: tuple[int, ...], share: int | None
    ) -> Mapping[Layout, tuple[int, tuple[int, int] | None, tuple[int, int]]]:
        """Returns for each layout that an output may have: the place of the rank's first number in a sample; of a share
        the first feature and the number of features; and the part, to tell copies from parts.
        """
        inner = int(np.prod(shape))
        number, pieces = self._place.coordinates.get("context", 0), self._job.axes["context"]
        tensor_rank, size = self._place.coordinates.get("tensor", 0), self._job.axes["tensor"]
        first = number * inner
        if size == 1 or self._job.tensor is None:
            return {"whole": (first, None, (number, pieces))}
        features = shape[-1] * size
        start = tensor_rank * shape[-1] if share is None else share
        shares = (number * inner * size, (start, features), (number * size + tensor_rank, pieces * size))
        if share is not None:
            return {"share": shares}
        piece = number * size + tensor_rank
        return {
            "whole": (first, None, (number, pieces)),
            "piece": (piece * inner, None, (piece, pieces * size)),
            "share": shares,
        }

    def _keep_outputs(self) -> None:
        for name, row in self._outputs.items():
            for layout, (sums, place) in row.sums.items():
                self._append(
                    TensorSummary(
                        step=self._step,
                        kind="output",
                        name=name,
                        layout=layout,
                        part=(*row.ranges, place),
                        shape=row.shape,
                        numbers=row.numbers,
                        nonfinite=int(row.nonfinite),
                    ),
                    sums,
                )


def _has_head(name: str, head: str) -> bool:
    """True if the module is or contains a head that returns losses in place of logits."""
    return bool(head) and (not name or f"{head}.".startswith(f"{name}."))


def _is_inside(name: str, compiled: tuple[str, ...]) -> bool:
    return any(not each or name.startswith(f"{each}.") for each in compiled if name != each)


def _columns(shape: tuple[int, ...], start: int, share: tuple[int, int] | None, device: torch.device) -> Tensor:
    """Returns the place within the sample of each number that a rank has of one."""
    inner = int(np.prod(shape))
    places = torch.arange(inner, device=device)
    if share is None:
        return places + start
    first, features = share
    width = shape[-1]
    return start + places // width * features + first + places % width


def summarize(local: Tensor, part: tuple[slice, ...], shape: tuple[int, ...]) -> tuple[Tensor, Tensor]:
    """Returns the sums of a part of a tensor of this shape, and its number of nonfinite numbers."""
    if local.is_complex():
        local = torch.view_as_real(local.resolve_conj())
        part, shape = (*part, slice(0, 2)), (*shape, 2)
    if not local.numel():  # a rank beyond the last shard
        return local.new_zeros(BUCKETS, dtype=torch.float64), local.new_zeros((), dtype=torch.int64)
    rows = local.reshape(local.shape[0] if local.dim() else 1, -1)
    if not part:
        return _sketch(rows, 0, torch.zeros(1, dtype=torch.int64, device=local.device))
    columns = torch.zeros((), dtype=torch.int64, device=local.device)
    for each, size in zip(part[1:], shape[1:], strict=True):
        columns = columns[..., None] * size + torch.arange(each.start, each.stop, device=local.device)
    return _sketch(rows, part[0].start, columns.reshape(-1))


def _sketch(rows: Tensor, first: int, columns: Tensor) -> tuple[Tensor, Tensor]:
    """Returns the sums of `rows`, which are the rows `first` and so on, with their numbers at the places `columns`."""
    sums = torch.zeros(BUCKETS, dtype=torch.float64, device=rows.device)
    nonfinite = torch.zeros((), dtype=torch.int64, device=rows.device)
    if not rows.numel():
        return sums, nonfinite
    width = min(_CHUNK, rows.shape[1])
    height = _CHUNK // width
    for left in range(0, rows.shape[1], width):
        keys = _mixed(columns[left : left + width])
        for start in range(0, len(rows), height):
            values = rows[start : start + height, left : left + width].to(torch.float64)
            is_finite = torch.isfinite(values)
            nonfinite += values.numel() - is_finite.sum()
            numbers = torch.arange(first + start, first + start + len(values), device=rows.device)
            hashes = _mixed(_mixed(numbers + 1)[:, None] ^ keys)
            signed = torch.where(is_finite, values, 0.0) * ((hashes >> 8) & 1).mul(2).sub(1)
            sums.index_add_(0, (hashes & (BUCKETS - 1)).reshape(-1), signed.reshape(-1))
    return sums, nonfinite


def _mixed(numbers: Tensor) -> Tensor:
    """Returns well mixed bits for each number: the finalizer of splitmix64 (Steele et al. 2014)."""
    x = numbers * -0x61C8864680B583EB
    for shift, factor in ((30, -0x40A7B892E31B1A47), (27, -0x6B2FB644ECCEEE15)):
        x = (x ^ ((x >> shift) & ((1 << (64 - shift)) - 1))) * factor
    return x ^ ((x >> 31) & ((1 << 33) - 1))


# ---------------------------------------------------------------------------------------------------- reading it back


def tensor_file(folder: str, rank: int) -> str:
    return os.path.join(folder, f"tensors-{rank}.safetensors")


def read_summaries(folder: str, rank: int) -> tuple[list[TensorSummary], Array]:
    """Returns the summaries of a rank, and their sums."""
    from safetensors import safe_open

    with safe_open(tensor_file(folder, rank), framework="np") as file:
        described: list[Any] = json.loads(file.get_tensor("summaries").tobytes())
        sums: Array = file.get_tensor("sums")
    return [from_json(TensorSummary, each) for each in described], sums
