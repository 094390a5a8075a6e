"""Goals, and responses to spikes of the loss.

A goal is the lowest or the highest value of a metric over the evaluations of a training. It says which checkpoint is
the best, or, with patience, when a training ends early.
"""

from __future__ import annotations

from typing import ClassVar

from dslc.dsl.language.registry import Call, Float, Int, Name, arg, call, measure
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


@record
class SpikeResponse(Call):
    """A response to a spike: a loss above the mean of the `window` losses before it by more than `deviations` of their
    standard deviations, and by at least 1% of the mean. There is none before `window` losses are known.
    """

    window: int = arg(measure("steps", min=2), "the losses that a loss is compared with", default=64)
    deviations: float = arg(Float(above=0), "standard deviations above their mean", default=6.0)


@call("on_spike", "rewind")
class RewindOnSpike(SpikeResponse):
    """Goes back to the last checkpoint at least `steps` before the spike, or to the first step, and skips the batches
    that led to it.
    """

    steps: int = arg(measure("steps", min=1), "how far it goes back at least", default=200)
    skip: int = arg(measure("steps", min=1), "the batches that are skipped, up to the spike's", default=2)
    times: int = arg(Int(min=1), "the rewinds in all, after which a spike ends the training", default=3)


@call("on_spike", "stop")
class StopOnSpike(SpikeResponse):
    """Ends the training before the state after the spike is saved."""


@call("on_spike", "note")
class NoteSpike(SpikeResponse):
    """Notes the spike and its samples, and trains on."""
