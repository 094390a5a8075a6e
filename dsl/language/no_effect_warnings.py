"""Reports fields without effect, and arguments that exclude each other, as far as the job alone tells.

Each function takes the resolved blocks by name and the broken paths, and yields diagnostics. A field is reported as
without effect only if the user set it to something other than its default: the job as resolved writes every default
out, and warns of nothing. The compiler's rules report faults that depend on the model, the devices or the schedule's
tables.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Set
from math import inf
from typing import Any

from dslc.dsl.diagnostics import Diagnostic, Note
from dslc.dsl.language import calls as c
from dslc.dsl.language.layers import Llama
from dslc.dsl.language.lr_schedules import Multistep, Plateau, Step
from dslc.dsl.language.optimizers import SGD, Optimizer
from dslc.dsl.language.registry import Block, Node, Quantity, fields
from dslc.dsl.remedy import remedy, remove_argument, remove_at
from dslc.dsl.source import Span

Blocks = Mapping[str, Any]
Broken = Set[str]
Effect = Callable[[Blocks, Broken], Iterator[Diagnostic]]

# Sources without a validation split of their own: there is one only if the job asks for it.
_WHOLE = (c.Digits, c.Stdlib, c.Text, c.Tokens, c.Images, c.Arrays, c.Parquet, c.Synthetic)


def changed(node: Node, name: str) -> bool:
    """True if the user set the field to something other than its default; an empty list says nothing."""
    default = next(f.default for f in fields(type(node)) if f.name == name)
    return node.is_set(name) and getattr(node, name) not in (default, ())


def no_effect(path: str, why: str, span: Span | None, help: str = "") -> Diagnostic:
    return Diagnostic(code="W0103", message=f"`{path}` has no effect: {why}", span=span, help=help)


def _field_warnings(
    block: Block, names: tuple[str, ...], why: str, help: str = "", *, removable: bool = False
) -> Iterator[Diagnostic]:
    """Reports fields without effect. The help of a `removable` one also advises to remove it."""
    for name in names:
        if changed(block, name):
            place = block.name_span(name)
            advice = remedy(help, ", or ", remove_at(place, "remove it")) if removable else help
            yield no_effect(f"{type(block).word}.{name.removesuffix('_')}", why, place, advice)


def without_pipeline(blocks: Blocks, broken: Broken) -> Iterator[Diagnostic]:
    parallelism = blocks["parallelism"]
    if parallelism.pipeline == 1 and "parallelism.pipeline" not in broken and not parallelism.is_auto("pipeline"):
        yield from _field_warnings(
            parallelism, ("schedule", "virtual_stages", "stages"), "the job has no pipeline",
            "set `parallelism.pipeline`", removable=True,
        )  # fmt: skip


def without_tensor(blocks: Blocks, broken: Broken) -> Iterator[Diagnostic]:
    parallelism = blocks["parallelism"]
    if parallelism.tensor == 1 and "parallelism.tensor" not in broken and not parallelism.is_auto("tensor"):
        yield from _field_warnings(
            parallelism, ("sequence", "tensor_plan"), "the job has no tensor axis",
            "set `parallelism.tensor`", removable=True,
        )  # fmt: skip


def plan_or_sequence(blocks: Blocks, broken: Broken) -> Iterator[Diagnostic]:
    """Reports a plan for a layered network, and pieces of the sequence for a network that a function makes."""
    parallelism = blocks["parallelism"]
    if parallelism.tensor == 1 or broken & {"parallelism.tensor", "model.network"}:
        return
    if blocks["model"].has_user_network:
        yield from _field_warnings(
            parallelism, ("sequence",), "a network that a function makes works on whole sequences"
        )
    else:
        yield from _field_warnings(parallelism, ("tensor_plan",), "dslc knows how its own layers are split")


def without_zero(blocks: Blocks, broken: Broken) -> Iterator[Diagnostic]:
    parallelism = blocks["parallelism"]
    if parallelism.zero == 0 and "parallelism.zero" not in broken and not parallelism.is_auto("zero"):
        yield from _field_warnings(
            parallelism,
            ("replicas",),
            "nothing is sharded over the data axis",
            "set `parallelism.zero`",
            removable=True,
        )


def without_expert_axis(blocks: Blocks, broken: Broken) -> Iterator[Diagnostic]:
    parallelism = blocks["parallelism"]
    if parallelism.expert == 1 and "parallelism.expert" not in broken and not parallelism.is_auto("expert"):
        yield from _field_warnings(
            parallelism, ("expert_skew",), "no ranks share experts", "set `parallelism.expert`", removable=True
        )


def without_data_axis(blocks: Blocks, broken: Broken) -> Iterator[Diagnostic]:
    parallelism = blocks["parallelism"]
    if parallelism.data == 1 and parallelism.is_set("data"):
        reason = "one rank shares its gradients with none (`parallelism.data` is 1)"  # W0402 covers `zero`
        yield from _field_warnings(parallelism, ("gradients", "data_shares"), reason)


def without_checkpoints(blocks: Blocks, broken: Broken) -> Iterator[Diagnostic]:
    checkpoint = blocks["checkpoint"]
    if not checkpoint.is_enabled and not broken & {"checkpoint.every", "checkpoint.best"}:
        names = ("keep", "asynchronous") if checkpoint.resume else ("keep", "asynchronous", "dir")
        yield from _field_warnings(
            checkpoint, names, "no checkpoints are written", "set `checkpoint.every`", removable=True
        )


def _held_out(blocks: Blocks) -> bool:
    data = blocks["data"]
    return data.validation > 0 or not all(isinstance(source, _WHOLE) for source in c.parts_of(data.source))


def without_validation(blocks: Blocks, broken: Broken) -> Iterator[Diagnostic]:
    evaluate = blocks["evaluate"]
    if "data.validation" not in broken and not _held_out(blocks) and not evaluate.training:
        names = ("every", "start") if blocks["data"].test else ("every", "metrics", "start")
        yield from _field_warnings(
            evaluate, names, "nothing is held out to evaluate on", "set `data.validation`", removable=True
        )


def without_prompts(blocks: Blocks, broken: Broken) -> Iterator[Diagnostic]:
    generate = blocks["generate"]
    if generate.prompts is None and "generate.prompts" not in broken:
        yield from _field_warnings(
            generate,
            ("every", "max_tokens", "temperature", "tokenizer"),
            "there is no prompt to continue",
            "set `generate.prompts`",
            removable=True,
        )


def without_evaluations(blocks: Blocks, broken: Broken) -> Iterator[Diagnostic]:
    """Reports goals of a job that evaluates once, at the end. E0317 is about jobs that never do."""
    if blocks["evaluate"].every is None and "evaluate.every" not in broken and _held_out(blocks):
        plateau = isinstance(blocks["train"].lr_schedule, Plateau)
        goals = (("train", ("early_stopping", *["lr_schedule"] * plateau)), ("checkpoint", ("best",)))
        for block, names in goals:
            yield from _field_warnings(
                blocks[block], names, "the only evaluation is at the end", "set `evaluate.every`"
            )


def without_weight_decay(blocks: Blocks, broken: Broken) -> Iterator[Diagnostic]:
    train = blocks["train"]
    decays = any(group.weight_decay for group in train.groups) or "train.optimizer.weight_decay" in broken
    if getattr(train.optimizer, "weight_decay", None) == 0 and not decays:
        yield from _field_warnings(train, ("no_decay",), "the optimizer has no weight decay", "set its `weight_decay`")


def offload_on_cpu(blocks: Blocks, broken: Broken) -> Iterator[Diagnostic]:
    devices = blocks["devices"]
    if devices.gpus is None and not broken & {"devices.gpus", "devices.cpus"}:
        yield from _field_warnings(blocks["memory"], ("offload",), "the devices are CPUs, whose memory is the host's")


def momentum(blocks: Blocks, broken: Broken) -> Iterator[Diagnostic]:
    """Reports momentum settings that torch's SGD refuses, and settings that it ignores."""
    optimizer: Optimizer = blocks["train"].optimizer
    if not isinstance(optimizer, SGD) or "train.optimizer.momentum" in broken:
        return
    if optimizer.nesterov and (optimizer.momentum == 0 or optimizer.dampening != 0):
        wrong = "momentum" if optimizer.momentum == 0 else "dampening"
        place = optimizer.places.get(wrong)
        notes = [Note(message="it is set here", span=place.value)] if place else []
        yield Diagnostic(
            code="E0138", message="Nesterov's momentum needs a `momentum` above 0 and no `dampening`",
            span=optimizer.name_span("nesterov"), notes=tuple(notes),
            help="give the optimizer a `momentum`"
            if wrong == "momentum"
            else remedy(remove_argument(optimizer.span, "dampening", "remove `dampening`")),
        )  # fmt: skip
    elif optimizer.momentum == 0 and changed(optimizer, "dampening"):
        yield no_effect("train.optimizer.dampening", "the optimizer has no momentum", optimizer.name_span("dampening"))


def tokens_and_numbers(blocks: Blocks, broken: Broken) -> Iterator[Diagnostic]:
    source = blocks["data"].source
    if isinstance(source, c.Synthetic) and source.vocab is None and changed(source, "context"):
        yield no_effect("data.source.context", "the samples are numbers, not tokens", source.name_span("context"),
                        "set `vocab` for tokens")  # fmt: skip


def without_window(blocks: Blocks, broken: Broken) -> Iterator[Diagnostic]:
    network = blocks["model"].network
    place = network.name_span("max_window_layers") if isinstance(network, Llama) else None
    if isinstance(network, Llama) and network.window is None and changed(network, "max_window_layers"):
        yield no_effect("model.network.max_window_layers", "the network has no window",
                        place, remedy("set `window`, or ", remove_at(place, "remove it")))  # fmt: skip


def beside_experts(blocks: Blocks, broken: Broken) -> Iterator[Diagnostic]:
    """Reports arguments of gated networks that no block has, and of experts that no block has."""
    network = blocks["model"].network
    if not isinstance(network, Llama) or "model.network" in broken:
        return
    names: tuple[str, ...] = ()
    if network.experts is None:
        names, why, other = ("dense_layers",), "the network has no experts", "experts"
    elif network.dense_layers == 0:
        names, why, other = ("hidden", "mlp_bias"), "all blocks have experts", "dense_layers"
    for name in names:
        if changed(network, name):
            place = network.name_span(name)
            advice = remedy(f"set `{other}`, or ", remove_at(place, "remove it"))
            yield no_effect(f"model.network.{name}", why, place, advice)


def without_stream(blocks: Blocks, broken: Broken) -> Iterator[Diagnostic]:
    data = blocks["data"]
    if isinstance(data.source, c.Datasets):
        streamed = bool(dict(data.source.arguments).get("streaming"))
    else:
        streamed = isinstance(data.source, c.PythonSource)
    if "data.source" not in broken and not streamed:
        yield from _field_warnings(data, ("samples", "shuffle_buffer", "interleave"), "the source is no stream")
    elif not data.shuffle:
        yield from _field_warnings(data, ("shuffle_buffer",), "nothing is shuffled", "remove `shuffle = false`, or it")


def step_never_taken(blocks: Blocks, broken: Broken) -> Iterator[Diagnostic]:
    train = blocks["train"]
    schedule = train.lr_schedule
    times = (
        (schedule.every,)
        if isinstance(schedule, Step)
        else schedule.milestones
        if isinstance(schedule, Multistep)
        else ()
    )
    totals = {"steps": train.steps, "epochs": train.epochs}
    if times and all(isinstance(time, Quantity) and time.value >= (totals[time.dimension] or inf) for time in times):
        total = totals[times[0].dimension]
        yield no_effect(
            "train.lr_schedule", f"the training ends before its first step, after {total} {times[0].dimension}",
            train.name_span("lr_schedule"),
        )  # fmt: skip


EFFECTS: tuple[Effect, ...] = (
    without_pipeline,
    without_tensor,
    plan_or_sequence,
    without_zero,
    without_expert_axis,
    without_data_axis,
    without_checkpoints,
    without_validation,
    without_prompts,
    without_evaluations,
    without_weight_decay,
    offload_on_cpu,
    momentum,
    tokens_and_numbers,
    without_window,
    beside_experts,
    without_stream,
    step_never_taken,
)
