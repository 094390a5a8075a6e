"""The facts of a job: of its data, of the user's own functions, of this machine."""

from __future__ import annotations

import importlib.util
import os
from collections.abc import Callable
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from dslc.compiler.facts.sources import source_facts
from dslc.compiler.ir.facts import Facts, MachineFacts, SourceFacts
from dslc.compiler.ir.tensors import TensorFact
from dslc.compiler.model.model import build
from dslc.compiler.model.opaque import opaque
from dslc.compiler.placement.layout import lay_out
from dslc.compiler.placement.sharding import low_copy, low_precision, units
from dslc.compiler.rules.analyse import context_of
from dslc.compiler.rules.training import configuration_file
from dslc.dsl.diagnostics import Report
from dslc.dsl.language.calls import Datasets, Parquet, PythonCall, PythonLoss, PythonSource
from dslc.dsl.language.job import JobSpec
from dslc.dsl.language.layers import PythonNetwork, TransformersNetwork
from dslc.dsl.language.lr_schedules import PythonSchedule
from dslc.dsl.source import Span
from dslc.dsl.words import plural
from dslc.probe.unseen import can_be_tried, tell_of_network

if TYPE_CHECKING:
    from dslc.compiler.ir.module_facts import ModelFacts

from dslc.probe.child import first_line, in_child, where_in_the_users_code


def gather(job: JobSpec, report: Report, *, trace: bool, run: bool) -> Facts:
    """Returns the facts that the job does not state: of its data, of the user's own functions (only with `trace`), of
    this machine.
    """
    source = source_facts(job.data.source, context_of(job))
    if isinstance(job.data.source, Parquet | Datasets) and not source.missing:
        source = _opened(job.data.source, fetch=run)
    model: ModelFacts | None = None
    if trace and isinstance(job.data.source, PythonSource):
        source = _traced_source(job, job.data.source, report) or source
    network = job.model.network
    if trace and isinstance(network, PythonNetwork):
        model = _traced_model(job, network, source, report)
    elif trace and isinstance(network, TransformersNetwork) and _is_here(network, job.folder):
        model = _traced_transformers(job, network, source, report, run)
    made = isinstance(network, PythonNetwork | TransformersNetwork) and _is_here(network, job.folder)
    if trace and not run and made and source.input is None and not report.errors:
        tell_of_network(job, source, report)
    if trace and isinstance(job.model.loss, PythonLoss):
        _try_loss(job, job.model.loss, source, model, report)
    if trace and isinstance(job.train.lr_schedule, PythonSchedule):
        _try_schedule(job, job.train.lr_schedule, report)
    return Facts(source=source, model=model, machine=_machine(job) if run else None)


def _is_here(network: PythonNetwork | TransformersNetwork, folder: str) -> bool:
    """True if there is a configuration to build the network from; a rule reports that there is none."""
    if isinstance(network, PythonNetwork):
        return True
    file = configuration_file(network, folder)
    return file is None or os.path.exists(file)


def _opened(call: Parquet | Datasets, *, fetch: bool) -> SourceFacts:
    """Opens a table in a child, so that the library is not loaded here. Only `run` may download it."""
    from dslc.compiler.facts.sources import source_key
    from dslc.compiler.ir.codec import from_json

    _, arguments = source_key(call)

    def work() -> Any:
        from dslc.runtime.data import tables

        try:
            if isinstance(call, Parquet):
                return tables.parquet_facts(call.files, call.input, call.target, call.size)
            return tables.datasets_facts(arguments, fetch=fetch)
        except tables.TableFault as fault:
            return fault.facts()

    answer = in_child(work)
    if "made" in answer:
        return from_json(SourceFacts, answer["made"])
    return SourceFacts(
        missing=f"the data cannot be opened: {answer['error']}",
        help="the library that opens it failed; call it alone to see the whole traceback",
        code="E0311",
    )


def _machine(job: JobSpec) -> MachineFacts:
    return MachineFacts(
        cores=len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1,
        memory=os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"),
        gpus=gpus_here() if job.devices.gpus is not None else (),
    )


def gpus_here() -> tuple[int, ...]:
    """Returns the memory of each GPU of this machine, in bytes. A child asks: no process can use a GPU if it is forked
    from one that has initialized CUDA. Raises RuntimeError.
    """

    def look() -> list[int]:
        import torch

        return [torch.cuda.get_device_properties(n).total_memory for n in range(torch.cuda.device_count())]

    answer = in_child(look)
    if "made" not in answer:
        raise RuntimeError(f"the GPUs of this machine cannot be queried: {answer['error']}")
    return tuple(answer["made"])


def _traced_source(job: JobSpec, call: PythonSource, report: Report) -> SourceFacts | None:
    from dslc.compiler.ir.codec import from_json, to_json

    def use(make: Callable[..., Any]) -> Any:
        from dslc.compiler.trace.trace import trace_source
        from dslc.runtime.process.random_numbers import begin_sample

        return to_json(trace_source(make, lambda index: begin_sample(job.train.seed, "train", 0, index)))

    made = _used(job, call, "source", use, report)
    return made and from_json(SourceFacts, made)


def _traced_model(job: JobSpec, call: PythonNetwork, source: SourceFacts, report: Report) -> ModelFacts | None:
    from dslc.compiler.ir.codec import from_json, to_json
    from dslc.compiler.ir.module_facts import ModelFacts

    def use(make: Callable[..., Any]) -> Any:
        from dslc.compiler.trace.trace import try_to_make

        return to_json(_told(job, make, source)) if source.input is not None else try_to_make(make)

    made = _used(job, call, "model", use, report)
    return made and from_json(ModelFacts, made)


def _try_loss(job: JobSpec, call: PythonLoss, source: SourceFacts, model: ModelFacts | None, report: Report) -> None:
    """Finds a user's loss and, if its input is known and not large, calls it."""
    from dslc.compiler.graph.constants import loss_step

    made = model or build(job.model, source, context_of(job), Report())
    output, target = made.output if made is not None else None, source.target

    def use(function: Callable[..., Any]) -> None:
        if output is not None and target is not None and can_be_tried(output, target):
            from dslc.runtime.model.losses import try_out

            layout = lay_out(job, Report())
            ranks = layout.world_size if layout else 1
            try_out(loss_step(job, source, job.folder), output.shape, target.shape, target.dtype, ranks)

    _used(job, call, "loss", use, report)


def _try_schedule(job: JobSpec, call: PythonSchedule, report: Report) -> None:
    """Asks a user's schedule for the factors of some steps, twice."""
    from dslc.compiler.graph.constants import python_function

    steps = job.train.steps or 1000

    def use(function: Callable[..., Any]) -> None:
        from dslc.compiler.ir.program import LearningRateStep
        from dslc.runtime.loop.learning_rate import schedule

        factor = schedule(LearningRateStep(kind="python", steps=steps, python=python_function(call, job.folder)))
        for step in {0, 1, steps // 2, steps - 1}:
            if factor(step) != factor(step):
                raise ValueError(f"it gives another factor when it is asked for step {step} again")

    _used(job, call, "schedule", use, report)


def _used(
    job: JobSpec,
    call: PythonCall,
    what: str,
    use: Callable[[Callable[..., Any]], Any],
    report: Report,
) -> Any:
    """Returns the result of `use` on a user's function, in a child, so that nothing it does stays; reports an
    exception.
    """
    from dslc.compiler.graph.constants import python_function

    named = python_function(call, job.folder)

    def work() -> Any:
        import torch

        from dslc.runtime.process.user_code import load_function

        torch.set_num_threads(1)  # a parent that ran parallel operations leaves no threads to its child
        torch.manual_seed(job.train.seed)
        return use(load_function(named))

    answer = in_child(work)
    _tell_what_is_left(f"`{call.function}`", answer, call.at("function"), report)
    if "made" in answer:
        return answer["made"]
    report.add(
        "E0802",
        f"`{call.function}` cannot be used as a {what}: {answer['error']}",
        call.at("function"),
        label=answer["where"],
        help=answer["remedy"] or _remedy(call, what, answer),
    )
    return None


_WANTED = {
    "source": "a data set has `len` and indexing, and a sample of it is a pair (input, target)",
    "model": "it is called once, without data, and returns a `torch.nn.Module` that takes one tensor and gives one",
    "loss": "it takes (output, target) and gives one number for each sample or token",
    "schedule": "it takes (step, steps) and gives the factor on the learning rate, which follows from these alone",
}


def _remedy(call: PythonCall, what: str, answer: dict[str, Any]) -> str:
    """Names the line to correct and whose it is; if nothing was raised, the expected result."""
    where, module = answer["where"], answer["module"]
    if where or module:
        place = f"{where}, where it calls the module {module}" if where and module else where or f"the module {module}"
        return f"correct {place}: `dslc` calls `{call.function}` once before any process starts"
    if answer["absent"]:
        return "the folder of the job is searched first, then where Python looks; `folder/module:function` is elsewhere"
    return _WANTED[what]


def _tell_what_is_left(what: str, answer: dict[str, Any], where: Span | None, report: Report) -> None:
    left = answer.get("left")
    if left:
        report.add(
            "W0438",
            f"{what} leaves {left} running, which `dslc` has ended",
            where,
            help="let it wait for what it starts, or start threads with `daemon = True`: a rank that ends waits for no "
            "other process",
        )


def _told(job: JobSpec, make: Callable[[], Any], source: SourceFacts) -> ModelFacts:
    """Returns the facts of the module that `make` returns and, if the job has a pipeline, its possible cuts."""
    from dslc.compiler.graph.constants import precision_step
    from dslc.compiler.trace.trace import trace_model, try_low_copy

    kept: list[Any] = []

    def keep() -> Any:
        kept.append(make())
        return kept[-1]

    assert source.input is not None
    facts = trace_model(keep, source.input, **_axes(job))
    graph = opaque(facts, job.model, source, Report()) if low_copy(job) else None
    if graph is not None:
        sharded = [unit.name for unit in units(graph) if unit.name]
        try_low_copy(kept[0], source.input, precision_step(job).dtype, sharded)
    if job.parallelism.pipeline == 1:
        return facts
    from dslc.compiler.ir.program import TensorParallelStep
    from dslc.runtime.pipeline.captured import look
    from dslc.runtime.pipeline.recording import CaptureError

    axis: TensorParallelStep | None = None
    if facts.shares is not None and not facts.shares.fault:
        styles, ranks = facts.shares.styles, facts.shares.ranks
        axis = TensorParallelStep(size=ranks, sequence=False, styles=styles, loss_parallel=False)
    layers = {layer.name: layer for layer in facts.layers}
    rest = layers[""].parameters if "" in layers else ()
    try:
        ordered, seams = look(
            kept[0], tuple(layers), rest, source.input.shape, source.input.dtype, precision_step(job), axis
        )
    except CaptureError as error:
        return replace(facts, uncut=(str(error), error.where))
    except Exception as error:  # any kind: the user's code runs
        return replace(facts, uncut=(first_line(error), where_in_the_users_code(error)))
    from dslc.compiler.ir.module_facts import SeamFacts

    told = tuple(
        SeamFacts(refused=seam.refused, sent=tuple(TensorFact(shape=s, dtype=d) for s, d in seam.sent))  # type: ignore[arg-type]
        for seam in seams
    )
    return replace(facts, layers=tuple(layers[name] for name in ordered), seams=told)


def _axes(job: JobSpec) -> dict[str, Any]:
    """Returns the job's settings that tracing depends on."""
    parallelism = job.parallelism
    return {
        "low": low_precision(job),
        "compile": job.train.compile,
        "tensor": parallelism.tensor,
        "tensor_plan": parallelism.tensor_plan,
    }


def _traced_transformers(
    job: JobSpec, network: TransformersNetwork, source: SourceFacts, report: Report, run: bool
) -> ModelFacts | None:
    """Builds the model without memory in a child, and reports the library's errors in its configuration. Before a `run`
    this process imports the library, for the child and for the ranks that are forked from it later.
    """
    from dslc.compiler.graph.constants import transformers_step
    from dslc.compiler.ir.codec import from_json, to_json

    if importlib.util.find_spec("transformers") is None:
        report.add(
            "E0803",
            "the library `transformers` is not installed",
            network.span,
            help="`pip install 'dslc[transformers]'`",
        )
        return None

    if run:
        from dslc.runtime.model.transformers_model import preload

        preload(transformers_step(network, source, job.folder))

    padding: list[int | None] = []

    def work() -> Any:
        import torch

        from dslc.compiler.trace.trace import TraceError
        from dslc.runtime.model.transformers_model import (
            build_transformers,
            check_configuration,
            longest,
            padding_of,
        )

        torch.set_num_threads(1)
        step = transformers_step(network, source, job.folder, job.data.pad)
        if source.input is None:
            return check_configuration(step)

        def make() -> torch.nn.Module:
            model = build_transformers(step)
            padding.append(padding_of(model))
            most, length = longest(model), source.input.shape[0] if source.input and source.input.shape else 0
            if source.input and source.input.dtype == "int64" and most is not None and most < length:
                raise TraceError(
                    f"it has positions for {plural(most, 'token')}, and the data's sequences have {length}"
                )
            return model

        facts = _told(job, make, source)
        return to_json(replace(facts, padding=padding[0]))

    answer = in_child(work)
    _tell_what_is_left(f"`{network.path}`", answer, network.at("path"), report)
    if "made" in answer:
        from dslc.compiler.ir.module_facts import ModelFacts

        return answer["made"] and from_json(ModelFacts, answer["made"])
    report.add(
        "E0805",
        f"`{network.path}` cannot be used as a model: {answer['error']}",
        network.at(answer["argument"] or "path"),
        help="arguments of `transformers(…)` override the configuration",
    )
    return None
