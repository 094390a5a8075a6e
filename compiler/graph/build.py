"""Builds the plan graph of a job: runs the passes with arguments from its analysis, and proves each result."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from math import prod
from typing import Any

from dslc.compiler.cost.layer_bytes import kept_bytes
from dslc.compiler.cost.schedule_cost import microbatches_in_flight
from dslc.compiler.cost.stages import equal_counts
from dslc.compiler.graph.constants import constants, optimizer_step, stage_ends
from dslc.compiler.graph.passes import PASSES
from dslc.compiler.graph.plan_graph import PlanGraph
from dslc.compiler.graph.plan_view import PRECISIONS, optimizer_text, order_text, picture_changes
from dslc.compiler.graph.verify import verify
from dslc.compiler.ir import records
from dslc.compiler.ir.actions import STAGE_ACTIONS, Message, MicrobatchAction, StageAction, StagePass
from dslc.compiler.ir.nodes import LayerNode, ModelGraph
from dslc.compiler.ir.program import Training
from dslc.compiler.ir.tensors import TensorFact
from dslc.compiler.model.job_steps import precision_step, sampler_step
from dslc.compiler.operations.coordinate import place_of
from dslc.compiler.operations.pipeline import messages
from dslc.compiler.operations.weights import numbers, shared_weights, weight_groups
from dslc.compiler.operations.zero1 import updated_numbers
from dslc.compiler.placement.axes import AXES
from dslc.compiler.placement.losses import compares, has_forward_ahead
from dslc.compiler.placement.lowering import Issue, lowered, row_without_pipeline
from dslc.compiler.placement.schedules import ScheduleTable
from dslc.compiler.placement.sharding import Sharding, offloaded, trained
from dslc.compiler.placement.staging import first_trained_stage, stages_with_whole_backward, unsendable
from dslc.compiler.placement.workload import document_end
from dslc.compiler.rules.analysis import Analysis, played
from dslc.compiler.rules.data.images import picture_step
from dslc.dsl.language.calls import Mixture, parts_of
from dslc.dsl.language.job import JobSpec
from dslc.dsl.language.preferences import ReferencedLoss
from dslc.dsl.source import short_line


def build_graph(analysis: Analysis, after: str = "") -> PlanGraph:
    """Runs the passes, or those up to `after`, and verifies after each."""
    plan = PlanGraph()
    for each in PASSES:
        assert {*each.needs} <= {*plan.done}, f"{each.name} comes before what it needs: {each.needs}"
        each.function(plan, *_ARGUMENTS[each.name](analysis))
        plan = replace(plan, done=(*plan.done, each.name))
        verify(plan)
        if each.name == after:
            break
    return plan


# ------------------------------------------------------------------------------------- the arguments of the passes


def _constants(analysis: Analysis) -> tuple[Mapping[str, records.NodeRecord]]:
    job = analysis.job
    nodes: dict[str, records.NodeRecord] = {}
    nodes["job"] = records.Job(name=job.name, file=os.path.basename(job.source.name))
    nodes |= constants(analysis)
    if not any(isinstance(node, Training) for node in nodes.values()):
        shards = analysis.sharding.shards
        nodes["partial plan"] = records.PartialPlan(
            data=_partial_data(analysis), training=_partial_training(analysis), shards=shards
        )
    return (nodes,)


def _partial_data(analysis: Analysis) -> records.DataNode:
    job, workload = analysis.job, analysis.workload
    calls = parts_of(job.data.source)
    facts = analysis.source.parts or (analysis.source,)
    steps = map(picture_step, calls, facts)
    sources = len(calls) if isinstance(job.data.source, Mixture) else 0
    sampler = sampler_step(job, workload.visited or 0)

    return records.DataNode(
        source=job.data.source.word,
        pictures=tuple(change for step in steps for change in picture_changes(step)),
        parts=tuple(
            records.PartNode(source=call.word, train=load.train, visited=load.visited, validation=load.validation)
            for call, load in zip(calls, workload.mixed, strict=False)
        ),
        train=workload.train,
        validation=workload.validation,
        validation_sets=workload.sets,
        split=workload.split,
        documents=document_end(job, analysis.source),
        reference=job.model.loss.reference if isinstance(job.model.loss, ReferencedLoss) else "",
        visited=workload.visited,
        order=order_text(sources, sampler, workload.train, shuffle=job.data.shuffle),
        shuffle=job.data.shuffle,
        batch=workload.batch,
        shares=(),
        last=workload.last,
        last_shares=(),
        most_share=workload.share if workload.measured else 0,
        microbatch=workload.microbatch,
        microbatches=analysis.layout.microbatches,
        ahead=has_forward_ahead(job, analysis.layout),
        counted_ahead=has_forward_ahead(job, analysis.layout) and not compares(job.model.loss),
        steps_per_epoch=workload.steps_per_epoch,
        steps=workload.steps,
        stream=workload.stream,
        test=workload.test,
    )


def _partial_training(analysis: Analysis) -> records.TrainingNode:
    job, optimizer = analysis.job, optimizer_step(analysis)
    return records.TrainingNode(
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


def _devices(analysis: Analysis) -> tuple[records.Machines, records.Devices]:
    job, layout = analysis.job, analysis.layout
    devices = records.Devices(
        count=layout.world_size,
        processes=layout.processes,
        kind=layout.device,
        model=layout.hardware.kind,
        gpus=layout.gpus,
        backend=layout.backend,
        capacity=layout.hardware.memory,
        limit=job.memory.limit,
        axes=tuple(records.Axis(name=axis, size=layout.sizes[axis], stride=layout.stride(axis)) for axis in AXES),
        threads=job.devices.threads or 0,
    )
    return records.Machines(count=layout.nodes, counts=layout.node_counts), devices


def _stages(analysis: Analysis) -> tuple[records.Network | None, Sequence[records.Stage], Sequence[int]]:
    model, pipeline = analysis.model, analysis.pipeline
    if model is None or pipeline is None:
        return None, (), ()
    moved = "activations" in offloaded(analysis.job, analysis.layout)
    samples = 0 if moved else analysis.job.data.rows * analysis.workload.microbatch / analysis.layout.sizes["context"]
    kept_by_layer = kept_bytes(analysis.job, model, model.of_a_rank)
    stages = []
    for index, layers in enumerate(pipeline.stages):
        kept = sum(kept_by_layer[n] for n in layers)
        stages.append(records.Stage(index=index, first=layers[0], last=layers[-1], kept=int(samples * kept)))
    if pipeline.schedule is None:
        return _network(analysis.job, model), stages, (0,)
    stages = [
        replace(stage, modules=tuple(model.layers[n].name for n in layers), inputs=inputs, outputs=outputs)
        for stage, layers, (inputs, outputs) in zip(stages, pipeline.stages, stage_ends(analysis), strict=True)
    ]
    return _network(analysis.job, model), stages, pipeline.schedule.placement


def _network(job: JobSpec, model: ModelGraph) -> records.Network:
    names = trained(job, model)
    count = sum(q.count for layer in model.layers for q in layer.parameters if q.name in names)
    layers = tuple(
        records.Layer(
            name=layer.name,
            kind=layer.kind,
            input=layer.input,
            output=layer.output,
            parameters=sum(prod(q.file_shape) for q in layer.parameters if q.tied_to is None),
            flops=layer.forward_flops + layer.backward_flops,
            kept=kept,
            line=short_line(layer.span),
            quantized=_quantized(layer),
        )
        for layer, kept in zip(model.layers, kept_bytes(job, model, model.layers), strict=True)
    )
    return records.Network(
        layers=layers, parameters=model.parameters, trained=count if count != model.parameters else None
    )


def _quantized(layer: LayerNode) -> str:
    kinds = [q.quantized.kind for q in layer.parameters if q.quantized is not None]
    return f"{len(kinds)} in {kinds[0]}" if kinds else ""


def _weights(
    analysis: Analysis,
) -> tuple[Mapping[str, records.Weights | records.SharedWeight], Mapping[int, int], Mapping[int, Sequence[int]]]:
    staging = analysis.staging
    if staging is None:
        return {}, {}, {}
    places = [place_of(staging, p) for p in range(analysis.layout.sizes["pipeline"])]
    groups: dict[str, records.Weights | records.SharedWeight] = {}
    for place in places:
        groups |= weight_groups(place)
    groups |= shared_weights(places, staging)
    of_stage = {stage: numbers(place, stage) for place in places for stage in place.mine}
    dealt = {p: updated_numbers(place) for p, place in enumerate(places) if place.sharding.engine == "zero1"}
    return groups, of_stage, dealt


def _batches(analysis: Analysis) -> tuple[records.Batches]:
    workload = analysis.workload
    microbatches = analysis.layout.microbatches
    batches = records.Batches(
        full=workload.batch,
        last=workload.last_trained or 0,
        microbatches=microbatches,
        weights=workload.weights,
        most_share=workload.share if workload.measured else 0,
    )
    return (batches,)


def _costs(analysis: Analysis) -> tuple[object, ...]:
    pipeline = analysis.pipeline
    held: Sequence[int] = ()
    if pipeline is not None:
        held = microbatches_in_flight(pipeline.schedule) if pipeline.schedule else (1,)
    smaller = sorted({share for share in analysis.workload.shares if share < analysis.workload.share}, reverse=True)
    shares = () if analysis.workload.measured else smaller
    return tuple(
        (
            cost.memory,
            cost.flops,
            tuple(records.ShareMemory(samples=share, memory=cost.memory_of_share(share)) for share in shares),
            cost.even_memory,
        )
        for cost in analysis.costs
    ), held


def _estimate(analysis: Analysis) -> tuple[records.Estimate | None]:
    estimate = analysis.estimate
    if estimate is None or (estimate.step_time is None and not estimate.lacks):
        return (None,)
    links = {"link": 0, "network": 0} | dict(estimate.links)
    return (
        records.Estimate(
            step_time=estimate.step_time,
            mfu=estimate.mfu,
            source=estimate.source,
            arithmetic=estimate.arithmetic,
            transfers=estimate.transfers,
            waiting=estimate.waiting,
            exposed=estimate.exposed,
            update=estimate.update,
            samples=estimate.samples,
            rest=estimate.rest,
            launches=estimate.launches,
            efficiency=analysis.layout.hardware.efficiency,
            within=links["link"],
            between=links["network"],
            lacks=estimate.lacks,
            bubble=estimate.bubble,
            stages=estimate.stages,
            message=estimate.message,
            ends=estimate.ends,
            fit=estimate.fit,
        ),
    )


def _actions(analysis: Analysis) -> tuple[Sequence[Sequence[StageAction]], records.Schedule | None]:
    schedule = analysis.pipeline.schedule if analysis.pipeline else None
    if schedule is None:
        if analysis.layout.sizes["pipeline"] > 1:  # a network that was not traced
            return (), None
        ahead = has_forward_ahead(analysis.job, analysis.layout)
        row = row_without_pipeline(analysis.layout.microbatches, analysis.sharding.reshard, outputs_early=ahead)
        return (tuple(_row(0, row, (), analysis.sharding)),), None
    assert analysis.staging is not None
    sent = messages(analysis.staging)
    rows = tuple(tuple(_row(p, row, sent, analysis.sharding)) for p, row in enumerate(lowered(schedule)))
    return rows, _schedule(analysis, schedule)


def _row(
    process: int, row: Iterable[Issue], sent: Sequence[Sequence[TensorFact]], sharding: Sharding
) -> Iterator[StageAction]:
    left_out = _left_out(sharding)
    for entry in row:
        for issue in entry.parts:
            if issue.kind not in left_out:
                yield _action(process, issue, sent, overlaps=issue in entry.parts[1:])


def _schedule(analysis: Analysis, schedule: ScheduleTable) -> records.Schedule:
    pipeline, model = analysis.pipeline, analysis.model
    assert pipeline is not None and model is not None, "a pipeline has stages"
    equal = equal_counts(len(model.layers), len(pipeline.stages))
    possible = not any(unsendable(model, stage[-1]) for stage in equal[:-1])
    return records.Schedule(
        name=schedule.name,
        virtual_stages=schedule.virtual_stages,
        rows=tuple(" ".join(str(action) if action else "-" for action in row) for row in schedule.rows),
        bubble=pipeline.bubble,
        equal_bubble=played(model, equal, schedule).bubble if possible else None,
        whole_backward=tuple(stages_with_whole_backward(analysis.job, model, pipeline.stages, schedule)),
        first_trained=first_trained_stage(analysis.job, model, pipeline.stages),
    )


def _left_out(sharding: Sharding) -> set[str]:
    """Returns the actions of torch's schedules that have nothing to do."""
    sums = sharding.reduces
    return (set() if sums else {"REDUCE_GRAD"}) | (set() if sharding.shards > 1 and sums else {"UNSHARD", "RESHARD"})


def _action(process: int, issue: Issue, sent: Sequence[Sequence[TensorFact]], *, overlaps: bool) -> StageAction:
    """Returns the action of an issue; `sent` are the tensors that each stage but the last sends to the next."""
    kind, values = STAGE_ACTIONS[issue.kind], dict[str, Any](process=process, stage=issue.stage)
    if issubclass(kind, MicrobatchAction):
        values["microbatch"] = issue.microbatch
    if issubclass(kind, StagePass):
        values["overlaps"] = overlaps
    if issubclass(kind, Message):
        forward_sender = kind.operation == ("send" if kind.way > 0 else "receive")
        facts = sent[issue.stage if forward_sender else issue.stage - 1]
        values |= {"shapes": tuple(fact.shape for fact in facts), "dtypes": tuple(fact.dtype for fact in facts)}
    return kind(**values)


_ARGUMENTS: Mapping[str, Callable[[Analysis], tuple[object, ...]]] = {
    "add_constants": _constants,
    "place_devices": _devices,
    "place_processes": lambda _: (),
    "place_stages": _stages,
    "hold_weights": _weights,
    "deal_samples": _batches,
    "account": _costs,
    "estimate_step": _estimate,
    "order_actions": _actions,
    "exchange": lambda analysis: (tuple(cost.operations for cost in analysis.costs),),
}
