"""The number of each training sample from which a sampler orders them: its weight, its class or its length.

Model: `prepare` finds the numbers of a job once in each process, before the first step: in a `.npy` file, by a function
of the user's, or from the samples. Each rank finds the keys of a piece of the samples; one sum over the ranks joins
them.

Contract: one float64 for each training sample. A file, or a function of weights, has one for each sample of the source,
held out or not, in its order; if the source brings a validation set of its own, one for each training sample.

Limits: samples that need computing are computed once for their class or length; a rank computes its piece one sample at
a time. A data set that has `targets`, as torchvision's have, is not read for classes. The numbers are held for the life
of the process, 8 bytes a sample.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Mapping, Sized
from dataclasses import dataclass, replace

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

from dslc.compiler.ir.program import DataStep, SamplerStep
from dslc.compiler.placement.shares import piece
from dslc.compiler.trace.structures import Structure
from dslc.runtime.data.samples import Checked, FetchedSamples, Padded, Part, Samples, SourceError, items
from dslc.runtime.data.splits import held_out, total
from dslc.runtime.process.random_numbers import preserve_generators
from dslc.runtime.process.user_code import load_function

CHUNK = 1024  # samples fetched at once


@dataclass(frozen=True, eq=False)
class SampleKeys:
    """Equal to itself alone, so that what follows from it can be kept by it."""

    values: Tensor


_FOUND: list[tuple[DataStep, SampleKeys]] = []


def numbers_of(step: DataStep) -> SampleKeys:
    """Returns the numbers that `prepare` found, whatever the shares of the data ranks are."""
    for known, numbers in _FOUND:
        if known is step:
            return numbers
    equal_share_step = _without_shares(step)
    for known, numbers in _FOUND:
        if _without_shares(known) == equal_share_step:
            _FOUND.append((step, numbers))
            return numbers
    raise AssertionError("`prepare` finds the numbers before anything asks for the order")


def _without_shares(step: DataStep) -> DataStep:
    return replace(step, shares=(), most_share=0)


@preserve_generators()  # samples of a user's code are made
def prepare(step: DataStep, samples: Samples, device: torch.device) -> None:
    """Finds the numbers of the training `samples`, if the job has a sampler. A collective if there are several ranks.

    Raises SourceError if they do not fit.
    """
    sampler = step.sampler
    if sampler is None or any(known == step for known, _ in _FOUND):
        return
    alone = not dist.is_initialized()
    start, stop = (0, len(samples)) if alone else piece(len(samples), dist.get_world_size(), dist.get_rank())
    values = torch.zeros(len(samples), dtype=torch.float64)
    values[start:stop] = _compute_numbers(step, sampler, samples, start, stop)
    if not alone:
        shared = values.to(device)
        dist.all_reduce(shared)
        values = shared.cpu()
    if sampler.kind == "balanced":
        _, classes, counts = values.long().unique(return_inverse=True, return_counts=True)
        values = counts.double().reciprocal()[classes]  # each class is drawn as often
    fault = fault_of(sampler, values, len(samples))
    if fault:
        raise SourceError(f"{sampler.line}: {fault}")
    _FOUND.append((step, SampleKeys(values)))


def set_numbers(step: DataStep, values: Tensor) -> None:
    """Gives an order its numbers, which `prepare` would find."""
    _FOUND.append((step, SampleKeys(values)))


def digest_of(step: DataStep) -> str:
    """Returns the BLAKE2b of the numbers that `prepare` found; "" without a sampler."""
    if step.sampler is None:
        return ""
    return hashlib.blake2b(numbers_of(step).values.numpy().tobytes(), digest_size=16).hexdigest()


def fault_of(sampler: SamplerStep, values: Tensor, samples: int) -> str:
    """Says why these numbers cannot be weights, or lengths; "" if they can."""
    what = "length" if sampler.kind == "by_length" else "weight"
    wrong = (~values.isfinite() | (values < 0)).nonzero()
    if len(wrong):
        at = int(wrong[0])
        return f"the {what} of sample {at} is {values[at].item():g}, and has to be a number of at least 0"
    if sampler.kind != "weighted":
        return ""
    some = int(values.count_nonzero())
    if not some:
        return "no sample has a weight above 0"
    drawn = min(sampler.samples, samples)
    if not sampler.replacement and some < drawn:
        return f"{drawn} samples cannot be drawn without replacement: {some} have a weight above 0"
    return ""


def _compute_numbers(step: DataStep, sampler: SamplerStep, samples: Samples, start: int, stop: int) -> Tensor:
    if sampler.kind == "balanced":
        return _map_samples(samples, start, stop, _class_of, _classes(samples))
    if sampler.kind == "by_length" and not sampler.file:
        length = load_function(sampler.python) if sampler.python is not None else _own_length
        return _map_samples(samples, start, stop, lambda sample: float(length(sample)))
    values = load_numbers(sampler)
    wanted = step.train_samples if step.split == "given" else total(step)
    if len(values) != wanted:
        raise SourceError(
            f"{sampler.line}: {len(values)} numbers are given, and the data has {wanted} samples: one for each, in the "
            "order of the source"
        )
    own = held_out(step)[0] if step.split == "random" else torch.arange(step.train_samples)
    return values[own[start:stop]]


def load_numbers(sampler: SamplerStep) -> Tensor:
    """Returns the numbers of a file, or of a function of weights: float64, shape (n,). Raises SourceError."""
    if sampler.file:
        found: object = np.load(sampler.file, allow_pickle=False)
    else:
        assert sampler.python is not None
        found = load_function(sampler.python)()
    try:
        values = torch.as_tensor(found).detach().cpu().double()
    except (TypeError, ValueError, RuntimeError) as error:
        raise SourceError(f"{sampler.line}: the numbers are no row of numbers: {error}") from error
    if values.dim() != 1:
        shape = " x ".join(map(str, values.shape)) or "none"
        raise SourceError(f"{sampler.line}: one number for each sample is needed, and these are of shape {shape}")
    return values


def _map_samples(
    samples: Samples, start: int, stop: int, number: Callable[[object], float], known: Tensor | None = None
) -> Tensor:
    if known is not None:
        return known[start:stop].double()
    found = []
    for first in range(start, stop, CHUNK):
        found += [number(sample) for sample in items(samples, torch.arange(first, min(stop, first + CHUNK)))]
    return torch.tensor(found, dtype=torch.float64)


def _classes(samples: Samples) -> Tensor | None:
    """Returns the class of each sample where the samples or a user's data set have `targets`; else None."""
    if isinstance(samples, Part):
        whole = _classes(samples.samples)
        return None if whole is None else whole[samples.inner(torch.arange(len(samples)))]
    if isinstance(samples, Checked | Padded):
        return _classes(samples.samples)
    if not isinstance(samples, FetchedSamples):
        return getattr(samples, "targets", None)
    try:
        told = torch.as_tensor(getattr(samples.dataset, "targets", None))
    except (TypeError, ValueError, RuntimeError):
        return None
    if told.shape != (len(samples),) or told.is_floating_point() or not len(told):
        return None
    (first,) = items(samples, torch.tensor([0]))
    return told if _class_of(first) == int(told[0]) else None


def _class_of(sample: Structure) -> float:
    return float(torch.as_tensor(sample[1]))


def first_shape(sample: Structure) -> tuple[int, ...]:
    """Returns the shape of the first tensor of a sample's input; of a list or a text its length, else ()."""
    part = sample[0] if isinstance(sample, tuple | list) else sample
    while isinstance(part, Mapping) and part:
        part = next(iter(part.values()))
    shape = getattr(part, "shape", None)
    if shape is None:
        return (len(part),) if isinstance(part, Sized) else ()
    return tuple(shape)


def _own_length(sample: Structure) -> float:
    return float(next(iter(first_shape(sample)), 1))
