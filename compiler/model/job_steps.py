"""The steps of a program that a job and its samples tell by themselves, before there is an analysis.

Contract: a path of a step starts in the job's folder; `locate_paths` makes it absolute where the step is used.
"""

from __future__ import annotations

import os
from dataclasses import replace
from typing import Any, TypeVar

from dslc.compiler.facts.transformers_file import mean_of, written_task
from dslc.compiler.ir import program as p
from dslc.compiler.ir.facts import SourceFacts
from dslc.compiler.ir.nodes import ModelGraph
from dslc.compiler.ir.tensors import TensorFact
from dslc.compiler.model.float8 import float8_step
from dslc.compiler.model.outputs import classes_come_first
from dslc.compiler.placement.losses import compares
from dslc.compiler.placement.sharding import low_copy, low_dtype
from dslc.compiler.placement.workload import ignored, loss_divisor
from dslc.dsl.language import calls as c
from dslc.dsl.language import metrics as m
from dslc.dsl.language.blocks import PythonNumbers
from dslc.dsl.language.job import JobSpec
from dslc.dsl.language.layers import PythonNetwork, TransformersNetwork
from dslc.dsl.language.preferences import PreferenceLoss, SimPO
from dslc.dsl.language.registry import Call, fields
from dslc.dsl.paths import is_path, portable, resolved
from dslc.dsl.record import Record, record
from dslc.dsl.source import short_line

HERE = "."  # the job's folder, from which paths in a plan start
Step = TypeVar("Step")


@record
class JobSteps(Record):
    """The steps that the ranks of a job will have, with absolute paths, for the trials of a user's code."""

    loss: p.LossStep
    precision: p.PrecisionStep
    network: p.PythonFunction | p.TransformersStep | None  # None: of the language's own layers
    adapter: p.AdapterStep | None
    sampler: p.SamplerStep | None
    metrics: tuple[p.MetricStep, ...]


def job_steps(job: JobSpec, source: SourceFacts, output: TensorFact | None = None) -> JobSteps:
    """Returns the steps of a job with this source; `output` is one sample of the network's, if it is known."""
    network, samples = job.model.network, getattr(job.data.sampler, "samples", None) or source.samples or 1
    step: p.PythonFunction | p.TransformersStep | None = None
    if isinstance(network, PythonNetwork):
        step = python_function(network)
    elif isinstance(network, TransformersNetwork):
        step = transformers_step(job, network, source)
    steps = JobSteps(
        loss=loss_step(job, source, output),
        precision=precision_step(job),
        network=step,
        adapter=adapter_step(job.model.adapter),
        sampler=sampler_step(job, samples),
        metrics=tuple(map(metric_step, job.evaluate.metrics)),
    )
    return locate_paths(steps, job.folder)


def locate_paths(step: Step, folder: str) -> Step:
    """Returns a step, or a record of steps, whose paths are absolute: it reads in `folder`, where its job lies."""
    changed: dict[str, Any] = {}
    match step:
        case p.ModuleStep() | p.InitStep() | p.PipelineStep():  # many, and without a path
            return step
        case tuple():
            return tuple(locate_paths(item, folder) for item in step)  # type: ignore[return-value]
        case p.PythonFunction() | p.TransformersStep():
            changed = {"folder": resolved(step.folder, folder)}
        case p.GenerateStep():
            changed = {name: resolved(getattr(step, name), folder) for name in ("tokenizer", "template")}
        case p.WeightsStep() | p.ReferenceStep(kind="weights"):
            files = tuple(resolved(file, folder) for file in step.files)
            changed = {"path": resolved(step.path, folder), "files": files}
        case p.CheckpointStep():  # what a run writes starts in the current folder
            resume = step.resume if step.resume in ("none", "auto") else resolved(step.resume, folder)
            changed = {"folder": resolved(step.folder, os.getcwd()), "resume": resume}
        case Record():
            changed = {name: locate_paths(getattr(step, name), folder) for name in step.record_names}
    if isinstance(step, p.SamplerStep):
        changed["file"] = resolved(step.file, folder)
    if isinstance(step, p.DataStep):
        paths = {name: _locate_argument(step.arguments[name], folder) for name in step.paths}
        changed["arguments"] = {**step.arguments, **paths}
    return replace(step, **changed) if changed else step  # type: ignore[type-var]


def _locate_argument(value: Any, folder: str) -> Any:
    if isinstance(value, tuple):
        return tuple(_locate_argument(item, folder) for item in value)
    return resolved(value, folder) if value and is_path(value) else value


def python_function(call: c.PythonCall) -> p.PythonFunction:
    inside, _, function = call.function.rpartition("/")
    return p.PythonFunction(
        function=function,
        arguments=dict(call.arguments),
        folder=os.path.normpath(os.path.expanduser(inside)) if inside else HERE,
        line=short_line(call.span),
    )


def arguments_of(call: Call, excluded: tuple[str, ...] = ()) -> dict[str, Any]:
    return {f.name: getattr(call, f.name) for f in fields(type(call)) if f.name not in excluded}


def precision_step(job: JobSpec, model: ModelGraph | None = None) -> p.PrecisionStep:
    """Returns the step; which layers multiply in 8 bits is known with a model."""
    return p.PrecisionStep(
        dtype=low_dtype(job),
        level="O2" if low_copy(job) else "O1",
        scaled=isinstance(job.train.precision, c.Fp16),
        float8=float8_step(job, model),
    )


def adapter_step(adapter: c.Lora | None) -> p.AdapterStep | None:
    return p.AdapterStep(**arguments_of(adapter), line=short_line(adapter.span)) if adapter is not None else None


def transformers_step(job: JobSpec, network: TransformersNetwork, source: SourceFacts) -> p.TransformersStep:
    """Returns the network's step. Unless the job says its task, it is a language model for tokens to tokens; a
    classifier for one class for tokens, or for an image; for batches that are structures, what its file says.
    """
    structured = source.structures is not None
    input, target = source.input, source.target
    single = target is not None and not target.shape
    kind = "causal_lm" if not single else "image_classification"
    if single and input is not None and input.dtype == "int64":
        kind = "sequence_classification"
    task = written_task(network, job.folder)
    if structured or (kind == "causal_lm" and task == "masked_lm"):
        kind = task or ""
    return p.TransformersStep(
        name=network.path,
        kind=network.task or kind,  # type: ignore[arg-type]
        structured=structured,
        labels=source.classes or 0,
        pad=job.data.pad,
        arguments=dict(network.arguments),
        folder=HERE,
        line=short_line(network.span),
    )


def loss_step(job: JobSpec, source: SourceFacts, output: TensorFact | None = None) -> p.LossStep:
    """Returns the step of the loss. `output` is one sample of the network's."""
    loss = job.model.loss
    class_order = {"classes": "first"} if output is not None and classes_come_first(output, source) else {}
    return p.LossStep(
        kind=loss.word,  # type: ignore[arg-type]
        arguments=_loss_arguments(job, loss) | class_order,
        counts=loss_divisor(job, source),
        ignore=ignored(job, source),
        python=python_function(loss) if isinstance(loss, c.PythonLoss) else None,
        line=short_line(job.model.value_span("loss")),
        together=int(compares(loss)),  # as on one rank
    )


def _loss_arguments(job: JobSpec, loss: Call) -> dict[str, Any]:
    if isinstance(loss, c.CrossEntropy):
        return {"label_smoothing": loss.label_smoothing}
    if isinstance(loss, PreferenceLoss):
        return {"beta": loss.beta} | ({"gamma": loss.gamma} if isinstance(loss, SimPO) else {})
    if isinstance(loss, c.Contrastive):
        return {"temperature": loss.temperature}
    network = job.model.network
    if isinstance(loss, c.NetworkLoss) and loss.mean_of is None and isinstance(network, TransformersNetwork):
        return arguments_of(loss) | mean_of(network, job.folder)
    return arguments_of(loss) if isinstance(loss, c.NetworkLoss) else {}


def sampler_step(job: JobSpec, samples: int) -> p.SamplerStep | None:
    """Returns the order of an epoch of `samples`, if a sampler decides it."""
    sampler = job.data.sampler
    if sampler is None:
        return None
    numbers = getattr(sampler, "weights", getattr(sampler, "length", None))
    return p.SamplerStep(
        kind=sampler.word,  # type: ignore[arg-type]
        samples=samples,
        replacement=getattr(sampler, "replacement", True),
        window=getattr(sampler, "window", 0),
        file=portable(numbers, job.folder) if isinstance(numbers, str) else "",
        python=python_function(numbers) if isinstance(numbers, PythonNumbers) else None,
        line=short_line(sampler.span or job.data.value_span("sampler")),
    )


def metric_step(metric: Call) -> p.MetricStep:
    name = m.name_of(metric)
    if isinstance(metric, m.TopK):
        return p.MetricStep(kind="top_k", name=name, k=metric.k)
    if isinstance(metric, m.PythonMetric):
        return p.MetricStep(kind="python", name=name, python=python_function(metric))
    if isinstance(metric, m.TorchMetric):
        arguments = {name: "none" if value == "each" else value for name, value in arguments_of(metric).items()}
        return p.MetricStep(kind="torchmetrics", name=name, torchmetrics=metric.torch_class, arguments=arguments)
    return p.MetricStep(kind=metric.word, name=name)  # type: ignore[arg-type]
