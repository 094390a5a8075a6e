"""Tries the numbers that a sampler needs before any rank starts: a file's are read, a function is called once."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from dslc.compiler.facts.sample_numbers import count_of
from dslc.compiler.facts.source_look import MissingDataError
from dslc.compiler.ir.facts import SourceFacts
from dslc.dsl.diagnostics import Report
from dslc.dsl.language.calls import PythonSource
from dslc.dsl.language.job import JobSpec
from dslc.dsl.language.samplers import ByLength, PythonNumbers, Weighted
from dslc.dsl.words import plural
from dslc.probe.child import in_child
from dslc.probe.user_code_trials import used


def try_sampler(job: JobSpec, source: SourceFacts, report: Report) -> None:
    """Reports weights that cannot be drawn by, and functions that fail. Lengths are tried on the first sample of a
    user's data set.
    """
    sampler = job.data.sampler
    if isinstance(sampler, ByLength) and isinstance(sampler.length, PythonNumbers):
        _try_length(job, sampler.length, source, report)
    elif isinstance(sampler, Weighted):
        _try_weights(job, sampler, source, report)


def _try_weights(job: JobSpec, sampler: Weighted, source: SourceFacts, report: Report) -> None:
    from dslc.compiler.graph.constants import sampler_step
    from dslc.dsl.source import short_line

    samples = source.samples
    step = sampler_step(job, sampler.samples or samples or 1, folder=job.folder)
    assert step is not None

    def look() -> str:
        from dslc.runtime.data.sample_keys import fault_of, load_numbers

        values = load_numbers(step)
        called = isinstance(sampler.weights, PythonNumbers)  # a rule counts the numbers of a file
        if called and samples is not None and len(values) != samples:
            return f"it gives {plural(len(values), 'number')}, and the data has {plural(samples, 'sample')}"
        return fault_of(step, values, len(values))

    name = f"`{sampler.weights.function}`" if isinstance(sampler.weights, PythonNumbers) else "the file of weights"
    if isinstance(sampler.weights, PythonNumbers):
        fault = used(job, sampler.weights, "sampler", lambda _: look(), report)
    elif not _is_readable(sampler.weights):
        return  # the rules say so
    else:
        answer = in_child(look)
        fault = answer.get("made", answer.get("error"))
    if fault:
        fault = fault.removeprefix(f"{short_line(sampler.span or job.data.at('sampler'))}: ")
        report.add(
            "E0318",
            f"{name} does not fit: {fault}",
            sampler.at("weights"),
            help="one number of at least 0 for each sample, in the order of the source",
        )


def _is_readable(path: str) -> bool:
    """Returns True for a file of numbers that can be read."""
    try:
        count_of(path, path)
    except MissingDataError:
        return False
    return True


def _try_length(job: JobSpec, call: PythonNumbers, source: SourceFacts, report: Report) -> None:
    own = job.data.source
    if not isinstance(own, PythonSource):
        return
    from dslc.compiler.graph.constants import python_function

    def use(length: Callable[..., Any]) -> float:
        from dslc.runtime.process.random_numbers import begin_sample
        from dslc.runtime.process.user_code import load_function

        made = load_function(python_function(own, job.folder))()
        samples = made[0] if source.validation_samples is not None else made
        begin_sample(job.train.seed, "train", 0, 0)
        return float(length(samples[0]))

    used(job, call, "sampler", use, report)
