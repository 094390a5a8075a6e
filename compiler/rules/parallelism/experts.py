"""The demands of the expert axis on the data axis, the network and the other axes: E0450 to E0454."""

from __future__ import annotations

from collections.abc import Iterator
from math import ceil, gcd

from dslc.compiler.ir.nodes import ModelGraph, ParameterNode
from dslc.compiler.model.expert_layers import largest_skew
from dslc.compiler.placement.layout import Layout
from dslc.compiler.placement.losses import mixtures
from dslc.dsl.diagnostics import Diagnostic, Note, division
from dslc.dsl.language.exchanges import Allreduce
from dslc.dsl.language.job import JobSpec
from dslc.dsl.language.layers import TransformersNetwork
from dslc.dsl.remedy import Help, remedy, remove_field, set_field
from dslc.dsl.source import Span


def fits_data_axis(job: JobSpec, layout: Layout, model: ModelGraph | None) -> bool:
    """True if the data axis divides into the copies that the job keeps, and into groups that share the experts."""
    data, experts = layout.sizes["data"], job.parallelism.expert
    copies = 1 if job.parallelism.zero == 0 else job.parallelism.replicas
    divides = data % job.parallelism.replicas == 0 and data % (experts * copies) == 0
    return divides and all(each.experts % experts == 0 for each in _experts(model))


def skew_of(job: JobSpec) -> float | None:
    """Returns the stated skew of the routing; None without one, or without an expert axis."""
    return job.parallelism.expert_skew if job.parallelism.expert > 1 else None


def check_experts(job: JobSpec, layout: Layout, model: ModelGraph | None) -> Iterator[Diagnostic]:
    """Checks an expert axis of several ranks."""
    span = job.parallelism.value_span("expert")
    yield from _check_data(job, layout, span)
    yield from _check_network(job, model, span)
    yield from _check_skew(job, model)
    for reason, place, help in _excluded(job, layout):
        note = Note("it is asked for here", place)
        yield Diagnostic("E0453", f"an expert axis does not work with {reason}", span, notes=(note,), help=help)


def _check_data(job: JobSpec, layout: Layout, span: Span | None) -> Iterator[Diagnostic]:
    parallelism, data = job.parallelism, layout.sizes["data"]
    copies = 1 if parallelism.zero == 0 else parallelism.replicas
    ranks = data // copies if data % copies == 0 else data
    if ranks % parallelism.expert:
        where = f"each of {copies} replicas has {ranks} ranks" if ranks != data else f"a data axis of {data}"
        yield Diagnostic(
            "E0450",
            f"{parallelism.expert} ranks cannot share the experts: {where}, and the expert axis lies inside it",
            span,
            label=division(ranks, parallelism.expert),
            help=remedy(
                set_field("parallelism.expert", gcd(ranks, parallelism.expert)), ", or another divisor of ", str(ranks)
            ),
        )


def _check_network(job: JobSpec, model: ModelGraph | None, span: Span | None) -> Iterator[Diagnostic]:
    out = remove_field("parallelism.expert", "leave it out")
    if job.model.has_user_network and not isinstance(job.model.network, TransformersNetwork):
        yield Diagnostic(
            "E0451",
            "only experts of `moe` layers and of `transformers` are shared, and a function makes this network",
            span,
            notes=(Note("the network", job.model.value_span("network")),),
            help=remedy(out, ", or `llama(…, experts = moe(…))`"),
        )
        return
    experts = _experts(model)
    if model is not None and not experts:
        yield Diagnostic(
            "E0451",
            "no layer of the network has experts to share",
            span,
            notes=(Note("the network", job.model.value_span("network")),),
            help=remedy(out, ", or `moe` layers in the network"),
        )
    for parameter in experts:
        if model is not None and parameter.experts % job.parallelism.expert:
            layer = model.layer_of(parameter.name)
            common = gcd(parameter.experts, job.parallelism.expert)
            yield Diagnostic(
                "E0452",
                f"{parameter.experts} experts cannot be shared by {job.parallelism.expert} ranks",
                span,
                label=division(parameter.experts, job.parallelism.expert),
                notes=(Note("the experts", layer.span if layer else None),),
                help=remedy(set_field("parallelism.expert", common), ", which divides the experts"),
            )
            return


def _check_skew(job: JobSpec, model: ModelGraph | None) -> Iterator[Diagnostic]:
    """Reports a skew that no routing has: a rank gets no row twice, and of a token one for each of its experts."""
    ranks, skew = job.parallelism.expert, skew_of(job)
    if skew is None or model is None:
        return
    exact = max((largest_skew(ranks, each) for each in mixtures(job)), default=float(ranks))
    most = ceil(1000 * exact) / 1000
    if skew > most:
        why = f"{ranks} ranks share the experts" if exact == ranks else "a token goes to each of its experts once"
        yield Diagnostic(
            "E0454",
            f"no routing gives a rank {skew:g} times its even share of rows: {why}",
            job.parallelism.value_span("expert_skew"),
            label=f"{skew:g} > {most:g}",
            help=remedy(set_field("parallelism.expert_skew", f"{most:g}"), ", which holds for any routing"),
        )


def _experts(model: ModelGraph | None) -> list[ParameterNode]:
    """Returns the parameters that stack experts."""
    return [q for layer in model.layers for q in layer.parameters if q.experts] if model is not None else []


def _excluded(job: JobSpec, layout: Layout) -> Iterator[tuple[str, Span | None, Help]]:
    """Yields what excludes an expert axis with the reason, its place, and what to do."""
    parallelism = job.parallelism
    if not isinstance(parallelism.gradients, Allreduce):
        exact = set_field("parallelism.gradients", "allreduce()", "`allreduce()`")
        reason = f"`{parallelism.gradients.word}`: other ranks sum the gradients of experts"
        yield reason, parallelism.value_span("gradients"), remedy(exact)
    if layout.device == "cuda" and "parameters" in job.memory.offload:
        reason = "parameters in the host's memory"
        yield reason, job.memory.value_span("offload"), remedy(remove_field("memory.offload"))
