"""The learning rate schedules. One class declares one; `curve` names its formula in runtime/loop/learning_rate.py.

Arguments that are times (steps, epochs, shares of the training) reach the program as steps, all others as they are.
"""

from __future__ import annotations

from typing import ClassVar

from dslc.dsl.language.calls import PythonCall
from dslc.dsl.language.goals import METRIC_DOC
from dslc.dsl.language.registry import Call, Float, Int, ListOf, Name, Quantity, arg, call, measure, word
from dslc.dsl.record import record

_WARMUP = measure("steps", "epochs", "ratio", min=0)
_WARMUP_DOC = "rises over this: steps, epochs, or a share of the training"
_FROM = Float(min=0, max=1)
_FROM_DOC = (
    "the factor of the first step, f, from which step s of the warm-up has `f + (1 - f) * s / warmup`, as torch's "
    "`LinearLR` and, with 0, the schedules of transformers"
)
_FLOOR = Float(min=0, max=1)
_FLOOR_DOC = "the final rate, as a share of the full rate"
_NO_WARMUP = Quantity(0, "steps")
_FACTOR = Float(above=0, max=1)
_FACTOR_DOC = "what the rate is multiplied by"
_BASE_BATCH = Int(min=1)


@record
class Schedule(Call):
    """A schedule by name; a subclass is its one registration."""

    curve: ClassVar[str]


@call("lr_schedule")
class Constant(Schedule):
    """The same rate throughout."""

    curve: ClassVar = "constant"


@call("lr_schedule")
class WarmupCosine(Schedule):
    """Rises linearly, then falls along a half cosine. Step s, from 0, has the factor `(s + 1) / warmup`. After the
    warm-up it has `floor + (1 - floor) * (1 + cos(pi * t)) / 2` with `t = (s - warmup) / (steps - warmup)`: the first
    factor is `1 / warmup`, and the last belongs to `t = 1 - 1 / (steps - warmup)`. `from = 0` is transformers'
    `get_cosine_schedule_with_warmup`, whose first step has a rate of 0.
    """

    curve: ClassVar = "cosine"

    warmup: Quantity = arg(_WARMUP, _WARMUP_DOC, default=_NO_WARMUP, shown="0 steps")
    floor: float = arg(_FLOOR, _FLOOR_DOC, default=0.0)
    from_: float | None = arg(_FROM, _FROM_DOC, default=None, shown="1 / warmup")


@call("lr_schedule")
class WarmupLinear(Schedule):
    """Rises linearly, then falls linearly. Step s, from 0, has the factor `(s + 1) / warmup`. After the warm-up it has
    `1 - (1 - floor) * (s - warmup) / (steps - warmup)`: the first factor is `1 / warmup`, and the last
    `floor + (1 - floor) / (steps - warmup)`. `from = 0` is transformers' `get_linear_schedule_with_warmup`, whose first
    step has a rate of 0.
    """

    curve: ClassVar = "linear"

    warmup: Quantity = arg(_WARMUP, _WARMUP_DOC, default=_NO_WARMUP, shown="0 steps")
    floor: float = arg(_FLOOR, _FLOOR_DOC, default=0.0)
    from_: float | None = arg(_FROM, _FROM_DOC, default=None, shown="1 / warmup")


@call("lr_schedule")
class WarmupConstant(Schedule):
    """Rises linearly, then stays. Step s, from 0, has `(s + 1) / warmup`, and 1 after the warm-up: the first factor is
    `1 / warmup`, and the last 1. `from = 0` is transformers' `get_constant_schedule_with_warmup`.
    """

    curve: ClassVar = "constant"

    warmup: Quantity = arg(_WARMUP, _WARMUP_DOC, default=_NO_WARMUP, shown="0 steps")
    from_: float | None = arg(_FROM, _FROM_DOC, default=None, shown="1 / warmup")


@call("lr_schedule")
class WarmupStableDecay(Schedule):
    """Rises linearly, stays, and falls at the end (Hu et al. 2024, arXiv:2404.06395). Step s, from 0, has the factor
    `(s + 1) / warmup`, then 1. In the last `decay` steps it has `floor + (1 - floor) * shape(u)` with
    `u = (s - steps + decay) / decay`: the first factor is `1 / warmup`, and the last belongs to `u = 1 - 1 / decay`.
    `from = 0` begins with a rate of 0, as transformers' `get_wsd_schedule`.
    """

    curve: ClassVar = "stable"

    warmup: Quantity = arg(_WARMUP, _WARMUP_DOC, default=_NO_WARMUP, shown="0 steps")
    decay: Quantity = arg(
        measure("steps", "epochs", "ratio", above=0),
        "falls over this at the end: steps, epochs, or a share of the training",
        default=Quantity(0.1, "ratio"),
        shown="10%",
    )
    shape: str = arg(word("linear", "cosine", "sqrt"), "of the fall; `sqrt`: 1 - sqrt(t)", default="linear")
    floor: float = arg(_FLOOR, _FLOOR_DOC, default=0.0)
    from_: float | None = arg(_FROM, _FROM_DOC, default=None, shown="1 / warmup")


@call("lr_schedule")
class OneCycle(Schedule):
    """Rises along a half cosine, then falls along another (Smith and Topin 2018, arXiv:1708.07120)."""

    curve: ClassVar = "one_cycle"

    rise: Quantity = arg(
        measure("steps", "epochs", "ratio", above=0),
        "how long it rises: steps, epochs, or a share of the training",
        default=Quantity(0.3, "ratio"),
        shown="30%",
    )
    start: float = arg(_FLOOR, "the first rate, as a share of the full rate", default=0.04)
    floor: float = arg(_FLOOR, _FLOOR_DOC, default=4e-6)


@call("lr_schedule")
class CosineRestarts(Schedule):
    """Falls along a half cosine, again and again (Loshchilov and Hutter 2017, arXiv:1608.03983). The first factor is
    1, or with a warm-up `1 / warmup`. Step t of a fall of n steps, from 0, has
    `floor + (1 - floor) * (1 + cos(pi * t / n)) / 2`.
    """

    curve: ClassVar = "restarts"

    every: Quantity = arg(measure("steps", "epochs", above=0), "how long the first fall takes")
    growth: int = arg(Int(min=1), "how many times as long each next fall takes", default=1)
    warmup: Quantity = arg(_WARMUP, _WARMUP_DOC, default=_NO_WARMUP, shown="0 steps")
    floor: float = arg(_FLOOR, _FLOOR_DOC, default=0.0)
    from_: float | None = arg(_FROM, _FROM_DOC, default=None, shown="1 / warmup")


@call("lr_schedule")
class Step(Schedule):
    """Multiplied by `factor` every `every`."""

    curve: ClassVar = "step"

    every: Quantity = arg(measure("steps", "epochs", above=0), "how often")
    factor: float = arg(_FACTOR, _FACTOR_DOC, default=0.1)


@call("lr_schedule")
class Multistep(Schedule):
    """Multiplied by `factor` at each of some times."""

    curve: ClassVar = "multistep"

    milestones: tuple[Quantity, ...] = arg(
        ListOf(measure("steps", "epochs", above=0), min_length=1), "when, as in `[30 epochs, 60 epochs]`"
    )
    factor: float = arg(_FACTOR, _FACTOR_DOC, default=0.1)


@call("lr_schedule")
class Exponential(Schedule):
    """Multiplied by `factor` each step or epoch."""

    curve: ClassVar = "exponential"

    factor: float = arg(_FACTOR, _FACTOR_DOC)
    every: Quantity = arg(
        measure("steps", "epochs", above=0), "how often", default=Quantity(1, "epochs"), shown="1 epoch"
    )


@call("lr_schedule")
class Plateau(Schedule):
    """Multiplied by `factor` once a metric of the evaluations gets no better: `torch.optim.lr_scheduler`'s
    ReduceLROnPlateau, each evaluation being one of its steps.
    """

    curve: ClassVar = "plateau"

    metric: str = arg(Name(), METRIC_DOC)
    better: str = arg(word("lowest", "highest"), "the direction in which the metric gets better", default="lowest")
    factor: float = arg(Float(above=0, below=1), _FACTOR_DOC, default=0.1)
    patience: int = arg(Int(min=0), "the evaluations in a row without an improvement that are accepted", default=10)
    threshold: float = arg(Float(min=0), "an improvement is more than this", default=1e-4)
    threshold_mode: str = arg(word("rel", "abs"), "as a share of the best value, or as it is", default="rel")
    cooldown: int = arg(Int(min=0), "the evaluations after a fall that count for nothing", default=0)
    warmup: Quantity = arg(_WARMUP, _WARMUP_DOC, default=_NO_WARMUP, shown="0 steps")
    floor: float = arg(_FLOOR, "the lowest rate, as a share of the full rate", default=0.0)
    from_: float | None = arg(_FROM, _FROM_DOC, default=None, shown="1 / warmup")


@call("lr_schedule", "python", open=True)
class PythonSchedule(PythonCall):
    """`f(step, steps)` of yours, giving the factor on the full rate in a step, from 0 on: a number of at least 0 that
    follows from these two alone.
    """


@call("lr_scale", "linear")
class LinearScale(Call):
    """The rate is multiplied by the batch over `base_batch` (Goyal et al. 2017, arXiv:1706.02677)."""

    base_batch: int = arg(_BASE_BATCH, "the batch for which the rate was chosen")


@call("lr_scale", "sqrt")
class SqrtScale(Call):
    """The rate is multiplied by the square root of the batch over `base_batch`."""

    base_batch: int = arg(_BASE_BATCH, "the batch for which the rate was chosen")
