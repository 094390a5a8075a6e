"""The second gate, against our own mistakes: proves a plan graph sound after each pass.

A graph that fails is a bug of the compiler, reported as one: `Unsound` names the proposition and the fault. The proofs
cover the plan, not control flow in a user's module that depends on data.

Propositions, each proved once the passes so far have added its subject:

    devices     every rank has a device, every device one rank; a process has the ranks of its coordinate.
    layers      every layer is on exactly one stage, every stage on exactly one pipeline coordinate.
    samples     every sample of every batch is on exactly one data rank.
    actions     every micro-batch goes forward once and backward once through each stage, where the stage is; each
                process updates once.
    order       the actions of a process form one line: one thing after another.
    fields      each action is well-formed, as its class says.
    ends        a message has one send and one receive, a collective all ranks of its group, with equal operation,
                shape and dtype.
    agreement   the two ends of a pipeline connection issue its messages in one order.
    inputs      every action has its input before it, every message what it carries.
    waits       no rank waits for itself, where a send completes with its receive and a collective with its last rank.
    weights     parameters are cut into equal shares, on ranks that exist; all ranks that hold them have gradients of
                them, or none.
    groups      a collective along an axis is among the ranks that differ on that axis alone.
    gathered    each pass has gathered the parameters of its stage if a rank keeps only a share of them; no parameter is
                used that was gathered before an update.
    scaled      weights that are gathered in 8 bits have scales that the ranks with their shares agreed on.
    summed      an update uses each gradient of a backward pass once. The gradient is summed over exactly the ranks that
                hold a copy or a share of its parameter: over samples, pieces of a sequence, the tensor axis and stages
                that share a weight. Where the sum is a mean, the loss is multiplied. The other ranks get what one rank
                alone updates.
    agreed      where ranks agree otherwise than by exact sums of gradients: on what, among which ranks, and when.
    counts      three numbers are sums over the ranks that have a part of them, in time for their use: the count that
                divides the losses, the norm of the gradient, and the flag of a gradient that is not finite.
    compared    a loss that compares samples has the outputs of all micro-batches and of all its ranks before the first
                backward pass. Gradients go back to the ranks that the outputs came from. A loss of pairs sums the
                log-probabilities of each micro-batch over the pieces of its answers, before its backward pass.
    routed      rows that are sent to experts find each expert once, and their results and gradients return.
    balanced    a balance loss has the tokens of each expert of the global batch before the first backward pass.
    capacity    experts with a capacity have the tokens of each expert of the global batch in each forward pass.
    totals      the totals of exchanges that are shown for a process are the sums over its actions.
    held        no stage holds the activations of more micro-batches than the account says.
    memory      the peak is within the limit, and counts the parameters that the rank holds.
    table       the passes of a process are the entries of its row in the schedule's table.

All of it is over classes of ranks: a process node stands for the ranks of one pipeline coordinate, which do the same.
That is enough. The groups of the data, context and tensor axes lie within a coordinate (`devices`). The pipeline's
connections join ranks at the same place in two neighbouring coordinates; so a circle of waits among ranks would be one
among their classes. The time taken is linear in the actions of the classes, whatever the number of ranks.
"""

from __future__ import annotations

from collections.abc import Callable

from dslc.compiler.graph.plan_graph import PlanGraph
from dslc.compiler.graph.proofs.exchange import check_inexact_exchange
from dslc.compiler.graph.proofs.experts import balanced, routed, within_capacity
from dslc.compiler.graph.proofs.float8 import scaled
from dslc.compiler.graph.proofs.flow import counts, gathered, summed, weights
from dslc.compiler.graph.proofs.losses import compared
from dslc.compiler.graph.proofs.places import devices, layers, memory, samples
from dslc.compiler.graph.proofs.step import (
    actions,
    check_held_microbatches,
    fields,
    groups,
    inputs,
    order,
    table,
    totals,
)
from dslc.compiler.graph.proofs.view import View, view
from dslc.compiler.graph.proofs.waits import agreement, ends, waits
from dslc.compiler.ir.records import Network

# Each with the first pass that it applies to. Those on a step need the ones before them.
PROPOSITIONS: tuple[tuple[str, str, Callable[[View], str]], ...] = (
    ("devices", "place_processes", devices),
    ("layers", "place_stages", layers),
    ("weights", "hold_weights", weights),
    ("samples", "deal_samples", samples),
    ("actions", "order_actions", actions),
    ("order", "order_actions", order),
    ("fields", "order_actions", fields),
    ("ends", "order_actions", ends),
    ("agreement", "order_actions", agreement),
    ("inputs", "order_actions", inputs),
    ("waits", "order_actions", waits),
    ("groups", "exchange", groups),
    ("gathered", "exchange", gathered),
    ("scaled", "exchange", scaled),
    ("summed", "exchange", summed),
    ("agreed", "exchange", check_inexact_exchange),
    ("counts", "exchange", counts),
    ("compared", "exchange", compared),
    ("routed", "exchange", routed),
    ("balanced", "exchange", balanced),
    ("capacity", "exchange", within_capacity),
    ("totals", "exchange", totals),
    ("held", "order_actions", check_held_microbatches),
    ("memory", "account", memory),
    ("table", "order_actions", table),
)


# Those on exchanges, which are unknown for a user's own network that was not traced.
OF_A_MODEL = frozenset(
    {gathered, scaled, summed, check_inexact_exchange, counts, compared, routed, balanced, within_capacity}
)


class Unsound(Exception):
    """An unsound plan: a bug of the compiler, not a mistake in the job."""

    def __init__(self, proposition: str, reason: str, after: str) -> None:
        super().__init__(f"the plan is unsound after `{after}` ({proposition}): {reason}")
        self.proposition = proposition


def verify(plan: PlanGraph) -> None:
    """Raises `Unsound` unless every applicable proposition holds."""
    seen = view(plan)
    for proposition, needs, check in PROPOSITIONS:
        if needs in plan.done and not (check in OF_A_MODEL and plan.find(Network) is None):
            reason = check(seen)
            if reason:
                raise Unsound(proposition, reason, plan.done[-1])
