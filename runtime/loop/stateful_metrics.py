"""Metrics that keep states: of the `torchmetrics` library, and a user's own.

Model: each rank that has outputs makes its own object and updates it with its batches. At the end rank 0 gathers the
states and puts them together into a new object. Their order is the order of the ranks, and so of the samples. Rank 0
shares the result with all ranks.

Contract: exact over the split on any number of ranks where the states say truly how they add up; `try_out` puts that
to the test. Every rank gets the same result; nan where there was nothing to count.

Source: `torchmetrics.Metric`, https://lightning.ai/docs/torchmetrics/stable/pages/implement.html
"""

from __future__ import annotations

import copy
import math
import warnings
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeAlias

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

from dslc.compiler.ir.program import LossStep, MetricStep
from dslc.compiler.trace.structures import Structure
from dslc.runtime.model.losses import classes_last, match_target, wide, wide_tensors
from dslc.runtime.process.job_line import mark_errors
from dslc.runtime.process.random_numbers import begin_step, preserve_generators
from dslc.runtime.process.records import name_fault
from dslc.runtime.process.user_code import UserObject, load_function
from dslc.runtime.process.vision_library import let_torchvision_load

Value: TypeAlias = "float | list[Value]"  # a number, or a list of them to any depth
States: TypeAlias = dict[str, Any]  # by the name of an attribute, a tensor or a list of tensors
Settings: TypeAlias = dict[str, Any]  # arguments of a torchmetrics class that follow from the output

_REDUCTIONS: Mapping[str, Callable[[list[Tensor]], Tensor]] = {
    "sum": lambda tensors: torch.stack(tensors).sum(0),
    "max": lambda tensors: torch.stack(tensors).amax(0),
    "min": lambda tensors: torch.stack(tensors).amin(0),
    "cat": lambda tensors: torch.cat([torch.atleast_1d(tensor) for tensor in tensors]),
}


_NUMBERS = (int, float, Tensor, np.ndarray, np.number)


class MetricError(RuntimeError):
    """An object that is no metric, or a result that is no number. `remedy` says what to do, if that is known."""

    def __init__(self, message: str, remedy: str = "") -> None:
        super().__init__(message)
        self.remedy = remedy


def keeps(step: MetricStep) -> bool:
    """True for a metric of this file."""
    return step.kind in ("torchmetrics", "python")


def preload(steps: Sequence[MetricStep]) -> None:
    """Imports, in the launcher, the library that each rank would otherwise import (1.2 s)."""
    if any(step.torchmetrics for step in steps):
        let_torchvision_load()  # which it imports
        import torchmetrics  # noqa: F401


class StatefulMetric:
    def __init__(self, step: MetricStep, loss: LossStep, device: torch.device | str = "cpu") -> None:
        self._step, self._loss, self._device = step, loss, device
        self._line = step.python.line if step.python else ""
        self._settings: Settings = {}
        self._object: UserObject = None

    def update(self, output: Structure, target: Structure) -> None:
        """Counts one batch: the model's output, in float32 at least, and the target."""
        with mark_errors(self._line):
            if self._step.kind == "torchmetrics":
                output, target, self._settings = _as_scores(wide(output), target, self._loss)
            if self._object is None:
                self._object = self.make_metric(self._settings)
            self._object.update(wide_tensors(output), target)

    def states(self) -> tuple[Settings, States] | None:
        """Returns its states so far, in the host's memory; None if nothing."""
        if self._object is None:
            return None
        with mark_errors(self._line):
            names = _reductions(self._object)
            state = (
                self._object.metric_state if names is None else {name: getattr(self._object, name) for name in names}
            )
            return self._settings, {name: _moved(value, "cpu") for name, value in state.items()}

    def result(self, rank_states: Sequence[tuple[Settings, States] | None]) -> dict[str, Value]:
        """Returns the values by name, of what the ranks have counted, in their order."""
        counted_states = [state for state in rank_states if state is not None]
        if not counted_states:
            return {self._step.name: math.nan}
        with mark_errors(self._line):
            merged = self.make_metric(counted_states[0][0], "cpu")
            _put_together(merged, [states for _, states in counted_states])
            with warnings.catch_warnings():
                warnings.filterwarnings("ignore", "The ``compute`` method of metric", UserWarning)  # it was merged
                warnings.filterwarnings("ignore", "No (positive|negative) samples in targets", UserWarning)
                value = merged.compute()
                if self._step.torchmetrics == "AUROC":
                    value = _where_defined(merged, value)
                return _values(self._step.name, value)

    def unlisted(self) -> str | None:
        """Returns an attribute that counts and is no state: `update` changes it and `compute` reads it; or None."""
        if self._object is None:
            return None
        fresh, names = vars(self.make_metric(self._settings)), _reductions(self._object)
        states = self._object.metric_state if names is None else names
        name: str
        for name, value in vars(self._object).items():
            of_library = names is None and name.startswith("_")
            if name in states or of_library or not _counts(value) or _equal(value, fresh.get(name)):
                continue
            if not self._is_indifferent(name, value + 1 if isinstance(value, _NUMBERS) else fresh.get(name)):
                return name
        return None

    def _is_indifferent(self, name: str, value: object) -> bool:
        """True if `compute` gives the same with another value of an attribute."""
        changed = copy.deepcopy(self._object)
        setattr(changed, name, value)
        try:
            results = [_values("", copy.deepcopy(metric).compute()) for metric in (self._object, changed)]
        except Exception:  # any kind: the user's code fails without the value
            return False
        return _same(*results)

    def make_metric(self, settings: Settings, device: torch.device | str = "") -> UserObject:
        """Returns a metric that has counted nothing, made with equal random numbers each time. Raises MetricError."""
        with preserve_generators():
            begin_step(0, 0, 0)
            return _on(self._new(settings), device or self._device)

    def _new(self, settings: Settings) -> UserObject:
        step = self._step
        if step.kind == "torchmetrics":
            let_torchvision_load()
            import torchmetrics

            return getattr(torchmetrics, step.torchmetrics)(**step.arguments, **settings)
        assert step.python is not None
        return load_function(step.python)()


def exchange(metrics: Sequence[StatefulMetric], ranks: int, counts: bool) -> dict[str, Value]:
    """Returns all metrics' values by name, on every rank. `counts`: no other rank has the same states."""
    own_states = [metric.states() if counts else None for metric in metrics]
    if ranks == 1:
        return _merged(metrics, [own_states])
    is_rank_0 = dist.get_rank() == 0
    rank_states: list[Any] = [None] * ranks
    dist.gather_object(own_states, rank_states if is_rank_0 else None, dst=0)
    results: list[Any] = [_merged(metrics, rank_states) if is_rank_0 else None]
    dist.broadcast_object_list(results, src=0)
    values: dict[str, Value] = results[0]
    return values


def _merged(metrics: Sequence[StatefulMetric], rank_states: Sequence[Sequence[Any]]) -> dict[str, Value]:
    values: dict[str, Value] = {}
    for number, metric in enumerate(metrics):
        values |= metric.result([of_rank[number] for of_rank in rank_states])
    return values


Batch: TypeAlias = tuple[Any, object]  # an output and a target


def try_out(step: MetricStep, loss: LossStep, batches: Sequence[Batch]) -> list[str]:
    """Tries a metric on all batches at once, and on each apart, put together. Returns the names of its results that are
    numbers. Raises as its code does, and MetricError if it is no metric or the results differ.
    """
    single, *several = (StatefulMetric(step, loss) for _ in range(len(batches) + 2))
    for output, target in _as_one(batches):
        single.update(output, target)
    for part, (output, target) in zip(several, batches, strict=False):
        part.update(output, target)
    once = single.result([single.states()])
    repeated_result = single.result([part.states() for part in several])
    if not _same(once, repeated_result):
        raise MetricError(
            f"it gives {once} over all samples, and {repeated_result} put together from two pieces of them"
        )
    if (name := single.unlisted()) is not None:
        raise MetricError(
            f"it counts in `{name}`, which `states` does not name: that of each rank would be lost",
            remedy=f'make `self.{name}` a tensor, and name it: `states = {{…, "{name}": "sum"}}`, or `max`, `min`, '
            f'`cat`; in a metric of torchmetrics, `self.add_state("{name}", torch.tensor(0), dist_reduce_fx="sum")`',
        )
    return [name for name, value in once.items() if not isinstance(value, list)]


def _counts(value: object) -> bool:
    """True for what a metric may count in: numbers, and collections."""
    return not isinstance(value, bool) and isinstance(value, (*_NUMBERS, list, dict, set, deque))


def _equal(one: Any, another: Any) -> bool:
    """True if an attribute has the value of another object's."""
    if isinstance(one, Tensor | np.ndarray) or isinstance(another, Tensor | np.ndarray):
        return type(one) is type(another) and one.shape == another.shape and bool((one == another).all())
    try:
        return bool(one == another)
    except (RuntimeError, ValueError):  # collections of tensors
        return False


def _as_one(batches: Sequence[Batch]) -> Sequence[Batch]:
    """Returns the same samples as one batch, if all are tensors that differ in their first dim alone."""
    forms = {
        tuple(part.shape[1:] if isinstance(part, Tensor) and part.dim() else None for part in batch)
        for batch in batches
    }
    if len(forms) != 1 or None in next(iter(forms)):
        return batches
    return [tuple(torch.cat(parts) for parts in zip(*batches, strict=True))]  # type: ignore[list-item]


def _same(one: Value | dict[str, Value], another: Value | dict[str, Value]) -> bool:
    if isinstance(one, dict) and isinstance(another, dict):
        return one.keys() == another.keys() and all(_same(one[name], another[name]) for name in one)
    if isinstance(one, list) and isinstance(another, list):
        return len(one) == len(another) and all(map(_same, one, another))
    if isinstance(one, list | dict) or isinstance(another, list | dict):
        return False
    return math.isclose(one, another, rel_tol=1e-4, abs_tol=1e-5) or (math.isnan(one) and math.isnan(another))


# -------------------------------------------------------------------------------------------------------- the objects


def _reductions(metric: object) -> Mapping[str, str] | None:
    """Returns how each state of a user's metric is reduced; None for torchmetrics'. Raises MetricError."""
    for method in ("update", "compute"):
        if not callable(getattr(metric, method, None)):
            raise MetricError(f"{type(metric).__name__} has no `{method}`")
    if hasattr(metric, "merge_state") and hasattr(metric, "metric_state"):
        return None
    names = getattr(metric, "states", None)
    if not isinstance(names, Mapping) or not names or not all(how in _REDUCTIONS for how in names.values()):
        raise MetricError(
            f"{type(metric).__name__} has no `states`, which says of each attribute that counts how those of several "
            'ranks are put together: `{"hits": "sum"}`, or `max`, `min`, `cat`'
        )
    for name in names:
        value = getattr(metric, name, None)
        if not isinstance(value, Tensor) and not (isinstance(value, list) and names[name] == "cat"):
            start = repr(value) if isinstance(value, int | float) else "…"
            raise MetricError(
                f"its state `{name}` is of type {type(value).__name__}, and a state is a tensor",
                remedy=f"`self.{name} = torch.tensor({start})`, as ranks put tensors together",
            )
    return names


def _where_defined(metric: UserObject, value: Tensor) -> Tensor:
    """Returns areas under curves with nan, where torchmetrics has 0, for classes that all samples have, or none."""
    target = torch.cat([torch.atleast_1d(part) for part in metric.target])
    classes = getattr(metric, "num_classes", None)
    if classes is not None:
        target = (target[:, None] == torch.arange(classes, device=target.device)).long()
    defined = (target == 1).any(0) & (target == 0).any(0)
    if not defined.any():
        return torch.full_like(value, math.nan)
    return value.masked_fill(~defined, math.nan) if value.dim() else value


def _put_together(merged: UserObject, rank_states: Sequence[States]) -> None:
    names = _reductions(merged)
    if names is None:
        for states in reversed(rank_states):  # each goes before what is there
            merged.merge_state(states)
        return
    for name, how in names.items():
        of_ranks = [states[name] for states in rank_states]
        if isinstance(of_ranks[0], list):
            setattr(merged, name, [tensor for tensors in of_ranks for tensor in tensors])
        else:
            setattr(merged, name, _REDUCTIONS[how](of_ranks))


def _on(metric: UserObject, device: torch.device | str) -> UserObject:
    names = _reductions(metric)
    if names is None:
        for module in metric.modules():  # rank 0 alone computes; torchmetrics would wait for the others
            module.distributed_available_fn = _is_distributed
        return metric.to(device)
    for name in names:
        setattr(metric, name, _moved(getattr(metric, name), device))
    return metric


def _is_distributed() -> bool:
    """Tells torchmetrics that there are no other processes."""
    return False


def _moved(value: object, device: torch.device | str) -> object:
    if isinstance(value, list | tuple):
        return [_moved(item, device) for item in value]
    return value.detach().to(device) if isinstance(value, Tensor) else value


def _as_scores(output: Tensor, target: Tensor, loss: LossStep) -> tuple[Tensor, Tensor, Settings]:
    """Returns output and target as torchmetrics' classification metrics take them, and the arguments of its task."""
    if loss.kind != "bce":
        scores, labels = classes_last(loss, output, target)
        ignored = {} if loss.ignore is None else {"ignore_index": loss.ignore}
        return scores, labels, {"task": "multiclass", "num_classes": scores.shape[-1], **ignored}
    logits, classes = output.flatten(1), match_target(output, target).flatten(1).long()
    if logits.shape[1] == 1:
        return logits.sigmoid()[:, 0], classes[:, 0], {"task": "binary"}
    return logits.sigmoid(), classes, {"task": "multilabel", "num_labels": logits.shape[1]}


def _values(name: str, metric_result: object) -> dict[str, Value]:
    """Returns the result of a `compute` as plain numbers. Raises MetricError."""
    if isinstance(metric_result, Mapping):
        values = {f"{name}.{key}": _plain(value) for key, value in metric_result.items()}
    else:
        values = {name: _plain(metric_result)}
    for value_name in values:
        if fault := name_fault(value_name):
            raise MetricError(f"its result {value_name!r} needs another name: {fault}")
    return values


def _plain(value: object) -> Value:
    if hasattr(value, "tolist"):  # torch's and numpy's
        value = value.tolist()
    if isinstance(value, list | tuple):
        return [_plain(item) for item in value]
    if isinstance(value, bool):  # records take numbers alone
        return int(value)
    if not isinstance(value, int | float):
        raise MetricError(f"`compute` gives a {type(value).__name__}, and should give a number, or a dict of numbers")
    return value
