"""Proofs of the flow of parameters, gradients and global numbers through a step. Each returns the reason why its
proposition fails, or "". verify.py lists the propositions.

Ranks with the same pipeline and tensor coordinate hold copies or shares of the same parameters. They see different
samples or different pieces of a sequence, so a gradient is the sum over these ranks. In the order of ranks they are
neighbours along the context axis, and then the data axis. A sum over the shares and one over the replicas of these is a
sum over all.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator

from dslc.compiler.graph.plan_graph import PlanGraph
from dslc.compiler.graph.proofs.view import Line, View, collectives
from dslc.compiler.ir import program as p
from dslc.compiler.ir.actions import (
    ALWAYS,
    Action,
    Backward,
    Cadence,
    Collective,
    Forward,
    ForwardAhead,
    InputBackward,
    Payload,
    ReduceGradients,
    Reshard,
    Role,
    StageAction,
    StagePass,
    Unshard,
    Update,
    WeightBackward,
)
from dslc.compiler.ir.records import Process, SharedWeight, Stage, Weights
from dslc.compiler.ir.tensors import DTYPE_BYTES
from dslc.compiler.operations.exchange_rules import RULES
from dslc.dsl.record import Record, record


@record
class Holders(Record):
    """The ranks that hold copies or shares of the same parameters: `ranks` of them, at a distance of `stride`."""

    ranks: int
    stride: int


def holders(plan: PlanGraph) -> Holders:
    context = plan.axis("context")
    return Holders(ranks=plan.axis("data").size * context.size, stride=context.stride)


def weights_by_stage(view: View) -> dict[int, dict[str, Weights]]:
    found: dict[int, dict[str, Weights]] = {}
    for name, each in view.plan.of_kind(Weights):
        found.setdefault(each.stage, {})[name] = each
    return found


# ------------------------------------------------------------------------------------------------------------- weights


def weights(view: View) -> str:
    """Checks that weights are cut into equal shares, on ranks that exist, and have a gradient on all holders or none;
    and that each parameter of a stage is among them once.
    """
    ranks = holders(view.plan).ranks
    of_stage = weights_by_stage(view)
    for name, stage in view.plan.of_kind(Stage):
        there = sum(each.numbers for each in of_stage.get(stage.index, {}).values())
        if stage.numbers is not None and there != stage.numbers:
            return f"{name} has {stage.numbers} numbers, and {there} of them among its weights"
    for name, each in view.plan.of_kind(Weights):
        if each.stage not in view.homes:
            return f"{name} are of stage {each.stage}, which does not exist"
        if each.numbers % each.shards or ranks % each.shards:
            return f"{name}: {each.numbers} numbers in {each.shards} shares on {ranks} ranks"
        if (each.dtype is not None) != (each.shards > 1) or (each.freed and each.shards == 1):
            return f"{name} are in {each.shards} shares, gathered as {each.dtype}{' and freed' if each.freed else ''}"
        if (each.trained is not None) != (ranks > 1) or (each.trained or 0) > each.numbers:
            return f"{name} have {each.trained} gradients of {each.numbers} numbers on {ranks} ranks"
    for name, shared in view.plan.of_kind(SharedWeight):
        where = {view.homes.get(stage) for stage in shared.stages}
        if None in where or len(set(shared.stages)) < 2 or (shared.summed and len(where) < 2):
            return f"{name} is on stages {shared.stages}"
    return ""


def gathered(view: View) -> str:  # noqa: C901 - one case for each action
    """Walks each process: a pass has all weights of its stage, and an update none that would be out of date."""
    of_stage = weights_by_stage(view)
    if all(each.shards == 1 for own in of_stage.values() for each in own.values()):
        return next((f"{name} gathers nothing" for name, a in view.actions.items() if _is_gather(a)), "")
    needed = {stage: (_forward(own), _backward(stage, own)) for stage, own in of_stage.items()}
    for process, line in view.lines.items():
        mine = {name: each for own in _on(view, process, of_stage) for name, each in own.items()}
        there: set[str] = set()
        due, open_ = -1, set[int]()  # the stage that is to be gathered next; those that are to be freed
        for name, action in line:
            own = of_stage.get(action.stage, {}) if isinstance(action, StageAction) else {}
            if due >= 0 and not _is_gather(action):
                if _forward(of_stage.get(due, {})) - there:
                    return f"{name} comes before stage {due} is gathered"
                due = -1
            match action:
                case ForwardAhead() | StagePass() if action.stage in needed:
                    is_forward = isinstance(action, ForwardAhead | Forward)
                    missing = needed[action.stage][not is_forward] - there
                    if missing:
                        return f"{name} uses {min(missing)}, which process {process} has not gathered"
                    if is_forward:
                        there -= {each for each, weight in own.items() if weight.freed}
                case Unshard():
                    if own and _forward(own) <= there:
                        return f"{name} has nothing to gather"
                    due = action.stage
                case Reshard():
                    if own and action.stage not in open_:
                        return f"{name} has nothing to free"
                    open_.discard(action.stage)
                    there -= own.keys()
                case Update() if there:
                    return f"{name} leaves {min(there)} gathered as they were before"
                case Collective() if _is_gather(action):
                    reason = _gather(view, name, action, mine, there)
                    if reason:
                        return reason
                    there.update(action.weights)
                    open_ |= {mine[each].stage for each in action.weights}
    return ""


def _is_gather(action: Action) -> bool:
    return isinstance(action, Collective) and action.gathers_parameters


def _on(view: View, process: int, of_stage: dict[int, dict[str, Weights]]) -> Iterator[dict[str, Weights]]:
    """Yields the weights of each stage of a process."""
    coordinate = view.coordinates.get(process)
    return (own for stage, own in of_stage.items() if view.homes.get(stage) == coordinate)


def _forward(own: dict[str, Weights]) -> set[str]:
    return {name for name, each in own.items() if each.shards > 1}


def _backward(stage: int, own: dict[str, Weights]) -> set[str]:
    """Returns the weights that a backward pass surely uses: those after the first that train, as the gradient of their
    input is asked for; in a later stage all."""
    found: set[str] = set()
    flows = stage > 0
    for name, each in own.items():
        flows = flows or bool(each.trained)
        if flows and each.shards > 1:
            found.add(name)
    return found


def _gather(view: View, name: str, action: Collective, mine: dict[str, Weights], there: set[str]) -> str:
    """Checks that a gather brings whole weights of this process that are not there yet, from the ranks with shares."""
    if foreign := set(action.weights) - mine.keys():
        return f"{name} gathers {min(foreign)}, which is not on process {action.process}"
    if there & set(action.weights):
        return f"{name} gathers {min(there & set(action.weights))} again"
    own = [mine[each] for each in action.weights]
    size = sum(each.numbers // each.shards * DTYPE_BYTES.get(action.dtype, 0) for each in own)
    groups = {(each.shards, view.plan.axis("context").stride) for each in own}
    if (action.count, action.bytes) != (len(own), size) or {each.dtype for each in own} != {action.dtype}:
        return f"{name} gathers {action.count} weights of {action.bytes} bytes, and they are {len(own)} of {size}"
    return "" if groups == {action.group} else f"{name} is not among the ranks that have the shares"


# ----------------------------------------------------------------------------------------------------------- gradients


def summed(view: View) -> str:
    """Walks each process: an update finds each gradient that a backward pass made, once, summed over all holders; or
    `agreed` proves how they agree otherwise.
    """
    of_stage = weights_by_stage(view)
    step = view.plan.find(p.GradientStep)
    agreed = step is not None and step.exchange is not None and step.kind != "fsdp"
    if agreed and step is not None and step.kind == "local":
        return _averages(view)
    for process in view.lines:
        sums = _Sums(view, process, {s: own for s, own in of_stage.items() if _is_on(view, process, s)})
        if reason := sums.reason_after_update() if agreed else sums.reason():
            return reason
    return _averages(view)


def _is_on(view: View, process: int, stage: int) -> bool:
    return view.homes.get(stage) == view.coordinates.get(process)


def _averages(view: View) -> str:
    """Checks that a loss is multiplied by the ranks over which the engine takes the mean of gradients."""
    step = view.plan.find(p.GradientStep)
    means = holders(view.plan).ranks if step is not None and step.kind in ("ddp", "zero1", "local") else 1
    if step is not None and step.averages != means:
        return f"gradients are a mean over {means} ranks, and the loss is multiplied by {step.averages}"
    return ""


def _sums_in(exchange: p.ExchangeStep) -> str:
    return RULES[exchange.kind].sums_in if exchange.kind in RULES else ""


class _Sums:
    """The gradients of a process as it goes through its line. `_over` has, for each group of weights, the gradients
    that are not used yet: by the number of ranks that they are summed over, the last backward pass that made them.
    `_partial` are the weights whose gradients must be summed along the tensor axis.
    """

    def __init__(self, view: View, process: int, of_stage: dict[int, dict[str, Weights]]) -> None:
        self._view, self._process, self._of_stage = view, process, of_stage
        self._own = {name: each for own in of_stage.values() for name, each in own.items()}
        self._holders = holders(view.plan)
        self._over: dict[str, dict[int, str]] = {name: {} for name, each in self._own.items() if each.trained}
        self._partial: dict[str, str] = {}
        step = view.plan.find(p.GradientStep)
        exchange = step.exchange if step is not None else None
        self._dtype = _sums_in(exchange) if exchange is not None else "float32"
        self._scaled: dict[
            str, tuple[int, int]
        ] = {}  # by weights: the ranks whose next sum has a scale, and their stride
        self._told: list[str] = []  # what has been told to the holders of shared weights
        self._sent = 0

    def reason(self) -> str:
        line = self._view.lines[self._process]
        due = -1  # the stage whose gradients are to be summed next
        for n, (name, action) in enumerate(line):
            reason = ""
            if due >= 0 and not isinstance(action, Collective):
                reason, due = self._missing(name, self._of_stage.get(due, {})), -1
            match action:
                case Backward() | WeightBackward():
                    self._make(name, self._of_stage.get(action.stage, {}))
                case Update():
                    return self._update(name) or self._check_update_exchange(name, line[n + 1 :])
                case ReduceGradients():
                    due = action.stage
                    reason = reason or self._check_gradients_exist(name, self._of_stage.get(due, {}))
                case Collective():
                    reason = self._exchange(name, action)
            if reason:
                return reason
        return ""

    def _exchange(self, name: str, action: Collective) -> str:
        match action.carries:
            case Payload.GRADIENTS:
                return self._sum(name, action)
            case Payload.SCALE | Payload.SCALE_OF_SUMS:
                return self._scale(name, action)
            case Payload.PARTIAL_GRADIENTS if action.weights:
                return self._along_tensor(name, action)
            case Payload.SHARED_GRADIENTS:
                return self._share(name, action)
            case Payload.PARAMETERS if action.operation == "broadcast":
                return f"{name} comes before the update of what it sends"
        return ""

    def reason_after_update(self) -> str:
        """Returns the reason why ranks do not have the updated parameters."""
        line = self._view.lines[self._process]
        update = next(n for n, (_, action) in enumerate(line) if isinstance(action, Update))
        return self._check_update_exchange(line[update][0], line[update + 1 :])

    def _make(self, name: str, own: dict[str, Weights]) -> None:
        for group, each in own.items():
            if each.trained:
                self._over[group][1] = name
            if each.pieces:
                self._partial[group] = name

    def _sum(self, name: str, action: Collective) -> str:
        covered = action.stride // self._holders.stride
        if action.stride != covered * self._holders.stride or action.ranks < 2:
            return f"{name} is not among ranks that hold the same parameters"
        for group in action.weights:
            levels = self._over.get(group, {})
            if covered not in levels:
                return f"{name} sums gradients of {group}, of which there are none, or not over {covered} ranks"
            levels[covered * action.ranks] = levels.pop(covered)
        own = [self._own[group] for group in action.weights]
        size = sum(DTYPE_BYTES.get(self._dtype, 0) * (each.trained or 0) // covered for each in own)
        if (action.count, action.bytes, action.dtype) != (len(own), size, self._dtype):
            return f"{name} sums {action.count} gradients of {action.bytes} bytes, and they are {len(own)} of {size}"
        if self._dtype == "float16":
            for group in action.weights:
                if self._scaled.pop(group, None) != action.group:
                    return f"{name} sums gradients of {group} in half precision, without a scale"
        scatters = [covered == 1 and each.shards > 1 for each in own]
        if any((action.operation == "reduce_scatter") != scatter for scatter in scatters):
            return f"{name} leaves gradients of other numbers than a rank updates"
        return ""

    def _scale(self, name: str, action: Collective) -> str:
        """Checks that gradients have a scale for each group, once, before they are summed in half precision."""
        count = len(action.weights)
        told = (action.operation, action.dtype, action.count, action.bytes)
        sound = ("all_reduce", "float32", count, 4 * count)
        if told != sound or self._scaled.keys() & action.weights or self._dtype != "float16" or not action.weights:
            return f"{name} agrees on the scale of {count} groups by {told}"
        self._scaled |= dict.fromkeys(action.weights, action.group)
        return ""

    def _along_tensor(self, name: str, action: Collective) -> str:
        axis = self._view.plan.axis("tensor")
        if action.group != (axis.size, axis.stride):
            return f"{name} is not along the tensor axis"
        for group in action.weights:
            if self._partial.pop(group, None) is None:
                return f"{name} sums gradients of {group}, which are not partial"
        return ""

    def _share(self, name: str, action: Collective) -> str:
        if reason := self._missing(name):
            return reason
        view, mine = self._view, self._view.coordinates[self._process]
        shared = dict(view.plan.of_kind(SharedWeight))
        if unknown := set(action.weights) - shared.keys():
            return f"{name} carries {min(unknown)}, which no stages share"
        self._told += [f"{action.operation} {each}" for each in action.weights]
        own = [shared[each] for each in action.weights]
        others = [len({view.homes[stage] for stage in each.stages} - {mine}) for each in own]
        size = sum(4 * each.numbers * often for each, often in zip(own, others, strict=True))
        sound = (action.count, action.bytes, action.dtype) == (sum(others), size, "float32")
        return (
            "" if sound else f"{name} has {action.count} messages of {action.bytes} bytes, not {sum(others)} of {size}"
        )

    def _check_gradients_exist(self, name: str, own: Collection[str]) -> str:
        """Checks that gradients of a stage are there to be summed, if any of it has one."""
        levels = [self._over[group] for group in own if group in self._over]
        return f"{name} has nothing to sum" if levels and not any(1 in each for each in levels) else ""

    def _missing(self, name: str, groups: Collection[str] | None = None) -> str:
        """Returns the first gradient, of these groups or of all, that is not summed over all holders."""
        for group, made in self._partial.items() if groups is None else ():
            return (
                f"{name} does not wait for the sum along the tensor axis of the gradients of {group} that {made} made"
            )
        ranks = self._holders.ranks
        for group, levels in self._over.items():
            if groups is not None and group not in groups:
                continue
            late = {covered: made for covered, made in levels.items() if covered != ranks}
            if late or not levels:
                covered, made = next(iter(late.items()), (0, "no pass"))
                return f"{name} uses the gradients of {group} that {made} made, summed over {covered} of {ranks} ranks"
        return ""

    def _update(self, name: str) -> str:
        view, mine = self._view, self._view.coordinates[self._process]
        shared = [
            f"{way} {each}"
            for each, found in view.plan.of_kind(SharedWeight)
            if found.summed and mine in {view.homes[stage] for stage in found.stages}
            for way in ("send", "receive")
        ]
        if sorted(shared) != sorted(self._told):
            return f"{name} comes with other gradients of shared weights than {shared}: {self._told}"
        if self._scaled:
            return f"{name} comes before the gradients of {min(self._scaled)} are summed by the scale that is agreed on"
        return self._missing(name)

    def _check_update_exchange(self, update: str, rest: Line) -> str:
        """Checks that after the update each rank sends all weights that it alone has updated to the other ranks, and
        nothing else.
        """
        process = next(each for _, each in self._view.plan.of_kind(Process) if each.index == self._process)
        dealt, trained = process.dealt, sum(each.trained or 0 for each in self._own.values())
        if dealt and (len(dealt) != self._holders.ranks or sum(dealt) != trained):
            return f"{trained} numbers are dealt out as {dealt} to {self._holders.ranks} ranks"
        step = self._view.plan.find(p.GradientStep)
        if step is not None and (step.kind == "zero1") != bool(dealt):
            return f"{len(dealt)} ranks update a part of the parameters each, under {step.kind}"
        size = sum(4 * numbers or 4 for numbers in dealt)  # torch sends one number for a rank that updates none
        whole = ("broadcast", Payload.PARAMETERS, len(dealt), size, self._holders.ranks, self._holders.stride)
        for name, action in rest:
            sent = None
            if isinstance(action, Collective) and action.weights and set(action.weights) == self._over.keys():
                sent = (action.operation, action.carries, action.count, action.bytes, *action.group)
            if not dealt or sent != whole:
                return f"{update} does not wait for {name}, which does not send what was updated"
        return "" if len(rest) == bool(dealt) else f"after {update} each rank has new numbers of its own part alone"


# ------------------------------------------------------------------------------------------------------- global numbers


def counts(view: View) -> str:
    """Checks that numbers which all ranks use are sums over the ranks that each have a part: the count that divides the
    losses before the first backward pass, the norm and the flag of a gradient between its sums and the update.
    """
    for process, line in view.lines.items():
        asked = _required_sums(view.plan)
        for what, (needed, early, sound) in asked.items():
            found = [each for each in collectives(line) if each[2].carries == what]
            if len(found) != needed:
                return f"process {process} sums {what} {len(found)} times, not {int(needed)}"
            for n, name, action in found:
                if not sound(action):
                    return f"{name} is no sum of {what} over the ranks that have a part of it: {action!r}"
                if (early and _any(line[:n], Backward, InputBackward)) or (not early and _gradients(line[n:])):
                    return f"{name} sums {what} too late or too early"
    return ""


def _any(rest: Line, *kinds: type[Action]) -> bool:
    return any(isinstance(action, kinds) for _, action in rest)


def _gradients(rest: Line) -> bool:
    """True if gradients still change, or have been used."""
    changes = any(Role.GRADIENT in action.carries.role for _, _, action in collectives(rest))
    return changes or _any(rest, Backward, InputBackward, WeightBackward) or not _any(rest, Update)


def _required_sums(plan: PlanGraph) -> dict[Payload, tuple[bool, bool, Callable[[Collective], bool]]]:
    """Returns by content whether the job needs the sum, whether before the backward passes, and the test of one."""
    training, precision, loss = plan.find(p.Training), plan.find(p.PrecisionStep), plan.find(p.LossStep)
    gradients = plan.find(p.GradientStep)
    if training is None or precision is None or loss is None or gradients is None:
        return {}  # a size is unknown that a run needs: nothing says what it asks for
    data = plan.axis("data")
    shards = max((each.shards for _, each in plan.of_kind(Weights)), default=1)
    spread = shards > 1 or any(plan.axis(name).size > 1 for name in ("pipeline", "context", "tensor"))
    spread = spread or gradients.kind == "local"  # each rank has a gradient of its own
    skips = precision.scaled or training.on_nonfinite == "skip"
    searches = gradients.search and data.size > 1
    exchange, when = gradients.exchange, ALWAYS
    if exchange is not None and not exchange.every:  # each rank divides by a count of its own after the first steps
        when = Cadence(until=exchange.alone)
    shares = data.size > 1 and when.until != 0

    # The ranks with the last stage have the losses, and those of a context axis the losses of a piece.
    everyone = plan.axis("pipeline").size * plan.axis("context").size > 1

    def of_samples(action: Collective) -> bool:
        return of_parameters(action) and (action.dtype, action.bytes) == ("int64", 8) and action.when == when

    def of_losses(action: Collective) -> bool:
        world = plan.axis("pipeline").size * plan.axis("pipeline").stride
        everywhere = everyone and (action.ranks, action.stride, action.count) == (world, 1, 1)
        numbers = (action.dtype, action.bytes) == ("float64", 8)
        return (everywhere or (not everyone and of_parameters(action))) and numbers and action.when == when

    def of_parameters(action: Collective) -> bool:
        return (action.ranks, action.stride, action.count) == (data.size, data.stride, 1)

    def of_gradients(action: Collective) -> bool:
        world = plan.axis("pipeline").size * plan.axis("pipeline").stride
        alone = world == data.size  # then neighbours have one copy between them
        apart = data.size if gradients.kind == "local" else shards
        group = (action.ranks, action.stride) == ((apart, 1) if alone else (world, 1))
        return group and (action.dtype, action.count, action.bytes) == ("float32", 1, 4)

    return {
        Payload.KEPT_COUNT: (loss.counts == "kept" and shares, True, of_samples),
        Payload.LOSS_COUNT: (loss.counts == "own" and (shares or everyone), False, of_losses),
        Payload.USED_PARAMETERS: (searches, False, of_parameters),
        Payload.GRADIENT_NORM: (
            training.clip is not None and spread and gradients.kind != "local",
            False,
            of_gradients,
        ),
        Payload.NONFINITE: (skips and spread, False, of_gradients),
    }
