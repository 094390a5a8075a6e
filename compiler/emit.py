"""Projects a plan graph to rank programs. The graph has everything that the runtime needs.

All ranks of a job share one `JobProgram`; each has a `RankPlace` of its own.
"""

from __future__ import annotations

from dslc.compiler.graph.graph import COMPUTE, PlanGraph
from dslc.compiler.ir import program as p
from dslc.compiler.ir.memory import MemoryNode
from dslc.compiler.ir.records import Action, Batches, Devices, Placed, Process, Schedule, Stage, Training


def emit(plan: PlanGraph, plan_hash: str) -> p.JobProgram:
    """Returns the program of a job whose sizes are all known; `plan_hash` names the plan in checkpoints and reports."""
    devices, training = plan.one(Devices), plan.one(Training)
    return p.JobProgram(
        job=training.job,
        file=training.file,
        plan_hash=plan_hash,
        world_size=devices.count,
        processes=devices.processes,
        device=devices.kind,  # type: ignore[arg-type]
        gpus=devices.gpus or (tuple(range(devices.processes)) if devices.kind == "cuda" else ()),
        backend=devices.backend,
        timeout=training.timeout,
        threads=0,
        memory=_memory(plan),
        memory_limit=devices.memory,
        model=plan.one(p.ModelStep),
        sync_batch_norm=training.sync_batch_norm,
        loss=plan.one(p.LossStep),
        data=plan.one(p.DataStep),
        microbatches=plan.one(Batches).microbatches,
        steps=training.steps,
        steps_per_epoch=training.steps_per_epoch,
        optimizer=plan.one(p.OptimizerStep),
        learning_rate=plan.one(p.LearningRateStep),
        clip=training.clip,
        on_nonfinite=training.on_nonfinite,  # type: ignore[arg-type]
        precision=plan.one(p.PrecisionStep),
        gradients=plan.one(p.GradientStep),
        recompute=plan.one(p.RecomputeStep),
        offload=training.offload,
        compiled=training.compiled,
        pipeline=_pipeline(plan),
        tensor=plan.find(p.TensorParallelStep),
        context=plan.axis("context").size,
        checkpoint=plan.one(p.CheckpointStep),
        evaluate_every=training.evaluate_every,
        metrics=training.metrics,
        log_every=training.log_every,
        tensorboard=training.tensorboard,
        deterministic=training.deterministic,
        seed=training.seed,
    )


def places(plan: PlanGraph) -> tuple[p.RankPlace, ...]:
    """Returns the place of each rank."""
    return tuple(place(plan, rank) for rank in range(plan.one(Devices).count))


def place(plan: PlanGraph, rank: int) -> p.RankPlace:
    """Returns the place of one rank."""
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
    placed, stages = plan.related(Placed), []
    for name, stage in sorted(plan.of_kind(Stage), key=lambda item: item[1].index):
        (process,) = placed.successors(name)
        stages.append(
            p.StageStep(
                index=stage.index,
                rank=plan.at(process, Process).pipeline,
                modules=stage.modules,
                inputs=stage.inputs,
                outputs=stage.outputs,
            )
        )
    lines, broken = plan.lines()
    assert not broken, broken
    rows = tuple(_row([plan.at(name, Action) for name in lines[process]]) for process in sorted(lines))
    return p.PipelineStep(schedule=schedule.name, stages=tuple(stages), rows=rows)


def _row(line: list[Action]) -> tuple[str, ...]:
    """Returns the passes of a process in torch's notation: `3F0` is the forward of micro-batch 0 at stage 3; two that
    overlap are one, `(3F1;3B0)OVERLAP_F_B`.
    """
    row: list[str] = []
    for action in line:
        if action.what in COMPUTE:
            shown = f"{action.stage}{action.what}{action.microbatch}"
            row.append(f"({row.pop()};{shown})OVERLAP_F_B" if action.overlaps else shown)
    return tuple(row)
