"""Decides how the ranks of the data axis agree in a step, and among which: the exchange of a job.

Model: an exchange has members. Usually each rank of the data axis is one. If the exchange is hierarchical and there are
several nodes with several ranks each, a node is a member. Its ranks sum their gradients exactly in each step, and so
are alike. Each of them exchanges one of the node's `pieces` with the ranks at its place in other nodes.

What is exchanged lies in buckets. Gradients lie in the buckets of DistributedDataParallel; all else in buckets of whole
parameters, in the order of the model (compiler/placement/buckets.py), which no step changes.

Contract: the account, the traffic, the plan graph and the program all use this one decision.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from dslc.compiler.ir.actions import Payload
from dslc.compiler.placement.layout import Layout
from dslc.dsl.language.exchanges import Allreduce
from dslc.dsl.language.job import JobSpec
from dslc.dsl.language.optimizers import Compressed
from dslc.dsl.language.registry import fields
from dslc.dsl.record import Record, record

_DECIDED = ("hierarchical", "period", "interval", "warmup", "freeze")  # arguments that the other fields stand for


@record
class ExchangePolicy(Record):
    """`members` exchange what they have; each consists of `pieces` ranks of a node that hold the same. They do so every
    `every` steps (0: by the clock), after the first `alone` steps, in which gradients are summed exactly over all.
    """

    kind: str
    agrees: Payload
    members: int
    pieces: int
    every: int
    alone: int
    arguments: Mapping[str, Any]
    ahead: bool  # it begins before the passes of a step, and ends before its update
    word: str  # as it is written in the job
    gives_up: str

    @property
    def first_step(self) -> int:
        """The first step with an exchange; by the clock the first that may have one."""
        period = self.every or 1
        return (self.alone // period + 1) * period

    @property
    def differ(self) -> bool:
        """True if the weights of the members differ between two steps."""
        return self.agrees is Payload.WEIGHTS


def exchange_of(job: JobSpec, layout: Layout) -> ExchangePolicy | None:
    """Returns the exchange of a job; None if its ranks sum gradients exactly, or there is one rank."""
    ranks, optimizer, gradients = layout.sizes["data"], job.train.optimizer, job.parallelism.gradients
    if ranks == 1:
        return None
    if isinstance(optimizer, Compressed):
        call, agrees, period, exact_steps = optimizer, "momenta", 1, optimizer.exact_steps
        nodes_first, gives_up = optimizer.hierarchical, "its momentum is compressed, and its second moment frozen"
        arguments: dict[str, object] = {}
    elif isinstance(gradients, Allreduce):
        return None
    else:
        call, agrees, period, exact_steps = gradients, gradients.agrees, gradients.step_interval, gradients.exact_steps  # type: ignore[assignment]
        nodes_first, gives_up = gradients.nodes_first, gradients.gives_up
        arguments = {f.name: getattr(gradients, f.name) for f in fields(type(gradients)) if f.name not in _DECIDED}
        if period == 0:
            arguments["interval"] = gradients.interval  # type: ignore[attr-defined]
    node_ranks = layout.processes if nodes_first and layout.nodes > 1 else 1
    return ExchangePolicy(
        kind=call.word,
        agrees=Payload(agrees),
        members=ranks // node_ranks,
        pieces=node_ranks,
        every=period,
        alone=exact_steps,
        arguments=arguments,
        ahead=gradients.ahead,
        word=call.word,
        gives_up=gives_up,
    )
