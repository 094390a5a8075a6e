"""The last and the best value of each metric of a run, from its records one after another.

Contract: a metric whose direction is not known (a function of the user's that no goal names) has no best value.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from dslc.dsl.language.job import JobSpec
from dslc.dsl.language.metrics import PythonMetric, name_of
from dslc.runtime.process.records import Record, overview_numbers

_LOWER = ("loss", "perplexity", "mse")  # metrics that fall as a training gets better
_NO_METRICS = ("lr", "skipped")
_NOT_COMPARED = ("train", "training", "test")  # splits without a best value


def directions(job: JobSpec) -> dict[str, bool]:
    """Returns of each metric whether its highest value is the best; a goal of the job says it of a user's own."""
    known = {"loss": False}
    known |= {
        name_of(each): each.word not in _LOWER for each in job.evaluate.metrics if not isinstance(each, PythonMetric)
    }
    goals = (job.checkpoint.best, job.train.early_stopping)
    return known | {goal.metric: goal.highest for goal in goals if goal is not None}


class MetricSummary:
    """The metrics in the records of a run until now: `last` by name, as `validation loss`, `best` as (value, step), and
    the `seconds` since the first step began. `highest` are the directions of the metrics.
    """

    def __init__(self, highest: Mapping[str, bool]) -> None:
        self._highest = highest
        self.last: dict[str, float | None] = {}
        self.best: dict[str, tuple[float, int]] = {}
        self.seconds: float | None = None

    def add(self, record: Record) -> None:
        self.seconds = record.get("seconds", self.seconds)
        split = record["split"]
        for metric, value in _metrics(record):
            name = f"{split} {metric}"
            self.last[name] = value
            highest = self._highest.get(_within(split, metric), self._highest.get(metric))
            if value is None or highest is None or split in _NOT_COMPARED:
                continue
            before = self.best.get(name)
            if before is None or (value > before[0] if highest else value < before[0]):
                self.best[name] = value, record["step"]


def _metrics(record: Record) -> Iterator[tuple[str, float | None]]:
    for name, value in overview_numbers(record):
        if name not in _NO_METRICS and isinstance(value, int | float | None):
            yield name, value


def _within(split: str, metric: str) -> str:
    """Returns the name that a goal has for a metric of one of several validation sets: `clean.loss`."""
    return f"{split.partition('/')[2]}.{metric}".removeprefix(".")
