"""The exchanges: how the ranks of the data axis agree in a step. A class says all that the compiler must know of one
exchange.

They are ordered by what they give up. docs/exchanges.md states the rule of each, runtime/exchange/ carries it out, and
compiler/placement/exchange.py decides among which ranks.
"""

from __future__ import annotations

from typing import ClassVar, Literal

from dslc.dsl.language.registry import Bool, Call, Float, Int, arg, call, measure, word
from dslc.dsl.record import record

Agrees = Literal["gradients", "momenta", "weights"]

_COUNT = Int(min=1)
_INTERVAL = measure("steps", min=1)
HIERARCHICAL = "with several processes on each of several nodes: exact within a node, exchanged between nodes alone"


@record
class Exchange(Call):
    """The way in which the ranks of the data axis agree in a step.

    `agrees` is what they exchange; weights that are exchanged differ from rank to rank. `gives_up` says, of an exchange
    that is not exact, which of the language's promises it breaks, as the end of a sentence.
    """

    agrees: ClassVar[Agrees] = "gradients"
    ahead: ClassVar[bool] = False  # it begins before the passes of a step, and ends before its update
    gives_up: ClassVar[str] = ""

    @property
    def nodes_first(self) -> bool:
        """True if ranks of one node agree exactly, and the exchange is between nodes."""
        return bool(getattr(self, "hierarchical", False))

    @property
    def step_interval(self) -> int:
        """The steps from one exchange to the next; 0 if the clock decides."""
        return int(getattr(self, "period", getattr(self, "interval", 1)))

    @property
    def exact_steps(self) -> int:
        """The first steps, in which gradients are summed exactly instead."""
        return int(getattr(self, "warmup", 0))


@call("gradients")
class Allreduce(Exchange):
    """Gradients are summed over the ranks, exactly."""


@call("gradients", "fp16")
class Fp16Gradients(Exchange):
    """Gradients are exchanged in half precision, scaled by a power of two so that none overflows."""

    gives_up: ClassVar = "gradients are rounded to 11 bits before they are summed"


@call("gradients", "bf16")
class Bf16Gradients(Exchange):
    """Gradients are exchanged in bfloat16."""

    gives_up: ClassVar = "gradients are rounded to 8 bits before they are summed"


@call("gradients", "powersgd")
class PowerSGD(Exchange):
    """Gradients are exchanged as matrices of low rank, with error feedback (Vogels et al. 2019, arXiv:1905.13727)."""

    gives_up: ClassVar = "gradients of matrices are approximated by matrices of low rank"

    rank: int = arg(_COUNT, "the rank", default=2)


@call("gradients", "bytegrad")
class ByteGrad(Exchange):
    """Gradients are exchanged in 8 bits between minimum and maximum (Bagua)."""

    gives_up: ClassVar = "gradients are rounded to 8 bits, twice"

    hierarchical: bool = arg(Bool(), HIERARCHICAL, default=True)


@call("gradients")
class Decentralized(Exchange):
    """Ranks average weights with peers while they compute, and apply their own gradient to the average (Bagua)."""

    agrees: ClassVar = "weights"
    ahead: ClassVar = True
    gives_up: ClassVar = "the weights of the ranks differ"

    peers: str = arg(
        word("all", "shift_one"), "with whom: all, or one other, which changes from step to step", default="all"
    )
    interval: int = arg(_INTERVAL, "steps from one average to the next", default=1)
    hierarchical: bool = arg(Bool(), HIERARCHICAL, default=True)


@call("gradients")
class LowPrecisionDecentralized(Exchange):
    """Ranks in a ring send their neighbours differences of weights in 8 bits (Bagua)."""

    agrees: ClassVar = "weights"
    gives_up: ClassVar = "the weights of the ranks differ, and are exchanged in 8 bits"

    interval: int = arg(_INTERVAL, "steps from one exchange to the next", default=1)
    hierarchical: bool = arg(Bool(), HIERARCHICAL, default=True)


@call("gradients")
class AsyncAverage(Exchange):
    """Weights are averaged in the background, and no step waits for another rank (Bagua)."""

    agrees: ClassVar = "weights"
    gives_up: ClassVar = "the weights of the ranks differ, and the clock decides when they are averaged"

    interval: float = arg(measure("time", above=0), "from one average to the next", default=0.1, shown="100 ms")
    warmup: int = arg(measure("steps", min=0), "first steps, in which gradients are summed exactly", default=0)
    hierarchical: bool = arg(Bool(), HIERARCHICAL, default=True)

    @property
    def step_interval(self) -> int:
        return 0


@call("gradients", "local_sgd")
class LocalSGD(Exchange):
    """Ranks step alone and average their weights every few steps (Stich 2018, arXiv:1805.09767)."""

    agrees: ClassVar = "weights"
    gives_up: ClassVar = "the weights of the ranks differ between two averages"

    period: int = arg(measure("steps", min=1), "steps from one average to the next", default=8)
    hierarchical: bool = arg(Bool(), HIERARCHICAL, default=True)


@call("gradients", "diloco")
class DiLoCo(Exchange):
    """Ranks step alone; every few steps the mean of what they changed is the gradient of an outer step with Nesterov's
    momentum (Douillard et al. 2023, arXiv:2311.08105).
    """

    agrees: ClassVar = "weights"
    gives_up: ClassVar = "the weights of the ranks differ between two outer steps"

    period: int = arg(measure("steps", min=1), "steps from one outer step to the next", default=100)
    lr: float = arg(Float(above=0), "the outer learning rate", default=0.7)
    momentum: float = arg(Float(min=0, below=1), "the outer momentum", default=0.9)
    hierarchical: bool = arg(Bool(), HIERARCHICAL, default=True)
