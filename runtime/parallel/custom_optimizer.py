"""A user's own optimizer: a function or class that gives a `torch.optim.Optimizer`.

Model: the user's code gets the tensors that this rank updates: parameters, or its rows of sharded ones (it needs no
DTensor); under ZeRO-1 those dealt out to this rank. `OwnOptimizer`, around it, has the parameters themselves. In a step
it multiplies the rates of the user's groups by the schedule's factor, and gives them the gradients of this rank's rows.

Contract: the user's optimizer has each of the tensors once, in any groups, each with an `lr`. Without `no_decay` it is
given a list of tensors; else a list of groups; the group without decay has a `weight_decay` of 0. A first argument that
is called `named_parameters` gets pairs (name, tensor) for tensors.

Limits: a rank that holds no row of a parameter has a tensor without numbers for it.
"""

from __future__ import annotations

import contextlib
import inspect
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, TypeAlias

import torch
from torch import Tensor, nn

from dslc.compiler.ir.program import OptimizerStep
from dslc.compiler.trace.private_torch import local_part
from dslc.runtime.optimizer.local_parts import drop_gradients, give_gradients, local_parameter
from dslc.runtime.process.job_line import mark_errors
from dslc.runtime.process.user_code import UserObject, load_function
from dslc.runtime.technique import dynamo
from dslc.runtime.technique.ema import Average, WeightsInPlace

NAMED = "named_parameters"  # the first argument of a function that takes names
CLOSURE = "closure"  # the argument of `step` that evaluates the loss
RATES = ("lr", "initial_lr")  # entries of a group that the schedule sets

ParamGroup: TypeAlias = dict[str, Any]  # of torch.optim: `params`, and options of any kind
Group = tuple[list[tuple[str, Tensor]], bool]  # tensors with their names; true if they do not decay


class OptimizerError(RuntimeError):
    """A user's function has given something else than an optimizer of its parameters. `remedy` is for the user."""

    def __init__(self, message: str, remedy: str = "") -> None:
        super().__init__(message)
        self.remedy = remedy


def make_user_optimizer(step: OptimizerStep, groups: Sequence[Group]) -> torch.optim.Optimizer:
    """Returns the user's optimizer, with an `initial_lr` in each group. Raises as their code, and OptimizerError."""
    assert step.python is not None
    groups = [group for group in groups if group[0]]
    given = [pair for pairs, _ in groups for pair in pairs]
    with mark_errors(step.python.line):
        function = load_function(step.python)
        named = _takes_names(function)
        lists: list[list[tuple[str, Tensor]] | list[Tensor]] = [
            pairs if named else [tensor for _, tensor in pairs] for pairs, _ in groups
        ]
        decaying: list[ParamGroup] = [
            {"params": each} | ({"weight_decay": 0.0} if spared else {})
            for each, (_, spared) in zip(lists, groups, strict=True)
        ]
        parameters = [parameter for each in lists for parameter in each]
        found: UserObject = function(decaying if step.no_decay else parameters, lr=step.lr)
        _check(found, given)
    for group in found.param_groups:
        group["initial_lr"] = float(group["lr"])
    if has_modes(found):
        found.train()
    optimizer: torch.optim.Optimizer = found
    return optimizer


def has_modes(optimizer: object) -> bool:
    """True if an optimizer has a `train()` and an `eval()`: it evaluates other weights than it trains."""
    return all(callable(getattr(optimizer, mode, None)) for mode in ("train", "eval"))


def needs_closure(optimizer: torch.optim.Optimizer) -> bool:
    """True if `step` has an argument without a default, as LBFGS's has."""
    parameters = inspect.signature(optimizer.step).parameters.values()
    return any(
        each.default is each.empty
        and (each.kind is each.POSITIONAL_OR_KEYWORD or (each.kind is each.KEYWORD_ONLY and each.name == CLOSURE))
        for each in parameters
    )


def _closure_step(optimizer: torch.optim.Optimizer) -> Callable[[Any], object]:
    """Returns the `step` of an optimizer that evaluates the loss: its closure may be an argument by name alone."""
    closure = inspect.signature(optimizer.step).parameters.get(CLOSURE)
    if closure is not None and closure.kind is closure.KEYWORD_ONLY:
        return lambda closure: optimizer.step(closure=closure)
    return optimizer.step


def _takes_names(function: Callable[..., object]) -> bool:
    try:
        return next(iter(inspect.signature(function).parameters), "") == NAMED
    except ValueError:  # of a built-in
        return False


def _check(found: object, given: Sequence[tuple[str, Tensor]]) -> None:
    if not isinstance(found, torch.optim.Optimizer):
        raise OptimizerError(f"it gives a {type(found).__name__}, and should give a torch.optim.Optimizer")
    names = {id(tensor): name for name, tensor in given}
    for group in found.param_groups:
        if "lr" not in group:
            raise OptimizerError("a group of its parameters has no `lr`, which the schedule sets")
        for tensor in group["params"]:
            if names.pop(id(tensor), None) is None:
                raise OptimizerError("its groups have a parameter twice, or one that it was not given")
    if names:
        raise OptimizerError(
            f"its groups lack `{next(iter(names.values()))}`, which trains: `model.freeze` is for what does not"
        )


class OwnOptimizer(torch.optim.Optimizer):
    """Runs a user's optimizer over `groups` of parameters; see the module's docstring.

    `own` is the user's; None if this rank has nothing to update. `pairs` are the parameters and, of each, the tensor
    that the user's optimizer updates, which shares its memory.
    """

    def __init__(self, step: OptimizerStep, groups: Iterable[ParamGroup], names: Mapping[int, str]) -> None:
        given = [dict(group) for group in groups]
        super().__init__(given, {"lr": step.lr})
        self.pairs: list[tuple[Tensor, Tensor]] = []
        mine: list[Group] = []
        for group in given:
            found = [(parameter, local_parameter(parameter)) for parameter in group["params"]]
            self.pairs += found
            mine.append(([(names[id(parameter)], part) for parameter, part in found], "weight_decay" in group))
        self.own = make_user_optimizer(step, mine) if self.pairs else None
        self.needs_closure = self.own is not None and (step.closure or needs_closure(self.own))
        if self.own is not None:
            self.state = self.own.state
            self._update: Callable[..., object] = _closure_step(self.own) if self.needs_closure else _step_of(self.own)

    @property
    def has_modes(self) -> bool:
        return has_modes(self.own)

    @torch.no_grad()
    def evaluates(self, on: bool) -> None:
        """Calls the user's `eval()`, or `train()`."""
        own: UserObject = self.own
        for parameter, part in self.pairs:
            if parameter is not part:
                part.data = local_part(parameter).detach()
        own.eval() if on else own.train()

    def step(self, closure: Callable[[], object] | None = None) -> None:  # type: ignore[override]
        """Updates the parameters. A `closure` is handed to an optimizer that needs one, and to no other."""
        if self.own is None:
            return
        rate, full = self.param_groups[0]["lr"], self.param_groups[0]["initial_lr"]
        for group in self.own.param_groups:
            own = group["initial_lr"]
            now = rate if own == full else own * (rate / full)
            if isinstance(group["lr"], Tensor):
                group["lr"].fill_(now)
            else:
                group["lr"] = now
        give_gradients(self.pairs)
        if self.needs_closure:
            self._update(closure)
        else:
            self._update()
        drop_gradients(self.pairs)


def _step_of(optimizer: torch.optim.Optimizer) -> Callable[..., object]:
    """Returns `optimizer.step`; of one of torch's own without the wrapper that loads the compiler."""
    kind = type(optimizer)
    return dynamo.plain_step(optimizer) if kind.step.__module__.startswith("torch.optim.") else optimizer.step


def weights_in_place(
    average: Average | None, model: nn.Module, optimizer: torch.optim.Optimizer
) -> WeightsInPlace | None:
    """Returns what puts the weights of an evaluation into a model: `average`, or an optimizer with `train()` and
    `eval()`; None if there is neither. Raises OptimizerError for both, and for an optimizer that has some of the
    parameters alone.
    """
    own = getattr(optimizer, "optim", optimizer)
    if not isinstance(own, OwnOptimizer) or not own.has_modes:
        return average
    if average is not None or own is not optimizer:
        what = "`train.ema`" if average is not None else "`parallelism.zero = 1`"
        raise OptimizerError(f"it has `train()` and `eval()`, which do not go together with {what}")
    return EvaluationWeights(own, model)


class EvaluationWeights(WeightsInPlace):
    """The weights that an optimizer with `train()` and `eval()` evaluates, as schedule-free ones have (Defazio et al.
    2024, arXiv:2405.15682), in a plain model or a rank's part of it.

    `eval()` comes before an evaluation, and before weights are saved; `train()` comes after. The parameters then get
    back the very numbers that they had, so a training does not depend on how often it is evaluated. A checkpoint has
    the weights that train, and the weights of `eval()` as averages (technique/ema.py).
    """

    def __init__(self, optimizer: OwnOptimizer, model: nn.Module) -> None:
        super().__init__(model)
        self._optimizer = optimizer

    def update(self, step: int) -> None:
        """Does nothing: the optimizer keeps its average itself."""

    @torch.no_grad()
    def refresh(self) -> None:
        with self.in_place():
            self.begin()

    @contextlib.contextmanager
    def in_place(self) -> Iterator[None]:
        weights, _ = self.local_parts()
        before = [weight.clone() for weight in weights]
        self._optimizer.evaluates(True)
        try:
            yield
        finally:
            self._optimizer.evaluates(False)
            with torch.no_grad():
                for weight, value in zip(weights, before, strict=True):
                    weight.copy_(value)
