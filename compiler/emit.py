"""Projects a plan graph to rank programs. The graph has everything that the runtime needs.

All ranks of a job share one `JobProgram`; each has a `RankPlace` of its own. Paths on the graph start in the job's
folder; `locate_paths` makes them absolute, where the ranks are about to be launched.
"""

from __future__ import annotations

from dslc.compiler.graph.plan_graph import PlanGraph, passes_in
from dslc.compiler.ir import program as p
from dslc.compiler.ir.actions import Action
from dslc.compiler.ir.memory import MemoryNode
from dslc.compiler.ir.records import Batches, Devices, Estimate, Job, PlacementEdge, Process, Schedule, Stage


def emit(plan: PlanGraph, plan_hash: str) -> p.JobProgram:
    """Returns the program of a job whose sizes are all known; `plan_hash` names the plan in checkpoints and reports."""
    job, devices, training = plan.one(Job), plan.one(Devices), plan.one(p.Training)
    return p.JobProgram(
        **{name: getattr(training, name) for name in training.record_names},
        job=job.name,
        file=job.file,
        plan_hash=plan_hash,
        world_size=devices.count,
        axes={axis.name: axis.size for axis in devices.axes},
        processes=devices.processes,
        device=devices.kind,  # type: ignore[arg-type]
        gpus=devices.gpus or (tuple(range(devices.processes)) if devices.kind == "cuda" else ()),
        backend=devices.backend,
        threads=devices.threads,
        memory=_memory(plan),
        memory_limit=devices.memory,
        model=plan.one(p.ModelStep),
        loss=plan.one(p.LossStep),
        data=plan.one(p.DataStep),
        microbatches=plan.one(Batches).microbatches,
        optimizer=plan.one(p.OptimizerStep),
        learning_rate=plan.one(p.LearningRateStep),
        precision=plan.one(p.PrecisionStep),
        gradients=plan.one(p.GradientStep),
        recompute=plan.one(p.RecomputeStep),
        pipeline=_pipeline(plan),
        tensor=plan.find(p.TensorParallelStep),
        context=plan.find(p.ContextStep),
        experts=plan.find(p.ExpertParallelStep),
        draws=plan.find(p.DrawStep),
        checkpoint=plan.one(p.CheckpointStep),
        expected=expected_phases(plan.find(Estimate)),
    )


def expected_phases(estimate: Estimate | None) -> p.StepPhases | None:
    """Returns an estimate by phases of a step; None without one, and of times that are not of this machine: a bound, or
    what was published of the same kind of device.
    """
    if estimate is None or estimate.step_time is None or estimate.source in ("bound", "published"):
        return None
    return p.StepPhases(
        data=estimate.samples,
        passes=estimate.arithmetic + estimate.transfers + estimate.waiting + estimate.launches,
        exposed=estimate.exposed,
        update=estimate.update,
        host=estimate.rest,
    )


def places(plan: PlanGraph) -> tuple[p.RankPlace, ...]:
    return tuple(place(plan, rank) for rank in range(plan.one(Devices).count))


def place(plan: PlanGraph, rank: int) -> p.RankPlace:
    devices = plan.one(Devices)
    node, local_rank = divmod(rank, devices.processes)
    coordinates = {axis.name: rank // axis.stride % axis.size for axis in devices.axes}
    return p.RankPlace(
        rank=rank,
        node=node,
        local_rank=local_rank,
        coordinates=coordinates,
        data_rank=coordinates["data"],
        data_ranks=plan.axis("data").size,
    )


def _memory(plan: PlanGraph) -> tuple[MemoryNode, ...]:
    """Returns the planned memory of a rank at each pipeline coordinate."""
    processes = sorted((process for _, process in plan.of_kind(Process)), key=lambda process: process.pipeline)
    return tuple(process.memory for process in processes if process.memory is not None)


def _pipeline(plan: PlanGraph) -> p.PipelineStep | None:
    schedule = plan.find(Schedule)
    if schedule is None:
        return None
    placed, stages = plan.related(PlacementEdge), []
    for name, stage in sorted(plan.of_kind(Stage), key=lambda item: item[1].index):
        (process,) = placed.successors(name)
        stages.append(
            p.StageStep(
                index=stage.index,
                rank=plan.node_record(process, Process).pipeline,
                modules=stage.modules,
                inputs=stage.inputs,
                outputs=stage.outputs,
            )
        )
    lines, broken = plan.lines()
    assert not broken, broken
    rows = tuple(passes_in([plan.node_record(name, Action) for name in lines[process]]) for process in sorted(lines))
    return p.PipelineStep(
        schedule=schedule.name,
        stages=tuple(stages),
        rows=rows,
        whole_backward=schedule.whole_backward,
        first_trained=schedule.first_trained,
    )
