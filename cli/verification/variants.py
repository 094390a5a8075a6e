"""Other forms of a job that `dslc verify` trains: in one process, and narrow.

Model: blocks of the resolved job are replaced; the user's own stay in place, so that messages point there.
`one_process` keeps the meaning of a training and removes the way it is executed. `shrink_job` keeps the way it is
executed, the axes and the sharding, and makes everything smaller.

Limits: only library networks can be made narrow. A data axis is cut to `RANKS`. If tokens or images are not on this
machine, or a vocabulary is too large to keep, synthetic samples of the same form replace them.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from math import gcd
from typing import Any

from dslc.compiler.facts.sources import context_of, source_facts
from dslc.compiler.ir.facts import SourceFacts
from dslc.compiler.placement.axes import AXES
from dslc.compiler.placement.layout import Layout
from dslc.dsl.language import calls as c
from dslc.dsl.language import layers as n
from dslc.dsl.language.blocks import CheckpointSpec, EvaluateSpec, LaunchSpec, MemorySpec, ParallelismSpec
from dslc.dsl.language.job import JobSpec
from dslc.dsl.language.registry import Call

RANKS = 4  # data ranks of a narrow copy
SAMPLES = 8  # samples of a micro-batch: fewer are too few for batch statistics in float32
WIDTH, LAYERS, CONTEXT, VOCAB, SIDE = 64, 4, 64, 1024, 64  # upper limits of a narrow copy
EXPERTS = 8  # their widths are multiples of it


class CannotShrink(Exception):
    """A job without a narrow copy; the text says why."""


def observed(job: JobSpec) -> JobSpec:
    """Returns the job without what a few observed steps do not need: checkpoints, promises, most evaluations."""
    return replace(
        job,
        checkpoint=CheckpointSpec(asynchronous=job.checkpoint.asynchronous),
        train=replace(job.train, max_time=None, on_spike=None),
        evaluate=EvaluateSpec(metrics=job.evaluate.metrics),
        expect=(),
        sweep={},
    )


def one_process(job: JobSpec) -> JobSpec:
    """Returns the same training in one process: the whole batch at once, nothing sharded, recomputed, offloaded."""
    gpus = job.devices.gpus
    gpu = None if gpus is None else gpus[:1] if isinstance(gpus, tuple) else 1
    precision = job.train.precision
    if isinstance(precision, c.Fp8):
        precision = replace(precision, all_gather=False)
    return replace(
        observed(job),
        devices=replace(job.devices, nodes=1, gpus=gpu, cpus=1 if gpu is None else job.devices.cpus),
        parallelism=ParallelismSpec(),
        memory=MemorySpec(),
        data=replace(job.data, workers=0),
        train=replace(job.train, precision=precision, compile=False, max_time=None, on_spike=None),
        launch=LaunchSpec(timeout=job.launch.timeout),
    )


def shrink_job(job: JobSpec, layout: Layout, gpus_here: int) -> tuple[JobSpec, tuple[str, ...]]:
    """Returns a narrow copy of the job for this machine, and what is smaller, in words. Raises CannotShrink."""
    changes: list[str] = []

    def smaller(what: str, before: object, after: object) -> None:
        if before != after:
            changes.append(f"{what} {before} -> {after}")

    sizes = dict(layout.sizes)
    sizes["data"] = min(sizes["data"], RANKS)
    ranks = 1
    for axis in AXES:
        ranks *= sizes[axis]
    smaller("ranks", layout.world_size, ranks)
    on_gpus = job.devices.gpus is not None and ranks <= gpus_here
    if job.devices.gpus is not None and not on_gpus:
        changes.append("GPUs -> CPUs")
    kind = job.devices.kind if on_gpus else None
    backend = job.devices.backend if on_gpus or job.devices.backend != "nccl" else None
    replicas = job.parallelism.replicas
    kept = next(count for count in range(min(replicas, sizes["data"]), 0, -1) if sizes["data"] % count == 0)
    smaller("replicas", replicas, kept)
    expert = gcd(job.parallelism.expert, sizes["data"] // kept)
    smaller("expert", job.parallelism.expert, expert)
    shares = job.parallelism.data_shares
    if isinstance(shares, tuple):
        shares = shares[: sizes["data"]]
    batch = min(job.data.batch, SAMPLES * sizes["data"] * layout.microbatches)
    smaller("batch", job.data.batch, batch)
    network, source = _network(job, layout, smaller), _source(job, smaller)
    if job.model.start is not None and job.model.start.quantize is not None:
        changes.append(f"{job.model.start.quantize} -> fp32")  # without a file nothing is quantized
    return (
        replace(
            job,
            model=replace(job.model, network=network, weights=None),
            data=replace(job.data, batch=batch, source=source),
            devices=replace(
                job.devices,
                nodes=1,
                backend=backend,
                gpus=ranks if on_gpus else None,
                cpus=None if on_gpus else ranks,
                kind=kind,
            ),
            parallelism=replace(
                job.parallelism,
                data=sizes["data"],
                replicas=kept,
                expert=expert,
                data_shares=shares,
                sequence=layout.sequence,
            ),
            memory=replace(job.memory, limit=None),
            launch=LaunchSpec(timeout=job.launch.timeout),
            expect=(),
        ),
        tuple(changes),
    )


def _network(job: JobSpec, layout: Layout, smaller: Callable[[str, object, object], None]) -> Call:
    """Returns a narrow network, with at least one part for each rank of the tensor axis and for each stage."""
    network, tensor = job.model.network, layout.sizes["tensor"]
    changes: dict[str, Any]
    match network:
        case n.GPT() | n.ViT():
            heads = min(network.heads, max(1, 4 // tensor) * tensor)
            each = max(2, min(network.width, WIDTH) // heads // 2 * 2)
            layers = max(LAYERS, layout.sizes["pipeline"] * layout.virtual_stages)
            changes = {"heads": heads, "width": heads * each, "layers": min(network.layers, layers)}
            if isinstance(network, n.GPT):
                changes["context"] = min(network.context, CONTEXT)
                if network.vocab is not None:
                    changes["vocab"] = min(network.vocab, VOCAB)
        case n.Llama():
            grouped = network.kv_heads is not None and network.kv_heads < network.heads
            heads = 2 * tensor if grouped else max(1, 4 // tensor) * tensor
            each = max(2, min(network.width, WIDTH) // heads // 2 * 2)
            layers = max(LAYERS, layout.sizes["pipeline"] * layout.virtual_stages)
            changes = {
                "heads": heads,
                "width": heads * each,
                "layers": min(network.layers, layers),
                "context": min(network.context, CONTEXT),
            }
            if network.hidden is not None:
                changes["hidden"] = max(tensor, min(network.hidden, 2 * WIDTH) // tensor * tensor)
            if network.experts is not None:
                changes["width"] = heads * -(-each // EXPERTS) * EXPERTS
                changes["experts"] = _narrow_experts(network.experts, tensor)
            if network.kv_heads is not None:
                changes["kv_heads"] = tensor if grouped else heads
            if network.head_dim is not None:
                changes["head_dim"] = each
            if network.vocab is not None:
                changes["vocab"] = min(network.vocab, VOCAB)
        case n.MLP():
            changes = {"widths": tuple(min(width, WIDTH) for width in network.widths)}
        case n.ConvNet():
            changes = {"channels": tuple(min(channels, WIDTH // 4) for channels in network.channels)}
        case n.ResNet():
            changes = {"depth": min(network.depth, 50) if network.depth >= 50 else 18, "width": min(network.width, 8)}
        case _:
            what = "a list of layers" if isinstance(network, tuple) else f"`{network.word}(…)`"
            raise CannotShrink(
                f"{what} cannot be made narrow: only the library's networks can (mlp, convnet, resnet, vit, gpt, "
                "llama). Give its sizes as params, and verify it with smaller ones: `--set width=64`"
            )
    for name, value in changes.items():
        smaller(name, getattr(network, name), value)
    return replace(network, **changes)


def _source(job: JobSpec, smaller: Callable[[str, object, object], None]) -> Call:
    """Returns the job's source if it is here and fits a narrow network, else synthetic samples of its form."""
    source, network = job.data.source, job.model.network
    if isinstance(network, n.GPT | n.Llama):
        told = (getattr(each, "vocab", None) for each in c.parts_of(source))
        vocab = network.vocab if network.vocab is not None else next((each for each in told if each), None)
        if isinstance(source, c.Stdlib | c.Text) and not source_facts(source, context_of(job)).missing:
            return replace(source, context=None)
        made = c.Synthetic(samples=4096, vocab=min(vocab or VOCAB, VOCAB))
        smaller("source", source.word, "synthetic tokens")
        return made
    facts = source_facts(source, context_of(job))
    if not facts.missing and not _large(facts):
        return source
    shape = facts.input.shape if facts.input is not None else (3, SIDE, SIDE)
    smaller("source", source.word, "synthetic samples")
    return c.Synthetic(samples=1024, shape=_small(shape), classes=facts.classes or 10)


def _large(facts: SourceFacts) -> bool:
    return facts.input is not None and _small(facts.input.shape) != tuple(facts.input.shape)


def _small(shape: Sequence[int]) -> tuple[int, ...]:
    return tuple(min(size, SIDE) for size in shape) if len(shape) == 3 else tuple(shape)


def _narrow_experts(experts: Any, tensor: int) -> Call:
    """Returns a mixture of as many experts with a smaller width inside, which `tensor` ranks can share."""
    step = EXPERTS * tensor
    narrow: Call = replace(experts, hidden=max(step, min(experts.hidden, WIDTH) // step * step))
    return narrow
