"""Rules for the balance of experts: it follows the tokens of the global batch; and for the compiler. E0233, E0234."""

from __future__ import annotations

from collections.abc import Iterator

from dslc.dsl.diagnostics import Diagnostic, Note
from dslc.dsl.language.job import JobSpec
from dslc.dsl.language.layers import BalanceBias, MixtureOfExperts
from dslc.dsl.language.registry import Call
from dslc.dsl.remedy import remedy, remove_field, set_field


def mixtures(job: JobSpec) -> Iterator[MixtureOfExperts]:
    """Yields the mixtures of experts in the job's network."""
    yield from _mixtures_in(job.model.network)


def _mixtures_in(value: object) -> Iterator[MixtureOfExperts]:
    if isinstance(value, MixtureOfExperts):
        yield value
    elif isinstance(value, Call):
        for name in value.record_names:
            yield from _mixtures_in(getattr(value, name))
    elif isinstance(value, tuple):
        for item in value:
            yield from _mixtures_in(item)


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
