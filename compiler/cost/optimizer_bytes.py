"""Bytes of the optimizer's state and of its update, on one rank.

Model: torch's optimizers are declared (dsl/language/optimizers.py); a user's own was measured on the model's
parameters. Where a rank holds a part of a parameter, state with the parameter's shape is cut with it. A user's own
optimizer that was not tried counts as nothing, so the bytes are a lower bound.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from functools import cached_property
from typing import Any

from dslc.compiler.ir.network_facts import OptimizerFacts, StateFact
from dslc.compiler.ir.nodes import ModelGraph, ParameterNode
from dslc.compiler.placement.sharding import adamw_matrices
from dslc.dsl.language.job import JobSpec
from dslc.dsl.language.optimizers import Optimizer, PythonOptimizer

Updated = Iterable[tuple[ParameterNode, int]]  # parameters with the numbers of each that a rank updates


class OptimizerBytes:
    """The bytes for a job whose optimizer has `facts` if it is the user's own."""

    def __init__(self, job: JobSpec, facts: OptimizerFacts | None, model: ModelGraph) -> None:
        self._optimizer = job.train.optimizer
        self._adamw = adamw_matrices(job, model) or {}
        decay = max((group.weight_decay or 0.0 for group in job.train.groups), default=0.0)
        decays = decay and hasattr(self._optimizer, "weight_decay")  # some parameters, where the optimizer has none
        arguments: dict[str, Any] = {"weight_decay": decay} if decays else {}
        self._with_decay = replace(self._optimizer, **arguments)
        self._facts = (facts or OptimizerFacts()) if isinstance(self._optimizer, PythonOptimizer) else None

    @property
    def has_modes(self) -> bool:
        """True if the optimizer has `train()` and `eval()`, which exchange the weights."""
        return self._facts is not None and self._facts.modes

    def state(self, updated: Updated, *, counts: bool) -> int:
        """Returns the bytes of the state; with `counts`, numbers that lie in the host's memory count."""
        if self._facts is not None:
            return sum(self._of_one(q, numbers, counts) for q, numbers in updated)
        size = 0
        for q, numbers in updated:
            optimizer = self._optimizer_of(q)
            size += optimizer.state_bytes(q.shape, numbers) + (4 * len(optimizer.counts) if counts else 0)
        return size

    def scratch(self, updated: Updated) -> int:
        """Returns the bytes of temporary tensors in an update without a fused kernel."""
        if self._facts is None:
            shapes = [(q.shape, numbers) for q, numbers in updated if self._optimizer_of(q) is self._optimizer]
            return self._with_decay.scratch_bytes(shapes)  # the other optimizer has fused kernels
        sizes = [self._scratches.get(q.name, 0) * numbers // max(1, q.count) for q, numbers in updated]
        return sum(sizes) if self._facts.at_once else max(sizes, default=0)

    def of_a_number(self) -> float:
        """Returns the mean of the state's bytes for each number of a parameter."""
        if self._facts is None:
            return self._optimizer.bytes_of_a_number
        kinds = [sum(fact.bytes for fact in kind if fact.form == "like") for kind in self._facts.kinds]
        sizes = [kinds[kind] for _, kind, _ in self._facts.parameters]
        return sum(sizes) / len(sizes) if sizes else 0.0

    def _optimizer_of(self, parameter: ParameterNode) -> Optimizer:
        fallback = self._optimizer.fallback
        is_other = len(parameter.shape) != 2 or parameter.name in self._adamw
        return fallback if fallback is not None and is_other else self._optimizer

    def _of_one(self, parameter: ParameterNode, numbers: int, counts: bool) -> int:
        size = 0
        for fact in self._kinds.get(parameter.name, ()):
            if fact.form == "like":
                size += fact.bytes * numbers
            elif fact.form == "other" or counts:
                size += fact.bytes
        return size

    @cached_property
    def _kinds(self) -> dict[str, tuple[StateFact, ...]]:
        assert self._facts is not None
        return {name: self._facts.kinds[kind] for name, kind, _ in self._facts.parameters}

    @cached_property
    def _scratches(self) -> dict[str, int]:
        assert self._facts is not None
        return {name: scratch for name, _, scratch in self._facts.parameters}
