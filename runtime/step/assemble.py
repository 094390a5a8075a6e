"""Applies the techniques to a model in their order. Each has a file of its own."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor, nn

from dslc.compiler.ir.program import JobProgram
from dslc.runtime.data.samples import Samples, batch_aside
from dslc.runtime.exchange.base import Exchange, GradientExchange
from dslc.runtime.exchange.build import exchange_of, local_engine
from dslc.runtime.exchange.compressed_adam import compressed
from dslc.runtime.model import documents, initial_weights
from dslc.runtime.model.experts.expert_balance import ExpertBalance
from dslc.runtime.model.losses import LossSum, loss_sum
from dslc.runtime.model.meta_model import blank, build_model
from dslc.runtime.parallel import context_parallel, ddp, expert_parallel, fsdp, tensor_parallel
from dslc.runtime.parallel.custom_optimizer import weights_in_place
from dslc.runtime.parallel.engine import Engine, do_nothing
from dslc.runtime.parallel.mesh import mesh_of, several_axes
from dslc.runtime.parallel.optimizers import build_optimizer
from dslc.runtime.pipeline import pipeline
from dslc.runtime.pipeline.input_form import InputForm
from dslc.runtime.pipeline.recording import SMALL
from dslc.runtime.process.job_line import mark_errors
from dslc.runtime.technique import (
    batch_norm,
    chunked_head,
    compiling,
    dynamo,
    float8,
    frozen,
    offload,
    recompute,
    sample_draws,
)
from dslc.runtime.technique.ema import Average, WeightsInPlace
from dslc.runtime.technique.precision import grad_scaler, widen_model


@dataclass(frozen=True, kw_only=True)
class TrainingComponents:
    """The parts of a training. `plain` is the model under its own names, `engine` holds the module that the loop calls.
    Under a pipeline `plain` is this rank's part of the model, its own stages. `average` are other weights that are
    evaluated in their place, if the job has such.
    """

    plain: nn.Module
    engine: Engine
    optimizer: torch.optim.Optimizer
    scaler: torch.amp.GradScaler
    loss: LossSum
    device: torch.device
    pipeline: pipeline.Pipeline | None = None
    exchange: Exchange | None = None  # how ranks agree, if that is no exact sum of gradients
    further: dict[str, Tensor] = field(default_factory=dict)  # sums of a step's further losses on this rank, by name
    average: WeightsInPlace | None = None
    experts: ExpertBalance | None = None  # if the model has experts


def assemble(
    job: JobProgram,
    device: torch.device,
    tell: initial_weights.Tell = lambda line, whole: None,
    samples: Samples | None = None,
) -> TrainingComponents:
    """Makes the parts on `device`, in an open process group. `tell` is given lines for whoever watches the training;
    `samples` are recorded with by stages that take structures.
    """
    axis: pipeline.Pipeline | None = None
    exchange: Exchange | None = None
    moved, skips = offload.moves_optimizer(job), job.on_nonfinite == "skip"
    if not moved:  # which needs all of torch
        dynamo.leave_out()
    if job.pipeline is not None:
        plain, engine, axis = _staged(job, device, tell, samples)
    else:
        parts = job.gradients.kind == "fsdp" or job.tensor is not None
        if parts:
            plain, engine = _sharded(job, device, tell)
        else:
            plain, engine, exchange = _assemble_unpipelined(job, device, tell)
    with mark_errors(job.optimizer.line):
        optimizer = build_optimizer(
            job.optimizer,
            plain,
            shared_out=job.gradients.kind == "zero1",
            moved=moved,
            kind=compressed(job.optimizer, exchange),
            names=axis.names if axis is not None else None,
        )
    # Of a user's own step some parameters are sharded, and others whole.
    mixed = job.own_step is not None and job.gradients.kind == "fsdp"
    agreed = several_axes(job) or job.gradients.kind == "local" or mixed
    scaler = grad_scaler(job.precision, device, engine.scale, agreed=agreed, skips=skips)
    if isinstance(exchange, GradientExchange):
        exchange.scaler = scaler
    average: WeightsInPlace | None = None
    if job.is_training:
        moving = Average(job.average, plain, optimizer) if job.average is not None else None
        with mark_errors(job.optimizer.line):
            average = weights_in_place(moving, plain, optimizer)
    others = mesh_of(job).group("data", "context") if job.world_size > 1 else None
    balance = ExpertBalance(plain, job.model.root, others, device)
    return TrainingComponents(
        plain=plain,
        engine=engine,
        optimizer=optimizer,
        scaler=scaler,
        loss=loss_sum(job.loss, context_parallel.answer_pieces(job)),
        device=device,
        pipeline=axis,
        exchange=exchange,
        average=average,
        experts=balance if balance.layers else None,
    )


def _assemble_unpipelined(
    job: JobProgram, device: torch.device, tell: initial_weights.Tell
) -> tuple[nn.Module, Engine, Exchange | None]:
    plain = build_model(job.model, device)  # with its memory format, which must be fixed before buckets are laid out
    initial_weights.load(job.model, plain, tell=tell)
    _widen(job, plain)
    _apply(job, plain, device)
    exchange = exchange_of(job, plain)
    if job.gradients.kind == "local":
        return plain, local_engine(job, plain, exchange), exchange
    hook = exchange.hook if isinstance(exchange, GradientExchange) else None
    # May broadcast rank 0's numbers: before the optimizer takes any.
    return plain, ddp.wrap(job, plain, hook, exchange.gradients if exchange is not None else do_nothing), exchange


def _sharded(job: JobProgram, device: torch.device, tell: initial_weights.Tell) -> tuple[nn.Module, Engine]:
    """Builds a sharded model. Nothing has numbers until all is in place, so that no rank ever holds the model whole."""
    made = blank(job.model)
    _widen(job, made.module)
    _apply(job, made.module, device)
    engine = _engine(job, made.module, device)
    home = offload.home(job, device)
    made.fill(lambda value, old: fsdp.place(value, old, device, home), device)
    initial_weights.load(job.model, made.module, tell=tell)
    return made.module, engine


def _staged(
    job: JobProgram, device: torch.device, tell: initial_weights.Tell, samples: Samples | None
) -> tuple[nn.Module, Engine, pipeline.Pipeline]:
    """Builds the stages of this rank, cut out of the model before they have numbers."""
    made, mesh = blank(job.model), mesh_of(job)
    frozen.freeze(job.model, made.module)  # while each pattern still finds all its parameters
    sample_draws.apply(job.draws, made.module, mesh.coordinates, mesh.sizes, device)
    with mark_errors(job.data.line):
        input_form = _input_form(job, samples)
    cut = pipeline.cut(job, made, mesh.coordinates["pipeline"], input_form)
    plain = cut.made.module
    _apply(cut.job, plain, device)
    axis = pipeline.join(job, cut, mesh, device)
    engine, home = _engine(cut.job, plain, device, tuple(axis.stages.values())), offload.home(job, device)
    cut.made.fill(lambda value, old: fsdp.place(value, old, device, home), device)
    cut.name_shared()
    initial_weights.load(job.model, plain, cut.whole, tell)
    return plain, axis.engine(engine, plain), axis


def _input_form(job: JobProgram, samples: Samples | None) -> InputForm:
    """Returns the form of a batch: what the plan says, and for structures what the data give."""
    assert job.pipeline is not None
    leaves = job.pipeline.stages[0].inputs
    if not job.data.structured:
        return InputForm(leaves)
    assert samples is not None
    example, _ = batch_aside(samples, torch.zeros(SMALL, dtype=torch.int64))
    return InputForm(leaves, example)


def _widen(job: JobProgram, model: nn.Module) -> None:
    """Makes a model float64 where its training is compared without rounding, before anything is laid out for it."""
    if job.observation is not None and job.observation.exact:
        assert job.pipeline is None and job.precision.dtype == "float32", "stages send float32"
        widen_model(model)


def _engine(job: JobProgram, model: nn.Module, device: torch.device, stages: Sequence[nn.Module] = ()) -> Engine:
    """Returns the engine that lays a model without numbers over the ranks; `stages` are called separately."""
    if job.gradients.kind == "fsdp":
        return fsdp.shard(job, model, device, stages)
    return tensor_parallel.engine(job, model) if job.tensor is not None else Engine(model=model)


def _apply(job: JobProgram, plain: nn.Module, device: torch.device) -> None:
    """Applies the techniques that change the modules of a model in place."""
    frozen.freeze(job.model, plain)  # before any engine, which handles only parameters that train
    float8.apply(job.precision, plain, device)
    chunked_head.apply(job.loss, plain, is_whole=job.pipeline is None, compiles=bool(job.compiled))
    if job.sync_batch_norm:
        # Before the engine, which wraps the module as it is.
        batch_norm.synchronise(plain, mesh_of(job).group("data", "context"))
    if job.precision.level == "O2":
        batch_norm.widen(plain)
    mesh = mesh_of(job)
    sample_draws.apply(job.draws, plain, mesh.coordinates, mesh.sizes, device)
    tensor_parallel.apply(job, plain)  # before `forward` is replaced, and before each rank's share is cut into rows
    documents.apply(
        job.model.documents,
        plain,
        masks=job.model.documents_masked,
        piece=mesh.coordinates["context"],
        pieces=mesh.sizes["context"],
        whole=job.pipeline is None and job.axes["context"] == 1,
        compiled=bool(job.compiled),
    )
    context_parallel.apply(job, plain)
    expert_parallel.apply(job, plain)
    # Inside the gathering of parameters, which are then present when it runs again, and visible to the compiler. But
    # of modules that are recomputed whole the compiler cannot follow attention within documents, and where they are
    # cut over a tensor axis, torch (2.13) would keep a mesh among the tensors, and fail. What `selective` keeps of
    # compiled code may be overwritten by it: E0329 refuses it for documents.
    around = (job.tensor is not None or job.model.documents is not None) and job.recompute.kind == "full"
    if not around:
        recompute.apply(job.recompute, plain)
    compiling.apply(
        job.compiled,
        plain,
        device,
        cut=job.tensor is not None,
    )
    if around:
        recompute.apply(job.recompute, plain)
