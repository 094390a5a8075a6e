"""Rules for checkpoints, recomputation, offload and frozen parameters. E0445, E0710, E0711, E0715 to E0718, W0714.

Pure functions over the facts known so far, as in job_rules.py; None is an unknown, which is left for the run.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterable, Iterator, Sequence

from dslc.compiler.facts.transformers_file import configuration_file
from dslc.compiler.ir.parameter_names import matches
from dslc.compiler.model.model import ModelGraph
from dslc.compiler.placement.layout import Layout
from dslc.compiler.placement.sharding import autocasts, offloaded, recomputed, sharding_of, splits_backward, trained
from dslc.compiler.rules.model.name_patterns import entry_at, unmatched_patterns
from dslc.dsl.diagnostics import Diagnostic, Note
from dslc.dsl.language import calls as c
from dslc.dsl.language.job import JobSpec
from dslc.dsl.language.layers import TransformersNetwork
from dslc.dsl.language.no_effect_warnings import changed, no_effect
from dslc.dsl.language.registry import Block
from dslc.dsl.remedy import remedy, set_field
from dslc.dsl.source import Span
from dslc.dsl.words import plural


def check_training(job: JobSpec, layout: Layout | None, model: ModelGraph | None) -> Iterator[Diagnostic]:
    if model is not None:
        yield from check_patterns(job, model)
        yield from _check_recompute(job, model)
        yield from _check_compiled_blocks(job, model)
    if isinstance(job.model.network, TransformersNetwork):
        yield from _check_configuration(job, job.model.network)
    yield from _check_warmups(job)
    if layout is not None:
        yield from _check_offload(job, layout)
        yield from _check_replicas(job, layout)
    if layout is not None and model is not None:
        yield from _check_half_precision(job, layout, model)


# ------------------------------------------------------------------------------------------------------- patterns


def check_patterns(job: JobSpec, model: ModelGraph) -> Iterator[Diagnostic]:
    """Reports patterns that match no parameter, and patterns that leave none to train, or to spare from decay."""
    names = [parameter.name for layer in model.layers for parameter in layer.parameters]
    groups = [pattern for group in job.train.groups for pattern in group.parameters]
    training, no_decay = trained(job, model), job.train.no_decay
    yield from _unmatched("freeze", job.model, job.model.freeze, names)
    unmatched = list(_unmatched("no_decay", job.train, no_decay, names))
    yield from unmatched
    yield from _check_groups(job)
    unmatched_groups = list(_unmatched("groups", job.train, groups, names))
    yield from unmatched_groups
    if not unmatched_groups:
        yield from _check_tied_groups(job, model, training)
    cause = "freeze" if job.model.freeze or job.model.adapter is None else "adapter"
    if job.model.freeze and not training:
        yield Diagnostic(
            "E0711",
            f"`model.freeze` leaves none of {plural(len(names), 'parameter')} to train",
            job.model.value_span("freeze"),
            help="leave out the layers that are to learn",
        )
        return
    lists = [("train.no_decay", no_decay, job.train.name_span("no_decay"))] if no_decay and not unmatched else []
    for field, patterns, span in lists + [("train.groups", group.parameters, group.span) for group in job.train.groups]:
        matched = model.names.matching(patterns)
        if matched and not training & matched:
            yield Diagnostic(
                "W0103",
                f"`{field}` has no effect: all that it matches is frozen",
                span,
                notes=(Note(f"`model.{cause}` is set here", job.model.value_span(cause)),),
            )


def _check_tied_groups(job: JobSpec, model: ModelGraph, training: frozenset[str]) -> Iterator[Diagnostic]:
    """Warns of tied parameters that have names in two groups."""
    groups = [group.parameters for group in job.train.groups]
    for first in (name for name in dict(model.ties).values() if name in training):
        numbers = {
            name: next((number for number, patterns in enumerate(groups, 1) if matches(patterns, name)), 0)
            for name in model.names.all_names(first)
        }
        named = {number: name for name, number in reversed(numbers.items()) if number}
        if len(named) < 2:
            continue
        winner, loser = sorted(named)[:2]
        pattern = next(each for each in groups[loser - 1] if matches([each], named[loser]))
        yield Diagnostic(
            "W0660",
            f"`{named[winner]}` and `{named[loser]}` are one tensor, and it is in group {winner}, the first that "
            f"matches one of its names; group {loser} has no effect on it",
            entry_at(job.train.groups[loser - 1].span, pattern),
            notes=(Note(f"group {winner}", job.train.groups[winner - 1].span),),
            help="name the tensor in one group alone, or keep two tensors in the network",
        )


def _check_groups(job: JobSpec) -> Iterator[Diagnostic]:
    for group in job.train.groups:
        if group.lr is None and group.weight_decay is None:
            why = "it gives its parameters neither a learning rate nor a weight decay"
            yield no_effect("train.groups", why, group.span)


def _unmatched(field: str, block: Block, patterns: Sequence[str], names: Sequence[str]) -> Iterator[Diagnostic]:
    message = f"`{type(block).word}.{field}`: no parameter is called @"
    return unmatched_patterns("0710", message, block.value_span(field), patterns, names)


# --------------------------------------------------------------------------------------- configurations of networks


def _check_configuration(job: JobSpec, network: TransformersNetwork) -> Iterator[Diagnostic]:
    file = configuration_file(network, job.folder)
    if file is None or os.path.exists(file):
        return
    name = network.path.rstrip("/")
    help = "a folder with a `config.json`, such a file, or a type: `gpt2`, `llama`, …"
    if re.fullmatch(r"[\w-][\w.-]*/[\w.-]+", name) and not name.endswith(".json"):  # as models on a hub are called
        here = name.rpartition("/")[2]
        fetch = f"hf download {name} config.json --local-dir {here}"
        help = f'nothing is fetched: `{fetch}` does it; then write `transformers("./{here}")`'
    yield Diagnostic("W0806", f"there is no {file}", network.value_span("path"), help=help)


# ------------------------------------------------------------------------------------------------------- warm-ups


def _check_warmups(job: JobSpec) -> Iterator[Diagnostic]:
    """Warns of arguments of warm-ups that the job does not have."""
    schedule, average = job.train.lr_schedule, job.train.ema
    if getattr(schedule, "from_", None) is not None and not schedule.warmup.value:  # type: ignore[attr-defined]
        yield no_effect("train.lr_schedule.from", "there is no `warmup`", schedule.value_span("from_"))
    if isinstance(average, c.EMA) and average.power is None:
        for name in filter(average.is_set, ("inv_gamma", "min_decay")):
            yield no_effect(f"train.ema.{name}", "it is for a warm-up with `power`", average.value_span(name))


# ------------------------------------------------------------------------------------------- recomputation, offload


def _check_compiled_blocks(job: JobSpec, model: ModelGraph) -> Iterator[Diagnostic]:
    if job.train.compile == "blocks" and not any(layer.recomputable for layer in model.layers):
        yield Diagnostic(
            "E0445",
            "`train.compile = blocks` has nothing to compile: the network has no blocks",
            job.train.value_span("compile"),
            help=remedy(set_field("train.compile", "true"), ", which compiles the whole network"),
        )


def _check_recompute(job: JobSpec, model: ModelGraph) -> Iterator[Diagnostic]:
    if job.memory.recompute != "none" and not recomputed(job, model):
        yield Diagnostic(
            "W0714",
            "`memory.recompute` has no effect: the network has no blocks",
            job.memory.value_span("recompute"),
            notes=(Note("the network", job.model.value_span("network")),),
            help="blocks are modules of one class, with submodules, in an `nn.ModuleList`, `nn.ModuleDict` or "
            "`nn.Sequential`, or in attributes such as `block1` and `block2`"
            if job.model.has_user_network
            else "`transformer_block`, `attention` and `residual([…])` are blocks",
        )


def _check_offload(job: JobSpec, layout: Layout) -> Iterator[Diagnostic]:
    """Reports combinations that torch (`CPUOffloadPolicy`) and torchao (`CPUOffloadOptimizer`) cannot do."""
    moved = offloaded(job, layout)
    span = job.memory.value_span("offload")
    if "parameters" in moved and "optimizer" not in moved:
        yield Diagnostic(
            "E0715",
            "parameters that are kept in the host's memory are updated there, with the optimizer's state beside them",
            span,
            help=remedy(set_field("memory.offload", "[optimizer, parameters]")),
        )
    if "optimizer" not in moved:
        return
    if isinstance(job.train.precision, c.Fp16):
        yield Diagnostic(
            "E0717",
            "loss scaling has to see every gradient before the update, and the offloaded ones are elsewhere by then",
            span,
            notes=(Note("fp16 implies loss scaling", job.train.value_span("precision")),),
            help=remedy(set_field("train.precision", "bf16", "`bf16`"), " needs no loss scaling"),
        )
    elif job.train.on_nonfinite == "skip":
        yield Diagnostic(
            "E0717",
            "to leave a step out every gradient has to be seen before the update, and the offloaded ones are elsewhere "
            "by then",
            span,
            notes=(Note("steps that are not finite are left out", job.train.value_span("on_nonfinite")),),
            help=remedy(set_field("train.on_nonfinite", "stop"), " looks at the loss"),
        )
    if "parameters" in moved:
        return
    for what, where in _not_alone(job, layout):
        yield Diagnostic(
            "E0716",
            f"the optimizer's state cannot be offloaded alone with {what}",
            span,
            notes=(Note("it is asked for here", where),),
            help=remedy(set_field("memory.offload", "[optimizer, parameters]"), " works"),
        )


def _check_replicas(job: JobSpec, layout: Layout) -> Iterator[Diagnostic]:
    """Warns of a comparison of copies if no parameter has one on the data axis."""
    sharding = sharding_of(job, layout)
    has_copies = sharding.engine in ("ddp", "zero1") or (sharding.engine == "fsdp" and sharding.replicas > 1)
    if not has_copies and sharding.engine != "local" and changed(job.train, "check_replicas"):
        why = "no two ranks of the data axis hold the same parameters"
        yield no_effect("train.check_replicas", why, job.train.name_span("check_replicas"))


def _check_half_precision(job: JobSpec, layout: Layout, model: ModelGraph) -> Iterator[Diagnostic]:
    """Reports an LSTM under autocast: oneDNN has none in 16 bits for CPUs without such arithmetic."""
    if not autocasts(job) or layout.device != "cpu" or model.root is None:
        return
    if any(step.kind == ".LSTM" for step in model.root.walk()):
        yield Diagnostic(
            "E0718",
            "an LSTM cannot be computed in 16 bits on every CPU",
            job.train.value_span("precision"),
            notes=(Note("the network", job.model.value_span("network")),),
            help=remedy(
                set_field("train.precision", "fp32"),
                ", or ",
                set_field("train.precision", f"{job.train.precision.word}(level = O2)"),
            ),
        )


def _not_alone(job: JobSpec, layout: Layout) -> Iterable[tuple[str, Span | None]]:
    """Yields the features that torchao excludes: it sends each gradient to the host before ranks reduce or clip it."""
    parallelism, train, sizes = job.parallelism, job.train, layout.sizes
    for axis in ("data", "tensor", "context"):
        if sizes[axis] > 1:
            named = next((field for field in ("zero", axis) if parallelism.is_set(field)), "")
            what = f"gradients that {sizes[axis]} ranks agree on"
            yield what, parallelism.value_span(named) if named else job.devices.value_span("gpus")
            break
    else:
        if sharding_of(job, layout).engine == "fsdp":
            yield "a 16-bit copy of the parameters", train.value_span("precision")
    if splits_backward(job):
        yield (
            "a split backward pass, in which torch does not tell when a gradient is ready",
            parallelism.value_span("schedule"),
        )
    if train.clip is not None:
        yield "gradients that are clipped", train.value_span("clip")
    if job.checkpoint.is_enabled:
        yield (
            "checkpoints of its state",
            job.checkpoint.value_span("every" if job.checkpoint.every is not None else "best"),
        )
