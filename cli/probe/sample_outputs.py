"""Outputs of the network for a few samples, with their targets, by which a loss and metrics are tried.

Model: a child opens the data and makes the network with its initial values, as a training on one rank does. It writes
the outputs of its training mode, for a loss, and of its evaluation mode, for metrics. Where that cannot be, outputs are
invented: numbers around zero, and the same as probabilities and as their logarithms, as networks that end in an
activation give them. Whoever fails on all of these may still be right.

Limits: there are none of a network with more than `PARAMETERS` or `FLOPS`, nor where the job has faults that keep it
from being analysed. `model.weights` is not read: outputs of other values have the same form.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, TypeVar

from dslc.compiler.facts.sources import context_of
from dslc.compiler.graph.constants import data_step, model_step
from dslc.compiler.ir.facts import Facts, SourceFacts
from dslc.compiler.ir.tensors import TensorFact
from dslc.compiler.model.job_steps import locate_paths
from dslc.compiler.model.model import build
from dslc.compiler.model.opaque import opaque
from dslc.compiler.rules.analyse import analyse
from dslc.compiler.rules.analysis import Analysis
from dslc.dsl.diagnostics import Report
from dslc.dsl.language.blocks import MemorySpec, ParallelismSpec
from dslc.dsl.language.calls import PythonLoss
from dslc.dsl.language.job import JobSpec
from dslc.dsl.language.metrics import PythonMetric
from dslc.probe.child import import_torch_for_children, in_child
from dslc.probe.unchecked_parts import can_be_tried

if TYPE_CHECKING:
    import torch

    from dslc.compiler.trace.structures import UserValue
    from dslc.runtime.data.samples import Samples

COUNTS = (3, 4)  # samples of the batches
PARAMETERS = 1 << 28  # of a network that is run for its outputs, at most
FLOPS = 1e11  # of its forward passes, at most: some seconds on one core

T = TypeVar("T")
Activation = Callable[["torch.Tensor"], "torch.Tensor"]
Pair = tuple["UserValue", "UserValue"]  # output and target
Shapes = tuple[tuple[int, ...], tuple[int, ...], str]  # of a sample's output and target; the target's dtype


@dataclass(frozen=True)
class TrialBatches:
    """The outputs and targets that a user's loss and metrics are tried with: of real samples in `file`
    (`write_outputs`). Where there are none, for the reason `absent`, numbers are `invented`: the shapes of a
    sample's output and target and the target's dtype, or a file that tracing wrote. A function may rightly refuse
    those. Without either nothing is tried.
    """

    file: str = ""
    invented: tuple[tuple[int, ...], tuple[int, ...], str] | str = ""
    absent: str = ""
    output: TensorFact | None = None  # of one sample
    structured: bool = False  # true if the output or the target is no tensor

    def first_accepted(self, mode: str, attempt: Callable[[list[Pair]], T]) -> T | None:
        """Returns the result of `attempt` on batches of real samples; else on the first of several inventions that it
        does not fail on, or raises what it raises on the first. Returns None if there are no batches.
        """
        choices = [read_outputs(self.file, mode)] if self.file else inventions(self.invented)
        failure: Exception | None = None
        for batches in choices:
            try:
                return attempt(batches)
            except Exception as error:  # any kind: the user's code runs
                if self.file:
                    raise
                failure = failure or error
        if failure is not None:
            raise failure
        return None


def trial_batches(job: JobSpec, facts: Facts, file: str, random_file: str) -> TrialBatches:
    """Returns the trial of a job whose loss or metrics are the user's own; outputs are written to `file`.
    `random_file` is the file that tracing wrote, if the network's output is a structure.
    """
    source, model = facts.source or SourceFacts(), facts.model
    user_calls = [job.model.loss, *job.evaluate.metrics]
    if job.train.step is not None or not any(isinstance(call, PythonLoss | PythonMetric) for call in user_calls):
        return TrialBatches()
    graph = Report().collect(opaque(model, job.model, source) if model else build(job.model, source, context_of(job)))
    is_structured = source.structures is not None or (model is not None and model.structured)
    if graph is None or not (is_structured or can_be_tried(graph.output, source.target)):
        return TrialBatches()
    absent = write_outputs(job, facts, file)
    if not absent:
        return TrialBatches(file=file, output=graph.output, structured=is_structured)
    if is_structured:
        numbers = random_file if os.path.exists(random_file) else ""
        return TrialBatches(invented=numbers, absent=absent, output=graph.output, structured=True)
    assert source.target is not None
    shapes = graph.output.shape, source.target.shape, source.target.dtype
    return TrialBatches(invented=shapes, absent=absent, output=graph.output)


def write_outputs(job: JobSpec, facts: Facts, file: str) -> str:
    """Writes the outputs to `file`, for `read_outputs`. Returns the reason if there are none."""
    analysis = analysis_on_one_rank(job, facts)
    if analysis is None or analysis.model is None:
        return "the job has other faults"
    # Each sample goes through the network once in either mode.
    flops = 2 * sum(COUNTS) * sum(layer.forward_flops for layer in analysis.model.layers)
    if flops > FLOPS or analysis.model.parameters > PARAMETERS:
        return "the network is too large to be run beforehand"
    import_torch_for_children()
    answer = in_child(lambda: _write(analysis, file))
    return "" if "made" in answer else f"the network could not be run on samples of the data ({answer['error']})"


def read_outputs(file: str, mode: str) -> list[Pair]:
    """Returns the outputs of one mode, `train` or `eval`, with their targets."""
    import torch

    from dslc.compiler.trace.structures import tensors

    pairs: list[Pair] = torch.load(file, weights_only=False)[mode]  # objects of the user's own classes, of this check
    for output, _ in pairs if mode == "train" else ():
        for tensor in tensors(output):
            tensor.requires_grad_(tensor.is_floating_point() or tensor.is_complex())
    return pairs


def analysis_on_one_rank(job: JobSpec, facts: Facts) -> Analysis | None:
    """Returns the analysis of a job on one rank, whatever its own ranks are; None if its samples stay unknown."""
    one_rank = replace(
        job,
        devices=replace(job.devices, nodes=1, cpus=1, gpus=None),
        parallelism=ParallelismSpec(),
        memory=MemorySpec(),
        train=replace(job.train, compile=False),
        expect=(),
    )
    analysis = Report().collect(analyse(one_rank, facts, limits=False))
    fine = analysis is not None and analysis.workload.visited is not None and analysis.workload.train
    return analysis if fine else None


def open_samples(analysis: Analysis) -> Samples:
    """Returns the samples that a job trains on."""
    from dslc.runtime.data.sources.open_sources import open_source

    return open_source(locate_paths(data_step(analysis), analysis.job.folder)).train


def _write(analysis: Analysis, file: str) -> None:
    import torch

    from dslc.compiler.trace.structures import call, flatten, save, unflatten
    from dslc.runtime.data.samples import batch_aside
    from dslc.runtime.model.meta_model import build_model

    def detached(value: object) -> UserValue:
        leaves, form = flatten(value)
        return unflatten([leaf.detach() if isinstance(leaf, torch.Tensor) else leaf for leaf in leaves], form)

    job = analysis.job
    torch.set_num_threads(1)
    torch.manual_seed(job.train.seed)
    samples = open_samples(analysis)
    spread = torch.arange(sum(COUNTS)) * len(samples) // sum(COUNTS)
    pairs = [batch_aside(samples, part) for part in spread.split(list(COUNTS))]
    step = replace(locate_paths(model_step(analysis), job.folder), weights=None, quantized=())
    model = build_model(step, "cpu")
    is_structured = analysis.source.structures is not None
    pairs_by_mode: dict[str, list[Pair]] = {}
    for mode in ("train", "eval"):
        model.train(mode == "train")
        with torch.set_grad_enabled(mode == "train"):
            outputs = [call(model, model.forward, input) if is_structured else model(input) for input, _ in pairs]
        pairs_by_mode[mode] = [(detached(output), target) for output, (_, target) in zip(outputs, pairs, strict=True)]
    save(pairs_by_mode, file)


def inventions(random_source: Shapes | str) -> Iterator[list[Pair]]:
    """Yields batches of each kind: of these shapes, or with the outputs of a file; nothing for an empty name."""
    import torch
    import torch.nn.functional as F

    from dslc.compiler.trace.structures import map_tensors

    if not random_source:
        return
    batches = (
        torch.load(random_source, weights_only=False)
        if isinstance(random_source, str)
        else list(_random_outputs(*random_source))
    )
    activations: tuple[Activation, ...] = (lambda tensor: tensor, torch.sigmoid, F.logsigmoid)
    for activation in activations:

        def changed(tensor: torch.Tensor, activation: Activation = activation) -> torch.Tensor:
            return activation(tensor) if tensor.dtype.is_floating_point else tensor

        yield [(map_tensors(changed, output), target) for output, target in batches]


def _random_outputs(output: tuple[int, ...], target: tuple[int, ...], dtype: str) -> Iterator[Pair]:
    """Yields random outputs, with targets that are yes or no, or the first two classes."""
    import torch

    random = torch.Generator().manual_seed(0)
    for count in COUNTS:
        scores = torch.randn((count, *output), generator=random)
        yield scores, torch.randint(2, (count, *target), generator=random).to(getattr(torch, dtype))


def spread(pair: Pair) -> Pair | None:
    """Returns a pair with random outputs if the outputs are alike for all samples, as when the last layer begins at
    zero. None if the outputs differ.
    """
    import torch

    from dslc.compiler.trace.structures import map_tensors, tensors

    output, target = pair
    if any(not torch.equal(tensor, tensor[:1].expand_as(tensor)) for tensor in tensors(output) if tensor.dim()):
        return None
    random = torch.Generator().manual_seed(0)

    def randomize(tensor: torch.Tensor) -> torch.Tensor:
        return torch.randn(tensor.shape, generator=random) if tensor.dtype.is_floating_point else tensor

    return map_tensors(randomize, output), target
