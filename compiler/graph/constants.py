"""The job's constants as the steps of a program: the part that all ranks share, each decided here or in
compiler/model/job_steps.py, which has those that need no analysis.
"""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

from dslc.compiler.facts.sources import FOUND_PATHS, context_of, source_key
from dslc.compiler.facts.weights_file import Unreadable, WeightFiles, files_of
from dslc.compiler.ir import program as p
from dslc.compiler.ir.actions import Shape
from dslc.compiler.ir.facts import SourceFacts
from dslc.compiler.ir.network_facts import OptimizerFacts
from dslc.compiler.ir.records import NodeRecord
from dslc.compiler.ir.tensors import TensorFact
from dslc.compiler.model.job_steps import (
    adapter_step,
    arguments_of,
    loss_step,
    metric_step,
    precision_step,
    python_function,
    sampler_step,
    transformers_step,
)
from dslc.compiler.model.outputs import classes_come_first
from dslc.compiler.placement.draws import draw_step, draws_of_own_loss, draws_of_own_step
from dslc.compiler.placement.exchange import ExchangePolicy
from dslc.compiler.placement.losses import compared_ranks
from dslc.compiler.placement.sharding import (
    adamw_matrices,
    channels_last,
    compiles_loss,
    fused_on,
    offloaded,
    recomputed,
    searches,
    units,
)
from dslc.compiler.placement.staging import Staging, boundary_tensors
from dslc.compiler.placement.tensor_plan import TensorPlan
from dslc.compiler.placement.workload import (
    PartLoad,
    Workload,
    document_end,
    ignored,
    in_steps,
    masks_documents,
    steps_of,
)
from dslc.compiler.rules.analysis import Analysis
from dslc.compiler.rules.data.images import picture_step
from dslc.compiler.rules.parallelism.exchange import exchange_span
from dslc.compiler.rules.training.generation import generate_step
from dslc.dsl.language import calls as c
from dslc.dsl.language.blocks import RecomputeBudget
from dslc.dsl.language.goals import EarlyStopping, Goal, RewindOnSpike, SpikeResponse
from dslc.dsl.language.job import JobSpec
from dslc.dsl.language.layers import PythonNetwork, TransformersNetwork
from dslc.dsl.language.loggers import PythonLogger, TensorBoardLogger
from dslc.dsl.language.lr_schedules import LinearScale, Plateau, PythonSchedule, Schedule, SqrtScale
from dslc.dsl.language.optimizers import Group, PythonOptimizer
from dslc.dsl.language.preferences import REFERENCES, ReferencedLoss
from dslc.dsl.language.registry import Call, Quantity
from dslc.dsl.paths import ResolvedPath, portable
from dslc.dsl.source import short_line

Ends = tuple[tuple[tuple[Shape, str], ...], tuple[tuple[Shape, str], ...]]  # inputs and outputs of a stage


def constants(analysis: Analysis) -> Iterator[tuple[str, NodeRecord]]:
    """Yields the steps of a program, by the names of their nodes; none if a size is unknown that a run needs."""
    job, workload = analysis.job, analysis.workload
    if workload.steps is None or workload.steps_per_epoch is None or workload.train is None:
        return
    if analysis.model is None and not job.model.has_user_network:
        return
    yield "training", _training(analysis, workload.steps, workload.steps_per_epoch)
    yield "model", model_step(analysis)
    together = compared_ranks(job, analysis.layout)
    output = analysis.model.output if analysis.model is not None else None
    loss = loss_step(job, analysis.source, output)
    compiled = compiles_loss(job, cut=analysis.layout.sizes["tensor"] > 1)
    head = analysis.staging.chunked_head if analysis.staging is not None else None
    if head is not None:
        loss, compiled = replace(loss, head=head.module, chunks=head.chunks), False
    reference = _reference(job)
    loss_draws = draws_of_own_loss(job, analysis.layout, analysis.facts.loss_draws)
    yield "loss", replace(loss, together=together, compiled=compiled, reference=reference, draws=loss_draws)
    yield "data", data_step(analysis)
    yield "optimizer", optimizer_step(analysis)
    yield "learning rate", _learning_rate(analysis)
    yield "precision", precision_step(job, analysis.model)
    yield "gradients", _gradients(analysis)
    yield "recompute", _recompute(analysis)
    yield "checkpoint", _checkpoint(analysis)
    tensor = _tensor(analysis.staging) if analysis.staging else None
    if tensor is not None:
        yield "tensor", tensor
    context = _context(analysis)
    if context is not None:
        yield "context", context
    experts = _experts(analysis)
    if experts is not None:
        yield "experts", experts
    cuts = analysis.staging.cuts if analysis.staging else TensorPlan()
    draws = (
        draws_of_own_step(job, analysis.facts.step_draws)
        if job.train.step is not None
        else draw_step(job, analysis.layout, analysis.model, cuts)
    )
    if draws is not None:
        yield "draws", draws


def _training(analysis: Analysis, steps: int, steps_per_epoch: int) -> p.Training:
    job, layout, workload = analysis.job, analysis.layout, analysis.workload
    every, check_replicas, loggers = job.evaluate.every, job.train.check_replicas, job.log.loggers
    return p.Training(
        timeout=job.launch.timeout,
        restarts=job.launch.restarts,
        steps=steps,
        steps_per_epoch=steps_per_epoch,
        max_time=job.train.max_time,
        average=average_step(job.train.average, workload),
        clip=job.train.clip_norm,
        clip_value=job.train.clip_value,
        on_nonfinite=job.train.on_nonfinite,  # type: ignore[arg-type]
        on_spike=spike_step(job.train.on_spike),
        check_replicas=(in_steps(check_replicas, workload) or 0) if check_replicas else 0,
        # What a network has whose step is a user's own is not known before it is made.
        sync_batch_norm=layout.sizes["data"] > 1
        and not (analysis.sharding.exchange is not None and analysis.sharding.exchange.differ)
        and (bool(analysis.model and analysis.model.batch_norm) or job.train.step is not None),
        moves_buffers=analysis.model is not None and analysis.model.moves_buffers and layout.sizes["data"] > 1,
        offload=tuple(what for what in job.memory.offload if what in offloaded(job, layout)),
        compiled=_compiled(analysis),
        evaluate_every=(in_steps(every, workload) or 0) if every else 0,
        evaluate_start=job.evaluate.start,
        evaluate_training=job.evaluate.training,
        metrics=tuple(map(metric_step, job.evaluate.metrics)),
        generate=generate_step(job, analysis.source, layout, workload),
        early_stopping=goal_step(job.train.early_stopping),
        own_step=python_function(job.train.step) if isinstance(job.train.step, c.PythonStep) else None,
        log_every=in_steps(job.log.every, workload) or 1,
        tensorboard=job.log.tensorboard and not any(isinstance(logger, TensorBoardLogger) for logger in loggers),
        hooks=tuple(
            p.HookStep(python=python_function(hook), everywhere=hook.ranks == "all") for hook in job.train.hooks
        ),
        loggers=tuple(python_function(logger) for logger in loggers if isinstance(logger, PythonLogger)),
        deterministic=job.train.deterministic,
        seed=job.train.seed,
    )


def stage_ends(analysis: Analysis) -> tuple[Ends, ...]:
    """Returns the tensors of one sample that each stage receives, and sends."""
    model, pipeline = analysis.model, analysis.pipeline
    assert model is not None and pipeline is not None
    given: tuple[TensorFact, ...] = (model.input,)
    if analysis.source.structures is not None:
        given = analysis.source.structures[0].samples
    sizes = analysis.layout.sizes
    assert analysis.staging is not None
    plan = analysis.staging.cuts
    ends = []
    for index, numbers in enumerate(pipeline.stages):
        made = (
            boundary_tensors(analysis.job, model, numbers[-1]) if index + 1 < len(pipeline.stages) else (model.output,)
        )
        before = model.layers[numbers[0]].name
        after = model.layers[numbers[-1] + 1].name if index + 1 < len(pipeline.stages) else ""
        inputs = tuple((plan.local_input_shape(before, fact.shape, sizes), fact.dtype) for fact in given)
        ends.append((inputs, tuple((plan.local_input_shape(after, fact.shape, sizes), fact.dtype) for fact in made)))
        given = made
    return tuple(ends)


def _recompute(analysis: Analysis) -> p.RecomputeStep:
    recompute = analysis.job.memory.recompute
    modules = recomputed(analysis.job, analysis.model) if analysis.model else ()
    kind = recompute if isinstance(recompute, str) else "full"
    budget = recompute.peak if isinstance(recompute, RecomputeBudget) else 0
    blocks = sum(layer.recomputable for layer in analysis.model.layers) if analysis.model and budget else 0
    step = p.RecomputeStep(modules=modules, budget=budget, blocks=blocks)
    return replace(step, kind=kind) if modules else step  # type: ignore[arg-type]


def _compiled(analysis: Analysis) -> tuple[str, ...]:
    """Returns the modules to compile: blocks one by one, as equal blocks that draw nothing are compiled once; the whole
    model if it has none. With `compile = true` it is the whole model also on one GPU, if nothing is recomputed: a step
    then makes one call, and the code between blocks is compiled with them. Several ranks exchange gradients of a block
    as soon as it is done.
    """
    job, layout = analysis.job, analysis.layout
    if not job.train.compile:
        return ()
    whole = layout.world_size == 1 and analysis.sharding.engine == "none" and job.memory.recompute == "none"
    if layout.device == "cuda" and whole and job.train.compile != "blocks":
        return ("",)
    blocks = tuple(layer.name for layer in analysis.model.layers if layer.recomputable) if analysis.model else ()
    return blocks or ("",)


def _tensor(staging: Staging) -> p.TensorParallelStep | None:
    ranks, plan = staging.layout.sizes["tensor"], staging.cuts
    if ranks == 1:
        return None
    styles = tuple(plan.styles)
    return p.TensorParallelStep(
        size=ranks,
        sequence=plan.sequence,
        styles=styles,
        loss_parallel=plan.loss_parallel,
        parts=tuple(plan.parts.items()),
        asynchronous=staging.job.parallelism.async_tensor,
    )


def _checkpoint(analysis: Analysis) -> p.CheckpointStep:
    checkpoint = analysis.job.checkpoint
    every = checkpoint.every
    timed = every is not None and every.dimension == "time"
    return p.CheckpointStep(
        every=(in_steps(every, analysis.workload) or 0) if every and not timed else 0,
        seconds=float(every.value) if every and timed else 0.0,
        best=goal_step(checkpoint.best),
        keep=checkpoint.keep,
        asynchronous=checkpoint.asynchronous,
        folder=portable(checkpoint.dir, os.getcwd()) if checkpoint.dir else "",
        resume=portable(checkpoint.resume, analysis.job.folder) if checkpoint.resume else "none",
        line=short_line(checkpoint.value_span("every") if checkpoint.is_set("every") else None),
    )


def _context(analysis: Analysis) -> p.ContextStep | None:
    """Returns the context axis of a network that was traced; dslc's own layers need to be told nothing."""
    model = analysis.model
    pieces = model.traced.pieces if model is not None and model.traced is not None else None
    if pieces is None or analysis.layout.sizes["context"] == 1:
        return None
    modules = dict.fromkeys(call.module for call in pieces.attention)
    return p.ContextStep(attention=tuple(modules), positions=pieces.positions)


def model_step(analysis: Analysis) -> p.ModelStep:
    job, model = analysis.job, analysis.model
    network, seed = job.model.network, job.train.seed
    common: dict[str, Any] = {
        "seed": seed,
        "weights": _weights(job, job.model.start) if job.model.start and job.model.start.path else None,
        "frozen": job.model.freeze,
        "documents": document_end(job, analysis.source),
        "documents_masked": model is not None and masks_documents(job, analysis.layout, model),
        "adapter": adapter_step(job.model.adapter),
        "quantized": analysis.facts.model.quantized if analysis.facts.model is not None else (),
    }
    own = common | ({"ties": model.ties, "reset": model.reset} if model else {})
    if isinstance(network, PythonNetwork):
        return p.ModelStep(python=python_function(network), **own)
    if isinstance(network, TransformersNetwork):
        return p.ModelStep(transformers=transformers_step(job, network, analysis.source), **own)
    assert model is not None and model.root is not None
    order = channels_last(analysis.layout, analysis.sharding, model)
    return p.ModelStep(root=model.root, inits=model.inits, ties=model.ties, channels_last=order, **common)


def _weights(job: JobSpec, start: c.Pretrained) -> p.WeightsStep:
    try:
        found = files_of(start.path)
    except Unreadable:  # a rule reports it, and no run comes as far as to open them
        found = WeightFiles(path=start.path, files=(start.path,))

    def portable_path(path: str) -> str:
        return portable(path, job.folder, start.path)

    return p.WeightsStep(
        files=tuple(map(portable_path, found.files)),
        path=portable_path(found.path),
        only=start.only,
        rename=start.rename,
        allow_missing=start.allow_missing,
        allow_unused=start.allow_unused,
        line=short_line(start.value_span("path")),
    )


def _reference(job: JobSpec) -> p.ReferenceStep | None:
    """Returns the step of the reference model of a loss of pairs."""
    loss = job.model.loss
    if not isinstance(loss, ReferencedLoss):
        return None
    line = short_line(loss.value_span("reference"))
    if loss.reference in REFERENCES:
        return p.ReferenceStep(kind=loss.reference, line=line)  # type: ignore[arg-type]
    weights = _weights(job, c.Pretrained(path=loss.reference))
    return p.ReferenceStep(kind="weights", files=weights.files, path=weights.path, line=line)


def data_step(analysis: Analysis) -> p.DataStep:
    """Returns the step of the samples, whose numbers must be known."""
    job, workload = analysis.job, analysis.workload
    assert workload.train is not None and workload.visited is not None
    whole = PartLoad(train=workload.train, validation=workload.validation, test=workload.test, split=workload.split)
    made = _source_step(analysis, job.data.source, analysis.source, whole, job.train.seed)
    if not workload.mixed:
        return replace(made, sampler=sampler_step(job, workload.visited))
    sources = zip(c.parts_of(job.data.source), analysis.source.parts, workload.mixed, strict=True)
    parts = [
        # Each with a seed of its own: two of one kind draw different noise, and hold out different samples.
        replace(_source_step(analysis, call, facts, load, (job.train.seed + n) % 2**63), last=0)
        for n, (call, facts, load) in enumerate(sources)
    ]
    return replace(made, parts=tuple(parts), counts=tuple(load.visited or 0 for load in workload.mixed))


def _source_step(analysis: Analysis, source: Call, facts: SourceFacts, load: PartLoad, seed: int) -> p.DataStep:
    """Returns the step of the job's source, or of one of a mixture."""
    job, workload = analysis.job, analysis.workload
    ignore = ignored(job, analysis.source)
    assert load.train is not None
    name, arguments = source_key(source)
    context = context_of(job)
    if name in ("stdlib", "text", "tokens", "chat", "preferences") or (name == "synthetic" and arguments.get("vocab")):
        arguments = arguments | {"context": context}
    named = {name: value for name, value in arguments.items() if _origin(value)}
    found = dict(facts.found)
    paths = named.keys() | {name for name in FOUND_PATHS & found.keys() if found[name]}
    for values, origin in ((arguments, None), (found, next(map(_origin, named.values()), None))):
        values |= {name: _portable(values[name], job.folder, origin) for name in paths & values.keys()}
    return p.DataStep(
        source=name,
        arguments=arguments | found | _limits(analysis, source),
        paths=tuple(sorted(paths)),
        python=python_function(source) if isinstance(source, c.PythonSource) else None,
        pictures=picture_step(source, facts),
        structured=analysis.source.structures is not None,
        collate=python_function(collate) if isinstance(collate := job.data.collate, c.PythonCollate) else None,
        whole=isinstance(job.model.loss, c.NetworkLoss),
        train_samples=load.train,
        validation_samples=load.validation or 0,
        test_samples=load.test or 0,
        split=load.split,  # type: ignore[arg-type]
        seed=seed,
        shuffle=job.data.shuffle,
        batch=workload.batch,
        last=workload.last or 0,
        shares=workload.shares,
        most_share=workload.share if workload.measured else 0,
        pad=job.data.pad,
        documents=document_end(job, analysis.source),
        ignore=-100 if ignore is None else ignore,
        workers=job.data.workers,
        stream=workload.stream,
        line=short_line(source.span if isinstance(job.data.source, c.Mixture) else job.data.value_span("source")),
    )


def _origin(value: object) -> ResolvedPath | None:
    """Returns the path that an argument of a source is, or the first of several."""
    first = value[0] if isinstance(value, tuple) and value else value
    return first if isinstance(first, ResolvedPath) else None


def _portable(value: Any, folder: str, origin: ResolvedPath | None) -> Any:
    """Returns one path, or several, for the plan."""
    if isinstance(value, tuple):
        return tuple(_portable(each, folder, origin) for each in value)
    return portable(value, folder, origin) if value and isinstance(origin or value, ResolvedPath) else value


def _limits(analysis: Analysis, call: Call) -> dict[str, object]:
    """Returns the upper limits for the numbers in files and in a user's data set, whose contents are unknown. A user's
    own loss may take targets for something else than classes: `outputs` is then for the message if it fails.
    """
    job, model, source = analysis.job, analysis.model, analysis.source
    if model is None or not isinstance(call, c.Tokens | c.Parquet | c.Datasets | c.Arrays | c.PythonSource):
        return {}
    embedding = model.root and next((m for m in model.root.walk() if m.kind == "Embedding"), None)
    tokens = source.input is not None and source.input.dtype == "int64"
    dim = 0 if classes_come_first(model.output, source) else -1
    outputs = model.output.shape[dim] if model.output.shape else None
    ignore = ignored(job, source)
    return {
        "model_vocab": embedding.arguments["num_embeddings"] if embedding and tokens else None,
        "model_classes": outputs if isinstance(job.model.loss, c.CrossEntropy) else None,
        "outputs": outputs if isinstance(job.model.loss, c.PythonLoss) else None,
        "ignore": -100 if ignore is None else ignore,
    }


def _gradients(analysis: Analysis) -> p.GradientStep:
    """Returns how parameters, gradients and the optimizer's state lie over the data axis, and how ranks agree."""
    job, layout, model = analysis.job, analysis.layout, analysis.model
    plan = analysis.sharding
    own = job.model.has_user_network
    stepping = job.train.step is not None  # it exchanges gradients by itself
    return p.GradientStep(
        kind="none" if stepping and plan.engine == "ddp" else plan.engine,
        # A static graph lets DDP skip the search for unused parameters. It excludes `no_sync`, and control flow in a
        # user's module that depends on data.
        static_graph=not own and layout.microbatches == 1,
        unused=model.unused if own and model else (),
        search=plan.engine != "none" and model is not None and searches(model, plan),
        replicas=plan.replicas,
        units=tuple(unit.name for unit in units(model) if unit.name) if plan.engine == "fsdp" and model else (),
        reshard=plan.reshard,
        accumulate=plan.accumulate,
        averages=plan.replicas * plan.shards if plan.engine in ("ddp", "zero1", "local") and not stepping else 1,
        exchange=_exchange(job, plan.exchange) if plan.exchange is not None and not stepping else None,
    )


def _experts(analysis: Analysis) -> p.ExpertParallelStep | None:
    """Returns which experts the expert axis shares; None without one."""
    if analysis.sharding.experts == 1 or analysis.model is None:
        return None
    experts = {q.name.rpartition(".")[0]: q.experts for layer in analysis.model.layers for q in layer.parameters}
    layers = tuple((name, count) for name, count in experts.items() if count)
    skew = analysis.job.parallelism.expert_skew
    return p.ExpertParallelStep(size=analysis.sharding.experts, layers=layers, skew=skew)


def _exchange(job: JobSpec, exchange: ExchangePolicy) -> p.ExchangeStep:
    return p.ExchangeStep(
        kind=exchange.kind,
        agrees=exchange.agrees,
        every=exchange.every,
        alone=exchange.alone,
        pieces=exchange.pieces,
        arguments=exchange.arguments,
        line=short_line(exchange_span(job)),
    )


def _scaled(job: JobSpec, lr: float) -> float:
    """Returns a learning rate after `scale_lr`."""
    match job.train.scale_lr:
        case LinearScale(base_batch=base):
            return lr * job.data.batch / base
        case SqrtScale(base_batch=base):
            return float(lr * (job.data.batch / base) ** 0.5)
        case _:
            return lr


def _base_lr(job: JobSpec) -> float | None:
    """Returns the learning rate before `scale_lr`; None if that leaves it as it is."""
    lr = job.train.optimizer.lr
    return lr if _scaled(job, lr) != lr else None


def optimizer_step(analysis: Analysis) -> p.OptimizerStep:
    job, optimizer = analysis.job, analysis.job.train.optimizer
    if isinstance(optimizer, PythonOptimizer):
        facts, own = analysis.facts.optimizer or OptimizerFacts(), python_function(optimizer)
        return p.OptimizerStep(
            kind=own.function,
            lr=_scaled(job, optimizer.lr),
            base_lr=_base_lr(job),
            state=tuple(sorted({fact.name for kind in facts.kinds for fact in kind})),
            counts=(),
            fused=(),
            no_decay=job.train.no_decay,
            python=own,
            group_state=facts.group_state,
            closure=facts.closure,
            line=short_line(optimizer.span),
        )
    optimizers = [kind for kind in (optimizer, optimizer.fallback) if kind is not None]
    matrices = adamw_matrices(job, analysis.model)
    rates = {name: _scaled(job, getattr(optimizer, name)) for name in optimizer.rates}
    return p.OptimizerStep(
        kind=optimizer.class_name,
        lr=_scaled(job, optimizer.lr),
        base_lr=_base_lr(job),
        state=tuple(name for kind in optimizers for name in (*kind.counts, *kind.state)),
        counts=tuple(name for kind in optimizers for name in kind.counts),
        fused=fused_on(job, analysis.model),
        no_decay=job.train.no_decay,
        groups=tuple(_group(job, each) for each in job.train.groups),
        arguments=arguments_of(optimizer, excluded=optimizer.apart) | optimizer.more | rates,
        codes=optimizer.has_codes,
        split=optimizer.fallback is not None,
        adamw=None if matrices is None else tuple(matrices.items()),
        line=short_line(optimizer.span),
    )


def _group(job: JobSpec, group: Group) -> p.GroupStep:
    lr = None if group.lr is None else _scaled(job, group.lr)
    return p.GroupStep(parameters=group.parameters, lr=lr, weight_decay=group.weight_decay)


def _learning_rate(analysis: Analysis) -> p.LearningRateStep:
    schedule, workload = analysis.job.train.lr_schedule, analysis.workload
    assert workload.steps is not None
    if isinstance(schedule, PythonSchedule):
        own = python_function(schedule)
        return p.LearningRateStep(kind="python", steps=workload.steps, python=own)
    assert isinstance(schedule, Schedule)
    values = {name: _in_steps(name, value, workload) for name, value in arguments_of(schedule).items()}
    if "from_" in values:
        values["begin"] = values.pop("from_")
    if isinstance(schedule, Plateau):
        own_names = {field.name for field in dataclasses.fields(p.PlateauStep)} & values.keys()
        of_plateau = {name: values.pop(name) for name in own_names}
        values["plateau"] = p.PlateauStep(**of_plateau, line=short_line(schedule.value_span("metric")))
    return p.LearningRateStep(kind=schedule.curve, steps=workload.steps, **values)  # type: ignore[arg-type]


def _in_steps(name: str, value: Any, workload: Workload) -> Any:
    """Returns an argument of a learning rate schedule with its times in steps: at least one, except for a warm-up."""
    if isinstance(value, tuple):
        return tuple(sorted(_in_steps(name, each, workload) for each in value))
    if not isinstance(value, Quantity):
        return value
    return max(steps_of(value, workload) or 0, 0 if name == "warmup" else 1)


def average_step(average: c.EMA | None, workload: Workload) -> p.AverageStep | None:
    if average is None:
        return None
    values = arguments_of(average, excluded=("every", "after"))
    every = in_steps(average.every, workload) or 1
    after = (in_steps(average.after, workload) or 0) if average.after.value else 0
    return p.AverageStep(**values, every=every, after=after)


def spike_step(response: SpikeResponse | None) -> p.SpikeStep | None:
    if response is None:
        return None
    step = p.SpikeStep(action=response.word, window=response.window, deviations=response.deviations)  # type: ignore[arg-type]
    if isinstance(response, RewindOnSpike):
        return replace(step, steps=response.steps, skip=response.skip, times=response.times)
    return step


def goal_step(goal: Goal | None) -> p.GoalStep | None:
    if goal is None:
        return None
    step = p.GoalStep(metric=goal.metric, highest=goal.highest, line=short_line(goal.value_span("metric")))
    return replace(step, patience=goal.patience, by=goal.by) if isinstance(goal, EarlyStopping) else step
