"""Caches the results of one analysis for the next, of a similar job, and counts the work.

A job is analysed for each count of its nodes, in each combination of its sweep and with each remedy. Most of these
analyses have the same network. The jobs of a sweep over learning rates and seeds also have the same costs.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from dslc.compiler.cost.cost import RankCost, rank_costs
from dslc.compiler.ir.facts import SourceFacts
from dslc.compiler.ir.tensor_styles import TensorStyle
from dslc.compiler.model.model import ModelGraph, build, share_out
from dslc.compiler.placement.staging import Staging
from dslc.dsl.bounds import WORK
from dslc.dsl.diagnostics import Findings, Report
from dslc.dsl.language.blocks import ModelSpec
from dslc.dsl.language.calls import Fp8
from dslc.dsl.language.lr_schedules import Constant

READING = 15  # work of reading a combination of a sweep, in units of `Layout.work`


class Reuse:
    """The last network and the last costs; `spent` is the work of all analyses."""

    def __init__(self) -> None:
        self.spent = self._largest = 0  # in units of `Layout.work`
        self._key: tuple[object, ...] = ()
        self._built: ModelGraph | None = None
        self._told = Report()
        self._shared_key: tuple[object, ...] = ()
        self._shared: ModelGraph | None = None
        self._staging: Staging | None = None
        self._costs: tuple[RankCost, ...] = ()
        self._accounted: list[tuple[Staging, tuple[RankCost, ...]]] = []

    @property
    def enough(self) -> bool:
        """True if no further job should be analysed."""
        return self.spent + self._largest > WORK.most

    def build(
        self, model: ModelSpec, source: SourceFacts, context: int | None, float8: Fp8 | None
    ) -> Findings[ModelGraph | None]:
        """Calls `build`, or returns the last network."""
        key = (model, source, context, float8)
        if key != self._key:
            self._key, self._told, self._shared = key, Report(), None
            self._built = self._told.collect(build(model, source, context, float8))
            self.spent += len(self._built.layers) if self._built else 0
        yield from self._told.found
        return self._built

    def share_out(
        self,
        model: ModelSpec,
        source: SourceFacts,
        styles: Sequence[tuple[str, TensorStyle]],
        ranks: int,
        pieces: int,
        *,
        experts: int,
        skew: float | None,
        on_cpu: bool,
        float8: Fp8 | None,
    ) -> ModelGraph:
        """Calls `share_out` on the last network, or returns its last result."""
        assert self._built is not None
        key = (styles, ranks, pieces, experts, skew, on_cpu, float8)
        if self._shared is None or key != self._shared_key:
            self._shared_key = key
            self._shared = share_out(
                self._built,
                model,
                source,
                styles,
                ranks,
                pieces,
                experts=experts,
                skew=skew,
                on_cpu=on_cpu,
                float8=float8,
            )
        return self._shared

    def keep_costs(self, staging: Staging, costs: tuple[RankCost, ...]) -> None:
        """Keeps the costs of a cut into stages, for the analysis that takes this cut."""
        if self._accounted and self._accounted[0][0].job is not staging.job:
            self._accounted = []
        self._accounted.append((staging, costs))

    def _costs_of_cut(self, staging: Staging) -> tuple[RankCost, ...]:
        """Returns the costs that the search for stages has computed for the same cut, or new ones."""
        for other, costs in self._accounted:
            alike = other.job is staging.job and other.model is staging.model and other.layout is staging.layout
            if alike and other.stages == staging.stages and other.schedule is staging.schedule:
                return costs
        return rank_costs(staging)

    def costs(self, staging: Staging) -> tuple[RankCost, ...]:
        """Returns the costs of all ranks, which are the last ones if their staging has the same costs."""
        last_staging = self._staging
        if last_staging is None or last_staging.model is not staging.model or _costly(last_staging) != _costly(staging):
            self._staging, self._costs = staging, self._costs_of_cut(staging)
            work = staging.layout.work(len(staging.model.layers))
            self.spent, self._largest = self.spent + work, max(self._largest, work)
        return self._costs


def _costly(staging: Staging) -> tuple[object, ...]:
    """Returns all properties that costs depend on, except the model: not seeds, nor learning rates."""
    train = staging.job.train
    speed: dict[str, Any] = {"lr": 1.0} if hasattr(train.optimizer, "lr") else {}
    optimizer = replace(train.optimizer, **speed)
    job = replace(staging.job, train=replace(train, optimizer=optimizer, lr_schedule=Constant(), scale_lr=None, seed=0))
    return job, staging.layout, staging.workload, staging.stages, staging.placement, staging.optimizer
