"""The second gate, against our own mistakes: proves a plan graph sound after each pass.

A graph that fails is a bug of the compiler, reported as one: `Unsound` names the proposition and the fault. The proofs
cover the plan, not control flow in a user's module that depends on data.

Propositions, each proved once the passes so far have added its subject:

    devices     every rank has a device, every device one rank; the ranks of a process are those of its coordinate
    layers      every layer is on exactly one stage, every stage on exactly one pipeline coordinate
    samples     every sample of every batch is on exactly one data rank
    actions     every micro-batch goes forward once and backward once through each stage, where the stage is; each
                process updates once
    order       the actions of a process form one line: one thing after another
    ends        a message has one send and one receive, a collective all ranks of its group, with equal operation,
                shape and dtype
    fields      each action says what one of its kind says, and nothing else
    agreement   the two ends of a pipeline connection issue its messages in one order
    inputs      every action has its input before it, every message what it carries
    waits       no rank waits for itself, where a send completes with its receive and a collective with its last rank
    exchanges   the collectives and messages are those of the account of traffic, none more and none less
    updates     gradients are agreed on after the backwards that make them, and before the update
    held        no stage holds the activations of more micro-batches than the account says
    memory      the peak is within the limit

All of it is over classes of ranks: a process node stands for the ranks of one pipeline coordinate, which do the same.
That is enough. The groups of the data, context and tensor axes lie within a coordinate (`devices`), and the pipeline's
connections join ranks that stand alike in two neighbouring ones; so a circle of waits among ranks would be one among
their classes. The time taken is linear in the actions of the classes, whatever the number of ranks.
"""

from __future__ import annotations

from collections.abc import Callable

from dslc.compiler.graph.graph import PlanGraph
from dslc.compiler.graph.proof_places import devices, layers, memory, samples
from dslc.compiler.graph.proof_step import actions, exchanged, fields, held, inputs, order, updates
from dslc.compiler.graph.proof_view import View, view
from dslc.compiler.graph.proof_waits import agreement, ends, waits

# Each with the first pass that it applies to. Those on a step need the ones before them.
PROPOSITIONS: tuple[tuple[str, str, Callable[[View], str]], ...] = (
    ("devices", "place_processes", devices),
    ("layers", "place_stages", layers),
    ("samples", "deal_samples", samples),
    ("actions", "order_actions", actions),
    ("order", "order_actions", order),
    ("ends", "order_actions", ends),
    ("fields", "order_actions", fields),
    ("agreement", "order_actions", agreement),
    ("inputs", "order_actions", inputs),
    ("waits", "order_actions", waits),
    ("exchanges", "exchange", exchanged),
    ("updates", "exchange", updates),
    ("held", "account", held),
    ("memory", "account", memory),
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
        if needs in plan.done:
            reason = check(seen)
            if reason:
                raise Unsound(proposition, reason, plan.done[-1])
