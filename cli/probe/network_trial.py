"""Tries a user's network on real samples, in the child that has traced it (runtime/step/network_trial.py).

A trial is bounded: a network that is large, or that takes long, is traced and not tried. Faults that only a trial shows
are then not reported.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from dataclasses import replace
from math import prod
from typing import TYPE_CHECKING

from dslc.compiler.ir.facts import SourceFacts
from dslc.compiler.ir.module_facts import ModelFacts
from dslc.compiler.ir.network_facts import NetworkFacts
from dslc.dsl.language.calls import Datasets, Images, NetworkLoss, Parquet, PythonSource, parts_of
from dslc.probe.child import first_line, where_in_the_users_code
from dslc.probe.sample_outputs import analysis_on_one_rank, open_samples
from dslc.probe.trial import Trial
from dslc.runtime.process.user_code import search_first

if TYPE_CHECKING:
    import torch
    from torch import nn

    from dslc.compiler.trace.structures import UserValue

NUMBERS = 1 << 25  # of the parameters of a network that is tried, at most
FLOPS = 31e9  # of all passes of a trial, at most: about a second on one core
MEMORY = 1 << 30  # bytes that the forward pass of a batch keeps, at most
_FORWARD_PASSES = 48  # of one sample


def modules_in_evaluation(model: nn.Module) -> tuple[str, ...]:
    """Returns the outermost modules that a constructor has put into evaluation mode, and whose numbers depend on it;
    none if the whole network is in it.
    """
    from dslc.compiler.trace.private_torch import AnyBatchNorm, AnyDropout

    if not model.training:
        return ()
    kinds = (AnyBatchNorm, AnyDropout)
    return tuple(
        name
        for name, module in model.named_modules()
        if not module.training and isinstance(module, kinds) and getattr(module, "p", True)
    )


def can_try(facts: ModelFacts) -> bool:
    """True if a network is small enough to be tried."""
    numbers = sum(prod(shape) for _, shape, _ in facts.parameters)
    flops = sum(layer.forward_flops for layer in facts.layers)
    memory = sum(layer.float32.saved for layer in facts.layers)
    return numbers <= NUMBERS and flops * _FORWARD_PASSES <= FLOPS and 3 * memory <= MEMORY


def undone(model: nn.Module, names: Sequence[str]) -> tuple[str, ...]:
    """Returns the modules among `names` that are in training mode after `model.train()`."""
    return tuple(name for name in names if model.get_submodule(name).training)


class RealBatch:
    """A batch of a job's source, input and target, once `load_batch` was called."""

    def __init__(self, trial: Trial) -> None:
        self._trial = trial
        self.batch: tuple[UserValue, UserValue] | None = None

    def load_batch(self) -> None:
        if self._trial.source.input is not None or self._trial.source.structures is not None:
            self.batch = real_batch(self._trial)


def try_network(
    trial: Trial,
    construct: Callable[[], nn.Module],
    facts: ModelFacts,
    batch: tuple[UserValue, UserValue] | None,
    restored_modules: tuple[str, ...],
) -> NetworkFacts:
    """Returns the facts of a traced network with the facts of a trial on `batch`, or with the reason why the trial
    failed.
    """
    from dslc.runtime.step.network_trial import NetworkTrial

    network_facts = replace(facts.network or NetworkFacts(), restored=restored_modules)
    if not can_try(facts) or batch is None:
        return network_facts
    loss = trial.steps.loss if isinstance(trial.job.model.loss, NetworkLoss) else None
    try:
        return NetworkTrial(construct, batch, loss, bool(facts.looks)).result(network_facts)
    except Exception as error:  # any kind: the user's code runs, and a rule reports it
        line = where_in_the_users_code(error)
        return replace(network_facts, failure=first_line(error) + (f" ({line})" if line else ""))


def real_batch(trial: Trial) -> tuple[UserValue, UserValue] | None:
    """Returns a batch of real samples, input and target: the samples that tracing a user's source wrote, or samples of
    a source of the library. A source that takes long to open gives drawn samples. None without samples.
    """
    import torch

    from dslc.compiler.trace.structures import map_tensors
    from dslc.runtime.data.samples import as_seen
    from dslc.runtime.step.network_trial import ROWS

    parts, source = parts_of(trial.job.data.source), trial.source
    if os.path.exists(trial.files.samples):
        for call in parts:
            if isinstance(call, PythonSource):
                search_first(trial.function(call).folder)  # for objects of the user's own classes
        batch: tuple[UserValue, UserValue] = torch.load(trial.files.samples, weights_only=False)
        if source.structures is not None:
            return batch
        return map_tensors(as_seen, batch[0]), map_tensors(as_seen, batch[1])
    if any(isinstance(part, PythonSource) for part in parts):
        return None
    if len(parts) > 1 or isinstance(parts[0], Parquet | Datasets | Images):
        return _random_samples(source, ROWS)
    analysis = analysis_on_one_rank(trial.job, trial.facts)
    if analysis is None:
        return _random_samples(source, ROWS)
    samples = open_samples(analysis)
    return samples.batch(torch.arange(min(ROWS, len(samples))))


def _random_samples(source: SourceFacts, samples: int) -> tuple[torch.Tensor, None] | None:
    """Returns samples that are drawn, of the shapes of the source's."""
    import torch

    if source.input is None:
        return None
    generator = torch.Generator().manual_seed(0)
    shape = (samples, *source.input.shape)
    if source.input.dtype == "int64":
        return torch.randint(source.vocab or 1, shape, generator=generator), None
    return torch.randn(shape, generator=generator), None
