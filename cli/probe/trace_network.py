"""The facts of a network that is not the language's own: a child makes it without memory and traces it. Weights that
`torch.save` wrote are opened in a child too, for the names and shapes of their tensors.
"""

from __future__ import annotations

import contextlib
import importlib.util
import os
import re
import sys
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import TYPE_CHECKING, TypedDict

from dslc.compiler.facts.sources import source_key
from dslc.compiler.facts.transformers_file import configuration_file
from dslc.compiler.facts.weights_file import Unreadable, files_of
from dslc.compiler.ir.codec import from_json, to_json
from dslc.compiler.ir.facts import SourceFacts, TensorEntry
from dslc.compiler.ir.module_facts import ModelFacts, SeamFacts
from dslc.compiler.ir.network_facts import NetworkFacts
from dslc.compiler.ir.program import TensorParallelStep, TransformersStep
from dslc.compiler.ir.tensors import Quantization, QuantizedWeight, TensorFact
from dslc.compiler.model.opaque import opaque
from dslc.compiler.placement.sharding import low_copy, low_precision, splits_backward, units
from dslc.compiler.rules.model.adapters import unmatched_targets
from dslc.dsl.diagnostics import Diagnostic, Findings, Report, judge, recorded
from dslc.dsl.language.calls import Fp8, NetworkLoss, parts_of
from dslc.dsl.language.job import JobSpec
from dslc.dsl.language.layers import PythonNetwork, TransformersNetwork
from dslc.dsl.words import plural
from dslc.probe.child import Json, first_line, import_torch_for_children, in_child, where_in_the_users_code
from dslc.probe.dependency_recorder import digest_of, users_modules
from dslc.probe.leaked_resources import counted_once
from dslc.probe.network_trial import RealBatch, modules_in_evaluation, try_network, undone
from dslc.probe.trace_cache import TraceCache
from dslc.probe.trial import Trial, missing_library
from dslc.probe.unchecked_parts import uncalled_network
from dslc.probe.user_code_trials import check_what_is_left, used
from dslc.runtime.process.user_code import HANDED_OVER

if TYPE_CHECKING:
    import torch
    from torch import nn

    from dslc.compiler.trace.batch import Example
    from dslc.compiler.trace.reuse.block_reuse import BlockReuse
    from dslc.compiler.trace.structures import UserValue
    from dslc.runtime.model.custom_losses import OwnSum
    from dslc.runtime.pipeline.captured import Seam
    from dslc.runtime.pipeline.input_form import InputForm


class TraceAxes(TypedDict):
    """The settings of a job that tracing depends on."""

    low: bool
    compile: bool
    split: bool
    tensor: int
    tensor_plan: tuple[str, ...] | None
    context: int
    frozen: tuple[str, ...]


def trace_network(trial: Trial) -> Findings[Trial | None]:
    """Adds the facts of the network, which is called if its samples are known."""
    job, network, source = trial.job, trial.job.model.network, trial.source
    if not isinstance(network, PythonNetwork | TransformersNetwork) or not _has_configuration(network, job.folder):
        return None
    if job.model.adapter is not None and importlib.util.find_spec("peft") is None:
        yield missing_library("peft", job.model.adapter.span)
        return None
    start = job.model.start
    if start is not None and start.quantize is not None and importlib.util.find_spec("torchao") is None:
        yield missing_library("torchao", start.value_span("quantize"))
        return None
    model, sound = yield from judge(
        _traced_model(trial, network) if isinstance(network, PythonNetwork) else _traced_transformers(trial, network)
    )
    if not trial.run and source.input is None and source.structures is None and trial.sound and sound:
        yield uncalled_network(job, source)
    is_uncalled = isinstance(network, PythonNetwork) and not _is_called(trial)
    return trial.with_facts(made=model) if is_uncalled else trial.with_facts(model=model)


def _is_called(trial: Trial) -> bool:
    """True if the network is called with samples: they are known, and the job says how it is called."""
    source = trial.source
    return trial.job.train.step is None and (source.input is not None or source.structures is not None)


def _has_configuration(network: PythonNetwork | TransformersNetwork, folder: str) -> bool:
    """True if there is a configuration to build the network from; a rule reports that there is none."""
    if isinstance(network, PythonNetwork):
        return True
    file = configuration_file(network, folder)
    return file is None or os.path.exists(file)


def _traced_model(trial: Trial, call: PythonNetwork) -> Findings[ModelFacts | None]:
    def use(construct: Callable[..., UserValue]) -> object:
        from dslc.compiler.trace.devices import named_gpus
        from dslc.compiler.trace.instantiate import facts_of_made

        adapted_module = _add_adapter(trial, counted_once(construct))
        with named_gpus(trial.job):
            return to_json(
                _trace_module(trial, adapted_module, real) if _is_called(trial) else facts_of_made(adapted_module)
            )

    function = trial.function(call)
    by_value = function.function.partition(":")[0] in HANDED_OVER
    trace_cache = TraceCache(
        None if by_value else _cache_key(trial, to_json(replace(function, line=""))),
        function.folder,
        trial.cache.add if trial.cache else None,
    )
    if (facts := trace_cache.load()) is not None:
        return facts
    real = RealBatch(trial)

    def watched(work: Callable[[], object]) -> Callable[[], object]:
        return trace_cache.watched(work, real.load_batch)

    answer, diagnostics = yield from recorded(
        used(trial, call, "model", lambda make: _or_fault(lambda: use(make)), watched)
    )
    if answer and (faults := list(_faults(trial.job, answer["facts"]))):
        yield from faults
        return None
    facts = from_json(ModelFacts, answer["facts"]) if answer else None
    if answer and not diagnostics:
        trace_cache.store(answer, facts)
    return facts


def _trace_module(trial: Trial, construct: Callable[[], UserValue], real: RealBatch) -> ModelFacts:
    """Returns the facts of the module that `construct` returns and, if the job has a pipeline, its possible cuts."""
    from dslc.compiler.trace.batch import Example, Outputs, read_example
    from dslc.compiler.trace.devices import cpu_tensor_of_network
    from dslc.compiler.trace.low_copy import try_low_copy
    from dslc.compiler.trace.memory import mark_float8_layers
    from dslc.compiler.trace.reuse.block_reuse import BlockReuse
    from dslc.compiler.trace.trace_model import trace_model
    from dslc.runtime.model.custom_losses import OwnSum

    modules: list[nn.Module] = []

    evaluation_modules: list[str] = []

    def keep() -> nn.Module:
        modules.append(construct())
        if isinstance(job.train.precision, Fp8):
            mark_float8_layers(modules[-1], job.train.precision)
        evaluation_modules[:] = modules_in_evaluation(modules[-1])
        return modules[-1]

    job, source, step = trial.job, trial.source, trial.steps.loss
    example = read_example(trial.files.batches) if source.structures is not None else source.input
    assert example is not None
    loss = OwnSum(step) if isinstance(job.model.loss, NetworkLoss) else None
    counted_loss = _sum_of_pieces(OwnSum(step)) if job.parallelism.context > 1 and step.counts == "own" else None
    target = example if isinstance(example, Example) else source.target
    outputs = Outputs(trial.files.outputs, target) if target is not None else None
    # Over the context axis positions are followed through all blocks.
    # Patterns with a number may leave the layers of one block in 16 bits.
    numbered = isinstance(job.train.precision, Fp8) and any(
        re.search(r"[\d?[]", each) for each in job.train.precision.skip
    )
    reuse = BlockReuse(wanted=job.parallelism.context == 1 and not numbered)
    facts = trace_model(
        keep,
        example,
        loss=loss,
        counted_loss=counted_loss,
        outputs=outputs,
        reuse=reuse,
        ask=_with_read_hook,
        **_axes(job),
    )
    if job.model.adapter is not None:
        facts = replace(facts, transposed=_transposed(modules[0]), quantized=_quantized(job, modules[0]))
    facts = replace(
        facts, network=try_network(trial, construct, facts, real.batch, undone(modules[-1], evaluation_modules))
    )
    if job.devices.gpus is not None and isinstance(job.model.network, PythonNetwork):
        place = cpu_tensor_of_network(modules[-1], example)
        facts = replace(facts, network=replace(facts.network or NetworkFacts(), cpu_tensor=place))
    graph = Report().collect(opaque(facts, job.model, source)) if low_copy(job) else None
    if graph is not None:
        unit_names = [unit.name for unit in units(graph) if unit.name]
        try_low_copy(modules[0], example, trial.steps.precision.dtype, unit_names)
    structures = source.structures is not None
    if job.parallelism.pipeline == 1 or facts.looks or (structures and not _enters_stages(source)):
        return facts
    return with_seams(trial, modules[-1], facts, example, reuse)


def with_seams(
    trial: Trial, model: nn.Module, facts: ModelFacts, example: TensorFact | Example, reuse: BlockReuse
) -> ModelFacts:
    """Returns the facts with the module's possible cuts."""
    from dslc.compiler.trace.reuse.block_reuse import BlockReuse

    try:
        return _find_seams(trial, model, facts, example, reuse)
    except Exception:  # any kind: blocks that were left out are not alike, or it is raised again with all of them
        if reuse.middle is None:
            raise
        return _find_seams(trial, model, facts, example, BlockReuse())


def _sum_of_pieces(loss: OwnSum) -> Callable[..., tuple[torch.Tensor, int | torch.Tensor]]:
    """Returns the function that gives the sum of the losses of a piece of sequences, and their number."""
    from dslc.compiler.trace.sharding.context_records import MIXES, ContextParallelError

    def total(output: UserValue, target: UserValue) -> tuple[torch.Tensor, int | torch.Tensor]:
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


def _input_form(example: TensorFact | Example, source: SourceFacts) -> InputForm:
    """Returns the form of the batches that stages are recorded with. Raises InputFormError where batches differ."""
    from dslc.compiler.trace.batch import LARGE, SMALL
    from dslc.runtime.pipeline.input_form import InputForm

    if isinstance(example, TensorFact):
        return InputForm(((example.shape, example.dtype),))
    assert source.structures is not None
    leaves = tuple((leaf.shape, leaf.dtype) for leaf in source.structures[0].samples)
    form = InputForm(leaves, example.input(SMALL))
    form.tensors_of(example.input(LARGE))
    return form


def _find_seams(
    trial: Trial, model: nn.Module, facts: ModelFacts, example: TensorFact | Example, reuse: BlockReuse
) -> ModelFacts:
    """Returns the facts with the module's possible cuts. Raises any kind of exception if `reuse` skips blocks."""
    from dslc.runtime.parallel.context_parallel import given_positions
    from dslc.runtime.pipeline.captured import look
    from dslc.runtime.pipeline.recording import CaptureError

    axis: TensorParallelStep | None = None
    if facts.shares is not None and not facts.shares.fault:
        ranks = facts.shares.ranks
        styles = tuple(style for style in facts.shares.styles if not reuse.has_inside(style[0]))
        axis = TensorParallelStep(size=ranks, sequence=False, styles=styles, loss_parallel=False)
    layers = {layer.name: layer for layer in facts.layers}
    root_names = layers[""].parameters if "" in layers else ()
    layer_names = [name for name in layers if not reuse.leaves_out(name)]

    def looked(
        input_form: InputForm,
    ) -> tuple[tuple[str, ...], tuple[Seam, ...], tuple[tuple[str, ...], ...]]:
        takes_positions = facts.pieces is not None and facts.pieces.positions
        with reuse.skip_blocks(model), given_positions(model, 0) if takes_positions else contextlib.nullcontext():
            return look(model, layer_names, root_names, input_form, trial.steps.precision, axis)

    pieces = 1 if facts.pieces is None else facts.pieces.ranks
    if facts.pieces is not None and facts.pieces.fault:
        return facts
    try:
        layer_order, seams, repeated_parameters = looked(_input_form(example, trial.source))
        if pieces > 1:
            assert isinstance(example, TensorFact)
            piece = replace(example, shape=(example.shape[0] // pieces, *example.shape[1:]))
            seams = _of_pieces(seams, looked(_input_form(piece, trial.source))[1], pieces)
    except Exception as error:  # any kind: the user's code runs
        reuse.forbid(first_line(error))
        line = error.where if isinstance(error, CaptureError) else where_in_the_users_code(error)
        return replace(facts, uncut=(str(error) if isinstance(error, CaptureError) else first_line(error), line))
    if repeated_parameters and splits_backward(trial.job):
        reuse.forbid("a parameter is used again")  # in blocks that are left out, or between them
    stage_seams = [
        SeamFacts(refused=seam.refused, sent=tuple(TensorFact(shape=s, dtype=d) for s, d in seam.sent))  # type: ignore[arg-type]
        for seam in seams
    ]
    reuse.check(dict(zip(layer_order[1:], stage_seams, strict=True)))
    inserted_seams = reuse.inserted(
        list(zip(layer_order[1:], stage_seams, strict=True)), lambda each: each[0], lambda each, name: (name, each[1])
    )
    return replace(
        facts,
        layers=tuple(layers[name] for name in (layer_order[0], *(name for name, _ in inserted_seams))),
        seams=tuple(seam for _, seam in inserted_seams),
        repeated=repeated_parameters if splits_backward(trial.job) else (),
    )


def _cache_key(trial: Trial, network: object) -> dict[str, object] | None:
    """Returns all of the job that the facts of its network depend on, for `TraceCache`; None where they depend on
    more: on batches, a step or a loss of the user's, or on modules that are loaded, and may differ from their files.
    """

    job, source, adapter, loss = trial.job, trial.source, trial.steps.adapter, trial.job.model.loss
    if source.input is None or isinstance(loss, NetworkLoss) or job.train.step is not None or any(users_modules()):
        return None
    return {
        **_axes(job),
        "network": network,
        "folder": os.path.abspath(job.folder),
        "input": to_json(source.input),
        "samples": [repr(source_key(part)) for part in parts_of(job.data.source)],
        "seed": job.train.seed,
        "precision": to_json(trial.steps.precision),
        "float8": repr(job.train.precision) if isinstance(job.train.precision, Fp8) else "",
        "units": repr((job.model, job.parallelism, job.memory)) if low_copy(job) else "",
        "pipeline": job.parallelism.pipeline > 1,
        "gpus": job.devices.gpus is not None,
        "adapter": to_json(replace(adapter, line="")) if adapter is not None else None,
        "quantize": job.model.start.quantize if job.model.start is not None else None,
    }


def _of_pieces(wholes: tuple[Seam, ...], parts: tuple[Seam, ...], pieces: int) -> tuple[Seam, ...]:
    """Returns the seams of a network on whole sequences, without those where on pieces other tensors cross than pieces
    of these.
    """
    seams = []
    for full_seam, part in zip(wholes, parts, strict=True):
        cut = tuple(((shape[0] // pieces, *shape[1:]) if shape else shape, dtype) for shape, dtype in full_seam.sent)
        reason = full_seam.refused or part.refused
        if not reason and cut != part.sent:
            reason = "a tensor crosses it of which a context-parallel rank has no piece"
        seams.append(replace(full_seam, refused=reason, sent=() if reason else full_seam.sent))
    return tuple(seams)


def _axes(job: JobSpec) -> TraceAxes:
    parallelism, start = job.parallelism, job.model.start
    is_quantized = start is not None and start.quantize is not None
    return {
        "low": low_precision(job),
        "compile": bool(job.train.compile),
        "split": splits_backward(job),
        "tensor": 1 if is_quantized else parallelism.tensor,  # a rule refuses the two together
        "tensor_plan": parallelism.tensor_plan,
        "context": parallelism.context,
        "frozen": job.model.freeze,
    }


def _with_read_hook(is_known: Callable[[torch.Tensor], bool]) -> contextlib.AbstractContextManager[None]:
    """Makes `transformers` read numbers that are known, as it does in a training."""
    if "transformers" not in sys.modules:
        return contextlib.nullcontext()
    from dslc.runtime.model import transformers_model

    return transformers_model.treat_as_known(is_known)


def _traced_transformers(trial: Trial, network: TransformersNetwork) -> Findings[ModelFacts | None]:
    """Builds the model without memory in a child, and yields the library's errors in its configuration. Before a `run`
    on CPUs this process imports the library, for the child and for the ranks that are forked from it later. On GPUs
    that could keep them from CUDA (runtime/launch.py).
    """

    job, source, step = trial.job, trial.source, trial.steps.network
    assert isinstance(step, TransformersStep)
    if importlib.util.find_spec("transformers") is None:
        yield missing_library("transformers", network.span)
        return None
    padding: list[int | None] = []
    documents: list[tuple[str, bool]] = []
    file = configuration_file(network, job.folder)
    depends = _cache_key(trial, [to_json(replace(step, line="")), file and digest_of(file)])
    trace_cache = TraceCache(depends, report_dependencies=trial.cache.add if trial.cache else None)
    if (facts := trace_cache.load()) is not None:
        return facts

    def work() -> object:
        import torch

        from dslc.runtime.model.documents import document_attention
        from dslc.runtime.model.transformers_model import build_transformers, check_configuration, padding_of

        torch.set_num_threads(1)
        if source.input is None and source.structures is None:
            check_configuration(step)
            return None

        def make() -> torch.nn.Module:
            model = build_transformers(step)
            padding.append(padding_of(model))
            documents.append(document_attention(model, source.input.shape[0] if source.input else 0))
            _check_positions(model, source.input)
            return model

        facts = _trace_module(trial, _add_adapter(trial, make), real)
        mixes, is_masked = documents[0]
        facts = replace(facts, mixes_documents=mixes, documents_masked=is_masked)
        return to_json(replace(facts, padding=None if step.structured else padding[0]))

    import_torch_for_children()
    real = RealBatch(trial)
    answer = in_child(trace_cache.watched(lambda: _or_fault(work), real.load_batch))
    yield from check_what_is_left(f"`{network.path}`", answer, network.value_span("path"))
    if "made" in answer:
        trace_answer = answer["made"]
        if faults := list(_faults(job, trace_answer["facts"])):
            yield from faults
            return None
        facts = from_json(ModelFacts, trace_answer["facts"]) if trace_answer["facts"] else None
        if not answer["left"]:
            trace_cache.store(trace_answer, facts)
        return facts
    yield Diagnostic(
        "E0805",
        f"`{network.path}` cannot be used as a model: {answer['error']}",
        network.value_span(answer["argument"] or "path"),
        help=answer["remedy"] or "arguments of `transformers(…)` override the configuration",
    )
    return None


def _check_positions(model: torch.nn.Module, input: TensorFact | None) -> None:
    """Raises TraceError if the model has fewer positions than a sequence of the data."""
    from dslc.compiler.trace.instantiate import TraceError
    from dslc.runtime.model.transformers_model import longest

    if input is None or input.dtype != "int64" or (limit := longest(model)) is None:
        return
    length = input.shape[0] if input.shape else 0
    if limit < length:
        raise TraceError(f"it has positions for {plural(limit, 'token')}, and the data's sequences have {length}")


_FAULT = "fault of the adapter"
_MOST = 2_000  # names that a child tells


def _add_adapter(trial: Trial, construct: Callable[[], UserValue]) -> Callable[[], UserValue]:
    """Returns a function that makes the module of `construct` with the job's adapter."""
    step, start = trial.steps.adapter, trial.job.model.start
    kind: Quantization | None = start.quantize if start is not None else None  # type: ignore[assignment]
    if step is None:
        return construct

    def construct_with_adapter() -> UserValue:
        from torch import nn

        from dslc.runtime.model.adapters import add

        module = construct()
        if not isinstance(module, nn.Module):
            return module
        adapted_module = add(module, replace(step, line=""), trial.job.train.seed)  # the job's line is in the message
        if kind is None:
            return adapted_module
        from dslc.runtime.model.quantized_linear import quantizable, quantize_layers

        return quantize_layers(adapted_module, quantizable(adapted_module, kind), initial=True)

    return construct_with_adapter


def preload_libraries(trial: Trial) -> None:
    """Imports, before a run, libraries for the children and the ranks: of metrics and, on CPUs, of a `transformers`
    network. On GPUs that could keep ranks from CUDA (runtime/launch.py).
    """
    job, step = trial.job, trial.steps.network
    if trial.run and any(metric.torchmetrics for metric in trial.steps.metrics):
        with contextlib.suppress(ImportError):  # a trial meets it again
            from dslc.runtime.loop.stateful_metrics import preload

            preload(trial.steps.metrics)
    if not trial.run or job.devices.gpus is not None or not isinstance(step, TransformersStep):
        return
    from dslc.runtime.model import adapters, transformers_model

    transformers_model.preload(step)
    if job.model.adapter is not None:
        adapters.preload()


def _transposed(module: nn.Module) -> tuple[str, ...]:
    """Returns the layers with an adapter whose weight has the input's dim first."""
    from dslc.runtime.model.adapters import targets_of

    return tuple(name for name, is_transposed in targets_of(module) if is_transposed)


def _quantized(job: JobSpec, module: nn.Module) -> tuple[QuantizedWeight, ...]:
    """Returns the frozen weights in 4 or 8 bits."""
    if job.model.start is None or job.model.start.quantize is None:
        return ()
    from dslc.runtime.model.quantized_linear import quantized_weights

    return quantized_weights(module)


def _or_fault(work: Callable[[], object]) -> object:
    """Returns what `work` returns, or the fault of the adapter or of a weight to quantize, for `_faults`."""
    from dslc.runtime.model.adapters import AdapterError
    from dslc.runtime.model.quantized_linear import QuantizationError

    try:
        return work()
    except QuantizationError as error:
        return {_FAULT: str(error), "argument": "quantize", "dense": [], "stacks": []}
    except AdapterError as error:
        targets = {"dense": list(error.dense)[:_MOST], "stacks": list(error.stacks)[:_MOST]}
        return {_FAULT: str(error), "argument": error.argument, **targets}


def _faults(job: JobSpec, answer: Json) -> Iterator[Diagnostic]:
    """Yields the fault of the adapter, or of a weight to quantize, that a child found."""
    adapter = job.model.adapter
    if not isinstance(answer, dict) or _FAULT not in answer or adapter is None:
        return
    if answer["argument"] == "quantize":
        assert job.model.start is not None
        yield Diagnostic(
            "E0732",
            f"the weights cannot be quantized to {job.model.start.quantize}: {answer[_FAULT]}",
            job.model.start.value_span("quantize"),
            help="`quantize = int8` takes a weight of any size; or leave `quantize` out",
        )
        return
    dense, stacks = answer["dense"], answer["stacks"]
    if not dense and not stacks:
        yield Diagnostic(
            "E0727", answer[_FAULT], adapter.value_span(answer["argument"]), help=_REMEDIES[answer["argument"]]
        )
        return
    yield from unmatched_targets(adapter, dense, stacks)


_REMEDIES = {
    "targets": "`targets` of dense layers and stacks of experts; `save` for modules that are to train whole",
    "dropout": "leave `dropout` out, or the stacks of experts",
    "save": "name it in one of the two",
}


def open_weights(trial: Trial) -> Findings[Trial | None]:
    """Adds the tensors of the job's weights if only torch can read them; yields what it cannot read."""
    start = trial.job.model.start
    if start is None or not start.path:
        return None
    try:
        files = files_of(start.path)
    except Unreadable:  # a rule reports it
        return None
    if not files.torchs:
        return None

    def work() -> object:
        from dslc.runtime.checkpoint.weights import entry
        from dslc.runtime.model.initial_weights import tensors_of

        entries = [(name, entry(tensor)) for file in files.files for name, tensor in tensors_of(file).items()]
        return [(name, tensor_entry.dtype, tensor_entry.shape) for name, tensor_entry in entries]

    answer = in_child(work)
    if "made" in answer:
        entries = {name: TensorEntry(dtype=dtype, shape=tuple(shape)) for name, dtype, shape in answer["made"]}
        return trial.with_facts(weights=entries)
    yield Diagnostic(
        "W0712",
        f"{files.path} cannot be read as weights: {answer['error']}",
        start.value_span("path"),
        help="a file in which `torch.save` has put a state dict: names and tensors, and nothing that runs",
    )
    return None
