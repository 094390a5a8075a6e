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
    """The ranks that hold copies or shares of the same parameters: `ranks` of them, at a distance of `stride`; with a
    `run`, runs of `run` ranks that share a sequence and are `step` apart, each run `stride` after the one before.
    """

    ranks: int
    stride: int
    run: int = 1
    step: int = 0

    def covered(self, group: tuple[int, ...]) -> int:
        """Returns how many of the ranks are between two neighbours of a group of them; 0 if it is no such group."""
        ranks, stride, run = (*group, 1)[:3]
        if self.run == 1:
            return stride // self.stride if run == 1 and stride % self.stride == 0 else 0
        if run > 1:
            return int((stride, run) == (self.stride, self.run) and ranks % run == 0)
        if stride % self.stride == 0:
            return stride // self.stride * self.run
        return stride // self.step if stride % self.step == 0 and ranks * stride <= self.run * self.step else 0


def holders(plan: PlanGraph) -> Holders:
    context = plan.axis("context")
    return Holders(ranks=plan.axis("data").size * context.size, stride=context.stride)


def holders_of(plan: PlanGraph, group: Weights) -> Holders:
    """Returns the ranks that hold copies or shares of a group's parameters: of experts, those at one place of the
    expert axis.
    """
    everywhere = holders(plan)
    if group.experts == 1:
        return everywhere
    stride, context = plan.axis("data").stride * group.experts, plan.axis("context")
    ranks = everywhere.ranks // group.experts
    if context.size == 1:
        return Holders(ranks=ranks, stride=stride)
    return Holders(ranks=ranks, stride=stride, run=context.size, step=context.stride)


def weights_by_stage(view: View) -> dict[int, dict[str, Weights]]:
    by_stage: dict[int, dict[str, Weights]] = {}
    for name, weights_of_group in view.plan.of_kind(Weights):
        by_stage.setdefault(weights_of_group.stage, {})[name] = weights_of_group
    return by_stage


# ------------------------------------------------------------------------------------------------------------- weights


def weights(view: View) -> str:
    """Checks that weights are cut into equal shares, on ranks that exist, and have a gradient on all holders or none;
    and that each parameter of a stage is among them once.
    """
    of_stage = weights_by_stage(view)
    for name, stage in view.plan.of_kind(Stage):
        numbers_of_stage = sum(weights_of_group.numbers for weights_of_group in of_stage.get(stage.index, {}).values())
        if stage.numbers is not None and numbers_of_stage != stage.numbers:
            return f"{name} has {stage.numbers} numbers, and {numbers_of_stage} of them among its weights"
    for name, group in view.plan.of_kind(Weights):
        if group.stage not in view.homes:
            return f"{name} are of stage {group.stage}, which does not exist"
        ranks = holders_of(view.plan, group).ranks
        if group.numbers % group.shards or ranks % group.shards:
            return f"{name}: {group.numbers} numbers in {group.shards} shares on {ranks} ranks"
        if (group.dtype is not None) != (group.shards > 1) or (group.freed and group.shards == 1):
            return (
                f"{name} are in {group.shards} shares, gathered as {group.dtype}{' and freed' if group.freed else ''}"
            )
        if (group.trained is not None) != (ranks > 1) or (group.trained or 0) > group.numbers:
            return f"{name} have {group.trained} gradients of {group.numbers} numbers on {ranks} ranks"
    for name, shared in view.plan.of_kind(SharedWeight):
        coordinates = {view.homes.get(stage) for stage in shared.stages}
        if None in coordinates or len(set(shared.stages)) < 2 or (shared.summed and len(coordinates) < 2):
            return f"{name} is on stages {shared.stages}"
    return ""


def gathered(view: View) -> str:  # noqa: C901 - one case for each action
    """Walks each process: a pass has all weights of its stage, and an update none that would be out of date."""
    of_stage = weights_by_stage(view)
    if all(group.shards == 1 for of_one_stage in of_stage.values() for group in of_one_stage.values()):
        return next((f"{name} gathers nothing" for name, a in view.actions.items() if _is_gather(a)), "")
    needed = {
        stage: (_forward(of_one_stage), _backward(stage, of_one_stage)) for stage, of_one_stage in of_stage.items()
    }
    for process, line in view.lines.items():
        mine = {name: group for of_one_stage in _on(view, process, of_stage) for name, group in of_one_stage.items()}
        in_memory: set[str] = set()
        due, open_ = -1, set[int]()  # the stage that is to be gathered next; those that are to be freed
        for name, action in line:
            weights_here = of_stage.get(action.stage, {}) if isinstance(action, StageAction) else {}
            if due >= 0 and not _is_gather(action):
                if _forward(of_stage.get(due, {})) - in_memory:
                    return f"{name} comes before stage {due} is gathered"
                due = -1
            match action:
                case ForwardAhead() | StagePass() if action.stage in needed:
                    is_forward = isinstance(action, ForwardAhead | Forward)
                    missing = needed[action.stage][not is_forward] - in_memory
                    if missing:
                        return f"{name} uses {min(missing)}, which process {process} has not gathered"
                    if is_forward:
                        in_memory -= {group for group, weight in weights_here.items() if weight.freed}
                case Unshard():
                    if weights_here and _forward(weights_here) <= in_memory:
                        return f"{name} has nothing to gather"
                    due = action.stage
                case Reshard():
                    if weights_here and action.stage not in open_:
                        return f"{name} has nothing to free"
                    open_.discard(action.stage)
                    in_memory -= weights_here.keys()
                case Update() if in_memory:
                    return f"{name} leaves {min(in_memory)} gathered as they were before"
                case Collective() if _is_gather(action):
                    reason = _gather(view, name, action, mine, in_memory)
                    if reason:
                        return reason
                    in_memory.update(action.weights)
                    open_ |= {mine[group].stage for group in action.weights}
    return ""


def _is_gather(action: Action) -> bool:
    return isinstance(action, Collective) and action.gathers_parameters


def _on(view: View, process: int, of_stage: dict[int, dict[str, Weights]]) -> Iterator[dict[str, Weights]]:
    coordinate = view.coordinates.get(process)
    return (of_one_stage for stage, of_one_stage in of_stage.items() if view.homes.get(stage) == coordinate)


def _forward(groups: dict[str, Weights]) -> set[str]:
    return {name for name, group in groups.items() if group.shards > 1}


def _backward(stage: int, groups: dict[str, Weights]) -> set[str]:
    """Returns the weights that a backward pass surely uses: those after the first that train, as the gradient of their
    input is asked for; in a later stage all."""
    needed: set[str] = set()
    flows = stage > 0
    for name, group in groups.items():
        flows = flows or bool(group.trained)
        if flows and group.shards > 1:
            needed.add(name)
    return needed


def _gather(view: View, name: str, action: Collective, mine: dict[str, Weights], in_memory: set[str]) -> str:
    """Checks that a gather brings whole weights of this process that are not there yet, from the ranks with shares."""
    if foreign := set(action.weights) - mine.keys():
        return f"{name} gathers {min(foreign)}, which is not on process {action.process}"
    if in_memory & set(action.weights):
        return f"{name} gathers {min(in_memory & set(action.weights))} again"
    members = [mine[group_name] for group_name in action.weights]
    size = sum(group.sent_bytes for group in members)
    neighbours = {holders_of(view.plan, group).covered(action.group) for group in members}
    shards = {group.shards for group in members}
    if (action.count, action.bytes) != (len(members), size) or {group.dtype for group in members} != {action.dtype}:
        return f"{name} gathers {action.count} weights of {action.bytes} bytes, and they are {len(members)} of {size}"
    sound = neighbours == {1} and shards == {action.ranks}
    return "" if sound else f"{name} is not among the ranks that have the shares"


# ----------------------------------------------------------------------------------------------------------- gradients


def summed(view: View) -> str:
    """Walks each process: an update finds each gradient that a backward pass made, once, summed over all holders; or
    `agreed` proves how they agree otherwise.
    """
    of_stage = weights_by_stage(view)
    step = view.plan.find(p.GradientStep)
    follows_exchange = step is not None and step.exchange is not None and step.kind != "fsdp"
    if follows_exchange and step is not None and step.kind == "local":
        return _averages(view)
    for process in view.lines:
        sums = _Sums(
            view, process, {s: of_one_stage for s, of_one_stage in of_stage.items() if _is_on(view, process, s)}
        )
        if reason := sums.reason_after_update() if follows_exchange else sums.reason():
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
        self._own = {name: group for of_one_stage in of_stage.values() for name, group in of_one_stage.items()}
        self._holders = holders(view.plan)
        self._over: dict[str, dict[int, str]] = {name: {} for name, group in self._own.items() if group.trained}
        self._partial: dict[str, str] = {}
        step = view.plan.find(p.GradientStep)
        exchange = step.exchange if step is not None else None
        self._dtype = _sums_in(exchange) if exchange is not None else "float32"
        self._scaled: dict[
            str, tuple[int, ...]
        ] = {}  # by weights: the ranks whose next sum has a scale, and their stride
        self._told: list[str] = []  # what has been told to the holders of shared weights

    def reason(self) -> str:
        line = self._view.lines[self._process]
        due = -1  # the stage whose gradients are to be summed next
        for n, (name, action) in enumerate(line):
            reason = ""
            if due >= 0 and not isinstance(action, Collective):
                reason, due = self._missing(name, self._of_stage.get(due, {})), -1
            match action:
                case Backward() | WeightBackward():
                    reason = reason or self._check_not_shared(name, action.stage)
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

    def _check_not_shared(self, name: str, stage: int) -> str:
        """Checks that the gradients of a stage's shared weights have not gone to the other holders."""
        for shared_name, weight in self._view.plan.of_kind(SharedWeight):
            if stage in weight.stages and f"send {shared_name}" in self._told:
                return f"{name} makes a gradient of {shared_name} after its gradients have gone to the other holders"
        return ""

    def _make(self, name: str, groups: dict[str, Weights]) -> None:
        for group, weights_of_group in groups.items():
            if weights_of_group.trained:
                self._over[group][1] = name
            if weights_of_group.pieces:
                self._partial[group] = name

    def _sum(self, name: str, action: Collective) -> str:
        if missing := [group for group in action.weights if group not in self._own]:
            return f"{name} sums gradients of {missing[0]}, of which there are none"
        members = {holders_of(self._view.plan, self._own[group]) for group in action.weights} or {self._holders}
        covered = min(each.covered(action.group) for each in members)
        if len(members) > 1 or not covered or action.ranks < 2:
            return f"{name} is not among ranks that hold the same parameters"
        for group in action.weights:
            levels = self._over.get(group, {})
            if covered not in levels:
                return f"{name} sums gradients of {group}, of which there are none, or not over {covered} ranks"
            levels[covered * action.ranks] = levels.pop(covered)
        groups = [self._own[group] for group in action.weights]
        size = sum(
            DTYPE_BYTES.get(self._dtype, 0) * (weights_of_group.trained or 0) // covered for weights_of_group in groups
        )
        if (action.count, action.bytes, action.dtype) != (len(groups), size, self._dtype):
            return f"{name} sums {action.count} gradients of {action.bytes} bytes, and they are {len(groups)} of {size}"
        if self._dtype == "float16":
            for group in action.weights:
                if self._scaled.pop(group, None) != action.group:
                    return f"{name} sums gradients of {group} in half precision, without a scale"
        scatters = [covered == 1 and weights_of_group.shards > 1 for weights_of_group in groups]
        if any((action.operation == "reduce_scatter") != scatter for scatter in scatters):
            return f"{name} leaves gradients of other numbers than a rank updates"
        return ""

    def _scale(self, name: str, action: Collective) -> str:
        """Checks that gradients have a scale for each group, once, before they are summed in half precision."""
        count = len(action.weights)
        collective = (action.operation, action.dtype, action.count, action.bytes)
        sound = ("all_reduce", "float32", count, 4 * count)
        if (
            collective != sound
            or self._scaled.keys() & action.weights
            or self._dtype != "float16"
            or not action.weights
        ):
            return f"{name} agrees on the scale of {count} groups by {collective}"
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
        self._told += [f"{action.operation} {shared_name}" for shared_name in action.weights]
        shared_weights = [shared[shared_name] for shared_name in action.weights]
        other_counts = [
            len({view.homes[stage] for stage in shared_weight.stages} - {mine}) for shared_weight in shared_weights
        ]
        size = sum(
            4 * shared_weight.numbers * often for shared_weight, often in zip(shared_weights, other_counts, strict=True)
        )
        sound = (action.count, action.bytes, action.dtype) == (sum(other_counts), size, "float32")
        return (
            ""
            if sound
            else f"{name} has {action.count} messages of {action.bytes} bytes, not {sum(other_counts)} of {size}"
        )

    def _check_gradients_exist(self, name: str, groups: Collection[str]) -> str:
        """Checks that gradients of a stage are there to be summed, if any of it has one."""
        levels = [self._over[group] for group in groups if group in self._over]
        return f"{name} has nothing to sum" if levels and not any(1 in level for level in levels) else ""

    def _missing(self, name: str, groups: Collection[str] | None = None) -> str:
        """Returns the first gradient, of these groups or of all, that is not summed over all holders."""
        for group, pass_name in self._partial.items() if groups is None else ():
            return (
                f"{name} does not wait for the sum along the tensor axis of the gradients of {group} that "
                f"{pass_name} made"
            )
        for group, levels in self._over.items():
            if groups is not None and group not in groups:
                continue
            ranks = holders_of(self._view.plan, self._own[group]).ranks
            unfinished = {covered: pass_name for covered, pass_name in levels.items() if covered != ranks}
            if unfinished or not levels:
                covered, pass_name = next(iter(unfinished.items()), (0, "no pass"))
                return (
                    f"{name} uses the gradients of {group} that {pass_name} made, summed over {covered} of "
                    f"{ranks} ranks"
                )
        return ""

    def _update(self, name: str) -> str:
        view, mine = self._view, self._view.coordinates[self._process]
        shared = [
            f"{way} {shared_name}"
            for shared_name, shared_weight in view.plan.of_kind(SharedWeight)
            if shared_weight.summed and mine in {view.homes[stage] for stage in shared_weight.stages}
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
        process = next(node for _, node in self._view.plan.of_kind(Process) if node.index == self._process)
        dealt, trained = process.dealt, sum(group.trained or 0 for group in self._own.values())
        if dealt and (len(dealt) != self._holders.ranks or sum(dealt) != trained):
            return f"{trained} numbers are dealt out as {dealt} to {self._holders.ranks} ranks"
        step = self._view.plan.find(p.GradientStep)
        if step is not None and (step.kind == "zero1") != bool(dealt):
            return f"{len(dealt)} ranks update a part of the parameters each, under {step.kind}"
        size = sum(4 * numbers or 4 for numbers in dealt)  # torch sends one number for a rank that updates none
        broadcast = ("broadcast", Payload.PARAMETERS, len(dealt), size, self._holders.ranks, self._holders.stride)
        for name, action in rest:
            broadcast_found = None
            if isinstance(action, Collective) and action.weights and set(action.weights) == self._over.keys():
                broadcast_found = (action.operation, action.carries, action.count, action.bytes, *action.group)
            if not dealt or broadcast_found != broadcast:
                return f"{update} does not wait for {name}, which does not send what was updated"
        return "" if len(rest) == bool(dealt) else f"after {update} each rank has new numbers of its own part alone"


# ------------------------------------------------------------------------------------------------------- global numbers


def counts(view: View) -> str:
    """Checks that numbers which all ranks use are sums over the ranks that each have a part: the count that divides the
    losses before the first backward pass, the norm and the flag of a gradient between its sums and the update.
    """
    for process, line in view.lines.items():
        required = _required_sums(view.plan)
        for what, (needed, early, sound) in required.items():
            entries = [entry for entry in collectives(line) if entry[2].carries == what]
            if len(entries) != needed:
                return f"process {process} sums {what} {len(entries)} times, not {int(needed)}"
            for n, name, action in entries:
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
    shards = max((group.shards for _, group in plan.of_kind(Weights)), default=1)
    has_experts = plan.find(p.ExpertParallelStep) is not None
    spread = shards > 1 or has_experts or any(plan.axis(name).size > 1 for name in ("pipeline", "context", "tensor"))
    spread = spread or gradients.kind == "local"  # each rank has a gradient of its own
    skips = precision.scaled or training.on_nonfinite == "skip"
    searches = gradients.search and data.size > 1
    exchange, cadence = gradients.exchange, ALWAYS
    if exchange is not None and not exchange.every:  # each rank divides by a count of its own after the first steps
        cadence = Cadence(until=exchange.alone)
    shares = data.size > 1 and cadence.until != 0

    # The ranks with the last stage have the losses, and those of a context axis the losses of a piece.
    spans_axes = plan.axis("pipeline").size * plan.axis("context").size > 1

    def of_samples(action: Collective) -> bool:
        return of_parameters(action) and (action.dtype, action.bytes) == ("int64", 8) and action.when == cadence

    def of_losses(action: Collective) -> bool:
        world = plan.axis("pipeline").size * plan.axis("pipeline").stride
        everywhere = spans_axes and (action.ranks, action.stride, action.count) == (world, 1, 1)
        numbers = (action.dtype, action.bytes) == ("float64", 8)
        return (everywhere or (not spans_axes and of_parameters(action))) and numbers and action.when == cadence

    def of_parameters(action: Collective) -> bool:
        return (action.ranks, action.stride, action.count) == (data.size, data.stride, 1)

    def of_gradients(action: Collective) -> bool:
        world = plan.axis("pipeline").size * plan.axis("pipeline").stride
        has_one_copy = world == data.size and not has_experts  # then neighbours have one copy between them
        members = data.size if gradients.kind == "local" else shards
        group = (action.ranks, action.stride) == ((members, 1) if has_one_copy else (world, 1))
        return group and (action.dtype, action.count, action.bytes) == ("float32", 1, 4)

    return {
        Payload.KEPT_COUNT: (loss.counts == "kept" and shares, True, of_samples),
        Payload.LOSS_COUNT: (loss.counts == "own" and (shares or spans_axes), False, of_losses),
        Payload.USED_PARAMETERS: (searches, False, of_parameters),
        Payload.GRADIENT_NORM: (
            training.clip is not None and spread and gradients.kind != "local",
            False,
            of_gradients,
        ),
        Payload.NONFINITE: (skips and spread, False, of_gradients),
    }
