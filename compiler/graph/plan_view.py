"""The view of a plan, computed from its graph: the records that a rank's program is made of, in a reader's words.

Contract: a number comes from the record that the ranks receive, if there is one. So a plan file shows what it runs,
whoever has written it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from math import prod

from dslc.compiler.graph.plan_graph import PlanGraph
from dslc.compiler.graph.proofs.view import experts_with_balance_loss, experts_with_capacity
from dslc.compiler.graph.stored import plan_hash
from dslc.compiler.ir import program as p
from dslc.compiler.ir import records
from dslc.compiler.ir.actions import ForwardAhead
from dslc.compiler.ir.number_text import byte_text
from dslc.compiler.ir.plan import AxisNode, PlanView, RankNode, StageNode, TopologyNode
from dslc.compiler.ir.tensor_styles import EXPERT_STYLES
from dslc.compiler.ir.tensors import DTYPE_BYTES
from dslc.compiler.placement.axes import AXES, crosses_nodes
from dslc.compiler.placement.sharding import DTYPES
from dslc.compiler.placement.shares import largest
from dslc.dsl.language.augmentations import NORMALIZED
from dslc.dsl.language.optimizers import Optimizer
from dslc.dsl.language.registry import CALLS
from dslc.dsl.words import plural, shorten_list

MOST_MATRICES = 4  # that a view names
PRECISIONS = {dtype: word for word, dtype in DTYPES.items() if word != "fp8"}


def plan_view(plan: PlanGraph) -> PlanView:
    """Returns the view of a plan that all passes have built."""
    network, partial = plan.find(records.Network), plan.find(records.PartialPlan)
    full, last = _shares_of(plan, "full"), _shares_of(plan, "last")
    tensor = plan.find(p.TensorParallelStep)
    return PlanView(
        job=plan.one(records.Job).name,
        hash=plan_hash(plan),
        topology=_topology(plan),
        axes=_axes(plan),
        shards=partial.shards if partial else _shards(plan),
        parameters=network.parameters if network else None,
        trained=network.trained if network else None,
        layers=network.layers if network else (),
        stages=_stages(plan, network) if network else (),
        data=replace(partial.data if partial else _data(plan), shares=full, last_shares=last),
        schedule=plan.find(records.Schedule),
        training=partial.training if partial else _training(plan),
        ranks=_ranks(plan),
        step=plan.find(records.Estimate),
        experts=plan.find(p.ExpertParallelStep),
        sequence=tensor is not None and tensor.sequence,
    )


def _topology(plan: PlanGraph) -> TopologyNode:
    devices, machines = plan.one(records.Devices), plan.one(records.Machines)
    return TopologyNode(
        nodes=machines.count,
        node_counts=machines.counts,
        processes=devices.processes,
        device=devices.kind,
        kind=devices.model,
        memory=devices.capacity,
        limit=devices.limit,
        backend=devices.backend,
        threads=devices.threads,
    )


def _axes(plan: PlanGraph) -> tuple[AxisNode, ...]:
    devices, machines = plan.one(records.Devices), plan.one(records.Machines)
    return tuple(
        AxisNode(
            name=axis.name,
            size=axis.size,
            stride=axis.stride,
            between_nodes=crosses_nodes(axis.size, axis.stride, machines.count, devices.processes),
        )
        for axis in sorted(devices.axes, key=lambda axis: AXES.index(axis.name))
    )


def _shards(plan: PlanGraph) -> int:
    step, data = plan.one(p.GradientStep), plan.axis("data").size
    if step.kind == "zero1":
        return data
    return data * plan.axis("context").size // step.replicas if step.kind == "fsdp" else 1


def _stages(plan: PlanGraph, network: records.Network) -> tuple[StageNode, ...]:
    placed, microbatch = plan.related(records.PlacementEdge), _microbatch(plan)
    microbatch *= next((loss.rows for _, loss in plan.of_kind(p.LossStep)), 1)
    stages = []
    for name, stage in plan.of_kind(records.Stage):
        layers = network.layers[stage.first : stage.last + 1]
        (process,) = placed.successors(name)
        stages.append(
            StageNode(
                index=stage.index,
                pipeline=plan.node_record(process, records.Process).pipeline,
                first=stage.first,
                last=stage.last,
                parameters=sum(layer.parameters for layer in layers),
                flops=sum(layer.flops for layer in layers),
                kept=stage.kept,
                output_bytes=microbatch * sum(prod(shape) * DTYPE_BYTES[dtype] for shape, dtype in stage.outputs),
            )
        )
    return tuple(stages)


def _ranks(plan: PlanGraph) -> tuple[RankNode, ...]:
    placed, stage_of = plan.related(records.PlacementEdge), dict(plan.of_kind(records.Stage))
    return tuple(
        RankNode(
            pipeline=process.pipeline,
            first=process.first,
            last=process.last,
            stages=tuple(sorted(stage_of[other].index for other in placed.predecessors(name) if other in stage_of)),
            memory=process.memory,
            traffic=process.traffic,
            flops=process.flops,
            share_memory=process.share_memory,
            even_memory=process.even_memory,
        )
        for name, process in plan.of_kind(records.Process)
        if process.memory is not None
    )


# ------------------------------------------------------------------------------------------------------- the samples


def _data(plan: PlanGraph) -> records.DataNode:
    step, batches, training = plan.one(p.DataStep), plan.one(records.Batches), plan.one(p.Training)
    reference = next((loss.reference for _, loss in plan.of_kind(p.LossStep)), None)
    has_passes_ahead = any(plan.of_kind(ForwardAhead))
    return records.DataNode(
        source=step.source,
        pictures=tuple(change for part in step.parts or (step,) for change in picture_changes(part.pictures)),
        parts=tuple(
            records.PartNode(
                source=part.source, train=part.train_samples, visited=count, validation=part.validation_samples
            )
            for part, count in zip(step.parts, step.counts, strict=True)
        ),
        train=step.train_samples,
        validation=step.validation_samples,
        validation_sets=step.validation_sets,
        split=step.split,
        documents=step.documents,
        reference=reference.path or reference.kind if reference is not None else "",
        visited=step.visited,
        order=order_text(len(step.parts), step.sampler, step.train_samples, shuffle=step.shuffle),
        shuffle=step.shuffle,
        batch=step.batch,
        shares=(),
        last=step.last,
        last_shares=(),
        most_share=batches.most_share,
        microbatch=_microbatch(plan),
        microbatches=batches.microbatches,
        ahead=has_passes_ahead,
        counted_ahead=has_passes_ahead and not any(loss.together for _, loss in plan.of_kind(p.LossStep)),
        steps_per_epoch=training.steps_per_epoch,
        steps=training.steps,
        stream=step.stream,
        test=step.test_samples,
    )


def _microbatch(plan: PlanGraph) -> int:
    """Returns the most samples of a micro-batch."""
    shares = (share.samples for _, share in plan.of_kind(records.Share) if share.batch == "full")
    batches = plan.one(records.Batches)
    return largest(batches.most_share or max(shares, default=0), batches.microbatches)


def order_text(sources: int, sampler: p.SamplerStep | None, samples: int | None, *, shuffle: bool) -> str:
    """Returns `shuffled each epoch` and the like, to follow the number of `samples`; `sources` counts the sources of a
    mixture, 0 without one.
    """
    if sources:
        return f"{plural(sources, 'source')} {'shuffled together' if shuffle else 'in turn'}"
    if sampler is None:
        return "shuffled each epoch" if shuffle else "in order"
    drawn = "as many drawn" if sampler.samples in (samples, 0) else f"{sampler.samples:,} drawn"
    match sampler.kind:
        case "weighted":
            return f"{drawn} each epoch by weight, {'with' if sampler.replacement else 'without'} replacement"
        case "balanced":
            return f"{drawn} each epoch, each class as often"
        case "by_length":
            return f"shuffled each epoch, {plural(sampler.window, 'batch')} at a time sorted by length"


def _shares_of(plan: PlanGraph, batch: str) -> tuple[records.ShareNode, ...]:
    return tuple(
        records.ShareNode(first_rank=share.first_rank, ranks=share.ranks, samples=share.samples)
        for _, share in plan.of_kind(records.Share)
        if share.batch == batch
    )


def picture_changes(step: p.PictureStep | None) -> tuple[str, ...]:
    """Names what pictures go through in training."""
    if step is None:
        return ()
    words = {kind.__name__: word for word, kind in CALLS["augmentation"].items()}
    known = {numbers: name for name, numbers in NORMALIZED.items()}
    name = known.get((step.mean, step.std)) or known.get((step.mean[:1], step.std[:1]), "")
    return (
        *(words.get(each.kind, each.kind) for each in step.augment),
        *([f"`{step.transform.function}`"] if step.transform else []),
        *([f"normalised ({name})" if name else "normalised"] if step.mean else []),
        *(words.get(each.kind, each.kind) for each in step.erase),
    )


# ------------------------------------------------------------------------------------------------------ the training


def _training(plan: PlanGraph) -> records.TrainingNode:
    training, optimizer = plan.one(p.Training), plan.one(p.OptimizerStep)
    return records.TrainingNode(
        optimizer=optimizer_text(optimizer),
        lr=optimizer.lr,
        lr_written=optimizer.lr if optimizer.base_lr is None else optimizer.base_lr,
        lr_schedule=_schedule(plan.one(p.LearningRateStep)),
        precision=precision_text(plan.one(p.PrecisionStep)),
        clip=training.clip,
        clip_value=training.clip_value,
        compiled=_compiled(plan, training),
        chunked=_chunked(plan.one(p.LossStep)),
        recomputed=_recomputed(plan.one(p.RecomputeStep)),
        seed=training.seed,
        restarts=training.restarts,
        check_replicas=training.check_replicas,
        on_spike=_spike_text(training.on_spike),
        texts=_texts(training.generate),
        own_step=training.own_step is not None,
    )


def _texts(step: p.GenerateStep | None) -> str:
    """Returns which texts the network writes, and when, in words; "" if it writes none."""
    if step is None:
        return ""
    when = f"every {plural(step.every, 'step')} and after the last" if step.every else "after the last step"
    return f"{plural(len(step.prompts), 'prompt')}, at most {plural(step.max_tokens, 'token')} each, {when}"


def _spike_text(spike: p.SpikeStep | None) -> str:
    """Returns the response to a spike of the loss in words; "" if there is none."""
    if spike is None:
        return ""
    words = {
        "rewind": f"goes back at least {plural(spike.steps, 'step')}, skips {plural(spike.skip, 'batch')}",
        "stop": "ends the training",
        "note": "is noted",
    }
    return f"{words[spike.action]}; {spike.deviations:g} deviations above the mean of {spike.window} losses"


def _compiled(plan: PlanGraph, training: p.Training) -> str:
    if not training.compiled:
        return ""
    network = "the network" if training.compiled == ("",) else plural(len(training.compiled), "block")
    loss = "the loss" if plan.one(p.LossStep).compiled else ""
    tensor = plan.find(p.TensorParallelStep)
    if tensor is not None and tensor.asynchronous:
        network += ", in which the tensor axis exchanges pieces beside products (times have them wait)"
    if _has_uncompiled_experts(plan):
        return ", and ".join(filter(None, (f"{network} without mixtures of experts", loss)))
    return " and ".join(filter(None, (network, loss)))


def _has_uncompiled_experts(plan: PlanGraph) -> bool:
    """True if ranks exchange rows or tokens within mixtures of experts, or these depend on the global batch."""
    tensor = plan.find(p.TensorParallelStep)
    is_cut = tensor is not None and any(style in EXPERT_STYLES for _, style in tensor.styles)
    counts = next(experts_with_balance_loss(plan), None) or next(experts_with_capacity(plan), None)
    return is_cut or counts is not None or plan.find(p.ExpertParallelStep) is not None


def _chunked(loss: p.LossStep) -> str:
    """Returns how a head computes the loss in chunks, in words; "" if the loss takes whole logits."""
    return f"`{loss.head}` and the loss in {plural(loss.chunks, 'chunk')} of a micro-batch" if loss.head else ""


def _recomputed(step: p.RecomputeStep) -> str:
    """Names the blocks that a budget recomputes; "" without a budget."""
    if not step.budget:
        return ""
    names = f" ({shorten_list(step.modules)})" if step.modules else ""
    count = f"{len(step.modules)} of {plural(step.blocks, 'block')}"
    return f"{count}{names}, for a peak of {byte_text(step.budget)}"


def optimizer_text(step: p.OptimizerStep) -> str:
    """Names the optimizer; a user's own with what it keeps, if it was tried."""
    if step.python is None:
        classes = {
            name: word
            for word, kind in CALLS["optimizer"].items()
            if issubclass(kind, Optimizer)
            for name in kind.class_names()
        }
        word = classes.get(step.kind, step.kind)
        word += " with moments in 8 bits" if step.codes else ""
        return f"{word}, and adamw for {_adamw_text(step.adamw)}" if step.split else word
    kept = ", ".join(step.state)
    return f"{step.python.function}, which keeps {kept}" if kept else step.python.function


def _adamw_text(matrices: Sequence[tuple[str, str]] | None) -> str:
    """Names the parameters that Muon leaves to AdamW, the first matrices with the reason."""
    if matrices is None:
        return "vectors, kernels and matrices that `--trace` names"
    first = [f"{name} ({reason})" for name, reason in matrices[:MOST_MATRICES]]
    more = [f"{len(matrices) - len(first)} more"] * (len(matrices) > len(first))
    return ", ".join([*first, *more, "vectors and kernels"])


def precision_text(step: p.PrecisionStep) -> str:
    """Names the precision; of products in 8 bits with the layers that have them, and the first of the others."""
    if step.float8 is None:
        return PRECISIONS.get(step.dtype, step.dtype)
    float8 = step.float8
    how = f"fp8, {float8.recipe}" + (", emulated" if float8.emulated else "")
    if float8.layers is None:
        return f"{how}, for dense layers that `--trace` names"
    reasons: dict[str, list[str]] = {}
    for name, reason in float8.others:
        reasons.setdefault(reason, []).append(name)
    others = [f"{shorten_list(names)} ({reason})" for reason, names in reasons.items()]
    rest = f"; bf16 for {', '.join(others)}, and all else" if others else ", and bf16 for all else"
    gathers = f" ({len(float8.gathered)} gathered in 8 bits)" if float8.gathered else ""
    return f"{how}, for {plural(len(float8.layers), 'dense layer')}{gathers}{rest}"


def _schedule(step: p.LearningRateStep) -> str:
    """Names the schedule as a job does."""
    if step.kind == "constant":
        return "warmup_constant" if step.warmup else "constant"
    words = {getattr(kind, "curve", word): word for word, kind in CALLS["lr_schedule"].items()}
    return words.get(step.kind, step.kind)
