"""The passes that build the plan graph, in one tuple. Each takes a valid graph and leaves a valid graph: `verify` runs
after each of them.
"""

from __future__ import annotations

import itertools
import os
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

from dslc.compiler.cost.layer_bytes import kept_bytes
from dslc.compiler.cost.schedule_cost import microbatches_in_flight
from dslc.compiler.cost.stages import equal_counts
from dslc.compiler.graph.constants import constants, stage_ends
from dslc.compiler.graph.graph import PlanGraph, unknown
from dslc.compiler.graph.insertion import InsertionPoint, insertions
from dslc.compiler.graph.partial_plan import partial_plan
from dslc.compiler.graph.verify import verify
from dslc.compiler.ir.actions import (
    STAGE_ACTIONS,
    Action,
    Collective,
    Message,
    MicrobatchAction,
    StageAction,
    StagePass,
    Update,
)
from dslc.compiler.ir.nodes import ModelGraph
from dslc.compiler.ir.program import Training
from dslc.compiler.ir.records import (
    Axis,
    Batches,
    Devices,
    Estimate,
    Hands,
    Job,
    Layer,
    Machines,
    Network,
    Placed,
    Process,
    Schedule,
    Share,
    Stage,
)
from dslc.compiler.ir.tensors import TensorFact
from dslc.compiler.operations.coordinate import place_of
from dslc.compiler.operations.moments import IN_SCHEDULE
from dslc.compiler.operations.pipeline import messages
from dslc.compiler.operations.weights import numbers, shared_weights, weight_groups
from dslc.compiler.operations.zero1 import updated_numbers
from dslc.compiler.placement.axes import AXES
from dslc.compiler.placement.cross_sample_losses import makes_outputs_ahead
from dslc.compiler.placement.lowering import Issue, lowered, row_without_pipeline
from dslc.compiler.placement.schedules import ScheduleTable
from dslc.compiler.placement.sharding import Sharding, offloaded, trained
from dslc.compiler.placement.shares import equal_share_runs
from dslc.compiler.placement.staging import stages_with_whole_backward, unsendable
from dslc.compiler.rules.analyse import played
from dslc.compiler.rules.analysis import Analysis
from dslc.dsl.language.job import JobSpec
from dslc.dsl.source import short_line

Pass = Callable[[PlanGraph, Analysis], None]


def write_down(plan: PlanGraph, analysis: Analysis) -> None:
    """Adds the constants of the job; if a size is unknown that a run needs, what is known without it."""
    job = analysis.job
    plan.put("job", Job(name=job.name, file=os.path.basename(job.source.name)))
    for name, record in constants(analysis):
        plan.put(name, record)
    if plan.find(Training) is None:
        plan.put("partial plan", partial_plan(analysis))


def place_devices(plan: PlanGraph, analysis: Analysis) -> None:
    """Adds machines and their devices."""
    job, layout = analysis.job, analysis.layout
    plan.put("nodes", Machines(count=layout.nodes, counts=layout.node_counts))
    devices = Devices(
        count=layout.world_size,
        processes=layout.processes,
        kind=layout.device,
        model=layout.hardware.kind,
        gpus=layout.gpus,
        backend=layout.backend,
        capacity=layout.hardware.memory,
        limit=job.memory.limit,
        axes=tuple(Axis(name=axis, size=layout.sizes[axis], stride=layout.stride(axis)) for axis in AXES),
        threads=job.devices.threads or 0,
    )
    plan.put("devices", devices)
    plan.relate("devices", "nodes", Placed())


def place_processes(plan: PlanGraph, analysis: Analysis) -> None:
    """Adds a process on each device, the ranks of one pipeline coordinate together."""
    layout = analysis.layout
    for p in range(layout.sizes["pipeline"]):
        ranks = layout.ranks(p)
        plan.put(f"process {p}", Process(index=p, pipeline=p, first=ranks[0], last=ranks[-1]))
        plan.relate(f"process {p}", "devices", Placed())


def place_stages(plan: PlanGraph, analysis: Analysis) -> None:
    """Adds the model's layers in stages, and places these on the processes."""
    model, pipeline = analysis.model, analysis.pipeline
    if model is None or pipeline is None:
        return
    plan.put("network", _network(analysis.job, model))
    moved = "activations" in offloaded(analysis.job, analysis.layout)
    samples = 0 if moved else analysis.workload.microbatch / analysis.layout.sizes["context"]
    for index, layers in enumerate(pipeline.stages):
        kept = sum(kept_bytes(analysis.job, model.of_a_rank[n], model) for n in layers)
        plan.put(f"stage {index}", Stage(index=index, first=layers[0], last=layers[-1], kept=int(samples * kept)))
    if pipeline.schedule is None:
        plan.relate("stage 0", "process 0", Placed())
        return
    for index, (rank, (inputs, outputs)) in enumerate(
        zip(pipeline.schedule.placement, stage_ends(analysis), strict=True)
    ):
        modules = tuple(model.layers[n].name for n in pipeline.stages[index])
        plan.change(f"stage {index}", modules=modules, inputs=inputs, outputs=outputs)
        plan.relate(f"stage {index}", f"process {rank}", Placed())


def _network(job: JobSpec, model: ModelGraph) -> Network:
    names = trained(job, model)
    count = sum(q.count for layer in model.layers for q in layer.parameters if q.name in names)
    layers = tuple(
        Layer(
            name=layer.name,
            kind=layer.kind,
            input=layer.input,
            output=layer.output,
            parameters=sum(q.count for q in layer.parameters if q.tied_to is None),
            flops=layer.forward_flops + layer.backward_flops,
            kept=kept_bytes(job, layer, model),
            line=short_line(layer.span),
        )
        for layer in model.layers
    )
    return Network(layers=layers, parameters=model.parameters, trained=count if count != model.parameters else None)


def hold_weights(plan: PlanGraph, analysis: Analysis) -> None:
    """Adds the parameters of each stage, in groups of those that are gathered and summed together, and the weights that
    several stages share.
    """
    staging = analysis.staging
    if staging is None:
        return
    places = [place_of(staging, p) for p in range(analysis.layout.sizes["pipeline"])]
    for p, place in enumerate(places):
        for name, group in weight_groups(place).items():
            plan.put(name, group)
        for stage in place.mine:
            plan.change(f"stage {stage}", numbers=numbers(place, stage))
        if place.sharding.engine == "zero1":
            plan.change(f"process {p}", dealt=tuple(updated_numbers(place)))
    for name, shared in shared_weights(places, staging):
        plan.put(name, shared)


def deal_samples(plan: PlanGraph, analysis: Analysis) -> None:
    """Adds the shares of a batch on the data ranks; they enter at the process of the first stage."""
    workload, last = analysis.workload, analysis.workload.last_trained or 0
    enters = analysis.staging.placement[0] if analysis.staging else 0
    plan.put("batches", Batches(full=workload.batch, last=last, microbatches=analysis.layout.microbatches))
    for batch, samples in (("full", workload.batch), ("last", last)):
        for first, ranks, size in equal_share_runs(samples, analysis.layout.sizes["data"]):
            name = f"share {batch} {first}"
            plan.put(name, Share(batch=batch, first_rank=first, ranks=ranks, samples=size))
            plan.relate(name, f"process {enters}", Placed())


def account(plan: PlanGraph, analysis: Analysis) -> None:
    """Adds bytes by kind to each process, and to each stage the micro-batches that it holds."""
    pipeline = analysis.pipeline
    if pipeline is not None:
        most = microbatches_in_flight(pipeline.schedule) if pipeline.schedule else (1,)
        for index, count in enumerate(most):
            plan.change(f"stage {index}", held=count)
    for p, cost in enumerate(analysis.costs):
        plan.change(f"process {p}", memory=cost.memory, flops=cost.flops)


def order_actions(plan: PlanGraph, analysis: Analysis) -> None:
    """Adds the actions of each process in a step, in order, and the transfers between stages."""
    if unknown(plan):
        return
    schedule = analysis.pipeline.schedule if analysis.pipeline else None
    if schedule:
        rows = lowered(schedule)
    else:
        ahead = makes_outputs_ahead(analysis.job, analysis.layout)
        rows = (tuple(row_without_pipeline(analysis.layout.microbatches, analysis.sharding.reshard, ahead=ahead)),)
    left_out = _left_out(analysis.sharding)
    sent = messages(analysis.staging) if schedule and analysis.staging else ()
    for p, row in enumerate(rows):
        names = []
        for entry in row:
            for issue in entry.parts:
                if issue.kind in left_out:
                    continue
                names.append(_name(str(issue), plan))
                plan.put(names[-1], _action(p, issue, sent, overlaps=issue in entry.parts[1:]))
        names.append(f"update {p}")
        plan.put(names[-1], Update(process=p))
        plan.line(names, instead_of=[])
    if schedule:
        plan.put("schedule", _schedule(analysis, schedule))
        _hand_over(plan, analysis)


def _schedule(analysis: Analysis, schedule: ScheduleTable) -> Schedule:
    pipeline, model = analysis.pipeline, analysis.model
    assert pipeline is not None and model is not None, "a pipeline has stages"
    equal = equal_counts(len(model.layers), len(pipeline.stages))
    possible = not any(unsendable(model, stage[-1]) for stage in equal[:-1])
    return Schedule(
        name=schedule.name,
        virtual_stages=schedule.virtual_stages,
        rows=tuple(" ".join(str(action) if action else "-" for action in row) for row in schedule.rows),
        bubble=pipeline.bubble,
        equal_bubble=played(model, equal, schedule).bubble if possible else None,
        whole_backward=tuple(stages_with_whole_backward(analysis.job, model, pipeline.stages, schedule)),
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


def _name(text: str, plan: PlanGraph) -> str:
    """Returns a name that no action has yet: a stage is gathered again after it was freed."""
    name, n = text, 1
    while name in plan.graph:
        n += 1
        name = f"{text} ({n})"
    return name


def _hand_over(plan: PlanGraph, analysis: Analysis) -> None:
    """Adds outputs to the next stage, and gradients of inputs to the one before, if that is on another rank."""
    assert analysis.staging is not None
    placement = analysis.staging.placement
    for stage in range(len(placement) - 1):
        if placement[stage] == placement[stage + 1]:
            continue  # added already
        for m in range(analysis.layout.microbatches):
            for send, receive in (
                (f"{stage}SEND_F{m}", f"{stage + 1}RECV_F{m}"),
                (f"{stage + 1}SEND_B{m}", f"{stage}RECV_B{m}"),
            ):
                plan.relate(send, receive, Hands(bytes=plan.node_record(send, Message).bytes))


def exchange(plan: PlanGraph, analysis: Analysis) -> None:
    """Adds the collectives of a step, beside the actions that cause them."""
    lines, _ = plan.lines()
    for p, cost in enumerate(analysis.costs):
        plan.change(f"process {p}", traffic=cost.traffic)
        line = [plan.node_record(name, Action) for name in lines[p]]
        beside: dict[InsertionPoint, list[Collective]] = {}
        for operation in (each for each in cost.operations if each.moment != IN_SCHEDULE):
            for point, action in insertions(p, operation, line):
                beside.setdefault(point, []).append(action)
        names: list[str] = []
        count = itertools.count()
        for n, name in enumerate(lines[p]):
            for is_after in (False, True):
                for collective in beside.get(InsertionPoint(n, is_after), ()):
                    names.append(f"exchange {p}.{next(count)}")
                    plan.put(names[-1], collective)
                names += [] if is_after else [name]
        plan.line(names, instead_of=lines[p])


def estimate_step(plan: PlanGraph, analysis: Analysis) -> None:
    """Adds the predicted time of a step, if it is known."""
    estimate = analysis.estimate
    if estimate is None or estimate.step_time is None:
        return
    links = dict(estimate.links)
    plan.put(
        "estimate",
        Estimate(
            step_time=estimate.step_time,
            mfu=estimate.mfu,
            arithmetic=estimate.arithmetic,
            transfers=estimate.transfers,
            waiting=estimate.waiting,
            exposed=estimate.exposed,
            efficiency=analysis.layout.hardware.efficiency,
            within=links["link"],
            between=links["network"],
        ),
    )


PASSES: tuple[Pass, ...] = (
    write_down,  # needs nothing
    place_devices,  # needs nothing
    place_processes,  # needs devices to put them on
    place_stages,  # needs processes
    hold_weights,  # needs stages: each has parameters of its own
    deal_samples,  # needs processes: samples enter at the first stage
    account,  # needs processes and stages
    estimate_step,  # needs nothing: an analysis has the time already
    order_actions,  # needs stages: an action is of a stage
    exchange,  # needs actions and weights: collectives are placed beside their causes
)


def build_graph(analysis: Analysis) -> PlanGraph:
    """Runs the passes, and verifies after each."""
    plan = PlanGraph()
    for step in PASSES:
        step(plan, analysis)
        plan = replace(plan, done=(*plan.done, step.__name__))
        verify(plan)
    return plan
