"""Rules for a user's own optimizer, over what trying it has shown. E0613, E0615 to E0617, E0662, E0663, E0723,
W0613, W0663.

Each is a reason why ranks would update parameters otherwise than one process does. Without facts (nothing was tried)
only what the job alone tells is reported.
"""

from __future__ import annotations

from collections.abc import Iterator

from dslc.compiler.ir.network_facts import OptimizerFacts
from dslc.compiler.placement.layout import Layout
from dslc.compiler.placement.sharding import Engine, offloaded, sharding_of
from dslc.compiler.rules.parallelism.sharding import less_sharded, or_else, sharding_span
from dslc.dsl.diagnostics import Diagnostic, Note
from dslc.dsl.language.calls import Fp16
from dslc.dsl.language.job import JobSpec
from dslc.dsl.language.no_effect_warnings import no_effect
from dslc.dsl.language.optimizers import PythonOptimizer
from dslc.dsl.remedy import remedy, remove_at, remove_field, set_field
from dslc.dsl.source import Span


def check_own_optimizer(job: JobSpec, layout: Layout | None, facts: OptimizerFacts | None) -> Iterator[Diagnostic]:
    """Reports why a user's own optimizer cannot be used as the job asks."""
    call = job.train.optimizer
    if not isinstance(call, PythonOptimizer):
        return
    if job.train.groups:
        yield Diagnostic(
            "E0622",
            f"`groups` is for torch's optimizers: `{call.function}` is given the parameters that train, without groups",
            job.train.value_span("groups"),
            notes=(Note("the optimizer", job.train.value_span("optimizer")),),
            help=remedy(
                remove_field("train.groups"),
                ", and let a function make them: it is given names as well if its first argument is `named_parameters`",
            ),
        )
    if layout is not None:
        yield from _check_offload(job, call, layout)
    if facts is None:
        return
    if layout is not None:
        yield from _check_ranks(job, call, layout, facts)
    yield from _check_kept(job, call, facts)
    if facts.modes:
        yield from _check_modes(job, call, layout)
    if facts.closure:
        yield from _check_closure(job, call, layout)
    if job.train.no_decay and not facts.decays:
        why = f"`{call.function}` takes no `weight_decay`"
        yield no_effect("train.no_decay", why, job.train.name_span("no_decay"), "give it such an argument")


def _check_ranks(job: JobSpec, call: PythonOptimizer, layout: Layout, facts: OptimizerFacts) -> Iterator[Diagnostic]:
    sharding, sizes = sharding_of(job, layout), layout.sizes
    notes = (Note("the optimizer", job.train.value_span("optimizer")),)
    if facts.draws:
        if layout.world_size > 1:
            yield Diagnostic(
                "E0615",
                f"`{call.function}` draws random numbers, which are others on each rank: copies of a parameter on "
                f"{layout.world_size} ranks would not stay the same",
                job.train.value_span("optimizer"),
                help="an update that follows from gradients and state alone, or one rank",
            )
        return
    rows = (sharding.engine == "fsdp" and sharding.shards > 1) or sizes["tensor"] > 1
    if rows and facts.rows:
        whole: tuple[Engine, ...] = ("none", "ddp") if facts.alone else ("none", "ddp", "zero1")
        yield Diagnostic(
            "E0723",
            f"`{call.function}` needs whole parameters, and ranks would have parts of them: {facts.rows}",
            job.parallelism.value_span("tensor") if sizes["tensor"] > 1 else sharding_span(job, layout),
            notes=notes,
            help=remedy(
                "an optimizer that treats each number alone",
                or_else(job, layout, *whole, copies=sizes["tensor"] == 1 and not facts.alone),
            ),
        )
    elif facts.alone and (sharding.engine == "zero1" or sizes["pipeline"] > 1):
        yield Diagnostic(
            "E0613",
            f"`{call.function}` needs all parameters, and each rank would have some: {facts.alone}",
            job.parallelism.value_span("pipeline" if sizes["pipeline"] > 1 else "zero"),
            notes=notes,
            help=remedy("an optimizer that treats each parameter alone", or_else(job, layout, "none", "ddp")),
        )


def _check_modes(job: JobSpec, call: PythonOptimizer, layout: Layout | None) -> Iterator[Diagnostic]:
    """Reports settings that replace the weights of the optimizer's `eval()`, or keep parts of them."""
    sharding = sharding_of(job, layout) if layout is not None else None
    parallelism, found = job.parallelism, list[tuple[str, Span | None, str]]()
    if job.train.ema:
        found.append(
            ("`ema` averages those that train", job.train.value_span("ema"), remedy(remove_field("train.ema")))
        )
    if sharding is not None and sharding.engine == "zero1":
        reason = "under `zero = 1` each rank would change those of its own parameters alone"
        two, none = set_field("parallelism.zero", 2), set_field("parallelism.zero", 0)
        less = remedy(two, " shards the optimizer's state as well, or ", none)
        found.append((reason, parallelism.value_span("zero"), less))
    if sharding is not None and sharding.engine == "local":
        reason = "this exchange averages the weights of ranks, and not what the optimizer keeps of them"
        found.append((reason, parallelism.value_span("gradients"), remedy(remove_field("parallelism.gradients"))))
    for reason, span, help in found:
        yield Diagnostic(
            "E0662",
            f"`{call.function}` has `train()` and `eval()`, and evaluates other weights than it trains: {reason}",
            span,
            notes=(Note("the optimizer", job.train.value_span("optimizer")),),
            help=help,
        )


def _check_closure(job: JobSpec, call: PythonOptimizer, layout: Layout | None) -> Iterator[Diagnostic]:
    """Reports fields that keep a step from being evaluated again; else warns that the plan shows one evaluation."""
    train, refusals = job.train, list[tuple[str, Span | None, str]]()
    if train.step is not None:
        reason = "a step of your own makes its updates by itself, and hands no closure over"
        refusals.append((reason, train.value_span("step"), remedy(remove_field("train.step"))))
    if isinstance(train.precision, Fp16):
        reason = "`fp16` scales the loss, and a step whose gradients overflow is left out after its evaluations"
        other = remedy(set_field("train.precision", "bf16", "`bf16`"), " needs no loss scaling")
        refusals.append((reason, train.value_span("precision"), other))
    if train.on_nonfinite == "skip":
        reason = "`skip` leaves out a step after its evaluations, which have moved the parameters by then"
        stop = remedy(set_field("train.on_nonfinite", "stop"), ", which sees the first evaluation")
        refusals.append((reason, train.value_span("on_nonfinite"), stop))
    if layout is not None:
        refusals += _split_parameters(job, layout)
    for reason, span, help in refusals:
        yield Diagnostic(
            "E0663",
            f"`{call.function}` evaluates the loss within its `step`, by a closure: {reason}",
            span,
            notes=(Note("the optimizer", train.value_span("optimizer")),),
            help=remedy(help, "; or an optimizer whose `step` takes no closure"),
        )
    if not refusals:
        yield Diagnostic(
            "W0663",
            f"`{call.function}` may evaluate a step several times, and the plan shows one evaluation: a step takes at "
            "least that time, and at least those collectives",
            train.value_span("optimizer"),
        )


def _split_parameters(job: JobSpec, layout: Layout) -> Iterator[tuple[str, Span | None, str]]:
    """Yields why a rank lacks whole parameters or the sum of their gradients, the field, and the remedy."""
    sharding, parallelism = sharding_of(job, layout), job.parallelism
    axes = [axis for axis in ("pipeline", "tensor", "context") if layout.sizes[axis] > 1]
    for axis in axes:
        reason = f"over the {axis} axis no rank has all parameters and gradients of the step"
        yield reason, parallelism.value_span(axis), remedy(set_field(f"parallelism.{axis}", 1))
    if not axes and sharding.engine in ("zero1", "fsdp"):
        fine = less_sharded(job, layout, "none", "ddp")
        place = sharding_span(job, layout)
        help = remedy(fine) if fine is not None else remedy(remove_at(place))
        yield "a rank would have parts of the parameters", place, help
    if sharding.exchange is not None:
        reason = "this exchange is no exact sum of gradients, so that a line search would differ on each rank"
        yield reason, parallelism.value_span("gradients"), remedy(remove_field("parallelism.gradients"))


def _check_offload(job: JobSpec, call: PythonOptimizer, layout: Layout) -> Iterator[Diagnostic]:
    moved = offloaded(job, layout)
    if "optimizer" in moved and "parameters" not in moved:
        yield Diagnostic(
            "E0616",
            f"torchao's offloading updates parameters one by one beside the backward pass, and `{call.function}` is "
            "yours",
            job.memory.value_span("offload"),
            notes=(Note("the optimizer", job.train.value_span("optimizer")),),
            help=remedy(set_field("memory.offload", "[optimizer, parameters]"), " works"),
        )


def _check_kept(job: JobSpec, call: PythonOptimizer, facts: OptimizerFacts) -> Iterator[Diagnostic]:
    asked = "every" if job.checkpoint.every is not None else "resume" if job.checkpoint.resume else ""
    if facts.unkept and asked:
        yield Diagnostic(
            "E0617",
            f"`{call.function}` would not go on from a checkpoint as it was: it depends on something that is neither "
            "in its `state`, by parameter, nor in its groups",
            job.checkpoint.value_span(asked),
            notes=(Note("the optimizer", job.train.value_span("optimizer")),),
            help="keep it in `self.state[parameter]` or `group[…]`, as tensors and numbers",
        )


def tell_of_memory(job: JobSpec, facts: OptimizerFacts | None) -> Iterator[Diagnostic]:
    """Warns that a plan lacks the memory of an optimizer that was not tried."""
    call = job.train.optimizer
    if isinstance(call, PythonOptimizer) and facts is None:
        yield Diagnostic(
            "W0613",
            f"the memory is shown without what `{call.function}` keeps, which was not called",
            job.train.value_span("optimizer"),
            help="`--trace` calls it, and measures that",
        )
