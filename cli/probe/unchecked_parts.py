"""Names the parts of a job that `dslc check` could not check, so that "good" never claims more than was seen.

Model: a check without `--trace` calls no user function, and missing data leaves facts unknown. `unseen` names them in
the words that follow "is good"; `uncalled_network` and `uncompared_parts` give the warning W0439 if the user asked
for just that check (`--trace`, `--resume`).
"""

from __future__ import annotations

from collections.abc import Iterator
from math import prod

from dslc.compiler.facts.weights_file import Unreadable, files_of
from dslc.compiler.ir.facts import SourceFacts
from dslc.compiler.ir.tensors import TensorFact
from dslc.compiler.rules.analysis import Analysis
from dslc.dsl.diagnostics import Diagnostic, Note
from dslc.dsl.language.blocks import PythonNumbers
from dslc.dsl.language.calls import PythonLoss, PythonSource, parts_of
from dslc.dsl.language.job import JobSpec
from dslc.dsl.language.layers import PythonNetwork, TransformersNetwork
from dslc.dsl.language.loggers import PythonLogger
from dslc.dsl.language.lr_schedules import PythonSchedule
from dslc.dsl.language.metrics import PythonMetric
from dslc.dsl.language.optimizers import PythonOptimizer

TRIED = 10**7  # numbers of a sample with which a user's loss is tried, at most


def can_be_tried(output: TensorFact | None, target: TensorFact | None) -> bool:
    """True if a loss can be called with such a sample: it is known, and not large."""
    return output is not None and target is not None and prod(output.shape) + prod(target.shape) <= TRIED


def describe_unchecked(analysis: Analysis, *, trace: bool) -> str:
    """Returns ` as far as can be seen without its network (`--trace` looks at it)`; "" if all was checked."""
    parts = list(_unchecked_parts(analysis, trace))
    if not parts:
        return ""
    *other_names, last_name = [part for part, _ in parts]
    names = f"{', '.join(other_names)} and {last_name}" if other_names else last_name
    traced_parts = [part for part, is_traced in parts if is_traced]
    hint = (
        f" (`--trace` looks at {'it' if len(traced_parts) == 1 else 'them'})"
        if traced_parts == [n for n, _ in parts]
        else ""
    )
    if traced_parts and not hint:
        hint = f" (`--trace` looks at {' and '.join(traced_parts)})"
    return f" as far as can be seen without {names}{hint}"


def _unchecked_parts(analysis: Analysis, trace: bool) -> Iterator[tuple[str, bool]]:
    """Yields the parts that were not checked, and whether `--trace` would check them."""
    job, source, model = analysis.job, analysis.source, analysis.model
    untraced_source = (
        any(isinstance(source_part, PythonSource) for source_part in parts_of(job.data.source)) and not trace
    )
    if source.missing or untraced_source:
        yield "its data", untraced_source
    has_known_input = source.input is not None or source.structures is not None or untraced_source
    if job.train.step is not None:
        yield "its step", not trace
    elif model is None:
        yield (
            "its network",
            isinstance(job.model.network, PythonNetwork | TransformersNetwork) and has_known_input and not trace,
        )
    for part, is_custom, is_traced in _user_code(analysis):
        if is_custom and not (trace and is_traced):
            yield part, not trace
    if job.model.start is not None and not trace and _only_torch_reads(job.model.start.path):
        yield "its weights, which only torch can read", True


def _user_code(analysis: Analysis) -> Iterator[tuple[str, bool, bool]]:
    """Yields the parts that may be a user's own: whether this one is, and whether a check with `--trace` tries it."""
    job, source, model = analysis.job, analysis.source, analysis.model
    is_tried = model is not None and (source.structures is not None or can_be_tried(model.output, source.target))
    numbers = (getattr(job.data.sampler, name, None) for name in ("weights", "length"))
    yield "its loss", isinstance(job.model.loss, PythonLoss), is_tried
    yield "its metrics", any(isinstance(metric, PythonMetric) for metric in job.evaluate.metrics), is_tried
    yield "its optimizer", isinstance(job.train.optimizer, PythonOptimizer), model is not None
    yield "its sampler", any(isinstance(call, PythonNumbers) for call in numbers), True
    yield "its hooks", bool(job.train.hooks), True
    yield "its loggers", any(isinstance(logger, PythonLogger) for logger in job.log.loggers), True
    yield "its learning rate schedule", isinstance(job.train.lr_schedule, PythonSchedule), True


def _only_torch_reads(path: str) -> bool:
    try:
        return files_of(path).torchs
    except Unreadable:  # a rule reports it
        return False


def uncalled_network(job: JobSpec, source: SourceFacts) -> Diagnostic:
    """Returns W0439 for a network that was made but could not be called."""
    return Diagnostic(
        "W0439",
        "the network was made, but not called: the shape of a sample is not known while the data is missing",
        job.model.value_span("network"),
        notes=(Note(message="the data", span=job.data.value_span("source")),),
        help=source.help,
    )


def uncompared_parts(analysis: Analysis, name: str) -> Iterator[Diagnostic]:
    """Yields W0439 for parts of a checkpoint that were not compared with the job."""
    job = analysis.job
    if analysis.model is None:
        is_custom = isinstance(job.model.network, PythonNetwork | TransformersNetwork)
        is_custom = is_custom and not (analysis.source.input is None and analysis.source.structures is None)
        yield Diagnostic(
            "W0439",
            f"the tensors of {name} are not compared with the network",
            job.model.value_span("network"),
            help="`--trace` calls the function that makes it, and compares them" if is_custom else "",
        )
    if analysis.workload.train is None:
        yield Diagnostic(
            "W0439",
            f"the number of samples of {name} is not compared: that of the data is not known",
            job.data.value_span("source"),
        )
