"""The first gate: analyses a job without a plan graph, and asks every rule that may reject it.

`analyse` is the work of `dslc check`. It is complete: no later step refuses a job that it accepts, except for reasons
that only the machine can tell. Each step needs those before it; if one fails, nothing is reported on rules that depend
on it. Plain Python; neither torch nor networkx.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator
from dataclasses import replace

from dslc.compiler.cost.cost import RankCost
from dslc.compiler.cost.reuse import Reuse
from dslc.compiler.cost.stages import cut
from dslc.compiler.facts.sources import context_of, source_facts
from dslc.compiler.ir.facts import Facts, SourceFacts
from dslc.compiler.model.model import ModelGraph, share_out_traced
from dslc.compiler.model.opaque import made_by_parts, opaque
from dslc.compiler.placement.layout import Layout, lay_out, warn_of_unknown_count
from dslc.compiler.placement.schedules import ScheduleTable, table
from dslc.compiler.placement.staging import Staging
from dslc.compiler.placement.tensor_plan import TensorPlan, tensor_plan
from dslc.compiler.placement.workload import measure_out
from dslc.compiler.rules import rule_table
from dslc.compiler.rules.analysis import Analysis, PipelinePlan
from dslc.compiler.rules.choice.recompute_budget import choose_recomputation, without_choice
from dslc.compiler.rules.job_rules import check_hosts, check_launch_texts, check_supported
from dslc.compiler.rules.memory import check_memory, check_promises
from dslc.compiler.rules.parallelism import pipeline as pipeline_rules
from dslc.compiler.rules.parallelism.exchange_cost import check_network
from dslc.compiler.rules.parallelism.experts import fits_data_axis, skew_of
from dslc.compiler.rules.parallelism.sharding import check_own_model
from dslc.compiler.rules.rule_table import KnownFacts, check_rules
from dslc.dsl.bounds import TRIED, WORK
from dslc.dsl.diagnostics import Diagnostic, Findings, Report, judge, passes, recorded
from dslc.dsl.language.blocks import RecomputeBudget
from dslc.dsl.language.calls import Fp8, NetworkLoss, PythonSource, parts_of
from dslc.dsl.language.job import JobSpec

_MISFITS = frozenset({"E0215", "E0216"})  # the loss does not fit the data's targets


def analyse(
    job: JobSpec,
    facts: Facts,
    broken: Collection[str] = (),
    *,
    sound: bool = True,
    limits: bool = True,
    remedies: bool = True,
    reuse: Reuse | None = None,
) -> Findings[Analysis | None]:
    """Asks every rule; without `limits`, none on memory and promises, and without `remedies` they try none.

    Returns None if the job has mistakes that leave nothing to analyse.

    `broken` are the fields that `resolve` could not read (`devices.gpus`): the job has their defaults, and faults that
    follow from those are not reported. `sound`: no error is known yet. `reuse` is passed from one analysis of a job to
    the next.
    """
    reuse, job = reuse or Reuse(), without_choice(job)
    known, fine = yield from judge(_known_facts(job, facts, broken, reuse, sound=sound))
    readable = _is_fine(broken, "model", "data", "train", "evaluate", "parallelism")
    analysis = None
    if not readable or (yield from _check(known, sound=sound and fine)):
        analysis = yield from _analysis(known, reuse)
    if analysis is not None and not broken and limits:
        yield from check_limits(analysis, reuse, remedies=remedies, sound=sound)
    yield from check_supported(job)
    return analysis


def _analysis(known: KnownFacts, reuse: Reuse) -> Findings[Analysis | None]:
    """Returns the analysis; None if too little is known, or if it yields an error."""
    job, layout, workload, model = known.job, known.layout, known.workload, known.model
    pipeline = yield from _pipeline(known, reuse)
    uneven = (layout is not None and not fits_data_axis(job, layout, model)) or (known.cuts and known.cuts.uneven)
    if layout is None or workload is None or uneven or (model is not None and pipeline is None):
        return None
    costs: tuple[RankCost, ...] = ()
    staging = _staging(known, pipeline.stages, pipeline.schedule) if pipeline is not None else None
    if staging is not None:
        if isinstance(job.memory.recompute, RecomputeBudget):
            job, accounts = choose_recomputation(staging)
            staging = replace(staging, job=job)
            reuse.spent += accounts * layout.work(len(staging.model.layers))
        costs = reuse.costs(staging)
    return Analysis(
        job=job,
        source=known.source,
        layout=layout,
        workload=workload,
        model=model,
        pipeline=pipeline,
        costs=costs,
        staging=staging,
        facts=known.facts,
    )


def _staging(known: KnownFacts, stages: tuple[range, ...], schedule: ScheduleTable | None) -> Staging | None:
    """Returns the job with its model in these stages; None if too little is known."""
    if known.layout is None or known.workload is None or known.model is None or known.cuts is None:
        return None
    return Staging(
        job=known.job,
        layout=known.layout,
        workload=known.workload.in_rows(known.job.data.rows),
        model=known.model,
        cuts=known.cuts,
        stages=stages,
        schedule=schedule,
        optimizer=known.facts.optimizer,
    )


def check_limits(analysis: Analysis, reuse: Reuse, *, remedies: bool, sound: bool = True) -> Iterator[Diagnostic]:
    """Checks the account of a job against its network, its memory and its promises; `sound` as above."""
    if not remedies:
        yield from check_memory(analysis, _NoTrials())
        yield from check_promises(analysis, _NoTrials(), sound=sound)
        return
    if analysis.staging is not None and analysis.estimate is not None:
        yield from check_network(analysis.staging, analysis.costs, analysis.estimate)
    layers = len(analysis.model.layers) if analysis.model else 1
    trials = _Trials(replace(analysis.facts, source=analysis.source), reuse, layers)
    yield from check_memory(analysis, trials)
    yield from check_promises(analysis, trials, sound=sound)


def _is_fine(broken: Collection[str], *prefixes: str) -> bool:
    """True if none of the fields that could not be read is in these blocks."""
    return not any(path.startswith(prefixes) for path in broken)


def _known_facts(
    job: JobSpec, facts: Facts, broken: Collection[str], reuse: Reuse, *, sound: bool
) -> Findings[KnownFacts]:
    """Returns the layout, workload and model of a job's readable blocks. `sound`: no errors so far."""
    source = facts.source or source_facts(job.data.source, context_of(job))
    layout = workload = model = cuts = None
    loss_fits = True
    if _is_fine(broken, "devices", "parallelism"):
        if sound:
            yield from warn_of_unknown_count(job.devices, facts.machine)
        layout = yield from lay_out(job, facts.machine)
    if _is_fine(broken, "launch"):
        yield from check_launch_texts(job)
        if layout:
            yield from check_hosts(job, layout)
    if layout and _is_fine(broken, "data", "train"):
        workload = yield from measure_out(job, layout, source)
    if _is_fine(broken, "model", "data.source"):
        (model, cuts), found = yield from recorded(_model(job, layout, facts, source, reuse))
        loss_fits = not any(diagnostic.code in _MISFITS for diagnostic in found)
    if layout and model:  # the rules, and the search for stages
        stages = layout.sizes["pipeline"] * layout.virtual_stages
        reuse.spent += layout.work(len(model.layers)) // 4 + len(model.layers) * stages // 80
    return KnownFacts(
        job=job,
        facts=facts,
        source=source,
        layout=layout,
        workload=workload,
        model=model,
        cuts=cuts,
        loss_fits=loss_fits,
    )


def _check(known: KnownFacts, *, sound: bool) -> Findings[bool]:
    """Asks the rules; returns whether the ranks can share the batches out. `sound`: the job has no errors so far."""
    shared = yield from passes(check_rules(rule_table.SHARING, known))
    sharing = known if shared else replace(known, layout=None)
    fine = yield from passes(check_rules(rule_table.JOB, sharing))
    if sound and shared and fine:
        yield from check_rules(rule_table.UNKNOWNS, sharing)
    yield from check_rules(rule_table.USER_CODE, known)
    network = known.facts.made
    uncalled = None
    if network is not None:
        uncalled = yield from opaque(network, known.job.model, known.source)
    yield from check_rules(rule_table.NETWORK, replace(known, uncalled=uncalled))
    return shared


class _NoTrials:
    """Tries no remedies, where many plans of a job are analysed."""

    all = False

    def __call__(self, job: JobSpec) -> tuple[Analysis | None, frozenset[str]]:
        return None, frozenset()


class _Trials:
    """Analyses of jobs that are tried as remedies, each made once; for a large job few are made, or none."""

    def __init__(self, facts: Facts, reuse: Reuse, layers: int) -> None:
        self._facts, self._reuse, self._layers = facts, reuse, layers
        self._until = min(reuse.spent + TRIED.most, WORK.most)
        self._made: list[tuple[JobSpec, tuple[Analysis | None, frozenset[str]]]] = []
        self.all = True  # false if some were not made

    def __call__(self, job: JobSpec) -> tuple[Analysis | None, frozenset[str]]:
        for tried, result in self._made:
            if tried == job:
                return result
        layout = Report().collect(lay_out(job))
        if layout is not None and self._reuse.spent + layout.work(self._layers) > self._until:
            self.all = False
            return None, frozenset()
        findings = Report()
        analysis = findings.collect(analyse(job, self._facts, limits=False, reuse=self._reuse))
        result = analysis, frozenset(finding.code for finding in findings.found)
        self._made.append((job, result))
        return result


def _model(
    job: JobSpec, layout: Layout | None, facts: Facts, source: SourceFacts, reuse: Reuse
) -> Findings[tuple[ModelGraph | None, TensorPlan | None]]:
    """Returns the model, with each layer as on one rank, and the plan of its cuts over the tensor axis."""
    ranks, pieces = (layout.sizes["tensor"], layout.sizes["context"]) if layout else (1, 1)
    sequence = layout is not None and layout.sequence
    if job.model.has_user_network:
        if facts.model is None:
            return None, None
        graph = yield from opaque(facts.model, job.model, source)
        if graph is None:
            return None, None
        if layout:
            yield from check_own_model(job, layout, facts.model, graph)
            memory = facts.machine.memory if facts.machine else None
            if (yield from made_by_parts(job, layout, facts.model, memory)):
                graph = replace(graph, reset=True)
        cuts = tensor_plan(job, ranks, graph, sequence=sequence)
        experts = job.parallelism.expert if layout else 1
        if ranks * pieces * experts > 1:
            graph = share_out_traced(graph, cuts, ranks, pieces, experts, skew_of(job))
        return graph, cuts
    own = any(isinstance(each, PythonSource) for each in parts_of(job.data.source))
    if (own and source.input is None) or isinstance(job.model.loss, NetworkLoss):
        return None, None
    float8 = job.train.precision if isinstance(job.train.precision, Fp8) else None
    graph = yield from reuse.build(job.model, source, context_of(job), float8)
    if graph is None:
        return None, None
    cuts = tensor_plan(job, ranks, graph, sequence=sequence)
    experts = job.parallelism.expert if layout else 1
    if ranks * pieces * experts > 1 and not cuts.uneven:
        on_cpu = layout is not None and layout.device == "cpu"
        graph = reuse.share_out(
            job.model,
            source,
            cuts.styles,
            ranks,
            pieces,
            experts=experts,
            skew=skew_of(job),
            on_cpu=on_cpu,
            float8=float8,
        )
    return graph, cuts


def _pipeline(known: KnownFacts, reuse: Reuse) -> Findings[PipelinePlan | None]:
    """Returns the stages and their schedule; None if it yields an error, or without a layout or a model."""
    job, layout, model = known.job, known.layout, known.model
    if layout is None or model is None:
        return None
    ranks, microbatches, virtual = layout.sizes["pipeline"], layout.microbatches, layout.virtual_stages
    if not (yield from passes(pipeline_rules.check_size(job, layout, len(model.layers)))):
        return None
    if ranks == 1:
        whole = yield from cut(job, layout, model, None, reuse)
        return PipelinePlan(model=model, stages=whole, schedule=None) if whole else None
    if pipeline_rules.has_piece_fault(model) or not (yield from passes(pipeline_rules.check_traced(job, model))):
        return None
    fine = yield from passes(pipeline_rules.check_schedule(job, layout))
    filled = ranks * virtual <= len(model.layers)
    schedule = table(job.parallelism.schedule, ranks, microbatches, virtual) if fine and filled else None
    # The memory of a stage is known where the ranks of the data axis can share the model out (E0403, E0450).
    uncut = _staging(known, (), schedule) if fits_data_axis(job, layout, model) else None
    stages = yield from cut(job, layout, model, uncut, reuse)
    if stages is None or schedule is None:
        return None
    yield from pipeline_rules.check_stages(job, layout, model, stages, schedule)
    return PipelinePlan(model=model, stages=stages, schedule=schedule)
