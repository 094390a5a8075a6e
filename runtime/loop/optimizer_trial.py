"""Tries a user's own optimizer before any rank starts: what it keeps, and what may be divided among ranks.

Model: its state is measured by steps on the model's parameters, on the meta device or, if its code cannot run there, on
numbers. Then a few parameters, made smaller, are trained by random gradients: all at once and each alone, whole and in
rows and columns, from two seeds, and with a checkpoint between. Updates that agree to `CLOSE` of the largest are equal.

Contract: `try_out` raises as the user's code does, and OptimizerError for an object that is no optimizer. A parameter
whose smaller copy is kept otherwise (a quantised state of large parameters alone) is tried whole, if it is not too
large.

Limits: temporary tensors of an update that torch compiles, or that works on all parameters at once on GPUs alone, are
not counted. An optimizer that treats parameters otherwise from a size on, and keeps the same for them, is not seen to.
"""

from __future__ import annotations

import sys
import weakref
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import chain
from math import prod
from pickle import UnpicklingError

import torch
from torch import Tensor, nn

from dslc.compiler.ir.network_facts import OptimizerFacts, StateFact
from dslc.compiler.ir.parameter_names import matches
from dslc.compiler.ir.program import OptimizerStep
from dslc.compiler.trace.code_place import line_of
from dslc.compiler.trace.private_torch import COMPILER, Operator, TorchDispatchMode, storage_identity, tree_leaves
from dslc.runtime.checkpoint.custom_optimizer_state import OwnState, inner_tensors
from dslc.runtime.parallel.custom_optimizer import RATES, OptimizerError, OwnOptimizer, has_modes

CLOSE = 1e-5
STEPS = (1.0, 0.5, 0.5, 0.25)  # factors of the learning rate
LARGEST = 2**22  # numbers of parameters that are tried with real numbers, in all
SMALL = 8  # rows and columns of a smaller copy
EACH = 3  # parameters of one kind that are tried
TRIED_WITH_CLOSURE = 8  # parameters that are tried together
GROWING, SETTLED = 60, 4  # steps in which a state may grow, and after which it has its size
_UNKNOWN = (("weight", (8, 6)), ("bias", (8,)), ("kernel", (4, 3, 2, 2)))

Kind = tuple[StateFact, ...]
Named = tuple[tuple[str, ...], tuple[int, ...]]  # all names of a parameter, and its shape


@dataclass(frozen=True)
class _TrialMeasurements:
    kinds: dict[str, Kind]
    scratches: dict[str, int]
    at_once: bool
    decays: bool
    modes: bool


def try_out(step: OptimizerStep, parameters: Sequence[Named]) -> OptimizerFacts:
    """Returns the facts of an optimizer over `parameters`; without any, over parameters of some shapes."""
    named = parameters or [((name,), shape) for name, shape in _UNKNOWN]
    if _TrialOptimizer(step, [(names, torch.ones(_small(shape))) for names, shape in named]).optimizer.needs_closure:
        return _try_with_closure(step, named)
    try:
        measurements = _measure_trial(step, named)
    except Exception as error:  # of the user's code, which may want a closure that it has a default for
        if not _steps_with_closure(step, named, error):
            raise
        return _try_with_closure(replace(step, closure=True), named)
    trial = _UpdateTrial(step, *_samples(step, named, measurements.kinds))
    facts = _facts_of(measurements, trial)
    if facts.draws:
        return facts
    return replace(facts, alone=trial.coupling_reason(), rows=trial.rows(measurements.kinds))


def _facts_of(measurements: _TrialMeasurements, trial: _UpdateTrial) -> OptimizerFacts:
    trial.follows_the_rate()
    draws, kinds = trial.draws(), sorted(set(measurements.kinds.values()), key=repr)
    return OptimizerFacts(
        kinds=tuple(kinds),
        parameters=tuple(
            (name, kinds.index(kind), measurements.scratches[name]) for name, kind in measurements.kinds.items()
        ),
        at_once=measurements.at_once,
        draws=draws,
        decays=measurements.decays,
        group_state=trial.group_state,
        unkept=not draws and not trial.resumes(),
        modes=measurements.modes,
    )


def _steps_with_closure(step: OptimizerStep, named: Sequence[Named], error: Exception) -> bool:
    """True if an optimizer whose `step()` failed takes a closure. Raises OptimizerError if it calls that too late, or
    fails with one for another reason than without.
    """
    trial_optimizer = _TrialOptimizer(
        replace(step, closure=True), [(names, torch.ones(_small(shape))) for names, shape in named]
    )
    gradients = [torch.ones_like(q) for q in trial_optimizer.parameters]
    failures: list[Exception] = []
    for has_stepped in (False, True):
        try:
            trial_optimizer.ready(gradients, 1.0)
            trial_optimizer.update(steps_first=has_stepped)
        except Exception as failure:  # of the user's code
            failures.append(failure)
            continue
        if has_stepped:
            raise OptimizerError(
                "its `step` uses gradients before it calls the closure, which computes them",
                remedy="call `closure()` first in `step`: each call zeroes the gradients and computes them anew",
            ) from error
        return True
    closure_failure = failures[0]
    if line_of(closure_failure) and _kind_and_text(closure_failure) != _kind_and_text(error):
        raise OptimizerError(
            f"its `step` fails without a closure ({': '.join(_kind_and_text(error))}) and with one "
            f"({': '.join(_kind_and_text(closure_failure))})"
        ).with_traceback(closure_failure.__traceback__) from closure_failure
    return False


def _kind_and_text(error: Exception) -> tuple[str, str]:
    return type(error).__name__, str(error)


def _try_with_closure(step: OptimizerStep, named: Sequence[Named]) -> OptimizerFacts:
    """Returns the facts of an optimizer that evaluates the loss by itself. Its parameters are never shared out."""
    trial = _UpdateTrial(step, [(names, _small(shape)) for names, shape in named[:TRIED_WITH_CLOSURE]], set())
    return replace(_facts_of(_measured_with_closure(step, named), trial), closure=True)


# ------------------------------------------------------------------------------------------------------ measuring


def _measure_trial(step: OptimizerStep, named: Sequence[Named]) -> _TrialMeasurements:
    try:
        return _measured_on("meta", step, named)
    except Exception:  # of the user's code, which may need numbers; what is wrong with it shows there
        _forget_compiled()
        if sum(prod(shape) for _, shape in named) <= LARGEST:
            return _measured_on("cpu", step, named)
    measurements = [_measured_on("cpu", step, [_cut_down(sample)]) for sample in named]
    return _TrialMeasurements(
        kinds={name: kind for measurement in measurements for name, kind in measurement.kinds.items()},
        scratches={name: scratch for measurement in measurements for name, scratch in measurement.scratches.items()},
        at_once=False,
        decays=measurements[0].decays,
        modes=measurements[0].modes,
    )


def _forget_compiled() -> None:
    """Has torch compile functions again whose compilation has failed, if it has compiled any."""
    if COMPILER in sys.modules:
        torch.compiler.reset()


def _cut_down(named: Named) -> Named:
    """Returns a parameter with fewer rows, if it is too large."""
    names, shape = named
    rest = prod(shape[1:])
    return (names, (max(1, LARGEST // rest), *shape[1:])) if prod(shape) > LARGEST else named


def _measured_on(device: str, step: OptimizerStep, named: Sequence[Named]) -> _TrialMeasurements:
    values = [(names, torch.empty(shape, device=device).normal_()) for names, shape in named]
    joint = _TrialOptimizer(step, values)
    joint.go([torch.zeros_like(value) for _, value in values], 1.0)
    kinds = {names[0]: _kind(joint.state_of(n), value) for n, (names, value) in enumerate(values)}
    joint_scratch = _scratch(joint, values)
    scratches: dict[str, int] = {}
    scratch_of: dict[tuple[object, ...], int] = {}
    for names, value in values:
        key = (kinds[names[0]], value.shape)
        if key not in scratch_of:
            single = _TrialOptimizer(step, [(names, value)])
            single.go([torch.zeros_like(value)], 1.0)
            scratch_of[key] = _scratch(single, [(names, value)])
        scratches[names[0]] = scratch_of[key]
    at_once = joint_scratch > 1.5 * max(scratches.values()) if len(scratches) > 1 else False
    user_optimizer = joint.optimizer.own
    assert user_optimizer is not None
    decays = any("weight_decay" in group for group in user_optimizer.param_groups)
    return _TrialMeasurements(kinds, scratches, at_once, decays, has_modes(user_optimizer))


def _measured_with_closure(step: OptimizerStep, named: Sequence[Named]) -> _TrialMeasurements:
    """Measures small copies of the parameters until the state no longer grows. A tensor with as many numbers as a
    parameter, or as all together, counts by the sizes of the model.
    """
    values = [(names, torch.ones(_small(shape))) for names, shape in named]
    trial_optimizer, generator = _TrialOptimizer(step, values), torch.Generator().manual_seed(0)
    sizes: list[int] = []
    while len(sizes) < GROWING and (len(sizes) < SETTLED or len(set(sizes[-SETTLED:])) > 1):
        trial_optimizer.go([torch.randn(value.shape, generator=generator) for _, value in values], 1.0)
        sizes.append(sum(tensor.nbytes for tensor in _tensors_in(list(trial_optimizer.optimizer.state.values()))))
    small, full = sum(value.numel() for _, value in values), sum(prod(shape) for _, shape in named)
    kinds: dict[str, Kind] = {}
    for number, ((names, shape), (_, value)) in enumerate(zip(named, values, strict=True)):
        growth = {value.numel(): prod(shape) / max(1, value.numel()), small: full / max(1, small)}
        state_items = sorted(trial_optimizer.state_of(number).items(), key=str)
        kinds[names[0]] = tuple(_fact_with_closure(name, state, value, growth) for name, state in state_items)
    scratch = _scratch_with_closure(step, values) * full // max(1, small)
    user_optimizer = trial_optimizer.optimizer.own
    assert user_optimizer is not None
    return _TrialMeasurements(
        kinds=kinds,
        scratches={names[0]: scratch if number == 0 else 0 for number, (names, _) in enumerate(named)},
        at_once=True,
        decays=any("weight_decay" in group for group in user_optimizer.param_groups),
        modes=has_modes(user_optimizer),
    )


def _scratch_with_closure(step: OptimizerStep, values: Sequence[tuple[tuple[str, ...], Tensor]]) -> int:
    """Returns the bytes of temporary tensors of a step, without what it adds to the state."""
    trial_optimizer = _TrialOptimizer(step, values)
    targets = [torch.zeros_like(value) for _, value in values]
    trial_optimizer.go(targets, 1.0)
    trial_optimizer.ready(targets, 1.0)
    tensors_before = _tensors_in(list(trial_optimizer.optimizer.state.values()))
    temporaries = _Temporaries([*tensors_before, *targets, *trial_optimizer.parameters])
    with temporaries:
        trial_optimizer.update()
    known_storages = {storage_identity(tensor) for tensor in tensors_before}
    tensors_after = _tensors_in(list(trial_optimizer.optimizer.state.values()))
    return max(
        0,
        temporaries.peak
        - sum(tensor.nbytes for tensor in tensors_after if storage_identity(tensor) not in known_storages),
    )


def _fact_with_closure(name: object, state: object, value: Tensor, growth: Mapping[int, float]) -> StateFact:
    if isinstance(state, Tensor) and state.shape == value.shape:
        return StateFact(name=str(name), form="like", bytes=state.element_size())
    if isinstance(state, int | float):
        return StateFact(name=str(name), form="plain", bytes=0)
    size = sum(tensor.nbytes * growth.get(tensor.numel(), 1.0) for tensor in _tensors_in(state))
    return StateFact(name=str(name), form="other", bytes=int(size))


def _tensors_in(state: object) -> list[Tensor]:
    return [tensor for tensor in tree_leaves(state) if isinstance(tensor, Tensor)]


def _small(shape: tuple[int, ...]) -> tuple[int, ...]:
    """Returns a smaller shape of as many dims."""
    return tuple(min(size, SMALL + dim) for dim, size in enumerate(shape))


def _kind(state_entries: dict[object, object], value: Tensor) -> Kind:
    return tuple(
        _fact(name, state, value) for name, state in sorted(state_entries.items(), key=str) if state is not None
    )


def _fact(name: object, state: object, value: Tensor) -> StateFact:
    if not isinstance(name, str) or "." in name or ":" in name:
        raise OptimizerError(f"it keeps state of a parameter under the name {name!r}, and should use a plain word")
    if isinstance(state, int | float):
        return StateFact(name=name, form="plain", bytes=0)
    if not isinstance(state, Tensor):
        raise OptimizerError(
            f"it keeps `{name}` of a parameter as a {type(state).__name__}: checkpoints take tensors and numbers"
        )
    inner = [tensor for _, tensor in inner_tensors(state)]
    if len(inner) == 1 and inner[0] is state and state.shape == value.shape:
        return StateFact(name=name, form="like", bytes=state.element_size())
    size = sum(tensor.nbytes for tensor in inner)
    return StateFact(name=name, form="number" if state.dim() == 0 else "other", bytes=size)


class _Temporaries(TorchDispatchMode):
    """Records the most bytes that tensors made inside have at one time."""

    def __init__(self, known_tensors: Iterable[Tensor]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.peak: int = 0
        self._live: int = 0
        self._seen: dict[int, weakref.ref[torch.UntypedStorage] | None] = {
            storage_identity(tensor): None for tensor in known_tensors
        }

    def __torch_dispatch__(
        self, func: Operator, types: object, args: tuple[object, ...] = (), kwargs: Mapping[str, object] | None = None
    ) -> object:
        result = func(*args, **(kwargs or {}))
        for tensor in tree_leaves(result):
            if isinstance(tensor, Tensor) and storage_identity(tensor) not in self._seen:
                key, place = storage_identity(tensor), tensor.untyped_storage()
                self._live += place.nbytes()
                self._seen[key] = weakref.ref(place, self._release_callback(key, place.nbytes()))
        self.peak = max(self.peak, self._live)
        return result

    def _release_callback(self, key: int, size: int) -> Callable[[object], None]:
        def release(_: object) -> None:
            self._seen.pop(key, None)
            self._live -= size

        return release


def _scratch(trial_optimizer: _TrialOptimizer, values: Sequence[tuple[tuple[str, ...], Tensor]]) -> int:
    """Returns the bytes of temporary tensors of one more step."""
    trial_optimizer.ready([torch.zeros_like(value) for _, value in values], 1.0)
    gradients = [q.grad for q in trial_optimizer.parameters if q.grad is not None]
    state_values = chain.from_iterable(
        state.values() for state in trial_optimizer.optimizer.state.values() if isinstance(state, dict)
    )
    states = [inner for value in state_values if isinstance(value, Tensor) for _, inner in inner_tensors(value)]
    temporaries = _Temporaries([*states, *gradients, *trial_optimizer.parameters])
    with temporaries:
        try:
            trial_optimizer.optimizer.step()
        except Exception:  # it has done a step before: torch compiles nothing that is watched
            _forget_compiled()
            return 0
    return temporaries.peak


# --------------------------------------------------------------------------------------------------------- training


class _TrialOptimizer:
    """An optimizer over copies of some parameters, as a training makes it."""

    def __init__(self, step: OptimizerStep, values: Sequence[tuple[tuple[str, ...], Tensor]]) -> None:
        self._lr = step.lr
        self.parameters = [nn.Parameter(value.clone()) for _, value in values]
        self.names = {id(q): names[0] for q, (names, _) in zip(self.parameters, values, strict=True)}
        undecayed = [any(matches(step.no_decay, name) for name in names) for names, _ in values]
        groups = [
            {"params": [q for q, lone in zip(self.parameters, undecayed, strict=True) if lone == spared]}
            | ({"weight_decay": 0.0} if spared else {})
            for spared in (False, True)
        ]
        self.optimizer = OwnOptimizer(step, [group for group in groups if group["params"]], self.names)
        for group in self.optimizer.param_groups:
            group["initial_lr"] = step.lr

    def go(self, gradients: Sequence[Tensor], factor: float) -> None:
        self.ready(gradients, factor)
        self.update()

    def update(self, steps_first: bool = False) -> None:
        """Does a step. A closure's loss is a paraboloid around the gradients; `steps_first`: these stay set."""
        if not self.optimizer.needs_closure:
            self.optimizer.step()
            return
        targets = [torch.zeros_like(q) if q.grad is None else q.grad for q in self.parameters]
        evaluations = 0
        for q in self.parameters:
            q.grad = q.grad if steps_first else None

        @torch.enable_grad()
        def closure() -> Tensor:
            nonlocal evaluations
            evaluations += 1
            loss = torch.zeros(())
            for q, target in zip(self.parameters, targets, strict=True):
                way = q.detach() - target
                slope = way * torch.linspace(0.05, 1.0, way.numel()).view_as(way)
                q.grad, loss = slope, loss + (slope * way).sum() / 2
            return loss

        self.optimizer.step(closure)
        if not evaluations:
            raise OptimizerError("its `step` takes a closure and does not call it, so that the step has no loss")

    def ready(self, gradients: Sequence[Tensor], factor: float) -> None:
        for q, gradient in zip(self.parameters, gradients, strict=True):
            q.grad = gradient.clone()
        for group in self.optimizer.param_groups:
            group["lr"] = self._lr * factor

    def state_of(self, number: int) -> dict[object, object]:
        state = self.optimizer.state.get(self.parameters[number])
        return state if isinstance(state, dict) else {}


def _samples(step: OptimizerStep, named: Sequence[Named], kinds: dict[str, Kind]) -> tuple[list[Named], set[str]]:
    """Returns some parameters of each kind, smaller where the state stays alike; and the names of the others."""
    by_form: dict[tuple[object, ...], list[Named]] = {}
    for names, shape in named:
        by_form.setdefault((len(shape), tuple((fact.name, fact.form) for fact in kinds[names[0]])), []).append(
            (names, shape)
        )
    samples, odd, remaining = [], set(), LARGEST
    for candidate in chain.from_iterable(some[:EACH] for some in by_form.values()):
        names, shape = candidate
        small = names, _small(shape)
        if _has_same_state(step, small, kinds[names[0]]):
            samples.append(small)
        elif prod(shape) <= remaining:
            remaining -= prod(shape)
            samples.append(candidate)
        else:
            odd.add(names[0])
            samples.append(small)
    return samples, odd


def _has_same_state(step: OptimizerStep, named: Named, kind: Kind) -> bool:
    """True if a smaller copy of a parameter has the same state."""
    names, shape = named
    trial_optimizer = _TrialOptimizer(step, [(names, torch.ones(shape))])
    trial_optimizer.go([torch.ones(shape)], 1.0)
    return _forms(_kind(trial_optimizer.state_of(0), trial_optimizer.parameters[0])) == _forms(kind)


def _forms(kind: Kind) -> list[tuple[str, str]]:
    return [(fact.name, fact.form) for fact in kind]


class _UpdateTrial:
    """Trains the same parameters again and again. `odd`: those whose smaller copies are kept otherwise."""

    def __init__(self, step: OptimizerStep, named: Sequence[Named], odd: set[str]) -> None:
        self._step, self._odd = step, odd
        generator = torch.Generator().manual_seed(0)
        scale = 10 * step.lr  # so that rounding does not hide an update
        self._values = [(names, torch.randn(shape, generator=generator) * scale) for names, shape in named]
        self._gradients = [[torch.randn(shape, generator=generator) for _, shape in named] for _ in STEPS]
        trial_optimizer = self._trained()
        self._whole = [q.detach() for q in trial_optimizer.parameters]
        self.group_state = self._changed(trial_optimizer)

    def follows_the_rate(self) -> None:
        slower = self._trained(scale=0.5)
        if all(torch.equal(a, b) for a, b in zip(self._whole, slower.parameters, strict=True)):
            raise OptimizerError("its update does not depend on the `lr` of its groups, which the schedule sets")

    def draws(self) -> bool:
        """True if another seed gives another update."""
        return not self._same(self._whole, self._trained(seed=1).parameters)

    def coupling_reason(self) -> str:
        """Returns the reason why a parameter cannot be updated without the other parameters; "" if it can."""
        for n, (names, _) in enumerate(self._values):
            (only,) = self._trained(only=n).parameters
            if not self._same([self._whole[n]], [only], [n]):
                return f"the update of `{names[0]}` is another without the other parameters"
        return ""

    def rows(self, kinds: dict[str, Kind]) -> str:
        """Returns the reason why rows or columns of a parameter cannot be updated alone; "" if they can."""
        for n, (names, value) in enumerate(self._values):
            for fact in kinds[names[0]]:
                if fact.form == "other":
                    return f"what it keeps as `{fact.name}` of `{names[0]}` has neither its shape nor one number"
            if names[0] in self._odd:
                return f"it keeps something else for a smaller `{names[0]}`, and that one is too large to try"
            for dim in range(min(2, value.dim())):
                half = value.shape[dim] // 2 + 1
                pieces = (slice(0, half), slice(half, None), slice(0, 0))
                parts: list[Tensor] = [self._trained(only=n, part=(dim, piece)).parameters[0] for piece in pieces]
                if not self._same([self._whole[n]], [torch.cat(parts, dim)], [n]):
                    return f"the update of {('rows', 'columns')[dim]} of `{names[0]}` is another without the rest of it"
        return ""

    @torch.no_grad()
    def resumes(self) -> bool:
        """True if a training that ends after two steps goes on from what a checkpoint keeps as if it had not ended."""
        interrupted = self._trained(steps=range(2))
        saved_state = OwnState(interrupted.optimizer, interrupted.names, self.group_state)
        try:
            pieces = {(piece.parameter, piece.state): piece.tensor.clone() for piece in saved_state.pieces()}
        except UnpicklingError:
            return False  # it keeps objects of other classes
        states: dict[str, list[str]] = {}
        for name, state in pieces:
            states.setdefault(name, []).append(state)
        values = [(names, q.detach()) for (names, _), q in zip(self._values, interrupted.parameters, strict=True)]
        resumed = _TrialOptimizer(self._step, values)

        def sizes(name: str, state: str) -> Sequence[int]:
            return pieces[name, state].shape

        for piece in OwnState(resumed.optimizer, resumed.names, self.group_state).make(states, sizes):
            piece.tensor.copy_(pieces[piece.parameter, piece.state])
            if piece.taken is not None:
                piece.taken(piece.tensor)
        for n in range(2, len(STEPS)):
            resumed.go(self._gradients[n], STEPS[n])
        return self._same(self._whole, resumed.parameters)

    def _trained(
        self,
        *,
        only: int | None = None,
        part: tuple[int, slice] | None = None,
        seed: int = 0,
        scale: float = 1.0,
        steps: range = range(len(STEPS)),
    ) -> _TrialOptimizer:
        torch.manual_seed(seed)
        numbers = range(len(self._values)) if only is None else (only,)

        def cut(tensor: Tensor) -> Tensor:
            return tensor if part is None else tensor.movedim(part[0], 0)[part[1]].movedim(0, part[0]).contiguous()

        trial_optimizer = _TrialOptimizer(self._step, [(self._values[n][0], cut(self._values[n][1])) for n in numbers])
        for n in steps:
            trial_optimizer.go([cut(self._gradients[n][number]) for number in numbers], STEPS[n] * scale)
        return trial_optimizer

    def _changed(self, final_optimizer: _TrialOptimizer) -> tuple[str, ...]:
        """Returns the entries of groups that updates have changed."""
        initial_optimizer = _TrialOptimizer(self._step, self._values).optimizer.own
        assert initial_optimizer is not None and final_optimizer.optimizer.own is not None
        changed = set()
        for initial_group, final_group in zip(
            initial_optimizer.param_groups, final_optimizer.optimizer.own.param_groups, strict=True
        ):
            for entry, value in final_group.items():
                if entry in ("params", *RATES) or not isinstance(value, int | float | Tensor):
                    continue
                if entry not in initial_group or bool(
                    torch.as_tensor(initial_group[entry]).ne(torch.as_tensor(value)).any()
                ):
                    changed.add(entry)
        return tuple(sorted(changed))

    def _same(
        self, ones: Sequence[Tensor], other_tensors: Sequence[Tensor], which: Sequence[int] | None = None
    ) -> bool:
        """True if values that the same parameters went to are the same."""
        for n, one, other_tensor in zip(which or range(len(ones)), ones, other_tensors, strict=True):
            way = (one - self._values[n][1]).abs().max()
            if not bool((one - other_tensor).abs().max() <= CLOSE * way):
                return False
        return True
