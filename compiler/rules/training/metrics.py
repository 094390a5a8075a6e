"""Rules for the metrics of evaluations. E0312, E0313, E0316, E0691."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from dslc.compiler.ir.facts import SourceFacts
from dslc.compiler.ir.tensors import TensorFact
from dslc.compiler.model.model import ModelGraph
from dslc.compiler.model.outputs import classes_come_first
from dslc.compiler.model.value import say
from dslc.dsl.diagnostics import Diagnostic, Note
from dslc.dsl.language import calls as c
from dslc.dsl.language import metrics as m
from dslc.dsl.language.job import JobSpec
from dslc.dsl.language.preferences import PreferenceLoss
from dslc.dsl.language.registry import Call
from dslc.dsl.remedy import remedy, remove_at, replace_text, set_argument, set_field
from dslc.dsl.source import Span


def check_metrics(
    job: JobSpec, source: SourceFacts, model: ModelGraph | None, *, loss_fits: bool
) -> Iterator[Diagnostic]:
    """Reports metrics with one name, and metrics that fit neither the loss nor the data. `loss_fits`: the loss fits."""
    loss = job.model.loss
    indices = source.target is not None and source.target.dtype == "int64"
    classes = isinstance(loss, c.CrossEntropy) or indices
    named: dict[str, Span | None] = {}
    for metric in job.evaluate.metrics:
        span = metric.span or job.evaluate.value_span("metrics")
        name = m.name_of(metric)
        if name in named:
            yield Diagnostic(
                "E0316",
                f"two metrics are called `{name}`",
                span,
                notes=(Note("the other", named[name]),),
                help='another name, as in `python("module:function", name = "other")`'
                if isinstance(metric, m.PythonMetric)
                else remedy(remove_at(span, "leave one out")),
            )
        named[name] = span
        if source.target is not None and not loss_fits and isinstance(metric, m.MSEMetric) != indices:
            continue  # it fits the data; the loss does not, which is reported
        yield from _check_fit(job, source, metric, span, targets_are_classes=classes)
    if isinstance(loss, c.PythonLoss) and model is not None and source.target is not None and source.structures is None:
        metrics = [each for each in job.evaluate.metrics if not (classes and isinstance(each, m.MSEMetric))]
        yield from check_outputs(job, metrics, model.output, source.target, classes_come_first(model.output, source))


def _check_fit(
    job: JobSpec, source: SourceFacts, metric: Call, span: Span | None, *, targets_are_classes: bool
) -> Iterator[Diagnostic]:
    """Reports a metric that does not fit the loss or the targets, or has one value for all outputs."""
    loss = job.model.loss
    rewards = isinstance(metric, m.RewardMargin | m.RewardAccuracy)
    if rewards != isinstance(loss, PreferenceLoss) and not isinstance(metric, m.LossMetric | m.PythonMetric):
        what = "compares the answers of a pair" if rewards else "does not compare the answers of a pair"
        yield Diagnostic(
            "E0312",
            f"`{metric.word}` {what}, and the loss is `{loss.word}`",
            span,
            notes=(Note("the loss is set here", job.model.value_span("loss")),),
            help=remedy(
                set_field("evaluate.metrics", "[loss]" if rewards else "[loss, reward_margin, reward_accuracy]")
            ),
        )
        return
    if isinstance(metric, m.Perplexity) and not isinstance(loss, c.CrossEntropy):
        yield Diagnostic(
            "E0312",
            f"perplexity is the exponential of the cross entropy, and the loss is `{loss.word}`",
            span,
            notes=(Note("the loss is set here", job.model.value_span("loss")),),
            help=remedy(remove_at(span), ", or ", set_field("model.loss", "cross_entropy()")),
        )
    elif (isinstance(metric, m.Accuracy | m.TopK) and isinstance(loss, c.MSE | c.L1 | c.BCE | c.Contrastive)) or (
        isinstance(metric, m.TorchMetric) and isinstance(loss, c.MSE | c.L1 | c.Contrastive)
    ):
        yield Diagnostic(
            "E0312",
            f"`{metric.word}` compares classes, and the loss is `{loss.word}`",
            span,
            notes=(Note("the loss is set here", job.model.value_span("loss")),),
            help=remedy(set_field("evaluate.metrics", "[loss]" if isinstance(loss, c.Contrastive) else "[loss, mse]")),
        )
    elif isinstance(metric, m.MSEMetric) and isinstance(loss, c.Contrastive):
        yield Diagnostic(
            "E0312", "`mse` compares an output with its target, and `contrastive` with other outputs", span
        )
    elif isinstance(metric, m.MSEMetric) and targets_are_classes:
        help = remedy(replace_text(span, "accuracy"))
        yield Diagnostic("E0312", "`mse` compares numbers, and the targets are classes", span, help=help)
    elif isinstance(metric, m.TopK) and source.classes is not None and metric.k >= source.classes:
        yield Diagnostic(
            "E0313",
            f"the {metric.k} likeliest of {source.classes} classes always hold the right one",
            span,
            help=remedy(set_argument(metric.span, "k", max(1, source.classes // 2), f"a `k` below {source.classes}")),
        )


def takes_classes(metric: Call) -> bool:
    """True for a metric of the library that compares classes."""
    return isinstance(metric, m.Accuracy | m.TopK | m.TorchMetric)


def check_outputs(
    job: JobSpec, metrics: Sequence[Call], output: TensorFact, target: TensorFact, classes_first: bool
) -> Iterator[Diagnostic]:
    """Reports metrics of the library that cannot compare an output with a target, beside a loss of the user's own.
    Where `collate` pads samples, only the number of their dims counts.
    """
    padded, real = job.data.collate is not None, target.dtype.startswith(("float", "bfloat", "complex"))
    rows, numbers = output.shape[:-1], padded or output.numbers == target.numbers
    same = len(rows) == len(target.shape) if padded else rows == target.shape
    scores = bool(output.shape) and (classes_first or same)
    for metric in metrics:
        if isinstance(metric, m.MSEMetric):
            faulty, takes, other = not numbers, "one number for each of the target", ""
        elif takes_classes(metric) and real:
            faulty, takes = True, "classes, which are whole numbers"
            other = remedy(replace_text(metric.span, "mse"), ", or ") if numbers else ""
        elif takes_classes(metric):
            faulty, takes, other = not scores, "scores with all classes in the last dim or the first", ""
        else:
            continue
        if faulty:
            yield Diagnostic(
                "E0691",
                f"`{metric.word}` takes {takes}, and the network gives {say(output.shape)} for a target "
                f"{say(target.shape)} of {target.dtype}",
                metric.span or job.evaluate.value_span("metrics"),
                notes=(Note("the loss is yours", job.model.value_span("loss")),),
                help=remedy(other, 'a metric of your own, `python("module:function")`; or ', remove_at(metric.span)),
            )
