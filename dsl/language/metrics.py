"""The metrics of an evaluation: ratios of sums that the runtime counts, `torchmetrics`, and a user's own."""

from __future__ import annotations

from typing import ClassVar

from dslc.dsl.language.calls import PythonCall
from dslc.dsl.language.registry import Call, Int, Str, arg, call, word
from dslc.dsl.record import record


def name_of(metric: Call) -> str:
    """Returns the key of a metric in `metrics.jsonl`."""
    if isinstance(metric, TopK):
        return f"top_{metric.k}"
    if isinstance(metric, PythonMetric):
        return metric.name or metric.function.rpartition(":")[2].rpartition(".")[2]
    return metric.word


@record
class Metric(Call):
    """A metric by name."""


@call("metric", "loss")
class LossMetric(Metric):
    """The mean of the loss over the targets that count; `null` in `metrics.jsonl` if none does."""


@call("metric")
class Accuracy(Metric):
    """The share of samples (or tokens) whose likeliest class is right."""


@call("metric")
class TopK(Metric):
    """The share of samples (or tokens) whose right class is among the `k` likeliest."""

    k: int = arg(Int(min=1), "how many", default=5)


@call("metric")
class Perplexity(Metric):
    """The exponential of the mean cross entropy."""


@call("metric", "mse")
class MSEMetric(Metric):
    """The mean squared difference."""


@call("metric", "reward_margin")
class RewardMargin(Metric):
    """Of a loss of pairs: the mean lead of the chosen answer's reward over the rejected one's. A reward is `beta` times
    a log-probability, less the reference's; of `ipo`, `orpo` and `simpo` per token.
    """


@call("metric", "reward_accuracy")
class RewardAccuracy(Metric):
    """Of a loss of pairs: the share of pairs whose chosen answer has the larger reward."""


@record
class TorchMetric(Metric):
    """A metric over classes that the `torchmetrics` library computes; `torch_class` is its name there."""

    torch_class: ClassVar[str]


_AVERAGE_DOC = "over the classes; `each`: a list of one number for each"


@record
class ClassMetric(TorchMetric):
    """A metric with a number for each class, and a mean over the classes."""

    average: str = arg(word("macro", "micro", "weighted", "each"), _AVERAGE_DOC, default="macro")


@call("metric", "f1")
class F1(ClassMetric):
    """The harmonic mean of precision and recall."""

    torch_class: ClassVar = "F1Score"


@call("metric")
class Precision(ClassMetric):
    """The share of what was taken for a class that is of it."""

    torch_class: ClassVar = "Precision"


@call("metric")
class Recall(ClassMetric):
    """The share of a class that was taken for it."""

    torch_class: ClassVar = "Recall"


@call("metric", "iou")
class IoU(ClassMetric):
    """Intersection over union (Jaccard index)."""

    torch_class: ClassVar = "JaccardIndex"


@call("metric", "auroc")
class AUROC(TorchMetric):
    """The area under the curve of true over false positives. Keeps the scores of the whole split in memory."""

    torch_class: ClassVar = "AUROC"

    average: str = arg(word("macro", "weighted", "each"), _AVERAGE_DOC, default="macro")


@call("metric")
class ConfusionMatrix(TorchMetric):
    """The number of samples (or tokens) of each class, a row, that were taken for each, a column."""

    torch_class: ClassVar = "ConfusionMatrix"


@call("metric", "python", open=True)
class PythonMetric(PythonCall):
    """The result of a function of yours: a `torchmetrics.Metric`; or an object with `update(output, target)`,
    `compute()`, and `states`, which says of each attribute that counts how the values of several ranks are combined:
    `{"hits": "sum"}`, or `max`, `min`, `cat`. `compute` gives a number, or a dict of numbers.
    """

    name: str | None = arg(
        Str(r"[\w.-]+", '"a_name"'), "its key in `metrics.jsonl`", default=None, shown="the function's"
    )
