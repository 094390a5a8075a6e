"""The part of a plan that is known while a size is unknown that a run needs, such as the number of samples."""

from __future__ import annotations

from dslc.compiler.graph.constants import optimizer_step
from dslc.compiler.graph.plan_view import PRECISIONS, optimizer_text, picture_changes
from dslc.compiler.ir.records import DataNode, PartialPlan, PartNode, TrainingNode
from dslc.compiler.model.job_steps import precision_step, sampler_step
from dslc.compiler.placement.cross_sample_losses import makes_outputs_ahead
from dslc.compiler.placement.order_text import order_text
from dslc.compiler.rules.analysis import Analysis
from dslc.compiler.rules.data.images import picture_step
from dslc.dsl.language.calls import Mixture, parts_of


def partial_plan(analysis: Analysis) -> PartialPlan:
    """Returns the record; the shares of a batch are on the graph."""
    return PartialPlan(data=_data(analysis), training=_training(analysis), shards=analysis.sharding.shards)


def _data(analysis: Analysis) -> DataNode:
    job, workload = analysis.job, analysis.workload
    calls = parts_of(job.data.source)
    facts = analysis.source.parts or (analysis.source,)
    steps = map(picture_step, calls, facts)
    sources = len(calls) if isinstance(job.data.source, Mixture) else 0
    sampler = sampler_step(job, workload.visited or 0)

    return DataNode(
        source=job.data.source.word,
        pictures=tuple(change for step in steps for change in picture_changes(step)),
        parts=tuple(
            PartNode(source=call.word, train=load.train, visited=load.visited, validation=load.validation)
            for call, load in zip(calls, workload.mixed, strict=False)
        ),
        train=workload.train,
        validation=workload.validation,
        validation_sets=workload.sets,
        split=workload.split,
        documents=job.data.documents,
        visited=workload.visited,
        order=order_text(sources, sampler, workload.train, shuffle=job.data.shuffle),
        shuffle=job.data.shuffle,
        batch=workload.batch,
        shares=(),
        last=workload.last,
        last_shares=(),
        microbatch=workload.microbatch,
        microbatches=analysis.layout.microbatches,
        ahead=makes_outputs_ahead(job, analysis.layout),
        steps_per_epoch=workload.steps_per_epoch,
        steps=workload.steps,
        stream=workload.stream,
        test=workload.test,
    )


def _training(analysis: Analysis) -> TrainingNode:
    job, optimizer = analysis.job, optimizer_step(analysis)
    return TrainingNode(
        optimizer=optimizer_text(optimizer),
        lr=optimizer.lr,
        lr_written=job.train.optimizer.lr,
        lr_schedule=job.train.lr_schedule.word,
        precision=PRECISIONS[precision_step(job).dtype],
        clip=job.train.clip_norm,
        clip_value=job.train.clip_value,
        seed=job.train.seed,
        restarts=job.launch.restarts,
        own_step=job.train.step is not None,
    )
