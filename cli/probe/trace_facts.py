"""The facts of a job that its functions and its other libraries tell: each is called in a child, once.

Model: first the source, whose batches the network is traced with; then the network; then the loss, the metrics and the
rest, which are tried with outputs like the network's.
"""

from __future__ import annotations

import contextlib
import importlib.util
import os
import sys
import tempfile
from collections.abc import Callable
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from dslc.compiler.facts.mixtures import mixed
from dslc.compiler.facts.sources import source_key
from dslc.compiler.facts.transformers_file import configuration_file
from dslc.compiler.ir.facts import Facts, SourceFacts
from dslc.compiler.ir.network_facts import OptimizerFacts
from dslc.compiler.ir.tensors import TensorFact
from dslc.compiler.model.opaque import opaque
from dslc.compiler.placement.layout import lay_out
from dslc.compiler.placement.sharding import low_copy, low_precision, splits_backward, units
from dslc.compiler.rules.data.mixtures import each_source
from dslc.dsl.diagnostics import Report
from dslc.dsl.language.calls import Mixture, NetworkLoss, PythonCollate, PythonLoss, PythonSource, PythonStep, parts_of
from dslc.dsl.language.job import JobSpec
from dslc.dsl.language.layers import PythonNetwork, TransformersNetwork
from dslc.dsl.language.lr_schedules import PythonSchedule
from dslc.dsl.language.metrics import PythonMetric, TorchMetric
from dslc.dsl.language.optimizers import PythonOptimizer
from dslc.dsl.language.registry import Call
from dslc.dsl.source import Span
from dslc.dsl.words import plural
from dslc.probe.adapter_probe import or_fault, preload_adapters, tell_of_fault, transposed, with_adapter
from dslc.probe.child import first_line, import_torch_for_children, in_child, where_in_the_users_code
from dslc.probe.dependency_recorder import digest_of, users_modules
from dslc.probe.image_trials import try_pictures
from dslc.probe.leaked_resources import counted_once
from dslc.probe.network_trial import RealBatch, modules_in_evaluation, try_network, undone
from dslc.probe.sampler_trials import try_sampler
from dslc.probe.second_source import compare_twice
from dslc.probe.trace_cache import TraceCache
from dslc.probe.unchecked_parts import tell_of_network
from dslc.probe.user_code_trials import (
    TrialBatches,
    tell_what_is_left,
    trial,
    try_followers,
    try_loss,
    try_metric,
    try_optimizer,
    try_schedule,
    try_step,
    try_targets,
    used,
)
from dslc.probe.weights import opened_weights
from dslc.runtime.process.handed_over import HANDED_OVER

if TYPE_CHECKING:
    from dslc.compiler.ir.module_facts import ModelFacts
    from dslc.compiler.trace.batch import Example
    from dslc.compiler.trace.reuse.block_reuse import BlockReuse
    from dslc.runtime.model.custom_losses import OwnSum
    from dslc.runtime.pipeline.captured import Seam
    from dslc.runtime.pipeline.input_form import InputForm


def trace_facts(job: JobSpec, source: SourceFacts, report: Report, *, run: bool) -> Facts:
    """Returns the facts, with what calling the user's functions tells; `source` are those without."""
    with tempfile.TemporaryDirectory() as folder:
        return _trace_job(job, source, Files(folder), report, run=run)


class Files:
    """Files in which the children that run a user's code pass on batches. The source's batches are pairs (input,
    target); the network's outputs for them are pairs (output, target).
    """

    def __init__(self, folder: str) -> None:
        self.folder = folder
        self.batches, self.outputs = os.path.join(folder, "batches.pt"), os.path.join(folder, "outputs.pt")
        self.samples = os.path.join(folder, "samples.pt")  # a batch of different samples


def _trace_job(job: JobSpec, source: SourceFacts, files: Files, report: Report, *, run: bool) -> Facts:
    if isinstance(job.data.source, Mixture):
        pairs = zip(job.data.source.sources, source.parts, strict=True)
        source = mixed([_trace_source(job, call, facts, files, report) for call, facts in pairs])
    else:
        source = _trace_source(job, job.data.source, source, files, report)
    for alone, facts in each_source(job, source):
        try_pictures(alone, facts, report)
    network = job.model.network
    made = isinstance(network, PythonNetwork | TransformersNetwork) and _has_configuration(network, job.folder)
    if made and job.model.adapter is not None and importlib.util.find_spec("peft") is None:
        _library_missing("peft", job.model.adapter.span, report)
        made = False
    model: ModelFacts | None = None
    uncalled: ModelFacts | None = None
    if made and isinstance(network, PythonNetwork):
        model = _traced_model(job, network, source, files, report)
        if not _is_called(job, source):
            model, uncalled = None, model
    elif made and isinstance(network, TransformersNetwork):
        model = _traced_transformers(job, network, source, files, report, run)
    if made and not run and source.input is None and source.structures is None and not report.errors:
        tell_of_network(job, source, report)
    source = _try_functions(job, source, trial(job, source, model, files.folder, files.outputs), files, report, run=run)
    try_followers(job, report)
    try_sampler(job, source, report)
    optimizer: OptimizerFacts | None = None
    if isinstance(job.train.optimizer, PythonOptimizer):
        optimizer = try_optimizer(job, job.train.optimizer, source, model, report)
    return Facts(source=source, model=model, made=uncalled, optimizer=optimizer, weights=opened_weights(job, report))


def _try_functions(
    job: JobSpec, source: SourceFacts, tried: TrialBatches, files: Files, report: Report, *, run: bool
) -> SourceFacts:
    """Tries a user's loss, metrics and schedule; returns the facts with what that tells of the loss."""
    if isinstance(job.model.loss, PythonLoss) and try_loss(job, job.model.loss, source, tried, report):
        source = replace(source, loss_counts=True)
    for metric in job.evaluate.metrics:
        if isinstance(metric, PythonMetric):
            try_metric(job, metric, source, tried, report)
        elif isinstance(metric, TorchMetric):
            _look_for_torchmetrics(job, metric, report, run=run)
    try_targets(job, source, tried, report)
    if isinstance(job.train.step, PythonStep):
        try_step(job, job.train.step, source, files.batches, report)
    if isinstance(job.train.lr_schedule, PythonSchedule):
        try_schedule(job, job.train.lr_schedule, report)
    return source


def _has_configuration(network: PythonNetwork | TransformersNetwork, folder: str) -> bool:
    """True if there is a configuration to build the network from; a rule reports that there is none."""
    if isinstance(network, PythonNetwork):
        return True
    file = configuration_file(network, folder)
    return file is None or os.path.exists(file)


def _trace_source(job: JobSpec, call: Call, source: SourceFacts, files: Files, report: Report) -> SourceFacts:
    """Returns the facts of a source; if it is a user's, the facts that its samples tell."""
    return (_traced_source(job, call, files, report) or source) if isinstance(call, PythonSource) else source


def _traced_source(job: JobSpec, call: PythonSource, files: Files, report: Report) -> SourceFacts | None:
    from dslc.compiler.graph.constants import python_function
    from dslc.compiler.ir.codec import from_json, to_json

    own = job.data.collate

    def use(make: Callable[..., Any]) -> Any:
        from dslc.compiler.trace.user_functions import trace_source
        from dslc.runtime.data.collating import collate
        from dslc.runtime.process.random_numbers import begin_sample

        return to_json(
            trace_source(
                make,
                lambda index: begin_sample(job.train.seed, "train", 0, index),
                collate=collate(python_function(own, job.folder) if isinstance(own, PythonCollate) else None),
                stacked=own is None,
                whole=isinstance(job.model.loss, NetworkLoss),
                example=files.batches,
                real=files.samples,
            )
        )

    made = used(job, call, "source", use, report)
    if made and made.get("shards") is None:
        layout = lay_out(job, Report())
        ranks = layout.world_size if layout is not None else 1
        others = layout is not None and (layout.nodes > 1 or job.launch.with_.word != "local")
        compare_twice(job, call, ranks, others, report)
    return made and from_json(SourceFacts, made)


def _is_called(job: JobSpec, source: SourceFacts) -> bool:
    """True if the network is called with samples: they are known, and the job says how it is called."""
    return job.train.step is None and (source.input is not None or source.structures is not None)


def _traced_model(
    job: JobSpec, call: PythonNetwork, source: SourceFacts, files: Files, report: Report
) -> ModelFacts | None:
    from dslc.compiler.graph.constants import python_function
    from dslc.compiler.ir.codec import from_json, to_json
    from dslc.compiler.ir.module_facts import ModelFacts

    def use(make: Callable[..., Any]) -> Any:
        from dslc.compiler.trace.devices import named_gpus
        from dslc.compiler.trace.user_functions import facts_of_made

        adapted = with_adapter(job, counted_once(make))
        called = _is_called(job, source)
        with named_gpus(job):
            return to_json(_trace_module(job, adapted, source, real, files) if called else facts_of_made(adapted))

    named = python_function(call, job.folder)
    by_value = named.function.partition(":")[0] in HANDED_OVER
    kept = TraceCache(None if by_value else _cache_key(job, to_json(replace(named, line="")), source), named.folder)
    if (facts := kept.load()) is not None:
        return facts
    found = len(report.found)
    real = RealBatch(job, source, files.samples)

    def watched(work: Callable[[], Any]) -> Callable[[], Any]:
        return kept.watched(work, real.load_batch)

    made = used(job, call, "model", lambda make: or_fault(lambda: use(make)), report, watched)
    if made and tell_of_fault(job, made["facts"], report):
        return None
    facts = from_json(ModelFacts, made["facts"]) if made else None
    if made and len(report.found) == found:
        kept.store(made, facts)
    return facts


def _look_for_torchmetrics(job: JobSpec, metric: TorchMetric, report: Report, *, run: bool) -> None:
    """Reports that the library cannot be used. Before a `run` this process imports it, for the ranks that are forked
    from it later.
    """
    if importlib.util.find_spec("torchmetrics") is None:
        _library_missing("torchmetrics", metric.span, report)
    elif run:
        from dslc.compiler.graph.constants import metric_step
        from dslc.runtime.loop.stateful_metrics import preload
        from dslc.runtime.process.vision_library import VisionLibraryError

        try:
            preload([metric_step(metric, job.folder)])
        except VisionLibraryError as error:
            report.add("E0803", f"`torchmetrics` cannot be used: {error}", metric.span, help=error.remedy)


def _library_missing(name: str, span: Span | None, report: Report) -> None:
    report.add("E0803", f"the library `{name}` is not installed", span, help=f"`pip install 'dslc[{name}]'`")


def _trace_module(
    job: JobSpec, make: Callable[[], Any], source: SourceFacts, real: RealBatch, files: Files | None = None
) -> ModelFacts:
    """Returns the facts of the module that `make` returns and, if the job has a pipeline, its possible cuts."""
    from dslc.compiler.graph.constants import loss_step, precision_step
    from dslc.compiler.ir.network_facts import NetworkFacts
    from dslc.compiler.trace.batch import Example, Outputs, read_example
    from dslc.compiler.trace.devices import cpu_tensor_of_network
    from dslc.compiler.trace.reuse.block_reuse import BlockReuse
    from dslc.compiler.trace.user_functions import trace_model, try_low_copy
    from dslc.runtime.model.custom_losses import OwnSum

    kept: list[Any] = []

    resting: list[str] = []

    def keep() -> Any:
        kept.append(make())
        resting[:] = modules_in_evaluation(kept[-1])
        return kept[-1]

    given = read_example(files.batches) if source.structures is not None and files else source.input
    assert given is not None
    step = loss_step(job, source, job.folder)
    own = OwnSum(step) if isinstance(job.model.loss, NetworkLoss) else None
    counted = _sum_of_pieces(OwnSum(step)) if job.parallelism.context > 1 and step.counts == "own" else None
    target = given if isinstance(given, Example) else source.target
    outputs = Outputs(files.outputs, target) if files and target is not None else None
    # Over the context axis positions are followed through all blocks.
    skipped = BlockReuse(wanted=job.parallelism.context == 1)
    facts = trace_model(
        keep, given, loss=own, counted=counted, outputs=outputs, skipped=skipped, asked=_with_read_hook, **_axes(job)
    )
    facts = replace(facts, transposed=transposed(kept[0])) if job.model.adapter is not None else facts
    facts = replace(facts, network=try_network(job, source, make, facts, real.batch, undone(kept[-1], resting)))
    if job.devices.gpus is not None and isinstance(job.model.network, PythonNetwork):
        place = cpu_tensor_of_network(kept[-1], given)
        facts = replace(facts, network=replace(facts.network or NetworkFacts(), cpu_tensor=place))
    graph = opaque(facts, job.model, source, Report()) if low_copy(job) else None
    if graph is not None:
        sharded = [unit.name for unit in units(graph) if unit.name]
        try_low_copy(kept[0], given, precision_step(job).dtype, sharded)
    structures = source.structures is not None
    if job.parallelism.pipeline == 1 or facts.looks or (structures and not _enters_stages(source)):
        return facts
    return with_seams(job, kept[-1], facts, given, source, skipped)


def with_seams(
    job: JobSpec, model: Any, facts: ModelFacts, given: TensorFact | Example, source: SourceFacts, skipped: BlockReuse
) -> ModelFacts:
    """Returns the facts with the module's possible cuts."""
    from dslc.compiler.trace.reuse.block_reuse import BlockReuse

    try:
        return _find_seams(job, model, facts, given, source, skipped)
    except Exception:  # any kind: blocks that were left out are not alike, or it is raised again with all of them
        if skipped.middle is None:
            raise
        return _find_seams(job, model, facts, given, source, BlockReuse())


def _sum_of_pieces(loss: OwnSum) -> Callable[[Any, Any], Any]:
    """Returns the function that gives the sum of the losses of a piece of sequences, and their number."""
    from dslc.compiler.trace.sharding.context_records import MIXES, ContextParallelError

    def total(output: Any, target: Any) -> Any:
        counts = loss.count_losses(output, target)
        if counts.further:
            raise ContextParallelError(
                MIXES, f"the loss `{next(iter(counts.further))}` beside the loss is of whole samples", ""
            )
        return counts.total, counts.number

    return total


def _enters_stages(source: SourceFacts) -> bool:
    """True if stages can take the batches; a rule reports why not."""
    assert source.structures is not None
    return (
        not source.stream
        and source.uneven is None
        and all(leaf.has_samples_first for leaf in source.structures[0].leaves)
    )


def _input_form(given: TensorFact | Example, source: SourceFacts) -> InputForm:
    """Returns the form of the batches that stages are recorded with. Raises InputFormError where batches differ."""
    from dslc.compiler.trace.batch import LARGE, SMALL
    from dslc.runtime.pipeline.input_form import InputForm

    if isinstance(given, TensorFact):
        return InputForm(((given.shape, given.dtype),))
    assert source.structures is not None
    leaves = tuple((each.shape, each.dtype) for each in source.structures[0].samples)
    found = InputForm(leaves, given.input(SMALL))
    found.tensors_of(given.input(LARGE))
    return found


def _find_seams(
    job: JobSpec, model: Any, facts: ModelFacts, given: TensorFact | Example, source: SourceFacts, skipped: BlockReuse
) -> ModelFacts:
    """Returns the facts with the module's possible cuts. Raises any kind of exception if blocks are `skipped`."""
    from dslc.compiler.graph.constants import precision_step
    from dslc.compiler.ir.module_facts import SeamFacts
    from dslc.compiler.ir.program import TensorParallelStep
    from dslc.runtime.parallel.context_parallel import given_positions
    from dslc.runtime.pipeline.captured import look
    from dslc.runtime.pipeline.recording import CaptureError

    axis: TensorParallelStep | None = None
    if facts.shares is not None and not facts.shares.fault:
        ranks = facts.shares.ranks
        styles = tuple(each for each in facts.shares.styles if not skipped.has_inside(each[0]))
        axis = TensorParallelStep(size=ranks, sequence=False, styles=styles, loss_parallel=False)
    layers = {layer.name: layer for layer in facts.layers}
    rest = layers[""].parameters if "" in layers else ()
    called = [name for name in layers if not skipped.leaves_out(name)]

    def looked(
        input_form: InputForm,
    ) -> tuple[tuple[str, ...], tuple[Seam, ...], tuple[tuple[str, ...], ...]]:
        takes = facts.pieces is not None and facts.pieces.positions
        with skipped.skip_blocks(model), given_positions(model, 0) if takes else contextlib.nullcontext():
            return look(model, called, rest, input_form, precision_step(job), axis)

    pieces = 1 if facts.pieces is None else facts.pieces.ranks
    if facts.pieces is not None and facts.pieces.fault:
        return facts
    try:
        ordered, seams, repeated = looked(_input_form(given, source))
        if pieces > 1:
            assert isinstance(given, TensorFact)
            piece = replace(given, shape=(given.shape[0] // pieces, *given.shape[1:]))
            seams = _of_pieces(seams, looked(_input_form(piece, source))[1], pieces)
    except Exception as error:  # any kind: the user's code runs
        skipped.forbid(first_line(error))
        where = error.where if isinstance(error, CaptureError) else where_in_the_users_code(error)
        return replace(facts, uncut=(str(error) if isinstance(error, CaptureError) else first_line(error), where))
    if repeated and splits_backward(job):
        skipped.forbid("a parameter is used again")  # in blocks that are left out, or between them
    told = [
        SeamFacts(refused=seam.refused, sent=tuple(TensorFact(shape=s, dtype=d) for s, d in seam.sent))  # type: ignore[arg-type]
        for seam in seams
    ]
    skipped.check(dict(zip(ordered[1:], told, strict=True)))
    each = skipped.inserted(
        list(zip(ordered[1:], told, strict=True)), lambda each: each[0], lambda each, name: (name, each[1])
    )
    return replace(
        facts,
        layers=tuple(layers[name] for name in (ordered[0], *(name for name, _ in each))),
        seams=tuple(seam for _, seam in each),
        repeated=repeated if splits_backward(job) else (),
    )


def _cache_key(job: JobSpec, network: Any, source: SourceFacts) -> dict[str, Any] | None:
    """Returns all of the job that the facts of its network depend on, for `TraceCache`; None where they depend on
    more: on batches, a step or a loss of the user's, or on modules that are loaded, and may differ from their files.
    """
    from dslc.compiler.graph.constants import adapter_step, precision_step
    from dslc.compiler.ir.codec import to_json

    adapter = adapter_step(job.model.adapter)
    loss = job.model.loss
    if source.input is None or isinstance(loss, NetworkLoss) or job.train.step is not None or any(users_modules()):
        return None
    return _axes(job) | {
        "network": network,
        "folder": os.path.abspath(job.folder),
        "input": to_json(source.input),
        "samples": [repr(source_key(each)) for each in parts_of(job.data.source)],
        "seed": job.train.seed,
        "precision": to_json(precision_step(job)),
        "units": repr((job.model, job.parallelism, job.memory)) if low_copy(job) else "",
        "pipeline": job.parallelism.pipeline > 1,
        "gpus": job.devices.gpus is not None,
        "split": splits_backward(job),
        "adapter": to_json(replace(adapter, line="")) if adapter is not None else None,
    }


def _of_pieces(wholes: tuple[Seam, ...], parts: tuple[Seam, ...], pieces: int) -> tuple[Seam, ...]:
    """Returns the seams of a network on whole sequences, without those where on pieces other tensors cross than pieces
    of these.
    """
    made = []
    for whole, part in zip(wholes, parts, strict=True):
        cut = tuple(((shape[0] // pieces, *shape[1:]) if shape else shape, dtype) for shape, dtype in whole.sent)
        refused = whole.refused or part.refused
        if not refused and cut != part.sent:
            refused = "a tensor crosses it of which a context-parallel rank has no piece"
        made.append(replace(whole, refused=refused, sent=() if refused else whole.sent))
    return tuple(made)


def _axes(job: JobSpec) -> dict[str, Any]:
    """Returns the job's settings that tracing depends on."""
    parallelism = job.parallelism
    return {
        "low": low_precision(job),
        "compile": job.train.compile,
        "tensor": parallelism.tensor,
        "tensor_plan": parallelism.tensor_plan,
        "context": parallelism.context,
        "frozen": job.model.freeze,
    }


def _with_read_hook(known: Callable[[Any], bool]) -> contextlib.AbstractContextManager[None]:
    """Makes `transformers` read numbers that are known, as it does in a training."""
    if "transformers" not in sys.modules:
        return contextlib.nullcontext()
    from dslc.runtime.model import transformers_model

    return transformers_model.treat_as_known(known)


def _traced_transformers(
    job: JobSpec, network: TransformersNetwork, source: SourceFacts, files: Files, report: Report, run: bool
) -> ModelFacts | None:
    """Builds the model without memory in a child, and reports the library's errors in its configuration. Before a `run`
    on CPUs this process imports the library, for the child and for the ranks that are forked from it later. On GPUs
    that could keep them from CUDA (runtime/launch.py).
    """
    from dslc.compiler.graph.constants import transformers_step
    from dslc.compiler.ir.codec import from_json, to_json

    if importlib.util.find_spec("transformers") is None:
        _library_missing("transformers", network.span, report)
        return None

    if run and job.devices.gpus is None:
        from dslc.runtime.model.transformers_model import preload

        preload(transformers_step(network, source, job.folder))
        preload_adapters(job)

    padding: list[int | None] = []
    step = transformers_step(network, source, job.folder, job.data.pad)
    file = configuration_file(network, job.folder)
    depends = _cache_key(job, [to_json(replace(step, line="")), file and digest_of(file)], source)
    kept = TraceCache(depends)
    if (facts := kept.load()) is not None:
        return facts

    def work() -> Any:
        import torch

        from dslc.compiler.trace.user_functions import TraceError
        from dslc.runtime.model.transformers_model import build_transformers, check_configuration, longest, padding_of

        torch.set_num_threads(1)
        if source.input is None and source.structures is None:
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

        facts = _trace_module(job, with_adapter(job, make), source, real, files if step.structured else None)
        return to_json(replace(facts, padding=None if step.structured else padding[0]))

    import_torch_for_children()
    real = RealBatch(job, source, files.samples)
    answer = in_child(kept.watched(lambda: or_fault(work), real.load_batch))
    tell_what_is_left(f"`{network.path}`", answer, network.at("path"), report)
    if "made" in answer:
        from dslc.compiler.ir.module_facts import ModelFacts

        made = answer["made"]
        if tell_of_fault(job, made["facts"], report):
            return None
        facts = from_json(ModelFacts, made["facts"]) if made["facts"] else None
        if not answer["left"]:
            kept.store(made, facts)
        return facts
    report.add(
        "E0805",
        f"`{network.path}` cannot be used as a model: {answer['error']}",
        network.at(answer["argument"] or "path"),
        help=answer["remedy"] or "arguments of `transformers(…)` override the configuration",
    )
    return None
