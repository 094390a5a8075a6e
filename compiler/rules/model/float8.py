"""Rules for products in 8 bits: devices that have them, plans and networks that torchao's layers fit, and plans that
gather weights in 8 bits. E0740 to E0744, W0742.
"""

from __future__ import annotations

from collections.abc import Iterator

from dslc.compiler.ir.tensor_styles import EXPERT_STYLES, TensorStyle
from dslc.compiler.model.float8 import MULTIPLE, SKIPPED, dense_layers, fits, float8_step, gathered_weights
from dslc.compiler.model.model import ModelGraph
from dslc.compiler.placement.layout import Layout
from dslc.compiler.placement.sharding import sharding_of, splits_backward
from dslc.compiler.placement.tensor_plan import TensorPlan
from dslc.compiler.rules.model.adapters import targets_any
from dslc.compiler.rules.model.name_patterns import unmatched_patterns
from dslc.dsl.diagnostics import Diagnostic, Note
from dslc.dsl.language.calls import Fp8
from dslc.dsl.language.job import JobSpec
from dslc.dsl.remedy import remedy, set_field
from dslc.dsl.source import Span


def check_float8(
    job: JobSpec, layout: Layout | None, model: ModelGraph | None, cuts: TensorPlan | None
) -> Iterator[Diagnostic]:
    """Checks `precision = fp8(…)` against the devices, the plan and the network, as far as these are known."""
    precision = job.train.precision
    if not isinstance(precision, Fp8):
        return
    if layout is not None and not precision.emulate:
        yield from _check_device(job, layout)
    yield from _check_plan(job)
    if precision.all_gather:
        yield from _check_gather(job, precision, layout, model)
    if model is not None:
        yield from _check_layers(job, precision, model)
    if layout is not None and model is not None and cuts is not None and not cuts.uneven:
        yield from _check_cuts(job, layout.sizes["tensor"], model, cuts)


def _check_device(job: JobSpec, layout: Layout) -> Iterator[Diagnostic]:
    """Reports a device without products in 8 bits. Of a kind that is not known the ranks ask the device."""
    hardware, devices = layout.hardware, job.devices
    on_cpu = layout.device == "cpu"
    if not on_cpu and (hardware.kind == "gpu" or hardware.flops_fp8 is not None):
        return
    what = "a CPU" if on_cpu else f"`{hardware.kind}`"
    field = "cpus" if on_cpu else "kind"
    yield Diagnostic(
        "E0740",
        f"{what} has no products in 8 bits",
        job.train.value_span("precision"),
        notes=(Note("the devices", devices.value_span(field)),),
        help=remedy(
            set_field("train.precision.emulate", "true"),
            " computes the same numbers, more slowly; or ",
            set_field("train.precision", "bf16"),
        ),
    )


def _check_plan(job: JobSpec) -> Iterator[Diagnostic]:
    """Reports features that torchao's layers do not fit."""
    for fault, what, where, help in _misfits(job):
        yield Diagnostic("E0741", fault, job.train.value_span("precision"), notes=(Note(what, where),), help=help)


def _misfits(job: JobSpec) -> Iterator[tuple[str, str, Span | None, str]]:
    """Yields each fault, with the feature, its place and a remedy."""
    parallelism, low = job.parallelism, remedy("; or ", set_field("train.precision", "bf16"))
    if splits_backward(job):
        yield (
            "torchao computes the gradients of inputs and of weights in one pass, and this schedule in two",
            "the schedule",
            parallelism.value_span("schedule"),
            remedy(set_field("parallelism.schedule", "1f1b"), low),
        )
    if job.model.adapter is not None:
        yield (
            "products in 8 bits are for weights that train, and an adapter freezes those of dense layers",
            "the adapter",
            job.model.value_span("adapter"),
            remedy(set_field("train.precision", "bf16")),
        )


def _check_gather(
    job: JobSpec, precision: Fp8, layout: Layout | None, model: ModelGraph | None
) -> Iterator[Diagnostic]:
    """Reports plans that do not gather weights in 8 bits."""
    for fault, what, where, help in _gather_misfits(job, precision, layout, model):
        notes = (Note(what, where),) if what else ()
        yield Diagnostic("E0744", fault, precision.value_span("all_gather"), notes=notes, help=help)


def _gather_misfits(
    job: JobSpec, precision: Fp8, layout: Layout | None, model: ModelGraph | None
) -> Iterator[tuple[str, str, Span | None, str]]:
    """Yields each fault, with the feature, its place and a remedy."""
    parallelism, without = job.parallelism, set_field("train.precision.all_gather", "false")
    if precision.recipe != "tensorwise":
        yield (
            "the two passes cast a weight by other rows: no one cast serves both",
            "the recipe",
            precision.value_span("recipe"),
            remedy(set_field("train.precision.recipe", "tensorwise"), "; or ", without),
        )
    if parallelism.zero != 3:
        zero = ("`zero`", parallelism.value_span("zero"), remedy(set_field("parallelism.zero", 3), "; or ", without))
        yield (f"`zero = {parallelism.zero}` does not gather weights for each pass", *zero)
    elif layout is not None and (sharding := sharding_of(job, layout)).shards == 1:
        where = parallelism.value_span("replicas" if sharding.replicas > 1 else "zero")
        yield "each rank has all rows of each weight: nothing is gathered", "the plan", where, remedy(without)
    elif layout is not None and model is not None:
        names = gathered_weights(job, model)
        for layer in dense_layers(model):
            if f"{layer.name}.weight" in names and layer.rows % sharding.shards:
                fault = f"the {layer.rows:,} rows of `{layer.name}` have no equal shares on {sharding.shards} ranks"
                yield fault, "the plan", parallelism.value_span("zero"), remedy(without)
                break
    if parallelism.tensor > 1:
        fault = "a rank of the tensor axis has a share of a weight, and casts it by the scale of that share"
        yield fault, "the tensor axis", parallelism.value_span("tensor"), remedy(without)
    if job.train.step is not None:
        yield (
            "the parts of a custom step are gathered one by one",
            "the step",
            job.train.value_span("step"),
            remedy(without),
        )
    if "parameters" in job.memory.offload:
        yield (
            "weights in the host's memory travel to the device in 32 bits",
            "the offload",
            job.memory.value_span("offload"),
            remedy(without),
        )


def _check_cuts(job: JobSpec, ranks: int, model: ModelGraph, cuts: TensorPlan) -> Iterator[Diagnostic]:
    """Reports the first layer whose share does not fit the hardware, or that has a share of its input alone."""
    step = float8_step(job, model)
    names = frozenset(step.layers or () if step is not None else ())
    mixtures = tuple(f"{name}." for name, style in cuts.styles if style in EXPERT_STYLES)
    for layer in dense_layers(model) if ranks > 1 else ():
        of_mixture = [TensorStyle.EXPERTS] if layer.name.startswith(mixtures) else []
        for style in (*cuts.by_module.get(layer.name, ()), *of_mixture) if layer.name in names else ():
            rows = layer.rows // ranks if style.cut == 0 else layer.rows
            columns = layer.columns // ranks if style.cut == 1 else layer.columns
            if style.cut is not None and not fits(rows, columns):
                fault = f"a rank's {rows:,} x {columns:,} of `{layer.name}` is no multiple of {MULTIPLE}"
            elif style is TensorStyle.EXPERTS:
                fault = f"`{layer.name}` is of a mixture of experts, which the tensor axis cuts"
            elif style in (TensorStyle.SUMMED, TensorStyle.SEQUENCE):
                fault = f"`{layer.name}` is whole on each rank and sees a share of its input, which has other scales"
            else:
                continue
            yield Diagnostic(
                "E0741",
                f"{fault}: it does not multiply in 8 bits as one process does",
                job.train.value_span("precision"),
                notes=(Note("the tensor axis", job.parallelism.value_span("tensor")),),
                help=remedy(
                    set_field("parallelism.tensor", 1),
                    f': `zero = 3` shards the weights over the data axis; or `skip = "{layer.name}"`',
                ),
            )
            return


def _check_layers(job: JobSpec, precision: Fp8, model: ModelGraph) -> Iterator[Diagnostic]:
    """Reports patterns that name no dense layer, and a network that has none in 8 bits."""
    layers = [layer.name for layer in dense_layers(model)]
    parts = [name.split(".") for name in layers]
    modules = dict.fromkeys(".".join(each[: n + 1]) for each in parts for n in range(len(each)))
    yield from unmatched_patterns(
        "0742",
        "`train.precision.skip`: no dense layer, and no module with one, is called @",
        precision.value_span("skip"),
        precision.skip,
        list(modules),
        what="the dense layers",
        is_of=targets_any,
    )
    step = float8_step(job, model)
    if step is None or step.layers or job.model.adapter is not None:
        return
    reasons = {reason for _, reason in step.others} - {SKIPPED}
    yield Diagnostic(
        "E0743",
        "no layer of the network can multiply in 8 bits"
        + (f": of {len(layers)} dense layers, `{step.others[0][0]}`: {step.others[0][1]}" if layers else ""),
        job.train.value_span("precision"),
        notes=(Note("the network", job.model.network_span),),
        help=remedy(
            f"dense layers whose width and features are multiples of {MULTIPLE}; or " if reasons or not layers else "",
            set_field("train.precision", "bf16"),
        ),
    )
