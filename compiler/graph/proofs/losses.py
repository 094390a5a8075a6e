"""The proof of a loss that compares samples or answers: returns the reason why its proposition fails, or "".

Neighbours along the data axis have the samples of a batch one after another. So a loss over some neighbours is over a
contiguous part of the batch. Over the whole axis, it is over the whole batch.
"""

from __future__ import annotations

from dslc.compiler.graph.proofs.view import Line, View, collectives, experts_with_balance_loss
from dslc.compiler.ir.actions import (
    Backward,
    Collective,
    Forward,
    ForwardAhead,
    InputBackward,
    Payload,
    Role,
)
from dslc.compiler.ir.program import LossStep
from dslc.compiler.ir.records import Batches, Devices


def compared(view: View) -> str:
    """Checks a loss that compares samples: it has all outputs, of its micro-batches and of its ranks, before the first
    backward pass. Each output's gradient goes back to the rank that the output came from. No other loss exchanges
    outputs. Checks a loss that compares answers: it has each answer whole.
    """
    loss = view.plan.find(LossStep)
    if loss is None:
        return ""  # a size is unknown that a run needs: nothing says what it compares
    microbatches = view.plan.one(Batches).microbatches
    has_balance_loss = next(experts_with_balance_loss(view.plan), None) is not None
    is_counted_ahead = has_balance_loss and view.plan.axis("pipeline").size == 1
    data, devices = view.plan.axis("data"), view.plan.one(Devices)
    if loss.together and (
        data.size % loss.together or not _fits(loss.together, data.size, devices.processes // data.stride)
    ):
        return f"a loss compares the samples of {loss.together} of {data.size} ranks, which are neither all nor a node"
    for process, line in view.lines.items():
        microbatches_early = [action.microbatch for _, action in line if isinstance(action, ForwardAhead)]
        expected = list(range(microbatches)) if (loss.together or is_counted_ahead) and microbatches > 1 else []
        if microbatches_early != expected or any(
            isinstance(action, ForwardAhead) and _has_started_passes(line[:n]) for n, (_, action) in enumerate(line)
        ):
            return (
                f"process {process} runs forward passes of micro-batches {microbatches_early} ahead, and not of "
                f"{expected}"
            )
        reason = _exchanges(line, loss, (loss.together, data.stride))
        reason = reason or _sums_of_answers(view, process, line, loss)
        if reason:
            return f"process {process}: {reason}"
    return ""


def _sums_of_answers(view: View, process: int, line: Line, loss: LossStep) -> str:
    """Checks that a loss of pairs sums each answer over the ranks that have pieces of it, where its output is."""
    context, last = view.plan.axis("context"), len(view.homes) - 1
    needed = loss.rows > 1 and context.size > 1 and view.homes[last] == view.coordinates[process]
    missing: int | None = None  # the micro-batch whose answers are in pieces
    for name, action in line:
        if isinstance(action, Forward) and action.stage == last and needed:
            if missing is not None:
                return f"{name} comes before the answers of micro-batch {missing} are summed over their pieces"
            missing = action.microbatch
        elif isinstance(action, Backward | InputBackward) and action.microbatch == missing:
            return f"{name} comes before the answers of micro-batch {missing} are summed over their pieces"
        elif isinstance(action, Collective) and action.carries == Payload.ANSWER_SUMS:
            sums = action.operation, action.count, action.group
            if missing is None or sums != ("all_reduce", 1, (context.size, context.stride)):
                return f"{name} is no sum over the pieces of the answers of a micro-batch"
            missing = None
    return "" if missing is None else f"the answers of micro-batch {missing} are in pieces"


def _fits(compared_ranks: int, ranks: int, of_a_node: int) -> bool:
    return compared_ranks == ranks or compared_ranks == max(1, of_a_node)


def _has_started_passes(line_before: Line) -> bool:
    return any(isinstance(action, Forward | Backward) for _, action in line_before)


def _exchanges(line: Line, loss: LossStep, group: tuple[int, int]) -> str:
    exchanges: dict[Payload, tuple[int, Collective]] = {}
    for n, name, action in collectives(line):
        if Role.COMPARISON not in action.carries.role:
            continue
        if action.carries in exchanges or action.group != group or action.count != 1:
            return f"{name} is no exchange of {action.carries} over the ranks whose samples are compared"
        exchanges[action.carries] = n, action
    needed = (
        {Payload.OUTPUTS} | ({Payload.OUTPUT_GRADIENTS} if loss.kind == "contrastive" else {Payload.TARGETS})
        if loss.together > 1
        else set()
    )
    if needed - exchanges.keys() or (exchanges.keys() - needed - {Payload.TARGETS}) or (exchanges and not needed):
        return f"a loss over {loss.together} ranks exchanges {sorted(exchanges)}"
    first_backward = next((n for n, (_, action) in enumerate(line) if isinstance(action, Backward)), len(line))
    makes_outputs_early = any(isinstance(action, ForwardAhead) for _, action in line)
    kind = ForwardAhead if makes_outputs_early else Forward
    latest_source = max((n for n, (_, action) in enumerate(line) if isinstance(action, kind)), default=-1)
    for what, (n, action) in exchanges.items():
        operation = "reduce_scatter" if what == Payload.OUTPUT_GRADIENTS else "all_gather"
        if action.operation != operation or not latest_source < n < first_backward:
            return f"{what} are exchanged by {action.operation}, too early or too late"
    if Payload.OUTPUT_GRADIENTS in exchanges:
        (outputs_place, gather), (back, scatter) = exchanges[Payload.OUTPUTS], exchanges[Payload.OUTPUT_GRADIENTS]
        if outputs_place > back or scatter.bytes != gather.bytes * loss.together or scatter.dtype != gather.dtype:
            return (
                f"{scatter.bytes} bytes of gradients go back for {gather.bytes} of outputs from {loss.together} ranks"
            )
    return ""
