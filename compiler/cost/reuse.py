"""What a look at a job finds and the next one, at a job much like it, finds again; and how much work they are.

A job is looked at for each count of its nodes, in each combination of its sweep and with each remedy. Most of these
have the same network, and those of a sweep over learning rates and seeds the same costs.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

from dslc.compiler.cost.cost import RankCost
from dslc.compiler.ir.facts import SourceFacts
from dslc.compiler.model.model import ModelGraph, build, share_out
from dslc.compiler.placement.staging import Staging
from dslc.dsl.bounds import WORK
from dslc.dsl.diagnostics import Report
from dslc.dsl.language.blocks import ModelSpec
from dslc.dsl.language.calls import Constant

READING = 15  # the work of reading a combination of a sweep, in the measure of `Layout.work`


class Reuse:
    """The last network and the last costs; `spent` is the work that all looks were."""

    def __init__(self) -> None:
        self.spent = self._largest = 0  # in the measure of `Layout.work`
        self._key: tuple[object, ...] = ()
        self._built: ModelGraph | None = None
        self._told = Report()
        self._shared_key: tuple[object, ...] = ()
        self._shared: ModelGraph | None = None
        self._staging: Staging | None = None
        self._costs: tuple[RankCost, ...] = ()

    @property
    def enough(self) -> bool:
        """Whether no further job is looked at."""
        return self.spent + self._largest > WORK.most

    def build(self, model: ModelSpec, source: SourceFacts, context: int | None, report: Report) -> ModelGraph | None:
        """As `build`."""
        key = (model, source, context)
        if key != self._key:
            self._key, self._told, self._shared = key, Report(), None
            self._built = build(model, source, context, self._told)
            self.spent += len(self._built.layers) if self._built else 0
        report.extend(self._told.found)
        return self._built

    def share_out(
        self, model: ModelSpec, source: SourceFacts, styles: Sequence[tuple[str, str]], ranks: int, pieces: int
    ) -> ModelGraph:
        """As `share_out`, of what was built last."""
        assert self._built is not None
        key = (styles, ranks, pieces)
        if self._shared is None or key != self._shared_key:
            self._shared_key = key
            self._shared = share_out(self._built, model, source, styles, ranks, pieces)
        return self._shared

    def costs(self, staging: Staging, find: Callable[[], tuple[RankCost, ...]]) -> tuple[RankCost, ...]:
        """What `find` gives, which is not asked where the last staging has the same costs."""
        last = self._staging
        if last is None or last.model is not staging.model or _costly(last) != _costly(staging):
            self._staging, self._costs = staging, find()
            work = staging.layout.work(len(staging.model.layers))
            self.spent, self._largest = self.spent + work, max(self._largest, work)
        return self._costs


def _costly(staging: Staging) -> tuple[object, ...]:
    """All that costs go by, but for the model: not random numbers, nor how fast it learns."""
    train = staging.job.train
    speed: dict[str, Any] = {"lr": 1.0} if hasattr(train.optimizer, "lr") else {}
    optimizer = replace(train.optimizer, **speed)
    job = replace(staging.job, train=replace(train, optimizer=optimizer, lr_schedule=Constant(), scale_lr=None, seed=0))
    return job, staging.layout, staging.workload, staging.stages, staging.placement
