"""Chooses the blocks that are recomputed, for `memory.recompute = budget(…)`: the peak of each rank stays within the
budget, with the least arithmetic.

Model: a rank's peak is the highest stop of its account (compiler/cost/account.py). A stop of layer n is the sum of
three parts: a peak of the layer, which depends on whether it and the layer before it are recomputed; what earlier
layers of the stage keep; and what the rank holds beside the action. The last grows with what its stages keep in all. So
the layers are gone through in order. Of the choices so far only those remain that no other choice surpasses: in FLOPs,
in kept bytes, and in the highest stop of each action (of one action, where several have the same peaks in each layer).
The account itself decides which of the final ones fit.

Contract: exact, as tests compare with all choices of small networks, unless more than `MOST_STATES` choices remain at a
layer, or `MOST_ACCOUNTS` of the final ones tell too little (`RecomputeBudget.exact`). Limits: a schedule that splits
the backward pass has no budget (E0444).
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterator, Mapping
from dataclasses import replace
from operator import le
from typing import NamedTuple

from dslc.compiler.cost.account import LayerPeaks, account, layer_peaks
from dslc.compiler.cost.rank_stages import LayerSizes
from dslc.compiler.ir.nodes import LayerNode
from dslc.compiler.placement.sharding import splits_backward
from dslc.compiler.placement.staging import Staging
from dslc.dsl.language.blocks import RecomputeBudget
from dslc.dsl.language.job import JobSpec

SEARCH = 6  # work of a search over the layers, in accounts of a plan
MOST_STATES = 4096  # choices that remain at a layer, at most
MOST_ACCOUNTS = 32  # choices in one order whose peaks are compared, at most


def choose_recomputation(staging: Staging) -> tuple[JobSpec, int]:
    """Returns the job with the blocks of its budget chosen, and the work, in accounts of a plan. The blocks are those
    of the smallest peak if none fit.

    A job whose schedule splits the backward pass recomputes all blocks.
    """
    job, model = staging.job, staging.model
    budget = job.memory.recompute
    assert isinstance(budget, RecomputeBudget)
    every_block = tuple(layer.name for layer in model.layers if layer.recomputable)
    if splits_backward(job) or not every_block:
        return _with_blocks(job, every_block), SEARCH
    ranks = range(staging.layout.sizes["pipeline"])
    none = _with_blocks(job, ())
    if all(_peak(staging, none, pipeline) <= budget.peak for pipeline in ranks):
        return none, SEARCH
    blocks: set[str] = set()
    is_exact, accounts = True, 0
    for pipeline in ranks:
        search = _RankSearch(staging, pipeline, frozenset(blocks))
        chosen = search.cheapest(budget.peak)
        blocks |= search.lowest() if chosen is None else chosen
        is_exact &= search.is_exact
        accounts += search.accounts
    chosen_job = _with_blocks(job, tuple(name for name in every_block if name in blocks), is_exact)
    return chosen_job, SEARCH + accounts // len(ranks)


def without_choice(job: JobSpec) -> JobSpec:
    """Returns the job as it was before the blocks of its budget were chosen."""
    budget = job.memory.recompute
    if not isinstance(budget, RecomputeBudget) or budget.blocks is None:
        return job
    return replace(job, memory=replace(job.memory, recompute=replace(budget, blocks=None, exact=True)))


def _with_blocks(job: JobSpec, blocks: tuple[str, ...], is_exact: bool = True) -> JobSpec:
    budget = job.memory.recompute
    assert isinstance(budget, RecomputeBudget)
    return replace(job, memory=replace(job.memory, recompute=replace(budget, blocks=blocks, exact=is_exact)))


def _peak(staging: Staging, job: JobSpec, pipeline: int) -> int:
    staging = replace(staging, job=job)
    return account(staging, pipeline, LayerSizes(staging)).peak


class _PartialChoice(NamedTuple):
    """A choice for the layers so far, in bytes. Compared by cost first."""

    cost: int  # FLOPs; of equal FLOPs, fewer blocks cost less
    kept: int  # by the layers of the current stage
    copies: int  # copies of weights that these layers keep
    totals: tuple[int, ...] = ()  # what earlier stages of the rank keep
    highest: tuple[int, ...] = ()  # stop of each action
    blocks: int = 0  # a bit for each layer of the rank that is recomputed

    @property
    def least_peak(self) -> int:
        """The highest stop without what the rank holds beside an action."""
        return max(self.highest, default=0)

    @property
    def sizes(self) -> tuple[int, ...]:
        return self.kept, self.kept + self.copies, *self.totals, *self.highest


class _LayerOption(NamedTuple):
    """A layer that is recomputed or not, after one that is or is not."""

    peaks: tuple[tuple[int, bool, int], ...]  # (action, whether copies are freed, bytes)
    kept: int
    copies: int


_Key = tuple[bool, bool]  # whether the layer before a layer is recomputed, and whether the layer is


class _RankSearch:
    """The search over the layers of the ranks at one pipeline coordinate. `others` are blocks of earlier ranks."""

    def __init__(self, staging: Staging, pipeline: int, others: frozenset[str]) -> None:
        self._staging, self._pipeline, self._others = staging, pipeline, others
        self._layers = {layer.name: layer for layer in staging.model.of_a_rank}
        self._has_schedule = staging.schedule is not None
        self._bytes: list[dict[_Key, _LayerOption]] = []
        self._fixed, self._actions = 0, dict[int, int]()
        for peaks, flags in self._recorded():
            self._add(peaks, flags)
        self._tracks = self._merge_actions()
        self.is_exact, self.accounts = True, 0

    def cheapest(self, limit: int) -> set[str] | None:
        """Returns the blocks with the least arithmetic whose peak is within the limit; None if there are none."""
        if self._fixed > limit:
            return None
        choices = [choice for choice in sorted(self._choices(limit)) if choice.least_peak <= limit]
        while len(choices) > MOST_ACCOUNTS:  # some of them, then those before the first of these that fits
            apart = len(choices) // MOST_ACCOUNTS + 1
            some = [*range(0, len(choices), apart), len(choices) - 1]
            fits = next((n for n in some if self._peak(choices[n]) <= limit), None)
            self.is_exact &= fits == 0
            if fits is None:
                return None
            choices = choices[max(0, fits - apart + 1) : fits + 1]
        return next((self._blocks(choice) for choice in choices if self._peak(choice) <= limit), None)

    def lowest(self) -> set[str]:
        """Returns the blocks of the smallest peak."""
        best: tuple[int, _PartialChoice] | None = None
        compared = 0
        for choice in sorted(self._choices(None), key=self._likely_peak):
            if best is not None and (best[0] <= self._fixed or choice.least_peak > best[0]):
                continue
            if compared == MOST_ACCOUNTS:
                self.is_exact = False
                break
            found = self._peak(choice), choice
            best, compared = found if best is None else min(best, found), compared + 1
        assert best is not None
        return self._blocks(best[1])

    def _likely_peak(self, choice: _PartialChoice) -> tuple[int, _PartialChoice]:
        """Returns what is near the peak of a choice: with a schedule, stages hold several micro-batches."""
        return choice.least_peak + (sum(choice.totals) if self._has_schedule else 0), choice

    def _blocks(self, choice: _PartialChoice) -> set[str]:
        return {name for n, name in enumerate(self._names) if choice.blocks >> n & 1}

    def _peak(self, choice: _PartialChoice) -> int:
        self.accounts += 1
        return _peak(self._staging, self._job_with(self._blocks(choice) | self._others), self._pipeline)

    def _job_with(self, blocks: set[str]) -> JobSpec:
        names = (layer.name for layer in self._staging.model.layers if layer.recomputable)
        return _with_blocks(self._staging.job, tuple(name for name in names if name in blocks))

    # ---------------------------------------------------------------------------------------------- bytes of layers

    def _recorded(self) -> Iterator[tuple[LayerPeaks, Mapping[str, _Key]]]:
        """Walks the step four times: with no block recomputed, all, every other one, and the rest. A layer and the one
        before it have then been in each of their four states.
        """
        layers = self._staging.model.layers
        for remainders in ((), (0, 1), (0,), (1,)):
            blocks = [layer.recomputable and n % 2 in remainders for n, layer in enumerate(layers)]
            flags = {
                layer.name: (before, own) for layer, before, own in zip(layers, [False, *blocks], blocks, strict=False)
            }
            job = self._job_with({layer.name for layer, own in zip(layers, blocks, strict=True) if own})
            staging = replace(self._staging, job=job)
            yield layer_peaks(staging, self._pipeline, LayerSizes(staging)), flags

    def _add(self, recorded: LayerPeaks, flags: Mapping[str, _Key]) -> None:
        self._fixed, self._stages = max(self._fixed, recorded.fixed), recorded.stages
        self._names = recorded.names
        by_layer: list[list[tuple[int, bool, int]]] = [[] for _ in range(len(recorded.names) + 1)]
        for (action, layer, is_freed), size in recorded.peaks.items():
            number = self._actions.setdefault(action if self._has_schedule else 0, len(self._actions))
            by_layer[layer].append((number, is_freed, size))
        if not self._bytes:
            self._bytes = [{} for _ in by_layer]
        for n, name in enumerate(recorded.names):
            layer_bytes = _LayerOption(tuple(by_layer[n]), recorded.kept[n], recorded.copies[n])
            self._bytes[n][flags[name]] = layer_bytes
        self._bytes[-1][False, False] = _LayerOption(tuple(by_layer[-1]), 0, 0)  # the loss

    def _merge_actions(self) -> int:
        """Gives actions with the same peaks in each layer, such as the passes of further micro-batches, one number.
        Returns how many numbers are left.
        """
        peaks_of: dict[int, list[tuple[int, _Key, bool, int]]] = {action: [] for action in self._actions.values()}
        for n, options in enumerate(self._bytes):
            for key, option in options.items():
                for action, is_freed, size in option.peaks:
                    peaks_of[action].append((n, key, is_freed, size))
        tracks: dict[tuple[tuple[int, _Key, bool, int], ...], int] = {}
        track_of = {action: tracks.setdefault(tuple(peaks), len(tracks)) for action, peaks in peaks_of.items()}
        for options in self._bytes:
            for key, option in options.items():
                peaks = dict.fromkeys((track_of[action], is_freed, size) for action, is_freed, size in option.peaks)
                options[key] = option._replace(peaks=tuple(peaks))
        return len(tracks)

    # --------------------------------------------------------------------------------------------------- the search

    def _choices(self, limit: int | None) -> list[_PartialChoice]:
        """Returns the choices that no other one surpasses. Without a limit FLOPs do not count; with one and without a
        schedule, all choices fit.
        """
        tracks = self._has_schedule or limit is None  # else each stop is compared with the limit at once
        front = {_FrontKey(): [_PartialChoice(0, 0, 0, highest=(0,) * self._tracks if tracks else ())]}
        starts = {stage.start for stage in self._stages}
        for n, name in enumerate((*self._names, None)):
            if n in starts and n > 0:
                front = _end_stage(front)
            extended: dict[_FrontKey, list[_PartialChoice]] = {}
            for last, choices in front.items():
                layer = self._layers[name] if name is not None else None
                for own in (False, True) if layer is not None and layer.recomputable else (False,):
                    firsts = (*last.firsts, own) if n in starts and self._has_schedule else last.firsts
                    cost = self._cost(layer) if layer is not None and own else 0
                    layer_bytes = self._bytes[n].get((last.block, own)) or self._bytes[n][False, False]
                    found = extended.setdefault(_FrontKey(own, firsts), [])
                    for choice in choices:
                        after = _extend(choice, layer_bytes, limit)
                        if after is not None:
                            found.append(after._replace(cost=choice.cost + cost, blocks=choice.blocks | own << n))
            key = None if limit is not None else _by_sizes
            front = {last: self._without_surpassed(sorted(found, key=key)) for last, found in extended.items()}
        return [choice for choices in front.values() for choice in choices]

    def _cost(self, layer: LayerNode) -> int:
        return layer.forward_flops * len(self._names) + 1

    def _without_surpassed(self, choices: list[_PartialChoice]) -> list[_PartialChoice]:
        """`choices` are in an order in which each is surpassed only by those before it."""
        remaining: list[_PartialChoice] = []
        remaining_sizes: list[tuple[int, ...]] = []
        ascending: list[tuple[int, int]] = []  # of two sizes: the lowest second ones by the first
        for choice in choices:
            sizes = choice.sizes
            if len(sizes) == 2:
                if not _lowers(ascending, *sizes):
                    continue
            elif any(all(map(le, others, sizes)) for others in remaining_sizes):
                continue
            remaining.append(choice)
            remaining_sizes.append(sizes)
        if len(remaining) <= MOST_STATES:
            return remaining
        self.is_exact = False
        return [*remaining[:: len(remaining) // MOST_STATES + 1], remaining[-1]]


class _FrontKey(NamedTuple):
    """The recomputation (true or false) of the last layer so far and, of a pipeline, of each stage's first layer."""

    block: bool = False
    firsts: tuple[bool, ...] = ()


def _by_sizes(choice: _PartialChoice) -> tuple[tuple[int, ...], _PartialChoice]:
    return choice.sizes, choice


def _end_stage(front: Mapping[_FrontKey, list[_PartialChoice]]) -> dict[_FrontKey, list[_PartialChoice]]:
    ended: dict[_FrontKey, list[_PartialChoice]] = {}
    for last, choices in front.items():
        ended.setdefault(_FrontKey(firsts=last.firsts), []).extend(
            choice._replace(kept=0, copies=0, totals=(*choice.totals, choice.kept + choice.copies))
            for choice in choices
        )
    return ended


def _extend(choice: _PartialChoice, layer: _LayerOption, limit: int | None) -> _PartialChoice | None:
    """Returns the choice with a further layer; None if a stop of it is above the limit."""
    highest = list(choice.highest)
    for action, is_freed, size in layer.peaks:
        size += choice.kept + (0 if is_freed else choice.copies)
        if limit is not None and size > limit:
            return None
        if highest:
            highest[action] = max(highest[action], size)
    return choice._replace(kept=choice.kept + layer.kept, copies=choice.copies + layer.copies, highest=tuple(highest))


def _lowers(ascending: list[tuple[int, int]], first: int, second: int) -> bool:
    """Adds a pair to those whose second sizes fall as the first ones rise; returns False if one surpasses it."""
    place = bisect_right(ascending, (first, second))
    if place and ascending[place - 1][1] <= second:
        return False
    end = place
    while end < len(ascending) and ascending[end][1] >= second:
        end += 1
    ascending[place:end] = [(first, second)]
    return True
