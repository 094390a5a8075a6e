"""Rules for experts: their balance, their capacity, the blocks that they leave dense, and routers that learn
nothing. E0231 to E0236, W0237, W0238.
"""

from __future__ import annotations

from collections.abc import Iterator

from dslc.compiler.placement.layout import Layout
from dslc.compiler.placement.losses import calls_in, mixtures
from dslc.compiler.placement.schedules import demands, table
from dslc.compiler.placement.workload import Workload
from dslc.dsl.diagnostics import Diagnostic, Note
from dslc.dsl.language.job import JobSpec
from dslc.dsl.language.layers import BalanceBias, BalanceLoss, Llama, LlamaBlock
from dslc.dsl.remedy import Help, remedy, remove_argument, remove_field, set_argument, set_field
from dslc.dsl.source import Span


def check_balance(job: JobSpec) -> Iterator[Diagnostic]:
    """Reports a balance of experts whose ranks train weights of their own between exchanges."""
    exchange = job.parallelism.gradients
    balanced = next((mixture for mixture in mixtures(job) if mixture.balance is not None), None)
    if balanced is not None and exchange.agrees != "gradients":
        what = "biases" if isinstance(balanced.balance, BalanceBias) else "balance loss"
        yield Diagnostic(
            "E0233",
            f"the {what} of experts {'count' if what == 'biases' else 'counts'} the tokens of the global batch, and "
            f"with `{exchange.word}` the ranks train by themselves",
            job.parallelism.value_span("gradients"),
            notes=(Note(f"the {what}", balanced.value_span("balance")),),
            help=remedy(remove_field("parallelism.gradients", "sum the gradients exactly")),
        )


def check_balance_loss(job: JobSpec, layout: Layout | None, workload: Workload | None) -> Iterator[Diagnostic]:
    """Reports a balance loss whose counts are not all known before the first backward pass of a step."""
    mixture = next((mixture for mixture in mixtures(job) if isinstance(mixture.balance, BalanceLoss)), None)
    if mixture is None:
        return
    for reason, place, help in _excluded_from_balance_loss(job, layout, workload):
        yield Diagnostic(
            "E0232",
            f"a balance loss counts the tokens of the global batch before the first backward pass, and {reason}",
            mixture.value_span("balance"),
            notes=(Note("it is asked for here", place),),
            help=remedy(help, ", or ", set_argument(mixture.span, "balance", "bias(0.001)")),
        )


def _excluded_from_balance_loss(
    job: JobSpec, layout: Layout | None, workload: Workload | None
) -> Iterator[tuple[str, Span | None, Help]]:
    """Yields what excludes a balance loss with the reason, its place, and what to do."""
    parallelism = job.parallelism
    if layout is not None and layout.sizes["pipeline"] > 1:
        name, ranks = parallelism.schedule, layout.sizes["pipeline"]
        is_valid = not demands(name, ranks, layout.microbatches, layout.virtual_stages)
        if is_valid and not table(name, ranks, layout.microbatches, layout.virtual_stages).has_forwards_first:
            reason = f"the schedule `{name}` begins backward passes before the last forward pass"
            place = parallelism.value_span("schedule") or parallelism.value_span("pipeline")
            yield reason, place, remedy(set_field("parallelism.schedule", "gpipe"))
    if job.train.step is not None:
        yield "a step of your own runs them", job.train.value_span("step"), remedy(remove_field("train.step"))
    elif workload is not None and workload.counts == "own":
        reason = "a loss that counts by itself changes the scale of the gradients later"
        yield reason, job.model.value_span("loss"), remedy("a loss for each sample")


def check_capacity(job: JobSpec, layout: Layout | None) -> Iterator[Diagnostic]:
    """Warns of experts that drop tokens, and reports what leaves the order of the global batch unknown in a pass."""
    mixture = next((mixture for mixture in mixtures(job) if mixture.capacity is not None), None)
    if mixture is None:
        return
    span = mixture.value_span("capacity")
    yield Diagnostic(
        "W0238",
        "tokens are dropped in training: experts take no more than their `capacity`, and the rest of a token's experts "
        "count alone",
        span,
        help=remedy(remove_argument(mixture.span, "capacity"), ", which drops none"),
    )
    for reason, place, help in _excluded_from_capacity(job, layout):
        yield Diagnostic(
            "E0231",
            f"a `capacity` counts the tokens of the global batch in each layer, and {reason}",
            span,
            notes=(Note("it is asked for here", place),),
            help=remedy(help, ", or ", remove_argument(mixture.span, "capacity")),
        )


def _excluded_from_capacity(job: JobSpec, layout: Layout | None) -> Iterator[tuple[str, Span | None, Help]]:
    """Yields what excludes a capacity with the reason, its place, and what to do."""
    parallelism, train = job.parallelism, job.train
    if layout is not None and layout.microbatches > 1:
        field = "pipeline" if layout.sizes["pipeline"] > 1 else "microbatches"
        reason = "with several micro-batches a layer sees only some of them at a time"
        yield reason, parallelism.value_span(field), remedy(remove_field(f"parallelism.{field}"))
    if layout is not None and layout.sizes["context"] > 1:
        reason = "a rank of a context axis has pieces of sequences, which do not follow each other"
        yield reason, parallelism.value_span("context"), remedy(remove_field("parallelism.context"))
    if parallelism.gradients.agrees != "gradients":
        reason = f"with `{parallelism.gradients.word}` the ranks train by themselves"
        yield reason, parallelism.value_span("gradients"), remedy(remove_field("parallelism.gradients"))
    if train.step is not None:
        yield "a step of your own runs the passes", train.value_span("step"), remedy(remove_field("train.step"))


def check_blocks_of_experts(job: JobSpec) -> Iterator[Diagnostic]:
    """Reports an activation that experts do not have, and experts that no block has."""
    for block in calls_in(job.model.network):
        if not isinstance(block, Llama | LlamaBlock) or block.experts is None:
            continue
        if block.activation != "silu":
            yield Diagnostic(
                "E0235",
                f"experts compute with `silu`, and the activation of `{block.word}` is `{block.activation}`",
                block.value_span("activation"),
                notes=(Note("the experts", block.value_span("experts")),),
                help=remedy(remove_argument(block.span, "activation")),
            )
        if isinstance(block, Llama) and block.dense_layers >= block.layers:
            yield Diagnostic(
                "E0236",
                f"no block has experts: the first {block.dense_layers} are dense, of {block.layers}",
                block.value_span("dense_layers"),
                label=f"{block.dense_layers} ≥ {block.layers}",
                notes=(Note("the blocks", block.value_span("layers")),),
                help=remedy(
                    set_argument(block.span, "dense_layers", block.layers - 1),
                    ", or ",
                    remove_argument(block.span, "experts"),
                ),
            )


def check_routers(job: JobSpec) -> Iterator[Diagnostic]:
    """Warns of a router without a gradient: the weight of a token's one expert, divided by itself, is always 1."""
    for mixture in mixtures(job):
        learns = not mixture.normalize or mixture.top_k > 1 or isinstance(mixture.balance, BalanceLoss)
        if not learns and mixture.experts > 1:
            yield Diagnostic(
                "W0237",
                "the router learns nothing: a token has one expert, whose weight, divided by the sum, is always 1",
                mixture.value_span("top_k"),
                help=remedy(set_argument(mixture.span, "normalize", "false"), ", or `top_k = 2`"),
            )
