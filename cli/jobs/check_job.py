"""Shared by the commands and the Python API: from a path to an analysis, and the display of mistakes."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import replace

from dslc.compiler.cost.reuse import READING, Reuse
from dslc.compiler.ir.number_text import byte_text, count_text
from dslc.compiler.rules.analyse import analyse
from dslc.compiler.rules.analysis import Analysis
from dslc.compiler.rules.elastic import analyse_counts
from dslc.dsl.bounds import LOOKS, MISTAKES
from dslc.dsl.diagnostics import Diagnostic, Findings, Note, Report, TooManyErrors, judge, passes
from dslc.dsl.language.job import JobSpec
from dslc.dsl.language.registry import Range
from dslc.dsl.meaning.auto_fields import auto_fields, without_auto
from dslc.dsl.meaning.load import LoadResult, load_each
from dslc.dsl.show import render
from dslc.dsl.words import either, plural
from dslc.probe.collect_facts import collect_facts


def show(diagnostics: Iterable[Diagnostic]) -> None:
    """Prints diagnostics to standard error, coloured on a terminal."""
    found = presented(diagnostics)
    if found:
        color = sys.stderr.isatty() and "NO_COLOR" not in os.environ
        print(render(found, color=color), file=sys.stderr)


def presented(diagnostics: Iterable[Diagnostic]) -> list[Diagnostic]:
    """Returns the diagnostics to show a person: features that this version cannot run yet become one warning with a
    note for each field, and none while there are errors to correct. For `run` each of them is an error, and those stay.
    """
    found = list(diagnostics)
    later = [each for each in found if each.code == "W0801"]
    kept = [each for each in found if each not in later]
    if not later or any(each.severity == "error" for each in kept):
        return kept
    notes = tuple(Note(message=each.subject, span=each.span) for each in later[1:])
    label = "and what the notes name" if notes else ""
    return [*kept, replace(later[0], notes=notes, label=label)]


def check_one(
    path: str,
    settings: list[str],
    *,
    trace: bool = False,
    then: Callable[[Analysis, Report], None] | None = None,
    text: str | None = None,
    imported: Mapping[str, str] | None = None,
) -> tuple[Report, Analysis | None]:
    """Returns all diagnostics of one job, every combination of its sweep included; `then` looks further at each. A
    `text` replaces the text of the file, and `imported` the texts of imported files, by their real paths.
    """
    loaded, combinations = load_each(path, settings, text, imported)
    report, analysis, reuse = Report(), None, Reuse()
    report.extend(loaded.report.found)
    for n, chosen in enumerate(combinations):
        if reuse.enough and chosen.job is not None:
            report.extend([_partial_check(f"{n} of {len(combinations)} combinations of the sweep were", chosen.job)])
            break
        analysis = inspect(chosen, report, reuse, trace=trace)
        if analysis is not None and then is not None:
            then(analysis, report)
        if is_over_limit(report):
            break
    return report, analysis


def inspect(
    loaded: LoadResult, report: Report, reuse: Reuse | None = None, *, trace: bool = False, run: bool = False
) -> Analysis | None:
    """Adds the findings of `load` and the rules to the report, and returns the analysis if the job allows one. Of an
    elastic job, it returns the analysis on the largest count of nodes on which the job trains. `reuse` is passed from
    one combination of a sweep to the next.
    """
    found = inspect_counts(loaded, report, reuse, trace=trace, run=run)
    return found[max(found)] if found else None


def inspect_counts(
    loaded: LoadResult, report: Report, reuse: Reuse | None = None, *, trace: bool = False, run: bool = False
) -> dict[int, Analysis]:
    """Returns the same for each count of nodes: of an elastic job for all on which it trains."""
    try:
        return report.collect(_inspect(loaded, reuse or Reuse(), trace=trace, run=run))
    except TooManyErrors:
        return {}


def inspect_for_run(
    loaded: LoadResult, report: Report, *, trace: bool = False, run: bool = False
) -> Mapping[int, Analysis]:
    """Returns the same for a job that is to be trained: warnings that block a run are errors."""
    found = Report()
    counts = inspect_counts(loaded, found, trace=trace, run=run)
    report.extend(diagnostic.for_run() for diagnostic in found)
    return counts


def is_over_limit(report: Report) -> bool:
    """True if a bound was exceeded after which no further combination of a sweep is analysed."""
    return any(d.code in (MISTAKES.code, LOOKS.code) for d in report.errors)


def _inspect(loaded: LoadResult, reuse: Reuse, *, trace: bool, run: bool) -> Findings[dict[int, Analysis]]:
    readable = yield from passes(loaded.report.found)
    job = loaded.job
    if job is None:
        return {}
    reuse.spent += READING
    nodes = job.devices.nodes
    counts = nodes.last - nodes.first + 1 if isinstance(nodes, Range) else 1
    if not (yield from passes(_check_looks(job, loaded.looks * counts))):
        return {}
    calls = (trace or run) and readable
    facts, fine = yield from judge(collect_facts(without_auto(job), trace=calls, run=run))
    sound, choice = readable and fine, None
    if auto_fields(job) and sound:
        from dslc.jobs.choose_plan import choose_fields  # here: few jobs leave fields open

        (job, facts, choice), fine = yield from judge(choose_fields(job, facts, reuse, trace=calls, run=run))
        if not fine:
            return {}
    job = without_auto(job)
    if not isinstance(nodes, Range):
        analysis = yield from analyse(job, facts, loaded.broken, sound=sound, reuse=reuse)
        return {} if analysis is None else {analysis.layout.nodes: replace(analysis, choice=choice)}
    analyses, analysed = yield from analyse_counts(job, facts, loaded.broken, reuse, all_of_them=run)
    if analysed < counts:
        yield _partial_check(f"{analysed} of {counts} counts of nodes were", job)
    return analyses


def _check_looks(job: JobSpec, looks: int) -> Iterator[Diagnostic]:
    """Finds an elastic job that takes too long to analyse for each count of nodes, in each combination of the sweep."""
    if looks > LOOKS.most:
        yield Diagnostic(
            LOOKS.code,
            f"an elastic job is checked for each count of its nodes, in each combination of its sweep: {looks:,} times",
            job.devices.value_span("nodes"),
            help=f"{LOOKS.most} are the most: a shorter range",
        )


def _partial_check(checked: str, job: JobSpec) -> Diagnostic:
    """Returns a warning on how much of a sweep or a range of nodes was analysed, as all of it would take too long."""
    return Diagnostic(
        "W0614",
        f"{checked} checked: all of them would take long for a job of this size",
        job.model.value_span("network"),
        help="`--set` chooses one to check",
    )


def summary_text(analysis: Analysis) -> str:
    """Returns ranks, parameters, peak memory and steps of a job, as far as they are known."""
    counts, world = analysis.layout.node_counts, analysis.layout.world_size
    parts = [plural(world, "rank")]
    if len(counts) > 1:
        nodes_text = f"trains on {either(counts)} nodes"
        parts = [nodes_text, f"on {counts[-1]}: {parts[0]}"]
    if analysis.model:
        count = analysis.model.parameters
        parts.append(f"{count_text(count)} parameter{'s' * (count != 1)}")
    if analysis.costs:
        parts.append(f"peak {byte_text(max(cost.memory.peak for cost in analysis.costs))} a rank")
    if analysis.workload.steps is not None:
        parts.append(plural(analysis.workload.steps, "step"))
    return ", ".join(parts)
