"""Rules for an exchange that is no exact sum of gradients: E0605, E0630 to E0633, W0630, W0635, W0636.

Half precision is a matter of how numbers are sent, and goes with every sharding and axis. Every other exchange needs
whole gradients, or weights, on each rank of a data axis alone.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import pairwise

from dslc.compiler.ir.actions import Payload
from dslc.compiler.model.model import ModelGraph
from dslc.compiler.operations.exchange_rules import RULES
from dslc.compiler.placement.exchange import ExchangePolicy, exchange_of
from dslc.compiler.placement.layout import Layout
from dslc.compiler.placement.sharding import low_copy, searches, sharding_of, trained
from dslc.dsl.diagnostics import Diagnostic, Note, passes
from dslc.dsl.language import calls as c
from dslc.dsl.language.exchanges import Allreduce
from dslc.dsl.language.job import JobSpec
from dslc.dsl.language.optimizers import Adam, Compressed, QAdam
from dslc.dsl.language.registry import fields
from dslc.dsl.language.units import number
from dslc.dsl.remedy import Fix, join_edits, remedy, remove_field, set_argument, set_field
from dslc.dsl.source import Span
from dslc.dsl.words import plural

SHORT = 0.05  # of all steps: a third of the shortest warm-up of the papers
TINY = 1e-6  # an `eps` by which rounded momenta that have no gradient may be divided


def check_exchange(job: JobSpec, layout: Layout | None, model: ModelGraph | None) -> Iterator[Diagnostic]:
    """Checks that the ranks can agree as the job says; warns of what they give up."""
    optimizer, said = job.train.optimizer, job.parallelism.gradients
    exchange = exchange_of(job, layout) if layout is not None else None
    if isinstance(optimizer, Compressed) and not isinstance(said, Allreduce):
        yield Diagnostic(
            "E0605",
            f"`{optimizer.word}` exchanges gradients in a way of its own",
            job.parallelism.value_span("gradients"),
            notes=(Note("the optimizer is set here", job.train.value_span("optimizer")),),
            help=remedy(_in_bf16(job), ", which goes with every axis and sharding")
            if layout is not None and exchange is not None and _excluded(job, layout, exchange)
            else remedy(remove_field("parallelism.gradients"), ", or ", set_field("train.optimizer", _adam(optimizer))),
        )
        return
    if layout is None or exchange is None:
        return
    where = exchange_span(job)
    exact = remedy(set_field("parallelism.gradients", "allreduce()"), " is exact")
    if isinstance(optimizer, Compressed):
        exact = remedy(set_field("train.optimizer", _adam(optimizer)), " is exact")
    fine = yield from passes(_check_axes(job, layout, exchange, where))
    if job.train.step is not None:
        yield Diagnostic(
            "E0620",
            f"`{exchange.word}` changes what happens within a step, and this job does its steps itself",
            where,
            notes=(Note("the step", job.train.value_span("step")),),
            help=remedy(remove_field("parallelism.gradients", "leave one of the two out")),
        )
    elif fine and exchange.agrees is not Payload.GRADIENTS:
        yield from _check_step(job, exchange, where)
    yield from _check_pairs(exchange, where)
    if (
        model is not None
        and fine
        and exchange.agrees is not Payload.GRADIENTS
        and searches(model, sharding_of(job, layout))
    ):
        yield Diagnostic(
            "E0632",
            f"numbers decide which parameters a step of this network uses, and under `{exchange.word}` no rank knows "
            "which others have used",
            where,
            notes=(Note("the network", job.model.value_span("network")),),
            help=exact,
        )
    if model is not None and isinstance(optimizer, Compressed) and optimizer.eps < TINY:
        yield from _check_biases(job, model)
    yield Diagnostic(
        "W0630",
        f"`{exchange.word}` gives up that training is the same on any number of ranks: {exchange.gives_up}",
        where,
        label=f"after {plural(exchange.alone, 'step')} of exact sums" if exchange.alone else "",
        help=exact,
    )


def _check_pairs(exchange: ExchangePolicy, where: Span | None) -> Iterator[Diagnostic]:
    """Reports pairs of an odd number of members."""
    if exchange.arguments.get("peers") == "shift_one" and exchange.members % 2:
        who = "nodes" if exchange.pieces > 1 else "ranks"
        yield Diagnostic(
            "E0633",
            f"`shift_one` makes pairs, and of {exchange.members} {who} one would be left",
            where,
            help=remedy(f"an even number of {who}, or ", set_field("parallelism.gradients.peers", "all")),
        )


def _check_biases(job: JobSpec, model: ModelGraph) -> Iterator[Diagnostic]:
    """Warns of biases that a batch norm takes away again: their gradients are rounding alone."""
    own = {name for name in trained(job, model) if name.endswith(".bias")}
    found = [
        layer
        for layer, after in pairwise(model.layers)
        if after.kind == "batch_norm" and any(q.name in own for q in layer.parameters)
    ]
    if found:
        word = job.train.optimizer.word
        yield Diagnostic(
            "W0636",
            f"a bias before a batch norm has no gradient but rounding, which `{word}` divides by next to nothing: it "
            "runs away, and what is evaluated is wrong",
            job.train.value_span("optimizer"),
            notes=(Note(f"`{found[0].kind}` has a bias before a batch norm", found[0].span),),
            help=remedy(
                set_argument(found[0].span, "bias", "false"), " there; or ", set_field("train.optimizer.eps", "1e-4")
            ),
        )


def check_warmup(job: JobSpec, steps: int) -> Iterator[Diagnostic]:
    """Warns if an optimizer freezes its second moment too early in a training of `steps` steps, or never."""
    optimizer = job.train.optimizer
    if not isinstance(optimizer, Compressed):
        return
    alone, word = plural(optimizer.exact_steps, "step"), optimizer.word
    if optimizer.exact_steps >= steps:
        told = f"the training ends after {plural(steps, 'step')}, and `{word}` is plain Adam in the first {alone}"
    elif optimizer.exact_steps < SHORT * steps:
        told = f"`{word}` freezes its second moment after {alone} of {steps}: too early, the training may diverge"
    else:
        return
    name = "warmup" if isinstance(optimizer, QAdam) else "freeze"
    fifth = max(1, steps // 5)
    help = remedy(set_field(f"train.optimizer.{name}", fifth), ", a fifth of the training")
    yield Diagnostic("W0635", told, job.train.value_span("optimizer"), help=help)


def exchange_span(job: JobSpec) -> Span | None:
    """Returns the place where a job says its exchange."""
    if isinstance(job.train.optimizer, Compressed):
        return job.train.value_span("optimizer")
    return job.parallelism.value_span("gradients")


def _adam(optimizer: Compressed) -> str:
    """Returns the plain Adam that an optimizer of this kind begins with, as a job writes it."""
    arguments = []
    for field in fields(Adam):
        value = getattr(optimizer, field.name, field.default)
        if value != field.default:
            text = f"[{', '.join(map(number, value))}]" if isinstance(value, tuple) else number(value)
            arguments.append(f"{field.word} = {text}")
    return f"adam({', '.join(arguments)})"


def _in_bf16(job: JobSpec) -> Fix:
    """Returns the exchange in half precision, with a plain Adam if the optimizer exchanges in a way of its own."""
    plain = set_field("parallelism.gradients", "bf16()")
    if isinstance(job.train.optimizer, Compressed):
        return join_edits(set_field("train.optimizer", _adam(job.train.optimizer)), " with ", plain)
    return join_edits(plain)


def _check_axes(job: JobSpec, layout: Layout, exchange: ExchangePolicy, where: Span | None) -> Iterator[Diagnostic]:
    """Reports axes and shardings of the job that do not go with its exchange."""
    what = "whole gradients" if exchange.agrees is Payload.GRADIENTS else "whole weights"
    for other, span in _excluded(job, layout, exchange):
        yield Diagnostic(
            "E0630",
            f"`{exchange.word}` exchanges {what}, which no rank has with {other}",
            where,
            notes=(Note("it is asked for here", span),),
            help=remedy(_in_bf16(job), " goes with every axis and sharding"),
        )


def _excluded(job: JobSpec, layout: Layout, exchange: ExchangePolicy) -> list[tuple[str, Span | None]]:
    """Returns the axes and shardings of the job that leave no rank what the exchange needs, and where they are set."""
    if RULES[exchange.kind].sums_in:
        return []
    zero = job.parallelism.zero
    excluded = [(f"the {axis} axis", axis) for axis in ("pipeline", "tensor", "context") if layout.sizes[axis] > 1]
    if zero > (1 if exchange.agrees is Payload.GRADIENTS else 0):
        excluded.append((f"`zero = {zero}`", "zero"))
    if job.parallelism.replicas > 1:
        excluded.append(("`replicas`", "replicas"))
    found: list[tuple[str, Span | None]] = [(what, job.parallelism.value_span(name)) for what, name in excluded]
    if low_copy(job):
        found.append(("a 16-bit copy of the parameters", job.train.value_span("precision")))
    if "parameters" in job.memory.offload and layout.device == "cuda":
        found.append(("parameters in the host's memory", job.memory.value_span("offload")))
    return found


def _check_step(job: JobSpec, exchange: ExchangePolicy, where: Span | None) -> Iterator[Diagnostic]:
    """Reports what needs a gradient, or a decision, that all ranks share within a step."""
    for what, span, why, help in _needs_agreement(job, exchange):
        yield Diagnostic(
            "E0631",
            f"{what} {why}, and under `{exchange.word}` each rank has a gradient of its own",
            where,
            notes=(Note("it is asked for here", span),),
            help=help,
        )


def _needs_agreement(job: JobSpec, exchange: ExchangePolicy) -> Iterator[tuple[str, Span | None, str, str]]:
    train = job.train
    if train.clip is not None:
        yield (
            "clipping",
            train.value_span("clip"),
            "limits the gradient of the whole batch",
            remedy(remove_field("train.clip")),
        )
    waits_never = exchange.every == 0  # else the ranks agree on a flag in each step
    if train.on_nonfinite == "skip" and waits_never:
        told = "is decided by the gradient of the whole batch"
        yield (
            "`on_nonfinite = skip`",
            train.value_span("on_nonfinite"),
            told,
            remedy(set_field("train.on_nonfinite", "stop")),
        )
    if train.on_spike is not None:
        yield (
            "`on_spike`",
            train.value_span("on_spike"),
            "is decided in each step by the loss of the whole batch",
            remedy(remove_field("train.on_spike")),
        )
    if train.check_replicas is not None:
        yield (
            "`check_replicas`",
            train.value_span("check_replicas"),
            "compares weights that all ranks update alike",
            remedy(remove_field("train.check_replicas")),
        )
    if isinstance(train.precision, c.Fp16) and waits_never:
        help = remedy(set_field("train.precision", "bf16", "`bf16`"))
        yield "the scale of `fp16`", train.value_span("precision"), "follows the gradient of the whole batch", help
    if train.average is not None:
        yield (
            "`ema`",
            train.value_span("ema"),
            "averages the weights that one step leaves",
            remedy(remove_field("train.ema")),
        )
    if waits_never and getattr(job.model.loss, "over", None):
        told = "is over samples of all ranks"
        help = remedy(set_field("parallelism.gradients", "local_sgd()", "`local_sgd()`"), " averages in step")
        yield "a loss that compares samples", job.model.value_span("loss"), told, help
    if "optimizer" in job.memory.offload:
        help = remedy(remove_field("memory.offload", "leave it out"))
        yield "an optimizer in the host's memory", job.memory.value_span("offload"), "is given whole gradients", help
