"""The analysis of a text for an editor: all that `dslc check` finds, and the figures that hovers and hints show.

Calls no function of the user.
"""

from __future__ import annotations

from collections.abc import Callable
from itertools import groupby

from dslc.compiler.cost.layer_bytes import kept_bytes
from dslc.compiler.ir.nodes import LayerNode
from dslc.compiler.ir.number_text import byte_text, count_text, flop_text, time_text
from dslc.compiler.ir.records import source_text
from dslc.compiler.rules.analysis import Analysis
from dslc.compiler.show.describe import fact_text
from dslc.dsl.diagnostics import Diagnostic, Report
from dslc.dsl.editor.figures import JobFigures, LayerFigures
from dslc.dsl.editor.snapshot import Region, Snapshot
from dslc.dsl.record import Record, record
from dslc.dsl.words import plural
from dslc.jobs.check_job import check_one, presented


@record
class AnalysisRequest(Record):
    """A text to analyse. `repaired` is the text with each broken statement as it last was, for the figures."""

    path: str
    text: str
    repaired: str


@record
class AnalysisReply(Record):
    """`figures` is None where the job has no analysis."""

    diagnostics: tuple[Diagnostic, ...]
    figures: JobFigures | None


@record
class CheckedText(Record):
    """The findings of `dslc check` in a text, and the analyses of the job: one for each combination of its sweep."""

    report: Report
    analyses: tuple[Analysis, ...]


def check_text(path: str, text: str) -> CheckedText:
    analyses: list[Analysis] = []
    report, _ = check_one(path, [], text=text, then=lambda analysis, _: analyses.append(analysis))
    return CheckedText(report=report, analyses=tuple(analyses))


def analyse_text(request: AnalysisRequest, check: Callable[[str, str], CheckedText] = check_text) -> AnalysisReply:
    """Returns the diagnostics of a text, and the figures of its job. `check` may remember what it has checked."""
    checked = check(request.path, request.text)
    text, described = request.text, checked
    if request.repaired != request.text:
        text, described = request.repaired, check(request.path, request.repaired)
    analyses = described.analyses
    figures = _figures(analyses[0], Snapshot(text, request.path)) if analyses else None
    return AnalysisReply(diagnostics=tuple(presented(checked.report)), figures=figures)


def _figures(analysis: Analysis, snapshot: Snapshot) -> JobFigures:
    workload, estimate = analysis.workload, analysis.estimate
    step = estimate.step_time if estimate else None
    source = ""
    if estimate is not None and step is not None:
        source = source_text(estimate.source, estimate.fit, analysis.layout.hardware.kind)
    return JobFigures(
        layers=tuple(_layers(analysis, snapshot)),
        ranks=f"{analysis.layout.world_size:,}",
        batch=plural(workload.share, "sample"),
        microbatch=f"{workload.microbatch:,}",
        parameters=count_text(analysis.model.parameters) if analysis.model else "",
        peak=byte_text(max(cost.memory.peak for cost in analysis.costs)) if analysis.costs else "",
        step_time=time_text(step) + source if step is not None else "",
    )


def _layers(analysis: Analysis, snapshot: Snapshot) -> list[LayerFigures]:
    """Returns the figures of each call in the text that makes layers: `repeat` and library networks make several."""
    model = analysis.model
    if model is None:
        return []
    kept = kept_bytes(analysis.job, model, model.layers)
    figures = []
    for span, group in groupby(zip(model.layers, kept, strict=True), key=lambda pair: pair[0].span):
        nodes = list(group)
        if span is None or span.source.name != snapshot.path:
            continue
        region = next((r for r in snapshot.regions if r.start <= span.start and span.end <= r.end), None)
        if region is not None:
            layers = [layer for layer, _ in nodes]
            figures.append(_layer(region, span.start, span.end, layers, sum(size for _, size in nodes)))
    return figures


def _layer(region: Region, start: int, end: int, layers: list[LayerNode], kept: int) -> LayerFigures:
    return LayerFigures(
        region=region.text,
        start=start - region.start,
        end=end - region.start,
        kind=layers[0].kind,
        count=len(layers),
        input=fact_text(layers[0].input),
        output=fact_text(layers[-1].output),
        parameters=f"{sum(q.count for layer in layers for q in layer.parameters):,}",
        forward=flop_text(sum(layer.forward_flops for layer in layers)),
        backward=flop_text(sum(layer.backward_flops for layer in layers)),
        saved=byte_text(kept),
    )
