"""Goals: the lowest or the highest value of a metric over the evaluations of a training.

A goal says which checkpoint is the best, or, with patience, when a training ends early.
"""

from __future__ import annotations

from typing import ClassVar

from dslc.dsl.language.registry import Call, Float, Int, Name, arg, call
from dslc.dsl.record import record

METRIC_DOC = (
    'one of `evaluate.metrics` or `loss`, as `metrics.jsonl` has it: `top_5`, `"own.recall"`; of one of several '
    'validation sets `"clean.loss"`'
)


@record
class Goal(Call):
    """A metric, and the direction in which it improves."""

    highest: ClassVar[bool]

    metric: str = arg(Name(), METRIC_DOC)


@record
class EarlyStopping(Goal):
    """A goal that ends a training which comes no closer to it."""

    patience: int = arg(Int(min=1), "the evaluations in a row without an improvement that end the training", default=3)
    by: float = arg(Float(min=0), "an improvement is a value that is better than the best by more than this", default=0)


@call("goal")
class Lowest(Goal):
    """The evaluation with the lowest value; of equal ones the first."""

    highest: ClassVar = False


@call("goal")
class Highest(Goal):
    """The evaluation with the highest value; of equal ones the first."""

    highest: ClassVar = True


@call("early_stopping", "lowest")
class StopAtLowest(EarlyStopping):
    """Ends the training once the metric falls no more. A value that is not finite is no improvement."""

    highest: ClassVar = False


@call("early_stopping", "highest")
class StopAtHighest(EarlyStopping):
    """Ends the training once the metric rises no more. A value that is not finite is no improvement."""

    highest: ClassVar = True
