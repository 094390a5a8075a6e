"""Outputs of the network for a few samples, with their targets, by which a loss and metrics are tried.

Model: a child opens the data and makes the network with its initial values, as a training on one rank does. It writes
the outputs of its training mode, for a loss, and of its evaluation mode, for metrics. Where that cannot be, outputs are
invented: numbers around zero, and the same as probabilities and as their logarithms, as networks that end in an
activation give them. Whoever fails on all of these may still be right.

Limits: there are none of a network with more than `PARAMETERS` or `FLOPS`, nor where the job has faults that keep it
from being analysed. `model.weights` is not read: outputs of other values have the same form.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

from dslc.compiler.ir.facts import Facts
from dslc.compiler.rules.analyse import analyse
from dslc.compiler.rules.analysis import Analysis
from dslc.dsl.diagnostics import Report
from dslc.dsl.language.blocks import MemorySpec, ParallelismSpec
from dslc.dsl.language.job import JobSpec
from dslc.probe.child import import_torch_for_children, in_child

COUNTS = (3, 4)  # samples of the batches
PARAMETERS = 1 << 28  # of a network that is run for its outputs, at most
FLOPS = 1e11  # of its forward passes, at most: some seconds on one core

Pair = tuple[Any, Any]  # output and target
Shapes = tuple[tuple[int, ...], tuple[int, ...], str]  # of a sample's output and target; the target's dtype


def write_outputs(job: JobSpec, facts: Facts, file: str) -> str:
    """Writes the outputs to `file`, for `read_outputs`. Returns the reason if there are none."""
    analysis = analyse(_on_one_rank(job), facts, Report(), limits=False)
    if analysis is None or analysis.model is None or analysis.workload.visited is None or not analysis.workload.train:
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


def _on_one_rank(job: JobSpec) -> JobSpec:
    return replace(
        job,
        devices=replace(job.devices, nodes=1, cpus=1, gpus=None),
        parallelism=ParallelismSpec(),
        memory=MemorySpec(),
        train=replace(job.train, compile=False),
        expect=(),
    )


def _write(analysis: Analysis, file: str) -> None:
    import torch

    from dslc.compiler.graph.constants import data_step, model_step
    from dslc.compiler.trace.structures import call, flatten, unflatten
    from dslc.runtime.data.samples import batch_aside
    from dslc.runtime.data.sources.open_sources import open_source
    from dslc.runtime.model.meta_model import build_model

    def detached(value: Any) -> Any:
        leaves, form = flatten(value)
        return unflatten([leaf.detach() if isinstance(leaf, torch.Tensor) else leaf for leaf in leaves], form)

    job = analysis.job
    torch.set_num_threads(1)
    torch.manual_seed(job.train.seed)
    data = data_step(analysis, job.folder)
    samples = open_source(data).train
    spread = torch.arange(sum(COUNTS)) * len(samples) // sum(COUNTS)
    pairs = [batch_aside(samples, part) for part in spread.split(list(COUNTS))]
    model = build_model(replace(model_step(analysis, job.folder), weights=None), "cpu")
    written: dict[str, list[Pair]] = {}
    for mode in ("train", "eval"):
        model.train(mode == "train")
        with torch.set_grad_enabled(mode == "train"):
            outputs = [call(model, model.forward, input) if data.structured else model(input) for input, _ in pairs]
        written[mode] = [(detached(output), target) for output, (_, target) in zip(outputs, pairs, strict=True)]
    torch.save(written, file)


def inventions(given: Shapes | str) -> Iterator[list[Pair]]:
    """Yields batches of each kind: of these shapes, or with the outputs of a file; nothing for an empty name."""
    import torch
    import torch.nn.functional as F

    from dslc.compiler.trace.structures import map_tensors

    if not given:
        return
    batches = torch.load(given, weights_only=False) if isinstance(given, str) else list(_random_outputs(*given))
    for activation in (lambda tensor: tensor, torch.sigmoid, F.logsigmoid):

        def changed(tensor: torch.Tensor, activation: Callable[..., Any] = activation) -> Any:
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
    if any(not torch.equal(each, each[:1].expand_as(each)) for each in tensors(output) if each.dim()):
        return None
    random = torch.Generator().manual_seed(0)

    def randomize(tensor: torch.Tensor) -> torch.Tensor:
        return torch.randn(tensor.shape, generator=random) if tensor.dtype.is_floating_point else tensor

    return map_tensors(randomize, output), target
