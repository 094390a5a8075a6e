"""Rules for experts: their balance, the compiler beside them, the blocks that they leave dense, and routers that learn
nothing. E0233 to E0236, W0237.
"""

from __future__ import annotations

from collections.abc import Iterator

from dslc.dsl.diagnostics import Diagnostic, Note
from dslc.dsl.language.job import JobSpec
from dslc.dsl.language.layers import BalanceBias, BalanceLoss, Llama, LlamaBlock, MixtureOfExperts
from dslc.dsl.language.registry import Call
from dslc.dsl.remedy import remedy, remove_argument, remove_field, set_argument, set_field


def mixtures(job: JobSpec) -> Iterator[MixtureOfExperts]:
    """Yields the mixtures of experts in the job's network."""
    yield from (call for call in _calls_in(job.model.network) if isinstance(call, MixtureOfExperts))


def _calls_in(value: object) -> Iterator[Call]:
    """Yields a call and those within it."""
    if isinstance(value, Call):
        yield value
        for name in value.record_names:
            yield from _calls_in(getattr(value, name))
    elif isinstance(value, tuple):
        for item in value:
            yield from _calls_in(item)


def check_balance(job: JobSpec) -> Iterator[Diagnostic]:
    """Reports a bias whose ranks train weights of their own between exchanges."""
    exchange = job.parallelism.gradients
    biased = next((mixture for mixture in mixtures(job) if isinstance(mixture.balance, BalanceBias)), None)
    if biased is not None and exchange.agrees != "gradients":
        yield Diagnostic(
            "E0233",
            f"the biases of experts count the tokens of the global batch, and with `{exchange.word}` the ranks train "
            "by themselves",
            job.parallelism.value_span("gradients"),
            notes=(Note("the biases", biased.value_span("balance")),),
            help=remedy(remove_field("parallelism.gradients", "sum the gradients exactly")),
        )


def check_compiled_experts(job: JobSpec) -> Iterator[Diagnostic]:
    """Reports `compile` beside experts: torch's compiler takes grouped products in bfloat16 alone."""
    mixture = next(mixtures(job), None)
    if mixture is not None and job.train.compile:
        yield Diagnostic(
            "E0234",
            "torch's compiler does not trace the grouped products of experts",
            job.train.value_span("compile"),
            notes=(Note("the experts", mixture.span),),
            help=remedy(set_field("train.compile", "false")),
        )


def check_blocks_of_experts(job: JobSpec) -> Iterator[Diagnostic]:
    """Reports an activation that experts do not have, and experts that no block has."""
    for block in _calls_in(job.model.network):
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
