"""Refuses a training whose fullest micro-batch does not fit, before its first step: E0504, E0505, W0506, W0508, N0507.

Model: a child finds the fullest micro-batch among all that the sampler deals out (runtime/data/fullest_batch.py). It
may have more numbers for each sample than the batches that the plan was made with. Then source and network are traced
with its longest sample, and the memory account is made of these shapes. The plan stays as it is.

Limits: only batches of a `collate` of the user's have shapes that differ by sample. Streams and mixtures are not looked
through, nor steps of the user's own. On CPUs without a declared limit the ranks of a node share the machine's memory.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from typing import TYPE_CHECKING

from dslc.compiler.cost.reuse import Reuse
from dslc.compiler.graph.constants import data_step
from dslc.compiler.ir.number_text import byte_text
from dslc.compiler.model.job_steps import locate_paths
from dslc.compiler.rules.analyse import analyse, check_limits
from dslc.compiler.rules.analysis import Analysis
from dslc.dsl.diagnostics import Diagnostic, Report, TooManyErrors
from dslc.dsl.language.calls import Mixture, PythonCollate
from dslc.dsl.remedy import join_remedies
from dslc.dsl.words import plural
from dslc.probe.child import ChildAnswer, import_torch_for_children, in_child
from dslc.probe.sample_outputs import open_samples
from dslc.probe.trace_facts import trace_longest

if TYPE_CHECKING:
    from dslc.runtime.data.fullest_batch import FullestBatch

OVER_MEMORY = "E0501"
_CUT = "cut long samples in the data set, or leave them out"


@dataclass(frozen=True)
class PricedBatch:
    """The fullest micro-batch, and the analysis of the job with its shapes; None if the plan's own account covers it.
    `fault` is the diagnostic of a batch that does not fit, or that the network cannot take.
    """

    fullest: FullestBatch
    analysis: Analysis | None
    fault: Diagnostic | None = None


def has_uneven_batches(analysis: Analysis) -> bool:
    """Returns True if the shapes of batches differ by sample, and the account follows them."""
    job, source = analysis.job, analysis.source
    known = analysis.workload.train is not None and analysis.workload.steps is not None and bool(analysis.costs)
    collated = isinstance(job.data.collate, PythonCollate) and source.structures is not None
    return known and collated and source.shards is None and not isinstance(job.data.source, Mixture)


def check_worst_batches(
    counts: Mapping[int, Analysis], report: Report, answers: dict[str, ChildAnswer] | None = None
) -> None:
    """Reports the fullest micro-batch of a training if it does not fit, for the fewest and the most nodes of an elastic
    job. `answers` is passed from one combination of a sweep to the next, which mostly has the same batches.
    """
    for analysis in [counts[nodes] for nodes in sorted({min(counts), max(counts)})] if counts else []:
        if not report.errors and has_uneven_batches(analysis):
            report.extend(_check(analysis, {} if answers is None else answers))


def _check(analysis: Analysis, answers: dict[str, ChildAnswer]) -> list[Diagnostic]:
    span, layout, steps = analysis.job.data.value_span("collate"), analysis.layout, analysis.workload.steps
    key = repr((data_step(analysis), layout.sizes["data"], layout.microbatches, steps))
    if key not in answers:
        import_torch_for_children()
        answers[key] = in_child(lambda: asdict(find_fullest_batch(analysis)))
    answer = answers[key]
    if "made" not in answer:
        where = f" ({answer['where']})" if answer["where"] else ""
        message = f"the longest sample is not known before the training: {answer['error']}{where}"
        return [Diagnostic("W0506", message, span, help=_SAMPLES_HELP)]
    from dslc.runtime.data.fullest_batch import ORDERING, READING, FullestBatch

    fullest = FullestBatch(**answer["made"])
    samples = analysis.workload.train or 0
    diagnostics = []
    if fullest.read < samples:
        read = plural(fullest.read, "sample")
        message = f"the longest of {read} was found in {READING:g} s, of {samples:,} in the training data"
        diagnostics.append(Diagnostic("N0507", f"{message}: a longer one may come", span, help=_LENGTHS_HELP))
    if steps is not None and fullest.steps < steps:
        message = f"the batches of {fullest.steps:,} of {steps:,} steps were followed in {ORDERING:g} s"
        diagnostics.append(Diagnostic("N0507", f"{message}: a fuller one may come", span))
    limit = _limit(analysis)
    fits = limit is None or peak_bytes(analysis) * max(1.0, _ratio(analysis, fullest)) ** 2 <= limit
    priced = price_batch(analysis, fullest, None if fits else limit)
    return [*diagnostics, *([priced.fault] if priced.fault is not None else [])]


_LENGTHS_HELP = "`by_length` with a file of lengths makes them known at once"
_SAMPLES_HELP = "`dslc data JOB --samples N` reads N samples and names the first that cannot be read"


def find_fullest_batch(analysis: Analysis) -> FullestBatch:
    """Returns the fullest micro-batch. The user's code runs here."""
    from dslc.runtime.data.fullest_batch import find_fullest

    step = locate_paths(data_step(analysis), analysis.job.folder)
    layout = analysis.layout
    steps = analysis.workload.steps or 1
    return find_fullest(step, open_samples(analysis), layout.sizes["data"], layout.microbatches, steps)


def _limit(analysis: Analysis) -> int | None:
    """Returns the bytes that a rank may hold; None if nothing is known."""
    layout, machine = analysis.layout, analysis.facts.machine
    declared = analysis.job.memory.limit or layout.hardware.memory
    if declared is not None or machine is None or layout.device != "cpu":
        return declared
    return machine.memory // max(1, layout.processes)


def peak_bytes(analysis: Analysis) -> int:
    return max(cost.memory.peak for cost in analysis.costs)


def traced_numbers(analysis: Analysis) -> int:
    """Returns the numbers in the input of one sample of the batches that the plan was made with."""
    assert analysis.source.structures is not None
    return analysis.source.structures[0].numbers


def _ratio(analysis: Analysis, fullest: FullestBatch) -> float:
    return fullest.numbers / max(1, traced_numbers(analysis))


def price_batch(analysis: Analysis, fullest: FullestBatch, limit: int | None = None) -> PricedBatch:
    """Returns the account of a job with the shapes of its fullest micro-batch, and what forbids it under the limit."""
    if _ratio(analysis, fullest) <= 1:
        return PricedBatch(fullest, None)
    traced = Report()
    facts = traced.collect(trace_longest(analysis.job, analysis.facts, fullest.source_number))
    if facts is None:
        return PricedBatch(fullest, None, _unusable(analysis, fullest, traced.errors[0].message))
    job = analysis.job if limit is None else replace(analysis.job, memory=replace(analysis.job.memory, limit=limit))
    found, reuse = Report(), Reuse()
    try:
        priced = found.collect(analyse(job, facts, limits=False, reuse=reuse))
    except TooManyErrors:
        priced = None
    if found.errors:
        return PricedBatch(fullest, None, _unusable(analysis, fullest, found.errors[0].message))
    if priced is None or not priced.costs:
        message = "the memory of the fullest micro-batch is not predicted: its shapes leave the layers unknown"
        return PricedBatch(fullest, None, _fault(analysis, fullest, "W0506", message, _CUT))
    if limit is None:
        return PricedBatch(fullest, priced)
    limits = check_limits(priced, reuse, remedies=True)
    over = next((diagnostic for diagnostic in limits if diagnostic.code == OVER_MEMORY), None)
    if over is None:
        return PricedBatch(fullest, priced)
    message = (
        "the fullest micro-batch of the training does not fit: a rank would hold "
        f"{byte_text(peak_bytes(priced))} at its peak, over a limit of {byte_text(limit)}"
    )
    return PricedBatch(
        fullest, priced, _fault(analysis, fullest, "E0504", message, join_remedies("; ", [_CUT, over.help]))
    )


def _unusable(analysis: Analysis, fullest: FullestBatch, reason: str) -> Diagnostic:
    return _fault(analysis, fullest, "E0505", f"the longest sample of the training ends it: {reason}", _CUT)


def _fault(analysis: Analysis, fullest: FullestBatch, code: str, message: str, help: str) -> Diagnostic:
    """Returns the diagnostic of a micro-batch; no error if it is not known that the training makes it."""
    if not fullest.exact and code.startswith("E"):
        code, message = "W0508", f"perhaps {message}"
    label = f"{batch_place(analysis, fullest)}; the plan was made with {traced_numbers(analysis):,}"
    return Diagnostic(code, message, analysis.job.data.value_span("collate"), label=label, help=help)


def batch_place(analysis: Analysis, fullest: FullestBatch) -> str:
    """Returns the place of a micro-batch, where it is known, and its size in words."""
    shares = ", with equal shares" if analysis.workload.measured else ""
    place = f"step {fullest.step + 1:,}, data rank {fullest.data_rank}{shares}: " if fullest.exact else ""
    samples = plural(fullest.samples, "sample")
    return f"{place}{samples} of {fullest.numbers:,.0f} numbers each, as long as `dataset[{fullest.source_number}]`"
