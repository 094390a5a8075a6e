"""The most that a rank holds during each action of a step, from the account of its peak (compiler/cost/account.py).

Model: the account walks actions that are alike once, beside the most that the rank holds beside any of them. Here each
action of the schedule has the highest stop of those like it, beside what the rank holds beside that action.

Contract: the largest over a step is the peak of the account.

Limits: the account has no stop between two actions.
"""

from __future__ import annotations

from collections.abc import Mapping

from dslc.compiler.cost.account import NEVER, MemoryAccount
from dslc.compiler.cost.loss_bytes import LossBytes
from dslc.compiler.cost.rank_stages import ActionMemory, StageMemory
from dslc.compiler.rules.analysis import Analysis
from dslc.dsl.record import Record, record

ActionPlace = tuple[str, int, int]  # kind, stage, micro-batch


@record
class MemoryMoments(Record):
    """Bytes of the rank that holds most at one pipeline coordinate: the most during each of `actions`, during the
    forward passes `ahead`, and at the `end`: in the exchange, the update and between two steps.
    """

    actions: Mapping[ActionPlace, int]
    ahead: int
    end: int

    @property
    def peak(self) -> int:
        return max(self.ahead, self.end, *self.actions.values())


def memory_moments(analysis: Analysis) -> tuple[MemoryMoments, ...]:
    """Returns the moments by pipeline coordinate; () for a job whose network was not traced."""
    staging = analysis.staging
    if staging is None:
        return ()
    count = staging.layout.microbatches if staging.schedule is None else 0
    return tuple(_MomentRecorder(cost.staging, cost.pipeline, cost.sizes).moments(count) for cost in analysis.costs)


class _MomentRecorder(MemoryAccount):
    """Walks a step, and records the highest stop of each kind of action."""

    def moments(self, microbatches: int) -> MemoryMoments:
        """Returns the moments. The walk of a rank without a schedule stands for that many micro-batches."""
        self._action: ActionMemory | None = None
        self._is_ahead = False
        self._ahead = self._end = 0
        self._highest: dict[int, int] = {}  # without what is beside the action, by the identity of its record
        self.highest()
        actions: dict[ActionPlace, int] = {}
        for action, memory, beside in self._rank.steps:
            if id(memory) in self._highest:
                actions[action.kind, action.stage, action.microbatch] = self._highest[id(memory)] + beside
        if microbatches > 3:  # the walk has the first, one of those between, and the last
            for (kind, stage, n), size in list(actions.items()):
                shown = range(2, microbatches - 1) if n == 1 else [microbatches - 1] if n == 2 else []
                actions |= {(kind, stage, m): size for m in shown}
        return MemoryMoments(actions=actions, ahead=self._ahead, end=self._end)

    def _walk(self, microbatch: int, split: bool) -> None:
        super()._walk(microbatch, split)
        self._action = None

    def _enter(self, stage: StageMemory, kind: str, action: ActionMemory) -> None:
        super()._enter(stage, kind, action)
        self._action = action

    def _forward_all_microbatches(self, loss: LossBytes | None) -> None:
        self._is_ahead = True
        super()._forward_all_microbatches(loss)
        self._is_ahead = False

    def _note_total(self, total: int, layer: int | None, by_layer: bool) -> None:
        if self._is_ahead:
            self._ahead = max(self._ahead, total)
        elif self._action is None:
            self._end = max(self._end, total)
        elif self._action.beside != NEVER:
            key = id(self._action)
            self._highest[key] = max(self._highest.get(key, 0), total - self._action.beside)
