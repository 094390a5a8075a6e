"""The facts of a job that its functions and its other libraries tell: each is called in a child, once.

Model: first the source, whose batches the network is traced with; then the network; then the loss, the metrics and the
rest, which are tried with outputs like the network's.
"""

from __future__ import annotations

import tempfile
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING

from dslc.compiler.facts.sources import mixture_facts
from dslc.compiler.ir.codec import from_json, to_json
from dslc.compiler.ir.facts import Facts, SourceFacts
from dslc.compiler.placement.layout import lay_out
from dslc.dsl.diagnostics import Findings, Report, judge, recorded
from dslc.dsl.language.calls import Mixture, NetworkLoss, PythonCollate, PythonSource
from dslc.dsl.language.job import JobSpec
from dslc.dsl.language.registry import Call
from dslc.probe.child import in_trial_process, watched_by
from dslc.probe.data_trials import try_images, try_sampler
from dslc.probe.sample_outputs import trial_batches
from dslc.probe.second_source import compare_twice
from dslc.probe.trace_network import open_weights, preload_libraries, trace_network
from dslc.probe.trial import Files, Trial
from dslc.probe.trial_cache import TrialCache
from dslc.probe.user_code_trials import (
    try_followers,
    try_loss,
    try_metrics,
    try_optimizer,
    try_schedule,
    try_step,
    try_targets,
    used,
)

if TYPE_CHECKING:
    from dslc.compiler.trace.structures import UserValue


def trace_facts(job: JobSpec, source: SourceFacts, *, run: bool) -> Findings[Facts]:
    """Returns the facts, with what calling the user's functions tells; `source` are those without."""
    with tempfile.TemporaryDirectory() as folder:
        trial_cache = TrialCache(job, source, folder, run=run)
        trial = Trial(job=job, facts=Facts(source=source), files=Files(folder), run=run, cache=trial_cache)
        if (facts := trial_cache.load()) is not None:
            preload_libraries(trial)
            return facts
        return (yield from in_trial_process(partial(_facts_of_trials, trial, trial_cache)))


def _facts_of_trials(trial: Trial, trial_cache: TrialCache) -> Findings[Facts]:
    """Returns the facts after all trials, and keeps them if none has anything to report."""
    with watched_by(trial_cache):
        trial, diagnostics = yield from recorded(_tried(trial))
    if not diagnostics:
        trial_cache.store(trial.facts)
    return trial.facts


def _tried(trial: Trial) -> Findings[Trial]:
    preload_libraries(trial)
    for probe in PROBES:
        judged_trial, sound = yield from judge(probe(trial))
        trial = replace(judged_trial or trial, sound=trial.sound and sound)
    return trial


def trace_longest(job: JobSpec, facts: Facts, sample: int) -> Findings[Facts | None]:
    """Returns the facts of a job whose source and network are traced with batches of one sample, by its number in the
    source. Returns None if that yields an error.
    """
    assert facts.source is not None
    with tempfile.TemporaryDirectory() as folder:
        trial = Trial(job=job, facts=Facts(source=facts.source), files=Files(folder), run=True, longest=sample)
        return (yield from in_trial_process(partial(_facts_of_longest, trial, facts)))


def _facts_of_longest(trial: Trial, facts: Facts) -> Findings[Facts | None]:
    assert facts.source is not None
    for probe in (trace_sources, trace_network):
        judged_trial, sound = yield from judge(probe(trial))
        if not sound:
            return None
        trial = judged_trial or trial
    source = replace(trial.source, loss_counts=facts.source.loss_counts)
    return replace(facts, source=source, model=trial.facts.model or facts.model)


def trace_sources(trial: Trial) -> Findings[Trial]:
    """Adds the facts that the samples of a user's source tell, or of each source of a mixture."""
    source = trial.job.data.source
    if not isinstance(source, Mixture):
        return trial.with_facts(source=(yield from _trace_source(trial, source, trial.source)))
    parts = []
    for call, facts in zip(source.sources, trial.source.parts, strict=True):
        parts.append((yield from _trace_source(trial, call, facts)))
    return trial.with_facts(source=mixture_facts(parts))


def _trace_source(trial: Trial, call: Call, source: SourceFacts) -> Findings[SourceFacts]:
    if not isinstance(call, PythonSource):
        return source

    job, collate_call = trial.job, trial.job.data.collate

    def use(construct: Callable[..., UserValue]) -> object:
        from dslc.compiler.trace.sources.trace_source import trace_source
        from dslc.runtime.data.collating import collate
        from dslc.runtime.process.random_numbers import begin_sample

        return to_json(
            trace_source(
                construct,
                lambda index: begin_sample(job.train.seed, "train", 0, index),
                collate=collate(trial.function(collate_call) if isinstance(collate_call, PythonCollate) else None),
                stacked=collate_call is None,
                unsplit=isinstance(job.model.loss, NetworkLoss),
                example=trial.files.batches,
                real=trial.files.samples,
                longest=trial.longest,
            )
        )

    source_facts = yield from used(trial, call, "source", use)
    if source_facts and source_facts.get("shards") is None and trial.longest is None:
        layout = Report().collect(lay_out(job))
        ranks = layout.world_size if layout is not None else 1
        on_other_hosts = layout is not None and (layout.nodes > 1 or job.launch.with_.word != "local")
        yield from compare_twice(trial, call, ranks, on_other_hosts)
    return from_json(SourceFacts, source_facts) if source_facts else source


def make_batches(trial: Trial) -> Findings[Trial]:
    """Adds the batches for a user's loss and metrics, which are like the network's outputs."""
    yield from ()
    return replace(
        trial, batches=trial_batches(trial.job, trial.facts, trial.files.sample_outputs, trial.files.outputs)
    )


# A probe gets the facts of all before it, and returns the trial with those that it adds; None if it adds none.
PROBES: tuple[Callable[[Trial], Findings[Trial | None]], ...] = (
    trace_sources,
    try_images,
    trace_network,
    make_batches,
    try_loss,
    try_metrics,
    try_targets,
    try_step,
    try_schedule,
    try_followers,
    try_sampler,
    try_optimizer,
    open_weights,
)
