"""Names the parts of a job that `dslc check` could not check, so that "good" never claims more than was seen.

Model: a check without `--trace` calls no user function, and missing data leaves facts unknown. `unseen` names them in
the words that follow "is good"; `tell_of_network` and `tell_of_checkpoint` report the warning W0439 if the user asked
for just that check (`--trace`, `--resume`).
"""

from __future__ import annotations

from collections.abc import Iterator
from math import prod

from dslc.compiler.facts.weights_file import Unreadable, files_of
from dslc.compiler.ir.facts import SourceFacts
from dslc.compiler.ir.tensors import TensorFact
from dslc.compiler.rules.analysis import Analysis
from dslc.dsl.diagnostics import Note, Report
from dslc.dsl.language.calls import PythonLoss, PythonSource, parts_of
from dslc.dsl.language.job import JobSpec
from dslc.dsl.language.layers import PythonNetwork, TransformersNetwork
from dslc.dsl.language.lr_schedules import PythonSchedule
from dslc.dsl.language.metrics import PythonMetric
from dslc.dsl.language.optimizers import PythonOptimizer
from dslc.dsl.language.samplers import PythonNumbers

TRIED = 10**7  # numbers of a sample with which a user's loss is tried, at most


def can_be_tried(output: TensorFact | None, target: TensorFact | None) -> bool:
    """True if a loss can be called with such a sample: it is known, and not large."""
    return output is not None and target is not None and prod(output.shape) + prod(target.shape) <= TRIED


def describe_unchecked(analysis: Analysis, *, trace: bool) -> str:
    """Returns ` as far as can be seen without its network (`--trace` looks at it)`; "" if all was checked."""
    found = list(_unchecked_parts(analysis, trace))
    if not found:
        return ""
    *before, last = [what for what, _ in found]
    names = f"{', '.join(before)} and {last}" if before else last
    traced = [what for what, by_tracing in found if by_tracing]
    more = f" (`--trace` looks at {'it' if len(traced) == 1 else 'them'})" if traced == [n for n, _ in found] else ""
    if traced and not more:
        more = f" (`--trace` looks at {' and '.join(traced)})"
    return f" as far as can be seen without {names}{more}"


def _unchecked_parts(analysis: Analysis, trace: bool) -> Iterator[tuple[str, bool]]:
    """Yields the parts that were not checked, and whether `--trace` would check them."""
    job, source, model = analysis.job, analysis.source, analysis.model
    untraced_source = any(isinstance(each, PythonSource) for each in parts_of(job.data.source)) and not trace
    if source.missing or untraced_source:
        yield "its data", untraced_source
    known = source.input is not None or source.structures is not None or untraced_source
    if job.train.step is not None:
        yield "its step", not trace
    elif model is None:
        yield "its network", isinstance(job.model.network, PythonNetwork | TransformersNetwork) and known and not trace
    tried = model is not None and (source.structures is not None or can_be_tried(model.output, source.target))
    if isinstance(job.model.loss, PythonLoss):
        if not trace:
            yield "its loss", True
        elif not tried:
            yield "its loss", False
    if any(isinstance(metric, PythonMetric) for metric in job.evaluate.metrics):
        if not trace:
            yield "its metrics", True
        elif not tried:
            yield "its metrics", False
    if isinstance(job.train.optimizer, PythonOptimizer):
        if not trace:
            yield "its optimizer", True
        elif model is None:
            yield "its optimizer", False
    sampler = job.data.sampler
    if not trace and any(isinstance(getattr(sampler, name, None), PythonNumbers) for name in ("weights", "length")):
        yield "its sampler", True
    for what, calls in (("its hooks", job.train.hooks), ("its loggers", job.log.loggers)):
        if calls and not trace:
            yield what, True
    if isinstance(job.train.lr_schedule, PythonSchedule) and not trace:
        yield "its learning rate schedule", True
    if job.model.start is not None and not trace and _only_torch_reads(job.model.start.path):
        yield "its weights, which only torch can read", True


def _only_torch_reads(path: str) -> bool:
    try:
        return files_of(path).torchs
    except Unreadable:  # a rule reports it
        return False


def tell_of_network(job: JobSpec, source: SourceFacts, report: Report) -> None:
    """Reports W0439 for a network that was made but could not be called."""
    report.add(
        "W0439",
        "the network was made, but not called: the shape of a sample is not known while the data is missing",
        job.model.at("network"),
        notes=[Note(message="the data", span=job.data.at("source"))],
        help=source.help,
    )


def tell_of_checkpoint(analysis: Analysis, name: str, report: Report) -> None:
    """Reports W0439 for parts of a checkpoint that were not compared with the job."""
    job = analysis.job
    if analysis.model is None:
        own = isinstance(job.model.network, PythonNetwork | TransformersNetwork)
        own = own and not (analysis.source.input is None and analysis.source.structures is None)
        report.add(
            "W0439",
            f"the tensors of {name} are not compared with the network",
            job.model.at("network"),
            help="`--trace` calls the function that makes it, and compares them" if own else "",
        )
    if analysis.workload.train is None:
        report.add(
            "W0439",
            f"the number of samples of {name} is not compared: that of the data is not known",
            job.data.at("source"),
        )
