"""Compiles a JobSpec to a Plan and rank programs: the second gate after the first."""

from __future__ import annotations

from typing import Any

from dslc.compiler.common.axes import AXES
from dslc.compiler.common.shares import alike
from dslc.compiler.cost.layer_bytes import kept_bytes
from dslc.compiler.cost.stages import equal_counts
from dslc.compiler.emit import emit, located, places
from dslc.compiler.graph.constants import scaled_lr, short_line
from dslc.compiler.graph.graph import PlanGraph
from dslc.compiler.graph.passes import build_graph
from dslc.compiler.graph.pictures import things_done
from dslc.compiler.ir import program as p
from dslc.compiler.ir.codec import to_json
from dslc.compiler.ir.facts import SourceFacts
from dslc.compiler.ir.plan import (
    PLAN_VERSION,
    AxisNode,
    DataNode,
    LayerPlan,
    PartNode,
    Plan,
    RankNode,
    ScheduleNode,
    ShareNode,
    StageNode,
    StepNode,
    TopologyNode,
    TrainingNode,
)
from dslc.compiler.ir.records import Placed, Process, Stage
from dslc.compiler.placement.order import order_text
from dslc.compiler.placement.seams import unsendable
from dslc.compiler.placement.sharding import offloaded, trained
from dslc.compiler.placement.whole_losses import makes_outputs_ahead
from dslc.compiler.rules.analyse import played
from dslc.compiler.rules.analysis import Analysis
from dslc.dsl.language.calls import parts_of
from dslc.dsl.language.optimizers import PythonOptimizer
from dslc.dsl.language.registry import BLOCKS, Node, Quantity, Range, fields
from dslc.dsl.record import Record, record


@record
class Compiled(Record):
    """A plan, its graph, and the analysis that both come from."""

    analysis: Analysis
    graph: PlanGraph
    plan: Plan

    def program(self) -> p.JobProgram:
        job = self.analysis.job
        return located(emit(self.graph, self.plan.hash), job.folder, job.source.name)

    def places(self) -> tuple[p.RankPlace, ...]:
        return places(self.graph)


def compile_plan(analysis: Analysis) -> Compiled:
    """Returns the plan of a job that `analyse` accepted. Raises `Unsound` on a bug of the compiler."""
    graph = build_graph(analysis)
    return Compiled(analysis=analysis, graph=graph, plan=_plan(analysis, graph))


def _plan(analysis: Analysis, graph: PlanGraph) -> Plan:
    job, layout, model = analysis.job, analysis.layout, analysis.model
    estimated = analysis.estimate
    return Plan(
        version=PLAN_VERSION,
        job=job.name,
        topology=TopologyNode(
            nodes=layout.nodes,
            node_counts=layout.node_counts,
            processes=layout.processes,
            device=layout.device,
            kind=layout.hardware.kind,
            memory=layout.hardware.memory,
            limit=job.memory.limit,
            backend=layout.backend,
            threads=job.devices.threads or 0,
        ),
        axes=tuple(
            AxisNode(
                name=axis,
                size=layout.sizes[axis],
                stride=layout.stride(axis),
                between_nodes=layout.crosses_nodes(axis),
            )
            for axis in AXES
        ),
        shards=analysis.sharding.shards,
        parameters=model.parameters if model else None,
        trained=_trained(analysis),
        layers=_layers(analysis),
        stages=_stages(analysis, graph),
        data=_data(analysis),
        schedule=_schedule(analysis),
        training=TrainingNode(
            optimizer=_optimizer(analysis),
            lr=scaled_lr(analysis),
            lr_written=job.train.optimizer.lr,
            lr_schedule=job.train.lr_schedule.word,
            precision=job.train.precision.word,
            clip=job.train.clip_norm,
            clip_value=job.train.clip_value,
            seed=job.train.seed,
            restarts=job.launch.restarts,
        ),
        ranks=_ranks(analysis, graph),
        step_time=estimated.step_time if estimated else None,
        mfu=estimated.mfu if estimated else None,
        step=_step(analysis),
        resolved=_resolved(analysis),
        settings={name: plain(getattr(job, name)) for name in BLOCKS},
    )


def _step(analysis: Analysis) -> StepNode | None:
    found = analysis.estimate
    if found is None or found.step_time is None:
        return None
    links = dict(found.links)
    return StepNode(
        arithmetic=found.arithmetic,
        transfers=found.transfers,
        waiting=found.waiting,
        exposed=found.exposed,
        efficiency=analysis.layout.hardware.efficiency,
        within=links["link"],
        between=links["network"],
    )


def _optimizer(analysis: Analysis) -> str:
    """Names the optimizer; a user's own with what it keeps, if it was tried."""
    optimizer, facts = analysis.job.train.optimizer, analysis.facts.optimizer
    if not isinstance(optimizer, PythonOptimizer):
        return optimizer.word
    kept = sorted({fact.name for kind in facts.kinds for fact in kind}) if facts else []
    return f"{optimizer.function}, which keeps {', '.join(kept)}" if kept else optimizer.function


def plain(value: Any) -> Any:
    """Converts a resolved value to JSON: a call to its word and arguments, paths as they were written."""
    match value:
        case Node():
            written = {f.name: _written(value, f.name) for f in fields(type(value))}
            return {"call": value.word} | written
        case Quantity() | Range():
            return dict(vars(value))
        case tuple():
            return tuple(map(plain, value))
        case _:
            return value


def _written(node: Node, name: str) -> Any:
    """Returns a field's value; a path as the user wrote it, as the absolute one differs by machine."""
    value = getattr(node, name)
    declared = next(f for f in fields(type(node)) if f.name == name)
    if type(declared.kind).__name__ == "Path" and node.is_set(name):
        return node.places[name].value.text().strip("\"'")
    return plain(value)


def _resolved(analysis: Analysis) -> dict[str, Any]:
    source = analysis.source
    return {
        "samples": source.samples,
        "validation_samples": source.validation_samples,
        "input": to_json(source.input),
        "target": to_json(source.target),
        "classes": source.classes,
        "vocab": source.vocab,
        **_further(source),
    }


def _further(source: SourceFacts) -> dict[str, Any]:
    """Returns the facts that only some sources have."""
    found: dict[str, Any] = {}
    if sets := source.found.get("validation_sets"):
        found["validation_sets"] = to_json(sets)
    if source.test_samples is not None:
        found["test_samples"] = source.test_samples
    if source.shards is not None:
        found |= {"shards": source.shards, "held_shards": to_json(source.held_shards)}
    return found | ({"blocks": to_json(source.found["blocks"])} if "blocks" in source.found else {})


def _layers(analysis: Analysis) -> tuple[LayerPlan, ...]:
    if analysis.model is None:
        return ()
    return tuple(
        LayerPlan(
            name=layer.name,
            kind=layer.kind,
            input=layer.input,
            output=layer.output,
            parameters=sum(q.count for q in layer.parameters if q.tied_to is None),
            flops=layer.forward_flops + layer.backward_flops,
            kept=kept_bytes(analysis.job, layer, analysis.model),
            line=short_line(layer.span),
        )
        for layer in analysis.model.layers
    )


def _trained(analysis: Analysis) -> int | None:
    """Returns the count of the parameters that train; None if all do, or if it is unknown."""
    model = analysis.model
    if model is None:
        return None
    names = trained(analysis.job, model)
    found = sum(q.count for layer in model.layers for q in layer.parameters if q.name in names)
    return found if found != model.parameters else None


def _stages(analysis: Analysis, graph: PlanGraph) -> tuple[StageNode, ...]:
    found = []
    moved = "activations" in offloaded(analysis.job, analysis.layout)
    samples = 0 if moved else analysis.workload.microbatch / analysis.layout.sizes["context"]
    for name, stage in graph.of_kind(Stage):
        assert analysis.model is not None
        mine = slice(stage.first, stage.last + 1)
        layers, of_a_rank = analysis.model.layers[mine], analysis.model.of_a_rank[mine]
        process = next(iter(graph.graph.successors(name)))
        found.append(
            StageNode(
                index=stage.index,
                pipeline=graph.at(process, Process).pipeline,
                first=stage.first,
                last=stage.last,
                parameters=sum(q.count for layer in layers for q in layer.parameters if q.tied_to is None),
                flops=sum(layer.forward_flops + layer.backward_flops for layer in layers),
                kept=int(samples * sum(kept_bytes(analysis.job, layer, analysis.model) for layer in of_a_rank)),
            )
        )
    return tuple(found)


def _data(analysis: Analysis) -> DataNode:
    job, workload, ranks = analysis.job, analysis.workload, analysis.layout.sizes["data"]

    def dealt(samples: int) -> tuple[ShareNode, ...]:
        return tuple(ShareNode(first_rank=a, ranks=n, samples=size) for a, n, size in alike(samples, ranks))

    return DataNode(
        source=job.data.source.word,
        pictures=tuple(step for call in parts_of(job.data.source) for step in things_done(call)),
        parts=tuple(
            PartNode(source=call.word, train=load.train, visited=load.visited, validation=load.validation)
            for call, load in zip(parts_of(job.data.source), workload.mixed, strict=False)
        ),
        train=workload.train,
        validation=workload.validation,
        split=workload.split,
        documents=job.data.documents,
        visited=workload.visited,
        order=order_text(job),
        shuffle=job.data.shuffle,
        batch=workload.batch,
        shares=dealt(workload.batch),
        last=workload.last,
        last_shares=dealt(workload.last_trained or 0),
        microbatch=workload.microbatch,
        microbatches=analysis.layout.microbatches,
        ahead=makes_outputs_ahead(job, analysis.layout),
        steps_per_epoch=workload.steps_per_epoch,
        steps=workload.steps,
        stream=workload.stream,
        test=workload.test,
    )


def _schedule(analysis: Analysis) -> ScheduleNode | None:
    pipeline = analysis.pipeline
    if pipeline is None or pipeline.schedule is None:
        return None
    schedule, model = pipeline.schedule, analysis.model
    assert model is not None, "a pipeline has stages"
    equal = equal_counts(len(model.layers), len(pipeline.stages))
    possible = not any(unsendable(model, stage[-1]) for stage in equal[:-1])
    return ScheduleNode(
        name=schedule.name,
        virtual_stages=schedule.virtual_stages,
        bubble=pipeline.bubble,
        rows=tuple(" ".join(str(action) if action else "-" for action in row) for row in schedule.rows),
        equal_bubble=played(model, equal, schedule).bubble if possible else None,
    )


def _ranks(analysis: Analysis, graph: PlanGraph) -> tuple[RankNode, ...]:
    placed = graph.related(Placed)
    stage_of = dict(graph.of_kind(Stage))
    found = []
    for name, process in graph.of_kind(Process):
        if process.memory is None:
            continue
        stages = sorted(stage_of[other].index for other in placed.predecessors(name) if other in stage_of)
        found.append(
            RankNode(
                pipeline=process.pipeline,
                first=process.first,
                last=process.last,
                stages=tuple(stages),
                memory=process.memory,
                traffic=process.traffic,
                flops=analysis.costs[process.pipeline].flops,
            )
        )
    return tuple(found)
