"""The counts of nodes of an elastic job: each is analysed as a job of its own, and counts that cannot train are
skipped.

Only the data axis grows with the nodes: the other axes are what the job says. The global batch, the learning rate and
the order of the samples are the same at every count.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from contextlib import suppress
from dataclasses import replace

from dslc.compiler.cost.reuse import Reuse
from dslc.compiler.ir.facts import Facts
from dslc.compiler.rules.analyse import analyse
from dslc.compiler.rules.analysis import Analysis
from dslc.dsl.diagnostics import Diagnostic, Findings, Note, Report, TooManyErrors, passes
from dslc.dsl.language import calls as c
from dslc.dsl.language.job import JobSpec
from dslc.dsl.language.registry import Range
from dslc.dsl.remedy import remedy, remove_field
from dslc.dsl.words import either, plural

_SHOWN = 8  # counts of which it is said why they are skipped, at most
_AXES = "E0401"  # devices that the axes do not fit


def analyse_counts(
    job: JobSpec, facts: Facts, broken: Collection[str], reuse: Reuse, *, all_of_them: bool
) -> Findings[tuple[dict[int, Analysis], int]]:
    """Returns the analysis of each count of nodes on which an elastic job can train, and how many counts were analysed.
    All are analysed, or as many as the time allows, beginning with the largest.

    Yields the findings for the largest of these, and the counts that are skipped. If no count can train, it yields
    the faults that every count has, or else the reason at each count.
    """
    nodes = job.devices.nodes
    assert isinstance(nodes, Range)
    yield from _check(job)
    found: dict[int, Analysis] = {}
    told: dict[int, Report] = {}
    for count in range(nodes.last, nodes.first - 1, -1):
        if told and reuse.enough and not all_of_them:
            break
        told[count] = Report()
        analysis: Analysis | None = None
        with suppress(TooManyErrors):  # the report of this count alone is full, and it has errors to yield
            analysis = told[count].collect(analyse(_of_count(job, count), facts, broken, reuse=reuse))
        if analysis is not None and not told[count].errors:
            found[count] = analysis
    known = tuple(sorted(found))
    found = {count: replace(each, layout=replace(each.layout, node_counts=known)) for count, each in found.items()}
    if found:
        yield from told[known[-1]].found
        yield from _tell_of_skipped(job, {count: each for count, each in told.items() if count not in found}, known)
    else:
        yield from _tell_why_none(job, told)
    return {count: found[count] for count in known}, len(told)


def _of_count(job: JobSpec, count: int) -> JobSpec:
    """Returns the job of one count of nodes; where it names hosts, of the first of them."""
    call = job.launch.with_
    launch = (
        replace(job.launch, with_=replace(call, hosts=call.hosts[:count])) if isinstance(call, c.SSH) else job.launch
    )
    return replace(job, devices=replace(job.devices, nodes=count), launch=launch)


def _check(job: JobSpec) -> Iterator[Diagnostic]:
    """Checks what an elastic job needs, whatever the count: an axis that grows, and checkpoints to go on from."""
    parallelism, devices = job.parallelism, job.devices
    if parallelism.data is not None:
        yield Diagnostic(
            "E0814",
            f"`data = {parallelism.data}` fixes the number of ranks, and `devices.nodes` is a range",
            parallelism.value_span("data"),
            notes=(Note("the range is here", devices.value_span("nodes")),),
            help=remedy(remove_field("parallelism.data"), ": it grows with the nodes; or name one count of nodes"),
        )
    call = job.launch.with_
    if isinstance(call, c.Kubernetes) and not call.volumes:
        yield Diagnostic(
            "E0827",
            "pods that come and go need a run directory that all of them see, and they have no volume",
            job.launch.value_span("with_"),
            notes=(Note("the range is here", devices.value_span("nodes")),),
            help='`volumes = ["claim:/runs"]` mounts a persistent volume claim; or one count of nodes',
        )
    if not job.checkpoint.is_enabled:
        yield Diagnostic(
            "E0816",
            "when hosts come or go the training goes on from a checkpoint, and it writes none",
            devices.value_span("nodes"),
            help="`checkpoint { every = … }`, or one count of nodes",
        )


def _tell_of_skipped(job: JobSpec, skipped: Mapping[int, Report], known: tuple[int, ...]) -> Iterator[Diagnostic]:
    if not skipped or job.parallelism.data is not None:
        return
    on = either(known)
    more = "; while there are more hosts than it trains on, the rest wait" if max(skipped) > known[0] else ""
    yield Diagnostic(
        "W0808",
        f"the job does not train on {_listed(sorted(skipped))} {'nodes' if max(skipped) > 1 else 'node'}",
        job.devices.value_span("nodes"),
        notes=_reasons(skipped),
        help=f"it trains on {on}{more}",
    )


def _tell_why_none(job: JobSpec, told: Mapping[int, Report]) -> Iterator[Diagnostic]:
    """Reports the mistakes that every count has; if there are none, why each count is skipped."""
    of_all = [each.errors for each in told.values()]
    if not any(of_all):
        yield from told[max(told)].found  # only the machine that runs the job can tell
        return
    enough_hosts = yield from passes(_too_few_hosts(job))
    said = [{each.text_key() for each in errors} for errors in of_all]
    common: list[Diagnostic] = [each for each in of_all[0] if all(each.text_key() in others for others in said)]
    if common:
        yield from common
        return
    if not enough_hosts or (
        job.parallelism.data is not None and all(each.code == _AXES for errors in of_all for each in errors)
    ):
        return  # it is said that hosts are missing, or that the axis is fixed
    first, last = min(told), max(told)
    yield Diagnostic(
        "E0813",
        f"the job trains on none of {first} to {last} nodes" if first < last else "the job does not train on any count",
        job.devices.value_span("nodes"),
        notes=_reasons(told),
        help="another batch, or other axes; `--set devices.nodes=…` shows more about one count",
    )


def _too_few_hosts(job: JobSpec) -> Iterator[Diagnostic]:
    """Reports fewer hosts than the range of nodes begins with."""
    call, nodes = job.launch.with_, job.devices.nodes
    if not isinstance(call, c.SSH) or not isinstance(nodes, Range) or len(call.hosts) >= nodes.first:
        return
    yield Diagnostic(
        "E0823",
        f"`ssh` reaches {plural(len(call.hosts), 'host')}, and the job takes {nodes.first} at least",
        call.value_span("hosts"),
        notes=(Note("the range is here", job.devices.value_span("nodes")),),
        help=f"name {nodes.first} hosts or more, or begin the range with {max(1, len(call.hosts))}",
    )


def _reasons(told: Mapping[int, Report]) -> tuple[Note, ...]:
    notes = tuple(
        Note(f"on {plural(count, 'node')}: {errors[0].message}" if errors else f"on {plural(count, 'node')}")
        for count, errors in sorted((count, each.errors) for count, each in told.items())
    )
    more = len(notes) - _SHOWN
    return notes if more <= 0 else (*notes[:_SHOWN], Note(f"and {plural(more, 'other count')}"))


def _listed(counts: list[int]) -> str:
    """Returns `3`, `3 or 5`, `3, 5 or 6`; of many the first."""
    if len(counts) > _SHOWN:
        return f"{', '.join(map(str, counts[:_SHOWN]))} and {len(counts) - _SHOWN} more counts of"
    return either(counts)
